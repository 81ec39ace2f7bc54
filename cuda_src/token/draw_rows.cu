// draw_rows: draws the next token of each row that asks for one.
// Contract    logits (rows_cap, vocab) f32, 1 <= vocab <= 262,144; rows[r].emit bit 1 asks;
//             slots[rows[r].slot] holds seed, temperature >= 0, top_k (0 off), top_p (>= 1 off), min_p (<= 0
//             off) -> tokens (rows_cap) u32, status (rows_cap) u32: 0, or 1 when a logit is NaN (token
//             0xffffffff).  Other rows are not written.
// Launch      grid (rows_cap), block 1024, shared 44328 B (DrawShared).  A block per row.
// Arithmetic  temperature 0: highest logit, then lower id.  Else z = logit / temperature; e = exp(z - max z);
//             weights are integers q = rint(e * 2^40), so every sum is exact; top_k by (z down, id up), then
//             the shortest prefix with sum(q) >= top_p * total, then e >= min_p (the first of the order
//             always stays); of these the highest z + gumbel, then lower id; gumbel = -log(-log(u)), u = (n +
//             0.5) * 2^-23, n = 23 bits of splitmix64(splitmix64(splitmix64(seed) ^ position) ^ id).
// Equality    order draw_v1 (ARITHMETIC.md): a row draws the same alone or among others.  -0 counts as +0.
// Reference   check/cases_token.py draw_model, in integers.
//
// Tokens are compared as keys of 50 bits: order-preserving bits of z above the complement of the id, so no
// two are equal.  Passes over the row: one for the largest key (greedy ends here); with top_k or top_p one
// that copies the leading candidates to shared memory, after which all further passes read that list; when
// they do not fit (top_k above 1024, or a flat distribution) the passes read the row again: same result,
// slower.
#include "prelude.cuh"
#include "warp.cuh"
#include "tables.cuh"

