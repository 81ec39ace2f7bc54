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
// How: lane l looks at logits l, l + 32, ...  The n_active-th largest of the lanes' maxima bounds the last
// choice from below, so only logits from there on (some 1 to 2 times n_active of them, all of them when all
// are equal) are candidates; each candidate counts those that go before it.  Candidates are listed in rising
// id, so the place of a chosen one among the chosen is its slot.
#include "warp.cuh"
#include "tables.cuh"

namespace FN_NAMESPACE {
const u32 MOST = 1024;
const u32 BATCH = 8;  // logits of a lane asked for at once

struct RouterShared {
    u32 key[MOST];        // of every logit, then unused
    u32 candidate[MOST];  // keys, zeros behind the last up to a multiple of 4
    u16 id[MOST];         // of the candidates
    u32 best[32];
    u32 chosen[32];
    float logit[32];
    float e[32];
    float largest;
    u32 pad;
};

// Unsigned order = order of the floats; NaN largest, no logit gives 0.
FN_DEVICE u32 sort_key(float l) {
    u32 u = fn_f2u(fn_add(l, 0.f));
    return l != l ? 0xffffffffu : u & 0x80000000u ? ~u : u | 0x80000000u;
}
// The logit again, -0 as +0, any NaN as 0x7fffffff.
FN_DEVICE float logit_of(u32 key) { return fn_u2f(key & 0x80000000u ? key ^ 0x80000000u : ~key); }
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const float* logits, const float* shared, FnRoute* routes, u32 n_experts,
           u32 n_active)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(RouterShared, s);
    fn_let_next();
    u32 row = blockIdx.x, lane = threadIdx.x, below = (1u << lane) - 1u;
    fn_wait_prior();
    if (row >= fn_ld(&round->n_rows)) return;
    const float* l = logits + row * n_experts;
    FnRoute* to = routes + row * (n_active + 1u);
    float gate = fn_ld(shared + row);

    u32 best = 0;
    for (u32 first = 0; first < n_experts; first += 32u * BATCH) {
        float v[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            u32 id = first + 32u * i + lane;
            v[i] = id < n_experts ? fn_ld(l + id) : 0.f;
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            u32 id = first + 32u * i + lane, key = id < n_experts ? sort_key(v[i]) : 0u;
            if (id < MOST) s.key[id] = key;
            best = fn_max_u32(best, key);
        }
    }
    s.best[lane] = best;
    if (lane == 0) to[n_active] = FnRoute{n_experts, fn_sigmoid(gate)};
    __syncwarp();

    u32 above = 0, equal = 0;
#pragma unroll 4
    for (u32 j = 0; j < 32; j += 4) {
        uint4 b = *reinterpret_cast<const uint4*>(&s.best[j]);
        above += (b.x > best) + (b.y > best) + (b.z > best) + (b.w > best);
        equal += (b.x == best) + (b.y == best) + (b.z == best) + (b.w == best);
    }
    u32 holds = fn_ballot(above < n_active && n_active <= above + equal);
    u32 floor_key = fn_shfl(best, fn_ffs(holds) - 1u);

    u32 n = 0;
#pragma unroll 4
    for (u32 first = 0; first < n_experts; first += 32u) {
        u32 id = first + lane, key = s.key[id];
        u32 votes = fn_ballot(key >= floor_key);
        if (key >= floor_key) {
            u32 at = n + fn_popc(votes & below);
            s.candidate[at] = key;
            s.id[at] = (u16)id;
        }
        n += fn_popc(votes);
    }
    if (lane < (0u - n & 3u)) s.candidate[n + lane] = 0;
    __syncwarp();

    u32 found = 0;
    for (u32 first = 0; found < n_active; first += 32u) {
        u32 i = first + lane, me = i < n ? s.candidate[i] : 0u, rank = i < n ? 0u : n_active;
#pragma unroll 2
        for (u32 j = 0; j < n; j += 4) {
            uint4 c = *reinterpret_cast<const uint4*>(&s.candidate[j]);
            rank += (c.x > me || (c.x == me && j < i)) + (c.y > me || (c.y == me && j + 1u < i)) +
                    (c.z > me || (c.z == me && j + 2u < i)) + (c.w > me || (c.w == me && j + 3u < i));
        }
        u32 votes = fn_ballot(rank < n_active);
        if (rank < n_active) {
            u32 slot = found + fn_popc(votes & below);
            s.chosen[slot] = s.id[i];
            s.logit[slot] = logit_of(me);
            if (rank == 0) s.largest = logit_of(me);
        }
        found += fn_popc(votes);
    }
    __syncwarp();

    if (lane < n_active) s.e[lane] = fn_exp_down(fn_sub(s.logit[lane], s.largest));
    __syncwarp();
    if (lane < n_active) {
        float sum = s.e[0];
#pragma unroll 4
        for (u32 j = 1; j < n_active; j++) sum = fn_add(sum, s.e[j]);
        to[lane] = FnRoute{s.chosen[lane], fn_div(s.e[lane], sum)};
    }
}
