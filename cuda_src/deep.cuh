// deep.cuh: products of prompt kernels: 128 outputs of a weight matrix with a tile of 64 or 128 rows.
//
// A block is 384 threads: eight warps that compute 16 outputs each, and four that load.  The sums are those of
// linear_gemv and linear_finish, byte for byte: one chain of k16 mma steps a unit, k rising, from zero (orders
// exl3_dot_v1, plain_dot_v1), units added by part_sum_v1.
//   sm_90a   a loading warp brings weights and rows of 64 k at a time into a ring in shared memory (bulk copies,
//            mbarriers); a warpgroup decodes the weights of 64 outputs into an operand image while the wgmma of the
//            64 k before run.  bf16 weights take mma.sync there too: their operand has two halves.
//   else     all threads copy the rows of 64 k; weights come from memory; mma.sync.
//
// Use, by all threads of the block:
//   FN_SHARED(Kernel's struct with an FnDeepShared, s);
//   FnDeep<...> deep(s.deep);
//   if (deep.loads()) {
//       deep.begin_loads();  for all dots, in order: deep.load(n, weights, rows), n > 64 for ROW_TILES 16;  return;
//   }
//   deep.begin_dots();
//   float sum[ROW_TILES][4];     8 or 16
//   deep.dot(weights, rows, sum);  deep.spill(sum);  read s.deep.tile, as warps below FN_DEEP_WARPS;  deep.meet();
// After dot, sum[j][i] of a computing warp is output 16 warp + lane / 4 + 8 (i >> 1) of the tile and row
// 8 j + 2 (lane & 3) + (i & 1); after spill, tile[row][output] holds it.  meet: before the next spill.
//
// Alignment: trellis and plain data 16 bytes, tile images 1024.
#pragma once
#include "exl3.cuh"
#include "hopper.cuh"

#define FN_DEEP_THREADS 384u
#define FN_DEEP_WARPS 8u       // that compute
#define FN_DEEP_LOADERS 4u     // warps that load
#define FN_DEEP_ALL 0u         // kinds of weights
#define FN_DEEP_PLAIN 1u
#define FN_DEEP_EXL3 2u
#define FN_DEEP_ROWS 128u      // of a whole tile
#define FN_DEEP_PITCH 132u     // floats between rows of the finished tile: stores and loads spread over the banks

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

template <u32 STAGES, u32 WEIGHT_BYTES> struct FnDeepShared {
#ifdef FN_HOPPER
    u8 rows[STAGES][16384];            // two images
    u8 weights[STAGES][WEIGHT_BYTES];  // of 64 k: EXL3 [step][warp], plain [warp][step]
    float tile[FN_DEEP_ROWS][FN_DEEP_PITCH];
    u64 full[STAGES], empty[STAGES];
#else
    u8 rows[1][16384];
    float tile[FN_DEEP_ROWS][FN_DEEP_PITCH];
#endif
};

// ---- one step ---------------------------------------------------------------------------------------------

