// half_rows.cuh: operands of prompt kernels: a warp makes 16 rows of 128 inputs at a time, half a row a lane.
//
// Lane l has 64 inputs of row l & 15, the half l >> 4, so six of the seven stages of a rotation exchange nothing and
// the last one half of what a lane holds.  Rows come by asynchronous copies while those before are worked on, once for
// all operands that are made of them.  Sums are rounded into shared memory and leave from there by whole lines: from
// its registers a lane would store 16 bytes of a line, an instruction 32 lines instead of four.
//
// Use, by whole warps, which know nothing of each other (no barrier of the block):
//   FN_SHARED(Kernel's struct with an FnHalfRows for each warp, s);
//   fn_half_rows(s.warp[threadIdx.x >> 5], work);
// Work has
//   units                       of 16 rows and 128 inputs; warp w of the block takes w, w + warps of a block, ...
//   at(unit)                    FnHalfUnit
//   row(unit)                   index of the input row that is row lane & 15 of the unit; any that exists where the
//                               unit has fewer rows or there is no such unit
//   inputs, pitch, columns      f32 rows, floats between them, floats that a row has
//   plain(block), rotated(block)  operands to make of these 128 inputs, a bit each
//   suh(i), operand(i)          of operand i: its scales, the linear's, and FnHalfOperand
#pragma once
#include "async.cuh"
#include "exl3.cuh"

// A warp's own.  Pitches: rows that are read side by side begin in different banks.
struct FnHalfRows {
    float in[16][132];
    float scale[128];
    u16 out[16][72];
};

// Rows first .. first + live - 1 of the tile images, first a multiple of 16; inputs 128 block .. + 127.
struct FnHalfUnit {
    u32 first, live, block;
};

// A tile image of k inputs.
struct FnHalfOperand {
    u16* x;
    u32 k;
};

// A lane's half of a row, as fn_half_hadamard takes it.
FN_DEVICE void fn_half_load(const float* row, float (&v)[64]) {
    u32 upper = (threadIdx.x & 31u) >> 4;
    const float* part[2] = {row + 96u * upper, row + 32u + 32u * upper};
#pragma unroll
    for (u32 j = 0; j < 16; j++) {
        float4 f = *reinterpret_cast<const float4*>(part[j >> 3] + 4u * (j & 7u));
        v[4u * j] = f.x, v[4u * j + 1u] = f.y, v[4u * j + 2u] = f.z, v[4u * j + 3u] = f.w;
    }
}

// Where the 16-byte piece `lane` of four neighbouring rows from 4 t on, 64 inputs each, comes from: its row and its
// first input.  In a tile image the pieces of a row are exchanged by xor with the row.
FN_DEVICE u32 fn_half_row(u32 t) { return 4u * t + ((threadIdx.x & 31u) >> 3); }
FN_DEVICE u32 fn_half_input(u32 t) { return 8u * ((threadIdx.x & 7u) ^ (fn_half_row(t) & 7u)); }

// The lane's piece of a unit's first four rows and 64 inputs; the next four rows begin 256 further on, the other 64
// inputs 4096.
FN_DEVICE u16* fn_half_to(const FnHalfOperand& to, const FnHalfUnit& unit) {
    return to.x + fn_tile_at((to.k + 63u) / 64u, unit.first, 128u * unit.block) + 8u * (threadIdx.x & 31u);
}

// 32 sums of a lane, of inputs 32 upper + i of 64, rounded to f16 into the image.
FN_DEVICE void fn_half_store(FnHalfRows& s, const FnHalfUnit& unit, u16* to, const float* v) {
    u32 lane = threadIdx.x & 31u;
    u16* out = s.out[lane & 15u] + 32u * (lane >> 4);
#pragma unroll
    for (u32 c = 0; c < 4; c++)
        *reinterpret_cast<uint4*>(out + 8u * c) =
            make_uint4(fn_pack_h2(v[8u * c], v[8u * c + 1u]), fn_pack_h2(v[8u * c + 2u], v[8u * c + 3u]),
                       fn_pack_h2(v[8u * c + 4u], v[8u * c + 5u]), fn_pack_h2(v[8u * c + 6u], v[8u * c + 7u]));
    __syncwarp();
#pragma unroll
    for (u32 t = 0; t < 4; t++) {
        uint4 piece = *reinterpret_cast<const uint4*>(s.out[fn_half_row(t)] + fn_half_input(t));
        if (fn_half_row(t) < unit.live) *reinterpret_cast<uint4*>(to + 256u * t) = piece;
    }
    __syncwarp();
}

