// exl3.cuh: products with weights, shared by linear_*, moe_* and all kernels that prepare or finish a linear.
//
// Public helpers (all lanes of a warp must call those marked W; v: a block's elements 4 lane .. 4 lane + 3):
//   fn_dot_segments(k, n, leaves, least_log2), _log2(leaf, n, ..)   segments of a leaf, the rule of the orders
//   fn_unit_range(k, units, unit, k0, k1)           the k range of one unit
//   fn_frag_pos(k)                                  where element k of an operand row lies (fragment order)
//   fn_store_frag4(row, k, v)                       4 neighbouring f16 operand elements into fragment order
//   fn_tile_at(k_blocks, row, k)                    where an element of a tile image lies, in halves
//   fn_store_tile4(x, k_blocks, row, k, v)          4 neighbouring operand elements into a tile image
//   fn_load_h4(p, v), fn_load_early_h4, fn_widen_h4 4 neighbouring f16 as f32; ahead of fn_wait_prior; as loaded
//   fn_sum_units(part, leaves, segments, stride)    order part_sum_v1 of one output; fn_sum_units4: of 4
//   fn_exl3_rotate_in(v, suh)                     W x * suh, Hadamard
//   fn_exl3_rotate_out(v, svh)                    W Hadamard, * svh
//   fn_half_hadamard(v)                           W Hadamard of 16 rows, half a row a lane
//   fn_linear_store_input(v, linear, row, block)  W rotate (EXL3) or not, round to f16, store the operand
//   fn_bf16_split(h2, hi, lo)                       two f16 into exact bf16 hi + lo
//
// Alignment: trellis data 4 bytes, plain data 16; suh, svh, bias, operand rows 8; part 16 where n % 4 == 0.
// Orders: exl3_dot_v1, plain_dot_v1, part_sum_v1, hadamard (ARITHMETIC.md).  Format: EXL3 notes 4, 5.
#pragma once
#include "prelude.cuh"
#include "warp.cuh"
#include "mma.cuh"
#include "tables.cuh"

// ---- units ------------------------------------------------------------------------------------------------

#define FN_SEGMENT_LOG2 8u     // log2 of the fewest inputs of a segment
#define FN_GU_SEGMENT_LOG2 9u  // of the experts' gate and up

// log2 of a leaf's segments: the most s up to 32 with s n <= 49152, leaf % (16 s) == 0 and leaf >= s 2^least_log2, or
// 1.
FN_DEVICE u32 fn_dot_segments_log2(u32 leaf, u32 n, u32 least_log2 = FN_SEGMENT_LOG2) {
    i32 whole = 31 - (i32)fn_clz(n), by_n = 15 - whole - (2u * n > 3u << whole);
    i32 by_steps = (i32)fn_ffs(leaf) - 5, by_size = 31 - (i32)least_log2 - (i32)fn_clz(leaf);
    i32 least = by_n < by_steps ? by_n : by_steps;
    least = least < by_size ? least : by_size;
    return least < 0 ? 0u : least > 5 ? 5u : (u32)least;
}
FN_DEVICE u32 fn_dot_segments(u32 k, u32 n, u32 leaves, u32 least_log2 = FN_SEGMENT_LOG2) {
    return 1u << fn_dot_segments_log2(k / leaves, n, least_log2);
}

FN_DEVICE void fn_unit_range(u32 k, u32 units, u32 unit, u32& k0, u32& k1) {
    u32 size = k >> (fn_ffs(units) - 1u);  // units: a power of two
    k0 = unit * size;
    k1 = k0 + size;
}

FN_DEVICE float fn_sum_leaf(const float* part, u32 segments, u64 stride) {
    float sum = part[0];
    for (u32 s = 1; s < segments; s++) sum = fn_add(sum, part[s * stride]);
    return sum;
}

// part: the output's value of unit 0; stride: floats between units.  Segments of a leaf in rising order,
// leaves by the canonical tree ((0+1)+(2+3))+((4+5)+(6+7)); leaves is 1, 2, 4 or 8.
FN_DEVICE float fn_sum_units(const float* part, u32 leaves, u32 segments, u64 stride) {
    float sum = 0.f, one = 0.f, two = 0.f, four = 0.f;  // finished subtrees that wait for their neighbour
    for (u32 leaf = 0; leaf < leaves; leaf++) {
        sum = fn_sum_leaf(part + leaf * segments * stride, segments, stride);
        if (!(leaf & 1u)) { one = sum; continue; }
        sum = fn_add(one, sum);
        if (!(leaf & 2u)) { two = sum; continue; }
        sum = fn_add(two, sum);
        if (!(leaf & 4u)) { four = sum; continue; }
        sum = fn_add(four, sum);
    }
    return sum;
}

