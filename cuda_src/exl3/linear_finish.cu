// linear_finish: sums the units of the linears of one launch and finishes their outputs.
// Contract    linears[j].part (units, rows_cap, n) f32 -> linears[j].out (rows_cap, n) f32, rows < n_rows.
//             EXL3: n % 128 == 0, rotated, times svh, plus f16 bias where there is one; f16 and bf16: the
//             sum, any n >= 1.
// Launch      grid (ceil(n_max / 512), n_linears, rows_cap), block 128: one warp a block of 128 outputs.
// Arithmetic  orders part_sum_v1 and hadamard: units, fn_hadamard128, fn_mul(., svh), fn_add(., f32(bias)).
// Equality    the same bytes as moe_act and moe_sum for the same sums: one helper finishes all.
// Reference   ref/orders.py tree and hadamard128.
#include "exl3.cuh"

FN_KERNEL((const FnRound* round, const FnLinear* linears)) {
    fn_let_next();
    u32 row = blockIdx.z;
    FnLinear linear = linears[blockIdx.y];
    u32 block = 4u * blockIdx.x + (threadIdx.x >> 5), n = 128u * block + 4u * (threadIdx.x & 31u);
    float scale[4] = {1.f, 1.f, 1.f, 1.f};
    if (fn_is_exl3(linear.w) && n < linear.n) fn_load_early_h4(reinterpret_cast<const u16*>(linear.w.svh) + n, scale);

    fn_wait_prior();
    if (row >= round->n_rows) return;
    if (128u * block >= linear.n) return;
    float v[4];
    fn_linear_finish_block(linear, scale, round->rows_cap, row, block, v);
    float* out = reinterpret_cast<float*>(linear.out) + (u64)row * linear.n + n;
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        if (n + i < linear.n) out[i] = v[i];
}
