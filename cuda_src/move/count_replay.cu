// count_replay: counts a graph's replays and the rows that were live in them.
// Contract    counts u64[2]: counts[0] goes up by one, counts[1] by round.n_rows.
// Launch      grid (1), block 32.
// Arithmetic  integers that wrap.
// Equality    exact, also when two launches run at a time.
// Reference   ref/ahead.py count_replay.
#include "prelude.cuh"
#include "tables.cuh"

FN_KERNEL((const FnRound* round, u64* counts)) {
    fn_let_next();
    fn_wait_prior();
    if (threadIdx.x == 0) {
        fn_atomic_add_u64(counts, 1u);
        fn_atomic_add_u64(counts + 1, fn_ld(&round->n_rows));
    }
}
