// edit_logits: edits the logits that rows draw from, or puts the raw ones back after the draw.
// Contract    round, rows (rows_cap); edits: per slot FnEdits, then FnEdit[cap]; logits (rows_cap, vocab) f32,
//             ids below vocab.  Of each row r < round.n_rows with both bits of FN_EMIT_EDITED:
//             restore 0: where its position is `counted`, its token becomes one of the output first: one more
//             of the entry with its id, or a new entry behind the others while there is room; counted goes up
//             by one.  Then each entry keeps the logit of its id as raw, and that logit is edited.
//             restore 1: the logit of each entry's id becomes the entry's raw.
//             Everything else stays.  No slot stands in two such rows.
// Launch      grid (rows_cap), block 1024, shared 4 B (EditShared).  A block a row, a thread an entry in turn.
// Arithmetic  x = raw.  Id in prompt or output: x > 0 ? x / repetition : x * repetition.  Id in the output n > 0
//             times: x = (x - frequency * f32(n)) - presence, each step rounded.  Then NaN stays; a stop id at a
//             position below stops_from, or a bias of -inf, gives -inf; else x + bias.
// Equality    order edit_v1.  A row's logits do not depend on other rows, nor on the order of its entries.
// Reference   ref/edits.py edit_logits.  Source: repetition, "CTRL" (Keskar et al. 2019) section 4.1, for x <= 0
//             times as is common; frequency, presence and bias, OpenAI's API reference.
#include "prelude.cuh"
#include "edits.cuh"

namespace FN_NAMESPACE {
struct EditShared {
    u32 found;  // the row's token has an entry
};

FN_DEVICE float edited(const FnEdits& how, const FnEdit& entry, u32 position) {
    float x = entry.raw, bias = entry.bias;
    u32 n = entry.seen / FN_SEEN_ONE;
    if (n > 0 || (entry.seen & FN_SEEN_PROMPT)) {
        x = x > 0.f ? fn_div(x, how.repetition) : fn_mul(x, how.repetition);
    }
    if (n > 0) {
        x = fn_sub(x, fn_mul(how.frequency, fn_u32_to_f32(n)));
        x = fn_sub(x, how.presence);
    }
    float least = fn_u2f(0xff800000u);
    if ((entry.seen & FN_SEEN_STOP) && position < how.stops_from) bias = least;
    if (x != x) return x;
    return bias == least ? least : fn_add(x, bias);
}
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRow* rows, FnEdits* edits, float* logits, u32 vocab, u32 cap,
           u32 restore)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(EditShared, s);
    fn_let_next();
    u32 r = blockIdx.x;
    bool live = r < fn_ld_here(&round->n_rows);
    FnRow row = {};
    row.slot = fn_ld_here(&rows[r].slot), row.token = fn_ld_here(&rows[r].token);
    row.position = fn_ld_here(&rows[r].position), row.emit = fn_ld_here(&rows[r].emit);

    fn_wait_prior();
    if (!live) return;
    if ((row.emit & FN_EMIT_EDITED) != FN_EMIT_EDITED) return;
    FnEdit* entries = reinterpret_cast<FnEdit*>(edits) + (u64)row.slot * (cap + 2u) + 2u;
    FnEdits* head = reinterpret_cast<FnEdits*>(entries - 2);
    FnEdits how = *head;
    float* x = logits + (u64)r * vocab;
    if (restore) {
        for (u32 i = threadIdx.x; i < how.n_entries; i += FN_THREADS) x[entries[i].id] = entries[i].raw;
        return;
    }
    bool counts = how.counted == row.position;
    if (threadIdx.x == 0) s.found = 0;
    __syncthreads();  // every thread has read the head too
    for (u32 i = threadIdx.x; i < how.n_entries; i += FN_THREADS) {
        FnEdit entry = entries[i];
        if (counts && entry.id == row.token) {
            entry.seen += FN_SEEN_ONE;
            s.found = 1;
        }
        entry.raw = x[entry.id];
        x[entry.id] = edited(how, entry, row.position);
        entries[i] = entry;
    }
    __syncthreads();
    if (threadIdx.x != 0 || !counts) return;
    head->counted = row.position + 1u;
    if (!s.found && how.n_entries < cap) {
        FnEdit entry = FnEdit{row.token, FN_SEEN_ONE, 0.f, x[row.token]};
        x[row.token] = edited(how, entry, row.position);
        entries[how.n_entries] = entry;
        head->n_entries = how.n_entries + 1u;
    }
}
