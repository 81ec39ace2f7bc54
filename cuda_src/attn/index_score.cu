// index_score: how much each complete block of 4 tokens matters to a row.
// Contract    iq16 f16 [rows_cap][4][128], pooled keys of the row's pages -> score f32 [rows_cap][max_blocks], written
//             for blocks 0 .. (position + 1) / 4 - 1, and only when there are more of them than `budget`.
// Launch      grid (any, rows_cap), block 128: a warp takes 16 blocks (one page) at a time, stride over the grid.
// Arithmetic  order index_score_v1: per head a chain of 8 mma steps over k from zero; relu (a NaN stays); heads
//             (0 + 1) + (2 + 3); times f32 1/sqrt(128).  Within a step, mma slots 2t, 2t+1, 2t+8, 2t+9 take elements
//             4t .. 4t+3 of the 16 (one 8-byte load): of no effect where a step is one sum (sm_90).
// Equality    a score depends on its key and the row's queries alone.
// Reference   ref/attn.py.  Source: QSA step 5.
#include "attn/pages.cuh"
#include "mma.cuh"

namespace FN_NAMESPACE {

FN_DEVICE float relu(float x) { return x > 0.f || x != x ? x : 0.f; }

FN_DEVICE uint2 load8(u64 at, u32 step, bool live) {
    return live ? fn_ld_here(reinterpret_cast<const uint2*>(at) + 4u * step) : make_uint2(0u, 0u);
}

}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRow* rows, const FnSlot* slots, const u16* iq16, u64 index_offset,
           float* score, u32 max_blocks, u32 budget)) {
    using namespace FN_NAMESPACE;
    fn_let_next();
    u32 r = blockIdx.y, n_rows = fn_ld_here(&round->n_rows), slot = fn_ld_here(&rows[r].slot);
    u32 seen = fn_blocks_seen(fn_ld_here(&rows[r].position));  // any bytes beyond n_rows
    u32 lane = threadIdx.x & 31u, g = lane >> 2, t = lane & 3u;
    u32 warps = gridDim.x * (FN_THREADS / 32u), warp = blockIdx.x * (FN_THREADS / 32u) + (threadIdx.x >> 5);
    u32 groups = (seen + FN_PAGE_BLOCKS - 1u) / FN_PAGE_BLOCKS;
    bool live = r < n_rows && seen > budget && warp < groups;
    const FnPage* pages = nullptr;
    FnPage page = {};  // of the warp's next group
    if (live) {
        pages = fn_pages_here(slots, slot);
        page = fn_ld_here(pages + warp);
    }

    fn_wait_prior();
    if (!live) return;
    u32 b[8][2];
    u64 query = reinterpret_cast<u64>(iq16 + ((size_t)r * FN_INDEX_HEADS + (g & 3u)) * FN_INDEX_HEAD + 4u * t);
#pragma unroll
    for (u32 s = 0; s < 8; s++) {
        uint2 w = load8(query, s, g < FN_INDEX_HEADS);
        b[s][0] = w.x;
        b[s][1] = w.y;
    }
    for (u32 group = warp; group < groups; group += warps) {
        u32 low = group * FN_PAGE_BLOCKS + g, high = low + 8u;
        u64 key = fn_pooled_in(page, index_offset, low) + 8u * t;  // the group is one page: `high` is 8 keys further
        if (group + warps < groups) page = fn_ld_here(pages + group + warps);
        uint2 a0[8], a1[8];
#pragma unroll
        for (u32 s = 0; s < 8; s++) {
            a0[s] = load8(key, s, low < seen);
            a1[s] = load8(key + 8u * FN_INDEX_HEAD * 2u, s, high < seen);
        }
        float d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (u32 s = 0; s < 8; s++) {
            u32 a[4] = {a0[s].x, a1[s].x, a0[s].y, a1[s].y};
            fn_mma_f16(d, a, b[s]);
        }
        float2 sum;
        sum.x = fn_add(relu(d[0]), relu(d[1]));  // heads 2t, 2t + 1 of `low`: lanes t = 0 and 1 hold the four heads
        sum.y = fn_add(relu(d[2]), relu(d[3]));
        float ox = fn_shfl_xor(sum.x, 1u), oy = fn_shfl_xor(sum.y, 1u);
        if (t != 0u) continue;
        float* out = score + (size_t)r * max_blocks;
        if (low < seen) out[low] = fn_mul(fn_add(sum.x, ox), 0x1.6a09e6p-4f);
        if (high < seen) out[high] = fn_mul(fn_add(sum.y, oy), 0x1.6a09e6p-4f);
    }
}
