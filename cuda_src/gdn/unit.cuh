// unit.cuh: vectors of the DeltaNet heads as four lanes hold them (order gdn_step_v1): lane p of the four has
// elements 16m + 4p + q (m 0..7, q 0..3) of a head's 128.
#pragma once
#include "warp.cuh"

namespace fn_unit {
const float L2_EPS = 1e-6f;                    // model.md section 4, step 3
const float KEY_SCALE = 0x1.6a09e6p-4f;        // 128^-1/2 rounded to f32

FN_DEVICE float dot(const float4 (&x)[8], const float4 (&y)[8]) {
    float acc = 0.f;
#pragma unroll
    for (int m = 0; m < 8; m++) {
        acc = fn_fma(x[m].x, y[m].x, acc);
        acc = fn_fma(x[m].y, y[m].y, acc);
        acc = fn_fma(x[m].z, y[m].z, acc);
        acc = fn_fma(x[m].w, y[m].w, acc);
    }
    return fn_warp_sum4(acc);
}
FN_DEVICE float4 times(float4 v, float f) {
    return make_float4(fn_mul(v.x, f), fn_mul(v.y, f), fn_mul(v.z, f), fn_mul(v.w, f));
}
// from: the head's element 4p.
FN_DEVICE void load8(float4 (&v)[8], const float* from) {
#pragma unroll
    for (int m = 0; m < 8; m++) v[m] = fn_ld(reinterpret_cast<const float4*>(from) + 4 * m);
}
}  // namespace fn_unit