template <u32 W2, u32 CODEBOOK>
FN_DEVICE void fn_deep_decode(const u8* tile, u32 stride, u32 n_steps, u32 (&a)[4][4]) {
    FnRing<W2> ring(fn_thread_here() & 31u);
#pragma unroll
    for (u32 s = 0; s < 4; s++) {
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

// Plain weights of up to four k steps; NaN where the format is none that is known.
FN_DEVICE void fn_deep_plain(bool known, const u8* at, u32 stride, u32 n_steps, u32 (&a)[4][4]) {
#pragma unroll
    for (u32 s = 0; s < 4; s++) {
        if (s >= n_steps) return;
        uint4 w = make_uint4(0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu);
        if (known) w = fn_ld(reinterpret_cast<const uint4*>(at + s * stride) + (fn_thread_here() & 31u));
        a[s][0] = w.x, a[s][1] = w.y, a[s][2] = w.z, a[s][3] = w.w;
    }
}

// The mma operands of up to four k steps of one warp's 16 outputs.  at: its words at the first step; stride: bytes
// to the next step's.
template <u32 KIND>
FN_DEVICE void fn_deep_operand(u32 format, const u8* at, u32 stride, u32 n_steps, u32 (&a)[4][4]) {
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
// The same for any format, decoded at once: for those that are rare, as each form above is a loop of its own.
template <u32 KIND> struct FnDeepAny {
    u32 format, done[4][4];

    FN_DEVICE explicit FnDeepAny(u32 format) : format(format) {}
    FN_DEVICE void load(const u8* stage, u32 warp) {
        bool exl3 = KIND != FN_DEEP_PLAIN && (format & 255u) == FN_FORMAT_EXL3;
        u32 bytes = exl3 ? 16u * (format >> 8 & 255u) : 512u;
        fn_deep_operand<KIND>(format, stage + warp * (exl3 ? bytes : 2048u), exl3 ? FN_DEEP_WARPS * bytes : 512u, 4u,
                              done);
    }
    FN_DEVICE void operand(u32 step, u32 (&a)[4]) const {
#pragma unroll
        for (u32 i = 0; i < 4; i++) a[i] = done[step][i];
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

// part_sum_v1 as the units come: segments of a leaf rising; a finished leaf waits for its neighbour in the tree.
// A leaf begins at -0, the one number that leaves every other as it is when it is added to it.
template <u32 ROW_TILES> struct FnDeepSum {
    u32 leaf = 0, segment = 0;       // of the next unit
    float waiting[3][ROW_TILES][4];  // finished subtrees of 1, 2 and 4 leaves; only where there are leaves

    FN_DEVICE explicit FnDeepSum(float (&sum)[ROW_TILES][4]) { fn_deep_set(sum, -0.f); }
    FN_DEVICE void add(u32 leaves, u32 segments, const float (&d)[ROW_TILES][4], float (&sum)[ROW_TILES][4]) {
#pragma unroll
        for (u32 j = 0; j < ROW_TILES; j++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) sum[j][i] = fn_add(sum[j][i], d[j][i]);
        if (++segment < segments || leaves == 1u) return;
        segment = 0;
        u32 level = 0;
#pragma unroll 1
        for (; leaf >> level & 1u; level++)
#pragma unroll
            for (u32 j = 0; j < ROW_TILES; j++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) sum[j][i] = fn_add(waiting[level][j][i], sum[j][i]);
        if (++leaf == leaves) return;
#pragma unroll
        for (u32 j = 0; j < ROW_TILES; j++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) waiting[level][j][i] = sum[j][i];
        fn_deep_set(sum, -0.f);
    }
};

// ---- the walk over K --------------------------------------------------------------------------------------

// KIND: what weights there may be; less means less code.
template <class Shared, u32 KIND = FN_DEEP_ALL> struct FnDeep {
    Shared& s;
    u32 i_block;  // blocks of up to 64 k that went through the ring so far

    FN_DEVICE FnDeep(Shared& shared) : s(shared), i_block(0) {
#ifdef FN_HOPPER
        if (threadIdx.x == 0) {
#pragma unroll
            for (u32 i = 0; i < STAGES; i++) {
                fn_barrier_init(&s.full[i], 1u);
                fn_barrier_init(&s.empty[i], FN_DEEP_WARPS);
            }
            fn_barrier_init_fence();
        }
        __syncthreads();
#endif
    }

    // Whether this thread only loads.
    FN_DEVICE bool loads() const {
#ifdef FN_HOPPER
        return threadIdx.x >= 32u * FN_DEEP_WARPS;
#else
        return false;
#endif
    }
    // Registers go from the threads that load to those that compute.  First thing of each, before their loops: where
    // both ways meet again ptxas would give nobody more than an even share.
    FN_DEVICE void begin_loads() const {
#ifdef FN_HOPPER
        fn_registers_give<40>();
#endif
    }
    FN_DEVICE void begin_dots() const {
#ifdef FN_HOPPER
        fn_registers_take<232>();
#endif
    }

    template <u32 ROW_TILES>
    FN_DEVICE void dot(const FnDeepWeights& w, const FnDeepRows& rows, float (&sum)[ROW_TILES][4]) {
#ifdef FN_HOPPER
        // One value for the warp, and the compiler is told so: wgmma under a branch that could divide the warp would
        // be run one by one.
        Walk walk;
        walk.segments = fn_shfl(w.segments, 0u);
        walk.leaves = fn_shfl(w.leaves, 0u);
        walk.units = walk.leaves * walk.segments;
        walk.steps = fn_shfl(w.k, 0u) / 16u / walk.units;
        walk.format = fn_shfl(w.w.format, 0u);
        if (walk.steps % 4u || walk.format == FN_FORMAT_BF16) {
            by_steps<ROW_TILES>(walk, sum);
            return;
        }
#define FN_TRELLIS(w2) \
    case FN_FORMAT_EXL3 | w2 << 8 | 2u << 16: by_blocks<ROW_TILES, FnDeepTrellis<w2, 2>>(walk, sum); return;
        if constexpr (KIND != FN_DEEP_PLAIN) {
            switch (walk.format) {
                FN_TRELLIS(2) FN_TRELLIS(3) FN_TRELLIS(4) FN_TRELLIS(5) FN_TRELLIS(6) FN_TRELLIS(7) FN_TRELLIS(8)
                FN_TRELLIS(10) FN_TRELLIS(12) FN_TRELLIS(14) FN_TRELLIS(16)
            }
        }
#undef FN_TRELLIS
        by_blocks<ROW_TILES, FnDeepAny<KIND>>(walk, sum);  // mcg, 3inst, f16
#else
        walk(w, rows, sum);
#endif
    }

    // The warps that compute (elsewhere than on sm_90a: the block) wait for each other.
    FN_DEVICE void meet() const {
#ifdef FN_HOPPER
        fn_named_barrier(1u, 32u * FN_DEEP_WARPS);
#else
        __syncthreads();
#endif
    }

    // sum -> tile[row][output], for all to read.
    template <u32 ROW_TILES> FN_DEVICE void spill(const float (&sum)[ROW_TILES][4]) {
        u32 thread = fn_thread_here(), lane = thread & 31u, warp = thread >> 5;
#ifdef FN_HOPPER
        meet();  // nobody's products read their weights in there any more
#endif
        if (warp < FN_DEEP_WARPS) {
            float* at = &s.tile[2u * (lane & 3u)][16u * warp + (lane >> 2)];
#pragma unroll
            for (u32 j = 0; j < ROW_TILES; j++)
#pragma unroll
                for (u32 i = 0; i < 4; i++)
                    at[(8u * j + (i & 1u)) * FN_DEEP_PITCH + 8u * (i >> 1)] = sum[j][i];
        }
        meet();
    }

  private:
    static FN_DEVICE u32 step_bytes(u32 format) {  // of one tile of 16 outputs and one k step
        return (format & 255u) == FN_FORMAT_EXL3 ? 16u * (format >> 8 & 255u) : 512u;
    }

#ifdef FN_HOPPER
    enum : u32 { STAGES = sizeof(Shared::full) / 8u };
    // A stage is always the same warp's: another's could be two phases behind, which a wait by parity takes for done.
    static_assert(STAGES == FN_DEEP_LOADERS, "stages and loading warps");

  public:
    // The four loading warps take the blocks in turn; lanes 0 .. 15 each start one of a stage's copies.
    FN_DEVICE void load(u32 n_rows, const FnDeepWeights& w, const FnDeepRows& rows) {
        u32 images = n_rows > 64u ? 2u : 1u;
        u32 thread = fn_thread_here(), lane = thread & 31u, turn = (thread >> 5) - FN_DEEP_WARPS;
        u32 units = w.leaves * w.segments, steps = w.k / 16u / units, tiles = w.n / 16u;
        bool exl3 = fn_is_exl3(w.w);
        u32 bytes = step_bytes(w.w.format), of_warp = w.tile(lane & 7u), n_warps = 0;
        if (!exl3) n_warps = fn_popc(fn_ballot(lane < FN_DEEP_WARPS && of_warp < w.limit));
        const u8* data = reinterpret_cast<const u8*>(w.w.data);
        u32 end = units * steps, next = steps;
        for (u32 at = 0; at < end; i_block++) {
            u32 first = at, to = fn_min_u32((at & ~3u) + 4u, next), n = to - at, stage = i_block % STAGES;
            at = to;
            if (at == next) next += steps;
            if (i_block % FN_DEEP_LOADERS != turn) continue;
            if (i_block >= STAGES) fn_barrier_wait(&s.empty[stage], (i_block / STAGES - 1u) & 1u);
            u64* full = &s.full[stage];
            u32 expected = 8192u * images + n * bytes * (exl3 ? FN_DEEP_WARPS : n_warps);
            if (lane == 0) fn_barrier_expect(full, expected);
            __syncwarp();
            if (lane < images) {
                const u16* from = rows.x + ((u64)lane * rows.k_blocks + (first >> 2)) * 4096u;
                fn_bulk_copy(s.rows[stage] + 8192u * lane, from, 8192u, full);
            } else if (exl3 && lane >= 8u && lane < 8u + n) {
                u32 i = lane - 8u;
                const u8* from = data + ((u64)(first + i) * tiles + w.first) * bytes;
                fn_bulk_copy(s.weights[stage] + i * FN_DEEP_WARPS * bytes, from, FN_DEEP_WARPS * bytes, full);
            } else if (!exl3 && lane >= 8u && lane < 16u && of_warp < w.limit) {
                const u8* from = data + ((u64)of_warp * (w.k / 16u) + first) * 512u;
                fn_bulk_copy(s.weights[stage] + 2048u * (lane & 7u), from, 512u * n, full);
            }
        }
    }

  private:
    struct Walk { u32 format, leaves, segments, units, steps; };  // steps: k steps of a unit

    // Decoded weights of the present block of n steps; waits for its stage.
    FN_DEVICE void decode_steps(u32 format, u32 n, u32 (&a)[4][4]) {
        u32 bytes = step_bytes(format), stage = i_block % STAGES, warp = fn_thread_here() >> 5;
        fn_barrier_wait(&s.full[stage], (i_block / STAGES) & 1u);
        bool exl3 = (format & 255u) == FN_FORMAT_EXL3;
        const u8* at = s.weights[stage] + warp * (exl3 ? bytes : 2048u);
        fn_deep_operand<KIND>(format, at, exl3 ? FN_DEEP_WARPS * bytes : 512u, n, a);
    }
    // The barrier counts warps: lane 0 arrives when all lanes of its warp have read.
    FN_DEVICE void release(u32 block) {
        __syncwarp();
        if ((fn_thread_here() & 31u) == 0) fn_barrier_arrive(&s.empty[block % STAGES]);
    }

    // Units are whole blocks of 64 k.  A block's weights are decoded into one of two operand images of the warpgroup
    // (they lie where the finished tile comes to lie) while the products of the block before run, also across units.
    template <u32 ROW_TILES, class Source> FN_DEVICE void by_blocks(const Walk& walk, float (&sum)[ROW_TILES][4]) {
        FnDeepSum<ROW_TILES> units_sum(sum);
        Source source(walk.format);
        u32 group = fn_shfl(fn_thread_here() >> 7, 0u), first = i_block, last = first + walk.units * (walk.steps / 4u);
        u8* operand = reinterpret_cast<u8*>(s.tile) + 16384u * group;
        float d[ROW_TILES][4];
        fn_deep_set(d, 0.f);
        decode(source, operand);
#pragma unroll 1
        for (u32 unit = 0; unit < walk.units; unit++) {
            u32 start = i_block, end = i_block + walk.steps / 4u;
            fn_hold(d);
#pragma unroll 1
            while (i_block < end) {
                fn_async_fence();
                fn_named_barrier(2u + group, 128u);
                u64 weights = fn_tile_descriptor(operand + 8192u * (i_block & 1u));
                u64 rows = fn_tile_descriptor(s.rows[i_block % STAGES]);
                fn_wgmma_fence();
#pragma unroll
                for (u32 i = 0; i < 4; i++) fn_wgmma(d, weights + 2u * i, rows + 2u * i, i || i_block != start);
                fn_wgmma_commit();
                fn_wgmma_wait<1>();
                if (i_block > first) release(i_block - 1u);
                i_block++;
                if (i_block < last) decode(source, operand);
            }
            fn_hold(d);
            fn_wgmma_wait<0>();
            fn_hold(d);
            units_sum.add(walk.leaves, walk.segments, d, sum);
        }
        release(last - 1u);
    }
    // The present block's weights into the warp's 16 rows of operand image i_block % 2; waits for the stage.
    template <class Source> FN_DEVICE void decode(Source& source, u8* operand) {
        u32 stage = i_block % STAGES, thread = fn_thread_here(), lane = thread & 31u;
        fn_barrier_wait(&s.full[stage], (i_block / STAGES) & 1u);
        source.load(s.weights[stage], thread >> 5);
        u8* row = operand + 8192u * (i_block & 1u) + 128u * ((thread >> 1 & 48u) + (lane & 15u));
#pragma unroll
        for (u32 step = 0; step < 4; step++) {
            u32 a[4];
            source.operand(step, a);
            fn_stmatrix_x4(row + ((2u * step + (lane >> 4) ^ (lane & 7u)) << 4), a);
        }
    }

    // bf16 weights, whose operand comes in two halves, and units that end inside a block.
    template <u32 ROW_TILES> FN_DEVICE void by_steps(const Walk& walk, float (&sum)[ROW_TILES][4]) {
        FnDeepSum<ROW_TILES> units_sum(sum);
        u32 at = 0;
#pragma unroll 1
        for (u32 unit = 0; unit < walk.units; unit++) {
            u32 end = at + walk.steps;
            float d[ROW_TILES][4];
            fn_deep_set(d, 0.f);
#pragma unroll 1
            while (at < end) {
                u32 n = fn_min_u32((at & ~3u) + 4u, end) - at, a[4][4];
                decode_steps(walk.format, n, a);
#pragma unroll
                for (u32 i = 0; i < 4; i++)
                    if (i < n)
                        fn_deep_step(s.rows[i_block % STAGES], (at & 3u) + i, a[i],
                                     walk.format == FN_FORMAT_BF16, ROW_TILES, d);
                release(i_block);
                at += n;
                i_block++;
            }
            units_sum.add(walk.leaves, walk.segments, d, sum);
        }
    }
#else
  public:
    FN_DEVICE void load(u32, const FnDeepWeights&, const FnDeepRows&) {}

  private:
    template <u32 ROW_TILES>
    FN_DEVICE void walk(const FnDeepWeights& w, const FnDeepRows& rows, float (&sum)[ROW_TILES][4]) {
        u32 units = w.leaves * w.segments, steps = w.k / 16u / units, at = 0, warp = fn_thread_here() >> 5;
        u32 n_tiles = (rows.live + 7u) / 8u, of_warp = w.tile(warp), bytes = step_bytes(w.w.format);
        bool exl3 = fn_is_exl3(w.w), bf16 = w.w.format == FN_FORMAT_BF16;
        bool works = warp < FN_DEEP_WARPS && of_warp < w.limit;
        u32 stride = exl3 ? w.n / 16u * bytes : 512u;
        const u8* data = reinterpret_cast<const u8*>(w.w.data) + (u64)of_warp * (exl3 ? bytes : w.k / 16u * 512u);
        FnDeepSum<ROW_TILES> units_sum(sum);
#pragma unroll 1
        for (u32 unit = 0; unit < units; unit++) {
            u32 end = at + steps;
            float d[ROW_TILES][4];
            fn_deep_set(d, 0.f);
#pragma unroll 1
            while (at < end) {
                u32 n = fn_min_u32((at & ~3u) + 4u, end) - at, a[4][4];
                __syncthreads();
                // Whole rows of 8 chunks; the last pair of row tiles is copied as far as it is read.
                for (u32 i = fn_thread_here(); i < 128u * ((n_tiles + 1u) / 2u); i += FN_DEEP_THREADS) {
                    u64 image = (u64)(i >> 9) * rows.k_blocks + (at >> 2);
                    const uint4* from = reinterpret_cast<const uint4*>(rows.x + image * 4096u) + (i & 511u);
                    reinterpret_cast<uint4*>(s.rows[0])[i] = fn_ldg(from);
                }
                __syncthreads();
                if (works) {
                    fn_deep_operand<KIND>(w.w.format, data + (u64)at * stride, stride, n, a);
#pragma unroll
                    for (u32 i = 0; i < 4; i++)
                        if (i < n) fn_deep_step(s.rows[0], (at & 3u) + i, a[i], bf16, n_tiles, d);
                }
                at += n;
            }
            units_sum.add(w.leaves, w.segments, d, sum);
        }
    }
#endif
};
