// moe_plan_count: how many of each block of 128 rows go to each expert.
// Contract    routes FnRoute (rows_cap, n_slots), an expert at most once a row, n_experts the shared
//             one's id -> counts u32 (rows_cap / 128, n_experts + 1), all of them written: blocks without
//             rows give zeros.  rows_cap % 128 == 0, n_experts <= 1024.  Routes of rows >= round.n_rows
//             are not read.
// Launch      grid (rows_cap / 128), block 128, shared CountShared.
// Arithmetic  integers; the order in which they are counted does not matter.
// Equality    exact.
// Reference   ref/moe_deep.py plan.
#include "prelude.cuh"
#include "tables.cuh"

namespace FN_NAMESPACE {
const u32 MOST = 1025, ROWS = 128;

struct alignas(16) CountShared {
    u32 n[MOST];
};
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRoute* routes, u32* counts, u32 n_slots, u32 n_experts)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(CountShared, s);
    u32 first = ROWS * blockIdx.x, n_rows = fn_ld(&round->n_rows);
    for (u32 e = threadIdx.x; e <= n_experts; e += FN_THREADS) s.n[e] = 0;
    __syncthreads();
    u32 live = first < n_rows ? fn_min_u32(n_rows - first, ROWS) : 0u;
    const FnRoute* mine = routes + (u64)first * n_slots;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < live * n_slots; i += FN_THREADS)
        fn_atomic_add_u32(&s.n[fn_ldg(mine + i).expert], 1u);
    __syncthreads();
    counts += (u64)blockIdx.x * (n_experts + 1u);
    for (u32 e = threadIdx.x; e <= n_experts; e += FN_THREADS) counts[e] = s.n[e];
}
