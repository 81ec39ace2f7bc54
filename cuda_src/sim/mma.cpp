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
typedef int64_t v8l __attribute__((vector_size(64)));

constexpr int kNone = -200;  // exponent of a zero term in the fast path

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

// f: value; e: exponent, subnormals at the format's least one.  bad: an infinity or NaN; wide: outside the
// fast path.
inline __attribute__((always_inline)) void decode(const u16* h, int n, bool bf16, float* f, int* e, int& bad,
                                                  int& wide) {
    int b = 0, w = 0;
    if (bf16) {
        for (int i = 0; i < n; i++) {
            const u32 u = (u32)h[i] << 16;
            const int field = u >> 23 & 255;
            f[i] = fn_u2f(u);
            e[i] = (field ? field : 1) - 127;
            b |= field == 255;
            w |= (u << 1) != 0 && (field < 87 || field > 167);
        }
    } else {
        for (int i = 0; i < n; i++) {
            const u32 u = (u32)(h[i] & 0x7fff) << 13 | (u32)(h[i] & 0x8000) << 16;
            const int field = h[i] >> 10 & 31;
            f[i] = fn_u2f(u) * 0x1p112f;
            e[i] = (field ? field : 1) - 15;
            b |= field == 31;
        }
    }
    bad |= b;
    wide |= w;
}

// Eight outputs of one row, one block of products: integers hold every cut term.  False: a term lies outside.
inline __attribute__((always_inline)) bool block_fast(v8f& acc, const float* a, const int* ea,
                                                      const float (*b)[8], const int (*eb)[8], int n,
                                                      int fraction) {
    const v8i field = ((v8i)acc >> 23) & 255;
    v8i top = field - 127;
    top = field == 0 ? (v8i){} - 126 : top;
    top = ((v8i)acc << 1) == 0 ? (v8i){} + kNone : top;
    v8f p[16];
    for (int k = 0; k < n; k++) {
        p[k] = *(const v8f*)b[k] * a[k];
        v8i e = *(const v8i*)eb[k] + ea[k];
        e = p[k] == 0.f ? (v8i){} + kNone : e;
        top = e > top ? e : top;
    }
    const v8i odd = ((top < -90) & (top != kNone)) | (top > 100);
    alignas(32) int flag[8];
    *(v8i*)flag = odd;
    if (flag[0] | flag[1] | flag[2] | flag[3] | flag[4] | flag[5] | flag[6] | flag[7]) return false;
    top = top == kNone ? (v8i){} : top;
    const v8f scale = (v8f)((fraction - top + 127) << 23), back = (v8f)((top - fraction + 127) << 23);
    v8i even = __builtin_convertvector(acc * scale, v8i), other = {};
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

}  // namespace

void set_mma_generation(unsigned generation) {
    if (generation >= 90)
        model = {25, 16, -133};
    else
        model = {24, 8, -132};
}

void mma(Warp& w, bool bf16) {
    alignas(32) u16 ha[16][16], hb[16][8];
    alignas(32) float a[16][16], b[16][8], c[16][8];
    alignas(32) int ea[16][16], eb[16][8];
    for (int l = 0; l < 32; l++) {
        const u32* r = w.mma_ab[l];
        const int g = l >> 2, t = 2 * (l & 3);
        for (int i = 0; i < 4; i++) memcpy(&ha[g + 8 * (i & 1)][t + 8 * (i >> 1)], r + i, 4);
        for (int i = 0; i < 2; i++) {
            hb[t + 8 * i][g] = (u16)r[4 + i];
            hb[t + 8 * i + 1][g] = (u16)(r[4 + i] >> 16);
        }
        memcpy(&c[g][t], w.mma_acc[l], 8);
        memcpy(&c[g + 8][t], w.mma_acc[l] + 2, 8);
    }
    int bad = 0, wide = 0;
    decode(&ha[0][0], 256, bf16, &a[0][0], &ea[0][0], bad, wide);
    decode(&hb[0][0], 128, bf16, &b[0][0], &eb[0][0], bad, wide);
    for (int i = 0; i < 128; i++) bad |= (fn_f2u((&c[0][0])[i]) >> 23 & 255) == 255;
    const bool fast = !bad && !wide;
    const Model m = model;
    for (int row = 0; row < 16; row++) {
        v8f acc = *(v8f*)c[row];
        for (int k0 = 0; k0 < 16; k0 += m.products) {
            const bool done =
                fast && (m.products == 16
                             ? block_fast(acc, a[row], ea[row], b, eb, 16, m.fraction)
                             : block_fast(acc, a[row] + k0, ea[row] + k0, b + k0, eb + k0, 8, m.fraction));
            if (done) continue;
            for (int col = 0; col < 8; col++) {
                float x[16], y[16];
                int e[16];
                for (int k = 0; k < m.products; k++) {
                    // the f16 fast decode turns an infinity into 65536: take the real value when one is there
                    x[k] = bad && !bf16 ? fn_h2f(ha[row][k0 + k]) : a[row][k0 + k];
                    y[k] = bad && !bf16 ? fn_h2f(hb[k0 + k][col]) : b[k0 + k][col];
                    e[k] = ea[row][k0 + k] + eb[k0 + k][col];
                }
                acc[col] = output_exact(acc[col], x, y, e, m.products, m);
            }
        }
        for (int col = 0; col < 8; col++)
            w.mma_acc[4 * (row & 7) + (col >> 1)][2 * (row >> 3) + (col & 1)] = acc[col];
    }
}

}  // namespace fnsim
