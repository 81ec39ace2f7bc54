// qsa_merge: joins the parts of a head's attention, applies the output gate, and stores the operand of o_proj.
// Contract    q f32 [rows_cap][n_q][512] (query | gate), part_m part_l f32 [rows_cap][n_q][max_parts], part_o f32
//             [rows_cap][n_q][max_parts][256] from qsa_attn, flag u32 [rows_cap] -> linear->x, K = 256 n_q.  A row with
//             flag != 0 (a NaN among its block scores) gives NaN.  linear: one FnLinear, o_proj.
// Launch      grid (n_q, rows_cap), block 128, a thread per two dimensions of the head; shared 2 KB.
// Arithmetic  order qsa_attn_v1: (m, l, o) starts as part 0; with part p: M = max(m, pm); a = fn_exp(m - M),
//             b = fn_exp(pm - M); l = fma(pl, b, l * a), o = fma(po, b, o * a).  fn_max has no order, so one warp
//             computes the factors of 64 parts side by side; only the fma chains are serial.  Then
//             (o / l) * sigmoid(gate) and the linear's input rule (rotation and one rounding, or one rounding).
// Equality    depends on the row's own parts alone.
// Reference   ref/attn.py.  Source: QSA step 6.
#include "attn/pages.cuh"
#include "exl3.cuh"

namespace FN_NAMESPACE {

#define FN_AHEAD 34u  // parts whose values are loaded before the first is needed: 33 is the usual number

struct Shared {
    float4 f[64];  // of 64 parts: factors of the old and of the new sum, the new sum
    float o[256];
};

// Factors of up to 64 parts, by one warp, two parts a lane.
struct Scales {
    float pm[2], pl[2];

    // part_m, part_l: of the first of n parts.
    FN_DEVICE void ask(const float* part_m, const float* part_l, u32 n, u32 lane) {
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            pm[j] = fn_u2f(0xff800000u), pl[j] = 0.f;
            if (2u * lane + j >= n) continue;
            pm[j] = fn_ld_here(part_m + 2u * lane + j);
            pl[j] = fn_ld_here(part_l + 2u * lane + j);
        }
    }
    // m: maximum of all parts before.
    FN_DEVICE void store(Shared& sh, float& m, u32 lane) const {
        float top = fn_max(pm[0], pm[1]);
#pragma unroll
        for (u32 d = 1; d < 32; d <<= 1) {
            float up = fn_shfl_up(top, d);
            if (lane >= d) top = fn_max(top, up);
        }
        float before = fn_shfl_up(top, 1u);
        before = lane == 0u ? m : fn_max(m, before);
        float first = fn_max(before, pm[0]), second = fn_max(first, pm[1]);
        sh.f[2u * lane] =
            make_float4(fn_exp_down(fn_sub(before, first)), fn_exp_down(fn_sub(pm[0], first)), pl[0], 0.f);
        sh.f[2u * lane + 1u] =
            make_float4(fn_exp_down(fn_sub(first, second)), fn_exp_down(fn_sub(pm[1], second)), pl[1], 0.f);
        m = fn_shfl(second, 31u);
    }
};

}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRow* rows, const float* q, const float* part_m, const float* part_l,
           const float* part_o, const u32* flag, const FnLinear* linear, u32 n_q, u32 budget, u32 max_parts)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(Shared, sh);
    fn_let_next();
    u32 head = blockIdx.x, r = blockIdx.y, tid = threadIdx.x, lane = tid & 31u;
    // The operand's place and scales are asked for ahead of the parts, not behind them.
    u32 k = FN_HEAD * head + 4u * tid, stride = linear->x_stride, tiled = linear->tiled, operands = linear->k;
    u16* to = reinterpret_cast<u16*>(linear->x);
    bool exl3 = fn_is_exl3(linear->w);
    float scale[4] = {1.f, 1.f, 1.f, 1.f};
    if (exl3 && tid < 64u) fn_load_early_h4(reinterpret_cast<const u16*>(linear->w.suh) + k, scale);
    u32 n_rows = fn_ld_here(&round->n_rows), position = fn_ld_here(&rows[r].position);  // any bytes beyond n_rows

    fn_wait_prior();
    if (r >= n_rows) return;
    u32 parts = (fn_attended(position, budget) + FN_PART - 1u) / FN_PART;
    size_t at = ((size_t)r * n_q + head) * max_parts;
    const float2* po = reinterpret_cast<const float2*>(part_o + at * FN_HEAD) + tid;
    const float* gates = q + ((size_t)r * n_q + head) * (2u * FN_HEAD) + FN_HEAD;
    float2 gate = fn_ld(reinterpret_cast<const float2*>(gates) + tid);
    bool broken = flag[r] != 0u;
    Scales scales;

    float m = fn_u2f(0xff800000u), l = 0.f;
    float2 o = {0.f, 0.f};
    for (u32 base = 0; base < parts; base += 64u) {
        u32 n = fn_min_u32(parts - base, 64u);
        if (base != 0u) __syncthreads();  // the factors before have been used
        if (tid < 32u) scales.ask(part_m + at + base, part_l + at + base, n, lane);
        for (u32 i = 0; i < n; i += FN_AHEAD) {
            float2 v[FN_AHEAD];
            const float2* from = po + (size_t)(base + i) * (FN_HEAD / 2u);
#pragma unroll
            for (u32 j = 0; j < FN_AHEAD; j++)
                if (i + j < n) v[j] = fn_ld(from + j * (FN_HEAD / 2u));
            if (i == 0u) {
                if (tid < 32u) scales.store(sh, m, lane);
                __syncthreads();
            }
#pragma unroll
            for (u32 j = 0; j < FN_AHEAD; j++) {
                if (i + j >= n) continue;
                float4 f = sh.f[i + j];
                if (j == 0u && base + i == 0u) {
                    o = v[0];
                    l = f.z;
                    continue;
                }
                o.x = fn_fma(v[j].x, f.y, fn_mul(o.x, f.x));
                o.y = fn_fma(v[j].y, f.y, fn_mul(o.y, f.x));
                l = fn_fma(f.z, f.y, fn_mul(l, f.x));
            }
        }
    }
    sh.o[2u * tid] = broken ? fn_nan() : fn_mul(fn_div(o.x, l), fn_sigmoid(gate.x));
    sh.o[2u * tid + 1u] = broken ? fn_nan() : fn_mul(fn_div(o.y, l), fn_sigmoid(gate.y));
    __syncthreads();
    if (tid >= 64u) return;
    float4 w = *reinterpret_cast<const float4*>(&sh.o[4u * tid]);
    float out[4] = {w.x, w.y, w.z, w.w};
    if (exl3) {  // as fn_exl3_rotate_in
#pragma unroll
        for (u32 i = 0; i < 4; i++) out[i] = fn_mul(out[i], scale[i]);
        fn_hadamard128(out);
    }
    if (tiled) {
        fn_store_tile4(to, operands >> 6, r, k, out);
    } else {
        fn_store_frag4(to + (u64)r * stride, k, out);
    }
}
