// router_pick: the experts of each row and their weights.
// Contract    linears FnLinear[2]: gate (n = n_experts), shared gate (n = 1), both with finished part
//             (segments, rows_cap, n) f32, one leaf, or where part is 0 the sums in out (rows_cap, n) f32 ->
//             routes FnRoute (rows_cap, n_active + 1): slots 0 .. n_active-1 the chosen experts in rising id,
//             slot n_active the shared expert (id n_experts).  1 <= n_active <= 32, n_active <= n_experts <=
//             1024.  round.rows_cap == grid x.  Rows >= round.n_rows are not touched.
// Launch      grid (rows_cap), block 544: a thread an output, at the published 512 experts.
// Arithmetic  logit = part_sum_v1 (of out: as it is);  order route_v1.  Chosen: highest logits, NaN above
//             everything, -0 equal to +0, ties to the lower id. e_i = exp(l_i - l_max), l_max the first of
//             that order; sum = chain of add over the slots in rising id from the first; weight = e / sum;
//             shared weight = sigmoid(its logit).  A NaN among the chosen gives NaN weights.
// Equality    no choice depends on the order in which candidates are met.
// Reference   ref/moe.py route.  Source: model.md section 6; arithmetic.md rules 5 and 8.
//
// A launch of few rows is as long as its chain of dependent steps, so every step is one for all warps, with a
// barrier behind it:
//
//   logits    of every output, and the largest of each of 32 groups (ids equal mod 32)
//   floor     a warp counts by vote the groups above one of these: the n_active-th largest bounds the last
//             choice from below
//   list      of the logits from the floor on: some 1 to 2 times n_active, all of them when all are equal
//   ranks     a warp counts by vote the listed that go before one of them
//   slots     a warp counts by vote the chosen of lower id
//   weights   one warp, a lane a slot
//
// The code runs once or twice a block: what counts is that it is short.
#include "warp.cuh"
#include "tables.cuh"

namespace FN_NAMESPACE {
const u32 MOST = 1024;
const u32 BATCH = 8;  // units of an output asked for at once: all of them at the published sizes
const u32 WARPS = FN_THREADS / 32;
static_assert(WARPS >= 16, "each of 16 warps looks at two groups");

struct RouterShared {
    u64 candidate[MOST];  // key, then the id's complement: no two are equal, the larger goes before
    u32 key[MOST];        // of every logit
    u32 best[32];
    u32 floor_key[32];    // the same for every lane: neither side works out one address
    u32 chosen[32];       // ids by rank, all ones behind the last
    u32 top[32];          // their keys
    u32 id[32];           // by slot
    float e[32];          // by slot, -0 behind the last: adding it changes nothing
    u32 n, pad;
};

// The i-th output of a row: a logit of the gate, behind them the shared gate's; behind that no units.
struct Output {
    const float* at;
    u32 units, stride;

    FN_DEVICE Output(const FnLinear* linears, u32 i, u32 row, u32 cap, u32 n_experts) {
        bool routed = i < n_experts;
        const FnLinear& linear = linears[routed ? 0 : 1];
        u64 part = linear.part, out = linear.out;
        u32 segments = linear.segments, n = routed ? n_experts : 1u;
        at = reinterpret_cast<const float*>(part ? part : out) + (row * n + (routed ? i : 0u));
        units = i > n_experts ? 0u : part ? segments : 1u;
        stride = cap * n;
    }
    // fn_sum_units of one leaf with BATCH loads asked for before the additions.  Those have no guards, which
    // would put some of them between the loads: adding -0 changes nothing.
    FN_DEVICE float sum() const {
        const float* from = at;
        float all = -0.f;
#pragma unroll 1
        for (u32 first = 0; first < units; first += BATCH) {
            float p[BATCH];
#pragma unroll
            for (u32 i = 0; i < BATCH; i++, from += stride) {
                p[i] = -0.f;
                if (first + i < units) p[i] = fn_ld_here(from);
            }
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) all = fn_add(all, p[i]);
        }
        return all;
    }
};

