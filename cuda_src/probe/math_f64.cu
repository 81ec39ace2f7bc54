// math_f64: the double-precision functions at given points.
// Contract    x (n) f64 -> y (n, 3) f64: sine, cosine (NaN from |x| = 3e5 on), e^x.
// Launch      grid (any), block 128, grid stride.
// Arithmetic  none of its own: math.cuh.
// Equality    same bytes on a GPU and in the simulator for every input that is no NaN.
// Reference   check/cases_probe.py.
#include "../prelude.cuh"

FN_KERNEL((const double* x, double* y, u32 n)) {
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        double s, c;
        fn_sincos_f64(x[i], s, c);
        y[3 * i] = s;
        y[3 * i + 1] = c;
        y[3 * i + 2] = fn_exp_f64(x[i]);
    }
}
