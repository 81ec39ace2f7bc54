// ple_conv: adds the gated n-gram value and its dilated causal convolution to the streams, all rows at once.
// Contract    value (rows_cap, hidden), g (rows_cap, 4) f32, conv_in (rows_cap, 4 hidden) f16 of ple_gate;
//             conv (4 hidden, 4) f32; tail f16 (9, 4 hidden) at slots[run.slot].recurrent + tail_offset, the
//             conv inputs of the nine tokens before the run, oldest first, read alone: ple_tail comes after
//             -> streams (rows_cap, 4 hidden) f32 read and written.  hidden % 2 == 0.  rows[r].run is row r's
//             run.  Rows >= round.n_rows are not touched.
// Launch      grid (ceil(4 hidden / 512), ceil(rows_cap / 16)), block 256, shared 448 B (ConvShared).  A
//             thread keeps the taps' weights of two channels over 16 rows; BATCH rows are asked for at once.
//
//                 tail  0 1 2 3 4 5 6 7 8 | 0 1 2 ..  rows of the run    row o takes places o, o + 3,
//                 place 0 1 2 3 4 5 6 7 8   9 ..                         o + 6 and o + 9
//
// Arithmetic  order ple_v1, step 5 (ple.cuh): s = fn_add(s, fn_add(g * value, conv)).
// Equality    with ple_gate and ple_tail the bytes of ple_mix.  NaN and Inf reach the streams.
// Reference   ref/token.py Ple.  Source: config.json ple_conv_kernel_size 4, ngram_size 3 (dilation).
#include "token/ple.cuh"
#include "tables.cuh"

namespace FN_NAMESPACE {
const u32 TILE = 16;  // rows of a block
const u32 BATCH = 4;
const u32 REACH = 9;  // rows of the tail

// Of each row of the block: its place in the run, REACH or more as REACH, its run's tail, and its gates.
struct ConvShared {
    u64 tail[TILE];
    u32 place[TILE];
    float g[TILE][4];
};
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRow* rows, const FnRun* runs, const FnSlot* slots,
           const float* value, const float* g, const u16* conv_in, const float* conv, float* streams,
           u64 tail_offset, u32 hidden)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(ConvShared, shared);
    u32 first = TILE * blockIdx.y, n_rows = fn_ld(&round->n_rows), width = 4u * hidden;
    if (first >= n_rows) return;
    u32 live = fn_min_u32(n_rows - first, TILE);
    if (threadIdx.x < live) {
        u32 row = first + threadIdx.x;
        FnRun run = runs[rows[row].run];
        shared.place[threadIdx.x] = fn_min_u32(row - run.first_row, REACH);
        shared.tail[threadIdx.x] = slots[run.slot].recurrent + tail_offset;
    }
    if (threadIdx.x >= 64u && threadIdx.x < 64u + 4u * live) {
        u32 i = threadIdx.x - 64u;
        shared.g[i >> 2][i & 3u] = fn_ldg(g + (u64)first * 4u + i);
    }
    __syncthreads();
    u32 c = 2u * (blockIdx.x * FN_THREADS + threadIdx.x);
    if (c >= width) return;
    u32 stream = c / hidden, channel = c - stream * hidden;
    float4 w0 = fn_ldg(reinterpret_cast<const float4*>(conv) + c);
    float4 w1 = fn_ldg(reinterpret_cast<const float4*>(conv) + c + 1u);

    for (u32 i0 = 0; i0 < live; i0 += BATCH) {
        u32 n[BATCH][4];
        float2 v[BATCH], s[BATCH];
#pragma unroll
        for (u32 b = 0; b < BATCH; b++) {
            u32 i = i0 + b;
            if (i >= live) continue;
            u64 row = first + i;
            const u16* tail = reinterpret_cast<const u16*>(shared.tail[i]);
            u32 place = shared.place[i];
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u32 back = REACH - 3u * j;
                const u16* from = place >= back ? conv_in + (row - back) * width
                                                : tail + (u64)(place + 3u * j) * width;
                n[b][j] = fn_ldg(reinterpret_cast<const u32*>(from + c));
            }
            v[b] = fn_ldg(reinterpret_cast<const float2*>(value + row * hidden + channel));
            s[b] = fn_ld(reinterpret_cast<const float2*>(streams + row * width + c));
        }
#pragma unroll
        for (u32 b = 0; b < BATCH; b++) {
            u32 i = i0 + b;
            if (i >= live) continue;
            float gate = shared.g[i][stream], y0 = fn_mul(gate, v[b].x), y1 = fn_mul(gate, v[b].y);
            float c0 = fn_ple_conv(w0, n[b][0], n[b][1], n[b][2], n[b][3]);
            float c1 = fn_ple_conv(w1, n[b][0] >> 16, n[b][1] >> 16, n[b][2] >> 16, n[b][3] >> 16);
            *reinterpret_cast<float2*>(streams + ((u64)first + i) * width + c) =
                make_float2(fn_add(s[b].x, fn_add(y0, c0)), fn_add(s[b].y, fn_add(y1, c1)));
        }
    }
}
