// warp_ops: every exchange, vote, tree, ldmatrix and bit tool once, in one warp after the other.
// Contract    x (128) f32, k (128) u64 -> f (11, 128) f32, u (16, 128) u64, counts (4) u64 (added to, min,
// max).
//             Rows of f and u: check/cases_probe.py computes each.
// Launch      grid (1), block 128, shared WarpOpsShared.
// Arithmetic  fn_warp_sum, fn_warp_sum4, fn_hadamard128 as in warp.cuh; float adds in their orders.
// Equality    same bytes on a GPU and in the simulator, whatever the order of lanes.
// Reference   check/cases_probe.py.
#include "../mma.cuh"
#include "../warp.cuh"

struct WarpOpsShared {
    u16 rows[4][32][8];
};

FN_KERNEL((const float* x, const u64* k, float* f, u64* u, u64* counts)) {
    FN_SHARED(WarpOpsShared, shared);
    u32 t = threadIdx.x, lane = t & 31, warp = t >> 5;
    float v = x[t];
    u64 w = k[t];
    f[t] = fn_shfl(v, (lane * 7 + 3) & 31);
    f[128 + t] = fn_shfl_xor(v, 5);
    f[256 + t] = fn_shfl_up(v, 3);
    f[384 + t] = fn_shfl_down(v, 9);
    f[512 + t] = fn_warp_sum(v);
    f[640 + t] = fn_warp_max(v);
    f[768 + t] = fn_warp_sum4(v);
    float h[4] = {v, fn_mul(v, 0.5f), fn_sub(v, 1.f), fn_add(v, 3.f)};
    fn_hadamard128(h);
    for (u32 i = 0; i < 4; i++) f[896 + 128 * i + t] = h[i];
    u[t] = fn_shfl(w, 31 - lane);
    u[128 + t] = fn_shfl_xor(w, 16);
    u[256 + t] = fn_warp_sum_u64(w);
    u[384 + t] = fn_warp_sum_u32((u32)w);
    u[512 + t] = fn_ballot((w & 1) != 0);
    u[640 + t] = (u64)fn_any(v > 0.5f) | (u64)fn_all(v > -2.f) << 1;
    for (u32 i = 0; i < 8; i++) shared.rows[warp][lane][i] = (u16)(t * 8 + i);
    __syncwarp();
    u32 m[4], mt[4];
    fn_ldmatrix_x4(m, &shared.rows[warp][lane]);
    fn_ldmatrix_x4_trans(mt, &shared.rows[warp][lane]);
    for (u32 i = 0; i < 4; i++) u[768 + 128 * i + t] = (u64)m[i] | (u64)mt[i] << 32;
    u32 a = (u32)w, b = (u32)(w >> 32);
    u[1280 + t] = (u64)fn_popc(a) | (u64)fn_clz(a) << 8 | (u64)fn_ffs(a) << 16 | (u64)fn_brev(b) << 32;
    u[1408 + t] = (u64)fn_umulhi(a, b) | (u64)fn_dp4a_u8(a, 0x01010101u, b) << 32;
    u[1536 + t] = (u64)fn_funnel_r(a, b, lane) | (u64)fn_funnel_l(a, b, lane) << 32;
    u[1664 + t] = fn_umulhi64(w, k[t ^ 1]);
    u[1792 + t] = (u64)fn_min_u32(a, b) | (u64)fn_max_u32(a, b) << 32;
    u[1920 + t] = (u64)(u32)fn_min_i32((i32)a, (i32)b) | (u64)(u32)fn_max_i32((i32)a, (i32)b) << 32;
    fn_atomic_add_u64(&counts[0], w);
    fn_atomic_min_u64(&counts[1], w);
    fn_atomic_max_u64(&counts[2], w);
    fn_atomic_or_u32(reinterpret_cast<u32*>(&counts[3]), 1u << lane);
    fn_atomic_add_u32(reinterpret_cast<u32*>(&counts[3]) + 1, lane);
}
