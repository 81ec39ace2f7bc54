// moe_plan_place: the sorted position of every (row, slot), and what stands at each position.
// Contract    routes FnRoute (rows_cap, n_slots), an expert at most once a row; starts u32 (rows_cap /
//             128, n_experts + 1) of moe_plan_scan -> pair_at u32 (rows_cap, n_slots): sorted position;
//             pair_of u32 (pairs_cap): position -> row * n_slots + slot.  An expert's rows lie in rising
//             order. Positions that pad an expert's last 64, and rows >= round.n_rows, are not touched.
// Launch      grid (rows_cap / 128), block 128, shared PlaceShared: a bit a row for each expert, so a
//             row's rank is the number of bits below its own.
// Arithmetic  integers; the order in which bits are set does not matter.
// Equality    exact.
// Reference   ref/moe_deep.py plan.
#include "prelude.cuh"
#include "tables.cuh"

namespace FN_NAMESPACE {
const u32 MOST = 1025, ROWS = 128;

struct PlaceShared {
    u32 rows[MOST][ROWS / 32u];
};
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRoute* routes, const u32* starts, u32* pair_at, u32* pair_of,
           u32 n_slots, u32 n_experts)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(PlaceShared, s);
    u32 first = ROWS * blockIdx.x, n_rows = fn_ld(&round->n_rows);
    if (first >= n_rows) return;
    u32* words = &s.rows[0][0];
    for (u32 i = threadIdx.x; i < (n_experts + 1u) * (ROWS / 32u); i += FN_THREADS) words[i] = 0;
    __syncthreads();
    u32 n = fn_min_u32(n_rows - first, ROWS) * n_slots, at = first * n_slots;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < n; i += FN_THREADS) {
        u32 row = i / n_slots;
        fn_atomic_or_u32(&s.rows[fn_ldg(routes + at + i).expert][row >> 5], 1u << (row & 31u));
    }
    __syncthreads();
    starts += (u64)blockIdx.x * (n_experts + 1u);
#pragma unroll 4
    for (u32 i = threadIdx.x; i < n; i += FN_THREADS) {
        u32 row = i / n_slots, expert = fn_ldg(routes + at + i).expert;
        u32 position = fn_ldg(starts + expert);
        for (u32 w = 0; w < row >> 5; w++) position += fn_popc(s.rows[expert][w]);
        position += fn_popc(s.rows[expert][row >> 5] & ((1u << (row & 31u)) - 1u));
        pair_at[at + i] = position;
        pair_of[position] = at + i;
    }
}
