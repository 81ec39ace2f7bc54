// edits.cuh: tables of logit edits: what changes the logits that a sequence draws from.  Mirrored by
// flashnext_drv/kernels/tables.py; a host test compares sizes and offsets.
#pragma once
#include "tables.cuh"

// How one slot's sequence edits.  FnEdit[cap] follow it, of which n_entries are used, no id twice.  Its tokens at
// positions below `counted` stand in them.  Stop ids may not be drawn at rows of positions below stops_from.
struct FnEdits {
  u32 n_entries, counted, stops_from;
  float repetition, presence, frequency;
  u32 pad0, pad1;
};

// One token id.  seen: FN_SEEN_PROMPT, FN_SEEN_STOP, and FN_SEEN_ONE times how often it stands in the output.
// raw: its logit of the row drawn last, before the edit.
struct FnEdit { u32 id, seen; float bias, raw; };

#define FN_SEEN_PROMPT 1u
#define FN_SEEN_STOP 2u
#define FN_SEEN_ONE 4u

// Bits of FnRow.emit that a row which edits has: a draw is wanted (bit 1), from edited logits (bit 2).
#define FN_EMIT_EDITED 6u

// Edits lie in units of FnEdit.
static_assert(sizeof(FnEdits) == 32 && sizeof(FnEdit) == 16, "edits, edit");
