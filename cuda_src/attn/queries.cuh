// attn/queries.cuh: the queries of a group of heads as mma operands in shared memory.  Used by qsa_attn and qsa_deep.
#pragma once
#include "attn/pages.cuh"

// to: B operands of 8 heads each, by k step and lane.  from: f16 rows of `group` heads; heads beyond it are zero, and
// their sums not used.  16 bytes are half a k step.
FN_DEVICE void fn_load_queries(uint2 (&to)[2][16][32], const u16* from, u32 group) {
    u32 heads = group <= 8u ? 8u : 16u;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < heads * (FN_HEAD / 8u); i += FN_THREADS) {
        u32 head = i / (FN_HEAD / 8u), half = i % (FN_HEAD / 8u);
        uint4 w = make_uint4(0u, 0u, 0u, 0u);
        if (head < group) w = fn_ld(reinterpret_cast<const uint4*>(from) + i);
        *reinterpret_cast<uint4*>(&to[head / 8u][half / 2u][4u * (head & 7u) + 2u * (half & 1u)]) = w;
    }
}
