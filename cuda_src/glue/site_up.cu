// site_up_n8, site_up_n16: the gates of a residual site and the mean of the gated, normed streams.
// Contract    linear: up, f16 or bf16 weights in fragment order (4 hidden outputs, K = R inputs, one leaf), x
//             = u f16 (rows_cap, x_stride) in fragment order;  streams (rows_cap, 4 hidden) f32, rinv
//             (rows_cap, 4) f32, w (4 hidden) f32 -> m (rows_cap, hidden) f32 and, where m16 is not null,
//             the operand of plain linears that read m: m16 (rows_cap, hidden) f16 in fragment order.
//             hidden % 16 == 0, R % 16 == 0, rows_cap <= FN_ROWS. Rows >= round.n_rows are neither read nor
//             written.
// Launch      grid (ceil(hidden / 16)), block 128, shared UpShared.  A block makes 16 channels of all rows:
//             warp j the 16 gates of stream j; shared memory brings the four streams of a channel together.
// Arithmetic  order site_mix_v1.  dot = plain_dot_v1 and part_sum_v1: a chain of k16 mma steps a segment,
//             from +0, k rising, segments added in rising order;  g_j = sigmoid(dot);  n_j = (s_j * rinv_j) *
//             (1 + w_j) in f32; m = fma(g3, n3, fma(g2, n2, fma(g1, n1, g0 * n0))) * 0.25;  m16 = f16(m).
// Equality    both widths give a row the same bytes, whatever the other rows are.  NaN and Inf of a row stay
//             in it.  m16: the bytes of linear_input.
// Reference   ref/glue.py Site.  Source: model.md section 3.
//
// The weights are read once from memory, so what counts is how many bytes are on their way: a lane asks for
// up to BATCH k steps of weights and operands before it uses the first.  An SM holds one or two of these
// blocks, so the registers are there.  The code runs once a block: it is kept short where it can be.
#include "exl3.cuh"

