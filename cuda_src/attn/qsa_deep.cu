// qsa_deep: attention of one row and kv head over all its parts, output gate, and the operand of o_proj; for many
// rows, where the device is full without cutting a row into parts.
// Contract    q f32 [rows_cap][n_q][512] (query | gate), q16 f16 [rows_cap][n_q][256], K and V in the row's pages,
//             sel u32 [rows_cap][budget] (rising; read only when the row sees more blocks than `budget`), flag u32
//             [rows_cap] -> linear->x, K = 256 n_q.  A row with flag != 0 gives NaN.  n_q / n_kv is 1..16.
//             Keys and values of tokens that are not attended are never read.  linear: one FnLinear, o_proj.
// Launch      grid (n_kv, rows_cap), block 128, shared 83.8 KB (dynamic); two blocks an SM where they fit.
// Arithmetic  order qsa_attn_v1: parts as in qsa_attn, each merged into the sums before it as soon as it is there, as
//             in qsa_merge.  A warp scores 16 entries of a part, keeps m and l of 4 heads, and sums 64 dimensions of
//             all heads of the group.
// Pipeline    a warp copies the keys of its own entries and its own dimensions of all values, and nobody else reads
//             them: part p + 1's keys are under way from the last score of part p on, its values from the last mma of
//             part p on.  Two barriers a part: scores before weights, weights before sums.
// Equality    bytes of qsa_attn followed by qsa_merge.
// Reference   ref/attn.py.  Source: QSA step 6.
#include "attn/pages.cuh"
#include "attn/queries.cuh"
#include "async.cuh"
#include "exl3.cuh"
#include "mma.cuh"

namespace FN_NAMESPACE {

#define FN_WARPS (FN_THREADS / 32u)

struct Shared {
    u16 key[FN_PART][272];      // pitches that spread the reads of 8 entries over the banks
    u16 value[FN_PART][264];
    uint2 query[2][16][32];     // B operands of 8 heads: by k step and lane
    float s[16][72];            // scores by head and entry
    u16 e[16][72];              // f16 weights, likewise for mma loads
    float2 factor[16];          // by head: of the sums so far and of the part's
    float l[16];
};
struct Output {
    float o[16][260];  // of the group's heads; in the place of the keys
};
static_assert(sizeof(Output) <= sizeof(Shared::key), "the output lies where the keys were");

// What a row attends to, by groups of up to 4 tokens: a block of tokens never lies on two pages.
struct Attended {
    const FnPage* pages;
    const u32* sel;  // 0 within the budget
    u64 offset;      // from page.kv to the head's first key
    u32 count, budget, seen, n_kv;

    // Block of the lane's group of a part; beyond the last group the last one.
    FN_DEVICE u32 block(u32 part, u32 lane) const {
        u32 at = fn_min_u32(part * (FN_PART / FN_BLOCK_TOKENS) + (lane & 15u), (count - 1u) / FN_BLOCK_TOKENS);
        if (!sel) return at;
        return at < budget ? fn_ldg(sel + at) : seen;
    }
    // Address of the key of a block's first token.
    FN_DEVICE u64 address(u32 block) const {
        u32 entry = block % FN_PAGE_BLOCKS * FN_BLOCK_TOKENS;
        return pages[block / FN_PAGE_BLOCKS].kv + offset + (u64)(entry * n_kv * (FN_HEAD * 2u));
    }
};

// Keys of the warp's 16 entries, an entry at a time; absent ones are entries of the last group.  group: addresses, by
// lane.
FN_DEVICE void copy_keys(Shared& sh, u64 group, u32 step, u32 live, u32 warp, u32 lane) {
    if (16u * warp < live) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 index = 4u * warp + i, last = index < (live - 1u) / FN_BLOCK_TOKENS ? 3u : (live - 1u) & 3u;
            u64 at = fn_shfl(group, index) + 16u * lane;
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                fn_cp_async16(&sh.key[FN_BLOCK_TOKENS * index + j][8u * lane],
                              reinterpret_cast<const void*>(at + fn_min_u32(j, last) * step));
        }
    }
    fn_cp_async_commit();
}

// The warp's 64 dimensions of all values, a group at a time; absent ones zero, as 0 times an infinity would be NaN.
FN_DEVICE void copy_values(Shared& sh, u64 group, u32 step, u64 to_value, u32 live, u32 warp, u32 lane) {
    u32 token = lane >> 3, piece = 64u * warp + 8u * (lane & 7u);
#pragma unroll
    for (u32 i = 0; i < FN_PART / FN_BLOCK_TOKENS; i++) {
        u64 at = fn_shfl(group, i) + to_value + token * step + 2u * piece;
        u32 entry = FN_BLOCK_TOKENS * i + token;
        u16* to = &sh.value[entry][piece];
        if (entry < live)
            fn_cp_async16(to, reinterpret_cast<const void*>(at));
        else
            *reinterpret_cast<uint4*>(to) = make_uint4(0u, 0u, 0u, 0u);
    }
    fn_cp_async_commit();
}