namespace FN_NAMESPACE {

enum : u32 { kBins = 1024, kList = 3456, kWarps = FN_THREADS / 32 };
enum : u32 { kIdBits = 18, kIdMask = (1u << kIdBits) - 1 };

struct DrawShared {
    u64 list[kList];        // keys of the leading candidates
    u32 count[kBins];       // tokens per digit
    u32 limb[3][kBins];     // their weights, as sums of 14-bit limbs: no carry below 2^18 tokens
    u64 scan[kWarps];
    u64 best, sum, pick, before;
    u32 n_list, found;
};

FN_DEVICE u32 float_order(float z) {
    u32 u = fn_f2u(z);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
FN_DEVICE u64 make_key(float z, u32 id) {
    return (u64)float_order(fn_add(z, 0.f)) << kIdBits | (kIdMask - id);
}
FN_DEVICE u32 key_id(u64 key) { return kIdMask - ((u32)key & kIdMask); }
FN_DEVICE float key_value(u64 key) {
    u32 u = (u32)(key >> kIdBits);
    return fn_u2f(u & 0x80000000u ? u & 0x7fffffffu : ~u);
}
FN_DEVICE bool is_nan_key(u64 key) { return (u32)(key >> kIdBits) > 0xff800000u; }

FN_DEVICE u64 splitmix64(u64 z) {
    z += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

// exp(z - max), 1 for the maximum itself (also an infinite one).
FN_DEVICE float relative(float z, float z_max) { return z == z_max ? 1.f : fn_exp_down(fn_sub(z, z_max)); }

// rint(e * 2^40) for e in [0, 1]: both f64 steps but the rounding are exact.
FN_DEVICE u64 weight(float z, float z_max) {
    if (fn_sub(z, z_max) < -29.f) return 0;  // e < 2^-41
    double t = fn_dadd(fn_dmul((double)relative(z, z_max), 0x1p40), 0x1p52);
    return fn_d2u(t) & ((1ull << 52) - 1);
}

// The tokens of one row: from the logits, or the keys in shared memory.
struct Row {
    const float* logits;
    u32 vocab;
    float temperature;

    FN_DEVICE float scaled(float logit) const {
        return temperature == 0.f || temperature == 1.f ? logit : fn_div(logit, temperature);
    }
    FN_DEVICE u64 key(float logit, u32 id) const {
        return logit == logit ? make_key(scaled(logit), id) : (u64)0xffffffffu << kIdBits;
    }

    // visit(logit, id) of this thread's tokens, ids rising.  Batch: 16-byte loads in flight.
    template <u32 Batch, class F> FN_DEVICE void each_logit(F visit) const {
        const float4* quads = reinterpret_cast<const float4*>(logits);
        u32 n_quads = vocab & 3u ? 0 : vocab >> 2;  // an odd length leaves rows unaligned
        for (u32 i = threadIdx.x; i < n_quads; i += Batch * FN_THREADS) {
            float4 v[Batch];
#pragma unroll
            for (u32 b = 0; b < Batch; ++b)
                if (i + b * FN_THREADS < n_quads) v[b] = fn_ld(quads + i + b * FN_THREADS);
#pragma unroll
            for (u32 b = 0; b < Batch; ++b) {
                u32 id = 4 * (i + b * FN_THREADS);
                if (id >= vocab) break;
                visit(v[b].x, id), visit(v[b].y, id + 1), visit(v[b].z, id + 2), visit(v[b].w, id + 3);
            }
        }
        for (u32 i = 4 * n_quads + threadIdx.x; i < vocab; i += FN_THREADS) visit(fn_ld(logits + i), i);
    }
    template <class F> FN_DEVICE void each(F visit) const {
        each_logit<1>([&](float logit, u32 id) { visit(key(logit, id)); });
    }

    // The largest key of this thread's tokens, 0 when it has none.
    FN_DEVICE u64 largest() const {
        float best = 0.f;
        u32 best_id = vocab;
        bool nan = false;
        each_logit<4>([&](float logit, u32 id) {
            float z = scaled(logit);
            nan |= logit != logit;
            if (z > best || best_id == vocab) best = z, best_id = id;
        });
        if (nan) return (u64)0xffffffffu << kIdBits;
        return best_id == vocab ? 0 : make_key(best, best_id);
    }
};

struct List {
    const u64* keys;
    u32 n;
    template <class F> FN_DEVICE void each(F visit) const {
        for (u32 i = threadIdx.x; i < n; i += FN_THREADS) visit(keys[i]);
    }
};

struct One {  // a single key a thread
    u64 key;
    template <class F> FN_DEVICE void each(F visit) const { visit(key); }
};

// Largest of all threads' keys, on every thread.  The caller has a barrier between two calls.
FN_DEVICE u64 block_max(DrawShared& s, u64 mine) {
    if (threadIdx.x == 0) s.best = 0;
    __syncthreads();
    for (u32 mask = 16; mask; mask >>= 1) {
        u64 other = fn_shfl_xor(mine, mask);
        mine = other > mine ? other : mine;
    }
    if ((threadIdx.x & 31u) == 0) fn_atomic_max_u64(&s.best, mine);
    __syncthreads();
    return s.best;
}

// Sum over all threads, on every thread.  The caller has a barrier between two calls.
FN_DEVICE u64 block_sum(DrawShared& s, u64 mine) {
    if (threadIdx.x == 0) s.sum = 0;
    __syncthreads();
    u64 w = fn_warp_sum_u64(mine);
    if ((threadIdx.x & 31u) == 0) fn_atomic_add_u64(&s.sum, w);
    __syncthreads();
    return s.sum;
}

// The key that ends the shortest prefix, in falling order of the keys >= floor, whose count (by_weight: sum
// of weights) reaches `need` >= 1; or a lower key that adds no token to that prefix.  0 when all together do
// not reach it. Digits of 10 bits from the top; each level counts the keys that agree with the digits found
// so far.
template <class Source>
FN_DEVICE u64 prefix_end(DrawShared& s, const Source& source, u64 floor, u64 need, bool by_weight,
                         float z_max) {
    u64 found = 0;
    u32 shift = 50;
    while (shift != 0) {
        shift -= 10;
        __syncthreads();
        s.count[threadIdx.x] = s.limb[0][threadIdx.x] = s.limb[1][threadIdx.x] = s.limb[2][threadIdx.x] = 0;
        if (threadIdx.x == 0) s.found = 0;
        __syncthreads();
        source.each([&](u64 key) {
            if (key < floor || key >> shift >> 10 != found) return;
            u32 bin = (u32)(key >> shift) & (kBins - 1);
            fn_atomic_add_u32(&s.count[bin], 1);
            if (!by_weight) return;
            u64 q = weight(key_value(key), z_max);
            if (!q) return;
            fn_atomic_add_u32(&s.limb[0][bin], (u32)q & 0x3fffu);
            fn_atomic_add_u32(&s.limb[1][bin], (u32)(q >> 14) & 0x3fffu);
            fn_atomic_add_u32(&s.limb[2][bin], (u32)(q >> 28));
        });
        __syncthreads();
        u32 lane = threadIdx.x & 31u, warp = threadIdx.x >> 5;
        u32 bin = kBins - 1 - threadIdx.x, n = s.count[bin];
        u64 limbs = s.limb[0][bin] + ((u64)s.limb[1][bin] << 14) + ((u64)s.limb[2][bin] << 28);
        u64 own = by_weight ? limbs : n;
        u64 upto = own;  // inclusive sum from the highest digit down
        for (u32 step = 1; step < 32; step <<= 1) {
            u64 other = fn_shfl_up(upto, step);
            if (lane >= step) upto += other;
        }
        if (lane == 31) s.scan[warp] = upto;
        __syncthreads();
        for (u32 w = 0; w < warp; ++w) upto += s.scan[w];
        if (upto >= need && upto - own < need) {  // one thread at most
            s.pick = bin, s.before = upto - own;
            s.found = n == 1 || (!by_weight && upto == need) ? 2 : 1;
        }
        __syncthreads();
        if (!s.found) return 0;
        found = found << 10 | s.pick;
        need -= s.before;
        if (s.found == 2) break;  // the whole digit belongs to the prefix
    }
    return found << shift;
}

FN_DEVICE bool uses_top_k(const FnSlot& slot, u32 vocab) { return slot.top_k != 0 && slot.top_k < vocab; }
FN_DEVICE bool uses_top_p(const FnSlot& slot) { return slot.top_p < 1.f; }

// Smallest integer >= top_p * total, at least 1; top_p as floor(top_p * 2^32), which is exact from 2^-8 up.
FN_DEVICE u64 nucleus(const FnSlot& slot, u64 total) {
    u64 p = slot.top_p > 0.f ? (u64)fn_mul(slot.top_p, 0x1p32f) << 32 : 0;
    u64 need = fn_umulhi64(total, p) + (total * p != 0 ? 1 : 0);
    return need ? need : 1;
}

// Copies every key >= floor to the list; false when they do not fit.  total: the sum of all weights, if asked
// for.
FN_DEVICE bool make_list(DrawShared& s, const Row& row, u64 floor, bool want_total, float z_max, u64& total) {
    if (threadIdx.x == 0) s.n_list = 0;
    __syncthreads();
    u64 sum = 0;
    row.each_logit<4>([&](float logit, u32 id) {
        u64 key = row.key(logit, id);
        if (want_total) sum += weight(key_value(key), z_max);
        if (key < floor) return;
        u32 at = fn_atomic_add_u32(&s.n_list, 1);
        if (at < kList) s.list[at] = key;
    });
    total = want_total ? block_sum(s, sum) : 0;
    __syncthreads();
    return s.n_list <= kList;
}

// The draw over `source`, which holds every token that may be drawn.  total: sum of all weights, 0 when not
// known.
template <class Source>
FN_DEVICE u32 draw(DrawShared& s, const Source& source, const FnSlot& slot, u32 position, u32 vocab, u64 best,
                   u64 total) {
    float z_max = key_value(best);
    u64 cutoff = uses_top_k(slot, vocab) ? prefix_end(s, source, 0, slot.top_k, false, z_max) : 0;
    if (uses_top_p(slot)) {
        if (!total) {
            u64 sum = 0;
            source.each([&](u64 key) { sum += key >= cutoff ? weight(key_value(key), z_max) : 0; });
            total = block_sum(s, sum);
        }
        u64 end = prefix_end(s, source, cutoff, nucleus(slot, total), true, z_max);
        cutoff = end > cutoff ? end : cutoff;
    }
    u64 row_key = splitmix64(splitmix64(slot.seed) ^ position), mine = 0;
    source.each([&](u64 key) {
        if (key < cutoff) return;
        float z = key_value(key);
        if (slot.min_p > 0.f && key != best && !(relative(z, z_max) >= slot.min_p)) return;
        u32 id = key_id(key), n = (u32)(splitmix64(row_key ^ id) >> 41);
        float u = fn_mul(fn_add(fn_u32_to_f32(n), 0.5f), 0x1p-23f);
        u64 score = make_key(fn_sub(z, fn_log(-fn_log(u))), id);
        mine = score > mine ? score : mine;
    });
    return key_id(block_max(s, mine));
}

}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRow* rows, const FnSlot* slots, const float* logits, u32* tokens,
           u32* status, u32 vocab)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(DrawShared, s);
    fn_let_next();
    u32 r = blockIdx.x, position = fn_ld_here(&rows[r].position), i_slot = fn_ld_here(&rows[r].slot);
    bool asked = fn_ld_here(&rows[r].emit) & 2u;
    FnSlot slot = {};
    if (r < fn_ld_here(&round->n_rows) && asked) {
        const FnSlot& from = slots[i_slot];
        slot.seed = fn_ld_here(&from.seed), slot.temperature = fn_ld_here(&from.temperature);
        slot.top_p = fn_ld_here(&from.top_p), slot.min_p = fn_ld_here(&from.min_p);
        slot.top_k = fn_ld_here(&from.top_k);
    } else {
        asked = false;
    }

