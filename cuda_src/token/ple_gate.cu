// ple_gate: the n-gram mixer's gate of every row and stream, and what its convolution takes of them.
// Contract    key (rows_cap, 4 hidden), value (rows_cap, hidden), streams (rows_cap, 4 hidden) f32; norm_key,
//             norm_query, norm_conv (4 hidden) f32 -> g (rows_cap, 4) f32, conv_in (rows_cap, 4 hidden) f16
//             in natural order.  hidden % 2 == 0.  Rows >= round.n_rows are not touched.
// Launch      grid (4 streams, rows_cap), block 256, shared 128 B (PleShared).  One stream of one row a
//             block; any number of rows.  What a thread needs of its first KEEP pairs of channels is asked
//             for at once, and the value stays in registers.
// Arithmetic  order ple_v1, steps 1 to 4 and the conv input of step 5 (ple.cuh).
// Equality    with ple_conv and ple_tail the bytes of ple_mix.  A row's bytes do not depend on other
//             rows.  NaN and Inf reach g and conv_in of their stream; in the value, of all four.
// Reference   ref/token.py Ple.  Source: config.json rms_norm_eps.
#include "token/ple.cuh"
#include "tables.cuh"

namespace FN_NAMESPACE {
static_assert(FN_THREADS == 256, "ple_v1 is an order of 256 threads");
const u32 KEEP = 5;  // pairs of channels a thread holds: hidden up to 2560; beyond, the value is read again

struct PleShared { float part[4][8]; };

FN_DEVICE float2 pair_at(const float* p, u32 i) { return fn_ldg(reinterpret_cast<const float2*>(p + i)); }

FN_DEVICE void add_pair(float (&sum)[4], float2 k, float2 s, float2 v, float2 wk, float2 wq) {
    fn_ple_add(sum, k.x, s.x, v.x, wk.x, wq.x);
    fn_ple_add(sum, k.y, s.y, v.y, wk.y, wq.y);
}

FN_DEVICE void store_pair(u16* to, float2 v, float g, float ry, float2 wc) {
    *reinterpret_cast<u32*>(to) =
        fn_pack_h2(fn_ple_input(fn_mul(g, v.x), ry, wc.x), fn_ple_input(fn_mul(g, v.y), ry, wc.y));
}
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const float* key, const float* value, const float* streams,
           const float* norm_key, const float* norm_query, const float* norm_conv, u16* conv_in, float* g,
           u32 hidden, float eps)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(PleShared, shared);
    u32 stream = blockIdx.x, row = blockIdx.y, first = 2u * threadIdx.x;
    if (row >= fn_ld(&round->n_rows)) return;
    u64 base = ((u64)row * 4u + stream) * hidden, weights = (u64)stream * hidden;
    const float *k = key + base, *s = streams + base, *v = value + (u64)row * hidden;
    const float *wk = norm_key + weights, *wq = norm_query + weights, *wc = norm_conv + weights;

    float sum[4] = {0.f, 0.f, 0.f, 0.f};
    float2 k2[KEEP], s2[KEEP], v2[KEEP];
#pragma unroll
    for (u32 c = 0; c < KEEP; c++) {
        u32 i = first + 512u * c;
        if (i < hidden) k2[c] = pair_at(k, i), s2[c] = pair_at(s, i), v2[c] = pair_at(v, i);
    }
#pragma unroll
    for (u32 c = 0; c < KEEP; c++) {
        u32 i = first + 512u * c;
        if (i < hidden) add_pair(sum, k2[c], s2[c], v2[c], pair_at(wk, i), pair_at(wq, i));
    }
    for (u32 i = first + 512u * KEEP; i < hidden; i += 512u)
        add_pair(sum, pair_at(k, i), pair_at(s, i), pair_at(v, i), pair_at(wk, i), pair_at(wq, i));
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        float w = fn_warp_sum(sum[j]);
        if ((threadIdx.x & 31u) == 0) shared.part[j][threadIdx.x >> 5] = w;
    }
    __syncthreads();
    float gate, ry;
    fn_ple_scales(shared.part, hidden, eps, gate, ry);
    if (threadIdx.x == 0) g[(u64)row * 4u + stream] = gate;
    u16* to = conv_in + base;
#pragma unroll
    for (u32 c = 0; c < KEEP; c++) {
        u32 i = first + 512u * c;
        if (i < hidden) store_pair(to + i, v2[c], gate, ry, pair_at(wc, i));
    }
    for (u32 i = first + 512u * KEEP; i < hidden; i += 512u)
        store_pair(to + i, pair_at(v, i), gate, ry, pair_at(wc, i));
}
