// gdn_step: the DeltaNet recurrence, one token after the other: decay, read, write, output.
// Contract    qkv (rows_cap, 2 n_k 128 + n_v 128) f32 after gdn_conv: q heads, k heads, v heads; a, b
//             (rows_cap, n_v) f32; a_log, dt_bias (n_v) f32 -> o (rows_cap, n_v 128) f32.  The slot's state,
//             f32 (n_v, 128 value columns, 128 key rows) at slot.recurrent + state_offset, is updated in
//             place.  n_v % n_k == 0. Rows of runs >= round.n_runs are not touched.
// Launch      grid (4 n_v, rows_cap as runs), block 128: a block is 32 value columns of one head, a column is
//             4 lanes. Lane p of a column keeps key rows 16m + 4p + q (m 0..7, q 0..3) in registers over the
//             whole run, so a warp's load of one m touches 8 columns x 64 consecutive bytes.  No shared
//             memory, no barrier.
// Arithmetic  order gdn_step_v1.  S(x, y) = per lane fma(x, y, acc) from +0 over m, then q, rising; then over
//             the four lanes (0+1)+(2+3).
//             qn = (q * rsqrt(S(q, q) + 1e-6)) * 128^-1/2;  kn = k * rsqrt(S(k, k) + 1e-6);
//             beta = sigmoid(b);  decay = exp(-(exp(a_log) * softplus(a + dt_bias)));
//             M = decay * M;  delta = beta * (v - S(M, kn));  M = fma(kn, delta, M);  o = S(M, qn).
// Equality    a run of n rows gives the bytes of n runs of one row, state included.  NaN and Inf of a head
//             stay in it.
// Reference   ref/gdn.py delta_rule.  Source: model.md section 4, steps 3 to 5.
//
// The state was last written in an earlier round: it is read before the launches before this one are done.
#include "gdn/unit.cuh"
#include "tables.cuh"

FN_KERNEL((const FnRound* round, const FnRun* runs, const FnSlot* slots, const float* qkv, const float* a,
           const float* b, const float* a_log, const float* dt_bias, u64 state_offset, float* o, u32 n_k,
           u32 n_v)) {
    using namespace fn_unit;
    fn_let_next();
    u32 head = blockIdx.x >> 2, column = (blockIdx.x & 3u) * 32u + (threadIdx.x >> 2), p = threadIdx.x & 3u;
    u32 key_head = head / (n_v / n_k), stride = (2u * n_k + n_v) * 128u;
    float rate = fn_ld_here(a_log + head), bias = fn_ld_here(dt_bias + head);
    u32 n_runs = fn_ld_here(&round->n_runs);
    FnRun run = fn_ld_here(runs + blockIdx.y);  // together with n_runs; any bytes beyond it
    bool live = blockIdx.y < n_runs;
    float* state = nullptr;
    float4 M[8], k[8], q[8];
    if (live) {
        state = reinterpret_cast<float*>(fn_ld_here(&slots[run.slot].recurrent) + state_offset) +
                (head * 128u + column) * 128u + 4u * p;
#pragma unroll
        for (int m = 0; m < 8; m++) M[m] = fn_ld_here(reinterpret_cast<const float4*>(state) + 4 * m);
        rate = fn_exp(rate);
    }

    fn_wait_prior();
    if (!live) return;
    const float* in = qkv + (u64)run.first_row * stride;
    for (u32 r = 0; r < run.n_rows; r++, in += stride) {
        u32 row = run.first_row + r;
        load8(k, in + (n_k + key_head) * 128u + 4u * p);
        load8(q, in + key_head * 128u + 4u * p);
        float v = fn_ld(in + (2u * n_k + head) * 128u + column);
        float write = fn_ld(b + row * n_v + head), pre = fn_ld(a + row * n_v + head);
        float decay = fn_exp_down(-fn_mul(rate, fn_softplus(fn_add(pre, bias))));
        float beta = fn_sigmoid(write);

        float rk = fn_rsqrt(fn_add(dot(k, k), L2_EPS)), rq = fn_rsqrt(fn_add(dot(q, q), L2_EPS));
#pragma unroll
        for (int m = 0; m < 8; m++) {
            k[m] = times(k[m], rk);
            q[m] = times(times(q[m], rq), KEY_SCALE);
            M[m] = times(M[m], decay);
        }
        float delta = fn_mul(beta, fn_sub(v, dot(M, k)));
#pragma unroll
        for (int m = 0; m < 8; m++) {
            M[m] = make_float4(fn_fma(k[m].x, delta, M[m].x), fn_fma(k[m].y, delta, M[m].y),
                               fn_fma(k[m].z, delta, M[m].z), fn_fma(k[m].w, delta, M[m].w));
        }
        float out = dot(M, q);
        if (p == 0) o[(row * n_v + head) * 128u + column] = out;
    }
#pragma unroll
    for (int m = 0; m < 8; m++) *(reinterpret_cast<float4*>(state) + 4 * m) = M[m];
}
