// embed_rows: puts the token's embedding row into all four residual streams.
// Contract    table (vocab, hidden) f16 or bf16, rows[r].token < vocab -> streams (rows_cap, 4 * hidden) f32.
//             hidden % 4 == 0.  format: FN_FORMAT_F16 or FN_FORMAT_BF16.  Rows >= n_rows are not written.
// Launch      grid (ceil(hidden / 512), rows_cap), block 128, no shared memory.  Four channels a thread.
// Arithmetic  none: both conversions are exact.
// Equality    a copy; NaN and Inf reach the streams.
// Reference   ref/token.py embed_rows.  Source: checkpoint tensor embed_tokens.weight.
#include "prelude.cuh"
#include "tables.cuh"

FN_KERNEL((const FnRound* round, const FnRow* rows, const u16* table, u32 format, float* streams,
           u32 hidden)) {
    fn_let_next();
    u32 r = blockIdx.y, i = 4u * (blockIdx.x * FN_THREADS + threadIdx.x);
    fn_wait_prior();
    if (r >= round->n_rows || i >= hidden) return;
    const u16* row = table + (u64)rows[r].token * hidden;
    uint2 w = fn_ldg(reinterpret_cast<const uint2*>(row + i));
    float4 v;
    if (format == FN_FORMAT_BF16) {
        v.x = fn_b2f((u16)w.x), v.y = fn_b2f((u16)(w.x >> 16));
        v.z = fn_b2f((u16)w.y), v.w = fn_b2f((u16)(w.y >> 16));
    } else {
        v.x = fn_h2f((u16)w.x), v.y = fn_h2f((u16)(w.x >> 16));
        v.z = fn_h2f((u16)w.y), v.w = fn_h2f((u16)(w.y >> 16));
    }
    float* out = streams + (u64)r * 4u * hidden + i;
    for (u32 j = 0; j < 4; ++j) *reinterpret_cast<float4*>(out + (u64)j * hidden) = v;
}
