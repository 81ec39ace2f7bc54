// moe_deep_down: finished outputs of the down projections of a tile's rows.
// Contract    tiles FnTile, n_tiles of the plan; lines FnLine[] (EXL3); h f16, tile image of (pairs_cap,
//             width_cap) -> v f32 (pairs_cap, hidden), the tiles' rows alone.  hidden, line.width,
//             width_cap, pairs_cap % 128 == 0.  Other positions of h are read at most up to the next
//             multiple of 64 and meet nothing.
// Launch      grid (ceil(hidden / 512), tiles_cap), block 384, shared DeepDownShared; blocks beyond
//             n_tiles return. Block: up to four times 128 outputs of a tile, one after another: the loads
//             of the next run while these are finished.
// Arithmetic  order exl3_dot_v1, one leaf, fn_dot_segments(line.width, hidden, 1) segments;  part_sum_v1,
//             Hadamard, * svh.
// Equality    the bytes of moe_gemv_down, finished as in moe_sum.  A row's bytes do not depend on the
//             others.
// Reference   ref/exl3.py decode_linear, ref/orders.py mma_chain.
#include "deep.cuh"
#include "moe/rows4.cuh"

namespace FN_NAMESPACE {
const u32 OUTPUTS = 4;  // tiles of 128 outputs a block

struct DeepDownShared {
    FnDeepShared<4, 8192> deep;
};
typedef FnDeep<FnDeepShared<4, 8192>> Deep;

FN_DEVICE FnDeepWeights weights(const FnLine& line, u32 hidden, u32 output) {
    return FnDeepWeights{line.down, line.width, hidden, output / 16u, 2u, hidden / 16u, 1u,
                         fn_dot_segments(line.width, hidden, 1)};
}

// v: at the tile's first row.
FN_DEVICE void finish(const DeepDownShared& s, const FnLine& line, u32 live, u32 hidden, u32 output,
                      float* v) {
    float scale[16];
    fn_rows4_load_h(reinterpret_cast<const u16*>(line.down.svh) + output, scale);
#pragma unroll 1
    for (u32 r = 4u * (threadIdx.x >> 5); r < live; r += 4u * FN_DEEP_WARPS) {
        u32 row = r + fn_rows4_row();
        float o[16];
        fn_rows4_load(s.deep.tile[row], o);
        fn_rows4_hadamard(o);  // as fn_exl3_rotate_out
#pragma unroll
        for (u32 i = 0; i < 16; i++) o[i] = fn_mul(o[i], scale[i]);
        if (row < live) fn_rows4_store(v + (u64)row * hidden + output, o);
    }
}

template <u32 ROW_TILES>
FN_DEVICE void run(Deep& deep, DeepDownShared& s, const FnLine& line, const FnDeepRows& rows, u32 hidden,
                   float* v) {
    u32 first = 128u * OUTPUTS * blockIdx.x, end = fn_min_u32(first + 128u * OUTPUTS, hidden);
    if (deep.loads()) {
#pragma unroll 1
        for (u32 output = first; output < end; output += 128u)
            deep.template load<ROW_TILES>(weights(line, hidden, output), rows);
        return;
    }
#pragma unroll 1
    for (u32 output = first; output < end; output += 128u) {
        float sum[ROW_TILES][4];
        deep.dot(weights(line, hidden, output), rows, sum);
        deep.meet();  // the outputs before have been read
        deep.spill(sum);
        if (threadIdx.x < 32u * FN_DEEP_WARPS) finish(s, line, rows.live, hidden, output, v);
    }
}
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnTile* tiles, const u32* n_tiles, const FnLine* lines, const u16* h,
           float* v, u32 hidden, u32 width_cap)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(DeepDownShared, s);
    if (fn_ld(&round->n_rows) == 0 || blockIdx.y >= fn_ld(n_tiles)) return;
    FnTile tile = fn_ldg(tiles + blockIdx.y);
    const FnLine& line = lines[tile.expert];
    FnDeepRows rows = {h + (u64)tile.first * width_cap, width_cap / 64u, tile.n_rows};
    v += (u64)tile.first * hidden;
    Deep deep(s.deep);
    if (tile.n_rows <= 64u)
        run<8>(deep, s, line, rows, hidden, v);
    else
        run<16>(deep, s, line, rows, hidden, v);
}
