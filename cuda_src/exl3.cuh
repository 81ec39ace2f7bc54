// exl3.cuh: products with weights, shared by linear_*, moe_* and all kernels that prepare or finish a linear.
//
// Public helpers (all lanes of a warp must call those marked W; v: a block's elements 4 lane .. 4 lane + 3):
//   fn_dot_segments(k, n, leaves)                   segments of a leaf, the rule of the orders
//   fn_unit_range(k, units, unit, k0, k1)           the k range of one unit
//   fn_frag_pos(k)                                  where element k of an operand row lies (fragment order)
//   fn_store_frag4(row, k, v)                       4 neighbouring f16 operand elements into fragment order
//   fn_tile_at(k_blocks, row, k)                    where an element of a tile image lies, in halves
//   fn_store_tile4(x, k_blocks, row, k, v)          4 neighbouring operand elements into a tile image
//   fn_load_h4(p, v), fn_load_early_h4              4 neighbouring f16 as f32; ahead of fn_wait_prior
//   fn_sum_units(part, leaves, segments, stride)    order part_sum_v1 of one output; fn_sum_units4: of 4
//   fn_exl3_rotate_in(v, suh)                     W x * suh, Hadamard
//   fn_exl3_rotate_out(v, svh)                    W Hadamard, * svh
//   fn_linear_store_input(v, linear, row, block)  W rotate (EXL3) or not, round to f16, store the operand
//   fn_linear_finish_block(linear, scale, rows_cap, row, block, v)  W sum of units, finished (EXL3: svh, bias)
//   fn_bf16_split(h2, hi, lo)                       two f16 into exact bf16 hi + lo
//   fn_weight_dot<ROW_TILES, PLAIN>(...)          W 32 outputs x one k range x up to 8 ROW_TILES rows
//
// Alignment: trellis data 4 bytes, plain data 16; suh, svh, bias, operand rows 8; part 16 where n % 4 == 0.
// Orders: exl3_dot_v1, plain_dot_v1, part_sum_v1, hadamard (ARITHMETIC.md).  Format: EXL3 notes 4, 5.
#pragma once
#include "prelude.cuh"
#include "warp.cuh"
#include "mma.cuh"
#include "tables.cuh"

// ---- units ------------------------------------------------------------------------------------------------

