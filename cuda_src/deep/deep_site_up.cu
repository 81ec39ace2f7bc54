// deep_site_up: the gates of a residual site and the mean of the gated, normed streams, for all rows of a chunk.
// Contract    linear: up, f16 or bf16 weights in fragment order (4 hidden outputs, K = R inputs), x = u as a tile
//             image;  streams (rows, 4 hidden) f32, rinv (rows, 4) f32, w (4 hidden) f32 -> m (rows, hidden) f32.
//             hidden % 32 == 0, R % 16 == 0.  Rows >= round.n_rows are not written.
// Launch      grid (1 .. hidden / 32 x ceil(rows / 128)), block 384, shared DeepSiteShared.  A block strides over
//             tiles of 128 outputs, 32 channels of the four streams, and up to 128 rows; on sm_90a, where f16 weights
//             of R = 320 stay in registers, it takes an equal share of them, of 64 rows each, in order.
// Arithmetic  order site_mix_v1: dots as deep.cuh;  g_j = sigmoid(dot);  n_j = (s_j * rinv_j) * (1 + w_j) in f32;
//             m = fma(g3, n3, fma(g2, n2, fma(g1, n1, g0 * n0))) * 0.25.
// Equality    the bytes of site_up.  NaN and Inf of a row stay in it.
// Reference   ref/glue.py Site.  Source: model.md section 3.
#include "deep.cuh"

namespace FN_NAMESPACE {

typedef FnDeep<FN_DEEP_PLAIN> Deep;

const u32 ROWS = 128;   // of a tile
const u32 AT_ONCE = 4;  // rows of a warp whose streams are on their way together

#ifdef FN_HOPPER
const u32 STEPS = 20;  // k steps of weights that stay in registers: of R = 320, as published
const u32 STAGES = 3;

struct ResidentShared {
    u8 rows[STAGES][STEPS / 4u * 8192u];  // images of 64 rows
    float dots[2][2][64 * 64];           // of a warpgroup, by turns: [row][stream][channel]
    u64 full[STAGES], empty[STAGES];
};
union DeepSiteShared {
    FnDeepShared deep;
    ResidentShared resident;
};
#else
struct DeepSiteShared {
    FnDeepShared deep;
};
#endif

// The gated value x of stream j, scale 1 + w, behind the sum of those before.
FN_DEVICE float mixed(u32 j, float dot, float x, float rinv, float scale, float sum) {
    float n = fn_mul(fn_mul(x, rinv), scale), g = fn_sigmoid(dot);
    return j ? fn_fma(g, n, sum) : fn_mul(g, n);
}

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
    FN_DEVICE void begin(const Deep&, u32, u32 n) const {
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
                for (u32 j = 0; j < 4; j++)
                    sum = mixed(j, deep.output(row, 32u * j + lane), x[i][j], rinv4[j], scale[j], sum);
                m[(u64)(row0 + row) * hidden + channel] = fn_mul(sum, 0.25f);
            }
        }
    }
};

#ifdef FN_HOPPER
// A block's share of tiles of 32 channels and 64 rows, those of the same channels one behind the other.  A warpgroup
// has 16 channels: its warp j their weights for stream j, all of them in registers.  One computes while the other
// mixes: they share the rows in the ring and nothing else.
struct Resident {
    ResidentShared& s;
    const Tiles& all;
    u32 n_tiles, first, end;  // tiles of the same channels; the block's share

    FN_DEVICE Resident(ResidentShared& s, const Tiles& all) : s(s), all(all) {
        n_tiles = (all.n_rows + 63u) / 64u;
        u64 count = all.hidden / 32u * n_tiles;
        first = (u32)(count * blockIdx.x / gridDim.x);
        end = (u32)(count * (blockIdx.x + 1u) / gridDim.x);
        if (threadIdx.x == 0) {
#pragma unroll
            for (u32 i = 0; i < STAGES; i++) {
                fn_barrier_init(&s.full[i], 1u);
                fn_barrier_init(&s.empty[i], FN_DEEP_WARPS);
            }
            fn_barrier_init_fence();
        }
        __syncthreads();
    }
    FN_DEVICE void run() {
        if (threadIdx.x >= 32u * FN_DEEP_WARPS) {
            fn_registers_give<40>();
            if (threadIdx.x < 32u * FN_DEEP_WARPS + 32u) load();
        } else {
            fn_registers_take<232>();
            compute();
        }
    }
    // Rows into the ring, and the streams of the same tile into L2.
    FN_DEVICE void load() {
        const u32 bytes = sizeof(s.rows[0]);
        const u8* x = reinterpret_cast<const u8*>(all.linear.x);
        for (u32 i = first; i < end; i++) {
            u32 stage = (i - first) % STAGES, round = (i - first) / STAGES;
            u32 tile = i % n_tiles, pair = i / n_tiles, lane = threadIdx.x & 31u;
            fn_barrier_wait(&s.empty[stage], round & 1u ^ 1u);
            if (lane == 0) {
                fn_barrier_expect(&s.full[stage], bytes);
                fn_bulk_copy(s.rows[stage], x + (u64)tile * bytes, bytes, &s.full[stage]);
            }
            for (u32 r = lane; r < 4u * 64u; r += 32u) {
                u64 row = 256u * tile + r;  // of a stream
                if (row < 4u * all.n_rows) fn_ask_for_line(all.streams + row * all.hidden + 32u * pair);
            }
            __syncwarp();
        }
    }

