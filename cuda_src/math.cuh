// math.cuh: elementary functions whose bytes are defined by this text.  Only fma, mul, add, div and sqrt
// rounded to nearest, integer operations and conversions; no library.  Included by prelude.cuh, never alone.
//
// Errors against FP64, 2 million points a range (host test test_math.py holds them): exp2 0.82 ulp, exp 1.01,
// sigmoid 2.3, silu 3.0, softplus 1.6, log 0.75, log1p on [0,1] 0.78, rsqrt 1.5.  exp and exp2 give
// subnormals with one rounding.  NaN in, NaN out; silu(-inf) is NaN (as x times sigmoid).  fn_sincos_f64 and
// fn_exp_f64: see there.
#pragma once

// Nearest integer, ties to even, for |x| < 2^22: as a float, and in n.
FN_DEVICE float fn_rint_f32(float x, i32& n) {
    float t = fn_add(x, 12582912.f);  // 1.5 * 2^23: the low bits of t are the integer
    n = (i32)(fn_f2u(t) - 0x4b400000u);
    return fn_add(t, -12582912.f);
}

// p * 2^n with one rounding, subnormal results included.  n in [-160, 130], p in [0.5, 2].
FN_DEVICE float fn_scale_f32(float p, i32 n) {
    i32 a = n >> 1, b = n - a;  // both powers are normal; for n < -126 the first product is exact
    return fn_mul(fn_mul(p, fn_u2f((u32)(a + 127) << 23)), fn_u2f((u32)(b + 127) << 23));
}

FN_DEVICE float fn_exp2(float x) {
    if (x != x) return fn_nan();
    if (x > 128.f) x = 128.f;
    if (x < -151.f) x = -151.f;
    i32 n;
    float f = fn_add(x, -fn_rint_f32(x, n));
    float p = 0x1.446ca0p-13f;
    p = fn_fma(p, f, 0x1.5f08bep-10f);
    p = fn_fma(p, f, 0x1.3b29e4p-7f);
    p = fn_fma(p, f, 0x1.c6af6cp-5f);
    p = fn_fma(p, f, 0x1.ebfbe0p-3f);
    p = fn_fma(p, f, 0x1.62e430p-1f);
    return fn_scale_f32(fn_fma(p, f, 1.f), n);
}

// exp(k ln 2 + r) / 2^k
FN_DEVICE float fn_exp_core(float x, float k) {
    float r = fn_fma(k, -0x1.62e430p-1f, x);  // ln 2 in two parts
    r = fn_fma(k, 0x1.05c610p-29f, r);
    float p = 0x1.6d7566p-10f;
    p = fn_fma(p, r, 0x1.120b8cp-7f);
    p = fn_fma(p, r, 0x1.5554b8p-5f);
    p = fn_fma(p, r, 0x1.5554dcp-3f);
    p = fn_fma(p, r, 0.5f);
    p = fn_fma(fn_mul(r, r), p, r);
    return fn_add(p, 1.f);
}

FN_DEVICE float fn_exp(float x) {
    if (x != x) return fn_nan();
    if (x > 89.f) x = 89.f;
    if (x < -104.f) x = -104.f;
    i32 n;
    float k = fn_rint_f32(fn_mul(x, 0x1.715476p+0f), n);
    return fn_scale_f32(fn_exp_core(x, k), n);
}

// log(1 + f) for f in [-0.2929, 0.4143], plus e * ln 2; c corrects the last bits of f.
FN_DEVICE float fn_log_core(float f, float c, i32 e) {
    float p = 0x1.1b4d66p-4f;
    p = fn_fma(p, f, -0x1.e2fbc0p-4f);
    p = fn_fma(p, f, 0x1.e65572p-4f);
    p = fn_fma(p, f, -0x1.fb40a0p-4f);
    p = fn_fma(p, f, 0x1.23324cp-3f);
    p = fn_fma(p, f, -0x1.5562f0p-3f);
    p = fn_fma(p, f, 0x1.99a54cp-3f);
    p = fn_fma(p, f, -0x1.ffffeep-3f);
    p = fn_fma(p, f, 0x1.555546p-2f);
    float z = fn_mul(f, f), fe = (float)e;
    p = fn_fma(fn_mul(z, f), p, fn_fma(fe, -0x1.05c610p-29f, c));
    p = fn_fma(z, -0.5f, p);
    p = fn_add(p, f);
    return fn_fma(fe, 0x1.62e430p-1f, p);
}

