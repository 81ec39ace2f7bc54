// moe_deep_gu: gate and up of a tile's rows, the activation, and the operand of the down projection.
// Contract    tiles FnTile, n_tiles of the plan; lines FnLine[] (EXL3, each projection its own form); x
//             f16, two tile images of (pairs_cap, hidden): gate, up -> h f16, tile image of (pairs_cap,
//             width_cap): channels below line.width of the tiles' rows.  hidden, line.width, width_cap,
//             pairs_cap % 128 == 0.  Other positions are not written; of x they are read at most up to
//             the next multiple of 64 and meet nothing.
// Launch      grid (width_cap / 128, tiles_cap), block 384, shared DeepGuShared; blocks beyond n_tiles or
//             the line's width return.  Block: 128 channels of a tile.  Elsewhere than on sm_90a, where
//             shared memory is small, it takes 64 rows at a time, and the finished gate lies in the other
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
typedef FnDeep<FnDeepShared<4, 8192>> Deep;

FN_DEVICE float* gate_row(DeepGuShared& s, u32 row) {
#ifdef FN_HOPPER
    return s.gate[row];
#else
    return s.deep.tile[64u + row];
#endif
}

// What a block works on: 128 channels from `channel` on, rows first .. first + live - 1 of the sorted order.
struct Piece {
    u32 channel, first, live;
};

// The finished gate, for the lanes that read it again in `activate`.
FN_DEVICE void finish_gate(DeepGuShared& s, const FnLine& line, const Piece& piece) {
    float scale[16];
    fn_rows4_load_h(reinterpret_cast<const u16*>(line.gate.svh) + piece.channel, scale);
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

FN_DEVICE void activate(DeepGuShared& s, const FnLine& line, const Piece& piece, u16* h, u32 k_blocks) {
    float up_out[16], down_in[16];
    fn_rows4_load_h(reinterpret_cast<const u16*>(line.up.svh) + piece.channel, up_out);
    fn_rows4_load_h(reinterpret_cast<const u16*>(line.down.suh) + piece.channel, down_in);
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
FN_DEVICE void run(Deep& deep, DeepGuShared& s, const FnLine& line, const Piece& piece, const u16* x,
                   const u16* x_up, u16* h, u32 hidden, u32 width_cap) {
    u32 k_blocks = hidden / 64u, width = line.width, segments = fn_dot_segments(hidden, width, 1);
    FnDeepWeights gate = {line.gate, hidden, width, piece.channel / 16u, 2u, width / 16u, 1u, segments};
    FnDeepWeights up = {line.up, hidden, width, piece.channel / 16u, 2u, width / 16u, 1u, segments};
    u64 at = (u64)piece.first * k_blocks * 64u;
    FnDeepRows gate_rows = {x + at, k_blocks, piece.live}, up_rows = {x_up + at, k_blocks, piece.live};
    if (deep.loads()) {
        deep.template load<ROW_TILES>(gate, gate_rows);
        deep.template load<ROW_TILES>(up, up_rows);
        return;
    }
    float sum[ROW_TILES][4];
    deep.dot(gate, gate_rows, sum);
    deep.spill(sum);
    if (threadIdx.x < 32u * FN_DEEP_WARPS) finish_gate(s, line, piece);
    deep.dot(up, up_rows, sum);
    deep.meet();
    deep.spill(sum);
    if (threadIdx.x < 32u * FN_DEEP_WARPS) activate(s, line, piece, h, width_cap / 64u);
}
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnTile* tiles, const u32* n_tiles, const FnLine* lines, const u16* x,
           u16* h, u32 hidden, u32 width_cap, u32 pairs_cap)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(DeepGuShared, s);
    if (fn_ld(&round->n_rows) == 0 || blockIdx.y >= fn_ld(n_tiles)) return;
    FnTile tile = fn_ldg(tiles + blockIdx.y);
    const FnLine& line = lines[tile.expert];
    Piece piece = {128u * blockIdx.x, tile.first, tile.n_rows};
    if (piece.channel >= line.width) return;
    const u16* x_up = x + (u64)pairs_cap * hidden;
    Deep deep(s.deep);
#ifdef FN_HOPPER
    if (piece.live <= 64u)
        run<8>(deep, s, line, piece, x, x_up, h, hidden, width_cap);
    else
        run<16>(deep, s, line, piece, x, x_up, h, hidden, width_cap);
#else
#pragma unroll 1
    for (u32 done = 0; done < tile.n_rows; done += 64u) {
        piece.first = tile.first + done;
        piece.live = fn_min_u32(tile.n_rows - done, 64u);
        run<8>(deep, s, line, piece, x, x_up, h, hidden, width_cap);
    }
#endif
}
