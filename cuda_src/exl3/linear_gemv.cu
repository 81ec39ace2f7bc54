// linear_gemv: partial sums of several linears, each of any format, for at most 8 FN_ROW_TILES rows.
// Contract    linears[j].x (rows_cap, x_stride) f16 operands, linears[j].w -> linears[j].part (units,
//             rows_cap, n) f32, rows < n_rows and outputs < n only.  rows_cap <= 8 FN_ROW_TILES.  EXL3: k, n
//             % 128 == 0; plain: k % 16 == 0, any n >= 1.  n_warps = ceil(n / 32) * units, or that halved
//             up to log2(units) times; first_warp counts those of the linears before.
// Launch      grid (total warps), block 64: a block is 32 outputs of as many units, one behind the other, as n_warps
//             leaves each block, all rows; a warp 16 of the outputs.  "warps" of the table are such blocks.
// Arithmetic  orders exl3_dot_v1 and plain_dot_v1: one chain of k16 mma steps a unit, k rising, from zero;
//             bf16: the operand as hi + lo, hi first.  Rows of an mma do not meet: row 0 stands in for those
//             that are not there.
// Equality    a row's bytes do not depend on the other rows, on rows_cap or on which of n8 and n16 runs.
// Reference   ref/exl3.py decode_linear, ref/orders.py mma_chain.
//
// The first weights are on their way, and all that follows from the format is found, before the launches before are
// done.
#include "gemv.cuh"

namespace FN_NAMESPACE {
struct LinearDot {
    u64 data, x, part;  // part: of row 0 and output 0 of the next unit, once begun
    u32 k, n, tile, k0, unit, unit_k, n_units, x_stride, n_rows, rows_cap;
    u64 unit_stride;

    template <class Weights> FN_DEVICE void run() {
        fn_weight_dot<Weights, FN_ROW_TILES>(data, k, n, tile, k0, unit_k, n_units, fn_thread_here() & 31u, *this);
    }
    FN_DEVICE bool begin(FnRows<FN_ROW_TILES>& rows) {
        fn_wait_prior();
        u32 lane = fn_thread_here() & 31u;
        if ((n_rows == 0) | (rows_cap == 0)) return false;
        unit_stride = (u64)rows_cap * n;
        part += 4u * unit * unit_stride;
#pragma unroll
        for (u32 r = 0; r < FN_ROW_TILES; r++) {
            u32 row = 8u * r + (lane >> 2);
            rows.at[r] = reinterpret_cast<const u16*>(x);
            if (row < n_rows) rows.at[r] += (u64)row * x_stride;
        }
        return true;
    }
    FN_DEVICE void store(const float (&d)[FN_ROW_TILES][4]) {
        u32 lane = fn_thread_here() & 31u;
        float* to = reinterpret_cast<float*>(part);
#pragma unroll
        for (u32 r = 0; r < FN_ROW_TILES; r++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u32 row = 8u * r + 2u * (lane & 3u) + (i & 1u), output = 16u * tile + 8u * (i >> 1) + (lane >> 2);
                if (row < n_rows && output < n) to[(u64)row * n + output] = d[r][i];
            }
        }
        part += 4u * unit_stride;
    }
};
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnLinear* linears, u32 n_linears)) {
    using namespace FN_NAMESPACE;
    static_assert(FN_THREADS == FN_GEMV_THREADS, "a block is a pair of tiles");
    fn_let_next();
    FnPlace place;
    u32 n_rows = fn_ld_here(&round->n_rows), rows_cap = fn_ld_here(&round->rows_cap);
    u32 warp = place.pair, j = 0, first[8];
#pragma unroll
    for (u32 i = 1; i < 8; i++) first[i] = i < n_linears ? linears[i].first_warp : 0xffffffffu;  // all at once
#pragma unroll
    for (u32 i = 1; i < 8; i++)
        if (first[i] <= warp) j = i;
#pragma unroll 1
    for (u32 i = 8; i < n_linears; i++)
        if (linears[i].first_warp <= warp) j = i;
    const FnLinear linear = linears[j];
    u32 n = linear.n, units = fn_max_u32(linear.leaves * linear.segments, 1u);  // a power of two
    warp -= linear.first_warp;
    // Whole warps.  All fields in one condition: they are asked for at once, not behind each other's branches.
    bool there = (warp < linear.n_warps) & (linear.w.data != 0) & (linear.x != 0) & (linear.part != 0);
    there &= (linear.k != 0) & (linear.leaves != 0) & (linear.segments != 0);
    there &= (linear.w.format != 0xffffffffu) & (linear.x_stride != 0xffffffffu);
    u32 pairs = (n + 31u) / 32u, taken = fn_units_log2(pairs * units, linear.n_warps), first_unit = warp << taken;
    u32 pair = first_unit >> (fn_ffs(units) - 1u), unit = first_unit & (units - 1u), k0, k1;
    u32 tile = 2u * pair + place.half;
    there &= 16u * tile < n;
    fn_unit_range(linear.k, units, unit, k0, k1);
    if (!there) {
        fn_wait_prior();
        return;
    }
    if (!fn_is_exl3(linear.w) && (threadIdx.x & 31u) == 0)  // all of it: the loop's own loads would come one by one
        fn_prefetch_l2(linear.w.data + ((u64)tile * (linear.k / 16u) + k0 / 16u) * 512u, 32u * (k1 - k0) << taken);
    LinearDot dot{linear.w.data, linear.x, linear.part, linear.k, n, tile, k0, unit, k1 - k0, 1u << taken,
                  linear.x_stride, n_rows, rows_cap, 0};
    fn_with_weights<true, FN_ROW_TILES == 1u ? 8u : 4u>(linear.w.format, dot);
}
