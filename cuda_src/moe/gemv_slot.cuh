// gemv_slot.cuh: one warp of one expert's dot with a single row; used by moe_gemv_gu and moe_gemv_down.
#pragma once
#include "gemv.cuh"

// data, format: EXL3 weights of n outputs, k inputs.  x: the operand row.  part: output 0 of unit 0;
// unit_stride: floats between units.  The warp's place inside the dot comes from blockIdx.x; warps beyond the
// dot return.
FN_DEVICE void fn_slot_dot(u64 data, u32 format, u32 k, u32 n, const u16* x, float* part, u64 unit_stride) {
    static_assert(FN_THREADS == FN_GEMV_THREADS, "a block is a pair of tiles");
    FnPlace place;
    u32 lane = threadIdx.x & 31u;
    u32 n_pairs = n / 32u, units = fn_dot_segments(k, n, 1), unit = place.pair / n_pairs;
    if ((unit >= units) | (data == 0) | (format == 0xffffffffu)) return;  // one branch: loads at once
    u32 tile = 2u * (place.pair - unit * n_pairs) + place.half, k0, k1;
    fn_unit_range(k, units, unit, k0, k1);
    FnRows<1> rows;
    rows.at[0] = x;  // all eight rows of the mma are this one; the first is stored
    float d[1][4];
    fn_weight_dot<1, false>(data, format, k, n, tile, k0, k1, rows, d);
    fn_let_next();  // not before: blocks of the next launch would take places among these
    if (lane & 3u) return;  // column 0 of the result is in lanes 0, 4, 8, ...
    part += unit * unit_stride + 16u * tile + (lane >> 2);
    part[0] = d[0][0];
    part[8] = d[0][2];
}
