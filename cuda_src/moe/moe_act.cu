// moe_act: finishes gate and up of the chosen experts and makes the operand rows of their down projections.
// Contract    part f32 (units, rows_cap, n_slots, 2, width_cap), units = fn_dot_segments(hidden, line.width,
//             1); routes, lines (EXL3) -> x f16 (rows_cap, n_slots, width_cap) in fragment order, elements
//             below line.width. line.width % 128 == 0, width_cap % 128 == 0.  Rows >= round.n_rows are not
//             touched.
// Launch      grid (ceil(width_cap / 512), n_slots, rows_cap), block 128: one warp a block of 128 channels.
// Arithmetic  gate, up = part_sum_v1, Hadamard, * svh;  h = silu(gate) * up;  the operand of exl3_dot_v1: h *
//             suh, Hadamard, f16 once.
// Equality    a row's bytes do not depend on other rows or slots.  NaN and Inf stay in their block of 128.
// Reference   ref/moe.py swiglu.  Source: model.md section 6.
#include "exl3.cuh"

namespace FN_NAMESPACE {
const u32 BATCH = 4;  // units asked for at once: all of them at the published sizes (K 2560, N 640)

// fn_sum_units4 of one leaf for gate and up together, with BATCH loads of both before the additions.
FN_DEVICE void sum_units(const float* part, u32 units, u64 stride, u32 width_cap, float (&gate)[4],
                         float (&up)[4]) {
    for (u32 first = 0; first < units; first += BATCH) {
        float4 g[BATCH], p[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            if (first + i < units) {
                const float* at = part + (first + i) * stride;
                g[i] = fn_ld(reinterpret_cast<const float4*>(at));
                p[i] = fn_ld(reinterpret_cast<const float4*>(at + width_cap));
            }
        }
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            if (first + i < units) {
                float a[4] = {g[i].x, g[i].y, g[i].z, g[i].w}, b[4] = {p[i].x, p[i].y, p[i].z, p[i].w};
                bool start = first + i == 0;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    gate[j] = start ? a[j] : fn_add(gate[j], a[j]);
                    up[j] = start ? b[j] : fn_add(up[j], b[j]);
                }
            }
        }
    }
}
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRoute* routes, const FnLine* lines, const float* part, u16* x,
           u32 hidden, u32 n_slots, u32 width_cap)) {
    using namespace FN_NAMESPACE;
    fn_let_next();
    u32 row = blockIdx.z, slot = row * n_slots + blockIdx.y, lane = threadIdx.x & 31u;
    u32 block = 4u * blockIdx.x + (threadIdx.x >> 5), k = 128u * block + 4u * lane;
    u32 n_rows = fn_ld_here(&round->n_rows), rows_cap = fn_ld_here(&round->rows_cap);
    u32 width = 0;
    float gate_out[4], up_out[4], down_in[4];
    if (row < n_rows) {
        const FnLine& line = lines[fn_ld_here(&routes[slot].expert)];
        width = fn_ld_here(&line.width);
        u64 gate_svh = fn_ld_here(&line.gate.svh), up_svh = fn_ld_here(&line.up.svh);
        u64 down_suh = fn_ld_here(&line.down.suh);
        if (k < width) {
            fn_load_early_h4(reinterpret_cast<const u16*>(gate_svh) + k, gate_out);
            fn_load_early_h4(reinterpret_cast<const u16*>(up_svh) + k, up_out);
            fn_load_early_h4(reinterpret_cast<const u16*>(down_suh) + k, down_in);
        }
    }

    fn_wait_prior();
    if (128u * block >= width) return;  // whole warps
    u64 stride = (u64)rows_cap * n_slots * 2u * width_cap;
    float gate[4] = {0.f, 0.f, 0.f, 0.f}, up[4] = {0.f, 0.f, 0.f, 0.f};
    u32 units = fn_dot_segments(hidden, width, 1, FN_GU_SEGMENT_LOG2);
    sum_units(part + (u64)slot * 2u * width_cap + k, units, stride, width_cap, gate, up);
    fn_hadamard128(gate);  // as fn_exl3_rotate_out
    fn_hadamard128(up);
    float h[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float product = fn_mul(fn_silu(fn_mul(gate[i], gate_out[i])), fn_mul(up[i], up_out[i]));
        h[i] = fn_mul(product, down_in[i]);  // as fn_exl3_rotate_in
    }
    fn_hadamard128(h);
    fn_store_frag4(x + (u64)slot * width_cap, k, h);
}
