// gemv_slot.cuh: one warp of one expert's dot with the rows that chose it; used by moe_gemv_gu and moe_gemv_down.
#pragma once
#include "gemv.cuh"

// The dots of a launch: of row r, slot s and projection p the (r n_slots + s) parts + p-th.
struct FnSlotDots {
    const FnRoute* routes;
    u32 n_rows, n_slots, parts, p;
};

const u32 FN_NO_SLOT = 0xffffffffu;

// The slot in which the lane's row (of those eight that `row` stands among, row 8 m + lane / 4) has `expert`, or
// FN_NO_SLOT.  A row has an expert once at most.  Called by whole warps.
FN_DEVICE u32 fn_slot_with(const FnSlotDots& dots, u32 expert, u32 row, u32 slot) {
    u32 lane = threadIdx.x & 31u, mine = (row & ~7u) + (lane >> 2), found = FN_NO_SLOT;
    if (dots.n_rows == 1u) return mine == row ? slot : FN_NO_SLOT;
    if (mine < dots.n_rows) {
        const FnRoute* routes = dots.routes + mine * dots.n_slots;
        for (u32 s = lane & 3u; s < dots.n_slots; s += 4u)
            if (fn_ld(&routes[s].expert) == expert) found = s;
    }
    found = fn_min_u32(found, fn_shfl_xor(found, 1u));
    return fn_min_u32(found, fn_shfl_xor(found, 2u));
}

// data, format: EXL3 weights of n outputs, k inputs of the expert that `row` has in `slot`.  x: operand of dot 0,
// x_stride halves further that of dot 1; part: output 0 of dot 0's unit 0, part_stride floats further dot 1's,
// unit_stride: floats between units.  The warp's place inside the dot comes from blockIdx.x; warps beyond it
// return.  Weights are decoded once for all of a row's eight that chose the expert: the first of them does it, and
// the warps of the others return.
FN_DEVICE void fn_slot_dot(const FnSlotDots& dots, u32 expert, u32 row, u32 slot, u64 data, u32 format, u32 k, u32 n,
                           const u16* x, u32 x_stride, float* part, u32 part_stride, u64 unit_stride) {
    static_assert(FN_THREADS == FN_GEMV_THREADS, "a block is a pair of tiles");
    FnPlace place;
    u32 lane = threadIdx.x & 31u;
    u32 n_pairs = n / 32u, units = fn_dot_segments(k, n, 1), unit = place.pair / n_pairs;
    u32 mine = fn_slot_with(dots, expert, row, slot), has = fn_ballot(mine != FN_NO_SLOT);
    bool first = (has & ((1u << (4u * (row & 7u))) - 1u)) == 0;
    if ((unit >= units) | !first | (data == 0) | (format == 0xffffffffu)) return;  // one branch: loads at once
    u32 tile = 2u * (place.pair - unit * n_pairs) + place.half, k0, k1;
    fn_unit_range(k, units, unit, k0, k1);
    FnRows<1> rows;  // row g of the mma is row g of the eight where it has the expert, else this one
    u32 from = mine != FN_NO_SLOT ? ((row & ~7u) + (lane >> 2)) * dots.n_slots + mine : row * dots.n_slots + slot;
    rows.at[0] = x + (u64)(from * dots.parts + dots.p) * x_stride;
    float d[1][4];
    fn_weight_dot<1, false>(data, format, k, n, tile, k0, k1, rows, d);
    fn_let_next();  // not before: blocks of the next launch would take places among these
    part += unit * unit_stride + 16u * tile + (lane >> 2);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 column = 2u * (lane & 3u) + i, to = fn_shfl(mine, 4u * column);
        if (to == FN_NO_SLOT) continue;
        u64 at = (u64)((((row & ~7u) + column) * dots.n_slots + to) * dots.parts + dots.p) * part_stride;
        part[at] = d[0][i];
        part[at + 8u] = d[0][2u + i];
    }
}
