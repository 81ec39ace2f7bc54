// site_norm: adds the last sublayer's output to the streams and normalises each stream for the next site.
// Contract    streams (rows_cap, 4 hidden) f32 rw, y (rows_cap, hidden) f32, inject (rows_cap, 4) f32, w (4
//             hidden) f32 -> n16 (rows_cap, 4 hidden) f16 in fragment order, or with tiled != 0 as a tile
//             image (fn_tile_at) of 4 hidden / 64 k blocks, rinv (rows_cap, 4) f32; with add != 0 the streams
//             are updated in place, else they are left alone and y and inject are not read.  hidden % 16 ==
//             0. Rows >= round.n_rows are not touched.
// Launch      grid (4 streams, rows_cap), block 256, shared RmsShared.  One stream of one row per block; any
//             number of rows.  Sixteen lanes fill a line of 128 bytes of the tile image.
// Arithmetic  s = fma(inject_j, y, s);  rinv_j = order rms_row_v1 over the stream;  n = (s * rinv) * (1 + w);
//             n16 = f16(n), the same in both forms.  rms_row.cuh has the order.
// Equality    a row's bytes do not depend on other rows.  NaN and Inf reach rinv and n16 of their stream
//             only.
// Reference   ref/glue.py rms_norm.  Source: model.md sections 2 and 3, config rms_norm_eps.
#include "glue/rms_row.cuh"
#include "exl3.cuh"

namespace FN_NAMESPACE {
static_assert(FN_THREADS == 256, "rms_row_v1 is an order of 256 threads");
const u32 KEEP = 3;  // float4s a thread holds in registers: hidden up to 3072; beyond, the rest is read again

FN_DEVICE float4 added(float4 s, float4 y, float p) {
    return make_float4(fn_fma(p, y.x, s.x), fn_fma(p, y.y, s.y), fn_fma(p, y.z, s.z), fn_fma(p, y.w, s.w));
}

FN_DEVICE float normed(float s, float w, float rinv) { return fn_mul(fn_mul(s, rinv), fn_add(1.f, w)); }


// n16 of a quad: two neighbouring words, of which the second lies `gap` words further.
FN_DEVICE void store(u16* to, u32 gap, float4 s, float4 w, float rinv) {
    u32 low = fn_pack_h2(normed(s.x, w.x, rinv), normed(s.y, w.y, rinv));
    u32 high = fn_pack_h2(normed(s.z, w.z, rinv), normed(s.w, w.w, rinv));
    u32* at = reinterpret_cast<u32*>(to);
    if (gap == 1u) {  // a tile image
        *reinterpret_cast<uint2*>(at) = make_uint2(low, high);
    } else {
        at[0] = low, at[gap] = high;
    }
}
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, float* streams, const float* y, const float* inject, u32 add, const float* w,
           u16* n16, float* rinv, u32 hidden, float eps, u32 tiled)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(FnRmsShared, shared);
    fn_let_next();
    u32 stream = blockIdx.x, row = blockIdx.y, quads = hidden >> 2, t = threadIdx.x;
    const float4* w4 = reinterpret_cast<const float4*>(w + (u64)stream * hidden);
    u32 n_rows = fn_ld_here(&round->n_rows);
    float4 s[KEEP], wk[KEEP], yk[KEEP];
#pragma unroll
    for (u32 c = 0; c < KEEP; c++) {
        u32 i = t + 256u * c;
        if (i < quads) wk[c] = fn_ld_here(w4 + i);
    }

    fn_wait_prior();
    if (row >= n_rows) return;
    u64 base = (u64)(row * 4u + stream) * hidden;
    float4* s4 = reinterpret_cast<float4*>(streams + base);
    const float4* y4 = reinterpret_cast<const float4*>(y + (u64)row * hidden);
    float p = add ? fn_ld(inject + row * 4u + stream) : 0.f, acc = 0.f;

#pragma unroll
    for (u32 c = 0; c < KEEP; c++) {
        u32 i = t + 256u * c;
        if (i < quads) {
            s[c] = fn_ld(s4 + i);
            if (add) yk[c] = fn_ld(y4 + i);
        }
    }
#pragma unroll
    for (u32 c = 0; c < KEEP; c++) {
        u32 i = t + 256u * c;
        if (i < quads) {
            if (add) {
                s[c] = added(s[c], yk[c], p);
                s4[i] = s[c];
            }
            acc = fn_square4(s[c], acc);
        }
    }
    for (u32 i = t + 256u * KEEP; i < quads; i += 256u) {
        float4 v = fn_ld(s4 + i);
        if (add) {
            v = added(v, fn_ld(y4 + i), p);
            s4[i] = v;
        }
        acc = fn_square4(v, acc);
    }

    // The thread's next quad has k + 1024: 16 images of 64 rows x 64 k further, at the same place in them.
    u32 gap = tiled ? 1u : 2u, step = tiled ? 16u * 4096u : 1024u;
    u64 place = tiled ? fn_tile_at(hidden >> 4, row, stream * hidden + 4u * t) : base + fn_frag_pos(4u * t);
    u16* to = n16 + place;
    float r = fn_rms_scale(shared, acc, hidden, eps);
    if (t == 0) rinv[row * 4u + stream] = r;
#pragma unroll
    for (u32 c = 0; c < KEEP; c++) {
        u32 i = t + 256u * c;
        if (i < quads) store(to + step * c, gap, s[c], wk[c], r);
    }
    for (u32 i = t + 256u * KEEP; i < quads; i += 256u)
        store(to + (u64)step * (i >> 8), gap, fn_ld(s4 + i), fn_ldg(w4 + i), r);
}