// Scores of the warp's 16 entries.
template <int Tiles> FN_DEVICE void scores(Shared& sh, u32 warp, u32 lane) {
    u32 g = lane >> 2, t = lane & 3u, entry = 16u * warp + g;
    float d[Tiles][4];
#pragma unroll
    for (u32 n = 0; n < Tiles; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) d[n][i] = 0.f;
#pragma unroll
    for (u32 s = 0; s < 16; s++) {
        uint2 low = *reinterpret_cast<const uint2*>(&sh.key[entry][16u * s + 4u * t]);
        uint2 high = *reinterpret_cast<const uint2*>(&sh.key[entry + 8u][16u * s + 4u * t]);
        u32 a[4] = {low.x, high.x, low.y, high.y};
#pragma unroll
        for (u32 n = 0; n < Tiles; n++) {
            uint2 w = sh.query[n][s][lane];
            u32 b[2] = {w.x, w.y};
            fn_mma_f16(d[n], a, b);
        }
    }
#pragma unroll
    for (u32 n = 0; n < Tiles; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) sh.s[8u * n + 2u * t + (i & 1u)][entry + 8u * (i >> 1)] = fn_mul(d[n][i], 0.0625f);
}

// fn_max but for the sign of a zero, which no difference of maxima shows; without branches.
FN_DEVICE float higher(float a, float b) { return a > b || a != a ? a : b; }

// Weights of a part, m and l, and how it joins the parts before: 8 lanes a head, lane j of them holding entries
// j, j + 8, ...  m, l: of all parts so far, in each of the 8 lanes.
FN_DEVICE void weights(Shared& sh, u32 live, u32 group, u32 warp, u32 lane, bool first, float& m, float& l) {
    u32 h = 4u * warp + (lane >> 3), j = lane & 7u;
    if (4u * warp >= group) return;
    float e[8], pm = fn_u2f(0xff800000u);
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        e[i] = h < group && j + 8u * i < live ? sh.s[h][j + 8u * i] : fn_u2f(0xff800000u);
        pm = higher(pm, e[i]);
    }
#pragma unroll
    for (u32 d = 4; d; d >>= 1) pm = higher(pm, fn_shfl_xor(pm, d));
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        float w = fn_exp_down(fn_sub(e[i], pm));
        e[i] = j + 8u * i < live ? w : 0.f;
        sh.e[h][j + 8u * i] = fn_f2h(e[i]);
    }
    float pl = fn_add(fn_add(fn_add(e[0], e[4]), fn_add(e[2], e[6])), fn_add(fn_add(e[1], e[5]), fn_add(e[3], e[7])));
#pragma unroll
    for (u32 d = 4; d; d >>= 1) pl = fn_add(pl, fn_shfl_xor(pl, d));
    if (first) {
        m = pm;
        l = pl;
        return;
    }
    float top = higher(m, pm), a = fn_exp_down(fn_sub(m, top)), b = fn_exp_down(fn_sub(pm, top));
    l = fn_fma(pl, b, fn_mul(l, a));
    m = top;
    if (j == 0u) sh.factor[h] = make_float2(a, b);
}

// The part's sums of the warp's 64 dimensions, joined into o: row g of tile i is dimension 16i + g, row g + 8 the 8th
// after it; columns 2t, 2t + 1 of tile n are heads 8n + 2t and the next.
template <int Tiles>
FN_DEVICE void values(const Shared& sh, u32 live, u32 group, u32 warp, u32 lane, bool first, float (&o)[Tiles][4][4]) {
    u32 g = lane >> 2, t = lane & 3u;
    float d[Tiles][4][4];
#pragma unroll
    for (u32 n = 0; n < Tiles; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) d[n][i][j] = 0.f;
#pragma unroll
    for (u32 s = 0; s < 4; s++) {
        if (16u * s >= live) continue;
        u32 b[Tiles][2];
#pragma unroll
        for (u32 n = 0; n < Tiles; n++)
#pragma unroll
            for (u32 j = 0; j < 2; j++)
                b[n][j] = *reinterpret_cast<const u32*>(
                    &sh.e[8u * n + g < group ? 8u * n + g : 0u][16u * s + 2u * t + 8u * j]);
        const u16* from = &sh.value[16u * s + (lane & 7u) + 8u * (lane >> 4)][64u * warp + (lane & 8u)];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 a[4];
            fn_ldmatrix_x4_trans(a, from + 16u * i);
#pragma unroll
            for (u32 n = 0; n < Tiles; n++) fn_mma_f16(d[n][i], a, b[n]);
        }
    }
#pragma unroll
    for (u32 n = 0; n < Tiles; n++) {
        float2 f[2];
        if (!first) {
            f[0] = sh.factor[8u * n + 2u * t];
            f[1] = sh.factor[8u * n + 2u * t + 1u];
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++)
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                o[n][i][j] = first ? d[n][i][j] : fn_fma(d[n][i][j], f[j & 1u].y, fn_mul(o[n][i][j], f[j & 1u].x));
    }
}

