// index_select: the `budget` blocks that a row attends to.
// Contract    score f32 [grid rows][max_blocks] -> sel u32 [rows_cap][budget], the best blocks of the (position+1)/4
//             complete ones, rising ids, written only when there are more of them than `budget`; flag u32 [rows_cap],
//             always written: 1 when a score is NaN (then NaNs count as the best), else 0.
// Launch      grid (rows), block 512, shared 41 KB.  Block i is row first_row + i, its scores lie at row i.
// Arithmetic  order index_pick_v1: score descending, NaN above all, -0 equal to +0, equal scores by rising id.
//             Integers only.  A score becomes a key that is smaller for a better score; the last chosen key is found
//             digit by digit (11, 11, 10 bits) from histograms.  Of more than 2048 blocks first only candidates are
//             kept: with 2048 groups of blocks, the budget-th best of the groups' best keys is at least as bad as the
//             key looked for.  Ids come out in order from bitmaps of the chosen.  Too many candidates (ties, or a
//             budget above 2048) or blocks beyond the bitmap: the same from the scores themselves.
// Equality    the result is a set given by its definition; nothing depends on the launch or on the way taken.
// Reference   ref/attn.py.  Source: QSA step 5, ties to the lower block.
#include "attn/pages.cuh"

namespace FN_NAMESPACE {

#define FN_DIGITS 2048u
#define FN_CANDIDATES 2048u
#define FN_WORDS 2048u  // of a bitmap: 65,536 blocks, 262,144 tokens
#define FN_AHEAD 8u     // 16-byte loads in flight a thread
#define FN_WARPS (FN_THREADS / 32u)

struct Shared {
    u32 count[FN_DIGITS];
    u32 key[FN_CANDIDATES], id[FN_CANDIDATES];
    u32 better[FN_WORDS], equal[FN_WORDS];
    u32 warp_a[FN_WARPS], warp_b[FN_WARPS];
    u32 digit, before, any_nan, n_candidates;
};

FN_DEVICE u32 key_of(float x) {
    if (x != x) return 0u;
    u32 u = fn_f2u(x);
    if ((u << 1) == 0u) u = 0u;
    return ~((u >> 31) ? ~u : u | 0x80000000u);
}

// The score whose key this is (any NaN for 0).
FN_DEVICE float score_of(u32 key) {
    if (key == 0u) return fn_nan();
    return fn_u2f(~key >> 31 ? ~key & 0x7fffffffu : key);
}

// f(i, x[i], lane of the 16-byte word) for every i below n, spread over the block.
template <class F> FN_DEVICE void each_score(const float* x, u32 n, const F& f) {
    u32 head = fn_min_u32((0u - (u32)(reinterpret_cast<u64>(x) >> 2)) & 3u, n);  // scores before the first whole word
    u32 words = (n - head) / 4u, tail = head + 4u * words, tid = threadIdx.x;
    const float4* w = reinterpret_cast<const float4*>(x + head);
    if (tid < head) f(tid, fn_ld(x + tid), 0u);
    if (tail + tid < n) f(tail + tid, fn_ld(x + tail + tid), 0u);
    for (u32 i = tid; i < words; i += FN_AHEAD * FN_THREADS) {
        float4 v[FN_AHEAD];
#pragma unroll
        for (u32 k = 0; k < FN_AHEAD; k++)
            if (i + k * FN_THREADS < words) v[k] = fn_ld(w + i + k * FN_THREADS);
#pragma unroll
        for (u32 k = 0; k < FN_AHEAD; k++) {
            u32 at = head + 4u * (i + k * FN_THREADS);
            if (i + k * FN_THREADS >= words) continue;
            f(at, v[k].x, 0u);
            f(at + 1u, v[k].y, 1u);
            f(at + 2u, v[k].z, 2u);
            f(at + 3u, v[k].w, 3u);
        }
    }
}

// Sum of `v` over the threads before this one.  warps: not the array of a call since the last barrier.
FN_DEVICE u32 threads_before(u32 (&warps)[FN_WARPS], u32 v) {
    u32 lane = threadIdx.x & 31u, warp = threadIdx.x >> 5, sum = v;
#pragma unroll
    for (u32 d = 1; d < 32; d <<= 1) {
        u32 up = fn_shfl_up(sum, d);
        if (lane >= d) sum += up;
    }
    if (lane == 31u) warps[warp] = sum;
    __syncthreads();
    sum -= v;
#pragma unroll
    for (u32 w = 0; w < FN_WARPS; w++) sum += w < warp ? warps[w] : 0u;
    return sum;
}

// Where `pick` finds its keys: the first n of the list, or all scores.
struct Listed {
    const u32* key;
    u32 n;
    template <class F> FN_DEVICE void operator()(const F& f) const {
        for (u32 i = threadIdx.x; i < n; i += FN_THREADS) f(key[i]);
    }
};
struct Scores {
    const float* x;
    u32 n;
    template <class F> FN_DEVICE void operator()(const F& f) const {
        each_score(x, n, [&](u32, float v, u32) { f(key_of(v)); });
    }
};

// The want-th smallest key; visit(f) calls f(key) for the block's keys.  want becomes its place among its equals.
template <class Visit> FN_DEVICE u32 pick(Shared& s, u32& want, const Visit& visit) {
    u32 prefix = 0u, mask = 0u;
#pragma unroll 1
    for (u32 pass = 0; pass < 3; pass++) {
        u32 shift = pass == 0u ? 21u : pass == 1u ? 10u : 0u, last = pass == 2u ? 1023u : 2047u;
        *reinterpret_cast<uint4*>(&s.count[4u * threadIdx.x]) = make_uint4(0u, 0u, 0u, 0u);
        __syncthreads();
        visit([&](u32 key) {
            if ((key & mask) == prefix) fn_atomic_add_u32(&s.count[key >> shift & last], 1u);
        });
        __syncthreads();
        uint4 c = *reinterpret_cast<const uint4*>(&s.count[4u * threadIdx.x]);
        u32 own[4] = {c.x, c.y, c.z, c.w};
        u32 before = threads_before(s.warp_a, c.x + c.y + c.z + c.w);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (before < want && want <= before + own[i]) {  // one digit of one thread
                s.digit = 4u * threadIdx.x + i;
                s.before = before;
            }
            before += own[i];
        }
        __syncthreads();
        prefix |= s.digit << shift;
        mask |= last << shift;
        want -= s.before;
    }
    return prefix;
}

