// deep.cuh: products of prompt kernels: 128 outputs of a weight matrix with a tile of up to 256 rows.
//
// A block is 384 threads: eight warps that compute 16 outputs each, and four of which two load.  The sums are those
// of linear_gemv and linear_finish, byte for byte: one chain of k16 mma steps a unit, k rising, from zero (orders
// exl3_dot_v1, plain_dot_v1), units added by part_sum_v1.
//   sm_90a   the loading warps bring weights and rows of 64 k at a time into a ring in shared memory (bulk copies,
//            mbarriers), also for the product after the present one.  A warpgroup decodes the weights of 64 outputs
//            into registers, the A operand of wgmma.  The more rows a decoded weight meets the better: "wide"
//            products take 256, with the sums of units, or a leaf that waits for its neighbour, half in shared
//            memory; the others 128 or 64.
//            bf16 weights take mma.sync there too: their operand has two halves.
//   else     all threads copy the rows of 64 k; weights come from memory; mma.sync, 128 rows at a time.
//
// Use, by all threads of the block, which strides over the tiles of the launch:
//   FN_SHARED(Kernel's struct with an FnDeepShared, s);
//   Tiles tiles(...);
//   FnDeep<KIND>(s.deep).run(tiles);
// Tiles has
//   PRODUCTS                        of a tile, one after the other
//   count()                         tiles of the launch
//   take(i)                         from now on tile i; false: there is nothing to do.  Tiles of more than 128 rows
//                                   come before all others
//   weights(p), rows(p)             of product p
//   begin(deep, p, n)               by the threads that compute, before the product of the tile's n rows; asks for
//                                   scales by deep.bring, which are there for finish
//   finish(deep, p, first, n)       by all warps that compute: rows first .. first + n - 1 of product p's tile, 128 at
//                                   most, are there for deep.output, or a warp's own 16 for deep.rotate, quad and
//                                   store_rotated
// All wide products of a block come before its others: they use the shared memory differently.  What is not wide is
// taken in parts of 128 rows.
//
// Alignment: trellis and plain data 16 bytes, tile images 1024.
//
// Over 500 lines: one walk in its forms, which share the ring, its barriers and the finished tile.
#pragma once
#include "async.cuh"
#include "exl3.cuh"
#include "hopper.cuh"

#define FN_DEEP_THREADS 384u
#define FN_DEEP_WARPS 8u      // that compute
#define FN_DEEP_ALL 0u        // kinds of weights
#define FN_DEEP_PLAIN 1u
#define FN_DEEP_EXL3 2u
#define FN_DEEP_ROWS 256u     // of a whole tile
#define FN_DEEP_STAGES 4u     // of the ring, two slots each: halves of the rows (wide products) or rows and weights
#define FN_DEEP_SLOTS 8u      // of the ring
#define FN_DEEP_WORDS 6144u   // most bytes of 128 outputs and 64 k in a wide product

// The weights of a tile of 128 outputs.  Warp i takes outputs 16 n(i) .. + 15, n(i) = first + (i / 2) step + i % 2:
// a plain linear has step 2.  Warps with n(i) >= limit have nothing: their sums mean nothing.
struct FnDeepWeights {
  FnWeight w;
  u32 k, n, first, step, limit, leaves, segments;

  FN_DEVICE u32 tile(u32 warp) const { return first + (warp >> 1) * step + (warp & 1u); }
};

// A tile of rows: x is the tile image at the tile's first row, a multiple of 64; live: rows that mean something.
struct FnDeepRows {
  const u16* x;
  u32 k_blocks, live;
};

struct FnDeepShared {
#ifdef FN_HOPPER
    // The finished tile of 128 rows, before that sums of a wide product; then the ring, 16 KB a slot.
    u8 slots[4u + FN_DEEP_SLOTS][16384];
    u8 words[FN_DEEP_STAGES][FN_DEEP_WORDS];  // weights of a wide product: [step][warp]
    u16 scales[2][128];
    u64 full[FN_DEEP_SLOTS], empty[FN_DEEP_SLOTS], idle;
#else
    u8 slots[4][16384];  // the finished tile of 128 rows
    u8 rows[16384];      // two images
    u16 scales[2][128];
#endif
};

// ---- one step ---------------------------------------------------------------------------------------------

template <u32 W2, u32 CODEBOOK, u32 STEPS>
FN_DEVICE void fn_deep_decode(const u8* tile, u32 stride, u32 n_steps, u32 (&a)[STEPS][4]) {
    FnRing<W2> ring(fn_thread_here() & 31u);
#pragma unroll
    for (u32 s = 0; s < STEPS; s++) {
        if (s >= n_steps) return;
        u32 words[FnRing<W2>::kLoads], state[8];
        ring.load_any(tile + s * stride, words);
        ring.states(words, state);
        a[s][0] = fn_codebook2<CODEBOOK>(state[0], state[1]);
        a[s][1] = fn_codebook2<CODEBOOK>(state[4], state[5]);
        a[s][2] = fn_codebook2<CODEBOOK>(state[2], state[3]);
        a[s][3] = fn_codebook2<CODEBOOK>(state[6], state[7]);
    }
}

// Plain weights of up to STEPS k steps; NaN where the format is none that is known.
template <u32 STEPS>
FN_DEVICE void fn_deep_plain(bool known, const u8* at, u32 stride, u32 n_steps, u32 (&a)[STEPS][4]) {
#pragma unroll
    for (u32 s = 0; s < STEPS; s++) {
        if (s >= n_steps) return;
        uint4 w = make_uint4(0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu);
        if (known) w = fn_ld(reinterpret_cast<const uint4*>(at + s * stride) + (fn_thread_here() & 31u));
        a[s][0] = w.x, a[s][1] = w.y, a[s][2] = w.z, a[s][3] = w.w;
    }
}

