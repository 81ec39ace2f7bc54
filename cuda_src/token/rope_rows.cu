// rope_rows: cosine and sine of the rotary angles, at each row's position and at its block's first position.
// Contract    rows[r].position < 262,144 -> rope, rope_block (rows_cap, rope_dim / 2, 2) f32: (cos, sin) of
//             frequency i at position t, and at 4 * (t >> 2).  rope_dim even.  Rows >= n_rows are not
//             written.
// Launch      grid (rows_cap), block 64, no shared memory.  A thread per frequency and table.
// Arithmetic  omega = f32(exp(-(2i / rope_dim) * ln theta)) in f64; angle = f32(t) * omega in f32, one
//             rounding; cos, sin by fn_sincos_f64 of the angle, then one rounding to f32.
// Equality    order rope_v1: the bytes depend on (theta, rope_dim, i, t) alone.
// Reference   ref/token.py rope_rows.  Source: config.json rope_parameters.rope_theta, partial_rotary_factor.
#include "prelude.cuh"
#include "tables.cuh"

namespace FN_NAMESPACE {

// Natural logarithm of a positive normal x, relative error below 4e-16 for x >= 2.  x = 2^e * m with m in
// [sqrt(1/2), sqrt(2)), ln m = 2 artanh(w) with w = (m - 1) / (m + 1), |w| < 0.172: the first dropped term of
// the series is w^22 / 23 < 1e-18.
FN_DEVICE double fn_log_f64(double x) {
    u64 u = fn_d2u(x);
    i32 e = (i32)((i64)(u - 0x3fe6a09e667f3bcdull) >> 52);
    double m = fn_u2d(u - ((u64)(i64)e << 52));
    double w = fn_ddiv(fn_dsub(m, 1.0), fn_dadd(m, 1.0)), z = fn_dmul(w, w);
    double p = 0x1.8618618618618p-5;            // 1/21
    p = fn_dfma(p, z, 0x1.af286bca1af28p-5);    // 1/19
    p = fn_dfma(p, z, 0x1.e1e1e1e1e1e1ep-5);    // 1/17
    p = fn_dfma(p, z, 0x1.1111111111111p-4);    // 1/15
    p = fn_dfma(p, z, 0x1.3b13b13b13b14p-4);    // 1/13
    p = fn_dfma(p, z, 0x1.745d1745d1746p-4);    // 1/11
    p = fn_dfma(p, z, 0x1.c71c71c71c71cp-4);    // 1/9
    p = fn_dfma(p, z, 0x1.2492492492492p-3);    // 1/7
    p = fn_dfma(p, z, 0x1.999999999999ap-3);    // 1/5
    p = fn_dfma(p, z, 0x1.5555555555555p-2);    // 1/3
    double w2 = fn_dadd(w, w);
    double low = fn_dfma((double)e, 0x1.abc9e3b39803fp-56, fn_dmul(fn_dmul(w2, z), p));
    return fn_dfma((double)e, 0x1.62e42fefa39efp-1, fn_dadd(w2, low));
}

}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRow* rows, float theta, u32 rope_dim, float* rope,
           float* rope_block)) {
    fn_let_next();
    u32 r = blockIdx.x, half = rope_dim >> 1;
    double ln_theta = FN_NAMESPACE::fn_log_f64((double)theta);
    u32 n_rows = fn_ld_here(&round->n_rows), t = fn_ld_here(&rows[r].position);  // any bytes beyond n_rows
    fn_wait_prior();
    if (r >= n_rows) return;
    for (u32 j = threadIdx.x; j < 2u * half; j += FN_THREADS) {
        u32 i = j < half ? j : j - half;
        double power = fn_ddiv((double)(2u * i), (double)rope_dim);
        float omega = (float)fn_exp_f64(-fn_dmul(power, ln_theta));
        float angle = fn_mul(fn_u32_to_f32(j < half ? t : t & ~3u), omega);
        double s, c;
        fn_sincos_f64((double)angle, s, c);
        float2 v;
        v.x = (float)c, v.y = (float)s;
        reinterpret_cast<float2*>(j < half ? rope : rope_block)[(u64)r * half + i] = v;
    }
}
