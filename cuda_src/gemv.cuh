// gemv.cuh: a warp's products of 16 outputs with up to 8 ROW_TILES rows; used by linear_gemv and moe_gemv_*.
//
//   FnPlace                        where a warp stands in a launch of blocks of FN_GEMV_THREADS
//   fn_weight_dot<Weights, ROW_TILES>(...) W 16 outputs x units of K x up to 8 ROW_TILES rows
//   fn_units_log2(units, blocks)   how many units of a dot a block takes
//   fn_with_weights<PLAIN, DEPTH>(format, job)    job.run<Weights>() of a format
//
// A block is one pair of tiles of 16 outputs, a warp a tile: small grids reach all SMs, and the critical path is
// one tile's.  On an H200 the scheduler issues in three of four cycles here, so fewer instructions are what is faster;
// pairs a warp, larger blocks and words through shared memory were not; nor were warps that take turns at one unit's
// chain and hand the sums on.  A block takes several units one behind the other where that fills the SMs evenly
// (fn_units_log2, KernelSpec.spread).  Fewer warps need their words earlier: DEPTH, k steps asked for ahead.
#pragma once
#include "exl3.cuh"

#define FN_GEMV_THREADS 64u

// ---- weights of a warp: a tile of 16 outputs, one k step of 16 at a time --------------------------------------

// Pairs of tiles count over the launch; half: the warp's tile of the pair.
struct FnPlace {
    u32 pair, half;
    FN_DEVICE FnPlace() : pair(blockIdx.x), half(threadIdx.x >> 5) {}
};

template <u32 W2, u32 CODEBOOK, u32 DEPTH> struct FnTrellis {
    enum : u32 {
        kDepth = W2 == 7 || W2 > 10 ? DEPTH / 2u : DEPTH,  // k steps asked for ahead
        kBf16 = 0,
        kShare = W2 == 6 || W2 == 10,  // a lane's last word comes from a lane before it
    };
    struct Step { u32 w[FnRing<W2>::kLoads]; };

    FnRing<W2> ring;
    const u8 *low, *other;  // this lane's words of the k step before the next
    u32 row_bytes, stride;  // one k step further; how far the next load goes

    FN_DEVICE FnTrellis(u64 w, u32, u32 n, u32 tile, u32 step0, u32 lane) : ring(lane) {
        row_bytes = n / 16u * FnRing<W2>::kTileBytes;
        low = reinterpret_cast<const u8*>(w) + (u64)step0 * row_bytes + tile * FnRing<W2>::kTileBytes;
        other = low + ring.high;
        if (FnRing<W2>::kLoads == 3 && !FnRing<W2>::kTwoOffsets) other = low;  // three offsets
        else low += ring.low;
        stride = row_bytes;
        low -= row_bytes, other -= row_bytes;
    }
    FN_DEVICE void load(u32, Step& s) {  // the next k step
        low += stride;
        if (!kShare && FnRing<W2>::kTwoOffsets) other += stride;
        if (kShare) {
            s.w[0] = fn_ldg(reinterpret_cast<const u32*>(low));
            if (W2 == 10) s.w[1] = fn_ldg(reinterpret_cast<const u32*>(low - 4));
        } else {
            ring.load_at(low, other, s.w);
        }
    }
    FN_DEVICE void advance(u32 n) { stride = n ? row_bytes : 0u; }
    FN_DEVICE void operand(const Step& s, u32 (&a)[4]) const {
        u32 state[8], w[FnRing<W2>::kLoads];
#pragma unroll
        for (u32 j = 0; j < FnRing<W2>::kLoads; j++) w[j] = s.w[j];
        if constexpr (kShare) {  // 3 bits: word 0 of the lane before, or of two before; 5 bits: its word 0 or 1
            u32 lane = threadIdx.x & 31u, last = (lane & 3u) == 3u;
            if (W2 == 6) w[1] = fn_shfl(w[0], lane - 1u - last & 31u);
            else w[2] = fn_shfl(last ? w[0] : w[1], lane - 1u & 31u);
        }
        ring.template states<true>(w, state);
        a[0] = fn_codebook2<CODEBOOK>(state[0], state[1]);
        a[1] = fn_codebook2<CODEBOOK>(state[4], state[5]);
        a[2] = fn_codebook2<CODEBOOK>(state[2], state[3]);
        a[3] = fn_codebook2<CODEBOOK>(state[6], state[7]);
    }
};