// The mma operands of up to STEPS k steps of one warp's 16 outputs.  at: its words at the first step; stride: bytes
// to the next step's.
template <u32 KIND, u32 STEPS>
FN_DEVICE void fn_deep_operand(u32 format, const u8* at, u32 stride, u32 n_steps, u32 (&a)[STEPS][4]) {
#define FN_TRELLIS(w2, codebook)                                  \
    case FN_FORMAT_EXL3 | w2 << 8 | codebook << 16:               \
        fn_deep_decode<w2, codebook>(at, stride, n_steps, a);     \
        return;
#define FN_WIDTHS(codebook)                                                                         \
    FN_TRELLIS(2, codebook) FN_TRELLIS(4, codebook) FN_TRELLIS(6, codebook) FN_TRELLIS(8, codebook) \
    FN_TRELLIS(10, codebook) FN_TRELLIS(12, codebook) FN_TRELLIS(14, codebook) FN_TRELLIS(16, codebook)
    if constexpr (KIND != FN_DEEP_PLAIN) {
        switch (format) {
            FN_WIDTHS(0)
            FN_WIDTHS(1)
            FN_WIDTHS(2)
            FN_TRELLIS(3, 2)
            FN_TRELLIS(5, 2)
            FN_TRELLIS(7, 2)
        }
    }
#undef FN_TRELLIS
#undef FN_WIDTHS
    fn_deep_plain(format == FN_FORMAT_F16 || format == FN_FORMAT_BF16, at, stride, n_steps, a);
}

#ifdef FN_HOPPER
// One warp's weights of a block of 64 k in shared memory: loaded at once, decoded step by step.
template <u32 W2, u32 CODEBOOK> struct FnDeepTrellis {
    FnRing<W2> ring;
    u32 words[4][FnRing<W2>::kLoads];

    FN_DEVICE explicit FnDeepTrellis(u32) : ring(fn_thread_here() & 31u) {}
    FN_DEVICE void load(const u8* stage, u32 warp) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) ring.load_any(stage + (i * FN_DEEP_WARPS + warp) * 16u * W2, words[i]);
    }
    FN_DEVICE void operand(u32 step, u32 (&a)[4]) const {
        u32 state[8];
        ring.states(words[step], state);
        a[0] = fn_codebook2<CODEBOOK>(state[0], state[1]);
        a[1] = fn_codebook2<CODEBOOK>(state[4], state[5]);
        a[2] = fn_codebook2<CODEBOOK>(state[2], state[3]);
        a[3] = fn_codebook2<CODEBOOK>(state[6], state[7]);
    }
};
// The same for f16, from shared memory step by step.
struct FnDeepPlain {
    const uint4* at;

    FN_DEVICE explicit FnDeepPlain(u32) : at(nullptr) {}
    FN_DEVICE void load(const u8* stage, u32 warp) {
        at = reinterpret_cast<const uint4*>(stage + 2048u * warp) + (fn_thread_here() & 31u);
    }
    FN_DEVICE void operand(u32 step, u32 (&a)[4]) const {
        uint4 w = at[32u * step];
        a[0] = w.x, a[1] = w.y, a[2] = w.z, a[3] = w.w;
    }
};
// The same for any format: for those that are rare, as each form above is a loop of its own.
template <u32 KIND> struct FnDeepAny {
    const u8* at;
    u32 format, stride;

    FN_DEVICE explicit FnDeepAny(u32 format) : at(nullptr), format(format), stride(512u) {}
    FN_DEVICE void load(const u8* stage, u32 warp) {
        bool exl3 = KIND != FN_DEEP_PLAIN && (format & 255u) == FN_FORMAT_EXL3;
        u32 bytes = exl3 ? 16u * (format >> 8 & 255u) : 512u;
        at = stage + warp * (exl3 ? bytes : 2048u);
        if (exl3) stride = FN_DEEP_WARPS * bytes;
    }
    FN_DEVICE void operand(u32 step, u32 (&a)[4]) const {
        u32 one[1][4];
        fn_deep_operand<KIND>(format, at + step * stride, stride, 1u, one);
#pragma unroll
        for (u32 i = 0; i < 4; i++) a[i] = one[0][i];
    }
};
#endif

// d += weights x rows for step `step` (0..3) of the images in shared memory, by mma.sync, for n_tiles of 8 rows.
template <u32 ROW_TILES>
FN_DEVICE void fn_deep_step(const u8* image, u32 step, const u32 (&a)[4], bool bf16, u32 n_tiles,
                            float (&d)[ROW_TILES][4]) {
    u32 lane = fn_thread_here() & 31u, chunk = 2u * step + (lane >> 3 & 1u), row = 8u * (lane >> 4) + (lane & 7u);
    const u8* at = image + row * 128u + ((chunk ^ (row & 7u)) << 4);
#pragma unroll
    for (u32 j = 0; j < ROW_TILES; j += 2) {
        if (j >= n_tiles) return;
        u32 r[4];
        fn_ldmatrix_x4(r, at + j * 1024u);
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            u32 b[2] = {r[2 * i], r[2 * i + 1]};
            if (bf16) {
                u32 hi[2], lo[2];
                fn_bf16_split(b[0], hi[0], lo[0]);
                fn_bf16_split(b[1], hi[1], lo[1]);
                fn_mma_bf16(d[j + i], a, hi);
                fn_mma_bf16(d[j + i], a, lo);
            } else {
                fn_mma_f16(d[j + i], a, b);
            }
        }
    }
}

template <u32 ROW_TILES> FN_DEVICE void fn_deep_set(float (&d)[ROW_TILES][4], float value) {
#pragma unroll
    for (u32 j = 0; j < ROW_TILES; j++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) d[j][i] = value;
}

// ---- sums of units ----------------------------------------------------------------------------------------

