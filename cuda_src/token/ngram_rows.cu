// ngram_rows: hashes each row's last three tokens and decodes the n-gram table rows they name.
// Contract    rows[r].token, prev1, prev2 (eos where the sequence has none); table (sum of sizes, words) u16
//             with words = 1 + row_dim * bits / 16, or bf16 (.., row_dim) when bits is 0 -> emb (rows_cap,
//             n_heads * row_dim) f16 in fragment order, or with tiled != 0 as a tile image (fn_tile_at) of
//             ceil(n_heads * row_dim / 64) k blocks.  bits 0..8; row_dim % 16 == 0, 16 <= row_dim <= 1024;
//             n_heads even: the first half hashes two tokens, the second three.  head_bias (n_heads, row_dim)
//             f16 or null.  The table is aligned to 2 bytes only and may lie in mapped host memory.  Rows >=
//             n_rows are not written.  gathered != 0: the table holds the rows asked for and no others, that of
//             row r and head h at index r * n_heads + h; tokens, offsets, sizes and multipliers are not read.
// Launch      grid (n_heads, rows_cap), block 128, shared 1032 B (NgramShared).  A block per table row.
// Arithmetic  hash in wrapping 64-bit integers, remainder of the signed value made non-negative; value =
//             f16(f32(mul1[state]) * f32(scale) + f32(bias)): multiply, add (left out without head_bias), one
//             rounding to f16; plain rows: f16(f32(bf16) + f32(bias)).
// Equality    exact; a row's bytes depend on the three tokens alone, gathered or not.
// Reference   ref/exl3.py.  Source: the pack's layer_multipliers, head_vocab_sizes, head_offsets, head_bias.
//
// A table in host memory is far away: its row is fetched before the launches before this one are done.
#include "exl3.cuh"

namespace FN_NAMESPACE {

// The code words of one row behind its scale; one word more, so that the last symbol may be read as 32 bits.
struct NgramShared { u16 word[516]; };

// Value of a 16-bit state in codebook mul1: (1774 h - 2721792) / 2^18 with h = 1024 + the sum of the
// product's bytes.
FN_DEVICE float mul1_value(u32 state) {
    i32 h = (i32)fn_dp4a_u8(state * 0x83DCD12Du, 0x01010101u, 1024u);
    return fn_h2f(fn_f2h(fn_mul((float)(1774 * h - 2721792), 0x1p-18f)));
}

// Symbol i is the stream's bits [i * bits, (i + 1) * bits), least significant bit of each word first.
FN_DEVICE u32 symbol(const NgramShared& s, u32 i, u32 bits) {
    u32 at = i * bits, w = at >> 4;
    u32 pair = (u32)s.word[w] | (u32)s.word[w + 1] << 16;
    return pair >> (at & 15u) & ((1u << bits) - 1u);
}

// State i: symbol i lowest, the symbols before it above, 16 bits of them; the row is a ring.
FN_DEVICE u32 state(const NgramShared& s, u32 i, u32 bits, u32 row_dim) {
    u32 value = 0;
    for (u32 shift = 0; shift < 16; shift += bits) {
        value |= symbol(s, i, bits) << shift;
        i = i ? i - 1u : row_dim - 1u;
    }
    return value & 0xffffu;
}

// The table row of one head.
FN_DEVICE u64 table_row(const FnRow& row, u32 head, const i64* offsets, const i64* sizes,
                        const i64* multipliers, u32 eos, u32 n_heads) {
    u64 x = (u64)row.token * (u64)multipliers[0] ^ (u64)row.prev1 * (u64)multipliers[1];
    if (head >= n_heads >> 1) x ^= (u64)(row.prev1 == eos ? eos : row.prev2) * (u64)multipliers[2];
    i64 size = sizes[head], rest = (i64)x % size;
    return (u64)((rest < 0 ? rest + size : rest) + offsets[head]);
}

}  // namespace FN_NAMESPACE

FN_KERNEL((const FnRound* round, const FnRow* rows, const u16* table, u32 bits, const u16* head_bias,
           const i64* head_offsets, const i64* head_sizes, const i64* multipliers, u32 eos, u32 n_heads,
           u32 row_dim, u16* emb, u32 tiled, u32 gathered)) {
    using namespace FN_NAMESPACE;
    FN_SHARED(NgramShared, s);
    fn_let_next();
    u32 r = blockIdx.y, head = blockIdx.x, n_words = bits ? 1u + row_dim * bits / 16u : row_dim;
    bool live = r < fn_ld_here(&round->n_rows);
    const u16* source = table;
    float scale = 1.f;
    if (live) {
        u64 i_row = (u64)r * n_heads + head;
        if (!gathered) {
            FnRow row = {};
            row.token = fn_ld_here(&rows[r].token);
            row.prev1 = fn_ld_here(&rows[r].prev1), row.prev2 = fn_ld_here(&rows[r].prev2);
            i_row = table_row(row, head, head_offsets, head_sizes, multipliers, eos, n_heads);
        }
        source += i_row * n_words;
    }
    if (live && bits) {
        scale = fn_h2f(fn_ld_here(source));
        for (u32 w = threadIdx.x; w < n_words; w += FN_THREADS)
            s.word[w] = w + 1u < n_words ? fn_ld_here(source + 1 + w) : (u16)0;
    }
    __syncthreads();

    fn_wait_prior();
    if (!live) return;
    u32 width = n_heads * row_dim, k_blocks = (width + 63u) >> 6;
    for (u32 i = threadIdx.x; i < row_dim; i += FN_THREADS) {
        float v = bits ? fn_mul(mul1_value(state(s, i, bits, row_dim)), scale) : fn_b2f(fn_ld(source + i));
        if (head_bias) v = fn_add(v, fn_h2f(fn_ldg(head_bias + (u64)head * row_dim + i)));
        u32 k = head * row_dim + i;
        u64 at = tiled ? fn_tile_at(k_blocks, r, k) : (u64)r * width + fn_frag_pos(k);
        emb[at] = fn_f2h(v);
    }
}
