// linear_finish: sums the units of the linears of one launch and finishes their outputs.
// Contract    linears[j].part (units, rows_cap, n) f32 -> linears[j].out (rows_cap, n) f32, rows < n_rows.
//             EXL3: n % 128 == 0, rotated, times svh, plus f16 bias where there is one; f16 and bf16: the
//             sum, any n >= 1.  round.rows_cap == grid z.
// Launch      grid (ceil(n_max / 512), n_linears, rows_cap), block 128: one warp a block of 128 outputs.
// Arithmetic  orders part_sum_v1 and hadamard: units, fn_hadamard128, fn_mul(., svh), fn_add(., f32(bias)).
// Equality    the same bytes as gdn_conv, moe_act and moe_sum for the same sums.
// Reference   ref/orders.py tree and hadamard128.
#include "exl3/finish.cuh"

FN_KERNEL((const FnRound* round, const FnLinear* linears)) {
    fn_let_next();
    u32 row = blockIdx.z, cap = gridDim.z, block = 4u * blockIdx.x + (threadIdx.x >> 5);
    FnLinear linear = linears[blockIdx.y];
    FnFinish<true> finish(linear, block);
    u32 n_rows = fn_ld_here(&round->n_rows);

    fn_wait_prior();
    if (row >= n_rows || 128u * block >= linear.n) return;
    finish.ask(linear, row, cap);
    float v[4];
    finish.values(linear, row, cap, v);
    finish.store(reinterpret_cast<float*>(linear.out), row, v);
}
