// deep_input: makes the f16 operands of the linears of a group from their common f32 input, for all rows of a chunk.
// Contract    x (rows_cap, x_stride) f32, x_stride % 4 == 0; linears FnLinear[n_linears], tiled, n_linears 1..32
//             -> linears[j].x, a tile image of k = linears[j].k <= x_stride, rows < n_rows.  EXL3: k % 128 == 0,
//             rotated with the linear's suh; f16 and bf16: k % 16 == 0, rounded as they are.  Touches nothing else.
// Launch      grid (ceil(rows_cap / 64), ceil(k_max / 256)), block 128, shared InputShared.  Block: 64 rows, 256
//             inputs; warp: 16 rows and 128 inputs at a time, read once for all linears.
// Arithmetic  fn_mul(x, suh), Hadamard over 128, f16 once (order hadamard); plain: f16 once.
// Equality    the bytes of linear_input.  A row's bytes do not depend on other rows.  NaN and Inf stay in their
//             block of 128, in plain operands in their place.
// Reference   ref/exl3.py Linear.operand.
#include "half_rows.cuh"

namespace FN_NAMESPACE {
struct InputShared {
    FnHalfRows warp[FN_THREADS / 32u];
};

struct Rows {
    const FnLinear* linears;
    const float* inputs;
    u32 pitch, columns, first_row, n_rows, first_block, units;
    u32 k;      // of linear `lane`, 0 where there is none
    bool exl3;  // whether that one is

    FN_DEVICE FnHalfUnit at(u32 unit) const {
        u32 first = first_row + 16u * (unit >> 1);
        return {first, fn_min_u32(n_rows - first, 16u), first_block + (unit & 1u)};
    }
    FN_DEVICE u32 row(u32 unit) const {
        return fn_min_u32(first_row + 16u * (unit >> 1) + (threadIdx.x & 15u), n_rows - 1u);
    }
    FN_DEVICE u32 plain(u32 block) const { return fn_ballot(!exl3 && 128u * block < k); }
    FN_DEVICE u32 rotated(u32 block) const { return fn_ballot(exl3 && 128u * block < k); }
    FN_DEVICE const u16* suh(u32 i) const { return reinterpret_cast<const u16*>(fn_ldg(&linears[i].w.suh)); }
    FN_DEVICE FnHalfOperand operand(u32 i) const {
        return {reinterpret_cast<u16*>(fn_ldg(&linears[i].x)), fn_ldg(&linears[i].k)};
    }
};
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnLinear* linears, u32 n_linears, const float* x, u32 x_stride)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(InputShared, s);
    u32 n_rows = fn_ld(&round->n_rows), first = 64u * blockIdx.x, lane = threadIdx.x & 31u;
    if (first >= n_rows) return;
    Rows rows = {linears, x, x_stride, x_stride, first, n_rows, 2u * blockIdx.y, 0u, 0u, false};
    rows.units = (fn_min_u32(n_rows - first, 64u) + 15u) / 16u * 2u;
    if (lane < n_linears) rows.k = fn_ldg(&linears[lane].k), rows.exl3 = fn_is_exl3(linears[lane].w);
    fn_half_rows(s.warp[threadIdx.x >> 5], rows);
}
