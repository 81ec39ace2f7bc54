// shared_wide: reverses rows through a struct of shared memory larger than 48 KiB, from its first word to its
// last.
// Contract    x (blocks, 1024) u32 -> y (blocks, 1024) u32: y[b][i] = x[b][1023 - i] + the struct's address
//             modulo 1024, which is 0.  Touches nothing else.
// Launch      grid (blocks), block 128, shared WideShared: dynamic, and of another size on sm_90a.
// Arithmetic  integers.
// Equality    the same bytes for either size of the struct, in any order of lanes, warps and blocks.
// Reference   check/cases_probe.py.
#include "../prelude.cuh"

namespace FN_NAMESPACE {
#ifdef FN_HOPPER
constexpr u32 WORDS = 51200;
#else
constexpr u32 WORDS = 20480;
#endif
constexpr u32 COUNT = 1024, STEP = WORDS / COUNT;

struct WideShared {
    u32 word[WORDS];
};

// Where value i stands: all over the struct, the last one in its last word.
FN_DEVICE u32 place(u32 i) { return i == COUNT - 1u ? WORDS - 1u : i * STEP; }
}  // namespace FN_NAMESPACE

FN_KERNEL((const u32* x, u32* y)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(WideShared, shared);
    u32 t = threadIdx.x, first = blockIdx.x * COUNT;
    for (u32 i = t; i < COUNT; i += FN_THREADS) shared.word[place(i)] = x[first + i];
    __syncthreads();
    u32 off = (u32)((u64)&shared & 1023u);
    for (u32 i = t; i < COUNT; i += FN_THREADS) y[first + i] = shared.word[place(COUNT - 1u - i)] + off;
}
