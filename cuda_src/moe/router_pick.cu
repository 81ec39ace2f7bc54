// router_pick: the experts of each row and their weights.
// Contract    logits (rows_cap, n_experts) f32, shared (rows_cap) f32 -> routes FnRoute (rows_cap, n_active +
//             1): slots 0 .. n_active-1 the chosen experts in rising id, slot n_active the shared expert (id
//             n_experts). 1 <= n_active <= 32, n_active <= n_experts <= 1024.  Rows >= round.n_rows are not
//             touched.
// Launch      grid (rows_cap), block 32: one warp a row.
// Arithmetic  order route_v1.  Chosen: highest logits, NaN above everything, -0 equal to +0, ties to the
//             lower id. e_i = exp(l_i - l_max), l_max the first of that order; sum = chain of add over the
//             slots in rising id from the first; weight = e / sum; shared weight = sigmoid(shared).  A NaN
//             among the chosen gives NaN weights.
// Equality    no choice depends on the order in which candidates are met.
// Reference   ref/moe.py route.  Source: model.md section 6; arithmetic.md rules 5 and 8.
//
// How: each lane holds every 32nd logit.  The n_active-th largest of the lanes' maxima bounds the last choice
// from below, so only logits from there on (some 1 to 2 times n_active of them, all of them when all are
// equal) are candidates; each candidate counts those that go before it.
#include "warp.cuh"
#include "tables.cuh"

namespace FN_NAMESPACE {
const u32 PER_LANE = 32;
const u32 GROUP = 4;  // logits of a lane handled under one test of the count

struct RouterShared {
    u64 candidate[1024];  // key << 32 | ~id: larger goes first
    u32 best[32];
    u32 chosen[32];
    float logit[32];
    float e[32];
    u32 n_candidates;
};

// Unsigned order = order of the floats; NaN largest, no logit gives 0.
FN_DEVICE u32 sort_key(float l) {
    u32 u = fn_f2u(fn_add(l, 0.f));
    return l != l ? 0xffffffffu : u & 0x80000000u ? ~u : u | 0x80000000u;
}
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const float* logits, const float* shared, FnRoute* routes, u32 n_experts,
           u32 n_active)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(RouterShared, s);
    u32 row = blockIdx.x, lane = threadIdx.x;
    if (row >= fn_ld(&round->n_rows)) return;
    const float* l = logits + (u64)row * n_experts;
    float gate = fn_ldg(shared + row);

    u32 key[PER_LANE], best = 0;
#pragma unroll
    for (u32 g = 0; g < PER_LANE; g += GROUP) {
        if (32u * g < n_experts) {
#pragma unroll
            for (u32 j = g; j < g + GROUP; j++) {
                u32 id = 32u * j + lane;
                key[j] = id < n_experts ? sort_key(fn_ldg(l + id)) : 0u;
            }
        }
    }
#pragma unroll
    for (u32 g = 0; g < PER_LANE; g += GROUP) {
        if (32u * g < n_experts) {
#pragma unroll
            for (u32 j = g; j < g + GROUP; j++) best = fn_max_u32(best, key[j]);
        }
    }
    s.best[lane] = best;
    if (lane == 0) s.n_candidates = 0;
    __syncwarp();

    u32 above = 0, equal = 0;
#pragma unroll
    for (u32 j = 0; j < 32; j++) {
        above += s.best[j] > best;
        equal += s.best[j] == best;
    }
    u32 holds = fn_ballot(above < n_active && n_active <= above + equal);
    u32 floor_key = fn_shfl(best, fn_ffs(holds) - 1u);

    u32 mine = 0;
#pragma unroll
    for (u32 g = 0; g < PER_LANE; g += GROUP) {
        if (32u * g < n_experts) {
#pragma unroll
            for (u32 j = g; j < g + GROUP; j++) mine += key[j] >= floor_key;
        }
    }
    u32 at = mine ? fn_atomic_add_u32(&s.n_candidates, mine) : 0u;
#pragma unroll
    for (u32 g = 0; g < PER_LANE; g += GROUP) {
        if (32u * g < n_experts) {
#pragma unroll
            for (u32 j = g; j < g + GROUP; j++) {
                if (key[j] >= floor_key) s.candidate[at++] = (u64)key[j] << 32 | (u32)~(32u * j + lane);
            }
        }
    }
    __syncwarp();

    u32 n = s.n_candidates;
    for (u32 i = lane; i < n; i += 32u) {
        u64 me = s.candidate[i];
        u32 rank = 0;
#pragma unroll 8
        for (u32 j = 0; j < n; j++) rank += s.candidate[j] > me;
        if (rank < n_active) s.chosen[rank] = ~(u32)me;
    }
    __syncwarp();

    u32 id = 0, slot = 0;
    if (lane < n_active) {
        id = s.chosen[lane];
        s.logit[lane] = fn_ld(l + id);
        for (u32 j = 0; j < n_active; j++) slot += s.chosen[j] < id;
    }
    __syncwarp();
    if (lane < n_active) s.e[slot] = fn_exp(fn_sub(s.logit[lane], s.logit[0]));
    __syncwarp();
    FnRoute* to = routes + (u64)row * (n_active + 1u);
    if (lane < n_active) {
        float sum = s.e[0];
        for (u32 j = 1; j < n_active; j++) sum = fn_add(sum, s.e[j]);
        to[slot] = FnRoute{id, fn_div(s.e[slot], sum)};
    }
    if (lane == 0) to[n_active] = FnRoute{n_experts, fn_sigmoid(gate)};
}
