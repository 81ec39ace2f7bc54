// rms_row.cuh: order rms_row_v1, the sum of squares of a row by one block of 256 threads, and the place of a
// value in the fragment order.  Used by the glue kernels; any kernel of 256 threads that normalises a whole
// row may include it.
//
//   float4 i of the row belongs to thread i % 256
//   thread   acc = fma(x, x, acc) from +0, its float4s in rising order, x y z w
//   warp     xor tree 16, 8, 4, 2, 1;  block: the 8 warp sums by ((0+1)+(2+3))+((4+5)+(6+7))
//   scale    rsqrt(sum / dim + eps), a true division by the f32 of dim
#pragma once
#include "warp.cuh"

struct FnRmsShared { float part[8]; };

FN_DEVICE float fn_square4(float4 v, float acc) {
    acc = fn_fma(v.x, v.x, acc);
    acc = fn_fma(v.y, v.y, acc);
    acc = fn_fma(v.z, v.z, acc);
    return fn_fma(v.w, v.w, acc);
}

// Every thread of the block gives its own sum and gets 1/sqrt(sum / dim + eps).  One barrier; `shared` is
// free again after the caller's next barrier.
FN_DEVICE float fn_rms_scale(FnRmsShared& shared, float acc, u32 dim, float eps) {
    acc = fn_warp_sum(acc);
    if ((threadIdx.x & 31u) == 0) shared.part[threadIdx.x >> 5] = acc;
    __syncthreads();
    const float* p = shared.part;
    float low = fn_add(fn_add(p[0], p[1]), fn_add(p[2], p[3]));
    float sum = fn_add(low, fn_add(fn_add(p[4], p[5]), fn_add(p[6], p[7])));
    return fn_rsqrt(fn_add(fn_div(sum, fn_u32_to_f32(dim)), eps));
}
