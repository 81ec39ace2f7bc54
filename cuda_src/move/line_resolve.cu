// line_resolve: finds the experts of a round's rows in the layer's device lines, and gives lines to those
// that are in none.
// Contract    routes FnRoute (rows_cap, n_slots), the last slot the shared expert's; homes FnHome
//             (n_experts); uses FnUse (cache.n_lines or more); lines FnLine (n_experts + 1): an expert's copy
//             in its line, or the one at home.  No rows: cache.n_fills = 0 and nothing else changes.  Else
//             cache.clock goes up by one, and of the distinct experts of (row < round.n_rows, slot <
//             n_slots - 1)
//               in a line   the line's `used` becomes the clock;
//               in none     in rising id the next victim: lines not used at this clock, by age (clock - used)
//                           from the oldest, of equal age the lower line.  The victim's expert goes home
//                           (lines: addresses, source 1; homes.line FN_NO_LINE), the other moves in (lines:
//                           addresses, source 0; homes.line; uses = its id and the clock), and fills[0],
//                           fills[1], ... say what line_fill has to copy.  Without a victim the expert is
//                           read at home.
//             An expert's nine addresses move by the difference of the two copies' bases.  The counters of
//             FnCache go up.  n_experts, n_lines <= 1024; n_rows <= 16; 2 <= n_slots <= 33.
// Launch      grid (1), block 256, shared ResolveShared.  A thread has two (row, slot) pairs and four lines.
// Arithmetic  integers.
// Equality    exact: who is first among the threads changes nothing.
// Reference   ref/lines.py line_resolve.
//
// How: three loads deep to "every expert is in a line", and nothing else is done then.  Otherwise the rank of
// a missing expert is counted in the bits of all ids, the rank of a line among the ages of all lines.
#include "warp.cuh"
#include "tables.cuh"

namespace FN_NAMESPACE {
const u32 MOST = 1024, MOST_PAIRS = 512;
const u32 PAIRS = MOST_PAIRS / FN_THREADS, LINES = MOST / FN_THREADS;  // of a thread
static_assert(PAIRS * FN_THREADS == MOST_PAIRS && LINES * FN_THREADS == MOST, "whole threads");

struct alignas(16) ResolveShared {
    u32 wanted[MOST / 32], missed[MOST / 32];  // bits of expert ids: in a route; those of them in no line
    u32 held[MOST / 32];                       // bits of lines: used at this clock
    u32 age[MOST];                             // of lines; 0: used at this clock, or no line
    u32 expert[MOST_PAIRS];                    // missing ones in rising id
    u32 victim[MOST_PAIRS], holds[MOST_PAIRS];  // lines in the order they are given away; what they hold
};

FN_DEVICE u32 bit(u32 i) { return 1u << (i & 31u); }

FN_DEVICE bool goes_before(u32 age, u32 line, u32 other_age, u32 other_line) {
    return age > other_age || (age == other_age && line < other_line);
}

// Moves an expert's nine addresses.
FN_DEVICE void readdress(FnLine* line, u64 by, u32 source) {
    u64* at[9] = {&line->gate.data, &line->gate.suh, &line->gate.svh, &line->up.data,  &line->up.suh,
                  &line->up.svh,    &line->down.data, &line->down.suh, &line->down.svh};
    u64 address[9];
#pragma unroll
    for (u32 i = 0; i < 9u; i++) address[i] = fn_ld(at[i]);
#pragma unroll
    for (u32 i = 0; i < 9u; i++) *at[i] = address[i] + by;
    line->source = source;
}
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRoute* routes, FnLine* lines, FnHome* homes, FnUse* uses,
           FnCache* cache, FnFill* fills, u32 n_experts, u32 n_slots)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(ResolveShared, s);
    fn_let_next();
    u32 t = threadIdx.x, lane = t & 31u, warp = t >> 5, active = n_slots - 1u;
    fn_wait_prior();
    u32 n_rows = fn_ld(&round->n_rows), n_lines = fn_ld(&cache->n_lines), clock = fn_ld(&cache->clock) + 1u;
    // the first row's are asked for before it is known that there is one
    u32 expert[PAIRS] = {t < active ? fn_ld(routes + t).expert : 0u};
    if (n_rows == 0) {
        if (t == 0) cache->n_fills = 0;
        return;
    }
    u32 n_pairs = n_rows * active;
    uint2 home[PAIRS];  // bytes, line
#pragma unroll
    for (u32 i = 0; i < PAIRS; i++) {
        u32 p = t + FN_THREADS * i;
        if (p >= active && p < n_pairs) expert[i] = fn_ld(routes + p + p / active).expert;
    }
#pragma unroll
    for (u32 i = 0; i < PAIRS; i++) {
        const u32* there = &homes[expert[i]].bytes;
        bool is_pair = t + FN_THREADS * i < n_pairs;
        home[i] = is_pair ? fn_ld(reinterpret_cast<const uint2*>(there)) : uint2{0u, 0u};
    }
    uint2 use[LINES];  // expert, clock; waited for only when a line is looked for
#pragma unroll
    for (u32 i = 0; i < LINES; i++) {
        u32 line = t + FN_THREADS * i;
        use[i] = line < n_lines ? fn_ld(reinterpret_cast<const uint2*>(uses + line)) : uint2{0u, 0u};
    }
    if (warp == 0) s.wanted[lane] = s.missed[lane] = s.held[lane] = 0;
    __syncthreads();

