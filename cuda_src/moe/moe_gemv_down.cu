// moe_gemv_down: partial sums of the down projections of every (row, slot).
// Contract    routes FnRoute (rows_cap, n_slots); lines FnLine[]; x (rows_cap, n_slots, width_cap) f16
//             operands -> part (units, rows_cap, n_slots, hidden) f32, rows < n_rows, units below the line's
//             own.  EXL3 projections of any width and codebook, each line its own; hidden, width % 128 == 0.
// Launch      grid (blocks, n_slots, rows_cap), block 64, any number of blocks: they share a dot's hidden / 32 *
//             segments units of 32 outputs, 2^s units that follow each other to a block with the smallest s that
//             does.  It does them for all of its row's eight that chose the same expert: the first of these.
// Arithmetic  order exl3_dot_v1, one leaf, fn_dot_segments(width, hidden, 1) segments.  Rows of an mma do not
//             meet.
// Equality    the same bytes as linear_gemv for the same operand, weights and segments.
// Reference   ref/exl3.py decode_linear, ref/orders.py mma_chain.
#include "moe/gemv_slot.cuh"

FN_KERNEL((const FnRound* round, const FnRoute* routes, const FnLine* lines, const u16* x, float* part,
           u32 hidden, u32 n_slots, u32 width_cap)) {
    fn_let_next();
    u32 n_rows = fn_ld_here(&round->n_rows), rows_cap = fn_ld_here(&round->rows_cap);
    u32 row = blockIdx.z, slot = blockIdx.y;
    u32 expert = fn_ld_here(&routes[(u64)row * n_slots + slot].expert);
    if ((row >= n_rows) | (rows_cap == 0) | (expert == 0xffffffffu)) {  // one branch: loads at once
        fn_wait_prior();
        return;
    }
    const FnLine& line = lines[expert];
    u64 data = line.down.data;
    u32 format = line.down.format, width = line.width, unit_stride = rows_cap * n_slots * hidden;
    FnSlotDots dots{routes, n_rows, n_slots, 1u, 0u, FN_SEGMENT_LOG2};
    fn_slot_dot(dots, expert, row, slot, data, format, width, hidden, x, width_cap, part, hidden, unit_stride);
}
