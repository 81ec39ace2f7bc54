// collective.h: the simulator's side of warp.cuh and mma.cuh.  The last lane of a warp to arrive does the
// work of all 32 (sums in the device's order) and releases the others.
#pragma once
#include "shim.h"

// Publishes v; returns the 32 published values of this exchange.
static inline const u64* fn_sim_exchange(u64 v) {
    fnsim::Warp& w = *fnsim::T.warp;
    const unsigned at = w.parity;
    w.slot[at][fnsim::T.current->lane] = v;
    if (fnsim::warp_arrive(fnsim::OP_SHUFFLE)) {
        w.parity ^= 1;
        fnsim::warp_release();
    }
    return w.slot[at];
}
template <class T>
static inline T fn_sim_shuffle(T v, u32 from) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "32- or 64-bit values only");
    u64 raw = 0;
    memcpy(&raw, &v, sizeof v);
    raw = fn_sim_exchange(raw)[from];
    memcpy(&v, &raw, sizeof v);
    return v;
}
template <class T>
static inline T fn_shfl(T v, u32 lane) {
    return fn_sim_shuffle(v, lane & 31);
}
template <class T>
static inline T fn_shfl_xor(T v, u32 mask) {
    u32 me = (u32)fnsim::T.current->lane, from = me ^ mask;
    return fn_sim_shuffle(v, from < 32 ? from : me);
}
template <class T>
static inline T fn_shfl_up(T v, u32 delta) {
    u32 me = (u32)fnsim::T.current->lane;
    return fn_sim_shuffle(v, me >= delta ? me - delta : me);
}
template <class T>
static inline T fn_shfl_down(T v, u32 delta) {
    u32 me = (u32)fnsim::T.current->lane;
    return fn_sim_shuffle(v, delta < 32 && me + delta < 32 ? me + delta : me);
}
static inline u32 fn_thread_here() { return threadIdx.x; }
static inline u32 fn_ballot(bool pred) {
    fnsim::Warp& w = *fnsim::T.warp;
    const unsigned at = w.parity;
    if (!w.arrived) w.ballot[at] = 0;
    w.ballot[at] |= (u32)pred << fnsim::T.current->lane;
    if (fnsim::warp_arrive(fnsim::OP_BALLOT)) {
        w.parity ^= 1;
        fnsim::warp_release();
    }
    return w.ballot[at];
}
static inline bool fn_any(bool pred) { return fn_ballot(pred) != 0; }
static inline bool fn_all(bool pred) { return fn_ballot(pred) == 0xffffffffu; }

// Every lane gets finish(slots), computed once.  The result outlives the next collective's arrivals: it is
// written only when all lanes have arrived there, that is, have read this one.
template <class Finish>
static inline u64 fn_sim_reduce(unsigned op, u64 v, Finish finish) {
    fnsim::Warp& w = *fnsim::T.warp;
    w.input[fnsim::T.current->lane] = v;
    if (fnsim::warp_arrive(op)) {
        w.result = finish(w.input);
        fnsim::warp_release();
    }
    return w.result;
}
template <class Combine>
static inline float fn_sim_tree(unsigned op, float v, Combine combine) {
    return fn_u2f((u32)fn_sim_reduce(op, fn_f2u(v), [&](const u64* s) {
        float x[32];
        for (int i = 0; i < 32; i++) x[i] = fn_u2f((u32)s[i]);
        for (int half = 16; half; half >>= 1)
            for (int i = 0; i < half; i++) x[i] = combine(x[i], x[i + half]);
        return (u64)fn_f2u(x[0]);
    }));
}
static inline float fn_warp_sum(float v) {
    return fn_sim_tree(fnsim::OP_SUM, v, [](float a, float b) { return a + b; });
}
static inline float fn_warp_max(float v) {
    return fn_sim_tree(fnsim::OP_MAX, v, [](float a, float b) { return fn_max(a, b); });
}
static inline u64 fn_warp_sum_u64(u64 v) {
    return fn_sim_reduce(fnsim::OP_SUM_INT, v, [](const u64* s) {
        u64 sum = 0;
        for (int i = 0; i < 32; i++) sum += s[i];
        return sum;
    });
}
static inline u32 fn_warp_sum_u32(u32 v) { return (u32)fn_warp_sum_u64(v); }
static inline float fn_warp_sum4(float v) {
    const u64* s = fn_sim_exchange(fn_f2u(v)) + (fnsim::T.current->lane & ~3);
    return (fn_u2f((u32)s[0]) + fn_u2f((u32)s[1])) + (fn_u2f((u32)s[2]) + fn_u2f((u32)s[3]));
}

