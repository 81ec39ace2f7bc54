// moe_plan_scan: where every expert's rows begin in the sorted order, and the tiles of that order.
// Contract    counts u32 (rows_cap / 128, n_experts + 1) of moe_plan_count -> starts u32 of the same
//             shape (blocks with rows alone): the sorted position of the first row of a block that goes
//             to an expert; tiles FnTile (tiles_cap), n_tiles u32 (1).  Experts in rising id, the shared
//             one last; an expert begins at a multiple of 64; its tiles are 128 rows, the last one what
//             is left. Experts without rows have no tile.  Tiles from n_tiles on are not touched.
// Launch      grid (1), block 1024, shared ScanShared: a thread an expert; it adds the blocks' counts in
//             rising order, neighbouring threads reading neighbouring words.
// Arithmetic  integers.
// Equality    exact.
// Reference   ref/moe_deep.py plan.
#include "warp.cuh"
#include "tables.cuh"

namespace FN_NAMESPACE {
const u32 BATCH = 16;  // counts of a thread asked for at once
const u32 WARPS = FN_THREADS / 32u;
static_assert(WARPS == 32, "a warp adds the sums of all warps");

struct ScanShared {
    u32 positions[WARPS], tiles[WARPS];
};

// Sum of v over the lanes up to this one.
FN_DEVICE u32 scan_warp(u32 v) {
    u32 lane = threadIdx.x & 31u;
#pragma unroll
    for (u32 d = 1; d < 32u; d <<= 1) {
        u32 below = fn_shfl_up(v, d);
        if (lane >= d) v += below;
    }
    return v;
}
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const u32* counts, u32* starts, FnTile* tiles, u32* n_tiles, u32 n_experts,
           u32 tiles_cap)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(ScanShared, s);
    u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31u, stride = n_experts + 1u;
    u32 n_blocks = (fn_ld(&round->n_rows) + 127u) / 128u;
    u32 position = 0, tile = 0;  // of the first expert of a turn: of those before it
    for (u32 first = 0; first < stride; first += FN_THREADS) {
        u32 e = first + threadIdx.x, n = 0;
        for (u32 b = 0; e < stride && b < n_blocks; b += BATCH) {
            u32 some[BATCH];
#pragma unroll
            for (u32 i = 0; i < BATCH; i++)
                some[i] = b + i < n_blocks ? fn_ldg(counts + (u64)(b + i) * stride + e) : 0u;
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) n += some[i];
        }
        u32 room = (n + 63u) & ~63u, pieces = (n + 127u) / 128u;
        u32 my_position = scan_warp(room), my_tile = scan_warp(pieces);
        __syncthreads();  // the turn before has read them
        if (lane == 31u) {
            s.positions[warp] = my_position;
            s.tiles[warp] = my_tile;
        }
        __syncthreads();
        u32 before = scan_warp(s.positions[lane]), tiles_before = scan_warp(s.tiles[lane]);
        u32 left = (warp - 1u) & 31u;
        u32 skipped = fn_shfl(before, left), tiles_skipped = fn_shfl(tiles_before, left);
        my_position += position - room + (warp ? skipped : 0u);
        my_tile += tile - pieces + (warp ? tiles_skipped : 0u);
        position += fn_shfl(before, 31u);
        tile += fn_shfl(tiles_before, 31u);
        if (e >= stride) continue;
        for (u32 i = 0; i < pieces && my_tile + i < tiles_cap; i++)
            tiles[my_tile + i] = FnTile{e, my_position + 128u * i, fn_min_u32(n - 128u * i, 128u), 0u};
        u32 at = my_position;
        for (u32 b = 0; b < n_blocks; b += BATCH) {
            u32 some[BATCH];
#pragma unroll
            for (u32 i = 0; i < BATCH; i++)
                some[i] = b + i < n_blocks ? fn_ldg(counts + (u64)(b + i) * stride + e) : 0u;
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                if (b + i < n_blocks) starts[(u64)(b + i) * stride + e] = at;
                at += some[i];
            }
        }
    }
    if (threadIdx.x == 0) n_tiles[0] = fn_min_u32(tile, tiles_cap);
}
