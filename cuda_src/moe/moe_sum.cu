// moe_sum: finishes the down projections of the chosen experts and adds them with their routing weights.
// Contract    part f32 (units, rows_cap, n_slots, hidden), units = fn_dot_segments(line.width, hidden, 1);
//             routes of a row in rising expert id, the last slot the shared expert; lines FnLine[E + 1]
//             (EXL3) -> y (rows_cap, hidden) f32.  hidden % 128 == 0, 2 <= n_slots <= 33.  Rows >=
//             round.n_rows are not touched.
// Launch      grid (hidden / 128, rows_cap), block 384, shared SumShared: a block is 128 outputs of a row;
//             warp w finishes slots w, w + 12, ... (the published 11 in one go), then a thread an output adds
//             them in slot order.
// Arithmetic  order moe_sum_v1: v = part_sum_v1, Hadamard, * svh;  leaf = floor(8 expert / n_experts);
//             acc[leaf] = fma(weight, v, acc[leaf]) from +0 in slot order;  t = ((0+1)+(2+3))+((4+5)+(6+7));
//             y = fma(weight_shared, v_shared, t).
// Equality    a row's bytes do not depend on other rows.  A NaN weight makes the whole row NaN.
// Reference   ref/moe.py Experts.  Source: model.md section 6; arithmetic.md rules 4 and 5.
#include "exl3.cuh"

namespace FN_NAMESPACE {
const u32 SLOTS = 33;

struct SumShared {
    float v[SLOTS][128];
    float weight[SLOTS];
    u32 leaf[SLOTS];
};

// What a slot's line says about four outputs.
struct Scales {
    u32 width;
    float svh[4];

    FN_DEVICE void ask(const FnRoute* routes, const FnLine* lines, u32 slot, u32 output, FnRoute& route) {
        route = fn_ld_here(routes + slot);
        const FnLine& line = lines[route.expert];
        width = fn_ld_here(&line.width);
        fn_load_early_h4(reinterpret_cast<const u16*>(fn_ld_here(&line.down.svh)) + output, svh);
    }
};
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRoute* routes, const FnLine* lines, const float* part, float* y,
           u32 hidden, u32 n_slots, u32 n_experts, u32 width_cap)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(SumShared, s);
    fn_let_next();
    u32 block = blockIdx.x, row = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31u;
    u32 n_rows = fn_ld_here(&round->n_rows), rows_cap = fn_ld_here(&round->rows_cap), first = warp;
    FnRoute route = {0, 0.f};
    Scales scales;
    if (row < n_rows && first < n_slots)
        scales.ask(routes, lines, row * n_slots + first, 128u * block + 4u * lane, route);

    fn_wait_prior();
    if (row >= n_rows) return;
    u64 stride = (u64)rows_cap * n_slots * hidden;
    const float* at = part + (u64)row * n_slots * hidden + 128u * block + 4u * lane;
#pragma unroll 1
    for (u32 slot = first; slot < n_slots; slot += FN_THREADS / 32u) {
        if (slot != first) scales.ask(routes, lines, row * n_slots + slot, 128u * block + 4u * lane, route);
        float v[4];
        fn_sum_units4(at + (u64)slot * hidden, 1, fn_dot_segments(scales.width, hidden, 1), stride, v);
        fn_hadamard128(v);  // as fn_exl3_rotate_out
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = fn_mul(v[i], scales.svh[i]);
        *reinterpret_cast<float4*>(&s.v[slot][4u * lane]) = make_float4(v[0], v[1], v[2], v[3]);
        if (lane == 0) {
            s.weight[slot] = route.weight;
            s.leaf[slot] = 8u * route.expert / n_experts;
        }
    }
    __syncthreads();
    u32 i = threadIdx.x;
    if (i >= 128u) return;
    float acc[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
#pragma unroll 2
    for (u32 slot = 0; slot + 1u < n_slots; slot++) {
        float v = s.v[slot][i], weight = s.weight[slot];
        u32 leaf = s.leaf[slot];
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            if (leaf == j) acc[j] = fn_fma(weight, v, acc[j]);
        }
    }
    float low = fn_add(fn_add(acc[0], acc[1]), fn_add(acc[2], acc[3]));
    float sum = fn_add(low, fn_add(fn_add(acc[4], acc[5]), fn_add(acc[6], acc[7])));
    y[(u64)row * hidden + 128u * block + i] = fn_fma(s.weight[n_slots - 1u], s.v[n_slots - 1u][i], sum);
}