template <bool BF16, u32 DEPTH> struct FnPlain {
    enum : u32 { kDepth = BF16 ? 2 : DEPTH == 8 ? 10 : DEPTH, kBf16 = BF16 };  // units are often 20 or 40 steps
    struct Step { uint4 w; };

    const uint4* at;  // this lane's words at the next k step

    FN_DEVICE FnPlain(u64 w, u32 k, u32, u32 tile, u32 step0, u32 lane) {
        at = reinterpret_cast<const uint4*>(w) + ((u64)tile * (k / 16u) + step0) * 32u + lane;
    }
    FN_DEVICE void load(u32 i, Step& s) const { s.w = fn_ldg(at + 32u * i); }  // the i-th k step from here
    FN_DEVICE void advance(u32 n) { at += 32u * n; }
    FN_DEVICE void operand(const Step& s, u32 (&a)[4]) const {
        a[0] = s.w.x, a[1] = s.w.y, a[2] = s.w.z, a[3] = s.w.w;
    }
};

struct FnUnknown {  // of a format that nobody knows: NaN
    enum : u32 { kDepth = 1, kBf16 = 0 };
    struct Step {};

    FN_DEVICE FnUnknown(u64, u32, u32, u32, u32, u32) {}
    FN_DEVICE void load(u32, Step&) const {}
    FN_DEVICE void advance(u32) const {}
    FN_DEVICE void operand(const Step&, u32 (&a)[4]) const { a[0] = a[1] = a[2] = a[3] = 0x7fff7fffu; }
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

template <u32 ROW_TILES> FN_DEVICE void fn_clear(float (&d)[ROW_TILES][4]) {
#pragma unroll
    for (u32 r = 0; r < ROW_TILES; r++) d[r][0] = d[r][1] = d[r][2] = d[r][3] = 0.f;
}

// One k step: d[row tile] += weights x rows.
template <class Weights, u32 ROW_TILES>
FN_DEVICE void fn_dot_step(const Weights& weights, const typename Weights::Step& words,
                           const uint2 (&x)[ROW_TILES], float (&d)[ROW_TILES][4]) {
    u32 a[4];
    weights.operand(words, a);
#pragma unroll
    for (u32 r = 0; r < ROW_TILES; r++) {
        u32 b[2] = {x[r].x, x[r].y};
        if constexpr (Weights::kBf16 != 0) {
            u32 hi[2], lo[2];
            fn_bf16_split(b[0], hi[0], lo[0]);
            fn_bf16_split(b[1], hi[1], lo[1]);
            fn_mma_bf16(d[r], a, hi);
            fn_mma_bf16(d[r], a, lo);
        } else {
            fn_mma_f16(d[r], a, b);
        }
    }
}

// Outputs 16 tile .. + 15 of weights `data` (k inputs, n outputs) for n_units units of unit_k inputs, the first from
// input k0 on, k rising, every unit from zero accumulators.  Groups of kDepth steps: the words of the next group are
// asked for as those of this one are used, over the end of a unit too; the steps that make no group come last, unit by
// unit.  lane: threadIdx.x & 31, as fn_thread_here gives it where what follows from it would fill registers from the
// kernel's start on.
//   job.begin(rows)  once, behind the first words' loads: the operand rows at their start (this adds k0 and the
//                    lane's place), or false where there are none
//   job.store(d)     once a unit: with g = lane / 4 and t = lane % 4, d[r][0], [1] are output 16 tile + g of rows
//                    8 r + 2 t, + 1, and d[r][2], [3] are output + 8 of the same rows
template <class Weights, u32 ROW_TILES, class Job>
FN_DEVICE void fn_weight_dot(u64 data, u32 k, u32 n, u32 tile, u32 k0, u32 unit_k, u32 n_units, u32 lane, Job& job) {
    constexpr u32 depth = Weights::kDepth;
    Weights weights(data, k, n, tile, k0 / 16u, lane);
    typename Weights::Step words[depth];
    u32 n_steps = unit_k / 16u, of_unit = n_steps / depth, n_rest = n_steps - of_unit * depth;
    u32 left = n_rest ? 0u : of_unit;  // groups to the end of a unit; from 0 on there is none inside the loop
    u32 n_groups = n_rest ? of_unit : of_unit * n_units;
    if (of_unit) {
#pragma unroll
        for (u32 i = 0; i < depth; i++) weights.load(i, words[i]);
    }
    FnRows<ROW_TILES> rows;
    if (!job.begin(rows)) return;
    uint2 x[depth][ROW_TILES];
    float d[ROW_TILES][4];
    fn_clear(d);
#pragma unroll
    for (u32 r = 0; r < ROW_TILES; r++) rows.at[r] += k0 + 4u * (lane & 3u);
#pragma unroll 1
    while (true) {
        if (of_unit) {
#pragma unroll
            for (u32 i = 0; i < depth; i++) rows.load(i, x[i]);
#pragma unroll 1
            for (u32 n = n_groups; --n;) {
                weights.advance(depth);
                rows.advance(depth);
#pragma unroll
                for (u32 i = 0; i < depth; i++) {
                    fn_dot_step(weights, words[i], x[i], d);
                    weights.load(i, words[i]);
                    rows.load(i, x[i]);
                }
                if (--left == 0) {
                    job.store(d);
                    fn_clear(d);
                    left = of_unit;
                }
            }
#pragma unroll
            for (u32 i = 0; i < depth; i++) fn_dot_step(weights, words[i], x[i], d);
            weights.advance(depth);
            rows.advance(depth);
        }
#pragma unroll 1
        for (u32 i = 0; i < n_rest; i++) {
            weights.load(0, words[0]);
            rows.load(0, x[0]);
            fn_dot_step(weights, words[0], x[0], d);
            weights.advance(1);
            rows.advance(1);
        }
        job.store(d);
        if (!n_rest || --n_units == 0) return;
        fn_clear(d);
        if (of_unit) {
#pragma unroll
            for (u32 i = 0; i < depth; i++) weights.load(i, words[i]);
        }
    }
}

// log2 of the units a block takes when `blocks` share `units` of them: the fewest that do, a power of two.
FN_DEVICE u32 fn_units_log2(u32 units, u32 blocks) {
    u32 fewest = fn_clz(blocks) - fn_min_u32(fn_clz(units), fn_clz(blocks));
    return fewest + (blocks << fewest < units);
}

// job.run<Weights>() for the weights of that format.  Loops over several dots stand in the job, so what follows from
// the format is found once.
template <bool PLAIN, u32 DEPTH, class Job> FN_DEVICE void fn_with_weights(u32 format, Job& job) {
#define FN_TRELLIS(w2, codebook)                        \
    case FN_FORMAT_EXL3 | w2 << 8 | codebook << 16:     \
        job.template run<FnTrellis<w2, codebook, DEPTH>>();    \
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
#undef FN_TRELLIS
#undef FN_WIDTHS
    if constexpr (PLAIN) {
        if (format == FN_FORMAT_F16) {
            job.template run<FnPlain<false, DEPTH>>();
            return;
        }
        if (format == FN_FORMAT_BF16) {
            job.template run<FnPlain<true, DEPTH>>();
            return;
        }
    }
    job.template run<FnUnknown>();
}
