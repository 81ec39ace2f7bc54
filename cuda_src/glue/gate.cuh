// gate.cuh: sigmoid or silu of one value in one piece of code, where a kernel needs both or a choice: half
// the instructions of two inlined functions, which counts in kernels whose code runs once.
#pragma once
#include "prelude.cuh"

// The bytes of fn_silu(x) if silu, else of fn_sigmoid(x).
FN_DEVICE float fn_gate(float x, bool silu) {
    float t = fn_exp_down(fn_minus_abs(x)), d = fn_add(t, 1.f), factor = x < 0.f ? t : 1.f;
    float both = x < 0.f ? fn_mul(x, t) : x;
    return fn_div_1to2(silu ? both : factor, d, fn_rcp_1to2(d));
}
