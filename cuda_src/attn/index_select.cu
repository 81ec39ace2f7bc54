// index_select: the `budget` blocks that a row attends to.
// Contract    score f32 [rows_cap][max_blocks] -> sel u32 [rows_cap][budget], the best blocks of the (position+1)/4
//             complete ones, rising ids, written only when there are more of them than `budget`; flag u32 [rows_cap],
//             always written: 1 when a score is NaN (then NaNs count as the best), else 0.
// Launch      grid (rows_cap), block 512.  Shared: a histogram of 2048 digits, a few words a warp.
// Arithmetic  order index_pick_v1: score descending, NaN above all, -0 equal to +0, equal scores by rising id.
//             Integers only: radix selection of the last chosen key by digits of 11, 11 and 10 bits, then every warp
//             writes its range of blocks at the place that the counts before it give.
// Equality    the result is a set given by its definition; nothing depends on the launch.
// Reference   ref/attn.py.  Source: QSA step 5, ties to the lower block.
#include "attn/pages.cuh"

namespace FN_NAMESPACE {

#define FN_DIGITS 2048u
#define FN_WARPS (FN_THREADS / 32u)

struct Shared {
    u32 count[FN_DIGITS];
    u32 warp_better[FN_WARPS], warp_equal[FN_WARPS];
    u32 digit, before, any_nan, pad;
};

// A key that is smaller for a better score.
FN_DEVICE u32 key_of(float x) {
    if (x != x) return 0u;
    u32 u = fn_f2u(x);
    if ((u << 1) == 0u) u = 0u;
    return ~((u >> 31) ? ~u : u | 0x80000000u);
}

// Sum of the lanes before this one.
FN_DEVICE u32 lanes_before(u32 v, u32 lane) {
    u32 sum = v;
#pragma unroll
    for (u32 d = 1; d < 32; d <<= 1) {
        u32 up = fn_shfl_up(sum, d);
        if (lane >= d) sum += up;
    }
    return sum - v;
}

// Sets digit and before: the first digit up to which at least `want` keys were counted, and how many lie before it.
// Each thread owns 4 neighbouring digits.
FN_DEVICE void find_digit(Shared& s, u32 want) {
    u32 lane = threadIdx.x & 31u, warp = threadIdx.x >> 5;
    uint4 c = *reinterpret_cast<const uint4*>(&s.count[4u * threadIdx.x]);
    u32 mine = c.x + c.y + c.z + c.w, before = lanes_before(mine, lane);
    if (lane == 31u) s.warp_better[warp] = before + mine;
    __syncthreads();
    for (u32 w = 0; w < warp; w++) before += s.warp_better[w];
    if (before < want && want <= before + mine) {  // one thread
        u32 digit = 4u * threadIdx.x, own[3] = {c.x, c.y, c.z};
#pragma unroll
        for (u32 i = 0; i < 3; i++) {
            if (digit != 4u * threadIdx.x + i || before + own[i] >= want) continue;
            before += own[i];
            digit++;
        }
        s.digit = digit;
        s.before = before;
    }
    __syncthreads();
}

}  // namespace FN_NAMESPACE

static_assert(FN_DIGITS == 4u * FN_THREADS, "a thread owns four digits");

FN_KERNEL((const FnRound* round, const FnRow* rows, const float* score, u32* sel, u32* flag, u32 max_blocks,
           u32 budget)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(Shared, s);
    u32 r = blockIdx.x, tid = threadIdx.x, lane = tid & 31u, warp = tid >> 5;
    if (r >= round->n_rows) return;
    u32 seen = fn_blocks_seen(rows[r].position);
    if (seen <= budget) {
        if (tid == 0u) flag[r] = 0u;
        return;
    }
    const float* x = score + (size_t)r * max_blocks;

    // The key of the last chosen block, digit by digit; `want` of the keys that share its digits so far are chosen.
    u32 prefix = 0u, mask = 0u, want = budget;
    bool nan = false;
    if (tid == 0u) s.any_nan = 0u;
#pragma unroll
    for (u32 pass = 0; pass < 3; pass++) {
        u32 shift = pass == 0 ? 21u : pass == 1 ? 10u : 0u, last = pass == 2 ? 1023u : 2047u;
        *reinterpret_cast<uint4*>(&s.count[4u * tid]) = make_uint4(0u, 0u, 0u, 0u);
        __syncthreads();
#pragma unroll 4
        for (u32 i = tid; i < seen; i += FN_THREADS) {
            float v = fn_ldg(x + i);
            u32 key = key_of(v);
            if (pass == 0) nan = nan || v != v;
            if ((key & mask) == prefix) fn_atomic_add_u32(&s.count[key >> shift & last], 1u);
        }
        if (pass == 0 && nan) fn_atomic_or_u32(&s.any_nan, 1u);
        __syncthreads();
        find_digit(s, want);
        prefix |= s.digit << shift;
        mask |= last << shift;
        want -= s.before;
    }
    if (tid == 0u) flag[r] = s.any_nan;

    // Each warp takes a range of whole 32s: counts first, then, knowing the counts before it, the ids.
    u32 each = ((seen + 31u) / 32u + FN_WARPS - 1u) / FN_WARPS * 32u;
    u32 from = fn_min_u32(warp * each, seen), to = fn_min_u32(from + each, seen);
    u32 better = 0u, equal = 0u;
    for (u32 i = from + lane; i < to; i += 32u) {
        u32 key = key_of(fn_ldg(x + i));
        better += key < prefix;
        equal += key == prefix;
    }
    better = fn_warp_sum_u32(better);
    equal = fn_warp_sum_u32(equal);
    if (lane == 0u) {
        s.warp_better[warp] = better;
        s.warp_equal[warp] = equal;
    }
    __syncthreads();
    better = equal = 0u;
    for (u32 w = 0; w < warp; w++) {
        better += s.warp_better[w];
        equal += s.warp_equal[w];
    }
    u32* out = sel + (size_t)r * budget;
    u32 below = (1u << lane) - 1u;
    for (u32 i = from; i < to; i += 32u) {
        u32 key = i + lane < to ? key_of(fn_ldg(x + i + lane)) : 0xffffffffu;
        bool is_better = key < prefix, is_equal = key == prefix && i + lane < to;
        u32 b = fn_ballot(is_better), e = fn_ballot(is_equal);
        u32 equal_before = equal + fn_popc(e & below);
        if (is_better || (is_equal && equal_before < want))
            out[better + fn_popc(b & below) + fn_min_u32(equal_before, want)] = i + lane;
        better += fn_popc(b);
        equal += fn_popc(e);
    }
}
