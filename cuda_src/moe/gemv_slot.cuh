// gemv_slot.cuh: one warp of one expert's dot with the rows that chose it; used by moe_gemv_gu and moe_gemv_down.
#pragma once
#include "gemv.cuh"

// The dots of a launch: of row r, slot s and projection p the (r n_slots + s) parts + p-th.  segment_log2: of the
// fewest inputs of a segment.
struct FnSlotDots {
    const FnRoute* routes;
    u32 n_rows, n_slots, parts, p, segment_log2;
};

const u32 FN_NO_SLOT = 0xffffffffu;

// The slot in which the lane's row (of those eight that `row` stands among, row 8 m + lane / 4) has `expert`, or
// FN_NO_SLOT.  A row has an expert once at most.  Called by whole warps.
FN_DEVICE u32 fn_slot_with(const FnSlotDots& dots, u32 expert, u32 row, u32 slot) {
    u32 lane = threadIdx.x & 31u, mine = (row & ~7u) + (lane >> 2), found = FN_NO_SLOT;
    if (dots.n_rows == 1u) return mine == row ? slot : FN_NO_SLOT;
    if (mine < dots.n_rows) {
        u32 s = lane & 3u;
        const FnRoute* routes = dots.routes + (mine * dots.n_slots + s);
        u32 there[3];  // of the published 11, asked for at once
#pragma unroll
        for (u32 i = 0; i < 3; i++) there[i] = s + 4u * i < dots.n_slots ? fn_ld(&routes[4u * i].expert) : FN_NO_SLOT;
#pragma unroll
        for (u32 i = 0; i < 3; i++)
            if (there[i] == expert) found = s + 4u * i;
#pragma unroll 1
        for (u32 i = 12; s + i < dots.n_slots; i += 4u)
            if (fn_ld(&routes[i].expert) == expert) found = s + i;
    }
    found = fn_min_u32(found, fn_shfl_xor(found, 1u));
    return fn_min_u32(found, fn_shfl_xor(found, 2u));
}

// One dot's units of 32 outputs, units of the same outputs one behind the other, of which a block takes an equal share.
struct FnSlotUnits {
    u64 data;
    u32 k, n, units_log2, first, end;  // log2 of the units of an output; the block's own of the dot
    const u16* x;
    float* part;
    u32 at[2];  // in part, where sums of the lane's two rows go for output 0 of the warp's tile, unit 0, or FN_NO_SLOT
    u32 unit_stride, to;  // from `at` to the next unit's place
    bool waits;

    template <class Weights> FN_DEVICE void run() {
        FnPlace place;
        u32 size = k >> units_log2, lane = threadIdx.x & 31u, together = fn_min_u32(end - first, 1u << units_log2);
#pragma unroll 1
        for (u32 i = first; i < end; i += together) {
            u32 pair = i >> units_log2, unit = i - (pair << units_log2);
            to = unit * unit_stride + 32u * pair;
            fn_weight_dot<Weights, 1>(data, k, n, 2u * pair + place.half, unit * size, size, together, lane, *this);
        }
    }
    FN_DEVICE bool begin(FnRows<1>& rows) {
        if (waits) fn_wait_prior();
        waits = false;
        rows.at[0] = x;
        return true;
    }
    FN_DEVICE void store(const float (&d)[1][4]) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            if (at[i] == FN_NO_SLOT) continue;
            part[at[i] + to] = d[0][i];
            part[at[i] + to + 8u] = d[0][2u + i];
        }
        to += unit_stride;
    }
};

// data, format: EXL3 weights of n outputs, k inputs of the expert that `row` has in `slot`.  x: operand of dot 0,
// x_stride halves further that of dot 1; part: output 0 of dot 0's unit 0, part_stride floats further dot 1's,
// unit_stride: floats between units.  Weights are decoded once for all of a row's eight that chose the expert: the
// first of them does it, and the blocks of the others return.  The operand alone is read behind fn_wait_prior.
FN_DEVICE void fn_slot_dot(const FnSlotDots& dots, u32 expert, u32 row, u32 slot, u64 data, u32 format, u32 k, u32 n,
                           const u16* x, u32 x_stride, float* part, u32 part_stride, u32 unit_stride) {
    static_assert(FN_THREADS == FN_GEMV_THREADS, "a block is a pair of tiles");
    FnPlace place;
    u32 lane = threadIdx.x & 31u, units_log2 = fn_dot_segments_log2(k, n, dots.segment_log2);
    u32 n_units = n / 32u << units_log2;
    u32 taken = fn_units_log2(n_units, gridDim.x), first_unit = place.pair << taken;
    u32 mine = fn_slot_with(dots, expert, row, slot), has = fn_ballot(mine != FN_NO_SLOT);
    bool first = (has & ((1u << (4u * (row & 7u))) - 1u)) == 0;
    if ((first_unit >= n_units) | !first | (data == 0) | (format == 0xffffffffu)) {  // one branch: loads at once
        fn_wait_prior();
        return;
    }
    // Row g of the mma is row g of the eight where it has the expert, else this one.
    u32 from = mine != FN_NO_SLOT ? ((row & ~7u) + (lane >> 2)) * dots.n_slots + mine : row * dots.n_slots + slot;
    x += (u64)(from * dots.parts + dots.p) * x_stride;
    u32 end = fn_min_u32(first_unit + (1u << taken), n_units);
    FnSlotUnits units{data, k, n, units_log2, first_unit, end, x, part, {}, unit_stride, 0, true};
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 column = 2u * (lane & 3u) + i, theirs = fn_shfl(mine, 4u * column);
        u32 dot = (((row & ~7u) + column) * dots.n_slots + theirs) * dots.parts + dots.p;
        units.at[i] = theirs == FN_NO_SLOT ? FN_NO_SLOT : dot * part_stride + 16u * place.half + (lane >> 2);
    }
    fn_with_weights<false, 4u>(format, units);
}
