// deep_site_up: the gates of a residual site and the mean of the gated, normed streams, for all rows of a chunk.
// Contract    linear: up, f16 or bf16 weights in fragment order (4 hidden outputs, K = R inputs), x = u as a tile
//             image;  streams (rows, 4 hidden) f32, rinv (rows, 4) f32, w (4 hidden) f32 -> m (rows, hidden) f32.
//             hidden % 32 == 0, R % 16 == 0.  Rows >= round.n_rows are not written.
// Launch      grid (1 .. hidden / 32 x ceil(rows / 128)), block 384, shared DeepSiteShared.  A block strides over
//             tiles of 128 outputs, 32 channels of the four streams, and up to 128 rows.
// Arithmetic  order site_mix_v1: dots as deep.cuh;  g_j = sigmoid(dot);  n_j = (s_j * rinv_j) * (1 + w_j) in f32;
//             m = fma(g3, n3, fma(g2, n2, fma(g1, n1, g0 * n0))) * 0.25.
// Equality    the bytes of site_up.  NaN and Inf of a row stay in it.
// Reference   ref/glue.py Site.  Source: model.md section 3.
#include "deep.cuh"

namespace FN_NAMESPACE {

struct DeepSiteShared {
    FnDeepShared deep;
};
typedef FnDeep<FN_DEEP_PLAIN> Deep;

const u32 ROWS = 128;   // of a tile
const u32 AT_ONCE = 4;  // rows of a warp whose streams are on their way together

struct Tiles {
    const FnLinear& linear;
    const float *streams, *rinv, *w;
    float* m;
    u32 hidden, n_rows;
    u32 channel0, row0;  // of the present tile

    enum : u32 { PRODUCTS = 1 };
    FN_DEVICE u32 count() const { return hidden / 32u * ((n_rows + ROWS - 1u) / ROWS); }
    FN_DEVICE u32 live() const { return fn_min_u32(n_rows - row0, ROWS); }
    FN_DEVICE bool take(u32 i) {
        u32 of_rows = i / (hidden / 32u);
        channel0 = 32u * i - of_rows * hidden;
        row0 = ROWS * of_rows;
        return true;
    }
    FN_DEVICE FnDeepWeights weights(u32) const {
        return {linear.w,        linear.k,       linear.n,      channel0 / 16u,
                linear.n / 64u, linear.n / 16u, linear.leaves, linear.segments};
    }
    FN_DEVICE FnDeepRows rows(u32) const {
        u32 k_blocks = (linear.k + 63u) / 64u;
        return {reinterpret_cast<const u16*>(linear.x) + (u64)row0 * k_blocks * 64u, k_blocks, live()};
    }
    // The tile's streams come into L2 while the products run.
    FN_DEVICE void begin(u32, u32 n) const {
        for (u32 i = fn_thread_here(); i < 4u * n; i += 32u * FN_DEEP_WARPS)
            fn_prefetch_l2(reinterpret_cast<u64>(streams + (4ull * row0 + i) * hidden + channel0), 128u);
    }
    // A warp a row, a lane a channel.
    FN_DEVICE void finish(const Deep& deep, u32, u32 first, u32 n_of_part) const {
        u32 thread = fn_thread_here(), lane = thread & 31u, channel = channel0 + lane, end = first + n_of_part;
        float scale[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) scale[j] = fn_add(1.f, fn_ldg(w + j * hidden + channel));
        for (u32 r = first + (thread >> 5); r < end; r += AT_ONCE * FN_DEEP_WARPS) {
            float x[AT_ONCE][4];  // all asked for before the first is used
            float4 inv[AT_ONCE];
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) {
                u64 row = row0 + r + i * FN_DEEP_WARPS;
                if (r + i * FN_DEEP_WARPS >= end) continue;
                inv[i] = fn_ldg(reinterpret_cast<const float4*>(rinv) + row);
#pragma unroll
                for (u32 j = 0; j < 4; j++) x[i][j] = fn_ldg(streams + (4u * row + j) * hidden + channel);
            }
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) {
                u32 row = r + i * FN_DEEP_WARPS;
                if (row >= end) continue;
                float rinv4[4] = {inv[i].x, inv[i].y, inv[i].z, inv[i].w}, sum = 0.f;
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    float n = fn_mul(fn_mul(x[i][j], rinv4[j]), scale[j]);
                    float g = fn_sigmoid(deep.output(row, 32u * j + lane));
                    sum = j ? fn_fma(g, n, sum) : fn_mul(g, n);
                }
                m[(u64)(row0 + row) * hidden + channel] = fn_mul(sum, 0.25f);
            }
        }
    }
};

}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnLinear* linear, const float* streams, const float* rinv, const float* w,
           float* m, u32 hidden)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(DeepSiteShared, s);
    Tiles tiles = {*linear, streams, rinv, w, m, hidden, fn_ld(&round->n_rows)};
    if (blockIdx.x >= tiles.count()) return;
    Deep(s.deep).run(tiles);
}