// part_sum_v1 as the units come: segments of a leaf rising, from -0, the one number that leaves every other as it is
// when it is added to it.  A finished subtree waits for its neighbour: a leaf in shared memory, where the tile will
// lie, those of two and of four leaves, which are rarer, in local memory.
template <u32 ROW_TILES, bool LEAVES> struct FnDeepSum {
    u32 leaf = 0, segment = 0;  // of the next unit
    float4* waiting_leaf;       // of the thread
    float waiting[2][ROW_TILES][4];

    FN_DEVICE FnDeepSum(float (&sum)[ROW_TILES][4], u8* tile)
        : waiting_leaf(reinterpret_cast<float4*>(tile) + fn_thread_here()) {
        fn_deep_set(sum, -0.f);
    }
    FN_DEVICE void add(u32 leaves, u32 segments, const float (&d)[ROW_TILES][4], float (&sum)[ROW_TILES][4]) {
#pragma unroll
        for (u32 j = 0; j < ROW_TILES; j++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) sum[j][i] = fn_add(sum[j][i], d[j][i]);
        if (!LEAVES || ++segment < segments || leaves == 1u) return;
        segment = 0;
        u32 present = leaf++;
        if (!(present & 1u)) {
#pragma unroll
            for (u32 j = 0; j < ROW_TILES; j++)
                waiting_leaf[32u * FN_DEEP_WARPS * j] = make_float4(sum[j][0], sum[j][1], sum[j][2], sum[j][3]);
        } else {
#pragma unroll
            for (u32 j = 0; j < ROW_TILES; j++) {
                float4 w = waiting_leaf[32u * FN_DEEP_WARPS * j];
                sum[j][0] = fn_add(w.x, sum[j][0]), sum[j][1] = fn_add(w.y, sum[j][1]);
                sum[j][2] = fn_add(w.z, sum[j][2]), sum[j][3] = fn_add(w.w, sum[j][3]);
            }
            u32 level = 0;
#pragma unroll 1
            for (; present >> (level + 1u) & 1u; level++)
#pragma unroll
                for (u32 j = 0; j < ROW_TILES; j++)
#pragma unroll
                    for (u32 i = 0; i < 4; i++) sum[j][i] = fn_add(waiting[level][j][i], sum[j][i]);
            if (leaf == leaves) return;
#pragma unroll
            for (u32 j = 0; j < ROW_TILES; j++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) waiting[level][j][i] = sum[j][i];
        }
        fn_deep_set(sum, -0.f);
    }
};

// ---- the walk over K --------------------------------------------------------------------------------------

