// advance_rows: makes the round of the next token out of a round whose rows have drawn.
// Contract    round, rows (rows_cap), runs (rows_cap): one row a run, row r of run r, round.n_rows <= 32 of
//             them; tokens, status (rows_cap) u32 of draw_rows; aheads FnAhead (slots); ring FnDrawn (slots,
//             ring_steps), may be mapped host memory.  Of each row r < n_rows with emit bit 1 and left > 0 of
//             its slot: ring[slot, drawn] = token and status where drawn < ring_steps; drawn goes up, left goes
//             down by one.  The row goes on when then left > 0, drawn < ring_steps, status 0 and the token is
//             none of the slot's stops.  Rows that go on move to the front, in their order, as rows and runs of
//             the token after: token, position + 1, prev1 = the token before, prev2 = prev1 before, run and
//             i_out the new row.  round.n_rows = n_runs = how many they are; 0: later rounds do nothing.
// Launch      grid (1), block 32.  A thread a row.
// Arithmetic  integers.
// Equality    exact.  A row's bytes do not depend on where it stands, so moving it changes no token.
// Reference   ref/ahead.py advance_rows.
#include "warp.cuh"
#include "ahead.cuh"

namespace FN_NAMESPACE {
FN_DEVICE bool stops_at(const FnAhead* ahead, u32 token) {
    u32 n = fn_min_u32(fn_ld(&ahead->n_stops), FN_MOST_STOPS);
    bool found = false;
    for (u32 i = 0; i < n; i++) found |= fn_ld(&ahead->stops[i]) == token;
    return found;
}
}  // namespace FN_NAMESPACE

FN_KERNEL((FnRound* round, FnRow* rows, FnRun* runs, FnAhead* aheads, const u32* tokens, const u32* status,
           FnDrawn* ring, u32 ring_steps)) {
    using namespace FN_NAMESPACE;
    fn_let_next();
    fn_wait_prior();
    u32 r = threadIdx.x;
    FnRow row = {};
    u32 token = 0;
    bool goes_on = false;
    if (r < fn_ld(&round->n_rows)) {
        row = rows[r];
        FnAhead* ahead = aheads + row.slot;
        u32 left = fn_ld(&ahead->left), drawn = fn_ld(&ahead->drawn);
        if ((row.emit & 2u) && left > 0) {
            token = fn_ld(tokens + r);
            u32 bad = fn_ld(status + r);
            if (drawn < ring_steps) ring[(u64)row.slot * ring_steps + drawn] = FnDrawn{token, bad};
            ahead->drawn = drawn + 1u;
            ahead->left = left - 1u;
            goes_on = left > 1u && drawn + 1u < ring_steps && bad == 0 && !stops_at(ahead, token);
        }
    }
    u32 on = fn_ballot(goes_on);
    __syncthreads();  // every row is read
    if (goes_on) {
        u32 to = fn_popc(on & ((1u << r) - 1u));
        rows[to] = FnRow{row.slot, to, token, row.position + 1u, row.token, row.prev1, row.emit, to};
        runs[to] = FnRun{row.slot, to, 1u, row.position + 1u};
    }
    if (r == 0) round->n_rows = round->n_runs = fn_popc(on);
}
