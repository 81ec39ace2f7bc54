// moe_deep_down: finished outputs of the down projections of a tile's rows.
// Contract    tiles FnTile, n_tiles of the plan; lines FnLine[] (EXL3); h f16, tile image of (pairs_cap,
//             width_cap) -> v f32 (pairs_cap, hidden), the tiles' rows alone.  hidden, line.width,
//             width_cap, pairs_cap % 128 == 0.  Other positions of h are read at most up to the next
//             multiple of 64 and meet nothing.
// Launch      grid (at least n_tiles * hidden / 128), block 384, shared DeepDownShared: a block a piece of 128
//             outputs of a tile, those of one tile neighbours.
// Arithmetic  order exl3_dot_v1, one leaf, fn_dot_segments(line.width, hidden, 1) segments;  part_sum_v1,
//             Hadamard, * svh.
// Equality    the bytes of moe_gemv_down, finished as in moe_sum.  A row's bytes do not depend on the
//             others.
// Reference   ref/exl3.py decode_linear, ref/orders.py mma_chain.
#include "deep.cuh"
#include "moe/rows4.cuh"

namespace FN_NAMESPACE {
struct DeepDownShared {
    FnDeepShared<4, 8192> deep;
};
typedef FnDeep<FnDeepShared<4, 8192>, FN_DEEP_EXL3> Deep;

// The i-th piece of the launch.
struct Piece {
    const FnLine* line;
    FnTile tile;
    u32 output;

    FN_DEVICE Piece(u32 i, u32 hidden, const FnTile* tiles, const FnLine* lines) {
        u32 per_tile = hidden / 128u, i_tile = i / per_tile;
        tile = fn_ldg(tiles + i_tile);
        line = lines + tile.expert;
        output = 128u * (i - i_tile * per_tile);
    }
    FN_DEVICE FnDeepWeights weights(u32 hidden) const {
        u32 width = line->width, segments = fn_dot_segments(width, hidden, 1);
        return {line->down, width, hidden, output / 16u, 2u, hidden / 16u, 1u, segments};
    }
    FN_DEVICE FnDeepRows rows(const u16* h, u32 width_cap) const {
        return {h + (u64)tile.first * width_cap, width_cap / 64u, tile.n_rows};
    }
};

// v: at the piece's first row and output.
FN_DEVICE void finish(const DeepDownShared& s, const u16* svh, u32 live, u32 hidden, float* v) {
    float scale[16];
    fn_rows4_load_h(svh, scale);
#pragma unroll 1
    for (u32 r = 4u * (threadIdx.x >> 5); r < live; r += 4u * FN_DEEP_WARPS) {
        u32 row = r + fn_rows4_row();
        float o[16];
        fn_rows4_load(s.deep.tile[row], o);
        fn_rows4_hadamard(o);  // as fn_exl3_rotate_out
#pragma unroll
        for (u32 i = 0; i < 16; i++) o[i] = fn_mul(o[i], scale[i]);
        if (row < live) fn_rows4_store(v + (u64)row * hidden, o);
    }
}

template <u32 ROW_TILES>
FN_DEVICE void run(Deep& deep, DeepDownShared& s, const Piece& p, const u16* h, float* v, u32 hidden,
                   u32 width_cap) {
    float sum[ROW_TILES][4];
    deep.dot(p.weights(hidden), p.rows(h, width_cap), sum);
    deep.spill(sum);
    const u16* svh = reinterpret_cast<const u16*>(p.line->down.svh) + p.output;
    float* to = v + (u64)p.tile.first * hidden + p.output;
    if (threadIdx.x < 32u * FN_DEEP_WARPS) finish(s, svh, p.tile.n_rows, hidden, to);
    deep.meet();
}
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnTile* tiles, const u32* n_tiles, const FnLine* lines, const u16* h,
           float* v, u32 hidden, u32 width_cap)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(DeepDownShared, s);
    if (fn_ld(&round->n_rows) == 0 || blockIdx.x >= fn_ld(n_tiles) * (hidden / 128u)) return;
    Piece p(blockIdx.x, hidden, tiles, lines);
    Deep deep(s.deep);
    if (deep.loads()) {
        deep.begin_loads();
        deep.load(p.tile.n_rows, p.weights(hidden), p.rows(h, width_cap));
        return;
    }
    deep.begin_dots();
    if (p.tile.n_rows <= 64u)
        run<8>(deep, s, p, h, v, hidden, width_cap);
    else
        run<16>(deep, s, p, h, v, hidden, width_cap);
}