// KIND: what weights there may be; less means less code.
template <u32 KIND = FN_DEEP_ALL> struct FnDeep {
    FnDeepShared& s;
    u32 slot = 0;             // of the ring
    u32 parity = 0;           // a bit a slot: of the phase of its barriers that comes next
    u32 first_row = 0;        // of the rows that lie in the finished tile
    bool all_wide = true;     // of the block's tiles of more than 128 rows

    FN_DEVICE explicit FnDeep(FnDeepShared& shared) : s(shared) {
#ifdef FN_HOPPER
        if (threadIdx.x == 0) {
#pragma unroll
            for (u32 i = 0; i < FN_DEEP_SLOTS; i++) {
                fn_barrier_init(&s.full[i], LOADERS);
                fn_barrier_init(&s.empty[i], FN_DEEP_WARPS);
            }
            fn_barrier_init(&s.idle, FN_DEEP_WARPS);
            fn_barrier_init_fence();
        }
        __syncthreads();
#endif
    }

    template <class Tiles> FN_DEVICE void run(Tiles& tiles) {
#ifdef FN_HOPPER
        u32 turn = 0;
        // Registers go from the threads that load to those that compute.  Where both ways met again, or wide products
        // stood in one loop with others, ptxas would spill.
        if (threadIdx.x >= 32u * FN_DEEP_WARPS) {
            fn_registers_give<40>();
            if (threadIdx.x >= 32u * (FN_DEEP_WARPS + LOADERS)) return;
            if constexpr (KIND != FN_DEEP_PLAIN) {
                load_all<true>(tiles, turn);
                fn_barrier_wait(&s.idle, 0u);
                slot = 0;
                if (!all_wide) turn = 0;
            }
            load_all<false>(tiles, turn);
            return;
        }
        fn_registers_take<232>();
        if constexpr (KIND != FN_DEEP_PLAIN) {
            compute_all<true>(tiles, turn);
            leave(&s.idle);  // the rings share their slots out differently
            slot = 0;
            if (!all_wide) turn = 0;
        }
        compute_all<false>(tiles, turn);
#else
        for (u32 i = blockIdx.x; i < tiles.count(); i += gridDim.x)
            if (tiles.take(i))
                for (u32 p = 0; p < Tiles::PRODUCTS; p++) compute(tiles, p);
#endif
    }

    // Scales of the tile's outputs, on their way while its product runs: those of set i (0, 1) are brought by warp i.
    FN_DEVICE void bring(u32 i, const u16* from) const {
        u32 lane = fn_thread_here() & 31u;
        if (fn_thread_here() >> 5 != i) return;
        fn_cp_async<8>(s.scales[i] + 4u * lane, from + 4u * lane);
        fn_cp_async_commit();
    }
    // Set i of outputs 4 lane .. + 3.
    FN_DEVICE void scale(u32 i, float (&v)[4]) const {
        fn_widen_h4(*reinterpret_cast<const uint2*>(s.scales[i] + 4u * (fn_thread_here() & 31u)), v);
    }
    // The finished tile.
    FN_DEVICE float output(u32 row, u32 output) const { return *tile(row, output); }
    // Outputs 4 lane .. + 3 of a row.
    FN_DEVICE float4& quad(u32 row) const {
        return *reinterpret_cast<float4*>(tile(row, 4u * (fn_thread_here() & 31u)));
    }
    // The first of a warp's own rows, where the tile's begin with `first`.
    FN_DEVICE u32 own_row(u32 first) const { return first + 16u * (fn_thread_here() >> 5); }
    // The bytes of fn_hadamard128 for the warp's own 16 rows from `row` on.
    FN_DEVICE void rotate(u32 row) const {
        u32 lane = fn_thread_here() & 31u, upper = lane >> 4;
        float v[64];
        row += lane & 15u;
#pragma unroll
        for (u32 j = 0; j < 16; j++) {
            u32 quarter = 2u * upper + (j >> 3 ^ upper);
            float4 f = *reinterpret_cast<const float4*>(tile(row, 32u * quarter + 4u * (j & 7u)));
            v[4u * j] = f.x, v[4u * j + 1u] = f.y, v[4u * j + 2u] = f.z, v[4u * j + 3u] = f.w;
        }
        fn_half_hadamard(v);
#pragma unroll
        for (u32 j = 0; j < 16; j++)
            *reinterpret_cast<float4*>(tile(row, 64u * (j >> 3) + 32u * upper + 4u * (j & 7u))) =
                make_float4(v[4u * j], v[4u * j + 1u], v[4u * j + 2u], v[4u * j + 3u]);
        __syncwarp();
    }
    // Hadamard, * svh (scales of set 0), + bias where there is one: rows first .. first + n - 1 to `to`, which is that
    // of row 0; pitch: floats between rows.  As fn_linear_finish_block.
    FN_DEVICE void store_rotated(u32 first, u32 n, const u16* bias, float* to, u64 pitch) const {
        u32 lane = fn_thread_here() & 31u, end = first + n;
        float svh[4], more[4] = {0.f, 0.f, 0.f, 0.f};
        scale(0, svh);
        if (bias) fn_load_h4(bias + 4u * lane, more);
        u32 row = own_row(first), stop = fn_min_u32(row + 16u, end);
        if (row >= end) return;
        rotate(row);
        float* at = to + (u64)row * pitch + 4u * lane;
#pragma unroll 8
        for (; row < stop; row++, at += pitch) {
            float4 q = quad(row);
            q = make_float4(fn_mul(q.x, svh[0]), fn_mul(q.y, svh[1]), fn_mul(q.z, svh[2]), fn_mul(q.w, svh[3]));
            if (bias)
                q = make_float4(fn_add(q.x, more[0]), fn_add(q.y, more[1]), fn_add(q.z, more[2]),
                                fn_add(q.w, more[3]));
            fn_store_global(at, q);
        }
    }

  private:
    static FN_DEVICE u32 step_bytes(u32 format) {  // of one tile of 16 outputs and one k step
        return (format & 255u) == FN_FORMAT_EXL3 ? 16u * (format >> 8 & 255u) : 512u;
    }
    // Chunks of four outputs are exchanged by the row: stores of a mma's sums and loads of rows spread over the banks.
    FN_DEVICE float* tile(u32 row, u32 output) const {
        u32 in_part = row - first_row;
        return reinterpret_cast<float*>(s.slots) + in_part * 128u + (output ^ (in_part & 7u) << 2);
    }
    // The computing warps (elsewhere than on sm_90a: the block) wait for each other.
    FN_DEVICE void meet() const {
#ifdef FN_HOPPER
        fn_named_barrier(1u, 32u * FN_DEEP_WARPS);
#else
        __syncthreads();
#endif
    }

    // sum[j][i] of a computing warp is output 16 warp + lane / 4 + 8 (i >> 1) and row 8 j + 2 (lane & 3) + (i & 1):
    // to the finished tile; the scales arrive with them.
    template <u32 ROW_TILES> FN_DEVICE void spill(const float (&sum)[ROW_TILES][4]) {
        fn_cp_async_wait<0>();
        u32 thread = fn_thread_here(), lane = thread & 31u, at = 16u * (thread >> 5) + (lane >> 2);
        float* to = reinterpret_cast<float*>(s.slots) + 2u * (lane & 3u) * 128u;
        u32 turned = 8u * (lane & 3u);  // of even rows
#pragma unroll
        for (u32 j = 0; j < ROW_TILES; j++)
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                to[(8u * j + (i & 1u)) * 128u + ((at + 8u * (i >> 1)) ^ turned ^ 4u * (i & 1u))] = sum[j][i];
    }

#ifdef FN_HOPPER
    enum : u32 { LOADERS = 2 };  // warps: one brings rows, one weights
    struct Walk { u32 format, leaves, segments, units, steps; };  // steps: k steps of a unit

    FN_DEVICE u8* rows_at(u32 stage) const { return s.slots[4u + 2u * stage]; }
    FN_DEVICE u8* weights_at(u32 stage) const { return s.slots[5u + 2u * stage]; }
    FN_DEVICE u8* half_at(u32 slot) const { return s.slots[4u + slot]; }

    // Units are whole blocks of 64 k, one a leaf where there are several, and the words fit.
    static FN_DEVICE bool is_wide(const FnDeepWeights& w, u32 live) {
        u32 width = w.w.format >> 8 & 255u;
        bool mul1 = (w.w.format & 0xff00ffu) == (FN_FORMAT_EXL3 | 2u << 16);
        bool units = w.leaves == 1u || (KIND != FN_DEEP_EXL3 && w.segments == 1u);
        units &= w.k % (64u * w.leaves * w.segments) == 0;
        return live > 128u && mul1 && 512u * width <= FN_DEEP_WORDS && units;
    }
    // All products of a tile are wide, or none.
    template <class Tiles> static FN_DEVICE bool is_wide_tile(const Tiles& tiles) {
        bool wide = true;
#pragma unroll
        for (u32 p = 0; p < Tiles::PRODUCTS; p++) wide = wide && is_wide(tiles.weights(p), tiles.rows(0).live);
        return wide;
    }
    // The block's next tile for this form from turn `turn` on.  Turns go round by one block: what has a period in the
    // order of tiles does not always meet the same block.
    template <bool WIDE, class Tiles> FN_DEVICE bool take(Tiles& tiles, u32& turn) {
        u32 count = tiles.count();
        for (; turn * gridDim.x < count; turn++) {
            u32 i = turn * gridDim.x + (blockIdx.x + turn) % gridDim.x;
            if (i >= count || !tiles.take(i)) continue;
            if (KIND == FN_DEEP_PLAIN) return true;
            if (WIDE && tiles.rows(0).live <= 128u) return false;  // none comes behind it
            if (is_wide_tile(tiles) == WIDE) return true;
            if (WIDE) all_wide = false;
        }
        return false;
    }
    template <bool WIDE, class Tiles> FN_DEVICE void load_all(Tiles& tiles, u32& turn) {
#pragma unroll 1
        for (; take<WIDE>(tiles, turn); turn++) {
#pragma unroll 1
            for (u32 p = 0; p < Tiles::PRODUCTS; p++) {
                const FnDeepWeights w = tiles.weights(p);
                FnDeepRows rows = tiles.rows(p);
                if constexpr (WIDE) {
                    load_wide(w, rows);
                } else {
                    u32 live = rows.live;
                    for (u32 first = 0; first < live; first += 128u) {
                        rows.live = fn_min_u32(live - first, 128u);
                        load(w, rows);
                        rows.x += (u64)128u * rows.k_blocks * 64u;
                    }
                }
            }
        }
    }
    template <bool WIDE, class Tiles> FN_DEVICE void compute_all(Tiles& tiles, u32& turn) {
#pragma unroll 1
        for (; take<WIDE>(tiles, turn); turn++) {
#pragma unroll 1
            for (u32 p = 0; p < Tiles::PRODUCTS; p++) {  // one text for all
                const FnDeepWeights w = tiles.weights(p);
                // One value for the warp, and the compiler is told so: wgmma under a branch that could divide the warp
                // would be run one by one.
                Walk walk;
                walk.segments = fn_shfl(w.segments, 0u);
                walk.leaves = fn_shfl(w.leaves, 0u);
                walk.units = walk.leaves * walk.segments;
                walk.steps = fn_shfl(w.k, 0u) / 16u / walk.units;
                walk.format = fn_shfl(w.w.format, 0u);
                u32 live = fn_shfl(tiles.rows(p).live, 0u);
                tiles.begin(*this, p, live);
                first_row = 0;
                if constexpr (WIDE) {
                    wide(tiles, p, walk, live);
                } else {
#pragma unroll 1
                    for (; first_row < live; first_row += 128u) {
                        u32 n = fn_min_u32(live - first_row, 128u);
                        if (n <= 64u)
                            of_part<8>(tiles, p, walk, n);
                        else
                            of_part<16>(tiles, p, walk, n);
                    }
                }
            }
        }
    }
    template <u32 SLOTS> FN_DEVICE void next_slot() {
        if (++slot == SLOTS) slot = 0;
    }
    // A barrier that counts warps: lane 0 arrives when all lanes of its warp have read.
    FN_DEVICE void leave(u64* barrier) const {
        __syncwarp();
        if ((fn_thread_here() & 31u) == 0) fn_barrier_arrive(barrier);
    }
    // Until the present slot is filled.
    FN_DEVICE void arrive() {
        fn_barrier_wait(&s.full[slot], parity >> slot & 1u);
        parity ^= 1u << slot;
    }

    // ---- loading

    // Until the present slot is empty.
    FN_DEVICE void await() {
        fn_barrier_wait(&s.empty[slot], parity >> slot & 1u ^ 1u);
        parity ^= 1u << slot;
    }
    // Lanes 0 .. n - 1 each start a copy into the present slot.
    FN_DEVICE void copy(u32 n, u32 bytes, u8* to, const u8* from, u64 stride) {
        u32 lane = fn_thread_here() & 31u;
        if (lane == 0) fn_barrier_expect(&s.full[slot], n * bytes);
        __syncwarp();
        if (lane < n) fn_bulk_copy(to + lane * bytes, from + lane * stride, bytes, &s.full[slot]);
    }

    FN_DEVICE void load_wide(const FnDeepWeights& w, const FnDeepRows& rows) {
        u32 turn = (fn_thread_here() >> 5) - FN_DEEP_WARPS;
        const u8* x = reinterpret_cast<const u8*>(rows.x);
        u32 tiles = w.n / 16u, bytes = step_bytes(w.w.format), images = (rows.live + 63u) / 64u;
        const u8* data = reinterpret_cast<const u8*>(w.w.data) + (u64)w.first * bytes;
        u64 of_image = 8192ull * rows.k_blocks, of_step = (u64)tiles * bytes;
        for (u32 b = w.k / 64u; b; b--, x += 8192u, data += 4u * of_step) {
            await();
            if (turn == 0)
                copy(2u, 8192u, half_at(slot), x, of_image);
            else
                copy(4u, FN_DEEP_WARPS * bytes, s.words[slot >> 1], data, of_step);
            next_slot<FN_DEEP_SLOTS>();
            await();
            if (turn == 0)
                copy(images - 2u, 8192u, half_at(slot), x + 2u * of_image, of_image);
            else if ((fn_thread_here() & 31u) == 0)
                fn_barrier_arrive(&s.full[slot]);
            next_slot<FN_DEEP_SLOTS>();
        }
    }
    FN_DEVICE void load(const FnDeepWeights& w, const FnDeepRows& rows) {
        const u8* x = reinterpret_cast<const u8*>(rows.x);
        u32 turn = (fn_thread_here() >> 5) - FN_DEEP_WARPS, k_blocks = rows.k_blocks;
        u32 images = rows.live > 64u ? 2u : 1u;
        u32 lane = fn_thread_here() & 31u, units = w.leaves * w.segments, steps = w.k / 16u / units;
        bool exl3 = fn_is_exl3(w.w);
        u32 bytes = step_bytes(w.w.format), of_warp = w.tile(lane & 7u);
        u32 n_warps = fn_popc(fn_ballot(lane < FN_DEEP_WARPS && of_warp < w.limit));
        const u8* data = reinterpret_cast<const u8*>(w.w.data);
        u64 of_step = (u64)(w.n / 16u) * bytes;
        if (exl3)
            data += (u64)w.first * bytes;
        else
            data += (u64)of_warp * (w.k / 16u) * 512u;
        u32 end = units * steps, next = steps;
        for (u32 at = 0; at < end;) {
            u32 to = fn_min_u32((at & ~3u) + 4u, next), n = to - at;
            await();
            if (turn == 0) {
                copy(images, 8192u, rows_at(slot), x + 8192u * (at >> 2), 8192ull * k_blocks);
            } else if (exl3) {
                copy(n, FN_DEEP_WARPS * bytes, weights_at(slot), data + at * of_step, of_step);
            } else {  // a warp's steps lie one behind the other
                if (lane == 0) fn_barrier_expect(&s.full[slot], n_warps * n * 512u);
                __syncwarp();
                if (lane < FN_DEEP_WARPS && of_warp < w.limit)
                    fn_bulk_copy(weights_at(slot) + 2048u * lane, data + 512u * at, 512u * n, &s.full[slot]);
            }
            next_slot<FN_DEEP_STAGES>();
            at = to;
            if (at == next) next += steps;
        }
    }

    // ---- wide products

    template <class Tiles> FN_DEVICE void wide(Tiles& tiles, u32 p, const Walk& walk, u32 live) {
        float d[2][16][4];
        if (KIND != FN_DEEP_EXL3 && walk.leaves > 1u)
            dot_wide<KIND != FN_DEEP_EXL3>(walk, d);
        else
            dot_wide<false>(walk, d);
#pragma unroll 1
        for (;; first_row += 128u) {
            meet();  // nobody adds to sums that lie there, or reads the rows before
            spill(d[0]);
            meet();
            tiles.finish(*this, p, first_row, fn_min_u32(live - first_row, 128u));
            if (first_row) break;
#pragma unroll
            for (u32 j = 0; j < 16; j++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) d[0][j][i] = d[1][j][i];
        }
        meet();
    }
    template <bool LEAVES> FN_DEVICE void dot_wide(const Walk& walk, float (&d)[2][16][4]) {
#define FN_TRELLIS(w2)                                              \
    case FN_FORMAT_EXL3 | w2 << 8 | 2u << 16:                       \
        by_halves<FnDeepTrellis<w2, 2>, LEAVES>(walk, d);           \
        return;
        switch (walk.format) {
            FN_TRELLIS(2) FN_TRELLIS(3) FN_TRELLIS(4) FN_TRELLIS(5) FN_TRELLIS(6) FN_TRELLIS(7) FN_TRELLIS(8)
            FN_TRELLIS(10) FN_TRELLIS(12)
        }
#undef FN_TRELLIS
    }
    // d += A B of one step, or d = A B unless `more`.
    template <u32 ROW_TILES>
    FN_DEVICE void start(float (&d)[ROW_TILES][4], u32 (&a)[4], u64 rows, u32 step, bool more) const {
        fn_wgmma_fence();
        fn_wgmma(d, a, rows + 2u * step, more);
        fn_wgmma_commit();
    }
    // A block's four steps with its first 128 rows, then with the others.  As a step's second product is done, its
    // registers take that step of the next block, also across units.  Sums of units: those of the first
    // rows lie in shared memory, the others' in registers, for want of more.
    template <class Source, bool LEAVES> FN_DEVICE void by_halves(const Walk& walk, float (&d)[2][16][4]) {
        Source source(walk.format);
        u32 warp = fn_thread_here() >> 5, a[4][4], left = walk.units * (walk.steps / 4u), before = ~0u;
        bool never = walk.segments == ~0u;
        float sum[16][4];
        float4 waiting[2][2][16];
        fn_deep_set(sum, -0.f);
        fn_deep_set(d[0], 0.f);
        fn_deep_set(d[1], 0.f);
        a[3][0] = a[3][1] = a[3][2] = a[3][3] = 0;
        arrive();
        source.load(s.words[slot >> 1], warp);
#pragma unroll
        for (u32 i = 0; i < 3; i++) source.operand(i, a[i]);
#pragma unroll 1
        for (u32 unit = 0; unit < walk.units; unit++) {
            fn_hold(d[0]);
            fn_hold(d[1]);
#pragma unroll 1
            for (u32 b = 0; b < walk.steps / 4u; b++) {
                u64 rows = fn_tile_descriptor(half_at(slot));
                u32 first = slot;
                start(d[0], a[0], rows, 0, b != 0);
                start(d[0], a[1], rows, 1, true);
                fn_wgmma_wait<2>();  // the block before is done
                fn_keep(a[3], never, s.slots);
                if (before != ~0u) leave(&s.empty[before]);
                source.operand(3, a[3]);
                start(d[0], a[2], rows, 2, true);
                start(d[0], a[3], rows, 3, true);
                next_slot<FN_DEEP_SLOTS>();
                arrive();
                rows = fn_tile_descriptor(half_at(slot));
                before = slot;
                start(d[1], a[0], rows, 0, b != 0);
                next_slot<FN_DEEP_SLOTS>();
                if (--left) {
                    arrive();
                    source.load(s.words[slot >> 1], warp);
                }
                start(d[1], a[1], rows, 1, true);
                fn_wgmma_wait<1>();
                fn_keep(a[0], never, s.slots);
                leave(&s.empty[first]);
                source.operand(0, a[0]);
                start(d[1], a[2], rows, 2, true);
                fn_wgmma_wait<1>();
                fn_keep(a[1], never, s.slots);
                source.operand(1, a[1]);
                start(d[1], a[3], rows, 3, true);
                fn_wgmma_wait<1>();
                fn_keep(a[2], never, s.slots);
                source.operand(2, a[2]);
            }
            fn_hold(d[0]);
            fn_hold(d[1]);
            fn_wgmma_wait<0>();
            fn_hold(d[0]);
            fn_hold(d[1]);
            if constexpr (LEAVES)
                add_leaf(unit, walk.units, d, sum, waiting);
            else
                add_unit(unit != 0, unit + 1u < walk.units, d, sum);
        }
        fn_keep(a[3], never, s.slots);
        leave(&s.empty[before]);
#pragma unroll
        for (u32 j = 0; j < 16; j++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) d[1][j][i] = sum[j][i];
    }
    // Of the second rows sum += d.  Of the first d += the sum so far, if there is one, and becomes it, if it is kept:
    // loads two ahead of their use.
    FN_DEVICE void add_unit(bool more, bool keep, float (&d)[2][16][4], float (&sum)[16][4]) const {
        float4 ahead[2], *first = reinterpret_cast<float4*>(s.slots) + fn_thread_here();
        const u32 step = 32u * FN_DEEP_WARPS;
        ahead[0] = first[0];
        ahead[1] = first[step];
#pragma unroll
        for (u32 j = 0; j < 16; j++) {
            float4 before = ahead[j & 1u];
            float(&v)[4] = d[0][j];
            if (j < 14) ahead[j & 1u] = first[(j + 2u) * step];
#pragma unroll
            for (u32 i = 0; i < 4; i++) sum[j][i] = fn_add(sum[j][i], d[1][j][i]);
            if (more) {
                v[0] = fn_add(before.x, v[0]), v[1] = fn_add(before.y, v[1]);
                v[2] = fn_add(before.z, v[2]), v[3] = fn_add(before.w, v[3]);
            }
            if (keep) first[j * step] = make_float4(v[0], v[1], v[2], v[3]);
        }
    }

    // As add_unit for a leaf, by the tree of part_sum_v1.  A leaf waits for its neighbour where sums of units lie,
    // those of two and of four leaves in local memory.
    FN_DEVICE void add_leaf(u32 leaf, u32 leaves, float (&d)[2][16][4], float (&sum)[16][4],
                            float4 (&waiting)[2][2][16]) const {
        bool odd = leaf & 1u;
        add_unit(odd, !odd, d, sum);
        if (!odd) return;
#pragma unroll
        for (u32 j = 0; j < 16; j++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) d[1][j][i] = sum[j][i], sum[j][i] = -0.f;
        u32 level = 0;
#pragma unroll 1
        for (; leaf >> (level + 1u) & 1u; level++)
#pragma unroll
            for (u32 h = 0; h < 2; h++) {
                float4 w[16];  // all asked for at once, in the registers of `sum`
#pragma unroll
                for (u32 j = 0; j < 16; j++) w[j] = waiting[level][h][j];
#pragma unroll
                for (u32 j = 0; j < 16; j++) {
                    float(&v)[4] = d[h][j];
                    v[0] = fn_add(w[j].x, v[0]), v[1] = fn_add(w[j].y, v[1]);
                    v[2] = fn_add(w[j].z, v[2]), v[3] = fn_add(w[j].w, v[3]);
                }
            }
#pragma unroll
        for (u32 h = 0; h < 2; h++)
#pragma unroll
            for (u32 j = 0; j < 16; j++) {
                if (leaf + 1u < leaves)
                    waiting[level][h][j] = make_float4(d[h][j][0], d[h][j][1], d[h][j][2], d[h][j][3]);
                else if (h)
#pragma unroll
                    for (u32 i = 0; i < 4; i++) sum[j][i] = d[1][j][i];
            }
    }

    // ---- products of up to 128 rows

    template <u32 ROW_TILES, class Tiles> FN_DEVICE void of_part(Tiles& tiles, u32 p, const Walk& walk, u32 n) {
        float sum[ROW_TILES][4];
        dot<ROW_TILES>(walk, sum);
        if (walk.leaves > 1u) meet();  // nobody's leaves wait there any more
        spill(sum);
        meet();
        tiles.finish(*this, p, first_row, n);
        meet();
    }
    template <u32 ROW_TILES> FN_DEVICE void dot(const Walk& walk, float (&sum)[ROW_TILES][4]) {
        if (walk.steps % 4u || walk.format == FN_FORMAT_BF16) {
            by_steps<ROW_TILES>(walk, sum);
            return;
        }
#define FN_TRELLIS(w2)                                                        \
    case FN_FORMAT_EXL3 | w2 << 8 | 2u << 16:                                 \
        by_blocks<ROW_TILES, FnDeepTrellis<w2, 2>>(walk, sum);                \
        return;
        if constexpr (KIND != FN_DEEP_PLAIN) {
            switch (walk.format) {
                FN_TRELLIS(2) FN_TRELLIS(3) FN_TRELLIS(4) FN_TRELLIS(5) FN_TRELLIS(6) FN_TRELLIS(7) FN_TRELLIS(8)
                FN_TRELLIS(10) FN_TRELLIS(12) FN_TRELLIS(14) FN_TRELLIS(16)
            }
        }
#undef FN_TRELLIS
        if (walk.format == FN_FORMAT_F16)
            by_blocks<ROW_TILES, FnDeepPlain>(walk, sum);
        else
            by_blocks<ROW_TILES, FnDeepAny<KIND>>(walk, sum);  // mcg, 3inst, and what nobody knows
    }
    // Units are whole blocks of 64 k.  A step's weights are decoded while the products of the step before run, also
    // across units.
    template <u32 ROW_TILES, class Source> FN_DEVICE void by_blocks(const Walk& walk, float (&sum)[ROW_TILES][4]) {
        FnDeepSum<ROW_TILES, KIND != FN_DEEP_EXL3> units_sum(sum, s.slots[0]);
        Source source(walk.format);
        u32 warp = fn_thread_here() >> 5, before = ~0u, a[2][4];
        bool never = walk.segments == ~0u;
        float d[ROW_TILES][4];
#pragma unroll
        for (u32 i = 0; i < 2; i++) a[i][0] = a[i][1] = a[i][2] = a[i][3] = 0;
        fn_deep_set(d, 0.f);
#pragma unroll 1
        for (u32 unit = 0; unit < walk.units; unit++) {
            fn_hold(d);
#pragma unroll 1
            for (u32 b = 0; b < walk.steps / 4u; b++) {
                arrive();
                u64 rows = fn_tile_descriptor(rows_at(slot));
                source.load(weights_at(slot), warp);
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    fn_wgmma_wait<1>();
                    fn_keep(a[i & 1u], never, s.slots);
                    if (i == 1 && before != ~0u) leave(&s.empty[before]);
                    source.operand(i, a[i & 1u]);
                    start(d, a[i & 1u], rows, i, i || b);
                }
                before = slot;
                next_slot<FN_DEEP_STAGES>();
            }
            fn_hold(d);
            fn_wgmma_wait<0>();
            fn_hold(d);
            units_sum.add(walk.leaves, walk.segments, d, sum);
        }
        fn_keep(a[0], never, s.slots);
        fn_keep(a[1], never, s.slots);
        leave(&s.empty[before]);
    }
    // bf16 weights, whose operand comes in two halves, and units that end inside a block.
    template <u32 ROW_TILES> FN_DEVICE void by_steps(const Walk& walk, float (&sum)[ROW_TILES][4]) {
        FnDeepSum<ROW_TILES, KIND != FN_DEEP_EXL3> units_sum(sum, s.slots[0]);
        u32 bytes = step_bytes(walk.format), warp = fn_thread_here() >> 5, at = 0;
        bool exl3 = (walk.format & 255u) == FN_FORMAT_EXL3;
#pragma unroll 1
        for (u32 unit = 0; unit < walk.units; unit++) {
            u32 end = at + walk.steps;
            float d[ROW_TILES][4];
            fn_deep_set(d, 0.f);
#pragma unroll 1
            while (at < end) {
                u32 n = fn_min_u32((at & ~3u) + 4u, end) - at, a[4][4];
                arrive();
                const u8* words = weights_at(slot) + warp * (exl3 ? bytes : 2048u);
                fn_deep_operand<KIND>(walk.format, words, exl3 ? FN_DEEP_WARPS * bytes : 512u, n, a);
#pragma unroll
                for (u32 i = 0; i < 4; i++)
                    if (i < n)
                        fn_deep_step(rows_at(slot), (at & 3u) + i, a[i], walk.format == FN_FORMAT_BF16, ROW_TILES, d);
                leave(&s.empty[slot]);
                next_slot<FN_DEEP_STAGES>();
                at += n;
            }
            units_sum.add(walk.leaves, walk.segments, d, sum);
        }
    }