#pragma unroll
    for (u32 i = 0; i < PAIRS; i++) {
        u32 e = expert[i], line = home[i].y;
        if (t + FN_THREADS * i >= n_pairs || fn_atomic_or_u32(&s.wanted[e >> 5], bit(e)) & bit(e)) continue;
        if (line == FN_NO_LINE) {
            fn_atomic_or_u32(&s.missed[e >> 5], bit(e));
        } else {
            fn_atomic_or_u32(&s.held[line >> 5], bit(line));
            uses[line].used = clock;
        }
    }
    __syncthreads();  // every pair has left its marks

    u32 missed = s.missed[lane], some = fn_popc(missed);
    u32 n_wanted = fn_warp_sum_u32(fn_popc(s.wanted[lane]));
    if (!fn_any(missed != 0)) {
        if (t == 0) {
            fn_atomic_add_u64(&cache->hits, n_wanted);
            cache->clock = clock;
            cache->n_fills = 0;
        }
        return;
    }

    u32 before = some;  // missing experts of lower words
#pragma unroll
    for (u32 d = 1; d < 32u; d <<= 1) {
        u32 below = fn_shfl_up(before, d);
        if (lane >= d) before += below;
    }
    u32 n_missed = fn_shfl(before, 31u), n_hits = n_wanted - n_missed;
    u32 n_fills = fn_min_u32(n_missed, n_lines - n_hits);
    before -= some;
    for (u32 word = warp; 32u * word < n_experts; word += FN_THREADS / 32u) {
        u32 ids = fn_shfl(missed, word), at = fn_shfl(before, word) + fn_popc(ids & (bit(lane) - 1u));
        if (ids & bit(lane)) s.expert[at] = 32u * word + lane;
    }
#pragma unroll
    for (u32 i = 0; i < LINES; i++) {
        u32 line = t + FN_THREADS * i;
        bool free = line < n_lines && !(s.held[line >> 5] & bit(line));
        s.age[line] = free ? clock - use[i].y : 0u;
    }
    __syncthreads();  // ages and missing experts stand

#pragma unroll
    for (u32 i = 0; i < LINES; i++) {
        u32 line = t + FN_THREADS * i, age = s.age[line], rank = age && n_fills ? 0u : MOST;
        if (rank == MOST) continue;
#pragma unroll 2
        for (u32 j = 0; j < n_lines; j += 4u) {
            uint4 other = *reinterpret_cast<const uint4*>(&s.age[j]);
            rank += goes_before(other.x, j, age, line) + goes_before(other.y, j + 1u, age, line) +
                    goes_before(other.z, j + 2u, age, line) + goes_before(other.w, j + 3u, age, line);
        }
        if (rank < n_fills) {
            s.victim[rank] = line;
            s.holds[rank] = use[i].x;
        }
    }
    __syncthreads();  // victims stand

    u64 base = fn_ld(&cache->lines), filled_bytes = 0, read_bytes = 0;
    u32 line_bytes = fn_ld(&cache->line_bytes), evictions = 0, reads = 0;
    for (u32 i = t; i < n_fills; i += FN_THREADS) {
        u32 line = s.victim[i], out = s.holds[i], in = s.expert[i];
        u64 here = base + (u64)line * line_bytes, from = fn_ld(&homes[in].address);
        u32 bytes = fn_ld(&homes[in].bytes);
        if (out != FN_NO_LINE) {
            readdress(lines + out, fn_ld(&homes[out].address) - here, 1u);
            homes[out].line = FN_NO_LINE;
            evictions++;
        }
        readdress(lines + in, here - from, 0u);
        homes[in].line = line;
        uses[line] = FnUse{in, clock};
        fills[i] = FnFill{here, from, bytes, 0u};
        filled_bytes += bytes;
    }
#pragma unroll
    for (u32 i = 0; i < PAIRS; i++) {
        bool is_pair = t + FN_THREADS * i < n_pairs;
        u32 e = is_pair ? expert[i] : 0u;
        u32 rank = fn_shfl(before, e >> 5) + fn_popc(s.missed[e >> 5] & (bit(e) - 1u));
        if (!is_pair || home[i].y != FN_NO_LINE || rank < n_fills) continue;
        reads++;
        read_bytes += home[i].x;
    }
    evictions = fn_warp_sum_u32(evictions), reads = fn_warp_sum_u32(reads);
    filled_bytes = fn_warp_sum_u64(filled_bytes), read_bytes = fn_warp_sum_u64(read_bytes);
    if (lane == 0 && evictions) fn_atomic_add_u64(&cache->evictions, evictions);
    if (lane == 0 && filled_bytes) fn_atomic_add_u64(&cache->filled_bytes, filled_bytes);
    if (lane == 0 && reads) fn_atomic_add_u64(&cache->reads, reads);
    if (lane == 0 && reads) fn_atomic_add_u64(&cache->read_bytes, read_bytes);
    if (t == 0) {
        cache->hits += n_hits;
        cache->misses += n_missed;
        cache->fills += n_fills;
        cache->in_place += n_missed - n_fills;
        cache->clock = clock;
        cache->n_fills = n_fills;
    }
}
