// line_fill: copies experts from host memory into the device lines that line_resolve gave them.
// Contract    fills FnFill (cache.n_fills or more) -> at `to` the `bytes` bytes from `from` on, for the first
//             n_fills; addresses and bytes are multiples of 16.  Touches nothing else.
// Launch      grid (any), block 256, no shared.  Blocks take pieces of 256 x LOADS words of 16 bytes in turn,
//             the fills one behind the other, so no block waits for another:
//                 fill 0: block 0 | 1 | 2 | 3 | 0 | 1    fill 1: block 2 | 3 | 0 | ...    (grid 4)
//             64 blocks ask for 2 MiB at once; a link of 50 GB/s that answers in 2 us needs 0.1 MB under way.
// Arithmetic  none.
// Equality    the bytes of `from`.
// Reference   ref/lines.py line_fill.
#include "prelude.cuh"
#include "tables.cuh"

namespace FN_NAMESPACE {
const u32 LOADS = 8;  // of a thread under way
const u32 PIECE = FN_THREADS * LOADS;

struct Fill {
    u64 to, from;
    u32 words;
};

FN_DEVICE Fill fill_at(const FnFill* fill) {
    return Fill{fn_ld(&fill->to), fn_ld(&fill->from), fn_ld(&fill->bytes) / 16u};
}

FN_DEVICE void copy(const Fill& fill, u32 first) {
    const uint4* from = reinterpret_cast<const uint4*>(fill.from);
    uint4* to = reinterpret_cast<uint4*>(fill.to);
    uint4 v[LOADS];
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) {
        u32 w = first + FN_THREADS * i;
        v[i] = w < fill.words ? fn_ldg(from + w) : uint4{0u, 0u, 0u, 0u};
    }
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) {
        u32 w = first + FN_THREADS * i;
        if (w < fill.words) to[w] = v[i];
    }
}
}  // namespace FN_NAMESPACE

FN_KERNEL((const FnCache* cache, const FnFill* fills)) {
    using namespace FN_NAMESPACE;
    fn_let_next();
    fn_wait_prior();
    u32 n_fills = fn_ld(&cache->n_fills);
    if (n_fills == 0) return;
    u32 piece = blockIdx.x;  // the block's next one, counted from the first of fill i
    Fill next = fill_at(fills);
    for (u32 i = 0; i < n_fills; i++) {
        Fill fill = next;
        next = fill_at(fills + fn_min_u32(i + 1u, n_fills - 1u));  // comes while this one is copied
        u32 pieces = (fill.words + PIECE - 1u) / PIECE;
        for (; piece < pieces; piece += gridDim.x) copy(fill, piece * PIECE + threadIdx.x);
        piece -= pieces;
    }
}
