// ple_tail: keeps the conv inputs of a run's last nine tokens for the tokens after it.
// Contract    conv_in (rows_cap, 4 hidden) f16 of ple_gate; tail f16 (9, 4 hidden) at
//             slots[run.slot].recurrent + tail_offset, oldest first: becomes the last nine of (tail, the
//             run's rows).  hidden % 2 == 0.  One run a slot.  Runs >= round.n_runs are not read; nothing
//             else is written.
// Launch      grid (ceil(4 hidden / 512), rows_cap as runs), block 256.  A thread owns two channels of a run
//             and reads all of them before it writes.
// Arithmetic  none: copies.
// Equality    with ple_gate and ple_conv the bytes of ple_mix.
// Reference   ref/token.py Ple.  Source: config.json ple_conv_kernel_size 4, ngram_size 3 (dilation).
#include "prelude.cuh"
#include "tables.cuh"

namespace FN_NAMESPACE {
const u32 REACH = 9;
}

FN_KERNEL((const FnRound* round, const FnRun* runs, const FnSlot* slots, const u16* conv_in, u64 tail_offset,
           u32 hidden)) {
    using namespace FN_NAMESPACE;
    u32 c = 2u * (blockIdx.x * FN_THREADS + threadIdx.x), width = 4u * hidden;
    if (blockIdx.y >= fn_ld(&round->n_runs) || c >= width) return;
    FnRun run = runs[blockIdx.y];
    u16* tail = reinterpret_cast<u16*>(slots[run.slot].recurrent + tail_offset) + c;
    const u16* rows = conv_in + (u64)run.first_row * width + c;
    u32 kept[REACH];
#pragma unroll
    for (u32 t = 0; t < REACH; t++) {
        u32 at = t + run.n_rows;  // of (tail, rows)
        kept[t] = at < REACH ? fn_ld(reinterpret_cast<const u32*>(tail + (u64)at * width))
                             : fn_ldg(reinterpret_cast<const u32*>(rows + (u64)(at - REACH) * width));
    }
#pragma unroll
    for (u32 t = 0; t < REACH; t++) *reinterpret_cast<u32*>(tail + (u64)t * width) = kept[t];
}
