// gdn_scan: the DeltaNet recurrence over long runs, on what gdn_deep_input made of their inputs.
// Contract    qkv (rows_cap, C) f32 with C = (2 n_k + n_v) 128: unit q heads times 128^-1/2, unit k heads, v
//             heads; gates (rows_cap, n_v, 2) f32: decay, beta; x (rows_cap, C) f32, gdn_deep_input's input
//             -> o (rows_cap, n_v 128) f32.  The slot's state, f32 (n_v, 128 value columns, 128 key rows) at
//             slot.recurrent + state_offset, and its tail, f16 (3, C) oldest first at + tail_offset, move to
//             the run's end.  n_v % n_k == 0.  Rows of runs >= round.n_runs are not touched.
// Launch      grid (n_k ceil(8 n_v / (3 n_k)), rows_cap as runs), block 128, shared ScanShared.  Three warps
//             have 16 value columns each, all of value heads that read one key head; the fourth copies.
//               lane 4g + p of a warp   columns 2g and 2g + 1, key rows 16m + 4p + q (m 0..7, q 0..3), in
//                                       registers over the whole run
//               ring of 4 stages        8 tokens each: k and q of the key head, 48 v, 3 pairs of gates.
//                                       Stage i + 2 is asked for when stage i is ready; one barrier a stage
//             A token is 256 fp32 operations of a lane, which is what bounds the pace: 16 columns a warp put
//             one warp on a scheduler.  A column's token is a chain (sum of 32, 2 exchanges, delta, update),
//             so the two columns go half a turn apart: one crosses the lanes while the other one works.
//               turn t      second column: o of t - 1, sum of t, reading k of t + 1 and q of t as registers
//                           come free;  first column: o of t, sum of t + 1
// Arithmetic  order gdn_step_v1, step 3:  M = decay * M;  delta = beta * (v - S(M, kn));
//             M = fma(kn, delta, M);  o = S(M, qn).  f16(x) for the tail.
// Equality    gdn_deep_input and gdn_scan give the bytes of gdn_conv and gdn_step, state and tail included; a
//             run of n rows gives the bytes of n runs of one row.  NaN and Inf of a head stay in it.
// Reference   ref/gdn.py delta_rule.  Source: model.md section 4, steps 3 to 5.
#include "async.cuh"
#include "gdn/unit.cuh"
#include "tables.cuh"

