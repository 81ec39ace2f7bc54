// moe_deep_sum: adds the finished down projections of a row's experts with their routing weights.
// Contract    routes FnRoute (rows_cap, n_slots), slots in rising expert id, the last one the shared
//             expert; pair_at u32 (rows_cap, n_slots): the row of v f32 (pairs_cap, hidden) of each slot
//             -> y f32 (rows_cap, hidden).  hidden % 4 == 0, 2 <= n_slots <= 33.  Rows >= round.n_rows
//             are not touched.
// Launch      grid (ceil(hidden / 512), 1 .. rows_cap), block 128, shared DeepSumShared: a thread four outputs of
//             rows blockIdx.y, + gridDim.y, ...; values of four slots are on their way while four others are added,
//             also across rows.
// Arithmetic  order moe_sum_v1 from v on:  leaf = floor(8 expert / n_experts); acc[leaf] = fma(weight, v,
//             acc[leaf]) from +0 in slot order;  t = ((0+1)+(2+3))+((4+5)+(6+7)); y = fma(weight_shared,
//             v_shared, t).
// Equality    the bytes of moe_sum for the same finished values.  A row's bytes do not depend on other
//             rows.
// Reference   ref/moe.py Experts.
#include "prelude.cuh"
#include "tables.cuh"

namespace FN_NAMESPACE {
const u32 SLOTS = 33, BATCH = 4;

struct alignas(16) DeepSumShared {  // of two rows
    float weight[2][SLOTS];
    u32 leaf[2][SLOTS], at[2][SLOTS];
};

struct Slot {
    FnRoute route;
    u32 at;
};

struct Sum {
    DeepSumShared& s;
    const FnRoute* routes;
    const u32* pair_at;
    const float* v;  // of the thread's outputs
    u32 n_rows, hidden, n_slots, n_experts;

    // The thread's slot of a row, if there are such.
    FN_DEVICE Slot ask(u32 row) const {
        Slot slot = {{0u, 0.f}, 0u};
        if (threadIdx.x >= n_slots || row >= n_rows) return slot;
        slot.route = fn_ldg(routes + row * n_slots + threadIdx.x);
        slot.at = fn_ldg(pair_at + row * n_slots + threadIdx.x);
        return slot;
    }
    FN_DEVICE void keep(u32 turn, const Slot& slot) const {
        if (threadIdx.x >= n_slots) return;
        s.weight[turn & 1u][threadIdx.x] = slot.route.weight;
        s.leaf[turn & 1u][threadIdx.x] = 8u * slot.route.expert / n_experts;
        s.at[turn & 1u][threadIdx.x] = slot.at;
    }
    // Of slots first .. first + BATCH - 1; beyond the last one of that again.
    FN_DEVICE void load(u32 turn, u32 first, float4 (&some)[BATCH]) const {
#pragma unroll
        for (u32 b = 0; b < BATCH; b++)
            some[b] = fn_ldg(reinterpret_cast<const float4*>(
                v + (u64)s.at[turn & 1u][fn_min_u32(first + b, n_slots - 1u)] * hidden));
    }
};
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRoute* routes, const u32* pair_at, const float* v, float* y,
           u32 hidden, u32 n_slots, u32 n_experts)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(DeepSumShared, s);
    u32 row = blockIdx.y, c = 4u * (FN_THREADS * blockIdx.x + threadIdx.x), n = n_slots - 1u, turn = 0;
    bool works = c < hidden;
    const Sum sum = {s, routes, pair_at, v + (works ? c : 0u), fn_ld(&round->n_rows), hidden, n_slots, n_experts};
    if (row >= sum.n_rows) return;
    Slot next = sum.ask(row + gridDim.y);
    sum.keep(0, sum.ask(row));
    sum.keep(1, next);
    __syncthreads();
    float4 some[BATCH], ahead[BATCH];
    sum.load(0, 0, some);
#pragma unroll 1
    for (; row < sum.n_rows; row += gridDim.y, turn++) {
        next = sum.ask(row + 2u * gridDim.y);
        float acc[8][4], shared[4];
#pragma unroll
        for (u32 j = 0; j < 8; j++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) acc[j][i] = 0.f;
#pragma unroll 1
        for (u32 first = 0; first <= n; first += BATCH) {
            bool last = first + BATCH > n;
            sum.load(last ? turn + 1u : turn, last ? 0u : first + BATCH, ahead);
#pragma unroll
            for (u32 b = 0; b < BATCH; b++) {
                float x[4] = {some[b].x, some[b].y, some[b].z, some[b].w};
                if (first + b >= n) {  // the shared expert, or nothing
#pragma unroll
                    for (u32 i = 0; i < 4; i++) shared[i] = x[i];
                    break;
                }
                float weight = s.weight[turn & 1u][first + b];
                u32 leaf = s.leaf[turn & 1u][first + b];
#pragma unroll
                for (u32 j = 0; j < 8; j++) {
                    if (leaf != j) continue;
#pragma unroll
                    for (u32 i = 0; i < 4; i++) acc[j][i] = fn_fma(weight, x[i], acc[j][i]);
                }
            }
#pragma unroll
            for (u32 b = 0; b < BATCH; b++) some[b] = ahead[b];
        }
        float y4[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float low = fn_add(fn_add(acc[0][i], acc[1][i]), fn_add(acc[2][i], acc[3][i]));
            float t = fn_add(low, fn_add(fn_add(acc[4][i], acc[5][i]), fn_add(acc[6][i], acc[7][i])));
            y4[i] = fn_fma(s.weight[turn & 1u][n], shared[i], t);
        }
        if (works) *reinterpret_cast<float4*>(y + (u64)row * hidden + c) = make_float4(y4[0], y4[1], y4[2], y4[3]);
        __syncthreads();  // all have read what is known of this row
        sum.keep(turn, next);
        __syncthreads();
    }
}