template <int Tiles>
FN_DEVICE void attend(Shared& sh, const Attended& row, const u16* query, u32 group, float (&o)[Tiles][4][4]) {
    u32 tid = threadIdx.x, lane = tid & 31u, warp = tid >> 5;
    u32 parts = (row.count + FN_PART - 1u) / FN_PART, step = row.n_kv * (FN_HEAD * 2u);
    u64 to_value = fn_value_step(row.n_kv);
    u64 here = row.address(row.block(0u, lane));  // of this part's groups, by lane
    u32 next = row.block(1u, lane), live = fn_min_u32(row.count, FN_PART);
    copy_keys(sh, here, step, live, warp, lane);
    copy_values(sh, here, step, to_value, live, warp, lane);
    fn_load_queries(sh.query, query, group);
    __syncthreads();

    float m = 0.f, l = 0.f;
    for (u32 part = 0; part < parts; part++) {
        u32 left = row.count - part * FN_PART, after = left > FN_PART ? fn_min_u32(left - FN_PART, FN_PART) : 0u;
        live = fn_min_u32(left, FN_PART);
        here = row.address(next);
        next = row.block(part + 2u, lane);

        fn_cp_async_wait<1>();  // all but the values
        __syncwarp();
        if (16u * warp < live) scores<Tiles>(sh, warp, lane);
        __syncwarp();
        copy_keys(sh, here, step, after, warp, lane);
        __syncthreads();

        weights(sh, live, group, warp, lane, part == 0u, m, l);
        fn_cp_async_wait<1>();  // all but the next keys
        __syncthreads();

        values<Tiles>(sh, live, group, warp, lane, part == 0u, o);
        __syncwarp();
        if (after != 0u)
            copy_values(sh, here, step, to_value, after, warp, lane);
        else
            fn_cp_async_commit();
    }
    fn_cp_async_wait<0>();
    if ((lane & 7u) == 0u) sh.l[4u * warp + (lane >> 3)] = l;
}

// Output gate and operand of the group's heads, a warp 128 dimensions at a time.
template <int Tiles>
FN_DEVICE void store(Shared& sh, const float (&o)[Tiles][4][4], const float* gates, bool broken, const FnLinear& linear,
                     u32 r, u32 first, u32 group) {
    u32 lane = threadIdx.x & 31u, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3u;
    Output& out = *reinterpret_cast<Output*>(&sh.key);
#pragma unroll
    for (u32 n = 0; n < Tiles; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++)
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                out.o[8u * n + 2u * t + (j & 1u)][64u * warp + 16u * i + g + 8u * (j >> 1)] = o[n][i][j];
    __syncthreads();
    for (u32 block = warp; block < 2u * group; block += FN_WARPS) {
        u32 head = block / 2u, at = 128u * (block & 1u) + 4u * lane;
        float4 x = *reinterpret_cast<const float4*>(&out.o[head][at]);
        float4 gate = fn_ldg(reinterpret_cast<const float4*>(gates + head * (2u * FN_HEAD) + at));
        float v[4] = {x.x, x.y, x.z, x.w}, z[4] = {gate.x, gate.y, gate.z, gate.w};
#pragma unroll
        for (u32 i = 0; i < 4; i++) v[i] = broken ? fn_nan() : fn_mul(fn_div(v[i], sh.l[head]), fn_sigmoid(z[i]));
        fn_linear_store_input(v, linear, r, 2u * first + block);
    }
}

template <int Tiles>
FN_DEVICE void attend_and_store(Shared& sh, const Attended& row, const u16* query, const float* gates, bool broken,
                                const FnLinear& linear, u32 r, u32 first, u32 group) {
    float o[Tiles][4][4];
    attend<Tiles>(sh, row, query, group, o);
    store<Tiles>(sh, o, gates, broken, linear, r, first, group);
}

}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRow* rows, const FnSlot* slots, const float* q, const u16* q16,
           const u32* sel, const u32* flag, u64 kv_offset, const FnLinear* linear, u32 n_q, u32 n_kv, u32 budget)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(Shared, sh);
    u32 kv_head = blockIdx.x, r = blockIdx.y, n_rows = round->n_rows;
    FnRow row = rows[r];  // beside n_rows, not after it; of a row that does not take part nothing is used
    if (r >= n_rows) return;
    u32 group = n_q / n_kv, first = kv_head * group, seen = fn_blocks_seen(row.position);
    Attended attended = {fn_pages(slots, row.slot), seen > budget ? sel + (size_t)r * budget : nullptr,
                         kv_offset + kv_head * (FN_HEAD * 2u), fn_attended(row.position, budget), budget, seen, n_kv};
    size_t head = (size_t)r * n_q + first;
    const u16* query = q16 + head * FN_HEAD;
    const float* gates = q + head * (2u * FN_HEAD) + FN_HEAD;
    bool broken = flag[r] != 0u;
    if (group <= 8u)
        attend_and_store<1>(sh, attended, query, gates, broken, *linear, r, first, group);
    else
        attend_and_store<2>(sh, attended, query, gates, broken, *linear, r, first, group);
}