// Chosen ids in order from a list without order: all keys below `last`, and the first `want` of those equal to it.
// A candidate's place is the number of chosen ones before it in the bitmaps.
FN_DEVICE void emit_candidates(Shared& s, u32 n, u32 last, u32 want, u32* out) {
    u32 tid = threadIdx.x, first = 4u * tid;
    *reinterpret_cast<uint4*>(&s.better[first]) = make_uint4(0u, 0u, 0u, 0u);
    *reinterpret_cast<uint4*>(&s.equal[first]) = make_uint4(0u, 0u, 0u, 0u);
    __syncthreads();
    for (u32 i = tid; i < n; i += FN_THREADS) {
        u32 id = s.id[i];
        if (s.key[i] < last) fn_atomic_or_u32(&s.better[id / 32u], 1u << id % 32u);
        if (s.key[i] == last) fn_atomic_or_u32(&s.equal[id / 32u], 1u << id % 32u);
    }
    __syncthreads();
    u32 own[4], total = 0u;  // better in the upper half, equal in the lower: neither exceeds the list
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        own[i] = fn_popc(s.better[first + i]) << 16 | fn_popc(s.equal[first + i]);
        total += own[i];
    }
    u32 before = threads_before(s.warp_b, total);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        s.count[first + i] = before;
        before += own[i];
    }
    __syncthreads();
    for (u32 i = tid; i < n; i += FN_THREADS) {
        u32 id = s.id[i], key = s.key[i], below = (1u << id % 32u) - 1u, base = s.count[id / 32u];
        u32 better = (base >> 16) + fn_popc(s.better[id / 32u] & below);
        u32 equal = (base & 0xffffu) + fn_popc(s.equal[id / 32u] & below);
        if (key < last || (key == last && equal < want)) out[better + fn_min_u32(equal, want)] = id;
    }
}

// The same where key_at(i) is block i's key: each warp takes a range of whole 32s; counts first, then, knowing those
// before it, the ids.
template <class KeyAt>
FN_DEVICE void emit_ranges(Shared& s, const KeyAt& key_at, u32 n, u32 last, u32 want, u32* out) {
    u32 lane = threadIdx.x & 31u, warp = threadIdx.x >> 5;
    u32 each = ((n + 31u) / 32u + FN_WARPS - 1u) / FN_WARPS * 32u;
    u32 from = fn_min_u32(warp * each, n), to = fn_min_u32(from + each, n), better = 0u, equal = 0u;
    for (u32 i = from + lane; i < to; i += 32u) {
        u32 key = key_at(i);
        better += key < last;
        equal += key == last;
    }
    better = fn_warp_sum_u32(better);
    equal = fn_warp_sum_u32(equal);
    if (lane == 0u) {
        s.warp_a[warp] = better;
        s.warp_b[warp] = equal;
    }
    __syncthreads();
    better = equal = 0u;
#pragma unroll
    for (u32 w = 0; w < FN_WARPS; w++) {
        better += w < warp ? s.warp_a[w] : 0u;
        equal += w < warp ? s.warp_b[w] : 0u;
    }
    u32 below = (1u << lane) - 1u;
    for (u32 i = from; i < to; i += 32u) {
        bool live = i + lane < to;
        u32 key = live ? key_at(i + lane) : 0xffffffffu;
        bool is_better = live && key < last, is_equal = live && key == last;
        u32 b = fn_ballot(is_better), e = fn_ballot(is_equal), equal_before = equal + fn_popc(e & below);
        if (is_better || (is_equal && equal_before < want))
            out[better + fn_popc(b & below) + fn_min_u32(equal_before, want)] = i + lane;
        better += fn_popc(b);
        equal += fn_popc(e);
    }
}

}  // namespace FN_NAMESPACE

