// ahead.cuh: tables of decoding several tokens a host visit.  Mirrored by flashnext_drv/kernels/tables.py; a
// host test compares sizes and offsets.
#pragma once
#include "tables.cuh"

// How one slot's sequence goes on without the host.  left: tokens it may still draw in this visit; drawn:
// those it has drawn in it, the next one's place in the ring; it ends after one of stops[0 .. n_stops - 1].
struct FnAhead {
  u32 left, drawn, n_stops, pad;
  u32 stops[12];
};

// One token drawn: status is that of draw_rows.
struct FnDrawn { u32 token, status; };

#define FN_MOST_STOPS 12u

static_assert(sizeof(FnAhead) == 64 && sizeof(FnDrawn) == 8, "ahead, drawn");
