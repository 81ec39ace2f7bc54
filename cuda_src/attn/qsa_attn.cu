// qsa_attn: attention of one row and kv head over one part of 64 attended tokens.
// Contract    q16 f16 [rows_cap][n_q][256], K and V in the row's pages, sel u32 [rows_cap][budget] (rising; read only
//             when the row sees more blocks than `budget`) -> part_m, part_l f32 [rows_cap][n_q][max_parts], part_o
//             f32 [rows_cap][n_q][max_parts][256], parts below ceil(attended / 64) only.  n_q / n_kv is 1..16.
//             Keys and values of tokens that are not attended are never read.
// Launch      grid (max_parts, n_kv, rows_cap), block 128, shared 15.6 KB.
// Arithmetic  order qsa_attn_v1.  Part p holds attended tokens 64p .. 64p+63 in position order.  s = q.k by a chain of
//             16 mma steps over k from zero, times 1/16; m = max; e = fn_exp(s - m); l = sum of e, absent entries +0,
//             by halves of the entry index: bit 5 first, bit 0 last; o = chain of mma steps over 16 entries each,
//             f16(e) times v.  Steps without entries are left out (they would add zeros).  Slots of a q.k step as in
//             index_score; of a PV step natural.
// Equality    a row's parts depend on its own q and attended tokens alone.  NaN in a score makes m, l, o NaN.
// Reference   ref/attn.py.  Source: QSA step 6.
#include "attn/pages.cuh"
#include "attn/queries.cuh"
#include "mma.cuh"

namespace FN_NAMESPACE {

struct Shared {
    uint2 query[2][16][32];  // B operands of 8 heads: by k step and lane
    u64 key[FN_PART];   // address of each entry's key; an absent entry has the last one's
    float s[16][72];    // scores by head and entry; the pitch spreads the reads of 4 heads over the banks
    u16 e[16][72];      // f16 weights, likewise for mma loads
};

FN_DEVICE uint2 load8(u64 at, u32 step) { return fn_ld_here(reinterpret_cast<const uint2*>(at) + 4u * step); }

// Where a lane's values of four entries and eight dimensions lie: piece s of 16.
struct Values {
    const Shared& sh;
    u64 offset;  // from an entry's key to the lane's dimensions of its value
    u32 t;

    FN_DEVICE void ask(uint4 (&v)[4][4], u32 s) const {
        u32 i = s >> 2, j = s & 3u;
        u64 at = sh.key[16u * i + 2u * t + (j & 1u) + 8u * (j >> 1)] + offset;
        v[i][j] = fn_ld_here(reinterpret_cast<const uint4*>(at));
    }
};

// Scores of this warp's 16 entries for Tiles * 8 heads.  Values are asked for as keys are used, in their registers.
template <int Tiles>
FN_DEVICE void scores(Shared& sh, const uint2 (&k0)[16], const uint2 (&k1)[16], const Values& from, uint4 (&v)[4][4],
                      u32 warp, u32 lane) {
    u32 g = lane >> 2, t = lane & 3u;
    float d[Tiles][4];
#pragma unroll
    for (u32 n = 0; n < Tiles; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) d[n][i] = 0.f;
#pragma unroll
    for (u32 s = 0; s < 16; s++) {
        u32 a[4] = {k0[s].x, k1[s].x, k0[s].y, k1[s].y};
#pragma unroll
        for (u32 n = 0; n < Tiles; n++) {
            uint2 w = sh.query[n][s][lane];
            u32 b[2] = {w.x, w.y};
            fn_mma_f16(d[n], a, b);
        }
        from.ask(v, s);
    }
    u32 entry = 16u * warp + g;
#pragma unroll
    for (u32 n = 0; n < Tiles; n++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) sh.s[8u * n + 2u * t + (i & 1u)][entry + 8u * (i >> 1)] = fn_mul(d[n][i], 0.0625f);
    }
}

// m, l and the f16 weights of all heads: 8 lanes a head, lane j of them holding entries j, j + 8, ...
FN_DEVICE void weights(Shared& sh, u32 live, u32 group, u32 warp, u32 lane, float* part_m, float* part_l, size_t at,
                       u32 head_step) {
    u32 h = 4u * warp + (lane >> 3), j = lane & 7u;
    if (4u * warp >= group) return;
    float e[8], m = fn_u2f(0xff800000u);
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        e[i] = h < group && j + 8u * i < live ? sh.s[h][j + 8u * i] : fn_u2f(0xff800000u);
        m = fn_max(m, e[i]);
    }
#pragma unroll
    for (u32 d = 4; d; d >>= 1) m = fn_max(m, fn_shfl_xor(m, d));
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        e[i] = j + 8u * i < live ? fn_exp_down(fn_sub(e[i], m)) : 0.f;
        sh.e[h][j + 8u * i] = fn_f2h(e[i]);
    }
    float l = fn_add(fn_add(fn_add(e[0], e[4]), fn_add(e[2], e[6])), fn_add(fn_add(e[1], e[5]), fn_add(e[3], e[7])));
#pragma unroll
    for (u32 d = 4; d; d >>= 1) l = fn_add(l, fn_shfl_xor(l, d));
    if (j != 0u || h >= group) return;
    part_m[at + (size_t)h * head_step] = m;
    part_l[at + (size_t)h * head_step] = l;
}

