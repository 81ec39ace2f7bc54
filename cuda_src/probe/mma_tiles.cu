// mma_tiles_f16, mma_tiles_bf16: independent tiles through one mma each.
// Contract    a (n, 16, 16) u16, b (n, 8, 16) u16 (output column major), c (n, 16, 8) f32 -> d (n, 16, 8)
// f32: c + a b. Launch      grid (ceil(n/4)), block 128: one warp a tile.  FN_PROBE_BF16: 1 for bf16
// operands. Arithmetic  one m16n8k16 step. Equality    same bytes on a GPU and in the simulator set to its
// generation. Reference   check/mma_model.py.
#include "../mma.cuh"

FN_KERNEL((const u16* a, const u16* b, const float* c, float* d, u32 n)) {
    u32 tile = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (tile >= n) return;  // whole warps
    const u16 *ta = a + tile * 256, *tb = b + tile * 128;
    u32 g = lane >> 2, t = 2 * (lane & 3), ra[4], rb[2];
    float acc[4];
    for (u32 i = 0; i < 4; i++) {
        const u16* p = ta + (g + 8 * (i & 1)) * 16 + t + 8 * (i >> 1);
        ra[i] = fn_pack_h2(p[0], p[1]);
        acc[i] = c[tile * 128 + (g + 8 * (i >> 1)) * 8 + t + (i & 1)];
    }
    for (u32 i = 0; i < 2; i++) rb[i] = fn_pack_h2(tb[g * 16 + t + 8 * i], tb[g * 16 + t + 8 * i + 1]);
#if FN_PROBE_BF16
    fn_mma_bf16(acc, ra, rb);
#else
    fn_mma_f16(acc, ra, rb);
#endif
    for (u32 i = 0; i < 4; i++) d[tile * 128 + (g + 8 * (i >> 1)) * 8 + t + (i & 1)] = acc[i];
}
