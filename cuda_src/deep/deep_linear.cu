// deep_linear: finished outputs of several linears, each of any format, for all rows of a prompt chunk.
// Contract    linears: x tile images (tiled), w, svh, bias -> linears[j].out (rows, n) f32, rows < n_rows and outputs
//             < n only.  EXL3: k, n % 128 == 0; plain: k % 16 == 0, any n >= 1.  n_warps = ceil(n / 128) tiles;
//             first_warp counts tiles of the linears before.
// Launch      grid (1 .. total tiles x ceil(rows / 128)), block 384, shared DeepLinearShared.  A block strides over
//             tiles of 128 outputs and up to 256 rows, those of the same rows one behind the other: while it finishes
//             one the weights and rows of the next are on their way.
// Arithmetic  orders exl3_dot_v1, plain_dot_v1, part_sum_v1 and hadamard: deep.cuh, then fn_hadamard128, fn_mul(.,
//             svh), fn_add(., f32(bias)).
// Equality    the bytes of linear_gemv and linear_finish; a row's bytes do not depend on the other rows.
// Reference   ref/exl3.py decode_linear, ref/orders.py mma_chain, tree and hadamard128.
#include "deep.cuh"

namespace FN_NAMESPACE {

struct DeepLinearShared {
    FnDeepShared deep;
};
typedef FnDeep<> Deep;

struct Tiles {
    const FnLinear* linears;
    u32 n_linears, n_rows, n_tiles;  // tiles of the same rows
    u32 of_tile;                     // rows of a tile: 128 where no linear gains by more
    const FnLinear* linear;
    u32 tile, row0;

    enum : u32 { PRODUCTS = 1 };
    FN_DEVICE u32 count() const { return n_tiles * ((n_rows + of_tile - 1u) / of_tile); }
    FN_DEVICE bool take(u32 i) {
        u32 of_rows = i / n_tiles, j = 0;
        tile = i - of_rows * n_tiles;
        row0 = of_tile * of_rows;
        u32 first[8];
#pragma unroll
        for (u32 l = 1; l < 8; l++) first[l] = l < n_linears ? linears[l].first_warp : 0xffffffffu;  // all at once
#pragma unroll
        for (u32 l = 1; l < 8; l++)
            if (first[l] <= tile) j = l;
#pragma unroll 1
        for (u32 l = 8; l < n_linears; l++)
            if (linears[l].first_warp <= tile) j = l;
        linear = linears + j;
        tile -= linear->first_warp;
        return true;
    }
    FN_DEVICE FnDeepWeights weights(u32) const {
        return {linear->w, linear->k, linear->n, 8u * tile, 2u, (linear->n + 15u) / 16u, linear->leaves,
                linear->segments};
    }
    FN_DEVICE FnDeepRows rows(u32) const {
        u32 k_blocks = (linear->k + 63u) / 64u;
        return {reinterpret_cast<const u16*>(linear->x) + (u64)row0 * k_blocks * 64u, k_blocks,
                fn_min_u32(n_rows - row0, of_tile)};
    }
    FN_DEVICE void begin(const Deep& deep, u32, u32) const {
        if (fn_is_exl3(linear->w)) deep.bring(0, reinterpret_cast<const u16*>(linear->w.svh) + 128u * tile);
    }
    FN_DEVICE void finish(const Deep& deep, u32, u32 first, u32 n_of_part) const {
        u32 n = linear->n, at = 128u * tile, end = first + n_of_part, lane = fn_thread_here() & 31u;
        float* out = reinterpret_cast<float*>(linear->out) + (u64)row0 * n + at;
        if (fn_is_exl3(linear->w)) {
            const u16* bias = linear->bias ? reinterpret_cast<const u16*>(linear->bias) + at : nullptr;
            deep.store_rotated(first, n_of_part, bias, out, n);
            return;
        }
        for (u32 row = first + (fn_thread_here() >> 5); row < end; row += FN_DEEP_WARPS)
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                if (at + lane + 32u * i < n) out[(u64)row * n + lane + 32u * i] = deep.output(row, lane + 32u * i);
    }
};

}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnLinear* linears, u32 n_linears)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(DeepLinearShared, s);
    u32 n_tiles = linears[n_linears - 1u].first_warp + linears[n_linears - 1u].n_warps;
    u32 of_tile = 128;
    for (u32 j = 0; j < n_linears; j++)
        if (fn_is_exl3(linears[j].w) && (linears[j].leaves == 1u || linears[j].segments == 1u)) of_tile = FN_DEEP_ROWS;
    Tiles tiles = {linears, n_linears, fn_ld(&round->n_rows), n_tiles, of_tile};
    if (blockIdx.x >= tiles.count()) return;
    Deep(s.deep).run(tiles);
}