FN_DEVICE void fn_add4(float (&sum)[4], const float (&left)[4]) {  // sum = left + sum
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] = fn_add(left[i], sum[i]);
}
FN_DEVICE void fn_copy4(float (&to)[4], const float (&from)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = from[i];
}

// The same for four neighbouring outputs; part 16-byte aligned, stride a multiple of 4.
FN_DEVICE void fn_sum_units4(const float* part, u32 leaves, u32 segments, u64 stride, float (&v)[4]) {
    float one[4] = {0.f, 0.f, 0.f, 0.f}, two[4] = {0.f, 0.f, 0.f, 0.f}, four[4] = {0.f, 0.f, 0.f, 0.f};
    for (u32 leaf = 0; leaf < leaves; leaf++) {
        const float* at = part + leaf * segments * stride;
        float4 p = fn_ld(reinterpret_cast<const float4*>(at));
        v[0] = p.x, v[1] = p.y, v[2] = p.z, v[3] = p.w;
#pragma unroll 4
        for (u32 s = 1; s < segments; s++) {
            p = fn_ld(reinterpret_cast<const float4*>(at + s * stride));
            v[0] = fn_add(v[0], p.x), v[1] = fn_add(v[1], p.y);
            v[2] = fn_add(v[2], p.z), v[3] = fn_add(v[3], p.w);
        }
        if (!(leaf & 1u)) { fn_copy4(one, v); continue; }
        fn_add4(v, one);
        if (!(leaf & 2u)) { fn_copy4(two, v); continue; }
        fn_add4(v, two);
        if (!(leaf & 4u)) { fn_copy4(four, v); continue; }
        fn_add4(v, four);
    }
}

// ---- operands ---------------------------------------------------------------------------------------------

FN_DEVICE u32 fn_frag_pos(u32 k) {
    return (k & ~15u) + 4u * ((k & 7u) >> 1) + 2u * ((k >> 3) & 1u) + (k & 1u);
}

// Elements k .. k + 3 (k % 4 == 0) of an operand row that starts at `row`.
FN_DEVICE void fn_store_frag4(u16* row, u32 k, const float (&v)[4]) {
    u32* at = reinterpret_cast<u32*>(row + fn_frag_pos(k));
    at[0] = fn_pack_h2(v[0], v[1]);
    at[2] = fn_pack_h2(v[2], v[3]);
}

// Tile image: images of 64 rows x 64 k, 8 KiB each, k blocks of a row tile one after another; natural k order, the
// eight 16-byte chunks of a row's 64 k exchanged by xor with the row: what wgmma reads with 128-byte swizzle.
FN_DEVICE u64 fn_tile_at(u32 k_blocks, u32 row, u32 k) {
    u64 image = (u64)(row >> 6) * k_blocks + (k >> 6);
    return image * 4096u + (row & 63u) * 64u + ((((k >> 3) & 7u) ^ (row & 7u)) << 3) + (k & 7u);
}

// Elements k .. k + 3 (k % 4 == 0) of row `row` of the tile image at x.
FN_DEVICE void fn_store_tile4(u16* x, u32 k_blocks, u32 row, u32 k, const float (&v)[4]) {
    *reinterpret_cast<uint2*>(x + fn_tile_at(k_blocks, row, k)) =
        make_uint2(fn_pack_h2(v[0], v[1]), fn_pack_h2(v[2], v[3]));
}

FN_DEVICE void fn_widen_h4(uint2 h, float (&v)[4]) {
    v[0] = fn_h2f((u16)h.x), v[1] = fn_h2f((u16)(h.x >> 16));
    v[2] = fn_h2f((u16)h.y), v[3] = fn_h2f((u16)(h.y >> 16));
}

FN_DEVICE void fn_load_h4(const u16* p, float (&v)[4]) { fn_widen_h4(fn_ldg(reinterpret_cast<const uint2*>(p)), v); }

