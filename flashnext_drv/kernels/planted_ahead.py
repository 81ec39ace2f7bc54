"""Planted controls of count_replay and advance_rows: what the check must report as wrong.

Read by the declarations; made by kernels/planting.py, run by check/controls.py.  An edit's old text stands
exactly once in its file: a changed kernel takes its controls along.
"""

from __future__ import annotations

from typing import Final

from .spec import Control, Edit

__all__ = ["ADVANCE_ROWS", "COUNT_REPLAY"]

_ADVANCE: Final = "token/advance_rows.cu"
_COUNT: Final = "move/count_replay.cu"


def _one(name: str, kind: str, file: str, old: str, new: str, *cases: str) -> Control:
    return Control(name, kind, (Edit(file, old, new),), cases)


COUNT_REPLAY: Final = (
    _one("every_thread", "scale", _COUNT, "if (threadIdx.x == 0) {", "if (threadIdx.x < 2) {"),
    _one("padding_rows", "stale", _COUNT, "fn_ld(&round->n_rows)", "fn_ld(&round->rows_cap)"),
    _one("runs_for_rows", "index", _COUNT, "fn_ld(&round->n_rows)", "fn_ld(&round->n_runs)"),
    _one("low_words", "layout", _COUNT, "fn_atomic_add_u64(counts, 1u);",
         "fn_atomic_add_u32(reinterpret_cast<u32*>(counts), 1u);"),
)

ADVANCE_ROWS: Final = (
    _one("padding_rows", "stale", _ADVANCE, "if (r < fn_ld(&round->n_rows)) {",
         "if (r < fn_ld(&round->rows_cap)) {", "padding"),
    _one("last_row", "tail", _ADVANCE, "if (r < fn_ld(&round->n_rows)) {",
         "if (r + 1u < fn_ld(&round->n_rows)) {"),
    _one("one_token_more", "tail", _ADVANCE, "goes_on = left > 1u &&", "goes_on = left > 0u &&"),
    _one("past_a_nan", "nan", _ADVANCE, "&& bad == 0 &&", "&&"),
    _one("last_stop", "tail", _ADVANCE, "for (u32 i = 0; i < n; i++)", "for (u32 i = 0; i + 1u < n; i++)"),
    _one("stops_of_before", "stale", _ADVANCE, "u32 n = fn_min_u32(fn_ld(&ahead->n_stops), FN_MOST_STOPS);",
         "u32 n = FN_MOST_STOPS;"),
    _one("no_gap_closed", "layout", _ADVANCE, "fn_popc(on & ((1u << r) - 1u))", "r"),
    _one("same_position", "stale", _ADVANCE, "FnRow{row.slot, to, token, row.position + 1u,",
         "FnRow{row.slot, to, token, row.position,"),
    _one("run_of_before", "stale", _ADVANCE, "FnRun{row.slot, to, 1u, row.position + 1u}",
         "FnRun{row.slot, to, 1u, row.position}"),
    _one("other_history", "order", _ADVANCE, "row.token, row.prev1, row.emit",
         "row.prev1, row.token, row.emit"),
    _one("behind_the_ring", "tail", _ADVANCE, "if (drawn < ring_steps) ring", "if (drawn <= ring_steps) ring",
         "ring_ends"),
    _one("ring_of_rows", "index", _ADVANCE, "ring[(u64)row.slot * ring_steps", "ring[(u64)r * ring_steps"),
    _one("runs_stay", "stale", _ADVANCE, "round->n_rows = round->n_runs = fn_popc(on)",
         "round->n_rows = fn_popc(on)"),
    _one("draws_unasked", "stale", _ADVANCE, "if ((row.emit & 2u) && left > 0) {", "if (left > 0) {",
         "unasked"),
)
