// gdn_conv: finishes the linears in front of the DeltaNet recurrence as linear_finish does; the first one's outputs
// go through a causal depthwise convolution of four taps, then silu, instead of to memory.
// Contract    linears[j].part (segments, rows_cap, n) f32, one leaf, any n >= 1, EXL3: n % 128 == 0; round.rows_cap
//             == grid z.
//             j > 0: -> linears[j].out (rows_cap, n) f32, rows < round.n_rows.  j = 0: n = channels, its finished
//             outputs x and w (channels, 4) f32, oldest tap first -> out (rows_cap, channels) f32; its own `out` is
//             not written.  The slot's tail, f16 (3, channels) oldest first at slot.recurrent + tail_offset (8-byte
//             aligned), holds the three inputs before the run and is replaced by the last three of the run.  Rows
//             of runs >= round.n_runs are not touched.
// Launch      grid (ceil(n_max / 512), n_linears, rows_cap), block 128: one warp a block of 128 outputs.  z is a run
//             of linear 0, whose rows the warp takes in order with the next one's units on their way; of the others
//             a row.
// Arithmetic  orders part_sum_v1 and hadamard, as linear_finish.  f = f16(x);  v = w0 * f[t-3], then v =
//             fma(w1, f[t-2], v), fma(w2, f[t-1], v), fma(w3, f[t], v); out = silu(v).  Order gdn_conv_v1.
// Equality    the bytes of linear_finish for j > 0.  A run of n rows gives the bytes of n runs of one row, tail
//             included.  NaN and Inf of x stay in their channel, for the four rows whose taps see them.
// Reference   ref/gdn.py causal_conv.  Source: model.md section 4, step 2.
//
// The tail was last written in an earlier round: it is read before the launches before this one are done.
#include "exl3/finish.cuh"

namespace FN_NAMESPACE {

// Of four neighbouring f16 the first n; whole: all four, 8-byte aligned.
FN_DEVICE uint2 load4(const u16* at, u32 n, bool whole) {
    if (whole) return fn_ld_here(reinterpret_cast<const uint2*>(at));
    u16 h[4] = {0, 0, 0, 0};
#pragma unroll
    for (u32 i = 0; i < 4u; i++)
        if (i < n) h[i] = fn_ld_here(at + i);
    return make_uint2(fn_pack_h2(h[0], h[1]), fn_pack_h2(h[2], h[3]));
}
FN_DEVICE void store4(u16* at, u32 n, bool whole, uint2 v) {
    if (whole) {
        *reinterpret_cast<uint2*>(at) = v;
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 4u; i++)
        if (i < n) at[i] = (u16)((i < 2u ? v.x : v.y) >> 16u * (i & 1u));
}

// x: four channels' newest inputs, before: their last three, oldest first; x becomes the outputs.
FN_DEVICE void convolve(float (&x)[4], const float4 (&tap)[4], uint2 (&before)[3]) {
    uint2 newest = make_uint2(fn_pack_h2(x[0], x[1]), fn_pack_h2(x[2], x[3]));
    float f[4][4];
#pragma unroll
    for (int t = 0; t < 3; t++) fn_widen_h4(before[t], f[t]);
    fn_widen_h4(newest, f[3]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float v = fn_mul(tap[i].x, f[0][i]);
        v = fn_fma(tap[i].y, f[1][i], v);
        v = fn_fma(tap[i].z, f[2][i], v);
        v = fn_fma(tap[i].w, f[3][i], v);
        x[i] = fn_silu(v);
    }
    before[0] = before[1];
    before[1] = before[2];
    before[2] = newest;
}

}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRun* runs, const FnSlot* slots, const FnLinear* linears, const float* w,
           u64 tail_offset, float* out, u32 channels)) {
    using namespace FN_NAMESPACE;
    fn_let_next();
    u32 place = blockIdx.z, cap = gridDim.z, block = 4u * blockIdx.x + (threadIdx.x >> 5);
    bool conv = blockIdx.y == 0;
    FnLinear linear = linears[blockIdx.y];
    FnRound now = fn_ld_here(round);
    FnRun run = fn_ld_here(runs + place);  // together with it; any bytes beyond n_runs
    u32 c = 128u * block + 4u * (threadIdx.x & 31u), mine = conv && c < channels ? channels - c : 0u;
    float4 tap[4];
#pragma unroll
    for (u32 i = 0; i < 4u; i++) {
        tap[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (i < mine) tap[i] = fn_ld_here(reinterpret_cast<const float4*>(w) + c + i);
    }
    u16* tail = nullptr;
    uint2 before[3] = {make_uint2(0, 0), make_uint2(0, 0), make_uint2(0, 0)};
    FnFinish<false> finish(linear, block);
    if (mine && place < now.n_runs) {
        tail = reinterpret_cast<u16*>(fn_ld_here(&slots[run.slot].recurrent) + tail_offset) + c;
#pragma unroll
        for (u32 t = 0; t < 3u; t++) before[t] = load4(tail + t * channels, mine, finish.quads);
    }

    fn_wait_prior();
    if (place >= (conv ? now.n_runs : now.n_rows) || 128u * block >= linear.n) return;
    u32 row = conv ? run.first_row : place, end = conv ? row + run.n_rows : row + 1u;
    float* to = conv ? out : reinterpret_cast<float*>(linear.out);
    finish.ask(linear, row, cap);
    for (; row < end; row++) {
        float v[4];
        finish.sum(linear, row, cap, v);
        if (row + 1u < end) finish.ask(linear, row + 1u, cap);
        finish.rotate(linear, v);
        if (conv) convolve(v, tap, before);
        finish.store(to, row, v);
    }
    if (!mine) return;
#pragma unroll
    for (u32 t = 0; t < 3u; t++) store4(tail + t * channels, mine, finish.quads, before[t]);
}
