// ple_mix: gates the n-gram value into the residual streams and adds its dilated causal convolution.
// Contract    key (rows_cap, 4 * hidden), value (rows_cap, hidden) f32; streams (rows_cap, 4 * hidden) f32
//             read and written; norm_key, norm_query, norm_conv (4 * hidden), conv (4 * hidden, 4) f32; tail
//             f16 (9, 4 * hidden) at slots[run.slot].recurrent + tail_offset, the conv inputs of the nine
//             tokens before the run, oldest first, read and written.  hidden % 2 == 0.  One run a slot.  Rows
//             outside the runs are not touched.
// Launch      grid (4, rows_cap), block 256, shared 256 B (PleShared).  A block per stream and run; rows in
//             order.
// Arithmetic  a thread owns channels 2 tid, 2 tid + 1, + 512, ...; four fma chains over them in rising order
//             from zero (key^2, stream^2, value^2, weighted key * stream), xor trees 16,8,4,2,1, warps by the
//             tree of 8; the rest by channel.  The conv input is rounded to f16 before its first use.
// Equality    order ple_v1 (ARITHMETIC.md); n rows in one run give the bytes of n launches of one row.  NaN
//             reaches the streams and the tail.
// Reference   ref/token.py ple_mix.  Source: config.json rms_norm_eps, ple_conv_kernel_size 4, ngram_size 3
//             (dilation).
#include "prelude.cuh"
#include "warp.cuh"
#include "tables.cuh"

namespace FN_NAMESPACE {

// Warp partials of the four sums.  Two sets, used in turn: one barrier a row is enough.
struct PleShared { float part[2][4][8]; };

FN_DEVICE float tree8(const float (&p)[8]) {
    return fn_add(fn_add(fn_add(p[0], p[1]), fn_add(p[2], p[3])),
                  fn_add(fn_add(p[4], p[5]), fn_add(p[6], p[7])));
}

// sigmoid of the signed root of the score; sign(0) = 0.
FN_DEVICE float gate(float score) {
    float size = fn_u2f(fn_f2u(score) & 0x7fffffffu);
    float root = fn_sqrt(size < 1e-6f ? 1e-6f : size);
    return fn_sigmoid(score > 0.f ? root : score < 0.f ? -root : score);
}

// The conv taps t-9, t-6, t-3 and t of one channel.
FN_DEVICE float conv_silu(float4 w, u32 t9, u32 t6, u32 t3, u16 now) {
    float c = fn_mul(w.x, fn_h2f((u16)t9));
    c = fn_fma(w.y, fn_h2f((u16)t6), c);
    c = fn_fma(w.z, fn_h2f((u16)t3), c);
    return fn_silu(fn_fma(w.w, fn_h2f(now), c));
}

}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRun* runs, const FnSlot* slots, const float* key, const float* value,
           float* streams, const float* norm_key, const float* norm_query, const float* norm_conv,
           const float* conv, u64 tail_offset, u32 hidden, float eps)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(PleShared, shared);
    if (blockIdx.y >= round->n_runs) return;
    FnRun run = runs[blockIdx.y];
    u32 stream = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31u;
    u64 first = (u64)stream * hidden;  // of this stream in a vector of 4 * hidden
    const float *wk = norm_key + first, *wq = norm_query + first, *wc = norm_conv + first;
    const float* taps = conv + 4u * first;
    u16* tail = reinterpret_cast<u16*>(slots[run.slot].recurrent + tail_offset) + first;
    u64 step = 4u * (u64)hidden;  // from one token of the tail to the next
    float width = fn_u32_to_f32(hidden);

    for (u32 i_row = 0; i_row < run.n_rows; ++i_row) {
        u64 r = run.first_row + i_row;
        const float *k = key + r * step + first, *v = value + r * hidden;
        float* s = streams + r * step + first;
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
        for (u32 i = 2u * threadIdx.x; i < hidden; i += 2u * FN_THREADS) {
            for (u32 j = i; j < i + 2u; ++j) {
                float kj = k[j], sj = s[j], vj = v[j];
                sum[0] = fn_fma(kj, kj, sum[0]);
                sum[1] = fn_fma(sj, sj, sum[1]);
                sum[2] = fn_fma(vj, vj, sum[2]);
                sum[3] = fn_fma(fn_mul(kj, fn_add(1.f, wk[j])), fn_mul(sj, fn_add(1.f, wq[j])), sum[3]);
            }
        }
        float(&part)[4][8] = shared.part[i_row & 1u];
        for (u32 j = 0; j < 4; ++j) {
            float w = fn_warp_sum(sum[j]);
            if (lane == 0) part[j][warp] = w;
        }
        __syncthreads();
        float rk = fn_rsqrt(fn_add(fn_div(tree8(part[0]), width), eps));
        float rq = fn_rsqrt(fn_add(fn_div(tree8(part[1]), width), eps));
        float score = fn_div(fn_mul(fn_mul(tree8(part[3]), rk), rq), fn_sqrt(width));
        float g = gate(score);
        float ry = fn_rsqrt(fn_add(fn_mul(fn_mul(g, g), fn_div(tree8(part[2]), width)), eps));

        for (u32 i = 2u * threadIdx.x; i < hidden; i += 2u * FN_THREADS) {
            u32 past[9];
            for (u32 t = 0; t < 9; ++t) past[t] = *reinterpret_cast<const u32*>(tail + t * step + i);
            float y0 = fn_mul(g, v[i]), y1 = fn_mul(g, v[i + 1]);
            u16 n0 = fn_f2h(fn_mul(fn_mul(y0, ry), fn_add(1.f, wc[i])));
            u16 n1 = fn_f2h(fn_mul(fn_mul(y1, ry), fn_add(1.f, wc[i + 1])));
            float4 w0 = fn_ld(reinterpret_cast<const float4*>(taps + 4u * i));
            float4 w1 = fn_ld(reinterpret_cast<const float4*>(taps + 4u * i + 4u));
            float c0 = conv_silu(w0, past[0], past[3], past[6], n0);
            float c1 = conv_silu(w1, past[0] >> 16, past[3] >> 16, past[6] >> 16, n1);
            s[i] = fn_add(s[i], fn_add(y0, c0));
            s[i + 1] = fn_add(s[i + 1], fn_add(y1, c1));
            for (u32 t = 0; t < 8; ++t) *reinterpret_cast<u32*>(tail + t * step + i) = past[t + 1];
            *reinterpret_cast<u32*>(tail + 8u * step + i) = fn_pack_h2(n0, n1);
        }
    }
}
