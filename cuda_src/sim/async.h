// async.h: the simulator's side of async.cuh.
#pragma once
#include "shim.h"

namespace fnsim {
// Of the running fiber.
FN_SIM_HIDDEN void async_copy(void* to, const void* from, unsigned size_bytes);
FN_SIM_HIDDEN void async_commit();
FN_SIM_HIDDEN void async_wait(unsigned n_newest);
FN_SIM_HIDDEN void async_forget();  // a block begins: what the one before left behind never happens
FN_SIM_HIDDEN bool async_pending();  // whether a fiber of the block has issued a copy
}  // namespace fnsim

template <u32 BYTES>
FN_DEVICE void fn_cp_async(void* shared, const void* global) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "copies of 4, 8 or 16 bytes");
    if (((size_t)shared | (size_t)global) & (BYTES - 1)) fnsim::misaligned(shared, BYTES);
    fnsim::async_copy(shared, global, BYTES);
}
FN_DEVICE void fn_cp_async_commit() { fnsim::async_commit(); }
template <u32 GROUPS>
FN_DEVICE void fn_cp_async_wait() {
    fnsim::async_wait(GROUPS);
}