    // What a lane mixes of half h of the warp's sixteen rows: four channels of a row of its own.
    struct Some {
        float4 x[4], inv;
    };
    FN_DEVICE u32 row_of(u32 h) const {  // in the tile; rows of neighbours lie in different banks of the dots
        u32 thread = fn_thread_here();
        return 16u * (thread >> 5 & 3u) + 8u * h + (thread >> 3 & 3u) + (thread & 4u);
    }
    // Of output 16 stream + channel of a row: stores of a mma's sums spread over the banks too.
    static FN_DEVICE u32 place(u32 row, u32 output) { return 64u * row + (output ^ (row >> 1 & 3u) << 3); }
    FN_DEVICE Some ask(u32 h, u32 row0, u32 channel) const {
        Some some;
        u64 row = fn_min_u32(row0 + row_of(h), all.n_rows - 1u);
        some.inv = fn_ldg(reinterpret_cast<const float4*>(all.rinv) + row);
        const float* from = all.streams + 4u * row * all.hidden + channel;
#pragma unroll
        for (u32 j = 0; j < 4; j++) some.x[j] = fn_ldg(reinterpret_cast<const float4*>(from + j * all.hidden));
        return some;
    }
    FN_DEVICE void mix(const Some& some, u32 h, const float* dots, u32 row0, u32 channel,
                       const float (&scale)[4][4]) const {
        u32 row = row_of(h);
        float sum[4] = {}, rinv[4] = {some.inv.x, some.inv.y, some.inv.z, some.inv.w};
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 at = place(row, 16u * j + 4u * (fn_thread_here() & 3u));
            float4 dot = *reinterpret_cast<const float4*>(dots + at);
            float dot4[4] = {dot.x, dot.y, dot.z, dot.w};
            float x4[4] = {some.x[j].x, some.x[j].y, some.x[j].z, some.x[j].w};
#pragma unroll
            for (u32 c = 0; c < 4; c++) sum[c] = mixed(j, dot4[c], x4[c], rinv[j], scale[j][c], sum[c]);
        }
        if (row0 + row >= all.n_rows) return;
#pragma unroll
        for (u32 c = 0; c < 4; c++) sum[c] = fn_mul(sum[c], 0.25f);
        *reinterpret_cast<float4*>(all.m + (u64)(row0 + row) * all.hidden + channel) =
            make_float4(sum[0], sum[1], sum[2], sum[3]);
    }

    FN_DEVICE void compute() {
        u32 thread = fn_thread_here(), group = thread >> 7, stream = thread >> 5 & 3u, lane = thread & 31u;
        u32 pair = ~0u, channel = 0, a[STEPS][4];
        float scale[4][4] = {};
#pragma unroll
        for (u32 i = 0; i < STEPS; i++) a[i][0] = a[i][1] = a[i][2] = a[i][3] = 0;
#pragma unroll 1
        for (u32 i = first; i < end; i++) {
            u32 stage = (i - first) % STAGES, round = (i - first) / STAGES, row0 = 64u * (i % n_tiles);
            if (i / n_tiles != pair) {
                pair = i / n_tiles;
                channel = 32u * pair + 16u * group + 4u * (lane & 3u);
                u32 tile = 2u * pair + group + stream * (all.hidden / 16u);
                const uint4* from = reinterpret_cast<const uint4*>(all.linear.w.data) + tile * (32u * STEPS) + lane;
#pragma unroll
                for (u32 k = 0; k < STEPS; k++) {
                    uint4 w = fn_ldg(from + 32u * k);
                    a[k][0] = w.x, a[k][1] = w.y, a[k][2] = w.z, a[k][3] = w.w;
                }
#pragma unroll
                for (u32 j = 0; j < 4; j++)
#pragma unroll
                    for (u32 c = 0; c < 4; c++) scale[j][c] = fn_add(1.f, fn_ldg(all.w + j * all.hidden + channel + c));
            }
            Some some = ask(0, row0, channel), more = ask(1, row0, channel);
            float d[8][4], *dots = s.dots[group][i & 1u];
            fn_deep_set(d, 0.f);
            fn_barrier_wait(&s.full[stage], round & 1u);
            fn_hold(d);
            fn_wgmma_fence();
#pragma unroll
            for (u32 k = 0; k < STEPS; k++) {
                u64 rows = fn_tile_descriptor(s.rows[stage] + 8192u * (k / 4u));
                fn_wgmma(d, a[k], rows + 2u * (k & 3u), k != 0);
            }
            fn_wgmma_commit();
            fn_hold(d);
            fn_wgmma_wait<0>();
            fn_hold(d);
            __syncwarp();
            if (lane == 0) fn_barrier_arrive(&s.empty[stage]);
#pragma unroll
            for (u32 j = 0; j < 8; j++)
#pragma unroll
                for (u32 c = 0; c < 4; c++)
                    dots[place(8u * j + 2u * (lane & 3u) + (c & 1u), 16u * stream + (lane >> 2) + 8u * (c >> 1))] =
                        d[j][c];
            fn_named_barrier(1u + group, 128u);  // the turn before of these dots was read before the last barrier
            mix(some, 0, dots, row0, channel, scale);
            mix(more, 1, dots, row0, channel, scale);
        }
    }
};
#endif

}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnLinear* linear, const float* streams, const float* rinv, const float* w,
           float* m, u32 hidden)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(DeepSiteShared, s);
    Tiles tiles = {*linear, streams, rinv, w, m, hidden, fn_ld(&round->n_rows)};
    if (blockIdx.x >= tiles.count()) return;
#ifdef FN_HOPPER
    if (linear->w.format == FN_FORMAT_F16 && linear->k == 16u * STEPS) {
        Resident(s.resident, tiles).run();
        return;
    }
#endif
    Deep(s.deep).run(tiles);
}