    fn_wait_prior();
    if (!asked) return;
    Row row = {logits + (u64)r * vocab, vocab, slot.temperature};
    u64 mine = row.largest(), best = block_max(s, mine), total = 0;
    u32 token = key_id(best);
    bool nan = is_nan_key(best);
    if (!nan && slot.temperature != 0.f) {
        float z_max = key_value(best);
        bool top_k = uses_top_k(slot, vocab), top_p = uses_top_p(slot), listed = false;
        // The rank-th largest of the threads' own maxima bounds the rank-th largest token from below.
        // Without top_k the rank is a guess at the size of the nucleus; whether the list holds it is checked.
        u32 rank = top_k ? slot.top_k : 896;
        if ((top_k || top_p) && rank <= FN_THREADS) {
            u64 floor = prefix_end(s, One{mine}, 1, rank, false, z_max);
            listed = make_list(s, row, floor, !top_k, z_max, total);
            if (listed && !top_k) {
                u64 sum = 0;
                List{s.list, s.n_list}.each([&](u64 key) { sum += weight(key_value(key), z_max); });
                listed = block_sum(s, sum) >= nucleus(slot, total);
            }
        }
        __syncthreads();
        token = listed ? draw(s, List{s.list, s.n_list}, slot, position, vocab, best, total)
                       : draw(s, row, slot, position, vocab, best, total);
    }
    if (threadIdx.x == 0) {
        tokens[r] = nan ? 0xffffffffu : token;
        status[r] = nan ? 1u : 0u;
    }
}
