// site_mid: what lies between the two products of a residual site: the low-rank row and the injection
// factors.
// Contract    linears FnLinear[2]: down (n = R outputs), inject (n = 4; read only with has_inject), both with
//             finished part (segments, rows_cap, n) f32, one leaf -> u (rows_cap, R) f16 in fragment order,
//             inject (rows_cap, 4) f32 (only with has_inject).  R % 16 == 0, segments <= 32.  Rows >=
//             round.n_rows are not touched.
// Launch      grid (rows_cap), block 384: a thread an output, so that at the published R = 320 every sum of
//             the row is on its way at once.
// Arithmetic  sum = part_sum_v1;  u = f16(silu(sum * 0.25));  inject = 2 * sigmoid(sum * 0.25).
// Equality    a row's bytes do not depend on other rows.  NaN and Inf stay in their output.
// Reference   ref/glue.py Site.  Source: model.md section 3: division by the 4 streams before silu and
//             sigmoid.
#include "exl3.cuh"

namespace FN_NAMESPACE {
const u32 SEGMENTS = 32;  // the most that fn_dot_segments gives

// fn_sum_units of one leaf with every load asked for before the first addition.
FN_DEVICE float sum_segments(const FnLinear& linear, u32 rows_cap, u32 row, u32 output) {
    const float* part = reinterpret_cast<const float*>(linear.part) + (u64)row * linear.n + output;
    u64 stride = (u64)rows_cap * linear.n;
    u32 segments = linear.segments;
    float p[SEGMENTS];
#pragma unroll
    for (u32 i = 0; i < SEGMENTS; i++) {
        if (i < segments) p[i] = fn_ldg(part + i * stride);
    }
    float sum = p[0];
#pragma unroll
    for (u32 i = 1; i < SEGMENTS; i++) {
        if (i < segments) sum = fn_add(sum, p[i]);
    }
    return sum;
}
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnLinear* linears, u32 has_inject, u16* u, float* inject)) {
    using namespace FN_NAMESPACE;
    u32 row = blockIdx.x, cap = fn_ld(&round->rows_cap);
    u32 rank = linears[0].n, n = has_inject ? rank + 4u : rank;
    if (row >= fn_ld(&round->n_rows)) return;
    for (u32 i = threadIdx.x; i < n; i += FN_THREADS) {
        bool low = i < rank;
        float sum = sum_segments(linears[low ? 0 : 1], cap, row, low ? i : i - rank);
        float x = fn_mul(sum, 0.25f);
        if (low) {
            u[(u64)row * rank + fn_frag_pos(i)] = fn_f2h(fn_silu(x));
        } else {
            inject[4u * row + (i - rank)] = fn_mul(2.f, fn_sigmoid(x));
        }
    }
}
