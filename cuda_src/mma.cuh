// mma.cuh: tensor-core products, m16n8k16, row x col, f32 accumulator, full warp.  In the simulator an
// integer model with the bits of the chosen generation (sim/mma.cpp).  With g = lane / 4, t = lane % 4, low
// half of a word first:
//   a[0] A(g, 2t..2t+1)  a[1] A(g+8, 2t..)  a[2] A(g, 2t+8..)  a[3] A(g+8, 2t+8..)
//   b[0] B(2t..2t+1, g)  b[1] B(2t+8.., g)      d[0..1] D(g, 2t..2t+1)  d[2..3] D(g+8, 2t..2t+1)
#pragma once
#include "prelude.cuh"

#ifdef FN_SIM
#include "sim/collective.h"
#else

// d += A B.
FN_DEVICE void fn_mma_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
FN_DEVICE void fn_mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8x8 matrices of 16-bit elements from shared memory: lane l gives the address of row l % 8 of matrix l
// / 8 (16 bytes, aligned); r[i] of lane l is word l % 4 of row l / 4 of matrix i.
FN_DEVICE void fn_ldmatrix_x4(u32 (&r)[4], const void* smem) {
    u32 at = (u32)__cvta_generic_to_shared(smem);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
// The same with each matrix transposed: r[i] of lane l holds rows 2 (l % 4) and 2 (l % 4) + 1 of column l
// / 4.
FN_DEVICE void fn_ldmatrix_x4_trans(u32 (&r)[4], const void* smem) {
    u32 at = (u32)__cvta_generic_to_shared(smem);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
#endif