// The same ahead of fn_wait_prior: the read-only path may be moved behind it, to where the values are used.
FN_DEVICE void fn_load_early_h4(const u16* p, float (&v)[4]) {
    fn_widen_h4(fn_ld_here(reinterpret_cast<const uint2*>(p)), v);
}

// suh: of the block's first input.
FN_DEVICE void fn_exl3_rotate_in(float (&v)[4], const u16* suh) {
    float s[4];
    fn_load_h4(suh + 4u * (threadIdx.x & 31u), s);
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = fn_mul(v[i], s[i]);
    fn_hadamard128(v);
}

// svh: of the block's first output.
FN_DEVICE void fn_exl3_rotate_out(float (&v)[4], const u16* svh) {
    float s[4];
    fn_load_h4(svh + 4u * (threadIdx.x & 31u), s);
    fn_hadamard128(v);
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = fn_mul(v[i], s[i]);
}

// The bytes of fn_hadamard128 for each of 16 rows, half a row a lane: lane l has 64 elements of row l & 15, the half
// l >> 4; in upper lanes with the two quarters exchanged (v[i] is element i ^ 32 of the 64), so that both lanes of a
// row send the same registers.  Stages in the order of index bits 0 .. 6, lower a + b, upper a - b, then times
// 1/sqrt(128).  v[i] becomes element i of the first 64, v[32 + i] of the last; + 32 in upper lanes.
// Factors of 1 and -1 are exact: a product and its sum round once.
FN_DEVICE void fn_half_hadamard(float (&v)[64]) {
    const float sign = threadIdx.x & 16u ? -1.f : 1.f;
#pragma unroll
    for (u32 bit = 1; bit < 32u; bit <<= 1)
#pragma unroll
        for (u32 i = 0; i < 64; i++) {
            if (i & bit) continue;
            float a = v[i], b = v[i | bit];
            v[i] = fn_add(a, b);
            v[i | bit] = fn_sub(a, b);
        }
#pragma unroll
    for (u32 i = 0; i < 32; i++) {  // bit 5: in upper lanes v[i] is the one whose bit is set
        float mine = fn_fma(v[i], sign, v[i + 32u]), sent = fn_fma(v[i + 32u], -sign, v[i]);
        float other = fn_shfl_xor(sent, 16u);
        v[i] = fn_mul(fn_add(mine, other), 0.088388347648f);
        v[i + 32u] = fn_mul(fn_fma(mine, sign, fn_mul(other, -sign)), 0.088388347648f);
    }
}

FN_DEVICE bool fn_is_exl3(const FnWeight& w) { return (w.format & 255u) == FN_FORMAT_EXL3; }

// v: finished operand elements k .. k + 3 of the row; beyond linear.k nothing is stored.
FN_DEVICE void fn_linear_store_operand(const float (&v)[4], const FnLinear& linear, u32 row, u32 k) {
    if (k >= linear.k) return;
    u16* x = reinterpret_cast<u16*>(linear.x);
    if (linear.tiled) {
        fn_store_tile4(x, (linear.k + 63u) / 64u, row, k, v);
    } else {
        fn_store_frag4(x + (u64)row * linear.x_stride, k, v);
    }
}

// v: inputs 128 block + 4 lane .. + 3 of the row (any value beyond k, which only plain weights have).
FN_DEVICE void fn_linear_store_input(float (&v)[4], const FnLinear& linear, u32 row, u32 block) {
    u32 k = 128u * block + 4u * (threadIdx.x & 31u);
    if (fn_is_exl3(linear.w)) fn_exl3_rotate_in(v, reinterpret_cast<const u16*>(linear.w.suh) + 128u * block);
    fn_linear_store_operand(v, linear, row, k);
}

// hi = bf16(x) (RN), lo = x - hi, which bf16 holds exactly; lo is +0 where hi is not finite.
FN_DEVICE void fn_bf16_split(u32 h2, u32& hi, u32& lo) {
    u16 h[2], l[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float x = fn_h2f((u16)(h2 >> 16 * i));
        h[i] = fn_f2b(x);
        l[i] = (h[i] & 0x7f80u) == 0x7f80u ? (u16)0 : fn_f2b(fn_sub(x, fn_b2f(h[i])));
    }
    hi = fn_pack_h2(h[0], h[1]);
    lo = fn_pack_h2(l[0], l[1]);
}

// ---- codebooks: two 16-bit states -> two f16 weights in a word --------------------------------------------

