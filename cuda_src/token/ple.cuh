// ple.cuh: order ple_v1, what its two forms share: ple_mix walks over the rows of a run; ple_gate and
// ple_conv take all rows of a launch at once.  256 threads make the four sums of a row and stream.
//
//   thread  channels 2 tid, 2 tid + 1, + 512, ...; four fma chains over them, rising, from +0
//   warp    xor tree 16, 8, 4, 2, 1;  block: the 8 warp sums by ((0+1)+(2+3))+((4+5)+(6+7))
#pragma once
#include "prelude.cuh"
#include "warp.cuh"

// One channel more in a thread's sums: key^2, stream^2, value^2, weighted key * stream.
FN_DEVICE void fn_ple_add(float (&sum)[4], float k, float s, float v, float wk, float wq) {
    sum[0] = fn_fma(k, k, sum[0]);
    sum[1] = fn_fma(s, s, sum[1]);
    sum[2] = fn_fma(v, v, sum[2]);
    sum[3] = fn_fma(fn_mul(k, fn_add(1.f, wk)), fn_mul(s, fn_add(1.f, wq)), sum[3]);
}

FN_DEVICE float fn_ple_tree(const float (&p)[8]) {
    return fn_add(fn_add(fn_add(p[0], p[1]), fn_add(p[2], p[3])),
                  fn_add(fn_add(p[4], p[5]), fn_add(p[6], p[7])));
}

// sigmoid of the signed root of the score; sign(0) = 0.
FN_DEVICE float fn_ple_gate(float score) {
    float size = fn_u2f(fn_f2u(score) & 0x7fffffffu);
    float root = fn_sqrt(size < 1e-6f ? 1e-6f : size);
    return fn_sigmoid(score > 0.f ? root : score < 0.f ? -root : score);
}

// part: warp sums of the block.  g: the gate;  ry: 1/rms of g * value.
FN_DEVICE void fn_ple_scales(const float (&part)[4][8], u32 hidden, float eps, float& g, float& ry) {
    float width = fn_u32_to_f32(hidden);
    float rk = fn_rsqrt(fn_add(fn_div(fn_ple_tree(part[0]), width), eps));
    float rq = fn_rsqrt(fn_add(fn_div(fn_ple_tree(part[1]), width), eps));
    float score = fn_div(fn_mul(fn_mul(fn_ple_tree(part[3]), rk), rq), fn_sqrt(width));
    g = fn_ple_gate(score);
    ry = fn_rsqrt(fn_add(fn_mul(fn_mul(g, g), fn_div(fn_ple_tree(part[2]), width)), eps));
}

// What the convolution takes of a channel: y = g * value, normalised, rounded once.
FN_DEVICE u16 fn_ple_input(float y, float ry, float wc) {
    return fn_f2h(fn_mul(fn_mul(y, ry), fn_add(1.f, wc)));
}

// The conv taps t-9, t-6, t-3 and t of one channel, and silu.
FN_DEVICE float fn_ple_conv(float4 w, u32 t9, u32 t6, u32 t3, u32 now) {
    float c = fn_mul(w.x, fn_h2f((u16)t9));
    c = fn_fma(w.y, fn_h2f((u16)t6), c);
    c = fn_fma(w.z, fn_h2f((u16)t3), c);
    return fn_silu(fn_fma(w.w, fn_h2f((u16)now), c));
}
