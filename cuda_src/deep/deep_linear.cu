// deep_linear: finished outputs of several linears, each of any format, for all rows of a prompt chunk.
// Contract    linears: x tile images (tiled), w, svh, bias -> linears[j].out (rows, n) f32, rows < n_rows and outputs
//             < n only.  EXL3: k, n % 128 == 0; plain: k % 16 == 0, any n >= 1.  n_warps = ceil(n / 128) tiles;
//             first_warp counts tiles of the linears before.
// Launch      grid (total tiles x ceil(rows / 128)), block 384, shared DeepLinearShared.  A block: 128 outputs of up to
//             128 rows; the blocks of the same rows are neighbours.  (One block an SM that strides over tiles was
//             slower: around a loop ptxas spills what the dots want.)
// Arithmetic  orders exl3_dot_v1, plain_dot_v1, part_sum_v1 and hadamard: deep.cuh, then fn_hadamard128, fn_mul(.,
//             svh), fn_add(., f32(bias)).
// Equality    the bytes of linear_gemv and linear_finish; a row's bytes do not depend on the other rows.
// Reference   ref/exl3.py decode_linear, ref/orders.py mma_chain, tree and hadamard128.
#include "deep.cuh"

namespace FN_NAMESPACE {

struct DeepLinearShared {
    FnDeepShared<4, 16384> deep;
};

// Finish the tile's rows: a warp a row, lane l holding outputs 4 l .. 4 l + 3.
FN_DEVICE void finish(const DeepLinearShared& s, const FnLinear& linear, u32 tile, u32 row0, u32 live) {
    u32 thread = fn_thread_here(), lane = thread & 31u, n = linear.n, at = 128u * tile + 4u * lane;
    if (thread >= 32u * FN_DEEP_WARPS) return;
    bool exl3 = fn_is_exl3(linear.w);
    float scale[4] = {1.f, 1.f, 1.f, 1.f}, bias[4] = {0.f, 0.f, 0.f, 0.f};
    if (exl3) fn_load_h4(reinterpret_cast<const u16*>(linear.w.svh) + at, scale);
    if (exl3 && linear.bias) fn_load_h4(reinterpret_cast<const u16*>(linear.bias) + at, bias);
    float* out = reinterpret_cast<float*>(linear.out) + (u64)row0 * n + at;
#pragma unroll 4
    for (u32 row = thread >> 5; row < live; row += FN_DEEP_WARPS) {
        float4 x = *reinterpret_cast<const float4*>(&s.deep.tile[row][4u * lane]);
        float v[4] = {x.x, x.y, x.z, x.w};
        if (exl3) {  // as fn_linear_finish_block
            fn_hadamard128(v);
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = fn_mul(v[i], scale[i]);
            if (linear.bias) {
#pragma unroll
                for (int i = 0; i < 4; i++) v[i] = fn_add(v[i], bias[i]);
            }
        }
        float* to = out + (u64)row * n;
        if ((n & 3u) == 0) {
            if (at < n) *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
        } else {
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                if (at + i < n) to[i] = v[i];
        }
    }
}

// The i-th tile of the launch.
struct Tile {
    const FnLinear* linear;
    u32 tile, row0, live;

    FN_DEVICE Tile(u32 i, u32 n_tiles, u32 n_rows, const FnLinear* linears, u32 n_linears) {
        u32 of_rows = i / n_tiles, j = 0;
        tile = i - of_rows * n_tiles;
        row0 = FN_DEEP_ROWS * of_rows;
        live = fn_min_u32(n_rows - row0, FN_DEEP_ROWS);
        for (u32 l = 1; l < n_linears; l++)
            if (linears[l].first_warp <= tile) j = l;
        linear = linears + j;
        tile -= linear->first_warp;
    }
    FN_DEVICE FnDeepWeights weights() const {
        return {linear->w, linear->k, linear->n, 8u * tile, 2u, (linear->n + 15u) / 16u, linear->leaves,
                linear->segments};
    }
    FN_DEVICE FnDeepRows rows() const {
        u32 k_blocks = (linear->k + 63u) / 64u;
        return {reinterpret_cast<const u16*>(linear->x) + (u64)row0 * k_blocks * 64u, k_blocks, live};
    }
};

template <u32 ROW_TILES>
FN_DEVICE void run(FnDeep<FnDeepShared<4, 16384>>& deep, DeepLinearShared& s, const Tile& t) {
    float sum[ROW_TILES][4];
    deep.dot(t.weights(), t.rows(), sum);
    deep.spill(sum);
    finish(s, *t.linear, t.tile, t.row0, t.live);
}

}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnLinear* linears, u32 n_linears)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(DeepLinearShared, s);
    u32 n_rows = fn_ld(&round->n_rows), n_tiles = linears[n_linears - 1u].first_warp + linears[n_linears - 1u].n_warps;
    u32 total = n_tiles * ((n_rows + FN_DEEP_ROWS - 1u) / FN_DEEP_ROWS);
    if (blockIdx.x >= total) return;
    Tile t(blockIdx.x, n_tiles, n_rows, linears, n_linears);
    FnDeep<FnDeepShared<4, 16384>> deep(s.deep);
    if (deep.loads()) {
        deep.begin_loads();
        deep.load(t.live, t.weights(), t.rows());
        return;
    }
    deep.begin_dots();
    if (t.live <= 64u)
        run<8>(deep, s, t);
    else
        run<16>(deep, s, t);
}
