// synth_fill: writes 16-bit elements first .. first + count - 1 of a synthetic tensor to dst[at] and on.
// Contract    -> dst[at .. at + count - 1] u16: f16, bf16 or raw words by `kind`: 0 words, 1 rows, 2 signed, 3 bell,
//             4 uniform; rules in flashnext_drv/model/fill.py. dst 2-byte aligned, in any memory. Touches nothing else.
// Launch      grid (ceil((count + 7) / (8 * block))), block 256, no shared. A thread makes the elements of one
//             aligned 16-byte piece of dst, so stores coalesce whatever the alignment; the two ends go by element.
// Arithmetic  64- and 32-bit integers only: hash(key, j) = splitmix64 output j of the stream at key; no floats.
// Equality    same bytes as fill.fill_words for all arguments, on every device.
// Reference   ref/move.py synth_fill.
#include "prelude.cuh"

namespace FN_NAMESPACE {

FN_DEVICE u64 hash(u64 key, u64 j) {
    u64 x = key + (j + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// (sum of the 4 bytes of a draw - 510) >> 2, -128 .. 127
FN_DEVICE i32 bell(u32 draw) {
    u32 pairs = (draw & 0x00FF00FFu) + ((draw >> 8) & 0x00FF00FFu);
    return ((i32)((pairs & 0xFFFFu) + (pairs >> 16)) - 510) >> 2;
}

FN_DEVICE u32 draw(u64 key, u64 i) { return (u32)(hash(key, i >> 1) >> (32 * (u32)(i & 1))); }

// n * 2^-k as f16 or bf16 bits, |n| <= 256
FN_DEVICE u32 encode(i32 n, u32 k, u32 bf16) {
    u32 size = n < 0 ? (u32)-n : (u32)n;
    if (size == 0) return 0;
    u32 e = 31 - (u32)fn_clz(size);
    u32 bits = bf16 ? 7 : 10, bias = bf16 ? 127 : 15;
    u32 mantissa = ((size << 16) >> (e + 16 - bits)) & ((1u << bits) - 1);
    return (n < 0 ? 0x8000u : 0u) | ((e + bias - k) << bits) | mantissa;
}

}  // namespace FN_NAMESPACE

FN_KERNEL((u16* dst, u64 at, u64 first, u64 count, u64 key, u64 key2, u32 kind, u32 p0, u32 p1, u32 p2, u32 cols,
           u32 group_rows)) {
    using namespace FN_NAMESPACE;
    // Piece c covers dst[8 c - skew .. 8 c - skew + 7]: dst - skew is 16-byte aligned.
    dst += at;
    u64 skew = ((u64)dst >> 1) & 7;
    u64 begin = 8 * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
    if (begin >= count + skew) return;
    u32 from = begin < skew ? (u32)(skew - begin) : 0;
    u32 to = begin + 8 > count + skew ? (u32)(count + skew - begin) : 8;
    u64 i = first + begin - skew + from;             // element made first; wraps back into range at the left end
    u32 packed[4] = {0, 0, 0, 0};
    u64 row_at = 0, row = 0;
    if (kind == 1) row_at = i % p0;
    if (kind == 3 && cols != 0) {
        row = i / cols;
        row_at = i - row * cols;
    }
    u64 held = 0;
    for (u32 e = from; e < to; e++, i++) {
        u32 value;
        if (kind < 3) {
            if (e == from || (i & 3) == 0) held = hash(key, i >> 2);
            value = (u32)(held >> (16 * (u32)(i & 3))) & 0xFFFFu;
            if (kind == 1) {
                if (row_at == 0) value = p1 + (value & p2);
                if (++row_at == p0) row_at = 0;
            } else if (kind == 2) {
                value = (value & 0x8000u) | (p0 + ((value & 0x7FFFu) * p1 >> 15));
            }
        } else {
            if (e == from || (i & 1) == 0) held = hash(key, i >> 1);
            u32 x = (u32)(held >> (32 * (u32)(i & 1)));
            i32 n;
            if (kind == 4) {
                n = (i32)((x & 0xFFu) * p2 >> 8);
            } else {
                n = bell(x);
                if (cols != 0) {
                    i32 shared = bell(draw(key2, row / group_rows * cols + row_at));
                    n = ((i32)(p2 & 0xFFFFu) * n + (i32)(p2 >> 16) * shared) >> 7;
                    if (++row_at == cols) {
                        row_at = 0;
                        row++;
                    }
                }
                n >>= p0 >> 16;
            }
            value = encode(n + (i32)p1, p0 & 0xFFu, (p0 >> 8) & 1);
        }
        packed[e >> 1] |= value << (16 * (e & 1));
    }
    u16* piece = dst + (i64)(begin - skew);
    if (from == 0 && to == 8) {
        uint4 whole;
        whole.x = packed[0];
        whole.y = packed[1];
        whole.z = packed[2];
        whole.w = packed[3];
        *(uint4*)piece = whole;
    } else {
        for (u32 e = from; e < to; e++) piece[e] = (u16)(packed[e >> 1] >> (16 * (e & 1)));
    }
}
