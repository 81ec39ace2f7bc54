// delay.cuh: what brings a missing barrier to light on a GPU.  fn_delay holds a thread back for some thousand
// clock cycles; fn_poison_shared fills a block's shared memory with NaN, as it may still hold what an earlier
// launch of the same work left there.  Only planted controls of the check use them: no kernel includes this file.
// In the simulator they do nothing: there shared memory is poison, and seeds change the order of lanes, warps
// and blocks.
#pragma once
#include "prelude.cuh"

FN_DEVICE void fn_delay() {
#ifndef FN_SIM
    long long start = clock64();
    while (clock64() - start < 30000) {
    }
#endif
}

// All threads of the block; bytes a multiple of 4.
FN_DEVICE void fn_poison_shared(void* shared, u32 bytes) {
#ifndef FN_SIM
    for (u32 i = threadIdx.x; i < bytes / 4u; i += blockDim.x) reinterpret_cast<u32*>(shared)[i] = 0xffffffffu;
    __syncthreads();
#endif
}
