// ple_mix: gates the n-gram value into the residual streams and adds its dilated causal convolution.
// Contract    key (rows_cap, 4 * hidden), value (rows_cap, hidden) f32; streams (rows_cap, 4 * hidden) f32
//             read and written; norm_key, norm_query, norm_conv (4 * hidden), conv (4 * hidden, 4) f32; tail
//             f16 (9, 4 * hidden) at slots[run.slot].recurrent + tail_offset, the conv inputs of the nine
//             tokens before the run, oldest first, read and written.  hidden % 2 == 0.  One run a slot.  Rows
//             outside the runs are not touched.
// Launch      grid (4, rows_cap), block 256, shared 256 B (PleShared).  A block per stream and run; rows in
//             order.
// Arithmetic  order ple_v1 (ple.cuh).  The conv input is rounded to f16 before its first use.
// Equality    n rows in one run give the bytes of n launches of one row, and of ple_gate, ple_conv and
//             ple_tail.  NaN reaches the streams and the tail.
// Reference   ref/token.py ple_mix.  Source: config.json rms_norm_eps, ple_conv_kernel_size 4, ngram_size 3
//             (dilation).
#include "token/ple.cuh"
#include "tables.cuh"

namespace FN_NAMESPACE {

// Warp partials of the four sums.  Two sets, used in turn: one barrier a row is enough.
struct PleShared { float part[2][4][8]; };

}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRun* runs, const FnSlot* slots, const float* key, const float* value,
           float* streams, const float* norm_key, const float* norm_query, const float* norm_conv,
           const float* conv, u64 tail_offset, u32 hidden, float eps)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(PleShared, shared);
    fn_let_next();
    u32 n_runs = fn_ld_here(&round->n_runs);
    FnRun run = fn_ld_here(runs + blockIdx.y);  // any bytes beyond n_runs
    bool live = blockIdx.y < n_runs;
    u64 recurrent = live ? fn_ld_here(&slots[run.slot].recurrent) : 0u;

    fn_wait_prior();
    if (!live) return;
    u32 stream = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31u;
    u64 first = (u64)stream * hidden;  // of this stream in a vector of 4 * hidden
    const float *wk = norm_key + first, *wq = norm_query + first, *wc = norm_conv + first;
    const float* taps = conv + 4u * first;
    u16* tail = reinterpret_cast<u16*>(recurrent + tail_offset) + first;
    u64 step = 4u * (u64)hidden;  // from one token of the tail to the next

    for (u32 i_row = 0; i_row < run.n_rows; ++i_row) {
        u64 r = run.first_row + i_row;
        const float *k = key + r * step + first, *v = value + r * hidden;
        float* s = streams + r * step + first;
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
        for (u32 i = 2u * threadIdx.x; i < hidden; i += 2u * FN_THREADS) {
            for (u32 j = i; j < i + 2u; ++j) {
                fn_ple_add(sum, k[j], s[j], v[j], wk[j], wq[j]);
            }
        }
        float(&part)[4][8] = shared.part[i_row & 1u];
        for (u32 j = 0; j < 4; ++j) {
            float w = fn_warp_sum(sum[j]);
            if (lane == 0) part[j][warp] = w;
        }
        __syncthreads();
        float g, ry;
        fn_ple_scales(part, hidden, eps, g, ry);

        for (u32 i = 2u * threadIdx.x; i < hidden; i += 2u * FN_THREADS) {
            u32 past[9];
            for (u32 t = 0; t < 9; ++t) past[t] = *reinterpret_cast<const u32*>(tail + t * step + i);
            float y0 = fn_mul(g, v[i]), y1 = fn_mul(g, v[i + 1]);
            u16 n0 = fn_ple_input(y0, ry, wc[i]), n1 = fn_ple_input(y1, ry, wc[i + 1]);
            float4 w0 = fn_ld(reinterpret_cast<const float4*>(taps + 4u * i));
            float4 w1 = fn_ld(reinterpret_cast<const float4*>(taps + 4u * i + 4u));
            float c0 = fn_ple_conv(w0, past[0], past[3], past[6], n0);
            float c1 = fn_ple_conv(w1, past[0] >> 16, past[3] >> 16, past[6] >> 16, n1);
            s[i] = fn_add(s[i], fn_add(y0, c0));
            s[i + 1] = fn_add(s[i + 1], fn_add(y1, c1));
            for (u32 t = 0; t < 8; ++t) *reinterpret_cast<u32*>(tail + t * step + i) = past[t + 1];
            *reinterpret_cast<u32*>(tail + 8u * step + i) = fn_pack_h2(n0, n1);
        }
    }
}