namespace FN_NAMESPACE {
const u32 WARPS = 3, TOKENS = 8, STAGES = 4, RING = TOKENS * STAGES;
struct Token {
    float k[128], q[128], v[WARPS * 16];
    float2 gate[WARPS];  // decay, beta of each warp's head
    float2 unused;       // to a multiple of 16 bytes
};
const u32 TOKEN = sizeof(Token) / sizeof(float);
struct ScanShared {
    Token token[RING];
};
using fn_unit::times;

// The two columns of a lane, each a half turn before the other.
struct Lane {
    float4 M[2][8], q[8];                // the state, decayed for the token under way; q of the token before
    float sum[2], delta[2];              // the lane's part of S(M, kn); of the token that is taken in next
    float out[2];                        // the lane's part of o
    float decay, beta, v[2];             // of the token under way
    const float *token, *values, *gate;  // the lane's places in token 0: k and q, v, decay and beta
};

FN_DEVICE float4 updated(float4 M, float4 k, float delta) {
    return make_float4(fn_fma(k.x, delta, M.x), fn_fma(k.y, delta, M.y), fn_fma(k.z, delta, M.z),
                       fn_fma(k.w, delta, M.w));
}
FN_DEVICE float chain(float acc, float4 x, float4 y) {
    acc = fn_fma(x.x, y.x, acc);
    acc = fn_fma(x.y, y.y, acc);
    acc = fn_fma(x.z, y.z, acc);
    return fn_fma(x.w, y.w, acc);
}
FN_DEVICE float4 part(const float* of, u32 m) {  // of: the lane's element 4p of a head
    return fn_ld(reinterpret_cast<const float4*>(of) + 4 * m);
}
FN_DEVICE float four(float v) {  // fn_warp_sum4, as two exchanges
    v = fn_add(v, fn_shfl_xor(v, 1u));
    return fn_add(v, fn_shfl_xor(v, 2u));
}
// The same for two columns with no more exchanges: even lanes get the first one's sum, odd lanes the other's.
FN_DEVICE float four(const float (&out)[2], bool odd) {
    float mine = odd ? out[1] : out[0];
    mine = fn_add(mine, fn_shfl_xor(odd ? out[0] : out[1], 1u));
    return fn_add(mine, fn_shfl_xor(mine, 2u));
}

// Half a turn: column c takes in the token before by its delta, and goes on to the sum of token t.
// was, k: of the token before, of t.
template <u32 c>
FN_DEVICE void half(Lane& lane, const float4 (&was)[8], const float4 (&k)[8]) {
    float sum = 0.f, out = 0.f;
#pragma unroll
    for (u32 m = 0; m < 8u; m++) {
        float4 M = updated(lane.M[c][m], was[m], lane.delta[c]);
        out = chain(out, M, lane.q[m]);
        lane.M[c][m] = times(M, lane.decay);
        sum = chain(sum, lane.M[c][m], k[m]);
    }
    lane.sum[c] = sum;
    lane.out[c] = out;
}
FN_DEVICE float correction(const Lane& lane, u32 c) {
    return fn_mul(lane.beta, fn_sub(lane.v[c], four(lane.sum[c])));
}
FN_DEVICE void load_values(Lane& lane, u32 slot) {
    float2 v = fn_ld(reinterpret_cast<const float2*>(lane.values + slot * TOKEN));
    float2 gate = fn_ld(reinterpret_cast<const float2*>(lane.gate + slot * TOKEN));
    lane.v[0] = v.x;
    lane.v[1] = v.y;
    lane.decay = gate.x;
    lane.beta = gate.y;
}

// A turn, from half to half: the second column's half of token t, then the first one's of t + 1.  was: k of
// t - 1, at the end of t + 1;  k: of t.  never: false, and the compiler does not know: what might be another
// value holds the second column back until the first one's sum is on its way.
FN_DEVICE void turn(Lane& lane, float4 (&was)[8], const float4 (&k)[8], u32 t, bool odd, bool never,
                    bool writes, float* to) {
    const float *now = lane.token + t % RING * TOKEN, *after = lane.token + (t + 1u) % RING * TOKEN;
    if (never) lane.delta[1] = lane.sum[0];
    lane.delta[0] = correction(lane, 0);
    float sum = 0.f, out = 0.f;
#pragma unroll
    for (u32 m = 0; m < 8u; m++) {
        float4 M = updated(lane.M[1][m], was[m], lane.delta[1]);
        was[m] = part(after, m);
        out = chain(out, M, lane.q[m]);
        lane.q[m] = part(now + 128u, m);
        lane.M[1][m] = times(M, lane.decay);
        sum = chain(sum, lane.M[1][m], k[m]);
    }
    lane.sum[1] = sum;
    lane.out[1] = out;
    float value = four(lane.out, odd);  // o of t - 1
    if (writes) *to = value;
    lane.delta[1] = correction(lane, 1);
    load_values(lane, (t + 1u) % RING);
    half<0>(lane, k, was);
}

// All warps but one: warp's 16 columns of the run's n rows.  state, o: the lane's place in them.
FN_DEVICE void scan(const ScanShared& shared, u32 n, u32 warp, float* state, float* o, u64 stride) {
    u32 lane_id = threadIdx.x & 31u, p = lane_id & 3u;
    bool odd = (p & 1u) != 0, writes = p < 2u, never = n == 0;
    Lane lane;
    lane.token = shared.token[0].k + 4u * p;
    lane.values = shared.token[0].v + 16u * warp + (lane_id >> 2 << 1);
    lane.gate = &shared.token[0].gate[warp].x;
    lane.out[0] = lane.out[1] = lane.sum[0] = lane.sum[1] = 0.f;
#pragma unroll
    for (u32 m = 0; m < 8u; m++) {
        lane.M[0][m] = part(state, m);
        lane.M[1][m] = part(state + 128u, m);
    }
    __syncthreads();  // the first stage is ready
    float4 k[8], next[8];
    load_values(lane, 0);
#pragma unroll
    for (u32 m = 0; m < 8u; m++) {  // token 0: decay and sums
        k[m] = part(lane.token, m);
        next[m] = part(lane.token + TOKEN, m);
        lane.q[m] = part(lane.token + 128u, m);
#pragma unroll
        for (u32 c = 0; c < 2u; c++) {
            lane.M[c][m] = times(lane.M[c][m], lane.decay);
            lane.sum[c] = chain(lane.sum[c], lane.M[c][m], k[m]);
        }
    }
    lane.delta[0] = correction(lane, 0);
    lane.delta[1] = correction(lane, 1);
    load_values(lane, 1);

    // Token t + 1 is read in turn t; behind the last one that is whatever lies there, for nothing.
    if (n > 1u) {
        half<0>(lane, k, next);
        u32 t = 1;
        bool more = t + 2u < n;
        while (more) {
            more = t + 4u < n;
            if ((t + 1u) % TOKENS == 0) __syncthreads();  // the stage of t + 1 is ready
            turn(lane, k, next, t, odd, never, writes, o);
            turn(lane, next, k, t + 1u, odd, never, writes, o + stride);
            o += stride + stride;
            t += 2u;
        }
        if (t + 1u < n) {
            if ((t + 1u) % TOKENS == 0) __syncthreads();
            turn(lane, k, next, t, odd, never, writes, o);
            o += stride;
            t++;
#pragma unroll
            for (u32 m = 0; m < 8u; m++) {
                float4 swap = k[m];
                k[m] = next[m];
                next[m] = swap;
            }
        }
        lane.delta[0] = correction(lane, 0);
        half<1>(lane, k, next);
        float value = four(lane.out, odd);
        if (writes) *o = value;
        o += stride;
        lane.delta[1] = correction(lane, 1);
#pragma unroll
        for (u32 m = 0; m < 8u; m++) {
            k[m] = next[m];
            lane.q[m] = part(lane.token + t % RING * TOKEN + 128u, m);
        }
    }
    lane.out[0] = lane.out[1] = 0.f;
#pragma unroll
    for (u32 m = 0; m < 8u; m++) {
#pragma unroll
        for (u32 c = 0; c < 2u; c++) {
            float4 M = updated(lane.M[c][m], k[m], lane.delta[c]);
            lane.out[c] = chain(lane.out[c], M, lane.q[m]);
            *(reinterpret_cast<float4*>(state + 128u * c) + 4u * m) = M;
        }
    }
    float value = four(lane.out, odd);
    if (writes) *o = value;
}

// The warp that copies: a stage of the ring.  in, gate: of the run's first row.
FN_DEVICE void fill(ScanShared& shared, u32 stage, u32 n, const float* q, const float* k, const float* v,
                    const float* gates, u32 channels, u32 n_v, u32 unit, u32 units) {
    u32 lane = threadIdx.x & 31u, end = fn_min_u32((stage + 1u) * TOKENS, n);
    for (u32 t = stage * TOKENS; t < end; t++) {
        Token& to = shared.token[t % RING];
        u64 at = (u64)t * channels;
        fn_cp_async16(to.k + 4u * lane, k + at + 4u * lane);
        fn_cp_async16(to.q + 4u * lane, q + at + 4u * lane);
        if (lane < 4u * units) fn_cp_async16(to.v + 4u * lane, v + at + 4u * lane);
        if (lane < units) fn_cp_async<8>(to.gate + lane, gates + ((u64)t * n_v + ((unit + lane) >> 3)) * 2u);
    }
    fn_cp_async_commit();
}
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRun* runs, const FnSlot* slots, const float* x, const float* qkv,
           const float* gates, u64 state_offset, u64 tail_offset, float* o, u32 n_k, u32 n_v)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(ScanShared, shared);
    u32 n_runs = fn_ld(&round->n_runs);
    FnRun run = fn_ld(runs + blockIdx.y);  // together with n_runs; any bytes beyond it
    if (blockIdx.y >= n_runs) return;
    u32 n = run.n_rows, channels = (2u * n_k + n_v) * 128u, group = n_v / n_k;
    u32 blocks = (8u * group + WARPS - 1u) / WARPS;
    u32 key_head = blockIdx.x / blocks, first_head = key_head * group;
    u32 unit = blockIdx.x % blocks * WARPS, units = fn_min_u32(WARPS, 8u * group - unit);  // of 16 columns
    u64 recurrent = fn_ld(&slots[run.slot].recurrent);
    // Warps of one number share a scheduler: the copying one changes with the run.  The exchange tells the
    // compiler that a warp's lanes agree: without it every exchange in scan ends a block of its schedule.
    u32 role = fn_shfl((threadIdx.x >> 5) + blockIdx.y, 0u) & 3u, stages = (n + TOKENS - 1u) / TOKENS;

    if (role < units) {
        u32 head = first_head + ((unit + role) >> 3), lane = threadIdx.x & 31u;
        u32 column = ((unit + role) & 7u) * 16u + (lane >> 2 << 1), p = lane & 3u;
        float* state = reinterpret_cast<float*>(recurrent + state_offset) + (head * 128u + column) * 128u;
        float* to = o + ((u64)run.first_row * n_v + head) * 128u + column + (p & 1u);
        scan(shared, n, role, state + 4u * p, to, n_v * 128u);
    } else if (role < WARPS) {
        for (u32 i = 0; i < stages; i++) __syncthreads();
    } else {
        const float* q = qkv + (u64)run.first_row * channels + key_head * 128u;
        const float* v = qkv + (u64)run.first_row * channels + (2u * n_k + first_head) * 128u + unit * 16u;
        const float* gate = gates + ((u64)run.first_row * n_v + first_head) * 2u;
        fill(shared, 0, n, q, q + n_k * 128u, v, gate, channels, n_v, unit, units);
        fill(shared, 1, n, q, q + n_k * 128u, v, gate, channels, n_v, unit, units);
        for (u32 i = 0; i < stages; i++) {
            fn_cp_async_wait<1>();
            __syncthreads();  // stage i is ready, and nobody reads stage i - 2 any more
            fill(shared, i + 2u, n, q, q + n_k * 128u, v, gate, channels, n_v, unit, units);
        }
        fn_cp_async_wait<0>();
    }

    u16* tail = reinterpret_cast<u16*>(recurrent + tail_offset);
    for (u32 c = blockIdx.x * FN_THREADS + threadIdx.x; c < channels; c += gridDim.x * FN_THREADS) {
        u16 f[3];
#pragma unroll
        for (u32 i = 0; i < 3u; i++) {  // input of row n + i - 3: of the run, or of the old tail
            f[i] = n + i >= 3u ? fn_f2h(fn_ldg(x + (u64)(run.first_row + n + i - 3u) * channels + c))
                               : fn_ld(tail + (n + i) * channels + c);
        }
#pragma unroll
        for (u32 i = 0; i < 3u; i++) tail[i * channels + c] = f[i];
    }
}
