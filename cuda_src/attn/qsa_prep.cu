// qsa_prep: queries, keys, values and index keys of every row as the attention kernels want them.
// Contract    q f32 [rows_cap][n_q][512] (query | gate), k v f32 [rows_cap][n_kv][256], idx f32 [rows_cap][5][128]
//             (4 queries, raw key), rope and rope_block f32 [rows_cap][32][2] (cos, sin at the row's position and at
//             4 * (position / 4)) -> q16 f16 [rows_cap][n_q][256], iq16 f16 [rows_cap][4][128], and into the pages of
//             the row's sequence: K, V, the raw index key, and the pooled key of a block that the row completes.
//             Pages are written by plain stores and may lie in mapped host memory.  Rows >= n_rows: nothing.
// Launch      grid (ceil((n_q + 2 n_kv + 5) / 4), rows_cap), block 128, a warp per head.  The warp of the index key
//             pools the block that its row completes: of the three keys before, those of the row's run are rounded
//             again from idx (another warp stores them), those of earlier launches are read from the page.
// Arithmetic  norms rms_head_v1, rotation, one rounding to f16 (order qsa_prep_v1); pooled: raw keys as stored (f16),
//             ((k0 + k1) + (k2 + k3)) * 0.25, norm, rotation at the block's first token, one rounding (index_pool_v1).
// Equality    independent of how tokens are cut into runs and rounds.  NaN and Inf reach the outputs.
// Reference   ref/attn.py.  Source: QSA steps 1 to 4.
#include "attn/pages.cuh"

namespace FN_NAMESPACE {

template <int N> FN_DEVICE void load(float (&v)[N], const float* x, u32 lane) {
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = fn_ld(x + lane + 32u * i);
}

template <int N> FN_DEVICE void store(const float (&v)[N], u16* y, u32 lane) {
#pragma unroll
    for (int i = 0; i < N; i++) y[lane + 32u * i] = fn_f2h(v[i]);
}

// Norm, rotation (rope_dim 64; 0 leaves it out), rounding of one head.  norm, angle: of the lane.
template <int N>
FN_DEVICE void finish(float (&v)[N], const float (&norm)[8], float2 angle, u32 rope_dim, float eps, u16* y, u32 lane) {
    fn_head_norm(v, norm, eps);
    if (rope_dim != 0u) fn_rotate(v[0], v[1], angle);
    store(v, y, lane);
}

}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRun* runs, const FnRow* rows, const FnSlot* slots, const float* q,
           const float* k, const float* v, const float* idx, const float* rope, const float* rope_block,
           const float* q_norm, const float* k_norm, const float* iq_norm, const float* ik_norm, u64 kv_offset,
           u64 index_offset, u16* q16, u16* iq16, u32 n_q, u32 n_kv, u32 rope_dim, float eps)) {
    using namespace FN_NAMESPACE;
    fn_let_next();
    u32 r = blockIdx.y, lane = threadIdx.x & 31u, head = blockIdx.x * (FN_THREADS / 32u) + (threadIdx.x >> 5);
    u32 n_rows = fn_ld_here(&round->n_rows), slot = fn_ld_here(&rows[r].slot), run = fn_ld_here(&rows[r].run);
    u32 position = fn_ld_here(&rows[r].position), first_row = 0;  // any bytes beyond n_rows
    bool live = r < n_rows;
    FnPage page = {};  // of the row's token
    if (live && head >= n_q) {
        page = fn_page_here(fn_pages_here(slots, slot), position);
        first_row = fn_ld_here(&runs[run].first_row);
    }
    const float* weights = head < n_q                                ? q_norm
                           : head < n_q + 2u * n_kv                  ? k_norm
                           : head < n_q + 2u * n_kv + FN_INDEX_HEADS ? iq_norm
                                                                     : ik_norm;
    float norm[8];
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        norm[i] = 0.f;
        if (i < 4u || head < n_q + 2u * n_kv) norm[i] = fn_ld_here(weights + lane + 32u * i);
    }

    fn_wait_prior();
    if (!live) return;
    // The index key's angle is its block's.
    const float* angles = (head < n_q + 2u * n_kv + FN_INDEX_HEADS ? rope : rope_block) + (size_t)r * 64u;
    float2 angle = {1.f, 0.f};
    if (rope_dim != 0u) angle = fn_ld_here(reinterpret_cast<const float2*>(angles) + lane);

    if (head < n_q) {
        size_t at = (size_t)r * n_q + head;
        float x[8];
        load(x, q + at * (2u * FN_HEAD), lane);
        finish(x, norm, angle, rope_dim, eps, q16 + at * FN_HEAD, lane);
        return;
    }
    head -= n_q;
    if (head < 2u * n_kv) {
        bool value = head >= n_kv;
        u32 h = value ? head - n_kv : head;
        u64 at = fn_key_in(page, kv_offset, position, n_kv, h);
        float x[8];
        load(x, (value ? v : k) + ((size_t)r * n_kv + h) * FN_HEAD, lane);
        if (value)
            store(x, reinterpret_cast<u16*>(at + fn_value_step(n_kv)), lane);
        else
            finish(x, norm, angle, rope_dim, eps, reinterpret_cast<u16*>(at), lane);
        return;
    }
    head -= 2u * n_kv;
    if (head < FN_INDEX_HEADS) {
        float x[4];
        load(x, idx + ((size_t)r * (FN_INDEX_HEADS + 1u) + head) * FN_INDEX_HEAD, lane);
        finish(x, norm, angle, rope_dim, eps, iq16 + ((size_t)r * FN_INDEX_HEADS + head) * FN_INDEX_HEAD, lane);
        return;
    }
    if (head > FN_INDEX_HEADS) return;

    const float* own = idx + ((size_t)r * (FN_INDEX_HEADS + 1u) + FN_INDEX_HEADS) * FN_INDEX_HEAD;
    float x[4];
    load(x, own, lane);
    u16* raw = reinterpret_cast<u16*>(fn_raw_in(page, index_offset, position));
    if (position % FN_BLOCK_TOKENS != FN_BLOCK_TOKENS - 1u) {
        store(x, raw, lane);
        return;
    }
    u32 in_run = r - first_row;  // rows of this launch before this one
    const u16* stored = reinterpret_cast<const u16*>(fn_raw_in(page, index_offset, position - 3u)) + lane;
    float key[3][4];  // asked for beside the row's own
#pragma unroll
    for (u32 i = 0; i < 3; i++) {
        u32 back = 3u - i;
        const float* before = own - back * (FN_INDEX_HEADS + 1u) * FN_INDEX_HEAD;
#pragma unroll
        for (u32 j = 0; j < 4; j++)
            key[i][j] = fn_h2f(back <= in_run ? fn_f2h(fn_ld(before + lane + 32u * j))
                                              : stored[i * FN_INDEX_HEAD + 32u * j]);
    }
    store(x, raw, lane);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float k0 = key[0][j], k1 = key[1][j], k2 = key[2][j], k3 = fn_h2f(fn_f2h(x[j]));
        x[j] = fn_mul(fn_add(fn_add(k0, k1), fn_add(k2, k3)), 0.25f);
    }
    u64 pooled = fn_pooled_in(page, index_offset, position / FN_BLOCK_TOKENS);
    finish(x, norm, angle, rope_dim, eps, reinterpret_cast<u16*>(pooled), lane);
}