// Natural logarithm: log(0) = -inf, negative gives NaN, subnormals exact.
FN_DEVICE float fn_log(float x) {
    u32 u = fn_f2u(x);
    i32 e = 0;
    if (u - 1u >= 0x7f7fffffu) {  // zero, inf, NaN, negative
        if ((u << 1) == 0) return fn_u2f(0xff800000u);
        return u == 0x7f800000u ? x : fn_nan();
    }
    if (u < 0x00800000u) {
        x = fn_mul(x, 0x1p25f);
        u = fn_f2u(x);
        e = -25;
    }
    i32 k = (i32)(u - 0x3f3504f3u) >> 23;  // mantissa into [sqrt(1/2), sqrt(2))
    return fn_log_core(fn_add(fn_u2f(u - ((u32)k << 23)), -1.f), 0.f, e + k);
}

// log(1 + t), t in [0, 1]: what softplus needs.
FN_DEVICE float fn_log1p01(float t) {
    if (t < 0.4142f) return fn_log_core(t, 0.f, 0);
    float u = fn_add(t, 1.f), c = fn_add(t, -fn_add(u, -1.f));  // u + c == 1 + t exactly
    return fn_log_core(fn_add(fn_mul(u, 0.5f), -1.f), fn_div(c, u), 1);
}

// fn_exp(x) for x <= 0 (or NaN), in fewer instructions: 2^(n + 64) and 2^-64 are normal for -104 <= x, the first
// product is exact.
FN_DEVICE float fn_exp_down(float x) {
    x = fn_at_least(x, -104.f);
    float t = fn_add(fn_mul(x, 0x1.715476p+0f), 12582912.f);  // as fn_rint_f32
    float power = fn_u2f((fn_f2u(t) << 23) + (191u << 23));
    return fn_mul(fn_mul(fn_exp_core(x, fn_add(t, -12582912.f)), power), 0x1p-64f);
}

FN_DEVICE float fn_sigmoid(float x) {
    float t = fn_exp_down(fn_minus_abs(x)), d = fn_add(t, 1.f), r = fn_rcp_1to2(d);
    return x < 0.f ? fn_div_1to2(t, d, r) : r;
}

FN_DEVICE float fn_silu(float x) {
    float t = fn_exp_down(fn_minus_abs(x)), d = fn_add(t, 1.f);
    return fn_div_1to2(x < 0.f ? fn_mul(x, t) : x, d, fn_rcp_1to2(d));
}

FN_DEVICE float fn_softplus(float x) {
    if (x != x) return fn_nan();
    float t = fn_exp_down(fn_minus_abs(x));
    return fn_add(x > 0.f ? x : 0.f, fn_log1p01(t));
}

FN_DEVICE float fn_rsqrt(float x) { return fn_div(1.f, fn_sqrt(x)); }
FN_DEVICE float fn_rcp(float x) { return fn_div(1.f, x); }

// Nearest integer, ties to even, for |x| < 2^31: as a double, and in n.
FN_DEVICE double fn_rint_f64(double x, i32& n) {
    double t = fn_dadd(x, 0x1.8p52);
    n = (i32)(u32)fn_d2u(t);
    return fn_dsub(t, 0x1.8p52);
}

