// qsa_merge: joins the parts of a head's attention, applies the output gate, and stores the operand of o_proj.
// Contract    q f32 [rows_cap][n_q][512] (query | gate), part_m part_l f32 [rows_cap][n_q][max_parts], part_o f32
//             [rows_cap][n_q][max_parts][256] from qsa_attn, flag u32 [rows_cap] -> linear->x, K = 256 n_q.  A row with
//             flag != 0 (a NaN among its block scores) gives NaN.  linear: one FnLinear, o_proj.
// Launch      grid (n_q, rows_cap), block 64, a warp per half head.
// Arithmetic  order qsa_attn_v1: (m, l, o) starts as part 0; with part p: M = max(m, pm); a = fn_exp(m - M),
//             b = fn_exp(pm - M); l = fma(pl, b, l * a), o = fma(po, b, o * a).  fn_max has no order, so the factors of
//             32 parts are computed side by side; only the fma chains are serial.  Then (o / l) * sigmoid(gate) and the
//             linear's input rule (rotation and one rounding, or one rounding).
// Equality    depends on the row's own parts alone.
// Reference   ref/attn.py.  Source: QSA step 6.
#include "attn/pages.cuh"
#include "exl3.cuh"

namespace FN_NAMESPACE {

#define FN_AHEAD 16u

struct Shared {
    float a[2][32], b[2][32], l[2][32];  // factors of old and new, sums; one row a warp
};

}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRow* rows, const float* q, const float* part_m, const float* part_l,
           const float* part_o, const u32* flag, const FnLinear* linear, u32 n_q, u32 budget, u32 max_parts)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(Shared, sh);
    u32 head = blockIdx.x, r = blockIdx.y;
    if (r >= round->n_rows) return;
    u32 lane = threadIdx.x & 31u, half = threadIdx.x >> 5;
    u32 parts = (fn_attended(rows[r].position, budget) + FN_PART - 1u) / FN_PART;
    size_t at = ((size_t)r * n_q + head) * max_parts;
    const float4* po = reinterpret_cast<const float4*>(part_o + at * FN_HEAD + 128u * half) + lane;

    float m = fn_u2f(0xff800000u), l = 0.f, o[4] = {0.f, 0.f, 0.f, 0.f};
    for (u32 base = 0; base < parts; base += 32u) {
        u32 n = fn_min_u32(parts - base, 32u);
        float pm = lane < n ? fn_ldg(part_m + at + base + lane) : fn_u2f(0xff800000u);
        float pl = lane < n ? fn_ldg(part_l + at + base + lane) : 0.f;
        float top = pm;  // maximum of all parts up to the lane's
#pragma unroll
        for (u32 d = 1; d < 32; d <<= 1) {
            float up = fn_shfl_up(top, d);
            if (lane >= d) top = fn_max(top, up);
        }
        top = fn_max(top, m);
        float before = fn_shfl_up(top, 1u);
        if (lane == 0u) before = m;
        sh.a[half][lane] = fn_exp(fn_sub(before, top));
        sh.b[half][lane] = fn_exp(fn_sub(pm, top));
        sh.l[half][lane] = pl;
        m = fn_shfl(top, 31u);
        __syncwarp();
        for (u32 i = 0; i < n; i += FN_AHEAD) {
            float4 v[FN_AHEAD];
#pragma unroll
            for (u32 j = 0; j < FN_AHEAD; j++)
                if (i + j < n) v[j] = fn_ldg(po + (size_t)(base + i + j) * (FN_HEAD / 4u));
#pragma unroll
            for (u32 j = 0; j < FN_AHEAD; j++) {
                if (i + j >= n) continue;
                float w[4] = {v[j].x, v[j].y, v[j].z, v[j].w}, pl_j = sh.l[half][i + j];
                if (base + i + j == 0u) {
                    l = pl_j;
#pragma unroll
                    for (int c = 0; c < 4; c++) o[c] = w[c];
                    continue;
                }
                float a = sh.a[half][i + j], b = sh.b[half][i + j];
                l = fn_fma(pl_j, b, fn_mul(l, a));
#pragma unroll
                for (int c = 0; c < 4; c++) o[c] = fn_fma(w[c], b, fn_mul(o[c], a));
            }
        }
        __syncwarp();
    }

    float4 gate = fn_ldg(reinterpret_cast<const float4*>(q + ((size_t)r * n_q + head) * (2u * FN_HEAD) + FN_HEAD +
                                                         128u * half) + lane);
    float raw[4] = {gate.x, gate.y, gate.z, gate.w};
    bool broken = flag[r] != 0u;
#pragma unroll
    for (int c = 0; c < 4; c++) o[c] = broken ? fn_nan() : fn_mul(fn_div(o[c], l), fn_sigmoid(raw[c]));
    fn_linear_store_input(o, *linear, r, 2u * head + half);
}
