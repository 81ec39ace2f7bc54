// moe_deep_sum: adds the finished down projections of a row's experts with their routing weights.
// Contract    routes FnRoute (rows_cap, n_slots), slots in rising expert id, the last one the shared
//             expert; pair_at u32 (rows_cap, n_slots): the row of v f32 (pairs_cap, hidden) of each slot
//             -> y f32 (rows_cap, hidden).  hidden % 4 == 0, 2 <= n_slots <= 33.  Rows >= round.n_rows
//             are not touched.
// Launch      grid (ceil(hidden / 512), rows_cap), block 128, shared DeepSumShared: a thread four
//             outputs.
// Arithmetic  order moe_sum_v1 from v on:  leaf = floor(8 expert / n_experts); acc[leaf] = fma(weight, v,
//             acc[leaf]) from +0 in slot order;  t = ((0+1)+(2+3))+((4+5)+(6+7)); y = fma(weight_shared,
//             v_shared, t).
// Equality    the bytes of moe_sum for the same finished values.  A row's bytes do not depend on other
//             rows.
// Reference   ref/moe.py Experts.
#include "prelude.cuh"
#include "tables.cuh"

namespace FN_NAMESPACE {
const u32 SLOTS = 33, BATCH = 4;  // BATCH: slots whose values are asked for at once

struct alignas(16) DeepSumShared {
    float weight[SLOTS];
    u32 leaf[SLOTS], at[SLOTS];
};
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRoute* routes, const u32* pair_at, const float* v, float* y,
           u32 hidden, u32 n_slots, u32 n_experts)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(DeepSumShared, s);
    u32 row = blockIdx.y, c = 4u * (FN_THREADS * blockIdx.x + threadIdx.x);
    if (row >= fn_ld(&round->n_rows)) return;
    if (threadIdx.x < n_slots) {
        FnRoute route = fn_ldg(routes + row * n_slots + threadIdx.x);
        s.weight[threadIdx.x] = route.weight;
        s.leaf[threadIdx.x] = 8u * route.expert / n_experts;
        s.at[threadIdx.x] = fn_ldg(pair_at + row * n_slots + threadIdx.x);
    }
    __syncthreads();
    if (c >= hidden) return;
    float acc[8][4];
#pragma unroll
    for (u32 j = 0; j < 8; j++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) acc[j][i] = 0.f;
    u32 n = n_slots - 1u;
#pragma unroll 1
    for (u32 first = 0; first < n; first += BATCH) {
        float4 some[BATCH];
#pragma unroll
        for (u32 b = 0; b < BATCH; b++)
            some[b] = fn_ldg(reinterpret_cast<const float4*>(
                v + (u64)s.at[fn_min_u32(first + b, n - 1u)] * hidden + c));
#pragma unroll
        for (u32 b = 0; b < BATCH; b++) {
            if (first + b >= n) break;
            float x[4] = {some[b].x, some[b].y, some[b].z, some[b].w}, weight = s.weight[first + b];
            u32 leaf = s.leaf[first + b];
#pragma unroll
            for (u32 j = 0; j < 8; j++) {
                if (leaf != j) continue;
#pragma unroll
                for (u32 i = 0; i < 4; i++) acc[j][i] = fn_fma(weight, x[i], acc[j][i]);
            }
        }
    }
    float4 shared = fn_ldg(reinterpret_cast<const float4*>(v + (u64)s.at[n] * hidden + c));
    float x[4] = {shared.x, shared.y, shared.z, shared.w}, sum[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        float low = fn_add(fn_add(acc[0][i], acc[1][i]), fn_add(acc[2][i], acc[3][i]));
        float t = fn_add(low, fn_add(fn_add(acc[4][i], acc[5][i]), fn_add(acc[6][i], acc[7][i])));
        sum[i] = fn_fma(s.weight[n], x[i], t);
    }
    *reinterpret_cast<float4*>(y + (u64)row * hidden + c) = make_float4(sum[0], sum[1], sum[2], sum[3]);
}
