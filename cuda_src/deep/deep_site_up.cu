// deep_site_up: the gates of a residual site and the mean of the gated, normed streams, for all rows of a chunk.
// Contract    linear: up, f16 or bf16 weights in fragment order (4 hidden outputs, K = R inputs), x = u as a tile
//             image;  streams (rows, 4 hidden) f32, rinv (rows, 4) f32, w (4 hidden) f32 -> m (rows, hidden) f32.
//             hidden % 32 == 0, R % 16 == 0.  Rows >= round.n_rows are not written.
// Launch      grid (hidden / 32 x ceil(rows / 128)), block 384, shared DeepSiteShared.  A block's 128 outputs are 32
//             channels of the four streams.
// Arithmetic  order site_mix_v1: dots as deep.cuh;  g_j = sigmoid(dot);  n_j = (s_j * rinv_j) * (1 + w_j) in f32;
//             m = fma(g3, n3, fma(g2, n2, fma(g1, n1, g0 * n0))) * 0.25.
// Equality    the bytes of site_up.  NaN and Inf of a row stay in it.
// Reference   ref/glue.py Site.  Source: model.md section 3.
#include "deep.cuh"

namespace FN_NAMESPACE {

struct DeepSiteShared {
    FnDeepShared<4, 16384> deep;
};

const u32 AT_ONCE = 4;  // rows of a warp whose streams are on their way together

struct Site {
    const float *streams, *rinv, *w;
    float* m;
    u32 hidden;
};

// A warp a row, a lane a channel.
FN_DEVICE void mix(const DeepSiteShared& s, const Site& site, u32 channel, u32 row0, u32 live) {
    u32 thread = fn_thread_here(), lane = thread & 31u, hidden = site.hidden;
    if (thread >= 32u * FN_DEEP_WARPS) return;
    float scale[4];
#pragma unroll
    for (u32 j = 0; j < 4; j++) scale[j] = fn_add(1.f, fn_ldg(site.w + j * hidden + channel + lane));
    for (u32 first = thread >> 5; first < live; first += AT_ONCE * FN_DEEP_WARPS) {
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

// The i-th tile of the launch.
struct Tile {
    u32 tile, row0, live;

    FN_DEVICE Tile(u32 i, u32 n_tiles, u32 n_rows) {
        u32 of_rows = i / n_tiles;
        tile = i - of_rows * n_tiles;
        row0 = FN_DEEP_ROWS * of_rows;
        live = fn_min_u32(n_rows - row0, FN_DEEP_ROWS);
    }
    FN_DEVICE FnDeepWeights weights(const FnLinear& linear) const {
        return {linear.w,        linear.k,       linear.n,      2u * tile,
                linear.n / 64u, linear.n / 16u, linear.leaves, linear.segments};
    }
    FN_DEVICE FnDeepRows rows(const FnLinear& linear) const {
        u32 k_blocks = (linear.k + 63u) / 64u;
        return {reinterpret_cast<const u16*>(linear.x) + (u64)row0 * k_blocks * 64u, k_blocks, live};
    }
};

template <u32 ROW_TILES>
FN_DEVICE void run(FnDeep<FnDeepShared<4, 16384>, FN_DEEP_PLAIN>& deep, DeepSiteShared& s, const FnLinear& linear,
                   const Site& site, const Tile& t) {
    float sum[ROW_TILES][4];
    deep.dot(t.weights(linear), t.rows(linear), sum);
    deep.spill(sum);
    mix(s, site, 32u * t.tile, t.row0, t.live);
}

}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnLinear* linear, const float* streams, const float* rinv, const float* w,
           float* m, u32 hidden)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(DeepSiteShared, s);
    u32 n_rows = fn_ld(&round->n_rows), n_tiles = hidden / 32u;
    u32 total = n_tiles * ((n_rows + FN_DEEP_ROWS - 1u) / FN_DEEP_ROWS);
    if (blockIdx.x >= total) return;
    Tile t(blockIdx.x, n_tiles, n_rows);
    FnDeep<FnDeepShared<4, 16384>, FN_DEEP_PLAIN> deep(s.deep);
    if (deep.loads()) {
        deep.begin_loads();
        deep.load(t.live, t.weights(*linear), t.rows(*linear));
        return;
    }
    deep.begin_dots();
    Site site = {streams, rinv, w, m, hidden};
    if (t.live <= 64u)
        run<8>(deep, s, *linear, site, t);
    else
        run<16>(deep, s, *linear, site, t);
}