#else
    template <class Tiles> FN_DEVICE void compute(Tiles& tiles, u32 p) {
        const FnDeepWeights w = tiles.weights(p);
        const FnDeepRows rows = tiles.rows(p);
        bool computes = fn_thread_here() < 32u * FN_DEEP_WARPS;
        if (computes) tiles.begin(*this, p, rows.live);
        for (first_row = 0; first_row < rows.live; first_row += 128u) {
            u32 n = fn_min_u32(rows.live - first_row, 128u);
            float sum[16][4];
            walk(w, {rows.x + (u64)first_row * rows.k_blocks * 64u, rows.k_blocks, n}, sum);
            meet();  // nobody's leaves wait there any more
            if (computes) spill(sum);
            meet();
            if (computes) tiles.finish(*this, p, first_row, n);
            meet();
        }
    }
    FN_DEVICE void walk(const FnDeepWeights& w, const FnDeepRows& rows, float (&sum)[16][4]) {
        u32 units = w.leaves * w.segments, steps = w.k / 16u / units, at = 0, warp = fn_thread_here() >> 5;
        u32 n_tiles = (rows.live + 7u) / 8u, of_warp = w.tile(warp), bytes = step_bytes(w.w.format);
        bool exl3 = fn_is_exl3(w.w), bf16 = w.w.format == FN_FORMAT_BF16;
        bool works = warp < FN_DEEP_WARPS && of_warp < w.limit;
        u32 stride = exl3 ? w.n / 16u * bytes : 512u;
        const u8* data = reinterpret_cast<const u8*>(w.w.data) + (u64)of_warp * (exl3 ? bytes : w.k / 16u * 512u);
        FnDeepSum<16, KIND != FN_DEEP_EXL3> units_sum(sum, s.slots[0]);
#pragma unroll 1
        for (u32 unit = 0; unit < units; unit++) {
            u32 end = at + steps;
            float d[16][4];
            fn_deep_set(d, 0.f);
#pragma unroll 1
            while (at < end) {
                u32 n = fn_min_u32((at & ~3u) + 4u, end) - at, a[4][4];
                __syncthreads();
                // Whole rows of 8 chunks; the last pair of row tiles is copied as far as it is read.
                for (u32 i = fn_thread_here(); i < 128u * ((n_tiles + 1u) / 2u); i += FN_DEEP_THREADS) {
                    u64 image = (u64)(i >> 9) * rows.k_blocks + (at >> 2);
                    const uint4* from = reinterpret_cast<const uint4*>(rows.x + image * 4096u) + (i & 511u);
                    reinterpret_cast<uint4*>(s.rows)[i] = fn_ldg(from);
                }
                __syncthreads();
                if (works) {
                    fn_deep_operand<KIND>(w.w.format, data + (u64)at * stride, stride, n, a);
#pragma unroll
                    for (u32 i = 0; i < 4; i++)
                        if (i < n) fn_deep_step(s.rows, (at & 3u) + i, a[i], bf16, n_tiles, d);
                }
                at += n;
            }
            if (warp < FN_DEEP_WARPS) units_sum.add(w.leaves, w.segments, d, sum);
        }
    }
#endif
};
