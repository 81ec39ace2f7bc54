// site_mid: what lies between the two products of a residual site: the low-rank row and the injection
// factors.
// Contract    linears FnLinear[2]: down (n = R outputs), inject (n = 4; read only with has_inject), both with
//             finished part (segments, rows_cap, n) f32, one leaf, or where part is 0 the sums in out
//             (rows_cap, n) f32 -> u (rows_cap, R) f16 in fragment order, or with tiled != 0 as a tile image
//             (fn_tile_at) of ceil(R / 64) k blocks, inject (rows_cap, 4) f32 (only with has_inject).  R % 16
//             == 0, segments <= 32.  round.rows_cap == grid x.  Rows >= round.n_rows are not touched.
// Launch      grid (rows_cap), block 384: a thread an output, so that at the published R = 320 every sum of
//             the row is on its way at once.
// Arithmetic  sum = part_sum_v1 (of out: as it is);  u = f16(silu(sum * 0.25));  inject = 2 * sigmoid(sum *
//             0.25).
// Equality    a row's bytes do not depend on other rows.  NaN and Inf stay in their output.
// Reference   ref/glue.py Site.  Source: model.md section 3: division by the 4 streams before silu and
//             sigmoid.
#include "exl3.cuh"
#include "glue/gate.cuh"

namespace FN_NAMESPACE {
const u32 MOST = 32;

// fn_sum_units of one leaf, all of it asked for before the additions.  Those have no guards, which would put some of
// them between the loads: adding -0 changes nothing.
FN_DEVICE float sum_segments(const float* part, u32 segments, u32 stride) {
    float p[MOST], sum = -0.f;
#pragma unroll
    for (u32 i = 0; i < MOST; i++, part += stride) {
        p[i] = -0.f;
        if (i < segments) p[i] = fn_ld_here(part);
    }
#pragma unroll
    for (u32 i = 0; i < MOST; i++) sum = fn_add(sum, p[i]);
    return sum;
}
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnLinear* linears, u32 has_inject, u16* u, float* inject,
           u32 tiled)) {
    using namespace FN_NAMESPACE;
    fn_let_next();
    // Asked for together, before anything depends on one of them.
    u32 row = blockIdx.x;
    u32 rank = linears[0].n, low_segments = linears[0].segments;
    u32 segments = has_inject ? linears[1].segments : 0u;
    u64 low_part = linears[0].part, part = has_inject ? linears[1].part : 0u;
    u64 low_out = linears[0].out, out = has_inject ? linears[1].out : 0u;

    u32 n_rows = fn_ld_here(&round->n_rows), cap = gridDim.x;
    if (!low_part) low_part = low_out, low_segments = 1u;
    if (!part) part = out, segments = 1u;

    fn_wait_prior();
    if (row >= n_rows) return;
    for (u32 i = threadIdx.x; i < (has_inject ? rank + 4u : rank); i += FN_THREADS) {
        bool low = i < rank;
        u32 n = low ? rank : 4u, output = low ? i : i - rank;
        const float* from = reinterpret_cast<const float*>(low ? low_part : part) + row * n + output;
        u32 count = low ? low_segments : segments;
        float sum = count == 1u ? fn_ld_here(from) : sum_segments(from, count, cap * n), x = fn_mul(sum, 0.25f);
        float gate = fn_gate(x, low);
        if (low) {
            u64 at = tiled ? fn_tile_at((rank + 63u) >> 6, row, i) : row * rank + fn_frag_pos(i);
            u[at] = fn_f2h(gate);
        } else {
            inject[4u * row + output] = fn_mul(2.f, gate);
        }
    }
}
