// moe_deep_input: the operands of the chosen experts' gate and up projections, rows sorted by expert.
// Contract    tiles FnTile, n_tiles, pair_of u32 (pairs_cap) of the plan; lines FnLine[] (EXL3); m f32
//             (rows_cap, hidden) -> x f16, two tile images of pairs_cap rows and k = hidden: the first
//             rotated with gate.suh, the second with up.suh.  hidden % 128 == 0, pairs_cap % 64 == 0.
//             Positions outside the tiles' rows are not touched.
// Launch      grid (tiles_cap, hidden / 128), block 256, shared InputShared; blocks beyond n_tiles
//             return. Block: 128 inputs of a tile; warp: four rows at a time.  Blocks that run together
//             share 128 columns of m, which stay in L2 although a row is asked for once a slot.
// Arithmetic  the operand of exl3_dot_v1: m * suh, Hadamard, f16 once.
// Equality    the bytes of moe_input for the same row, slot and projection.  A row's bytes do not depend
//             on the others of its tile.  NaN and Inf stay in their block of 128.
// Reference   ref/orders.py hadamard128.
#include "moe/rows4.cuh"

namespace FN_NAMESPACE {
struct InputShared {
    u32 row[256];  // of m, for each row of the tile
};
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnTile* tiles, const u32* n_tiles, const u32* pair_of,
           const FnLine* lines, const float* m, u16* x, u32 hidden, u32 n_slots, u32 pairs_cap)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(InputShared, s);
    u32 block = blockIdx.y, warp = threadIdx.x >> 5, k_blocks = hidden / 64u;
    if (fn_ld(&round->n_rows) == 0 || blockIdx.x >= fn_ld(n_tiles)) return;
    FnTile tile = fn_ldg(tiles + blockIdx.x);
    static_assert(FN_THREADS == 256, "a thread a row");  // row 0 stands in for those beyond the tile
    s.row[threadIdx.x] = threadIdx.x < tile.n_rows ? fn_ldg(pair_of + tile.first + threadIdx.x) / n_slots : 0u;
    const FnLine& line = lines[tile.expert];
    float gate[16], up[16];
    fn_rows4_load_h(reinterpret_cast<const u16*>(line.gate.suh) + 128u * block, gate);
    fn_rows4_load_h(reinterpret_cast<const u16*>(line.up.suh) + 128u * block, up);
    u16* x_up = x + (u64)pairs_cap * k_blocks * 64u;
    __syncthreads();
#pragma unroll 1
    for (u32 first = 4u * warp; first < tile.n_rows; first += FN_THREADS / 8u) {  // whole warps
        u32 i = first + fn_rows4_row();
        float v[16], w[16];
        fn_rows4_load(m + (u64)s.row[i] * hidden + 128u * block, v);
#pragma unroll
        for (u32 k = 0; k < 16; k++) {
            w[k] = fn_mul(v[k], up[k]);
            v[k] = fn_mul(v[k], gate[k]);
        }
        fn_rows4_hadamard(v);
        fn_rows4_hadamard(w);
        if (i < tile.n_rows) {
            fn_rows4_store_tile(x, k_blocks, tile.first + i, block, v);
            fn_rows4_store_tile(x_up, k_blocks, tile.first + i, block, w);
        }
    }
}
