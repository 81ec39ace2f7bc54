// site_mid: what lies between the two products of a residual site: the low-rank row and the injection
// factors.
// Contract    linears FnLinear[2]: down (n = R outputs), inject (n = 4; read only with has_inject), both with
//             finished part (segments, rows_cap, n) f32, one leaf, or where part is 0 the sums in out
//             (rows_cap, n) f32 -> u (rows_cap, R) f16 in fragment order, or with tiled != 0 as a tile image
//             (fn_tile_at) of ceil(R / 64) k blocks, inject (rows_cap, 4) f32 (only with has_inject).  R % 16
//             == 0, segments <= 32.  Rows >= round.n_rows are not touched.
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
const u32 BATCH = 16;

// fn_sum_units of one leaf with BATCH loads asked for before the additions.
FN_DEVICE float sum_segments(const float* part, u32 segments, u32 stride) {
    float sum = 0.f;
    for (u32 first = 0; first < segments; first += BATCH) {
        float p[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            if (first + i < segments) p[i] = fn_ld(part + (first + i) * stride);
        }
        sum = first ? fn_add(sum, p[0]) : p[0];
#pragma unroll
        for (u32 i = 1; i < BATCH; i++) {
            if (first + i < segments) sum = fn_add(sum, p[i]);
        }
    }
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

    fn_wait_prior();
    u32 n_rows = fn_ld(&round->n_rows), cap = fn_ld(&round->rows_cap);
    if (row >= n_rows) return;
    if (!low_part) low_part = low_out, low_segments = 1u;
    if (!part) part = out, segments = 1u;
    for (u32 i = threadIdx.x; i < (has_inject ? rank + 4u : rank); i += FN_THREADS) {
        bool low = i < rank;
        u32 n = low ? rank : 4u, output = low ? i : i - rank;
        const float* from = reinterpret_cast<const float*>(low ? low_part : part) + row * n + output;
        float x = fn_mul(sum_segments(from, low ? low_segments : segments, cap * n), 0.25f);
        float gate = fn_gate(x, low);
        if (low) {
            u64 at = tiled ? fn_tile_at((rank + 63u) >> 6, row, i) : row * rank + fn_frag_pos(i);
            u[at] = fn_f2h(gate);
        } else {
            inject[4u * row + output] = fn_mul(2.f, gate);
        }
    }
}