// sine and cosine for |x| < 3e5 (angles of positions to 262,143), absolute error below 1e-15; beyond, or NaN:
// NaN. x - k pi/2 by pi/2 in three parts: the first fma is exact (its result is a multiple of 2^-53 below 1),
// the second rounds once, the third part is below 2^-90.  Then Taylor series, whose first dropped terms are
// below 1e-17.
FN_DEVICE void fn_sincos_f64(double x, double& s, double& c) {
    if (!(x < 3e5 && x > -3e5)) {
        s = c = fn_u2d(0x7fffffffffffffffull);
        return;
    }
    i32 n;
    double k = fn_rint_f64(fn_dmul(x, 0x1.45f306dc9c883p-1), n);
    double r = fn_dfma(k, -0x1.921fb54442d18p+0, x);
    r = fn_dfma(k, -0x1.1a62633145c07p-54, r);
    r = fn_dfma(k, 0x1.f1976b7ed8fbcp-110, r);
    double z = fn_dmul(r, r);
    double a = -0x1.2f49b46814157p-57;          // -1/19!
    a = fn_dfma(a, z, 0x1.952c77030ad4ap-49);   // 1/17!
    a = fn_dfma(a, z, -0x1.ae7f3e733b81fp-41);  // -1/15!
    a = fn_dfma(a, z, 0x1.6124613a86d09p-33);   // 1/13!
    a = fn_dfma(a, z, -0x1.ae64567f544e4p-26);  // -1/11!
    a = fn_dfma(a, z, 0x1.71de3a556c734p-19);   // 1/9!
    a = fn_dfma(a, z, -0x1.a01a01a01a01ap-13);  // -1/7!
    a = fn_dfma(a, z, 0x1.1111111111111p-7);    // 1/5!
    a = fn_dfma(a, z, -0x1.5555555555555p-3);   // -1/3!
    double sr = fn_dfma(fn_dmul(z, r), a, r);
    double b = -0x1.6827863b97d97p-53;          // -1/18!
    b = fn_dfma(b, z, 0x1.ae7f3e733b81fp-45);   // 1/16!
    b = fn_dfma(b, z, -0x1.93974a8c07c9dp-37);  // -1/14!
    b = fn_dfma(b, z, 0x1.1eed8eff8d898p-29);   // 1/12!
    b = fn_dfma(b, z, -0x1.27e4fb7789f5cp-22);  // -1/10!
    b = fn_dfma(b, z, 0x1.a01a01a01a01ap-16);   // 1/8!
    b = fn_dfma(b, z, -0x1.6c16c16c16c17p-10);  // -1/6!
    b = fn_dfma(b, z, 0x1.5555555555555p-5);    // 1/4!
    double cr = fn_dfma(fn_dmul(z, z), b, fn_dfma(z, -0.5, 1.0));
    double sn = n & 1 ? cr : sr, cs = n & 1 ? sr : cr;
    s = n & 2 ? -sn : sn;
    c = (n + 1) & 2 ? -cs : cs;
}

// e^x, relative error below 5e-16 where the result is normal; subnormals with one rounding; overflow gives
// inf.
FN_DEVICE double fn_exp_f64(double x) {
    if (x != x) return fn_u2d(0x7fffffffffffffffull);
    if (x > 710.0) x = 710.0;
    if (x < -746.0) x = -746.0;
    i32 n;
    double k = fn_rint_f64(fn_dmul(x, 0x1.71547652b82fep+0), n);
    double r = fn_dfma(k, -0x1.62e42fefa39efp-1, x);
    r = fn_dfma(k, -0x1.abc9e3b39803fp-56, r);
    double p = 0x1.93974a8c07c9dp-37;          // 1/14!
    p = fn_dfma(p, r, 0x1.6124613a86d09p-33);  // 1/13!
    p = fn_dfma(p, r, 0x1.1eed8eff8d898p-29);  // 1/12!
    p = fn_dfma(p, r, 0x1.ae64567f544e4p-26);  // 1/11!
    p = fn_dfma(p, r, 0x1.27e4fb7789f5cp-22);  // 1/10!
    p = fn_dfma(p, r, 0x1.71de3a556c734p-19);  // 1/9!
    p = fn_dfma(p, r, 0x1.a01a01a01a01ap-16);  // 1/8!
    p = fn_dfma(p, r, 0x1.a01a01a01a01ap-13);  // 1/7!
    p = fn_dfma(p, r, 0x1.6c16c16c16c17p-10);  // 1/6!
    p = fn_dfma(p, r, 0x1.1111111111111p-7);   // 1/5!
    p = fn_dfma(p, r, 0x1.5555555555555p-5);   // 1/4!
    p = fn_dfma(p, r, 0x1.5555555555555p-3);   // 1/3!
    p = fn_dfma(p, r, 0.5);
    p = fn_dadd(fn_dfma(fn_dmul(r, r), p, r), 1.0);
    i32 lo = n >> 1, hi = n - lo;
    return fn_dmul(fn_dmul(p, fn_u2d((u64)(lo + 1023) << 52)), fn_u2d((u64)(hi + 1023) << 52));
}