// Unsigned order = order of the floats; NaN largest, none gives 0.
FN_DEVICE u32 sort_key(float l) {
    u32 u = fn_f2u(fn_add(l, 0.f));
    return l != l ? 0xffffffffu : u & 0x80000000u ? ~u : u | 0x80000000u;
}
// The logit again, -0 as +0, any NaN as 0x7fffffff.
FN_DEVICE float logit_of(u32 key) { return fn_u2f(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// sum + v[0] + v[1] ..., one after the other.
FN_DEVICE float add16(float sum, const float* v) {
#pragma unroll
    for (u32 i = 0; i < 16u; i++) sum = fn_add(sum, v[i]);
    return sum;
}

// A weight is stored in a table, whose bytes are compared: one NaN on every device.
FN_DEVICE float one_nan(float weight) { return weight == weight ? weight : fn_nan(); }
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnLinear* linears, FnRoute* routes, u32 n_experts, u32 n_active)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(RouterShared, s);
    fn_let_next();
    u32 row = blockIdx.x, cap = gridDim.x, thread = threadIdx.x, warp = thread >> 5, lane = thread & 31u;
    Output output(linears, thread, row, cap, n_experts);
    if (thread < 32u) {
        s.best[thread] = 0;
        s.chosen[thread] = 0xffffffffu;
        s.e[thread] = -0.f;
    }
    if (thread == 0) s.n = 0;
    __syncthreads();

    float logit;
    u32 n_rows = fn_ld_here(&round->n_rows);

    fn_wait_prior();
    if (row >= n_rows) return;
#pragma unroll 1
    for (u32 i = thread;;) {
        logit = output.sum();
        if (i < n_experts) {
            u32 key = sort_key(logit);
            s.key[i] = key;
            fn_atomic_max_u32(&s.best[lane], key);
        }
        i += FN_THREADS;
        if (i > n_experts) break;
        output = Output(linears, i, row, cap, n_experts);
    }
    __syncthreads();

    if (warp < 16u) {
        u32 other = s.best[lane];
#pragma unroll
        for (u32 i = 0; i < 2u; i++) {
            u32 group = warp + 16u * i, mine = s.best[group];
            u32 before = fn_popc(fn_ballot(other > mine || (other == mine && lane < group)));
            if (before == n_active - 1u) s.floor_key[lane] = mine;
        }
    }
    __syncthreads();

    u32 floor_key = s.floor_key[lane];
#pragma unroll 1
    for (u32 id = thread; id < n_experts; id += FN_THREADS) {
        u32 key = s.key[id];
        if (key >= floor_key) s.candidate[fn_atomic_add_u32(&s.n, 1u)] = (u64)key << 32 | (u32)~id;
    }
    __syncthreads();

    u32 n = s.n;
#pragma unroll 1
    for (u32 me = warp; me < n; me += WARPS) {
        u64 mine = s.candidate[me];
        u32 rank = 0;
#pragma unroll 1
        for (u32 first = 0; first < n; first += 32u)
            rank += fn_popc(fn_ballot(first + lane < n && s.candidate[first + lane] > mine));
        if (lane == 0 && rank < n_active) s.chosen[rank] = ~(u32)mine, s.top[rank] = (u32)(mine >> 32);
    }
    __syncthreads();

#pragma unroll 1
    for (u32 rank = warp; rank < n_active; rank += WARPS) {
        u32 id = s.chosen[rank], slot = fn_popc(fn_ballot(s.chosen[lane] < id));
        float e = fn_exp_down(fn_sub(logit_of(s.top[rank]), logit_of(s.top[0])));
        if (lane == 0) s.id[slot] = id, s.e[slot] = e;
    }
    __syncthreads();

    FnRoute* to = routes + (u64)row * (n_active + 1u);
    if (thread < n_active) {
        float sum = add16(-0.f, s.e);
        if (n_active > 16u) sum = add16(sum, s.e + 16);
        to[thread] = FnRoute{s.id[thread], one_nan(fn_div(s.e[thread], sum))};
    }
    // The thread of the last output has the shared expert's logit.
    if (thread == n_experts % FN_THREADS) to[n_active] = FnRoute{n_experts, one_nan(fn_sigmoid(logit))};
}