FN_DEVICE u32 fn_codebook_halves(u32 x0, u32 x1) {
    x0 = (x0 & 0x8FFF8FFFu) ^ 0x3B603B60u;
    x1 = (x1 & 0x8FFF8FFFu) ^ 0x3B603B60u;
    return fn_hadd2(fn_prmt(x0, x1, 0x5410u), fn_prmt(x0, x1, 0x7632u));
}
template <u32 CODEBOOK> FN_DEVICE u32 fn_codebook2(u32 low, u32 high) {
    if (CODEBOOK == 2) {  // mul1: f16(1024 + byte sum), one fma
        u32 h0 = fn_dp4a_u8(low * 0x83DCD12Du, 0x01010101u, 0x6400u);
        u32 h1 = fn_dp4a_u8(high * 0x83DCD12Du, 0x01010101u, 0x6400u);
        return fn_hfma2(fn_prmt(h0, h1, 0x5410u), 0x1EEE1EEEu, 0xC931C931u);
    }
    if (CODEBOOK == 1) return fn_codebook_halves(low * 0xCBAC1FEDu, high * 0xCBAC1FEDu);  // mcg
    return fn_codebook_halves(low * 89226354u + 64248484u, high * 89226354u + 64248484u);  // 3inst
}

// ---- the tile's ring --------------------------------------------------------------------------------------

// Width w2 / 2 bits.  Lane l owns stream positions 8 l .. 8 l + 7; its windows end at stream bit
// 4 w2 (l + 1), and window j ends fn_ring_behind(w2, j) bits earlier.
FN_DEVICE constexpr u32 fn_ring_behind(u32 w2, u32 j) { return 4 * w2 - (j + 1) * w2 / 2; }
// Bits from the start of a lane's first window to the end of the word in which its last one ends, at most.
FN_DEVICE constexpr u32 fn_ring_span(u32 w2) {
    u32 most = 0;
    for (u32 lane = 0; lane < 32; lane++) {
        u32 bits = (32 - 4 * w2 * (lane + 1) % 32) % 32 + 16 + fn_ring_behind(w2, 0);
        if (bits > most) most = bits;
    }
    return most;
}

