// mma.cpp: the bits of mma.sync.m16n8k16 with f16 or bf16 inputs and an f32 accumulator.
//
// Per output and per block of `products` products in k order, with the accumulator as one more term: products
// are exact and not renormalised; every non-zero term is cut toward zero to a multiple of 2^(e - fraction), e
// the largest exponent (at least `floor`); the cut terms are added exactly; the sum is cut toward zero to
// f32, subnormals kept. A NaN is 0x7fffffff.  sm_90 and later: 25 fraction bits, 16 products.  sm_80 to 89:
// 24 bits, two chained halves of 8. The model is public work (arXiv 2511.10909, 2512.07004) and was compared
// with an H200 on 4.1 million outputs.
#include "runtime.h"

#include <cmath>
#include <cstdint>

namespace fnsim {

namespace {

struct Model {
    int fraction, products, floor;
};
Model model = {25, 16, -133};

typedef float v8f __attribute__((vector_size(32)));
typedef int v8i __attribute__((vector_size(32)));
typedef double v8d __attribute__((vector_size(64)));
typedef int64_t v4l __attribute__((vector_size(32)));
typedef int64_t v8l __attribute__((vector_size(64)));

constexpr int kNone = -1000;  // exponent of a zero in the fast path: no other term's is as low

float word(u32 x) { return fn_u2f(x); }

// sum * 2^e as f32, toward zero.
float toward_zero(int64_t sum, int e) {
    if (!sum) return 0.f;
    u64 m = sum < 0 ? -(u64)sum : (u64)sum;
    const int bits = 64 - __builtin_clzll(m);
    int cut = bits - 24;
    if (e + bits - 1 < -126) cut = -149 - e;
    if (cut > 0) {
        m = cut > 63 ? 0 : m >> cut;
        e += cut;
    }
    const float r = m ? (float)std::ldexp((double)m, e) : 0.f;
    return sum < 0 ? -r : r;
}

inline bool any(v8i x) {
    const v4l y = (v4l)x;
    return y[0] | y[1] | y[2] | y[3];
}

// Operands of one tile, decoded: value and exponent (subnormals at the format's least one, zeros at kNone) of
// every element.  bad_a, bad_b: an infinity or NaN is in eight rows, in a column; live: a column has an element
// that is not zero; twin: a column behind the first has its bits; wide: an element is outside the fast path.
struct Tile {
    alignas(32) float a[16][16], b[16][8];
    alignas(32) int ea[16][16], eb[16][8];
    alignas(32) int bad_b[8], live[8], twin[8];
    bool bad_a[2], wide;

