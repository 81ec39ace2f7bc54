// linear_gemv: partial sums of several linears, each of any format, for at most 8 FN_ROW_TILES rows.
// Contract    linears[j].x (rows_cap, x_stride) f16 operands, linears[j].w -> linears[j].part (units,
//             rows_cap, n) f32, rows < n_rows and outputs < n only.  rows_cap <= 8 FN_ROW_TILES.  EXL3: k, n
//             % 128 == 0; plain: k % 16 == 0, any n >= 1.  n_warps = ceil(n / 32) * units; first_warp counts
//             warps of the linears before.
// Launch      grid (ceil(total warps / 4)), block 128.  Warp: 32 outputs of one unit, all rows.
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

// Weights of outputs 32 pair .. 32 pair + 31 over inputs k0 .. k1 - 1 into the L2 cache.
FN_DEVICE void ask_for(const FnWeight& w, u32 k, u32 n, u32 pair, u32 k0, u32 k1, u32 lane) {
    u32 step0 = k0 / 16u, n_steps = (k1 - k0) / 16u;
    if (fn_is_exl3(w)) {  // four lanes a step of up to four sectors
        u32 tile_bytes = 16u * (w.format >> 8 & 255u), step_bytes = n / 16u * tile_bytes;
        u64 at = w.data + (u64)(step0 + (lane >> 2)) * step_bytes + 2u * pair * tile_bytes;
        for (u32 i = lane >> 2; i < n_steps; i += 8u, at += 8u * step_bytes)
            for (u32 j = SECTOR * (lane & 3u); j < 2u * tile_bytes; j += 4u * SECTOR) fn_prefetch_l2(at + j);
    } else {  // two tiles of outputs, each with its steps one after another
        u64 at = w.data + ((u64)(2u * pair) * (k / 16u) + step0) * 512u, to_second = 512u * (k / 16u);
        bool second = 16u * (2u * pair + 1u) < n;
        for (u32 j = SECTOR * lane; j < 512u * n_steps; j += 32u * SECTOR) {
            fn_prefetch_l2(at + j);
            if (second) fn_prefetch_l2(at + to_second + j);
        }
    }
}
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnLinear* linears, u32 n_linears)) {
    fn_let_next();
    u32 warp = blockIdx.x * (FN_THREADS / 32u) + (threadIdx.x >> 5), lane = threadIdx.x & 31u, j = 0;
    for (u32 i = 1; i < n_linears; i++)
        if (linears[i].first_warp <= warp) j = i;
    const FnLinear& linear = linears[j];
    u32 n = linear.n, n_pairs = (n + 31u) / 32u;
    warp -= linear.first_warp;
    bool live = warp < linear.n_warps;  // whole warps
    u32 unit = warp / n_pairs, pair = warp - unit * n_pairs, k0, k1;
    fn_unit_range(linear.k, linear.leaves * linear.segments, unit, k0, k1);
    if (live) FN_NAMESPACE::ask_for(linear.w, linear.k, n, pair, k0, k1, lane);

    fn_wait_prior();
    u32 n_rows = round->n_rows, rows_cap = round->rows_cap;
    if (n_rows == 0 || !live) return;

    FnRows<FN_ROW_TILES> rows;
    float d[2][FN_ROW_TILES][4];
#pragma unroll
    for (u32 r = 0; r < FN_ROW_TILES; r++) {
        u32 row = 8u * r + (lane >> 2);
        rows.at[r] = reinterpret_cast<const u16*>(linear.x);
        if (row < n_rows) rows.at[r] += (u64)row * linear.x_stride;
    }
    fn_weight_dot<FN_ROW_TILES, true>(linear.w, linear.k, n, pair, k0, k1, rows, d);

    float* part = reinterpret_cast<float*>(linear.part) + (u64)unit * rows_cap * n;
#pragma unroll
    for (u32 r = 0; r < FN_ROW_TILES; r++) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            u32 row = 8u * r + 2u * (lane & 3u) + (i & 1u);
            u32 output = 32u * pair + 16u * (i >> 2) + 8u * (i >> 1 & 1u) + (lane >> 2);
            if (row < n_rows && output < n) part[(u64)row * n + output] = d[i >> 2][r][i & 3];
        }
    }
}
