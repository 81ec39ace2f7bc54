// gemv_slot.cuh: one warp of one expert's dot with a single row; used by moe_gemv_gu and moe_gemv_down.
#pragma once
#include "exl3.cuh"

// w: n outputs, k inputs, EXL3.  x: the operand row.  part: output 0 of unit 0; unit_stride: floats between
// units. The warp index inside the dot comes from blockIdx.x; warps beyond the dot return.
FN_DEVICE void fn_slot_dot(const FnWeight& w, u32 k, u32 n, const u16* x, float* part, u64 unit_stride) {
    u32 warp = blockIdx.x * (FN_THREADS / 32u) + (threadIdx.x >> 5), lane = threadIdx.x & 31u;
    u32 n_pairs = n / 32u, units = fn_dot_segments(k, n, 1), unit = warp / n_pairs;
    if (unit >= units) return;
    u32 pair = warp - unit * n_pairs, k0, k1;
    fn_unit_range(k, units, unit, k0, k1);
    FnRows<1> rows;
    rows.at[0] = x;  // all eight rows of the mma are this one; the first is stored
    float d[2][1][4];
    fn_weight_dot<1, false>(w, k, n, pair, k0, k1, rows, d);
    if (lane & 3u) return;  // column 0 of the result is in lanes 0, 4, 8, ...
    part += unit * unit_stride + 32u * pair + (lane >> 2);
    part[0] = d[0][0][0];
    part[8] = d[0][0][2];
    part[16] = d[1][0][0];
    part[24] = d[1][0][2];
}
