// linear_gemv: partial sums of several linears, each of any format, for at most 8 FN_ROW_TILES rows.
// Contract    linears[j].x (rows_cap, x_stride) f16 operands, linears[j].w -> linears[j].part (units,
//             rows_cap, n) f32, rows < n_rows and outputs < n only.  rows_cap <= 8 FN_ROW_TILES.  EXL3: k, n
//             % 128 == 0; plain: k % 16 == 0, any n >= 1.  n_warps = ceil(n / 32) * units; first_warp counts
//             warps of the linears before.
// Launch      grid (ceil(total warps / FN_BLOCK_PAIRS)), block 64 FN_BLOCK_PAIRS / FN_WARP_TILES.  A pair of tiles
//             (one or two warps): 32 outputs of one unit, all rows; "warps" of the table are pairs.
// Arithmetic  orders exl3_dot_v1 and plain_dot_v1: one chain of k16 mma steps a unit, k rising, from zero;
//             bf16: the operand as hi + lo, hi first.  Rows of an mma do not meet: row 0 stands in for those
//             that are not there.
// Equality    a row's bytes do not depend on the other rows, on rows_cap or on which of n8 and n16 runs.
// Reference   ref/exl3.py decode_linear, ref/orders.py mma_chain.
//
// What is known before the launches before are done is asked for: a warp's weights come into the L2 cache.
#include "exl3.cuh"

namespace FN_NAMESPACE {
const u32 SECTOR = 64;  // bytes that one address brings

// Weights of a warp's tiles from tile `tile` on over inputs k0 .. k1 - 1 into the L2 cache.
FN_DEVICE void ask_for(const FnWeight& w, u32 k, u32 n, u32 tile, u32 k0, u32 k1, u32 lane) {
    u32 step0 = k0 / 16u, n_steps = (k1 - k0) / 16u;
    if (fn_is_exl3(w)) {  // four lanes a step of up to four sectors a tile
        u32 tile_bytes = 16u * (w.format >> 8 & 255u), step_bytes = n / 16u * tile_bytes;
        u64 at = w.data + (u64)(step0 + (lane >> 2)) * step_bytes + (u64)tile * tile_bytes;
        for (u32 i = lane >> 2; i < n_steps; i += 8u, at += 8u * step_bytes)
            for (u32 j = SECTOR * (lane & 3u); j < FN_WARP_TILES * tile_bytes; j += 4u * SECTOR) fn_prefetch_l2(at + j);
    } else {  // each tile has its steps one after another
        u64 to_next = 512u * (k / 16u), at = w.data + tile * to_next + 512u * step0;
#pragma unroll
        for (u32 t = 0; t < FN_WARP_TILES; t++)
            for (u32 j = SECTOR * lane; 16u * (tile + t) < n && j < 512u * n_steps; j += 32u * SECTOR)
                fn_prefetch_l2(at + t * to_next + j);
    }
}
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnLinear* linears, u32 n_linears)) {
    fn_let_next();
    static_assert(FN_THREADS == FN_BLOCK_PAIRS * 64 / FN_WARP_TILES, "warps of a block");
    FnPlace place;
    u32 warp = place.pair, lane = threadIdx.x & 31u, j = 0, first[8];
#pragma unroll
    for (u32 i = 1; i < 8; i++) first[i] = i < n_linears ? linears[i].first_warp : 0xffffffffu;  // all at once
#pragma unroll
    for (u32 i = 1; i < 8; i++)
        if (first[i] <= warp) j = i;
#pragma unroll 1
    for (u32 i = 8; i < n_linears; i++)
        if (linears[i].first_warp <= warp) j = i;
    const FnLinear linear = linears[j];
    u32 n = linear.n, n_pairs = (n + 31u) / 32u;
    warp -= linear.first_warp;
    // Whole warps.  All fields in one condition: they are asked for at once, not behind each other's branches.
    bool there = (warp < linear.n_warps) & (linear.w.data != 0) & (linear.x != 0) & (linear.part != 0);
    there &= (linear.k != 0) & (linear.leaves != 0) & (linear.segments != 0);
    there &= (linear.w.format != 0xffffffffu) & (linear.x_stride != 0xffffffffu);
    u32 unit = warp / n_pairs, pair = warp - unit * n_pairs, k0, k1;
    there &= 32u * pair + 16u * place.tile0 < n;
    fn_unit_range(linear.k, fn_max_u32(linear.leaves * linear.segments, 1u), unit, k0, k1);
    if (there) FN_NAMESPACE::ask_for(linear.w, linear.k, n, 2u * pair + place.tile0, k0, k1, lane);

    fn_wait_prior();
    u32 n_rows = round->n_rows, rows_cap = round->rows_cap;
    if ((n_rows == 0) | (rows_cap == 0) | !there) return;

    FnRows<FN_ROW_TILES> rows;
    float d[FN_WARP_TILES][FN_ROW_TILES][4];
#pragma unroll
    for (u32 r = 0; r < FN_ROW_TILES; r++) {
        u32 row = 8u * r + (lane >> 2);
        rows.at[r] = reinterpret_cast<const u16*>(linear.x);
        if (row < n_rows) rows.at[r] += (u64)row * linear.x_stride;
    }
    fn_weight_dot<FN_ROW_TILES, true>(linear.w.data, linear.w.format, linear.k, n, pair, place.tile0, k0, k1,
                                      rows, d);

    float* part = reinterpret_cast<float*>(linear.part) + (u64)unit * rows_cap * n;
#pragma unroll
    for (u32 r = 0; r < FN_ROW_TILES; r++) {
#pragma unroll
        for (u32 i = 0; i < 4 * FN_WARP_TILES; i++) {
            u32 row = 8u * r + 2u * (lane & 3u) + (i & 1u);
            u32 output = 32u * pair + 16u * (place.tile0 + (i >> 2)) + 8u * (i >> 1 & 1u) + (lane >> 2);
            if (row < n_rows && output < n) part[(u64)row * n + output] = d[i >> 2][r][i & 3];
        }
    }
}