// values[i][lane] is element 4 lane + i: index bits 0 and 1 are the row, bits 2 .. 6 the lane.
static inline void fn_hadamard128(float (&v)[4]) {
    fnsim::Warp& w = *fnsim::T.warp;
    const int lane = fnsim::T.current->lane;
    for (int i = 0; i < 4; i++) w.values[i][lane] = v[i];
    if (fnsim::warp_arrive(fnsim::OP_HADAMARD)) {
        float (*x)[32] = w.values;
        for (int l = 0; l < 32; l++) {
            const float a = x[0][l] + x[1][l], b = x[0][l] - x[1][l], c = x[2][l] + x[3][l],
                        d = x[2][l] - x[3][l];
            x[0][l] = a + c;
            x[1][l] = b + d;
            x[2][l] = a - c;
            x[3][l] = b - d;
        }
        for (int m = 1; m < 32; m <<= 1)
            for (int i = 0; i < 4; i++)
                for (int l = 0; l < 32; l += 2 * m)
                    for (int j = l; j < l + m; j++) {
                        const float a = x[i][j], b = x[i][j + m];
                        x[i][j] = a + b;
                        x[i][j + m] = a - b;
                    }
        for (int i = 0; i < 4; i++)
            for (int l = 0; l < 32; l++) x[i][l] *= 0.088388347648f;
        fnsim::warp_release();
    }
    for (int i = 0; i < 4; i++) v[i] = w.values[i][lane];
}

static inline void fn_sim_mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], bool bf16) {
    fnsim::Warp& w = *fnsim::T.warp;
    const int g = fnsim::T.current->lane >> 2, q = fnsim::T.current->lane & 3;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) w.mma_a[q + 4 * (i >> 1)][g + 8 * (i & 1)] = a[i];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) w.mma_b[q + 4 * i][g] = b[i];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) w.mma_c[2 * q + (i & 1)][g + 8 * (i >> 1)] = d[i];
    if (fnsim::warp_arrive(bf16 ? fnsim::OP_MMA_BF16 : fnsim::OP_MMA_F16)) {
        fnsim::mma(w, bf16);
        fnsim::warp_release();
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) d[i] = w.mma_c[2 * q + (i & 1)][g + 8 * (i >> 1)];
}
static inline void fn_mma_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    fn_sim_mma(d, a, b, false);
}
static inline void fn_mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    fn_sim_mma(d, a, b, true);
}

// The last lane reads all rows, so that a lane which runs ahead cannot overwrite what a slower one has yet to
// load.
static inline void fn_sim_ldmatrix(u32 (&r)[4], const void* smem, bool transposed) {
    fnsim::Warp& w = *fnsim::T.warp;
    const int lane = fnsim::T.current->lane;
    if ((size_t)smem & 15) fnsim::misaligned(smem, 16);
    w.input[lane] = (u64)(size_t)smem;
    if (fnsim::warp_arrive(fnsim::OP_LDMATRIX)) {
        for (int i = 0; i < 4; i++) {
            u16 m[8][8];
            for (int row = 0; row < 8; row++) memcpy(m[row], (const void*)(size_t)w.input[8 * i + row], 16);
            for (int l = 0; l < 32; l++) {
                const int g = l >> 2, t = 2 * (l & 3);
                const u32 word =
                    transposed ? fn_pack_h2(m[t][g], m[t + 1][g]) : fn_pack_h2(m[g][t], m[g][t + 1]);
                memcpy(&w.values[i][l], &word, 4);
            }
        }
        fnsim::warp_release();
    }
    for (int i = 0; i < 4; i++) memcpy(&r[i], &w.values[i][lane], 4);
}
static inline void fn_ldmatrix_x4(u32 (&r)[4], const void* smem) { fn_sim_ldmatrix(r, smem, false); }
static inline void fn_ldmatrix_x4_trans(u32 (&r)[4], const void* smem) { fn_sim_ldmatrix(r, smem, true); }