static_assert(FN_DIGITS == 4u * FN_THREADS && FN_CANDIDATES == 4u * FN_THREADS && FN_WORDS == 4u * FN_THREADS,
              "a thread owns four digits, groups and words");

FN_KERNEL((const FnRound* round, const FnRow* rows, const float* score, u32* sel, u32* flag, u32 max_blocks,
           u32 budget, u32 first_row)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(Shared, s);
    fn_let_next();
    u32 r = first_row + blockIdx.x, tid = threadIdx.x, n_rows = fn_ld_here(&round->n_rows), n = 0;
    if (r < n_rows) n = fn_blocks_seen(fn_ld_here(&rows[r].position));
    if (tid == 0u) s.any_nan = s.n_candidates = 0u;
    __syncthreads();

    fn_wait_prior();
    if (r >= n_rows) return;
    if (n <= budget) {
        if (tid == 0u) flag[r] = 0u;
        return;
    }
    const float* x = score + (size_t)blockIdx.x * max_blocks;
    u32* out = sel + (size_t)r * budget;
    u32 n_candidates = n;
    if (n <= FN_CANDIDATES) {
        float v[FN_CANDIDATES / FN_THREADS];  // all at once
#pragma unroll
        for (u32 k = 0; k < FN_CANDIDATES / FN_THREADS; k++)
            if (tid + k * FN_THREADS < n) v[k] = fn_ld_here(x + tid + k * FN_THREADS);
#pragma unroll
        for (u32 k = 0; k < FN_CANDIDATES / FN_THREADS; k++) {
            if (tid + k * FN_THREADS >= n) continue;
            if (v[k] != v[k]) s.any_nan = 1u;
            s.key[tid + k * FN_THREADS] = key_of(v[k]);
        }
    } else {
        float best[4] = {fn_u2f(0xff800000u), fn_u2f(0xff800000u), fn_u2f(0xff800000u), fn_u2f(0xff800000u)};
        bool nan[4] = {false, false, false, false};
        each_score(x, n, [&](u32, float v, u32 j) {
            best[j] = v > best[j] ? v : best[j];
            nan[j] = nan[j] || v != v;
        });
#pragma unroll
        for (u32 j = 0; j < 4; j++) s.key[4u * tid + j] = nan[j] ? 0u : key_of(best[j]);
        if (nan[0] || nan[1] || nan[2] || nan[3]) s.any_nan = 1u;
        bool listed = budget <= FN_CANDIDATES && n <= 32u * FN_WORDS;
        if (listed) {
            u32 place = budget;
            float bound = score_of(pick(s, place, Listed{s.key, FN_CANDIDATES}));
            each_score(x, n, [&](u32 i, float v, u32) {
                if (v < bound || (bound != bound && v == v)) return;
                u32 at = fn_atomic_add_u32(&s.n_candidates, 1u);
                if (at >= FN_CANDIDATES) return;
                s.key[at] = key_of(v);
                s.id[at] = i;
            });
            __syncthreads();
            n_candidates = s.n_candidates;
        }
    }

    u32 want = budget;
    if (n <= FN_CANDIDATES) {
        u32 last = pick(s, want, Listed{s.key, n});
        emit_ranges(s, [&](u32 i) { return s.key[i]; }, n, last, want, out);
    } else if (n_candidates <= FN_CANDIDATES) {
        u32 last = pick(s, want, Listed{s.key, n_candidates});
        emit_candidates(s, n_candidates, last, want, out);
    } else {
        u32 last = pick(s, want, Scores{x, n});
        emit_ranges(s, [&](u32 i) { return key_of(fn_ld(x + i)); }, n, last, want, out);
    }
    if (tid == 0u) flag[r] = s.any_nan;
}
