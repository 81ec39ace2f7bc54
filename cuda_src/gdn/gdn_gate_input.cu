// gdn_gate_input: norm and gate of the DeltaNet output, then the operand row of the output projection.
// Contract    o, z (rows_cap, n_v 128) f32, norm_w (128) f32 -> linear.x (rows_cap, x_stride) f16 in fragment
//             order, or a tile image where linear.tiled says so; rotated for EXL3.  linear.k == n_v
//             128.  gate: 0 sigmoid, 1 silu.  Rows >= round.n_rows are not touched.
// Launch      grid (ceil(n_v / 4), 1 .. rows_cap), block 128: one warp a head, which is one block of 128 inputs, of
//             rows blockIdx.y, + gridDim.y, ...; the next row's are on their way while one is worked on.
// Arithmetic  order gdn_gate_v1: lane l holds elements 4l .. 4l+3; sum = fma(o, o, acc) from +0 over its
//             four, rising, then fn_warp_sum;  r = rsqrt(sum * 2^-7 + eps);  v = ((o * r) * norm_w) * act(z);
//             then exl3 operand.
// Equality    a row's bytes do not depend on other rows.  NaN and Inf of a head stay in its block of 128.
// Reference   ref/gdn.py DeltaNet.  Source: model.md section 4, step 6.
#include "exl3.cuh"
#include "glue/gate.cuh"

FN_KERNEL((const FnRound* round, const float* o, const float* z, const float* norm_w, const FnLinear* linear,
           u32 gate, u32 n_v, float eps)) {
    fn_let_next();
    u32 row = blockIdx.y, head = 4u * blockIdx.x + (threadIdx.x >> 5), lane = threadIdx.x & 31u;
    // The operand's place and scales are asked for ahead of the inputs, not behind the norm.
    u32 stride = linear->x_stride, tiled = linear->tiled;
    u16* to = reinterpret_cast<u16*>(linear->x);
    const u16* suh = reinterpret_cast<const u16*>(linear->w.suh);
    bool exl3 = fn_is_exl3(linear->w), live = head < n_v;  // whole warps
    float4 w = fn_ld_here(reinterpret_cast<const float4*>(norm_w) + lane);
    u32 n_rows = fn_ld_here(&round->n_rows);
    float scale[4] = {1.f, 1.f, 1.f, 1.f};
    if (exl3 && live) fn_load_early_h4(suh + 128u * head + 4u * lane, scale);

    fn_wait_prior();
    if (row >= n_rows || !live) return;
    const float4* inputs = reinterpret_cast<const float4*>(o) + head * 32u + lane;
    const float4* gates = reinterpret_cast<const float4*>(z) + head * 32u + lane;
    const u32 pitch = 32u * n_v;
    float weight[4] = {w.x, w.y, w.z, w.w};
    float4 x = fn_ld(inputs + (u64)row * pitch), g = fn_ld(gates + (u64)row * pitch);
#pragma unroll 1
    while (true) {
        float v[4] = {x.x, x.y, x.z, x.w}, a[4] = {g.x, g.y, g.z, g.w}, sum = 0.f;
        u32 next = row + gridDim.y;
        if (next < n_rows) {
            x = fn_ld(inputs + (u64)next * pitch);
            g = fn_ld(gates + (u64)next * pitch);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) sum = fn_fma(v[i], v[i], sum);
        float r = fn_rsqrt(fn_add(fn_mul(fn_warp_sum(sum), 0x1p-7f), eps));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = fn_mul(fn_mul(fn_mul(v[i], r), weight[i]), fn_gate(a[i], gate != 0));
        }
        if (exl3) {  // as fn_exl3_rotate_in
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = fn_mul(v[i], scale[i]);
            fn_hadamard128(v);
        }
        u32 k = 128u * head + 4u * lane;
        if (tiled) {
            fn_store_tile4(to, 2u * n_v, row, k, v);
        } else {
            fn_store_frag4(to + (u64)row * stride, k, v);
        }
        if (next >= n_rows) return;
        row = next;
    }
}