namespace FN_NAMESPACE {
const u32 TILES = FN_ROWS / 8;
const u32 BATCH = TILES == 1 ? 20 : 10;  // 20: all of K at the published low rank of 320
const u32 MIXED = FN_ROWS / 2;           // rows of a thread in the mix
const u32 STRIDE = 20;                   // floats between rows: the lanes of a store hit different banks

struct UpShared {
    float g[4][FN_ROWS][STRIDE];  // dots, then gates, of a stream, row and channel
    float n[4][FN_ROWS][STRIDE];  // normed streams
};

// d = chain over n_steps k steps from +0.  a: the lane's words of the tile at the first step; x: the lane's
// operand rows there, null for rows that are not live, which are fed as zeros.  AT_ONCE: k steps asked for at
// once.  ready: called when the first weights are under way, before x is used.
template <bool BF16, u32 AT_ONCE, class Ready>
FN_DEVICE void chain(float (&d)[TILES][4], const uint4* a, const u16* (&x)[TILES], u32 n_steps, Ready ready) {
#pragma unroll
    for (u32 r = 0; r < TILES; r++) d[r][0] = d[r][1] = d[r][2] = d[r][3] = 0.f;
    for (u32 first = 0; first < n_steps; first += AT_ONCE) {
        uint4 words[AT_ONCE];
        uint2 rows[AT_ONCE][TILES];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++)
            if (first + i < n_steps) words[i] = fn_ld_here(a + 32u * (first + i));
        if (first == 0) ready();
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
#pragma unroll
            for (u32 r = 0; r < TILES; r++) {
                rows[i][r] = make_uint2(0u, 0u);
                if (x[r] && first + i < n_steps)
                    rows[i][r] = fn_ld_here(reinterpret_cast<const uint2*>(x[r] + 16u * (first + i)));
            }
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            if (first + i >= n_steps) return;
            u32 w[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
            for (u32 r = 0; r < TILES; r++) {
                u32 b[2] = {rows[i][r].x, rows[i][r].y};
                if constexpr (BF16) {
                    u32 hi[2], lo[2];
                    fn_bf16_split(b[0], hi[0], lo[0]);
                    fn_bf16_split(b[1], hi[1], lo[1]);
                    fn_mma_bf16(d[r], w, hi);
                    fn_mma_bf16(d[r], w, lo);
                } else {
                    fn_mma_f16(d[r], w, b);
                }
            }
        }
    }
}
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnLinear* linear, const float* streams, const float* rinv,
           const float* w, float* m, u16* m16, u32 hidden)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(UpShared, shared);
    fn_let_next();
    u32 n_rows = fn_ld_here(&round->n_rows), stream = threadIdx.x >> 5, lane = threadIdx.x & 31u;
    u32 segments = linear->segments, steps = linear->k / 16u, per_segment = steps / segments;

    const u16 *x[TILES], *operand = reinterpret_cast<const u16*>(linear->x) + 4u * (lane & 3u);
    u32 x_stride = linear->x_stride;
    const uint4* a = reinterpret_cast<const uint4*>(linear->w.data) +
                     (u64)(stream * (hidden / 16u) + blockIdx.x) * steps * 32u + lane;

    // In the mix a thread has stream j of channel c in rows half, half + 2, ...: what they need is asked for before
    // the dot.
    u32 j = threadIdx.x & 3u, i_channel = threadIdx.x >> 2 & 15u, half = threadIdx.x >> 6;
    u32 c = 16u * blockIdx.x + i_channel;
    float weight = fn_ld(w + j * hidden + c), s[MIXED], scale[MIXED];
    auto ready = [&] {
        fn_wait_prior();
#pragma unroll
        for (u32 r = 0; r < TILES; r++) {
            u32 row = 8u * r + (lane >> 2);
            x[r] = row < n_rows ? operand + (u64)row * x_stride : nullptr;
        }
#pragma unroll
        for (u32 i = 0; i < MIXED; i++) {
            u32 row = half + 2u * i;
            s[i] = row < n_rows ? fn_ld(streams + (u64)(4u * row + j) * hidden + c) : 0.f;
            scale[i] = row < n_rows ? fn_ld(rinv + 4u * row + j) : 0.f;
        }
    };

    for (u32 segment = 0; segment < segments; segment++) {
        float d[TILES][4];
        auto first_time = [&] {
            if (segment == 0) ready();
        };
        if (linear->w.format == FN_FORMAT_BF16) {
            chain<true, 4>(d, a, x, per_segment, first_time);
        } else {
            chain<false, BATCH>(d, a, x, per_segment, first_time);
        }
        a += 32u * per_segment;
#pragma unroll
        for (u32 r = 0; r < TILES; r++) {
            x[r] = x[r] ? x[r] + 16u * per_segment : nullptr;
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u32 row = 8u * r + 2u * (lane & 3u) + (i & 1u);
                float& sum = shared.g[stream][row][(lane >> 2) + 8u * (i >> 1)];
                if (row < n_rows) sum = segment ? fn_add(sum, d[r][i]) : d[r][i];
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < MIXED; i++) {
        u32 row = half + 2u * i;
        if (row >= n_rows) return;  // whole warps
        float& g = shared.g[j][row][i_channel];
        g = fn_sigmoid(g);
        shared.n[j][row][i_channel] = fn_mul(fn_mul(s[i], scale[i]), fn_add(1.f, weight));
        __syncwarp();
        if (j == 0) {
            float sum = fn_mul(shared.g[0][row][i_channel], shared.n[0][row][i_channel]);
#pragma unroll
            for (u32 k = 1; k < 4; k++)
                sum = fn_fma(shared.g[k][row][i_channel], shared.n[k][row][i_channel], sum);
            float mean = fn_mul(sum, 0.25f);
            m[(u64)row * hidden + c] = mean;
            if (m16) m16[(u64)row * hidden + fn_frag_pos(c)] = fn_f2h(mean);
        }
    }
}