FN_DEVICE u32 fn_dot_segments(u32 k, u32 n, u32 leaves) {
    u32 leaf = k / leaves, s = 1;
#pragma unroll
    for (u32 i = 0; i < 5; i++)  // what fails for s fails for every larger one
        if (2u * s * n <= 49152u && (leaf & (32u * s - 1u)) == 0 && leaf >= 512u * s) s *= 2u;
    return s;
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

FN_DEVICE void fn_load_h4(const u16* p, float (&v)[4]) {
    uint2 h = fn_ldg(reinterpret_cast<const uint2*>(p));
    v[0] = fn_h2f((u16)h.x), v[1] = fn_h2f((u16)(h.x >> 16));
    v[2] = fn_h2f((u16)h.y), v[3] = fn_h2f((u16)(h.y >> 16));
}

// The same ahead of fn_wait_prior: the read-only path may be moved behind it, to where the values are used.
FN_DEVICE void fn_load_early_h4(const u16* p, float (&v)[4]) {
    uint2 h = fn_ld_here(reinterpret_cast<const uint2*>(p));
    v[0] = fn_h2f((u16)h.x), v[1] = fn_h2f((u16)(h.x >> 16));
    v[2] = fn_h2f((u16)h.y), v[3] = fn_h2f((u16)(h.y >> 16));
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

// v: finished outputs 128 block + 4 lane .. + 3; zero beyond n.  scale: svh of these outputs.
FN_DEVICE void fn_linear_finish_block(const FnLinear& linear, const float (&scale)[4], u32 rows_cap, u32 row,
                                      u32 block, float (&v)[4]) {
    u32 n = linear.n, at = 128u * block + 4u * (threadIdx.x & 31u);
    u64 stride = (u64)rows_cap * n;
    const float* part = reinterpret_cast<const float*>(linear.part) + (u64)row * n + at;
    if ((n & 3u) == 0 && at < n) {
        fn_sum_units4(part, linear.leaves, linear.segments, stride, v);
    } else {
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            v[i] = at + i < n ? fn_sum_units(part + i, linear.leaves, linear.segments, stride) : 0.f;
    }
    if (!fn_is_exl3(linear.w)) return;
    fn_hadamard128(v);
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = fn_mul(v[i], scale[i]);
    if (linear.bias) {
        float b[4];
        fn_load_h4(reinterpret_cast<const u16*>(linear.bias) + at, b);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = fn_add(v[i], b[i]);
    }
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

// ---- how linear_gemv and moe_gemv_* cut their work --------------------------------------------------------

// No choice changes a byte.  These are the ones that ship (WARP_TILES and BLOCK_PAIRS of kernels/exl3.py go
// with them); tools/bench_gemv.py times others beside these.
//   FN_WARP_TILES   tiles of a warp, 1 or 2;  FN_BLOCK_PAIRS  pairs of tiles of a block
//   FN_AHEAD        k steps of a trellis that are asked for ahead;  FN_AHEAD_PLAIN  of f16 weights
//   FN_ROLLED       1: the last group of k steps is no copy of the loop, which then asks for its words twice
//   FN_PREFETCH     all words of a unit are asked for at its start, into L2: 1 EXL3, 2 plain, 3 both
//   FN_SHARE        1: at 3 and 5 bits the last word of a lane comes from a lane before it
//   FN_TOP_WINDOW   1: at 3 bits a second shift in the place of one word, whose first window needs no mask
//   FN_WINDOW_MAD   of the windows in a lane's lowest word, how many are cut by a multiplication and a shift
//   FN_JOIN_MAD     of the four words of a fragment, how many are joined by a multiplication
// Multiplications go through another pipe than shifts, masks and byte selections: together they take turns.
#ifndef FN_WARP_TILES
#define FN_WARP_TILES 1
#endif
#ifndef FN_BLOCK_PAIRS
#define FN_BLOCK_PAIRS 1
#endif
#ifndef FN_AHEAD
#define FN_AHEAD 4
#endif
#ifndef FN_AHEAD_PLAIN
#define FN_AHEAD_PLAIN 4
#endif
#ifndef FN_ROLLED
#define FN_ROLLED 1
#endif
#ifndef FN_PREFETCH
#define FN_PREFETCH 0
#endif
#ifndef FN_SHARE
#define FN_SHARE 1
#endif
#ifndef FN_TOP_WINDOW
#define FN_TOP_WINDOW 1
#endif
#ifndef FN_WINDOW_MAD
#define FN_WINDOW_MAD 2
#endif
#ifndef FN_JOIN_MAD
#define FN_JOIN_MAD 2
#endif

// ---- codebooks: two 16-bit states -> two f16 weights in a word --------------------------------------------

FN_DEVICE u32 fn_codebook_halves(u32 x0, u32 x1) {
    x0 = (x0 & 0x8FFF8FFFu) ^ 0x3B603B60u;
    x1 = (x1 & 0x8FFF8FFFu) ^ 0x3B603B60u;
    return fn_hadd2(fn_prmt(x0, x1, 0x5410u), fn_prmt(x0, x1, 0x7632u));
}
// by_mad: join the two sums by a multiplication, which keeps another pipe busy than the byte selection.
template <u32 CODEBOOK> FN_DEVICE u32 fn_codebook2(u32 low, u32 high, bool by_mad = false) {
    if (CODEBOOK == 2) {  // mul1: f16(1024 + byte sum), one fma
        u32 h0 = fn_dp4a_u8(low * 0x83DCD12Du, 0x01010101u, 0x6400u);
        u32 h1 = fn_dp4a_u8(high * 0x83DCD12Du, 0x01010101u, 0x6400u);
        return fn_hfma2(by_mad ? h1 * 65536u + h0 : fn_prmt(h0, h1, 0x5410u), 0x1EEE1EEEu, 0xC931C931u);
    }
    if (CODEBOOK == 1) return fn_codebook_halves(low * 0xCBAC1FEDu, high * 0xCBAC1FEDu);  // mcg
    return fn_codebook_halves(low * 89226354u + 64248484u, high * 89226354u + 64248484u);  // 3inst
}


// a * b by the multiplier, where b is a power of two that a compiler would make a shift of.
FN_DEVICE u32 fn_mul_opaque(u32 a, u32 b) {
#ifndef FN_SIM
    asm("mul.lo.u32 %0, %1, %2;" : "=r"(a) : "r"(a), "r"(b));
    return a;
#else
    return a * b;
#endif
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
    // The same `tile` bytes behind two addresses: of words 0 and the last, or twice the tile's.
    FN_DEVICE void load_at(const u8* first, const u8* last, u32 tile, u32 (&w)[kLoads]) const {
        if (kLoads == 3 && !kTwoOffsets) return load(first + tile, w);
        w[0] = fn_ldg(reinterpret_cast<const u32*>(first + tile));
        if (kLoads == 3) w[1] = fn_ldg(reinterpret_cast<const u32*>(first + tile - 4));
        w[kLoads - 1] = fn_ldg(reinterpret_cast<const u32*>(last + tile));
    }
    FN_DEVICE void load_any(const u8* tile, u32 (&w)[kLoads]) const {  // from memory of any kind
        w[0] = fn_ld(reinterpret_cast<const u32*>(tile + low));
        if (kLoads == 3) w[1] = fn_ld(reinterpret_cast<const u32*>(kTwoOffsets ? tile + low - 4 : tile + middle));
        w[kLoads - 1] = fn_ld(reinterpret_cast<const u32*>(tile + high));
    }
    template <u32 OFFSET, bool LEAN> static FN_DEVICE u32 window(const u32 (&v)[3]) {
        constexpr u32 q = OFFSET / 32, r = OFFSET % 32;
        if (r == 0) return v[q] & 0xffffu;
        if (r == 8) return fn_prmt(v[q], 0, 0x4421u);
        if (r == 16) return v[q] >> 16;
        if (r < 16) return low_window<r < 16 ? r : 0, LEAN>(v[q]);
        return fn_funnel_r(v[q], v[q + 1 < 3 ? q + 1 : 2], r) & 0xffffu;
    }
    template <u32 R, bool LEAN> static FN_DEVICE u32 low_window(u32 v) {  // R below 16
        if (LEAN && R * 2u <= W2 * FN_WINDOW_MAD) return fn_mul_opaque(v, 1u << (16u - R)) >> 16;
        return v >> R & 0xffffu;
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
    // LEAN: as FN_TOP_WINDOW and FN_WINDOW_MAD say.
    template <bool LEAN = false> FN_DEVICE void states(const u32 (&w)[kLoads], u32 (&state)[8]) const {
        u32 v[3] = {0, 0, 0};
#pragma unroll
        for (u32 i = 0; i < kVector; i++)
            v[i] = kAligned ? w[i] : i + 1 < kLoads ? fn_funnel_r(w[i], w[i + 1], shift) : w[i] >> shift;
        if constexpr (LEAN && W2 == 6 && FN_TOP_WINDOW) {
            // shift is at most 24: bits 5 .. 36 begin in the first word
            u32 top = fn_funnel_r(w[0], w[1], shift + 5u);
            state[0] = top >> 16, state[1] = top >> 13 & 0xffffu;
            state[2] = low_window<15, LEAN>(v[0]), state[3] = low_window<12, LEAN>(v[0]);
            state[4] = low_window<9, LEAN>(v[0]), state[5] = low_window<6, LEAN>(v[0]);
            state[6] = low_window<3, LEAN>(v[0]), state[7] = v[0] & 0xffffu;
        } else if constexpr (W2 == 8) {
            pair<0, 4>(v, state), pair<1, 5>(v, state), pair<2, 6>(v, state), pair<3, 7>(v, state);
        } else if constexpr (W2 == 16) {
            pair<0, 2>(v, state), pair<1, 3>(v, state), pair<4, 6>(v, state), pair<5, 7>(v, state);
        } else if constexpr (W2 == 4) {
            pair<0, 4>(v, state), pair<1, 5>(v, state), pair<2, 6>(v, state), pair<3, 7>(v, state);
        } else if constexpr (W2 == 5) {
            pair<0, 3>(v, state), pair<2, 5>(v, state), pair<4, 7>(v, state);
            state[1] = window<fn_ring_behind(W2, 1), LEAN>(v);
            state[6] = window<fn_ring_behind(W2, 6), LEAN>(v);
        } else {
            state[0] = window<fn_ring_behind(W2, 0), LEAN>(v);
            state[1] = window<fn_ring_behind(W2, 1), LEAN>(v);
            state[2] = window<fn_ring_behind(W2, 2), LEAN>(v);
            state[3] = window<fn_ring_behind(W2, 3), LEAN>(v);
            state[4] = window<fn_ring_behind(W2, 4), LEAN>(v);
            state[5] = window<fn_ring_behind(W2, 5), LEAN>(v);
            state[6] = window<fn_ring_behind(W2, 6), LEAN>(v);
            state[7] = window<fn_ring_behind(W2, 7), LEAN>(v);
        }
    }
};

// ---- weights of a warp: FN_WARP_TILES neighbouring tiles of 16 outputs, one k step of 16 at a time ---------

// Where a warp stands: pairs of tiles count over the launch, tile0 is its first tile in the pair.
struct FnPlace {
    u32 pair, tile0;
    FN_DEVICE FnPlace() {
        u32 warp = threadIdx.x >> 5;
        pair = FN_BLOCK_PAIRS == 1 ? blockIdx.x : blockIdx.x * FN_BLOCK_PAIRS + warp * FN_WARP_TILES / 2u;
        tile0 = FN_WARP_TILES == 1 ? warp & 1u : 0u;
    }
};

template <u32 W2, u32 CODEBOOK> struct FnTrellis {
    enum : u32 {
        kDepth = W2 == 7 || W2 > 10 ? FN_AHEAD / 2 : FN_AHEAD,
        kBf16 = 0,
        kShare = FN_SHARE && (W2 == 6 || W2 == 10),
    };
    struct Step { u32 w[FN_WARP_TILES][FnRing<W2>::kLoads]; };

    FnRing<W2> ring;
    const u8 *low, *other;  // this lane's words of the k step before the next
    u32 row_bytes, stride;  // one k step further; how far the next load goes

    FN_DEVICE FnTrellis(u64 w, u32, u32 n, u32 pair, u32 tile0, u32 step0) : ring(threadIdx.x & 31u) {
        row_bytes = n / 16u * FnRing<W2>::kTileBytes;
        low = reinterpret_cast<const u8*>(w) + (u64)step0 * row_bytes + (2u * pair + tile0) * FnRing<W2>::kTileBytes;
        other = low + ring.high;
        if (FnRing<W2>::kLoads == 3 && !FnRing<W2>::kTwoOffsets) other = low;  // three offsets
        else low += ring.low;
        stride = row_bytes;
        low -= row_bytes, other -= row_bytes;
    }
    // The k steps behind the first kDepth, into L2.  Of what no load has moved yet.
    FN_DEVICE void prefetch(u32 n_steps) const {
        if (!(FN_PREFETCH & 1)) return;
        constexpr u32 bytes = FN_WARP_TILES * FnRing<W2>::kTileBytes;
        const u8* at = (FnRing<W2>::kLoads == 3 && !FnRing<W2>::kTwoOffsets ? low : low - ring.low);
#pragma unroll 1
        for (u32 i = kDepth + (threadIdx.x & 31u); i < n_steps; i += 32u) {
            const u8* row = at + (u64)(i + 1u) * row_bytes;
#pragma unroll
            for (u32 b = 0; b < bytes; b += 128u) fn_prefetch_l2(row + b);
            fn_prefetch_l2(row + bytes - 4u);
        }
    }
    FN_DEVICE void load(u32, Step& s) {  // the next k step
        low += stride;
        if (!kShare && (FnRing<W2>::kLoads == 2 || FnRing<W2>::kTwoOffsets)) other += stride;
#pragma unroll
        for (u32 t = 0; t < FN_WARP_TILES; t++) {
            const u32 tile = t * FnRing<W2>::kTileBytes;
            if (kShare) {
                s.w[t][0] = fn_ldg(reinterpret_cast<const u32*>(low + tile));
                if (W2 == 10) s.w[t][1] = fn_ldg(reinterpret_cast<const u32*>(low + tile - 4));
            } else {
                ring.load_at(low, other, tile, s.w[t]);
            }
        }
    }
    FN_DEVICE void advance(u32 n) { stride = n ? row_bytes : 0u; }
    FN_DEVICE void operand(const Step& s, int i, u32 (&a)[4]) const {
        u32 state[8], w[FnRing<W2>::kLoads];
#pragma unroll
        for (u32 j = 0; j < FnRing<W2>::kLoads; j++) w[j] = s.w[i][j];
        if constexpr (kShare) {  // 3 bits: word 0 of the lane before, or of two before; 5 bits: its word 0 or 1
            u32 lane = threadIdx.x & 31u, last = (lane & 3u) == 3u;
            if (W2 == 6) w[1] = fn_shfl(w[0], lane - 1u - last & 31u);
            else w[2] = fn_shfl(last ? w[0] : w[1], lane - 1u & 31u);
        }
        ring.template states<true>(w, state);
        a[0] = fn_codebook2<CODEBOOK>(state[0], state[1], FN_JOIN_MAD > 0);
        a[1] = fn_codebook2<CODEBOOK>(state[4], state[5], FN_JOIN_MAD > 2);
        a[2] = fn_codebook2<CODEBOOK>(state[2], state[3], FN_JOIN_MAD > 1);
        a[3] = fn_codebook2<CODEBOOK>(state[6], state[7], FN_JOIN_MAD > 3);
    }
};

template <bool BF16> struct FnPlain {
    enum : u32 { kDepth = BF16 ? 2 : FN_AHEAD_PLAIN, kBf16 = BF16 };
    struct Step { uint4 w[FN_WARP_TILES]; };

    const uint4* at[FN_WARP_TILES];  // this lane's words of the warp's tiles at the next k step

    FN_DEVICE FnPlain(u64 w, u32 k, u32 n, u32 pair, u32 tile0, u32 step0) {
        u32 steps = k / 16u;
        at[0] = reinterpret_cast<const uint4*>(w) + ((u64)(2u * pair + tile0) * steps + step0) * 32u;
        at[0] += threadIdx.x & 31u;
        if (FN_WARP_TILES == 2)  // none: not stored
            at[FN_WARP_TILES - 1] = at[0] + (16u * (2u * pair + 1u) < n ? 32u * steps : 0u);
    }
    FN_DEVICE void prefetch(u32 n_steps) const {  // as FnTrellis
        u32 lane = threadIdx.x & 31u;
        if (!(FN_PREFETCH & 2) || n_steps <= kDepth) return;
#pragma unroll
        for (u32 t = 0; t < FN_WARP_TILES; t++) {
#ifdef FN_HOPPER
            if (lane == 0)
                asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at[t] + 32u * kDepth),
                             "r"(512u * (n_steps - kDepth)));
#else
            for (u32 i = 4u * kDepth + lane; i < 4u * n_steps; i += 32u) fn_prefetch_l2(at[t] - lane + 8u * i);
#endif
        }
    }
    FN_DEVICE void load(u32 i, Step& s) const {  // the i-th k step from here
#pragma unroll
        for (u32 t = 0; t < FN_WARP_TILES; t++) s.w[t] = fn_ldg(at[t] + 32u * i);
    }
    FN_DEVICE void advance(u32 n) {
#pragma unroll
        for (u32 t = 0; t < FN_WARP_TILES; t++) at[t] += 32u * n;
    }
    FN_DEVICE void operand(const Step& s, int i, u32 (&a)[4]) const {
        a[0] = s.w[i].x, a[1] = s.w[i].y, a[2] = s.w[i].z, a[3] = s.w[i].w;
    }
};

// The warp's operand rows: lane 4 g + t reads row g (and g + 8).  Rows of an mma do not meet: where a row is
// missing any other stands in, and its sums are not stored.
template <u32 ROW_TILES> struct FnRows {
    const u16* at[ROW_TILES];  // the lane's row at the next k step, plus 4 t halves

    FN_DEVICE void load(u32 i, uint2 (&b)[ROW_TILES]) const {  // the i-th k step from here
#pragma unroll
        for (u32 r = 0; r < ROW_TILES; r++)
            b[r] = fn_ld_here(reinterpret_cast<const uint2*>(at[r] + 16u * i));
    }
    FN_DEVICE void advance(u32 n) {
#pragma unroll
        for (u32 r = 0; r < ROW_TILES; r++) at[r] += 16u * n;
    }
};

// One k step: d[tile][row tile] += weights x rows.
template <class Weights, u32 ROW_TILES>
FN_DEVICE void fn_dot_step(const Weights& weights, const typename Weights::Step& words,
                           const uint2 (&x)[ROW_TILES], float (&d)[FN_WARP_TILES][ROW_TILES][4]) {
#pragma unroll
    for (int tile = 0; tile < FN_WARP_TILES; tile++) {
        u32 a[4];
        weights.operand(words, tile, a);
#pragma unroll
        for (u32 r = 0; r < ROW_TILES; r++) {
            u32 b[2] = {x[r].x, x[r].y};
            if constexpr (Weights::kBf16 != 0) {
                u32 hi[2], lo[2];
                fn_bf16_split(b[0], hi[0], lo[0]);
                fn_bf16_split(b[1], hi[1], lo[1]);
                fn_mma_bf16(d[tile][r], a, hi);
                fn_mma_bf16(d[tile][r], a, lo);
            } else {
                fn_mma_f16(d[tile][r], a, b);
            }
        }
    }
}

// d += weights x rows over n_steps k steps, k rising.  Groups of kDepth steps: the words of the next group
// are asked for as those of this one are used; the steps that make no group come last.
template <class Weights, u32 ROW_TILES>
FN_DEVICE void fn_dot_run(Weights weights, FnRows<ROW_TILES> rows, u32 n_steps,
                          float (&d)[FN_WARP_TILES][ROW_TILES][4]) {
    constexpr u32 depth = Weights::kDepth;
    typename Weights::Step words[depth];
    uint2 x[depth][ROW_TILES];
    u32 n_groups = n_steps / depth, n_rest = n_steps - n_groups * depth;
    if (n_groups) {
        const Weights start = weights;
#pragma unroll
        for (u32 i = 0; i < depth; i++) weights.load(i, words[i]);
#pragma unroll
        for (u32 i = 0; i < depth; i++) rows.load(i, x[i]);
        if (FN_PREFETCH) start.prefetch(n_steps);
#pragma unroll 1
        while (FN_ROLLED ? n_groups-- : --n_groups) {
            u32 ahead = FN_ROLLED && !n_groups ? 0u : depth;
            weights.advance(ahead);
            rows.advance(ahead);
#pragma unroll
            for (u32 i = 0; i < depth; i++) {
                fn_dot_step(weights, words[i], x[i], d);
                weights.load(i, words[i]);
                rows.load(i, x[i]);
            }
        }
        if (!FN_ROLLED) {
#pragma unroll
            for (u32 i = 0; i < depth; i++) fn_dot_step(weights, words[i], x[i], d);
        }
        weights.advance(depth);
        rows.advance(depth);
    }
#pragma unroll 1
    while (n_rest--) {
        weights.load(0, words[0]);
        rows.load(0, x[0]);
        fn_dot_step(weights, words[0], x[0], d);
        weights.advance(1);
        rows.advance(1);
    }
}

// Outputs 32 pair + 16 tile0 .. of FN_WARP_TILES tiles of weights `data` of that format (k inputs, n outputs)
// over inputs k0 .. k1 - 1, from zero accumulators.  rows: at the row's start (this adds k0 and the lane's
// place).  With g = lane / 4 and t = lane % 4, d[i][r][0], [1] are output 32 pair + 16 (tile0 + i) + g of rows
// 8 r + 2 t, + 1, and d[i][r][2], [3] are output + 8 of the same rows.  Unknown formats give NaN.
template <u32 ROW_TILES, bool PLAIN>
FN_DEVICE void fn_weight_dot(u64 data, u32 format, u32 k, u32 n, u32 pair, u32 tile0, u32 k0, u32 k1,
                             FnRows<ROW_TILES> rows, float (&d)[FN_WARP_TILES][ROW_TILES][4]) {
    u32 n_steps = (k1 - k0) / 16u, step0 = k0 / 16u;
#pragma unroll
    for (u32 r = 0; r < ROW_TILES; r++) {
        rows.at[r] += k0 + 4u * (threadIdx.x & 3u);
#pragma unroll
        for (int i = 0; i < 4 * FN_WARP_TILES; i++) d[i >> 2][r][i & 3] = 0.f;
    }
#define FN_DOT(...) \
    fn_dot_run<__VA_ARGS__, ROW_TILES>(__VA_ARGS__(data, k, n, pair, tile0, step0), rows, n_steps, d)
#define FN_TRELLIS(w2, codebook)                    \
    case FN_FORMAT_EXL3 | w2 << 8 | codebook << 16: \
        FN_DOT(FnTrellis<w2, codebook>);            \
        return;
#define FN_WIDTHS(codebook)                                                                   \
    FN_TRELLIS(2, codebook) FN_TRELLIS(4, codebook) FN_TRELLIS(6, codebook) FN_TRELLIS(8, codebook) \
    FN_TRELLIS(10, codebook) FN_TRELLIS(12, codebook) FN_TRELLIS(14, codebook) FN_TRELLIS(16, codebook)
    switch (format) {
        FN_WIDTHS(0)
        FN_WIDTHS(1)
        FN_WIDTHS(2)
        FN_TRELLIS(3, 2)
        FN_TRELLIS(5, 2)
        FN_TRELLIS(7, 2)
    }
    if constexpr (PLAIN) {
        if (format == FN_FORMAT_F16) {
            FN_DOT(FnPlain<false>);
            return;
        }
        if (format == FN_FORMAT_BF16) {
            FN_DOT(FnPlain<true>);
            return;
        }
    }
#undef FN_DOT
#undef FN_TRELLIS
#undef FN_WIDTHS
#pragma unroll
    for (u32 r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int i = 0; i < 4 * FN_WARP_TILES; i++) d[i >> 2][r][i & 3] = fn_nan();
}
