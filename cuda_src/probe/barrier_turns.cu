// barrier_turns: passes a value round the block through shared memory, `turns` times.
// Contract    x (blocks, 256) u32 -> y (blocks, 256) u32: y[b][t] = x[b][(t + turns) % 256] + turns.
// Launch      grid (blocks), block 256, shared TurnShared.  FN_PROBE_BROKEN 1: the barrier after reading is
// left out,
//             a planted fault that other lane orders must bring to light (never launched on a GPU).
// Arithmetic  integers.
// Equality    the whole one gives the same bytes in any order of lanes, warps and blocks.
// Reference   check/cases_probe.py.
#include "../prelude.cuh"

namespace FN_NAMESPACE {
struct TurnShared {
    u32 value[256];
};
}  // namespace FN_NAMESPACE

FN_KERNEL((const u32* x, u32* y, u32 turns)) {
    FN_SHARED(FN_NAMESPACE::TurnShared, shared);
    u32 t = threadIdx.x, at = blockIdx.x * 256 + t, v = x[at];
    for (u32 i = 0; i < turns; i++) {
        shared.value[t] = v;
        __syncthreads();
        v = shared.value[(t + 1) & 255] + 1;
#if !FN_PROBE_BROKEN
        __syncthreads();
#endif
    }
    y[at] = v;
}
