// attn/pages.cuh: where a sequence's keys and values lie, and which tokens a row attends to.  Used by the attention
// kernels.
//
// A page holds 64 tokens.  Of one layer, at page.kv + kv_offset: K f16 [64][n_kv][256], then V f16 [64][n_kv][256];
// at page.index + index_offset: raw index keys f16 [64][128], then pooled keys f16 [16][128], one for 4 tokens.
// Addresses are kept as u64: the two parts of a page may lie in device or in mapped host memory.
#pragma once
#include "prelude.cuh"
#include "tables.cuh"
#include "warp.cuh"

#define FN_HEAD 256u
#define FN_INDEX_HEAD 128u
#define FN_INDEX_HEADS 4u
#define FN_BLOCK_TOKENS 4u
#define FN_PAGE_BLOCKS 16u
#define FN_PART 64u

FN_DEVICE const FnPage* fn_pages(const FnSlot* slots, u32 slot) {
    return reinterpret_cast<const FnPage*>(slots[slot].pages);
}

// The same, and the page of one token, ahead of fn_wait_prior.
FN_DEVICE const FnPage* fn_pages_here(const FnSlot* slots, u32 slot) {
    return reinterpret_cast<const FnPage*>(fn_ld_here(&slots[slot].pages));
}
FN_DEVICE FnPage fn_page_here(const FnPage* pages, u32 position) {
    return fn_ld_here(pages + position / FN_PAGE_TOKENS);
}

// Address of the key of one kv head of one token; its value lies fn_value_step further.
FN_DEVICE u64 fn_key_in(const FnPage& page, u64 kv_offset, u32 position, u32 n_kv, u32 head) {
    u32 entry = position % FN_PAGE_TOKENS;
    return page.kv + kv_offset + (u64)((entry * n_kv + head) * (FN_HEAD * 2u));
}
FN_DEVICE u64 fn_key_at(const FnPage* pages, u64 kv_offset, u32 position, u32 n_kv, u32 head) {
    return fn_key_in(pages[position / FN_PAGE_TOKENS], kv_offset, position, n_kv, head);
}
FN_DEVICE u64 fn_value_step(u32 n_kv) { return (u64)(FN_PAGE_TOKENS * FN_HEAD * 2u) * n_kv; }

// Address of a token's raw index key, and of a block's pooled key.
FN_DEVICE u64 fn_raw_in(const FnPage& page, u64 index_offset, u32 position) {
    return page.index + index_offset + (u64)(position % FN_PAGE_TOKENS * (FN_INDEX_HEAD * 2u));
}
FN_DEVICE u64 fn_pooled_in(const FnPage& page, u64 index_offset, u32 block) {
    return page.index + index_offset + (u64)((FN_PAGE_TOKENS + block % FN_PAGE_BLOCKS) * (FN_INDEX_HEAD * 2u));
}
FN_DEVICE u64 fn_pooled_at(const FnPage* pages, u64 index_offset, u32 block) {
    return fn_pooled_in(pages[block / FN_PAGE_BLOCKS], index_offset, block);
}

// Complete blocks that a row at `position` sees.
FN_DEVICE u32 fn_blocks_seen(u32 position) { return (position + 1u) / FN_BLOCK_TOKENS; }

// How many tokens a row at `position` attends to: all, or `budget` blocks and the tail.
FN_DEVICE u32 fn_attended(u32 position, u32 budget) {
    u32 seen = fn_blocks_seen(position);
    return seen <= budget ? position + 1u : FN_BLOCK_TOKENS * budget + (position + 1u - FN_BLOCK_TOKENS * seen);
}

// Position of attended token i (position order).  sel: the row's chosen blocks, rising; read only beyond the budget.
FN_DEVICE u32 fn_attended_token(u32 i, u32 position, u32 budget, const u32* sel) {
    u32 seen = fn_blocks_seen(position);
    if (seen <= budget) return i;
    if (i < FN_BLOCK_TOKENS * budget) return sel[i / FN_BLOCK_TOKENS] * FN_BLOCK_TOKENS + i % FN_BLOCK_TOKENS;
    return FN_BLOCK_TOKENS * seen + (i - FN_BLOCK_TOKENS * budget);
}

// RMS norm of one head over the warp, lane l holding elements l, l + 32, ...  (order rms_head_v1): per lane an fma
// chain of squares from zero, the warp tree, 1/rms; then (x * r) * (1 + w).
// w: the weights of the lane's elements.
template <int N> FN_DEVICE void fn_head_norm(float (&v)[N], const float* w, float eps) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < N; i++) sum = fn_fma(v[i], v[i], sum);
    sum = fn_warp_sum(sum);
    float r = fn_rsqrt(fn_add(fn_mul(sum, 1.f / (float)(32 * N)), eps));
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = fn_mul(fn_mul(v[i], r), fn_add(1.f, w[i]));
}

// Rotation of the pair (x_i, x_{i+32}) by the angle whose cosine and sine are given.
FN_DEVICE void fn_rotate(float& a, float& b, float2 cs) {
    float x = fn_fma(a, cs.x, -fn_mul(b, cs.y)), y = fn_fma(b, cs.x, fn_mul(a, cs.y));
    a = x;
    b = y;
}
