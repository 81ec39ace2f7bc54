// gdn_conv: causal depthwise convolution of four taps over the DeltaNet inputs, then silu.
// Contract    x (rows_cap, channels) f32, w (channels, 4) f32, oldest tap first -> out (rows_cap, channels)
//             f32. The slot's tail, f16 (3, channels) oldest first at slot.recurrent + tail_offset, holds the
//             three inputs before the run and is replaced by the last three of the run.  Rows of runs >=
//             round.n_runs are not touched.
// Launch      grid (ceil(channels / 128), rows_cap as runs), block 128.  One channel a thread, a run's rows
//             in order.
// Arithmetic  f = f16(x);  v = w0 * f[t-3], then v = fma(w1, f[t-2], v), fma(w2, f[t-1], v), fma(w3, f[t],
//             v); out = silu(v).  Order gdn_conv_v1.
// Equality    a run of n rows gives the bytes of n runs of one row, tail included.  NaN and Inf stay in their
//             channel, for the four rows whose taps see them.
// Reference   ref/gdn.py causal_conv.  Source: model.md section 4, step 2.
//
// The tail was last written in an earlier round: it is read before the launches before this one are done.
#include "prelude.cuh"
#include "tables.cuh"

FN_KERNEL((const FnRound* round, const FnRun* runs, const FnSlot* slots, const float* x, const float* w,
           u64 tail_offset, float* out, u32 channels)) {
    fn_let_next();
    u32 c = blockIdx.x * FN_THREADS + threadIdx.x;
    float4 tap = make_float4(0.f, 0.f, 0.f, 0.f);
    if (c < channels) tap = fn_ld_here(reinterpret_cast<const float4*>(w) + c);
    u32 n_runs = fn_ld_here(&round->n_runs);
    FnRun run = fn_ld_here(runs + blockIdx.y);  // together with n_runs; any bytes beyond it
    bool live = blockIdx.y < n_runs && c < channels;
    u16 *tail = nullptr, h0 = 0, h1 = 0, h2 = 0;
    if (live) {
        tail = reinterpret_cast<u16*>(fn_ld_here(&slots[run.slot].recurrent) + tail_offset) + c;
        h0 = fn_ld_here(tail), h1 = fn_ld_here(tail + channels), h2 = fn_ld_here(tail + 2u * channels);
    }

    fn_wait_prior();
    if (!live) return;
    const float* in = x + (u64)run.first_row * channels + c;
    float* to = out + (u64)run.first_row * channels + c;
    float next = fn_ld(in);
    for (u32 r = 0; r < run.n_rows; r++) {
        u16 h3 = fn_f2h(next);
        if (r + 1u < run.n_rows) next = fn_ld(in + (u64)(r + 1u) * channels);
        float v = fn_mul(tap.x, fn_h2f(h0));
        v = fn_fma(tap.y, fn_h2f(h1), v);
        v = fn_fma(tap.z, fn_h2f(h2), v);
        v = fn_fma(tap.w, fn_h2f(h3), v);
        to[(u64)r * channels] = fn_silu(v);
        h0 = h1;
        h1 = h2;
        h2 = h3;
    }
    tail[0] = h0;
    tail[channels] = h1;
    tail[2u * channels] = h2;
}
