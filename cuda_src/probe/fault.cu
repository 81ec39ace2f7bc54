// fault: breaks one rule on purpose, so that the simulator's findings can be tested.  Never launched on a
// GPU. Contract    x (128) u32 r, y (128) u32 w.  mode: 0 nothing wrong, y = x; 1 half a warp waits at a
// block barrier;
//             2 a lane exits before a collective of its warp; 3 a warp exits before a block barrier; 4 lanes
//             of a warp in different collectives; 5 writes past its shared memory; 6 writes x; 7 reads far
//             outside; 8 loads misaligned; 9 writes y[index]; 10 divides by x[0] (an integer).  Of a programmatic
//             launch, y = x + 1: 11 nothing wrong; 12 reads x before fn_wait_prior; 13 a warp does not wait.
// Launch      grid (any), block 128, shared FaultShared.
#include "../warp.cuh"

namespace FN_NAMESPACE {
struct FaultShared {
    u32 value[8];
};
}  // namespace FN_NAMESPACE

FN_KERNEL((const u32* x, u32* y, u32 mode, u32 index)) {
    FN_SHARED(FN_NAMESPACE::FaultShared, shared);
    fn_let_next();
    u32 t = threadIdx.x, lane = t & 31, v = mode == 12 ? x[t] + 1 : 0;
    if (mode != 13 || t < 96) fn_wait_prior();
    if (mode != 12) v = x[t] + (mode == 11 || mode == 13 ? 1 : 0);
    shared.value[t & 7] = 0;
    if (mode == 1 && lane < 16) __syncthreads();
    if (mode == 1 && lane >= 16) v += fn_ballot(true);
    if (mode == 2 && t == 33) return;
    if (mode == 2) v = fn_shfl_xor(v, 1);
    if (mode == 3 && t >= 96) return;
    if (mode == 3) __syncthreads();
    if (mode == 4) v = lane < 7 ? fn_warp_sum_u32(v) : fn_ballot(v != 0);
    if (mode == 5 && t == 0) shared.value[8 + index] = 1;
    if (mode == 6 && t == 5) const_cast<u32*>(x)[5] = v + 1;
    if (mode == 7 && t == 64) v = fn_ld(x + ((u64)1 << 40));
    if (mode == 8 && t == 1) v = (u32)fn_ld(reinterpret_cast<const u64*>(x + 1));
    if (mode == 9 && t == 0) y[index] = 7;
    if (mode == 10) v = 1000u / x[0];
    // volatile: the compiler may not drop the shared struct that the declaration promises
    y[t] = v + *const_cast<volatile u32*>(&shared.value[t & 7]);
}