    bool bad(int row, int col) const { return bad_a[row >> 3] || bad_b[col]; }
};

template <bool Bf16>
inline __attribute__((always_inline)) void decode(v8i w, float* value, int* exponent, v8i& top, v8i& wide) {
    const v8i one = (v8i){} + 1;
    v8i field, u;
    if (Bf16) {
        field = w >> 7 & 255;
        u = w << 16;
        wide |= ((w & 0x7fff) != 0) & ((field < 87) | (field > 167));
        *(v8f*)value = (v8f)u;
    } else {
        field = w >> 10 & 31;
        u = (w & 0x7fff) << 13 | (w & 0x8000) << 16;
        *(v8f*)value = (v8f)u * 0x1p112f;
    }
    top = field > top ? field : top;
    const v8i e = (field > one ? field : one) - (Bf16 ? 127 : 15);
    *(v8i*)exponent = (w & 0x7fff) == 0 ? (v8i){} + kNone : e;
}
template <bool Bf16>
void decode_tile(const Warp& w, Tile& t) {
    v8i top0 = {}, top1 = {}, top = {}, live = {}, other = {}, wide = {};
    for (int pair = 0; pair < 8; pair++) {
        const v8i a0 = *(const v8i*)&w.mma_a[pair][0], a1 = *(const v8i*)&w.mma_a[pair][8],
                  b = *(const v8i*)w.mma_b[pair];
        const int k = 2 * pair;
        decode<Bf16>(a0 & 0xffff, &t.a[k][0], &t.ea[k][0], top0, wide);
        decode<Bf16>(a1 & 0xffff, &t.a[k][8], &t.ea[k][8], top1, wide);
        decode<Bf16>(b & 0xffff, t.b[k], t.eb[k], top, wide);
        decode<Bf16>(a0 >> 16 & 0xffff, &t.a[k + 1][0], &t.ea[k + 1][0], top0, wide);
        decode<Bf16>(a1 >> 16 & 0xffff, &t.a[k + 1][8], &t.ea[k + 1][8], top1, wide);
        decode<Bf16>(b >> 16 & 0xffff, t.b[k + 1], t.eb[k + 1], top, wide);
        live |= b & 0x7fff7fff;
        other |= b ^ b[0];
    }
    constexpr int most = Bf16 ? 255 : 31;
    t.bad_a[0] = any(top0 == most);
    t.bad_a[1] = any(top1 == most);
    *(v8i*)t.bad_b = top == most;
    *(v8i*)t.live = live;
    *(v8i*)t.twin = (other == 0) & (v8i){0, -1, -1, -1, -1, -1, -1, -1};
    t.wide = any(wide);
}

// One output column of eight rows, one block of products: integers hold every cut term.  False: a term lies
// outside, as an accumulator that is no number does.
inline __attribute__((always_inline)) bool block_fast(v8f& acc, const Tile& t, int row, int col, int k0,
                                                      int n, int fraction) {
    const v8i field = ((v8i)acc >> 23) & 255;
    v8i top = field - 127;
    top = field == 0 ? (v8i){} - 126 : top;
    top = ((v8i)acc << 1) == 0 ? (v8i){} + kNone : top;
    v8f p[16];
#pragma GCC unroll 16
    for (int k = 0; k < n; k++) {
        p[k] = *(const v8f*)&t.a[k0 + k][row] * t.b[k0 + k][col];
        const v8i e = *(const v8i*)&t.ea[k0 + k][row] + t.eb[k0 + k][col];
        top = e > top ? e : top;
    }
    const v8i none = top < kNone / 2;
    if (any(((top < -90) & ~none) | (top > 100))) return false;
    top = none ? (v8i){} : top;
    const v8f scale = (v8f)((fraction - top + 127) << 23), back = (v8f)((top - fraction + 127) << 23);
    v8i even = __builtin_convertvector(acc * scale, v8i), other = {};
#pragma GCC unroll 8
    for (int k = 0; k < n; k += 2) {
        even += __builtin_convertvector(p[k] * scale, v8i);
        other += __builtin_convertvector(p[k + 1] * scale, v8i);
    }
    // each half is below 9 * 2^27 < 2^31: the sum is exact in a double; then to f32 toward zero
    const v8d sum = __builtin_convertvector(even, v8d) + __builtin_convertvector(other, v8d);
    v8f f = __builtin_convertvector(sum, v8f);
    const v8d rounded = __builtin_convertvector(f, v8d);
    const v8l mask = (v8l){} + 0x7fffffffffffffffLL;
    const v8l above = (v8d)((v8l)rounded & mask) > (v8d)((v8l)sum & mask);
    f = (v8f)((v8i)f + __builtin_convertvector(above, v8i));
    acc = f * back;
    return true;
}

float output_exact(float acc, const float* x, const float* y, const int* e, int n, const Model& m) {
    if (acc != acc) return word(0x7fffffff);
    double check = acc;
    for (int k = 0; k < n; k++) check += (double)x[k] * y[k];
    if (check != check) return word(0x7fffffff);
    if (std::isinf(check)) return (float)check;
    constexpr int none = -100000;
    int top = none;
    for (int k = 0; k < n; k++)
        if (x[k] != 0 && y[k] != 0 && e[k] > top) top = e[k];
    const int field = fn_f2u(acc) >> 23 & 255, own = field ? field - 127 : -126;
    if (acc != 0 && own > top) top = own;
    if (top == none) return 0.f;
    if (top < m.floor) top = m.floor;
    int64_t sum = (int64_t)std::trunc(std::ldexp((double)acc, m.fraction - top));
    for (int k = 0; k < n; k++) sum += (int64_t)std::trunc(std::ldexp((double)x[k] * y[k], m.fraction - top));
    return toward_zero(sum, top - m.fraction);
}

u16 half(u32 word, int k) { return (u16)(word >> 16 * (k & 1)); }

void block_exact(v8f& acc, const Warp& w, const Tile& t, int row, int col, int k0, bool bf16,
                 const Model& m) {
    const bool bad = !bf16 && t.bad(row, col);
    for (int i = 0; i < 8; i++) {
        float x[16], y[16];
        int e[16];
        for (int j = 0; j < m.products; j++) {
            const int k = k0 + j;
            // the fast decode of f16 turns an infinity into 65536: take the real value when one is there
            x[j] = bad ? fn_h2f(half(w.mma_a[k >> 1][row + i], k)) : t.a[k][row + i];
            y[j] = bad ? fn_h2f(half(w.mma_b[k >> 1][col], k)) : t.b[k][col];
            e[j] = t.ea[k][row + i] + t.eb[k][col];
        }
        acc[i] = output_exact(acc[i], x, y, e, m.products, m);
    }
}

}  // namespace

void set_mma_generation(unsigned generation) {
    if (generation >= 90)
        model = {25, 16, -133};
    else
        model = {24, 8, -132};
}

void mma(Warp& w, bool bf16) {
    Tile t;
    if (bf16)
        decode_tile<true>(w, t);
    else
        decode_tile<false>(w, t);
    const Model m = model;
    const v8i c0 = *(const v8i*)&w.mma_c[0][0], c8 = *(const v8i*)&w.mma_c[0][8];  // before they are overwritten
    for (int col = 0; col < 8; col++) {
        // Another first column, bit for bit: a row of a kernel that stands in where there is none.
        const v8i* c = (const v8i*)w.mma_c[col];
        if (t.twin[col] && !any((c[0] ^ c0) | (c[1] ^ c8))) {
            memcpy(w.mma_c[col], w.mma_c[0], sizeof w.mma_c[0]);
            continue;
        }
        for (int row = 0; row < 16; row += 8) {
            v8f& acc = *(v8f*)&w.mma_c[col][row];
            const bool bad = t.bad(row, col);
            // absent row: no product counts, the accumulator stays (-0 becomes +0)
            if (!bad && !t.live[col]) {
                acc = acc == acc ? acc + 0.f : (v8f)((v8i){} + 0x7fffffff);
                continue;
            }
            for (int k0 = 0; k0 < 16; k0 += m.products) {
                const bool done = !bad && !t.wide &&
                                  (m.products == 16 ? block_fast(acc, t, row, col, 0, 16, m.fraction)
                                                    : block_fast(acc, t, row, col, k0, 8, m.fraction));
                if (!done) block_exact(acc, w, t, row, col, k0, bf16, m);
            }
        }
    }
}

}  // namespace fnsim
