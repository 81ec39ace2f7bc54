// moe_input: the operand rows of the chosen experts' gate and up projections.
// Contract    m (rows_cap, hidden) f32, routes (rows_cap, n_slots), lines FnLine[E + 1] (EXL3) -> x f16
//             (rows_cap, n_slots, 2, hidden) in fragment order: index 0 rotated with gate.suh, 1 with up.suh.
//             hidden % 128 == 0. Rows >= round.n_rows are not touched.
// Launch      grid (ceil(hidden / 512), 2 n_slots, rows_cap), block 128: one warp a block of 128 inputs.
// Arithmetic  the operand of exl3_dot_v1: m * suh, Hadamard, f16 once.
// Equality    the bytes of linear_input for the same row and suh.
// Reference   ref/orders.py hadamard128.  Source: EXL3 notes, section 7: suh differs from tensor to tensor.
#include "exl3.cuh"

FN_KERNEL((const FnRound* round, const FnRoute* routes, const FnLine* lines, const float* m, u16* x,
           u32 hidden, u32 n_slots, u32 n_experts)) {
    u32 row = blockIdx.z, slot = blockIdx.y >> 1, which = blockIdx.y & 1u;
    u32 block = 4u * blockIdx.x + (threadIdx.x >> 5), lane = threadIdx.x & 31u;
    u32 n_rows = fn_ld_here(&round->n_rows);
    // All lines: which of them are read is known behind the wait, and then each is a read of memory on the chain.
    if (!(blockIdx.x | blockIdx.y | blockIdx.z | threadIdx.x))
        fn_prefetch_l2(reinterpret_cast<u64>(lines), (n_experts + 1u) * (u32)sizeof(FnLine));

    fn_wait_prior();
    fn_let_next();  // a fence: launches behind this one may read early what those before it wrote
    if (row >= n_rows || 128u * block >= hidden) return;  // whole warps
    float4 in = fn_ld(reinterpret_cast<const float4*>(m + (u64)row * hidden + 128u * block) + lane);
    const FnLine& line = lines[fn_ld(&routes[row * n_slots + slot].expert)];
    u64 suh = which ? line.up.suh : line.gate.suh;
    float v[4] = {in.x, in.y, in.z, in.w};
    fn_exl3_rotate_in(v, reinterpret_cast<const u16*>(suh) + 128u * block);
    u64 to = (u64)((row * n_slots + slot) * 2u + which) * hidden;
    fn_store_frag4(x + to, 128u * block + 4u * lane, v);
}
