// moe_deep_gu: gate and up of a tile's rows, the activation, and the operand of the down projection.
// Contract    tiles FnTile, n_tiles of the plan; lines FnLine[] (EXL3, each projection its own form); x
//             f16, two tile images of (pairs_cap, hidden): gate, up -> h f16, tile image of (pairs_cap,
//             width_cap): channels below line.width of the tiles' rows.  hidden, line.width, width_cap,
//             pairs_cap % 128 == 0.  Other positions are not written; of x they are read at most up to
//             the next multiple of 64 and meet nothing.  gate f32 (pairs_cap, the larger of hidden and
//             width_cap): scratch, the finished gates at the positions of h.  The pitch is such that gates may lie
//             where the down projection puts its outputs: each in the row of its own position.
// Launch      grid (1 .. n_tiles * width_cap / 128), block 384, shared DeepGuShared: a block strides over pieces of
//             128 channels of a tile, those of one tile one behind the other.
// Arithmetic  order exl3_dot_v1, one leaf, fn_dot_segments(hidden, line.width, 1, FN_GU_SEGMENT_LOG2)
//             segments;  gate, up:
//             part_sum_v1, Hadamard, * svh;  h = silu(gate) * up;  operand of down: h * suh, Hadamard,
//             f16 once.
// Equality    the bytes of moe_gemv_gu and moe_act.  A row's bytes do not depend on the others of its
//             tile.
// Reference   ref/moe.py swiglu, ref/orders.py mma_chain.
#include "deep.cuh"

namespace FN_NAMESPACE {

struct DeepGuShared {
    FnDeepShared deep;
};
typedef FnDeep<FN_DEEP_EXL3> Deep;

struct Tiles {
    const FnTile* tiles;
    const FnLine* lines;
    const u16 *x, *x_up;
    u16* h;
    float* gate;
    u32 n_tiles, hidden, width_cap, gate_pitch;
    // the present piece: 128 channels from `channel` on, rows first .. first + live - 1 of the sorted order
    const FnLine* line;
    u32 channel, first, live;

    enum : u32 { PRODUCTS = 2 };  // gate, up
    FN_DEVICE u32 count() const { return n_tiles * (width_cap / 128u); }
    FN_DEVICE bool take(u32 i) {  // on lines that are narrower there is nothing to do
        u32 per_tile = width_cap / 128u, i_tile = i / per_tile;
        FnTile tile = fn_ldg(tiles + i_tile);
        line = lines + tile.expert;
        channel = 128u * (i - i_tile * per_tile);
        first = tile.first;
        live = tile.n_rows;
        return channel < line->width;
    }
    FN_DEVICE FnDeepWeights weights(u32 up) const {
        u32 width = line->width, segments = fn_dot_segments(hidden, width, 1, FN_GU_SEGMENT_LOG2);
        return {up ? line->up : line->gate, hidden, width, channel / 16u, 2u, width / 16u, 1u, segments};
    }
    FN_DEVICE FnDeepRows rows(u32 up) const {
        return {(up ? x_up : x) + (u64)first * hidden, hidden / 64u, live};
    }
    FN_DEVICE void begin(const Deep& deep, u32 up, u32) const {
        deep.bring(0, reinterpret_cast<const u16*>(up ? line->up.svh : line->gate.svh) + channel);
        if (up) deep.bring(1, reinterpret_cast<const u16*>(line->down.suh) + channel);
    }
    FN_DEVICE void finish(const Deep& deep, u32 up, u32 from, u32 n) const {
        float* gates = gate + (u64)first * gate_pitch + channel;
        if (up)
            activate(deep, from, n, gates);
        else
            deep.store_rotated(from, n, nullptr, gates, gate_pitch);
    }
    // A lane reads the gates that it stored, four rows ahead of their use.
    FN_DEVICE void activate(const Deep& deep, u32 from, u32 n, const float* gates) const {
        u32 lane = fn_thread_here() & 31u, end = from + n, k_blocks = width_cap / 64u;
        float up_out[4], down_in[4];
        deep.scale(0, up_out);
        deep.scale(1, down_in);
        u32 own = deep.own_row(from), stop = fn_min_u32(own + 16u, end);
        if (own >= end) return;
        float4 g[4];
        load_gates(gates, own, stop, g);
        deep.rotate(own);
#pragma unroll 1
        for (u32 row = own; row < stop; row += 4u) {
            float4 ahead[4];
            load_gates(gates, row + 4u, stop, ahead);
#pragma unroll
            for (u32 r = 0; r < 4; r++) {
                if (row + r >= stop) break;
                float4 up = deep.quad(row + r);
                float v[4] = {up.x, up.y, up.z, up.w}, gs[4] = {g[r].x, g[r].y, g[r].z, g[r].w};
#pragma unroll
                for (u32 i = 0; i < 4; i++) {  // as moe_act
                    float product = fn_mul(fn_silu(gs[i]), fn_mul(v[i], up_out[i]));
                    v[i] = fn_mul(product, down_in[i]);
                }
                deep.quad(row + r) = make_float4(v[0], v[1], v[2], v[3]);
            }
#pragma unroll
            for (u32 r = 0; r < 4; r++) g[r] = ahead[r];
        }
        __syncwarp();
        deep.rotate(own);
#pragma unroll 8
        for (u32 row = own; row < stop; row++) {
            float4 q = deep.quad(row);
            float v[4] = {q.x, q.y, q.z, q.w};
            fn_store_tile4(h, k_blocks, first + row, channel + 4u * lane, v);
        }
    }
    // Of rows row .. row + 3; beyond `stop` of the last row again.
    FN_DEVICE void load_gates(const float* gates, u32 row, u32 stop, float4 (&g)[4]) const {
#pragma unroll
        for (u32 r = 0; r < 4; r++) {
            const float* from = gates + (u64)fn_min_u32(row + r, stop - 1u) * gate_pitch;
            g[r] = fn_ld(reinterpret_cast<const float4*>(from) + (fn_thread_here() & 31u));
        }
    }
};
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnTile* tiles, const u32* n_tiles, const FnLine* lines, const u16* x,
           u16* h, float* gate, u32 hidden, u32 width_cap, u32 pairs_cap)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(DeepGuShared, s);
    if (fn_ld(&round->n_rows) == 0) return;
    Tiles all = {tiles, lines, x, x + (u64)pairs_cap * hidden, h, gate, fn_ld(n_tiles), hidden, width_cap,
                 fn_max_u32(hidden, width_cap)};
    if (blockIdx.x >= all.count()) return;
    Deep(s.deep).run(all);
}
