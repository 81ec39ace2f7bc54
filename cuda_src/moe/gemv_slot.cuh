// gemv_slot.cuh: one warp of one expert's dot with a single row; used by moe_gemv_gu and moe_gemv_down.
#pragma once
#include "exl3.cuh"

// data, format: EXL3 weights of n outputs, k inputs.  x: the operand row.  part: output 0 of unit 0;
// unit_stride: floats between units.  The warp's place inside the dot comes from blockIdx.x; warps beyond the
// dot return.
FN_DEVICE void fn_slot_dot(u64 data, u32 format, u32 k, u32 n, const u16* x, float* part, u64 unit_stride) {
    static_assert(FN_THREADS == FN_BLOCK_PAIRS * 64 / FN_WARP_TILES, "warps of a block");
    FnPlace place;
    u32 lane = threadIdx.x & 31u;
    u32 n_pairs = n / 32u, units = fn_dot_segments(k, n, 1), unit = place.pair / n_pairs;
    if ((unit >= units) | (data == 0) | (format == 0xffffffffu)) return;  // one branch: loads at once
    u32 pair = place.pair - unit * n_pairs, k0, k1;
    fn_unit_range(k, units, unit, k0, k1);
    FnRows<1> rows;
    rows.at[0] = x;  // all eight rows of the mma are this one; the first is stored
    float d[FN_WARP_TILES][1][4];
    fn_weight_dot<1, false>(data, format, k, n, pair, place.tile0, k0, k1, rows, d);
    if (lane & 3u) return;  // column 0 of the result is in lanes 0, 4, 8, ...
    part += unit * unit_stride + 32u * pair + 16u * place.tile0 + (lane >> 2);
#pragma unroll
    for (u32 t = 0; t < FN_WARP_TILES; t++) {
        part[16u * t] = d[t][0][0];
        part[16u * t + 8u] = d[t][0][2];
    }
}
