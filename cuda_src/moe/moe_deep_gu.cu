// moe_deep_gu: gate and up of a tile's rows, the activation, and the operand of the down projection.
// Contract    tiles FnTile, n_tiles of the plan; lines FnLine[] (EXL3, each projection its own form); x
//             f16, two tile images of (pairs_cap, hidden): gate, up -> h f16, tile image of (pairs_cap,
//             width_cap): channels below line.width of the tiles' rows.  hidden, line.width, width_cap,
//             pairs_cap % 128 == 0.  Other positions are not written; of x they are read at most up to
//             the next multiple of 64 and meet nothing.
// Launch      grid (at least n_tiles * width_cap / 128), block 384, shared DeepGuShared: a block a piece of 128
//             channels of a tile, those of one tile neighbours.  Elsewhere than on sm_90a, where shared
//             memory is small, a piece is done 64 rows at a time, and the finished gate lies in the other
//             half of the tile.
// Arithmetic  order exl3_dot_v1, one leaf, fn_dot_segments(hidden, line.width, 1) segments;  gate, up:
//             part_sum_v1, Hadamard, * svh;  h = silu(gate) * up;  operand of down: h * suh, Hadamard,
//             f16 once.
// Equality    the bytes of moe_gemv_gu and moe_act.  A row's bytes do not depend on the others of its
//             tile.
// Reference   ref/moe.py swiglu, ref/orders.py mma_chain.
#include "deep.cuh"
#include "moe/rows4.cuh"

namespace FN_NAMESPACE {

struct DeepGuShared {
    FnDeepShared<4, 8192> deep;
#ifdef FN_HOPPER
    float gate[FN_DEEP_ROWS][128];
#endif
};
typedef FnDeep<FnDeepShared<4, 8192>, FN_DEEP_EXL3> Deep;

FN_DEVICE float* gate_row(DeepGuShared& s, u32 row) {
#ifdef FN_HOPPER
    return s.gate[row];
#else
    return s.deep.tile[64u + row];
#endif
}

// The i-th piece of the launch: 128 channels from `channel` on, rows first .. first + live - 1 of the sorted
// order.  On lines that are narrower there is nothing to do.
struct Piece {
    const FnLine* line;
    u32 channel, first, live;

    FN_DEVICE Piece(u32 i, u32 width_cap, const FnTile* tiles, const FnLine* lines) {
        u32 per_tile = width_cap / 128u, i_tile = i / per_tile;
        FnTile tile = fn_ldg(tiles + i_tile);
        line = lines + tile.expert;
        channel = 128u * (i - i_tile * per_tile);
        first = tile.first;
        live = channel < line->width ? tile.n_rows : 0u;
    }
    FN_DEVICE FnDeepWeights weights(const FnWeight& w, u32 hidden) const {
        u32 width = line->width, segments = fn_dot_segments(hidden, width, 1);
        return {w, hidden, width, channel / 16u, 2u, width / 16u, 1u, segments};
    }
    FN_DEVICE FnDeepRows rows(const u16* x, u32 hidden) const {
        return {x + (u64)first * hidden, hidden / 64u, live};
    }
};

// The finished gate, for the lanes that read it again in `activate`.
FN_DEVICE void finish_gate(DeepGuShared& s, const Piece& piece) {
    float scale[16];
    fn_rows4_load_h(reinterpret_cast<const u16*>(piece.line->gate.svh) + piece.channel, scale);
#pragma unroll 1
    for (u32 r = 4u * (threadIdx.x >> 5); r < piece.live; r += 4u * FN_DEEP_WARPS) {
        u32 row = r + fn_rows4_row();
        float v[16];
        fn_rows4_load(s.deep.tile[row], v);
        fn_rows4_hadamard(v);  // as fn_exl3_rotate_out
#pragma unroll
        for (u32 i = 0; i < 16; i++) v[i] = fn_mul(v[i], scale[i]);
        fn_rows4_store(gate_row(s, row), v);
    }
}

FN_DEVICE void activate(DeepGuShared& s, const Piece& piece, u16* h, u32 k_blocks) {
    float up_out[16], down_in[16];
    fn_rows4_load_h(reinterpret_cast<const u16*>(piece.line->up.svh) + piece.channel, up_out);
    fn_rows4_load_h(reinterpret_cast<const u16*>(piece.line->down.suh) + piece.channel, down_in);
#pragma unroll 1
    for (u32 r = 4u * (threadIdx.x >> 5); r < piece.live; r += 4u * FN_DEEP_WARPS) {
        u32 row = r + fn_rows4_row();
        float v[16], gate[16];
        fn_rows4_load(s.deep.tile[row], v);
        fn_rows4_hadamard(v);
        fn_rows4_load(gate_row(s, row), gate);
#pragma unroll
        for (u32 i = 0; i < 16; i++) {  // as moe_act
            float product = fn_mul(fn_silu(gate[i]), fn_mul(v[i], up_out[i]));
            v[i] = fn_mul(product, down_in[i]);
        }
        fn_rows4_hadamard(v);
        if (row < piece.live) fn_rows4_store_tile(h, k_blocks, piece.first + row, piece.channel / 128u, v);
    }
}

template <u32 ROW_TILES>
FN_DEVICE void run(Deep& deep, DeepGuShared& s, const Piece& piece, const u16* x, const u16* x_up, u16* h,
                   u32 hidden, u32 width_cap) {
    float sum[ROW_TILES][4];
#pragma unroll 1
    for (u32 up = 0; up < 2u; up++) {  // one text for both products
        const FnWeight& w = up ? piece.line->up : piece.line->gate;
        deep.dot(piece.weights(w, hidden), piece.rows(up ? x_up : x, hidden), sum);
        deep.spill(sum);
        if (threadIdx.x < 32u * FN_DEEP_WARPS) {
            if (up)
                activate(s, piece, h, width_cap / 64u);
            else
                finish_gate(s, piece);
        }
        deep.meet();
    }
}
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnTile* tiles, const u32* n_tiles, const FnLine* lines, const u16* x,
           u16* h, u32 hidden, u32 width_cap, u32 pairs_cap)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(DeepGuShared, s);
    if (fn_ld(&round->n_rows) == 0 || blockIdx.x >= fn_ld(n_tiles) * (width_cap / 128u)) return;
    Piece piece(blockIdx.x, width_cap, tiles, lines);
    if (!piece.live) return;
    const u16* x_up = x + (u64)pairs_cap * hidden;
    Deep deep(s.deep);
    if (deep.loads()) {
        deep.begin_loads();
        deep.load(piece.live, piece.weights(piece.line->gate, hidden), piece.rows(x, hidden));
        deep.load(piece.live, piece.weights(piece.line->up, hidden), piece.rows(x_up, hidden));
        return;
    }
    deep.begin_dots();
#ifdef FN_HOPPER
    if (piece.live <= 64u)
        run<8>(deep, s, piece, x, x_up, h, hidden, width_cap);
    else
        run<16>(deep, s, piece, x, x_up, h, hidden, width_cap);
#else
    u32 end = piece.first + piece.live;
#pragma unroll 1
    for (; piece.first < end; piece.first += 64u) {
        piece.live = fn_min_u32(end - piece.first, 64u);
        run<8>(deep, s, piece, x, x_up, h, hidden, width_cap);
    }
#endif
}
