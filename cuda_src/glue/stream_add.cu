// stream_add: adds a sublayer's output to the four streams, where no site_norm follows at once.
// Contract    streams (rows_cap, 4 hidden) f32 rw, y (rows_cap, hidden) f32, inject (rows_cap, 4) f32.
//             Rows >= round.n_rows are not touched.
// Launch      grid (ceil(hidden / 256), rows_cap), block 256, one channel of the four streams a thread.
// Arithmetic  s_j = fma(inject_j, y, s_j): the bytes of site_norm with add.
// Reference   ref/orders.py fma32.  Source: model.md section 2.
#include "prelude.cuh"
#include "tables.cuh"

FN_KERNEL((const FnRound* round, float* streams, const float* y, const float* inject, u32 hidden)) {
    fn_let_next();
    u32 row = blockIdx.y, i = blockIdx.x * FN_THREADS + threadIdx.x;
    u32 n_rows = fn_ld_here(&round->n_rows);
    fn_wait_prior();
    if (row >= n_rows || i >= hidden) return;
    float4 p = fn_ld(reinterpret_cast<const float4*>(inject) + row);
    float v = fn_ld(y + (u64)row * hidden + i);
    float* s = streams + (u64)row * 4u * hidden + i;
    float a = fn_ld(s), b = fn_ld(s + hidden), c = fn_ld(s + 2u * hidden), d = fn_ld(s + 3u * hidden);
    s[0] = fn_fma(p.x, v, a);
    s[hidden] = fn_fma(p.y, v, b);
    s[2u * hidden] = fn_fma(p.z, v, c);
    s[3u * hidden] = fn_fma(p.w, v, d);
}
