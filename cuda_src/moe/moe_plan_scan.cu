// moe_plan_scan: where every expert's rows begin in the sorted order, and the tiles of that order.
// Contract    counts u32 (rows_cap / 128, n_experts + 1) of moe_plan_count -> starts u32 of the same
//             shape (blocks with rows alone): the sorted position of the first row of a block that goes
//             to an expert; tiles FnTile (tiles_cap), n_tiles u32 (1).  Experts in rising id, the shared
//             one last; an expert begins at a multiple of 64; its tiles are 256 rows, the last one what
//             is left.  Tiles of more than 128 rows come first, then the others, each in the order of
//             experts.  Experts without rows have no tile.  Tiles from n_tiles on are not touched.
//             n_experts <= 1024.
// Launch      grid (1), block 1024, shared ScanShared: a thread an expert; it adds the blocks' counts in
//             rising order, neighbouring threads reading neighbouring words; thread 0 also the last of 1,025.
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
    u32 sums[WARPS];
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
// Sum of v over the threads before this one; total: over all.
FN_DEVICE u32 scan_block(ScanShared& s, u32 v, u32& total) {
    u32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31u, here = scan_warp(v);
    __syncthreads();  // the scan before has been read
    if (lane == 31u) s.sums[warp] = here;
    __syncthreads();
    u32 sums = scan_warp(s.sums[lane]), before = fn_shfl(sums, (warp - 1u) & 31u);
    total = fn_shfl(sums, 31u);
    return here - v + (warp ? before : 0u);
}
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const u32* counts, u32* starts, FnTile* tiles, u32* n_tiles, u32 n_experts,
           u32 tiles_cap)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(ScanShared, s);
    const u32 TURNS = 2;  // of FN_THREADS experts
    u32 stride = n_experts + 1u, n_blocks = (fn_ld(&round->n_rows) + 127u) / 128u;
    u32 n[TURNS], position[TURNS], kinds[TURNS], first[TURNS];  // kinds: large tiles, and small ones << 16
    u32 positions = 0, both = 0;
#pragma unroll
    for (u32 t = 0; t < TURNS; t++) {
        u32 e = t * FN_THREADS + threadIdx.x;
        n[t] = 0;
        for (u32 b = 0; e < stride && b < n_blocks; b += BATCH) {
            u32 some[BATCH];
#pragma unroll
            for (u32 i = 0; i < BATCH; i++)
                some[i] = b + i < n_blocks ? fn_ldg(counts + (u64)(b + i) * stride + e) : 0u;
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) n[t] += some[i];
        }
        u32 left = n[t] & 255u, total;
        kinds[t] = (n[t] >> 8) + (left > 128u ? 1u : left ? 1u << 16 : 0u);
        position[t] = positions + scan_block(s, (n[t] + 63u) & ~63u, total);
        positions += total;
        first[t] = both + scan_block(s, kinds[t], total);
        both += total;
    }
    u32 n_large = both & 0xffffu;
#pragma unroll
    for (u32 t = 0; t < TURNS; t++) {
        u32 e = t * FN_THREADS + threadIdx.x, large = kinds[t] & 0xffffu, at = position[t];
        if (e >= stride) continue;
        for (u32 i = 0; 256u * i < n[t]; i++) {
            u32 to = i < large ? (first[t] & 0xffffu) + i : n_large + (first[t] >> 16);
            if (to < tiles_cap) tiles[to] = FnTile{e, at + 256u * i, fn_min_u32(n[t] - 256u * i, 256u), 0u};
        }
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
    if (threadIdx.x == 0) n_tiles[0] = fn_min_u32(n_large + (both >> 16), tiles_cap);
}
