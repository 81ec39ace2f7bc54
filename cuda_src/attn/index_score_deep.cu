// index_score_deep: index_score for many rows at a time: a pooled key that is read once meets 64 rows.
// Contract    iq16 f16 [rows_cap][4][128], pooled keys of the rows' pages -> score f32 [window][max_blocks]: row
//             first_row + i at row i, written for blocks 0 .. (position + 1) / 4 - 1 and only when there are more of
//             them than `budget`.  Where rows follow the window, it is 64 gridDim.y rows.
// Launch      grid (any, ceil(window / 64)), block 256, shared 64.3 KB (dynamic): a block takes 64 rows, a warp 32
//             blocks (two pages) at a time, stride over the grid.  A tile of rows is cut where a run ends.
// Arithmetic  order index_score_v1: keys are the A operand, two rows of four heads the eight columns of B; heads
//             (0 + 1) + (2 + 3) by two lanes, one for the key of row g of the mma and one for g + 8.
// Equality    bytes of index_score: a score depends on its key and the row's queries alone.
// Reference   ref/attn.py.  Source: QSA step 5.
#include "attn/pages.cuh"
#include "mma.cuh"

namespace FN_NAMESPACE {

#define FN_TILE 64u  // rows
#define FN_PAGES 2u  // pages a warp holds
#define FN_WARPS (FN_THREADS / 32u)

struct Shared {
    uint2 query[FN_TILE / 2u][8][32];  // B operands of two rows: by k step and lane
    u32 seen[FN_TILE];                 // complete blocks of a row, 0 where it needs no scores
};

FN_DEVICE float relu(float x) { return x > 0.f || x != x ? x : 0.f; }

// Word i of the lane's two in a k step.  Not 8 bytes at a time: the mma wants words of two keys in turn, and would get
// copies in the inner loop.
FN_DEVICE u32 load4(u64 at, u32 step, u32 i, bool live) {
    return live ? fn_ldg(reinterpret_cast<const u32*>(at) + 8u * step + i) : 0u;
}

// Queries of `n` rows from `from` on: 16 bytes are half a k step of a head, the words of two lanes.
FN_DEVICE void load_queries(Shared& sh, const u16* from, u32 n) {
    u32 words = FN_INDEX_HEADS * FN_INDEX_HEAD / 8u;  // of a row
    for (u32 i = threadIdx.x; i < (n + 1u) / 2u * 2u * words; i += FN_THREADS) {
        uint4 w = make_uint4(0u, 0u, 0u, 0u);
        if (i < n * words) w = fn_ldg(reinterpret_cast<const uint4*>(from) + i);
        u32 column = i / 16u, half = i & 15u;
        *reinterpret_cast<uint4*>(&sh.query[column / 8u][half / 2u][4u * (column & 7u) + 2u * (half & 1u)]) = w;
    }
}

// Rows first .. last - 1 of the tile, all of one sequence, the last with `seen` blocks, against the warp's pages.
FN_DEVICE void score_run(const Shared& sh, const FnPage* pages, u64 index_offset, u32 first, u32 last, u32 seen,
                         u32 warp, u32 warps, float* score, u32 max_blocks) {
    u32 lane = threadIdx.x & 31u, g = lane >> 2, t = lane & 3u;
    bool odd = (t & 1u) != 0u;
    u32 groups = (seen + FN_PAGE_BLOCKS - 1u) / FN_PAGE_BLOCKS;
    for (u32 page = FN_PAGES * warp; page < groups; page += FN_PAGES * warps) {
        u32 a[FN_PAGES][8][4];
#pragma unroll
        for (u32 m = 0; m < FN_PAGES; m++) {
            u32 block = (page + m) * FN_PAGE_BLOCKS + g;
            u64 key = page + m < groups ? fn_pooled_at(pages, index_offset, block) + 8u * t : 0u;
#pragma unroll
            for (u32 s = 0; s < 8; s++) {
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    a[m][s][2u * i] = load4(key, s, i, block < seen);
                    a[m][s][2u * i + 1u] = load4(key + 8u * FN_INDEX_HEAD * 2u, s, i, block + 8u < seen);
                }
            }
        }
        u32 block = page * FN_PAGE_BLOCKS + g + (odd ? 8u : 0u);
#pragma unroll 1
        for (u32 n = first / 2u; 2u * n < last; n++) {
            float d[FN_PAGES][4];
#pragma unroll
            for (u32 m = 0; m < FN_PAGES; m++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) d[m][i] = 0.f;
#pragma unroll
            for (u32 s = 0; s < 8; s++) {
                uint2 w = sh.query[n][s][lane];
                u32 b[2] = {w.x, w.y};
#pragma unroll
                for (u32 m = 0; m < FN_PAGES; m++) fn_mma_f16(d[m], a[m][s], b);
            }
            u32 row = 2u * n + (t >> 1);  // columns 2t, 2t + 1: heads 0, 1 (t even) or 2, 3 of the row
            u32 limit = row >= first && row < last ? sh.seen[row] : 0u;
            float* out = score + (size_t)row * max_blocks;
#pragma unroll
            for (u32 m = 0; m < FN_PAGES; m++) {
                float x = fn_add(relu(d[m][0]), relu(d[m][1])), y = fn_add(relu(d[m][2]), relu(d[m][3]));
                float sum = fn_add(odd ? y : x, fn_shfl_xor(odd ? x : y, 1u));
                u32 at = block + m * FN_PAGE_BLOCKS;
                if (at < limit) out[at] = fn_mul(sum, 0x1.6a09e6p-4f);
            }
        }
    }
}

}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRow* rows, const FnRun* runs, const FnSlot* slots, const u16* iq16,
           u64 index_offset, float* score, u32 max_blocks, u32 budget, u32 first_row)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(Shared, sh);
    u32 base = blockIdx.y * FN_TILE, r = first_row + base, n_rows = round->n_rows;
    if (r >= n_rows) return;
    u32 n = fn_min_u32(n_rows - r, FN_TILE), tid = threadIdx.x, lane = tid & 31u;
    if (tid < FN_TILE) {
        u32 seen = tid < n ? fn_blocks_seen(rows[r + tid].position) : 0u;
        sh.seen[tid] = seen > budget ? seen : 0u;
    }
    __syncthreads();
    u32 begin = blockIdx.x * FN_WARPS * FN_PAGES * FN_PAGE_BLOCKS;  // the block's first block
    if (!fn_any(sh.seen[lane] > begin || sh.seen[lane + 32u] > begin)) return;
    load_queries(sh, iq16 + (size_t)r * (FN_INDEX_HEADS * FN_INDEX_HEAD), n);
    __syncthreads();

    u32 warp = blockIdx.x * FN_WARPS + (tid >> 5), last;
    for (u32 first = 0; first < n; first = last) {
        FnRow row = rows[r + first];
        FnRun run = runs[row.run];
        last = fn_min_u32(run.first_row + run.n_rows - r, n);
        score_run(sh, fn_pages(slots, row.slot), index_offset, first, last, sh.seen[last - 1u], warp,
                  gridDim.x * FN_WARPS, score + (size_t)base * max_blocks, max_blocks);
    }
}