template <u32 W2> struct FnRing {
    enum : u32 {  // not static members: those would become device variables
        kWords = 4 * W2,                                    // 32-bit words of a tile
        kTileBytes = 16 * W2,
        kAligned = W2 % 8 == 0,                             // every lane's windows end with a word
        kVector = (16 + fn_ring_behind(W2, 0) + 31) / 32,   // words that hold all windows of a lane, shifted
        kLoads = (fn_ring_span(W2) + 31) / 32,              // words that hold them, as stored
        kTwoOffsets = kLoads == 2 || W2 >= 10,              // from 5 bits on word 1 lies just below word 0
    };
    static_assert(kLoads == 2 || kLoads == 3, "two or three words a lane");

    u32 shift, low, middle, high;  // bits behind the last window; byte offsets of words 0, 1 and the last

    FN_DEVICE FnRing(u32 lane) {
        u32 end = 4 * W2 * (lane + 1), word = (end - 1) >> 5;
        shift = (0u - end) & 31u;
        low = 4u * word;
        middle = 4u * ((word + kWords - 1) % kWords);
        high = 4u * ((word + kWords - (kLoads - 1)) % kWords);
    }
    FN_DEVICE void load(const u8* tile, u32 (&w)[kLoads]) const {
        w[0] = fn_ldg(reinterpret_cast<const u32*>(tile + low));
        if (kLoads == 3)
            w[1] = fn_ldg(reinterpret_cast<const u32*>(kTwoOffsets ? tile + low - 4 : tile + middle));
        w[kLoads - 1] = fn_ldg(reinterpret_cast<const u32*>(tile + high));
    }
    // The same behind the addresses of word 0 and of the last one, or twice the tile's.
    FN_DEVICE void load_at(const u8* first, const u8* last, u32 (&w)[kLoads]) const {
        if (kLoads == 3 && !kTwoOffsets) return load(first, w);
        w[0] = fn_ldg(reinterpret_cast<const u32*>(first));
        if (kLoads == 3) w[1] = fn_ldg(reinterpret_cast<const u32*>(first - 4));
        w[kLoads - 1] = fn_ldg(reinterpret_cast<const u32*>(last));
    }
    FN_DEVICE void load_any(const u8* tile, u32 (&w)[kLoads]) const {  // from memory of any kind
        w[0] = fn_ld(reinterpret_cast<const u32*>(tile + low));
        if (kLoads == 3) w[1] = fn_ld(reinterpret_cast<const u32*>(kTwoOffsets ? tile + low - 4 : tile + middle));
        w[kLoads - 1] = fn_ld(reinterpret_cast<const u32*>(tile + high));
    }
    template <u32 OFFSET> static FN_DEVICE u32 window(const u32 (&v)[3]) {
        constexpr u32 q = OFFSET / 32, r = OFFSET % 32;
        if (r == 0) return v[q] & 0xffffu;
        if (r == 8) return fn_prmt(v[q], 0, 0x4421u);
        if (r == 16) return v[q] >> 16;
        if (r < 16) return v[q] >> r & 0xffffu;
        return fn_funnel_r(v[q], v[q + 1 < 3 ? q + 1 : 2], r) & 0xffffu;
    }
    // Windows J and LATER, 8 or 16 bits behind it (nearer to the end), from one word: a shift less.
    template <u32 J, u32 LATER> static FN_DEVICE void pair(const u32 (&v)[3], u32 (&state)[8]) {
        constexpr u32 offset = fn_ring_behind(W2, LATER), q = offset / 32, r = offset % 32;
        constexpr u32 apart = fn_ring_behind(W2, J) - offset;
        static_assert(apart == 8 || apart == 16, "two windows of one word");
        u32 both = r ? fn_funnel_r(v[q], v[q + 1 < 3 ? q + 1 : 2], r) : v[q];
        state[LATER] = both & 0xffffu;
        state[J] = apart == 16 ? both >> 16 : fn_prmt(both, 0, 0x4421u);
    }
    // LEAN: 3 bits with a second shift in the place of one word, whose first window needs no mask.
    template <bool LEAN = false> FN_DEVICE void states(const u32 (&w)[kLoads], u32 (&state)[8]) const {
        u32 v[3] = {0, 0, 0};
#pragma unroll
        for (u32 i = 0; i < kVector; i++)
            v[i] = kAligned ? w[i] : i + 1 < kLoads ? fn_funnel_r(w[i], w[i + 1], shift) : w[i] >> shift;
        if constexpr (LEAN && W2 == 6) {
            // shift is at most 24: bits 5 .. 36 begin in the first word
            u32 top = fn_funnel_r(w[0], w[1], shift + 5u);
            state[0] = top >> 16, state[1] = top >> 13 & 0xffffu;
            state[2] = v[0] >> 15 & 0xffffu, state[3] = v[0] >> 12 & 0xffffu;
            state[4] = v[0] >> 9 & 0xffffu, state[5] = v[0] >> 6 & 0xffffu;
            state[6] = v[0] >> 3 & 0xffffu, state[7] = v[0] & 0xffffu;
        } else if constexpr (W2 == 8) {
            pair<0, 4>(v, state), pair<1, 5>(v, state), pair<2, 6>(v, state), pair<3, 7>(v, state);
        } else if constexpr (W2 == 16) {
            pair<0, 2>(v, state), pair<1, 3>(v, state), pair<4, 6>(v, state), pair<5, 7>(v, state);
        } else if constexpr (W2 == 4) {
            pair<0, 4>(v, state), pair<1, 5>(v, state), pair<2, 6>(v, state), pair<3, 7>(v, state);
        } else if constexpr (W2 == 5) {
            pair<0, 3>(v, state), pair<2, 5>(v, state), pair<4, 7>(v, state);
            state[1] = window<fn_ring_behind(W2, 1)>(v);
            state[6] = window<fn_ring_behind(W2, 6)>(v);
        } else {
            state[0] = window<fn_ring_behind(W2, 0)>(v);
            state[1] = window<fn_ring_behind(W2, 1)>(v);
            state[2] = window<fn_ring_behind(W2, 2)>(v);
            state[3] = window<fn_ring_behind(W2, 3)>(v);
            state[4] = window<fn_ring_behind(W2, 4)>(v);
            state[5] = window<fn_ring_behind(W2, 5)>(v);
            state[6] = window<fn_ring_behind(W2, 6)>(v);
            state[7] = window<fn_ring_behind(W2, 7)>(v);
        }
    }
};
