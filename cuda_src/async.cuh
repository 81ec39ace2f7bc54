// async.cuh: copies from global to shared memory that run beside the thread which asked for them.  A thread
// issues copies, closes a group with fn_cp_async_commit, and after fn_cp_async_wait<N> all its groups but the
// N newest have arrived; other threads may read them behind the next barrier.  A kernel waits for every group
// before it ends.  In the simulator each copy happens where it is issued or where it is waited for, by seed
// (seed 0: where it is waited for), so a missing wait and a target still in use both change bytes.
#pragma once
#include "prelude.cuh"

#ifdef FN_SIM
#include "sim/async.h"
#else

// BYTES 4, 8 or 16, both addresses multiples of it.
template <u32 BYTES>
FN_DEVICE void fn_cp_async(void* shared, const void* global) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "copies of 4, 8 or 16 bytes");
    u32 at = (u32)__cvta_generic_to_shared(shared);
    if (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(global) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(global), "n"(BYTES)
                     : "memory");
    }
}
FN_DEVICE void fn_cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <u32 GROUPS>
FN_DEVICE void fn_cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}
#endif

FN_DEVICE void fn_cp_async16(void* shared, const void* global) { fn_cp_async<16>(shared, global); }
