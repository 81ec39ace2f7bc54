// math_sweep: one elementary function at every step-th bit pattern, for checks of bytes and errors.
// Contract    y (n) u32: the bits of f(x_i), x_i the float with the bits start + i * step (f16 and bf16
// inputs: its low
//             half).  which: index in kernels/probe.py MATH_FUNCTIONS.
// Launch      grid (any), block 128, grid stride.
// Arithmetic  none of its own: math.cuh and prelude.cuh.
// Equality    same bytes on a GPU and in the simulator for every input that is no NaN.
// Reference   check/cases_probe.py.
#include "../prelude.cuh"

FN_KERNEL((u32 * y, u32 which, u32 start, u32 step, u32 n)) {
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        u32 u = start + i * step;
        float x = fn_u2f(u), r = 0.f;
        switch (which) {
            case 0: r = fn_exp2(x); break;
            case 1: r = fn_exp(x); break;
            case 2: r = fn_log(x); break;
            case 3: r = fn_log1p01(x); break;
            case 4: r = fn_sigmoid(x); break;
            case 5: r = fn_silu(x); break;
            case 6: r = fn_softplus(x); break;
            case 7: r = fn_rsqrt(x); break;
            case 8: r = fn_rcp(x); break;
            case 9: r = fn_div(x, 3.f); break;
            case 10: r = fn_sqrt(x); break;
            case 11: r = fn_fma(x, x, -1.f); break;
            case 12: r = fn_max(x, fn_u2f(fn_brev(u))); break;
            case 13: r = fn_h2f((u16)u); break;
            case 14: r = fn_b2f((u16)u); break;
            case 15: r = fn_u32_to_f32(u); break;
            default: break;
        }
        if (which == 16)
            y[i] = (u32)fn_f2h(x) | (u32)fn_f2b(x) << 16;
        else
            y[i] = fn_f2u(r);
    }
}