// The inputs as they are, rounded to f16; nothing beyond k, a multiple of 16.
FN_DEVICE void fn_half_round(const FnHalfRows& s, const FnHalfUnit& unit, const FnHalfOperand& operand) {
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        u32 half = i >> 2, t = i & 3u, row = fn_half_row(t), input = 64u * half + fn_half_input(t);
        if (row >= unit.live || 128u * unit.block + input >= operand.k) continue;
        float4 a = *reinterpret_cast<const float4*>(s.in[row] + input);
        float4 b = *reinterpret_cast<const float4*>(s.in[row] + input + 4u);
        *reinterpret_cast<uint4*>(fn_half_to(operand, unit) + 4096u * half + 256u * t) =
            make_uint4(fn_pack_h2(a.x, a.y), fn_pack_h2(a.z, a.w), fn_pack_h2(b.x, b.y), fn_pack_h2(b.z, b.w));
    }
}

// Asks for the unit's rows and, where it has fewer than 16, for others in their place, which nobody stores.  row:
// Work::row.  Beyond the columns a lane takes the last ones.
template <class Work> FN_DEVICE void fn_half_bring(FnHalfRows& s, const Work& work, u32 unit, u32 row) {
    u32 lane = threadIdx.x & 31u, column = fn_min_u32(128u * work.at(unit).block + 4u * lane, work.columns - 4u);
    const u8* from = reinterpret_cast<const u8*>(work.inputs + column);
    const u32 bytes = 4u * work.pitch;
#pragma unroll
    for (u32 r = 0; r < 16; r++) fn_cp_async16(s.in[r] + 4u * lane, from + (u64)fn_shfl(row, r) * bytes);
    fn_cp_async_commit();
}

template <class Work> FN_DEVICE void fn_half_rows(FnHalfRows& s, const Work& work) {
    const u32 lane = threadIdx.x & 31u, warps = FN_THREADS / 32u;
    u32 unit = fn_shfl(threadIdx.x >> 5, 0u);  // so that the compiler sees one value a warp
    if (unit >= work.units) return;
    fn_half_bring(s, work, unit, work.row(unit));
    u32 row = work.row(unit + warps);
#pragma unroll 1
    for (; unit < work.units; unit += warps) {
        const FnHalfUnit here = work.at(unit);
        u32 plain = work.plain(here.block), rotated = work.rotated(here.block), i = fn_ffs(rotated) - 1u;
        const u32 scales = 128u * here.block + 4u * lane;
        uint2 suh = make_uint2(0u, 0u);  // of the operand that comes next
        if (rotated) suh = fn_ldg(reinterpret_cast<const uint2*>(work.suh(i) + scales));
        fn_cp_async_wait<0>();
        __syncwarp();
#pragma unroll 1
        for (; plain; plain &= plain - 1u) fn_half_round(s, here, work.operand(fn_ffs(plain) - 1u));
        float x[64], v[64];
        if (rotated) fn_half_load(s.in[lane & 15u], x);
        __syncwarp();
        if (unit + warps < work.units) {
            fn_half_bring(s, work, unit + warps, row);
            row = work.row(unit + 2u * warps);
        }
#pragma unroll 1
        while (rotated) {
            float wide[4];
            fn_widen_h4(suh, wide);
            *reinterpret_cast<float4*>(s.scale + 4u * lane) = make_float4(wide[0], wide[1], wide[2], wide[3]);
            u16* to = fn_half_to(work.operand(i), here);
            rotated &= rotated - 1u;
            i = fn_ffs(rotated) - 1u;
            if (rotated) suh = fn_ldg(reinterpret_cast<const uint2*>(work.suh(i) + scales));
            __syncwarp();
            fn_half_load(s.scale, v);
#pragma unroll
            for (u32 j = 0; j < 64; j++) v[j] = fn_mul(x[j], v[j]);
            fn_half_hadamard(v);
            fn_half_store(s, here, to, v);
            fn_half_store(s, here, to + 4096, v + 32);
        }
    }
}