// o of the warp's 64 dimensions: mma row g of tile i is dimension 8g + 2i, row g + 8 the one after it, so a lane's
// 16-byte pieces of four values feed four tiles, and it ends with 8 neighbouring dimensions of a head.
template <int Tiles>
FN_DEVICE void values(const Shared& sh, const uint4 (&v)[4][4], u32 live, float* out, size_t head_step, u32 group,
                      u32 lane) {
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
        u32 w[4][4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            w[j][0] = v[s][j].x;
            w[j][1] = v[s][j].y;
            w[j][2] = v[s][j].z;
            w[j][3] = v[s][j].w;
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 a[4] = {(w[0][i] & 0xffffu) | w[1][i] << 16, w[0][i] >> 16 | (w[1][i] & 0xffff0000u),
                        (w[2][i] & 0xffffu) | w[3][i] << 16, w[2][i] >> 16 | (w[3][i] & 0xffff0000u)};
#pragma unroll
            for (u32 n = 0; n < Tiles; n++) fn_mma_f16(d[n][i], a, b[n]);
        }
    }
#pragma unroll
    for (u32 n = 0; n < Tiles; n++)
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            u32 head = 8u * n + 2u * t + j;
            if (head >= group) continue;
            float4* o = reinterpret_cast<float4*>(out + head * head_step + 8u * g);
            o[0] = make_float4(d[n][0][j], d[n][0][j + 2u], d[n][1][j], d[n][1][j + 2u]);
            o[1] = make_float4(d[n][2][j], d[n][2][j + 2u], d[n][3][j], d[n][3][j + 2u]);
        }
}

}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRow* rows, const FnSlot* slots, const u16* q16, const u32* sel, u64 kv_offset,
           float* part_m, float* part_l, float* part_o, u32 n_q, u32 n_kv, u32 budget, u32 max_parts)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(Shared, sh);
    fn_let_next();
    u32 part = blockIdx.x, kv_head = blockIdx.y, r = blockIdx.z, n_rows = fn_ld_here(&round->n_rows);
    u32 slot = fn_ld_here(&rows[r].slot), position = fn_ld_here(&rows[r].position);  // any bytes beyond n_rows
    u32 attended = fn_attended(position, budget);
    bool there = r < n_rows && part * FN_PART < attended, chosen = fn_blocks_seen(position) > budget;
    const FnPage* pages = there ? fn_pages_here(slots, slot) : nullptr;
    u32 live = fn_min_u32(attended - part * FN_PART, FN_PART), group = n_q / n_kv;
    u32 tid = threadIdx.x, lane = tid & 31u, warp = tid >> 5, g = lane >> 2, t = lane & 3u;

    u32 entry = part * FN_PART + fn_min_u32(tid, live - 1u);
    if (there && !chosen && tid < FN_PART)
        sh.key[tid] = fn_key_in(fn_page_here(pages, entry), kv_offset, entry, n_kv, kv_head);

    fn_wait_prior();
    if (!there) return;
    u32 first = kv_head * group;  // the group's first query head
    bool looks = chosen && tid < FN_PART;
    u32 token = looks ? fn_attended_token(entry, position, budget, sel + (size_t)r * budget) : 0u;
    fn_load_queries(sh.query, q16 + ((size_t)r * n_q + first) * FN_HEAD, group);
    if (looks) sh.key[tid] = fn_key_at(pages, kv_offset, token, n_kv, kv_head);
    __syncthreads();

    // All keys of the warp's 16 entries at once.  Scores of absent entries are not used; their values are made zero, as
    // 0 times an infinity would be NaN.
    uint2 k0[16], k1[16];
    uint4 v[4][4];
    u64 low = sh.key[16u * warp + g] + 8u * t, high = sh.key[16u * warp + g + 8u] + 8u * t;
    Values values_at{sh, fn_value_step(n_kv) + 128u * warp + 16u * g, t};
    if (16u * warp < live) {
#pragma unroll
        for (u32 s = 0; s < 16; s++) {
            k0[s] = load8(low, s);
            k1[s] = load8(high, s);
        }
        if (group <= 8u)
            scores<1>(sh, k0, k1, values_at, v, warp, lane);
        else
            scores<2>(sh, k0, k1, values_at, v, warp, lane);
    } else {
#pragma unroll
        for (u32 s = 0; s < 16; s++) values_at.ask(v, s);
    }
    __syncthreads();

    weights(sh, live, group, warp, lane, part_m, part_l, ((size_t)r * n_q + first) * max_parts + part, max_parts);
    __syncthreads();

    if (live < FN_PART) {
#pragma unroll
        for (u32 s = 0; s < 4; s++)
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                if (16u * s + 2u * t + (j & 1u) + 8u * (j >> 1) >= live) v[s][j] = make_uint4(0u, 0u, 0u, 0u);
    }
    float* out = part_o + (((size_t)r * n_q + first) * max_parts + part) * FN_HEAD + 64u * warp;
    if (group <= 8u)
        values<1>(sh, v, live, out, (size_t)max_parts * FN_HEAD, group, lane);
    else
        values<2>(sh, v, live, out, (size_t)max_parts * FN_HEAD, group, lane);
}
