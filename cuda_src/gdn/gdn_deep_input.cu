// gdn_deep_input: what the DeltaNet recurrence needs of its inputs and not of the state, for many rows:
// convolution and silu, unit q and k, decay and beta.
// Contract    x (rows_cap, C) f32 with C = (2 n_k + n_v) 128, w (C, 4) f32 oldest tap first, a, b
//             (rows_cap, n_v) f32, a_log, dt_bias (n_v) f32 -> qkv (rows_cap, C) f32: unit q heads times
//             128^-1/2, unit k heads, v heads; gates (rows_cap, n_v, 2) f32: decay, beta.  The slot's tail,
//             f16 (3, C) oldest first at slot.recurrent + tail_offset, holds the three inputs before the run
//             and is left as it is: gdn_scan renews it. Rows >= round.n_rows are not touched.
// Launch      grid (2 n_k + n_v + 1, ceil(rows_cap / 32)), block 128, shared InputShared: a block is 32 rows
//             of one head, the last block in x the gates of 32 rows.
//               convolution  a channel a thread, down the rows, the last three inputs in registers
//               unit vectors four lanes a row, out of shared memory
// Arithmetic  orders gdn_conv_v1 and gdn_step_v1 (its steps 1 and 2):  f = f16(x);  v = w0 * f[t-3], then fma
//             with w1 f[t-2], w2 f[t-1], w3 f[t];  silu(v).  qn = (q * rsqrt(S(q, q) + 1e-6)) * 128^-1/2;
//             kn = k * rsqrt(S(k, k) + 1e-6);  S of unit.cuh.  beta = sigmoid(b);
//             decay = exp(-(exp(a_log) * softplus(a + dt_bias))).
// Equality    a row's bytes do not depend on how its run is cut into launches.  gdn_deep_input and gdn_scan
//             give the bytes of gdn_conv and gdn_step.  NaN and Inf of q or k stay in their head, of v in
//             their channel, for four rows.
// Reference   ref/gdn.py causal_conv, DeltaNet.  Source: model.md section 4, steps 2 to 4.
#include "gdn/unit.cuh"
#include "tables.cuh"

namespace FN_NAMESPACE {
const u32 ROWS = 32, BATCH = 8;
const u32 STRIDE = 144;  // rows 16 banks apart: the reads of two rows by eight lanes meet no bank twice
struct InputShared {
    float tile[ROWS * STRIDE];
};
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRow* rows, const FnRun* runs, const FnSlot* slots, const float* x,
           const float* a, const float* b, const float* w, const float* a_log, const float* dt_bias,
           u64 tail_offset, float* qkv, float* gates, u32 n_k, u32 n_v)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(InputShared, shared);
    u32 n_rows = fn_ld(&round->n_rows), first = blockIdx.y * ROWS, head = blockIdx.x, tid = threadIdx.x;
    if (first >= n_rows) return;
    u32 end = fn_min_u32(first + ROWS, n_rows), heads = 2u * n_k + n_v;

    if (head == heads) {
        for (u32 at = first * n_v + tid; at < end * n_v; at += FN_THREADS) {
            u32 j = at % n_v;
            float rate = fn_exp(fn_ldg(a_log + j));
            float soft = fn_softplus(fn_add(fn_ldg(a + at), fn_ldg(dt_bias + j)));
            float2 gate = make_float2(fn_exp_down(-fn_mul(rate, soft)), fn_sigmoid(fn_ldg(b + at)));
            reinterpret_cast<float2*>(gates)[at] = gate;
        }
        return;
    }

    u32 channels = heads * 128u, c = head * 128u + tid;
    bool unit = head < 2u * n_k;
    float4 tap = fn_ldg(reinterpret_cast<const float4*>(w) + c);
    for (u32 row = first; row < end;) {  // the runs that meet these rows
        FnRun run = fn_ld(runs + fn_ld(&rows[row].run));
        u32 stop = fn_min_u32(end, run.first_row + run.n_rows);
        const u16* tail = reinterpret_cast<const u16*>(fn_ld(&slots[run.slot].recurrent) + tail_offset) + c;
        float f[3];
#pragma unroll
        for (u32 i = 0; i < 3u; i++) {  // input of row + i - 3: of the run, or the tail's
            u32 into = row - run.first_row + i;
            u16 half = into >= 3u ? fn_f2h(fn_ldg(x + (u64)(row + i - 3u) * channels + c))
                                  : fn_ld(tail + into * channels);
            f[i] = fn_h2f(half);
        }
        for (; row < stop; row += BATCH) {
            float in[BATCH];
#pragma unroll
            for (u32 i = 0; i < BATCH; i++)
                in[i] = row + i < stop ? fn_ldg(x + (u64)(row + i) * channels + c) : 0.f;
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                if (row + i >= stop) break;
                float f3 = fn_h2f(fn_f2h(in[i]));
                float v = fn_mul(tap.x, f[0]);
                v = fn_fma(tap.y, f[1], v);
                v = fn_fma(tap.z, f[2], v);
                v = fn_fma(tap.w, f3, v);
                v = fn_silu(v);
                if (unit) {
                    shared.tile[(row + i - first) * STRIDE + tid] = v;
                } else {
                    qkv[(u64)(row + i) * channels + c] = v;
                }
                f[0] = f[1];
                f[1] = f[2];
                f[2] = f3;
            }
        }
        row = stop;
    }
    if (!unit) return;
    __syncthreads();

    u32 mine = tid >> 2, p = tid & 3u;  // rows behind the last are summed too: a warp's lanes stay together
    float4 v[8];
    fn_unit::load8(v, shared.tile + mine * STRIDE + 4u * p);
    float r = fn_rsqrt(fn_add(fn_unit::dot(v, v), fn_unit::L2_EPS));
    if (first + mine >= end) return;
    float4* to = reinterpret_cast<float4*>(qkv + (u64)(first + mine) * channels + head * 128u) + p;
#pragma unroll
    for (u32 m = 0; m < 8u; m++) {
        float4 n = fn_unit::times(v[m], r);
        to[4u * m] = head < n_k ? fn_unit::times(n, fn_unit::KEY_SCALE) : n;
    }
}
