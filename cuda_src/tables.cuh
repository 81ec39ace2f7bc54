// tables.cuh: the device tables that kernels dereference.  Mirrored by flashnext_drv/kernels/tables.py; a host test
// compares sizes and offsets.  A captured launch keeps its arguments; between replays only bytes in here change.
#pragma once

// One launch round: how much of the padded grid is live.  Rows r >= n_rows return at once.
struct FnRound { u32 n_rows, n_runs, rows_cap, version; };

// One row of a round: a token of a sequence at an absolute position.  prev1 and prev2 are the two tokens before it
// (the end-of-sequence id where the sequence has none).  emit: bit 0 logits are wanted, bit 1 a draw is wanted.
struct FnRow { u32 slot, run, token, position, prev1, prev2, emit, i_out; };

// Consecutive rows of one sequence: rows first_row .. first_row + n_rows - 1 hold positions first_position ...
struct FnRun { u32 slot, first_row, n_rows, first_position; };

// One sequence slot: where its state is, and how its tokens are drawn.
//   pages      address of FnPage[max_pages]: entry i holds tokens 64 i .. 64 i + 63
//   recurrent  address of the slot's recurrent state (layout: KERNELS in ARITHMETIC.md, "state")
struct FnSlot {
  u64 pages, recurrent, seed;
  float temperature, top_p, min_p;
  u32 top_k, pad0, pad1;
};

// One page of 64 tokens over all attention layers; the two addresses may lie in different memories.
struct FnPage { u64 kv, index; };

// A weight matrix of N outputs and K inputs.  format: low byte 0 = EXL3, 1 = f16, 2 = bf16;
// EXL3: bits 8..15 twice the width in bits (2..16, 3 5 7 = 1.5 2.5 3.5), bits 16..17 codebook (0 3inst, 1 mcg, 2 mul1).
struct FnWeight { u64 data, suh, svh; u32 format, pad; };

// One linear of a launch.  data: trellis tiles [K/16][N/16], or f16/bf16 in fragment order [ceil(N/16)][K/16][256].
//   x     f16, the mma operand.  tiled 0: [rows_cap][x_stride], fragment order inside each group of 16 (see
//         ARITHMETIC.md);  tiled 1: a tile image (fn_tile_at), natural order
//   part  f32 [leaves * segments][rows_cap][N], sums of the K units;  out  f32 [rows_cap][N]
//   first_warp, n_warps  this linear's warps in a launch of linear_gemv; in a launch of deep_linear (tiled) its
//         first tile of 128 outputs and their number
struct FnLinear {
  FnWeight w;
  u64 x, part, out, bias;
  u32 k, n, leaves, segments;
  u32 first_warp, n_warps, x_stride, tiled;
};

// One expert of one layer (entry E of the table is the shared expert): its three projections and its width.
// source: 0 device memory, 1 host memory.
struct FnLine { FnWeight gate, up, down; u32 width, source; u64 pad; };

// One routed expert of one layer in host memory, and the device line that holds a copy (FN_NO_LINE: none).  Its
// entry in the layer's FnLine table names the parts of that copy, or those in host memory; both have one layout.
struct FnHome { u64 address; u32 bytes, line; };

// One device line: the expert in it (FN_NO_LINE: none) and the clock of the round that used it last (0: never).
struct FnUse { u32 expert, used; };

// The line cache of one layer: n_lines lines of line_bytes from `lines` on.  clock: rounds with rows so far.  n_fills:
// lines that line_fill has to fill in this round.  Counters count distinct experts of a round; in_place: those
// read from host memory, reads: their (row, slot) pairs.
struct FnCache {
  u64 lines;
  u32 line_bytes, n_lines, clock, n_fills;
  u64 hits, misses, fills, evictions, filled_bytes, in_place, reads, read_bytes;
};

// One line to fill: bytes, a multiple of 16.
struct FnFill { u64 to, from; u32 bytes, pad; };

// The expert a row's slot goes to, and its routing weight.  Slots are in rising expert id; slot k is the shared one.
struct FnRoute { u32 expert; float weight; };

// Up to 256 (row, slot) pairs of one expert: sorted positions first .. first + n_rows - 1, first a multiple of 64.
struct FnTile { u32 expert, first, n_rows, pad; };

#define FN_FORMAT_EXL3 0u
#define FN_FORMAT_F16 1u
#define FN_FORMAT_BF16 2u
#define FN_PAGE_TOKENS 64u
#define FN_NO_LINE 0xffffffffu

static_assert(sizeof(FnRound) == 16 && sizeof(FnRow) == 32 && sizeof(FnRun) == 16, "row tables");
static_assert(sizeof(FnSlot) == 48 && sizeof(FnPage) == 16 && sizeof(FnWeight) == 32, "slot, page, weight");
static_assert(sizeof(FnLinear) == 96 && sizeof(FnLine) == 112 && sizeof(FnRoute) == 8, "linear, line, route");
static_assert(sizeof(FnTile) == 16 && sizeof(FnHome) == 16 && sizeof(FnUse) == 8, "tile, home, use");
static_assert(sizeof(FnCache) == 88 && sizeof(FnFill) == 24, "cache, fill");
