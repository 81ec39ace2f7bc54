// rows4.cuh: four rows of 128 elements in a warp, for kernels that transform many rows.
//
// Lane l holds 16 elements of row l / 8: v[4 j + i] is element 32 j + 4 (l % 8) + i (j 0..3, i 0..3), so a
// warp's float4 j are 128 contiguous bytes of each row.  Index bits 0, 1, 5, 6 lie in the lane: a butterfly
// exchanges 48 words of a lane for four rows where fn_hadamard128 exchanges 80.
#pragma once
#include "exl3.cuh"

FN_DEVICE u32 fn_rows4_row() { return (threadIdx.x & 31u) >> 3; }
FN_DEVICE u32 fn_rows4_at(u32 j) { return 32u * j + 4u * (threadIdx.x & 7u); }  // element of v[4 j]

// Butterflies of elements that differ in one bit of the index into v.
template <u32 BIT>
FN_DEVICE void fn_rows4_stage(float (&v)[16]) {
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
        if (i & BIT) continue;
        float a = v[i], b = v[i | BIT];
        v[i] = fn_add(a, b);
        v[i | BIT] = fn_sub(a, b);
    }
}

// The bytes of fn_hadamard128 for each of the four rows: stages in the order of index bits 0 .. 6, lower
// a + b, upper a - b, then times 1/sqrt(128).  fma(v, +-1, o) is o + v or o - v, rounded once.
FN_DEVICE void fn_rows4_hadamard(float (&v)[16]) {
    fn_rows4_stage<1>(v);
    fn_rows4_stage<2>(v);
#pragma unroll
    for (u32 m = 1; m < 8; m <<= 1) {
        float sign = threadIdx.x & m ? -1.f : 1.f;
#pragma unroll
        for (u32 i = 0; i < 16; i++) v[i] = fn_fma(v[i], sign, fn_shfl_xor(v[i], m));
    }
    fn_rows4_stage<4>(v);
    fn_rows4_stage<8>(v);
#pragma unroll
    for (u32 i = 0; i < 16; i++) v[i] = fn_mul(v[i], 0.088388347648f);
}

// The lane's 16 of 128 f16 values (scales) as f32, and of a row of f32.
FN_DEVICE void fn_rows4_load_h(const u16* p, float (&v)[16]) {
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        float h[4];
        fn_load_h4(p + fn_rows4_at(j), h);
#pragma unroll
        for (u32 i = 0; i < 4; i++) v[4u * j + i] = h[i];
    }
}
FN_DEVICE void fn_rows4_load(const float* p, float (&v)[16]) {
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        float4 f = fn_ld(reinterpret_cast<const float4*>(p + fn_rows4_at(j)));
        v[4u * j] = f.x, v[4u * j + 1u] = f.y, v[4u * j + 2u] = f.z, v[4u * j + 3u] = f.w;
    }
}
FN_DEVICE void fn_rows4_store(float* p, const float (&v)[16]) {
#pragma unroll
    for (u32 j = 0; j < 4; j++)
        *reinterpret_cast<float4*>(p + fn_rows4_at(j)) =
            make_float4(v[4u * j], v[4u * j + 1u], v[4u * j + 2u], v[4u * j + 3u]);
}
// Rounded to f16 into row `row` of a tile image, at inputs 128 block .. + 127.
FN_DEVICE void fn_rows4_store_tile(u16* x, u32 k_blocks, u32 row, u32 block, const float (&v)[16]) {
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        float h[4] = {v[4u * j], v[4u * j + 1u], v[4u * j + 2u], v[4u * j + 3u]};
        fn_store_tile4(x, k_blocks, row, 128u * block + fn_rows4_at(j), h);
    }
}
