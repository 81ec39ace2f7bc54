// moe_deep_down: finished outputs of the down projections of a tile's rows.
// Contract    tiles FnTile, n_tiles of the plan; lines FnLine[] (EXL3); h f16, tile image of (pairs_cap,
//             width_cap) -> v f32 (pairs_cap, hidden), the tiles' rows alone.  hidden, line.width,
//             width_cap, pairs_cap % 128 == 0.  Other positions of h are read at most up to the next
//             multiple of 64 and meet nothing.
// Launch      grid (1 .. n_tiles * hidden / 128), block 384, shared DeepDownShared: a block strides over pieces of 128
//             outputs of a tile, those of one tile one behind the other.
// Arithmetic  order exl3_dot_v1, one leaf, fn_dot_segments(line.width, hidden, 1) segments;  part_sum_v1,
//             Hadamard, * svh.
// Equality    the bytes of moe_gemv_down, finished as in moe_sum.  A row's bytes do not depend on the
//             others.
// Reference   ref/exl3.py decode_linear, ref/orders.py mma_chain.
#include "deep.cuh"

namespace FN_NAMESPACE {
struct DeepDownShared {
    FnDeepShared deep;
};
typedef FnDeep<FN_DEEP_EXL3> Deep;

struct Tiles {
    const FnTile* tiles;
    const FnLine* lines;
    const u16* h;
    float* v;
    u32 n_tiles, hidden, width_cap;
    const FnLine* line;  // of the present piece
    u32 output, first, live;

    enum : u32 { PRODUCTS = 1 };
    FN_DEVICE u32 count() const { return n_tiles * (hidden / 128u); }
    FN_DEVICE bool take(u32 i) {
        u32 per_tile = hidden / 128u, i_tile = i / per_tile;
        FnTile tile = fn_ldg(tiles + i_tile);
        line = lines + tile.expert;
        output = 128u * (i - i_tile * per_tile);
        first = tile.first;
        live = tile.n_rows;
        return true;
    }
    FN_DEVICE FnDeepWeights weights(u32) const {
        u32 width = line->width, segments = fn_dot_segments(width, hidden, 1);
        return {line->down, width, hidden, output / 16u, 2u, hidden / 16u, 1u, segments};
    }
    FN_DEVICE FnDeepRows rows(u32) const { return {h + (u64)first * width_cap, width_cap / 64u, live}; }
    FN_DEVICE void begin(const Deep& deep, u32, u32) const {
        deep.bring(0, reinterpret_cast<const u16*>(line->down.svh) + output);
    }
    FN_DEVICE void finish(const Deep& deep, u32, u32 from, u32 n) const {
        deep.store_rotated(from, n, nullptr, v + (u64)first * hidden + output, hidden);
    }
};
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnTile* tiles, const u32* n_tiles, const FnLine* lines, const u16* h,
           float* v, u32 hidden, u32 width_cap)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(DeepDownShared, s);
    if (fn_ld(&round->n_rows) == 0) return;
    Tiles all = {tiles, lines, h, v, fn_ld(n_tiles), hidden, width_cap};
    if (blockIdx.x >= all.count()) return;
    Deep(s.deep).run(all);
}
