// deep_site_up: the gates of a residual site and the mean of the gated, normed streams, for all rows of a chunk.
// Contract    linear: up, f16 or bf16 weights in fragment order (4 hidden outputs, K = R inputs), x = u as a tile
//             image;  streams (rows, 4 hidden) f32, rinv (rows, 4) f32, w (4 hidden) f32 -> m (rows, hidden) f32.
//             hidden % 32 == 0, R % 16 == 0.  Rows >= round.n_rows are not written.
// Launch      grid any (best: as many blocks as SMs, at most hidden / 32 x ceil(rows / 128)), block 384, shared
//             DeepSiteShared.  A tile's 128 outputs are 32 channels of the four streams.
// Arithmetic  order site_mix_v1: dots as deep.cuh;  g_j = sigmoid(dot);  n_j = (s_j * rinv_j) * (1 + w_j) in f32;
//             m = fma(g3, n3, fma(g2, n2, fma(g1, n1, g0 * n0))) * 0.25.
// Equality    the bytes of site_up.  NaN and Inf of a row stay in it.
// Reference   ref/glue.py Site.  Source: model.md section 3.
#include "deep.cuh"

namespace FN_NAMESPACE {

struct DeepSiteShared {
    FnDeepShared<4, 16384> deep;
};

const u32 AT_ONCE = 8;  // rows of a warp whose streams are on their way together

struct Site {
    const float *streams, *rinv, *w;
    float* m;
    u32 hidden;
};

// A warp a row, a lane a channel.
FN_DEVICE void mix(const DeepSiteShared& s, const Site& site, u32 channel, u32 row0, u32 live) {
    u32 lane = threadIdx.x & 31u, hidden = site.hidden;
    float scale[4];
#pragma unroll
    for (u32 j = 0; j < 4; j++) scale[j] = fn_add(1.f, fn_ldg(site.w + j * hidden + channel + lane));
    for (u32 first = threadIdx.x >> 5; first < live; first += AT_ONCE * FN_DEEP_WARPS) {
        float x[AT_ONCE][4];  // all asked for before the first is used
        float4 r[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            u64 row = row0 + first + i * FN_DEEP_WARPS;
            if (first + i * FN_DEEP_WARPS >= live) continue;
            r[i] = fn_ldg(reinterpret_cast<const float4*>(site.rinv) + row);
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                x[i][j] = fn_ldg(site.streams + (4u * row + j) * hidden + channel + lane);
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            u32 row = first + i * FN_DEEP_WARPS;
            if (row >= live) continue;
            float rinv[4] = {r[i].x, r[i].y, r[i].z, r[i].w}, sum = 0.f;
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                float n = fn_mul(fn_mul(x[i][j], rinv[j]), scale[j]);
                float g = fn_sigmoid(s.deep.tile[row][32u * j + lane]);
                sum = j ? fn_fma(g, n, sum) : fn_mul(g, n);
            }
            site.m[(u64)(row0 + row) * hidden + channel + lane] = fn_mul(sum, 0.25f);
        }
    }
}

template <u32 ROW_TILES>
FN_DEVICE void run(FnDeep<FnDeepShared<4, 16384>>& deep, bool loads, DeepSiteShared& s, const FnLinear& linear,
                   const Site& site, u32 tile, u32 row0, u32 live) {
    FnDeepWeights w = {linear.w, linear.k, linear.n, 2u * tile, site.hidden / 16u, linear.n / 16u, linear.leaves,
                       linear.segments};
    u32 k_blocks = (linear.k + 63u) / 64u;
    FnDeepRows rows = {reinterpret_cast<const u16*>(linear.x) + (u64)row0 * k_blocks * 64u, k_blocks, live};
    if (loads) {
        deep.template load<ROW_TILES>(w, rows);
        return;
    }
    float sum[ROW_TILES][4];
    deep.dot(w, rows, sum);
    deep.spill(sum);
    if (threadIdx.x < 32u * FN_DEEP_WARPS) mix(s, site, 32u * tile, row0, live);
    deep.meet();
}

}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnLinear* linear, const float* streams, const float* rinv, const float* w,
           float* m, u32 hidden)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(DeepSiteShared, s);
    u32 n_rows = fn_ld(&round->n_rows), n_tiles = hidden / 32u;
    u32 total = n_tiles * ((n_rows + FN_DEEP_ROWS - 1u) / FN_DEEP_ROWS);
    if (blockIdx.x >= total) return;
    Site site = {streams, rinv, w, m, hidden};
    FnDeep<FnDeepShared<4, 16384>> deep(s.deep);
    bool loads = deep.loads();
    for (u32 i = blockIdx.x; i < total; i += gridDim.x) {
        u32 of_rows = i / n_tiles, row0 = FN_DEEP_ROWS * of_rows, live = fn_min_u32(n_rows - row0, FN_DEEP_ROWS);
        if (live <= 64u)
            run<8>(deep, loads, s, *linear, site, i - of_rows * n_tiles, row0, live);
        else
            run<16>(deep, loads, s, *linear, site, i - of_rows * n_tiles, row0, live);
    }
}
