// linear_input: makes the f16 operand rows of the linears of one launch from their common f32 input.
// Contract    x (rows_cap, x_stride) f32, x_stride % 4 == 0; linears FnLinear[grid.y] -> linears[j].x
//             (rows_cap, linears[j].x_stride) f16 in fragment order, elements 0 .. k - 1 of rows < n_rows.
//             EXL3: k % 128 == 0, rotated with the linear's suh; f16 and bf16: k % 16 == 0, rounded as they
//             are.  Touches nothing else.
// Launch      grid (ceil(k_max / 512), n_linears, rows_cap), block 128: one warp a block of 128 inputs.
// Arithmetic  fn_mul(x, suh), fn_hadamard128, f16 once (order hadamard); plain: f16 once.
// Equality    the same bytes as gdn_gate_input, qsa_merge, moe_input and deep_input make for the same values.
// Reference   ref/exl3.py Linear.operand.
#include "exl3.cuh"

FN_KERNEL((const FnRound* round, const FnLinear* linears, const float* x, u32 x_stride)) {
    fn_let_next();
    u32 row = blockIdx.z;
    FnLinear linear = linears[blockIdx.y];
    u32 block = 4u * blockIdx.x + (threadIdx.x >> 5), k = 128u * block + 4u * (threadIdx.x & 31u);
    bool exl3 = fn_is_exl3(linear.w);
    float scale[4] = {1.f, 1.f, 1.f, 1.f};
    if (exl3 && k < linear.k) fn_load_early_h4(reinterpret_cast<const u16*>(linear.w.suh) + k, scale);
    u32 n_rows = fn_ld_here(&round->n_rows);

    fn_wait_prior();
    if (row >= n_rows) return;
    if (128u * block >= linear.k) return;
    float v[4] = {0.f, 0.f, 0.f, 0.f};
    if (k < linear.k) {
        float4 quad = fn_ld(reinterpret_cast<const float4*>(x + (u64)row * x_stride + k));
        v[0] = quad.x, v[1] = quad.y, v[2] = quad.z, v[3] = quad.w;
    }
    if (exl3) {  // as fn_exl3_rotate_in
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = fn_mul(v[i], scale[i]);
        fn_hadamard128(v);
    }
    if (k < linear.k) fn_store_frag4(reinterpret_cast<u16*>(linear.x) + (u64)row * linear.x_stride, k, v);
}
