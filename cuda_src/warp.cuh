// warp.cuh: exchanges, votes and trees of one full warp.  Every lane of the warp must arrive at the same
// call; the simulator reports lanes that do not.  Orders: fn_warp_sum and fn_warp_max are the xor tree 16, 8,
// 4, 2, 1 (every lane gets the same bits, since a + b == b + a); in the simulator each of them is one
// collective.
#pragma once
#include "prelude.cuh"

#ifdef FN_SIM
#include "sim/collective.h"
#else

// T: a 32- or 64-bit type.  Lanes outside the warp (up, down) keep their own value.
template <class T>
FN_DEVICE T fn_shfl(T v, u32 lane) {
    return __shfl_sync(0xffffffffu, v, (int)lane);
}
template <class T>
FN_DEVICE T fn_shfl_xor(T v, u32 mask) {
    return __shfl_xor_sync(0xffffffffu, v, (int)mask);
}
template <class T>
FN_DEVICE T fn_shfl_up(T v, u32 delta) {
    return __shfl_up_sync(0xffffffffu, v, delta);
}
template <class T>
FN_DEVICE T fn_shfl_down(T v, u32 delta) {
    return __shfl_down_sync(0xffffffffu, v, delta);
}
// threadIdx.x, in a form that keeps what follows from it where it is used: of a kernel with many paths every path's
// addresses would else be in registers from the start.
FN_DEVICE u32 fn_thread_here() {
    u32 thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread;
}
FN_DEVICE u32 fn_ballot(bool pred) { return __ballot_sync(0xffffffffu, pred); }
FN_DEVICE bool fn_any(bool pred) { return __any_sync(0xffffffffu, pred) != 0; }
FN_DEVICE bool fn_all(bool pred) { return __all_sync(0xffffffffu, pred) != 0; }

FN_DEVICE float fn_warp_sum(float v) {
#pragma unroll
    for (int m = 16; m; m >>= 1) v = fn_add(v, __shfl_xor_sync(0xffffffffu, v, m));
    return v;
}
FN_DEVICE u32 fn_warp_sum_u32(u32 v) {
#pragma unroll
    for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(0xffffffffu, v, m);
    return v;
}
FN_DEVICE u64 fn_warp_sum_u64(u64 v) {
#pragma unroll
    for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(0xffffffffu, v, m);
    return v;
}
FN_DEVICE float fn_warp_max(float v) {
#pragma unroll
    for (int m = 16; m; m >>= 1) v = fn_max(v, __shfl_xor_sync(0xffffffffu, v, m));
    return v;
}
// Sum over groups of four lanes, xor 1 then 2.
FN_DEVICE float fn_warp_sum4(float v) {
    v = fn_add(v, __shfl_xor_sync(0xffffffffu, v, 1));
    return fn_add(v, __shfl_xor_sync(0xffffffffu, v, 2));
}

// Hadamard transform of the warp's 128 values, lane l holding elements 4l .. 4l+3: butterflies by index bit
// 0, 1 (in the lane), then 2 .. 6 (lane xor 1, 2, 4, 8, 16); lower index a + b, upper a - b; at the end times
// 1/sqrt(128).
FN_DEVICE void fn_hadamard128(float (&v)[4]) {
    float a = fn_add(v[0], v[1]), b = fn_sub(v[0], v[1]), c = fn_add(v[2], v[3]), d = fn_sub(v[2], v[3]);
    v[0] = fn_add(a, c);
    v[1] = fn_add(b, d);
    v[2] = fn_sub(a, c);
    v[3] = fn_sub(b, d);
    u32 lane = threadIdx.x & 31u;
#pragma unroll
    for (u32 m = 1; m < 32; m <<= 1) {
        float sign = lane & m ? -1.f : 1.f;  // an exact factor: sum and difference are one instruction
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = fn_fma(sign, v[i], __shfl_xor_sync(0xffffffffu, v[i], (int)m));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = fn_mul(v[i], 0.088388347648f);
}
#endif
