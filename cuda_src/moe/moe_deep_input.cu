// moe_deep_input: the operands of the chosen experts' gate and up projections, rows sorted by expert.
// Contract    tiles FnTile, n_tiles, pair_of u32 (pairs_cap) of the plan; lines FnLine[] (EXL3); m f32
//             (rows_cap, hidden) -> x f16, two tile images of pairs_cap rows and k = hidden: the first
//             rotated with gate.suh, the second with up.suh.  hidden % 128 == 0, pairs_cap % 64 == 0.
//             Positions outside the tiles' rows are not touched.
// Launch      grid (tiles_cap, ceil(hidden / 256)), block 128, shared InputShared; blocks beyond n_tiles
//             return. Block: 256 inputs of a tile; warp: 16 rows and 128 inputs at a time.  Blocks that run
//             together share 256 columns of m, which stay in L2 although a row is asked for once a slot.
// Arithmetic  the operand of exl3_dot_v1: m * suh, Hadamard, f16 once.
// Equality    the bytes of moe_input for the same row, slot and projection.  A row's bytes do not depend
//             on the others of its tile.  NaN and Inf stay in their block of 128.
// Reference   ref/orders.py hadamard128.
#include "half_rows.cuh"

namespace FN_NAMESPACE {
struct InputShared {
    FnHalfRows warp[FN_THREADS / 32u];
};

struct Pairs {
    FnTile tile;
    const u32* pair_of;  // of the tile's first row
    const u16 *gate_suh, *up_suh;
    u16 *gate, *up;
    const float* inputs;
    u32 pitch, columns, n_slots, first_block, units;

    FN_DEVICE FnHalfUnit at(u32 unit) const {
        u32 first = 16u * (unit >> 1);
        return {tile.first + first, fn_min_u32(tile.n_rows - first, 16u), first_block + (unit & 1u)};
    }
    FN_DEVICE u32 row(u32 unit) const {
        u32 i = 16u * (unit >> 1) + (threadIdx.x & 15u);
        return fn_ldg(pair_of + fn_min_u32(i, tile.n_rows - 1u)) / n_slots;
    }
    FN_DEVICE u32 plain(u32) const { return 0u; }
    FN_DEVICE u32 rotated(u32 block) const { return 128u * block < columns ? 3u : 0u; }
    FN_DEVICE const u16* suh(u32 i) const { return i ? up_suh : gate_suh; }
    FN_DEVICE FnHalfOperand operand(u32 i) const { return {i ? up : gate, columns}; }
};
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnTile* tiles, const u32* n_tiles, const u32* pair_of,
           const FnLine* lines, const float* m, u16* x, u32 hidden, u32 n_slots, u32 pairs_cap)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(InputShared, s);
    if (fn_ld(&round->n_rows) == 0 || blockIdx.x >= fn_ld(n_tiles)) return;
    FnTile tile = fn_ldg(tiles + blockIdx.x);
    const FnLine& line = lines[tile.expert];
    Pairs pairs = {tile,
                   pair_of + tile.first,
                   reinterpret_cast<const u16*>(line.gate.suh),
                   reinterpret_cast<const u16*>(line.up.suh),
                   x,
                   x + (u64)pairs_cap * hidden,
                   m,
                   hidden,
                   hidden,
                   n_slots,
                   2u * blockIdx.y,
                   (tile.n_rows + 15u) / 16u * 2u};
    fn_half_rows(s.warp[threadIdx.x >> 5], pairs);
}
