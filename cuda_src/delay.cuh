// delay.cuh: holds a thread back for some thousand clock cycles, so that a missing barrier shows on a GPU.  Only
// planted controls of the check use it: no kernel includes it.  In the simulator it does nothing: there seeds
// change the order of lanes, warps and blocks.
#pragma once
#include "prelude.cuh"

FN_DEVICE void fn_delay() {
#ifndef FN_SIM
    long long start = clock64();
    while (clock64() - start < 30000) {
    }
#endif
}
