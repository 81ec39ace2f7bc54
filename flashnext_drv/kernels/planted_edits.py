"""Planted controls of edit_logits: what the check must report as wrong.

Read by the declaration; made by kernels/planting.py, run by check/controls.py.  An edit's old text stands
exactly once in its file: a changed kernel takes its controls along.
"""

from __future__ import annotations

from typing import Final

from .spec import Control, Edit

__all__ = ["EDIT_LOGITS"]

_FILE: Final = "token/edit_logits.cu"


def _one(name: str, kind: str, old: str, new: str, *cases: str) -> Control:
    return Control(name, kind, (Edit(_FILE, old, new),), cases)


EDIT_LOGITS: Final = (
    _one("padding_rows", "stale", "r < fn_ld_here(&round->n_rows);",
         "r < fn_ld_here(&round->rows_cap);", "padding"),
    _one("unasked", "stale", "!= FN_EMIT_EDITED) return;", "< 4u) return;", "kinds"),
    _one("unedited", "stale", "!= FN_EMIT_EDITED) return;", "== 0) return;", "kinds"),
    _one("slot_of_the_row", "index", "(u64)row.slot * (cap + 2u)", "(u64)r * (cap + 2u)"),
    _one("always_divided", "scale", "x = x > 0.f ? fn_div(x, how.repetition) : fn_mul(x, how.repetition);",
         "x = fn_div(x, how.repetition);"),
    _one("output_alone", "scale", "if (n > 0 || (entry.seen & FN_SEEN_PROMPT)) {", "if (n > 0) {"),
    _one("presence_of_prompts", "scale", "    if (n > 0) {\n        x = fn_sub(x, fn_mul(",
         "    if (entry.seen) {\n        x = fn_sub(x, fn_mul("),
    _one("counted_once", "scale", "fn_mul(how.frequency, fn_u32_to_f32(n))", "how.frequency"),
    _one("contracted", "contraction", "x = fn_sub(x, fn_mul(how.frequency, fn_u32_to_f32(n)));",
         "x = fn_fma(-how.frequency, fn_u32_to_f32(n), x);"),
    _one("one_rounding_less", "rounding", "fn_sub(x, how.presence)",
         "fn_sub(entry.raw > 0.f ? fn_div(entry.raw, how.repetition) : fn_mul(entry.raw, how.repetition), "
         "fn_add(fn_mul(how.frequency, fn_u32_to_f32(n)), how.presence))"),
    Control("bias_first", "order", (
        Edit(_FILE, "float x = entry.raw, bias = entry.bias;",
             "float x = fn_add(entry.raw, entry.bias), bias = entry.bias;"),
        Edit(_FILE, "return bias == least ? least : fn_add(x, bias);",
             "return bias == least ? least : x;"))),
    _one("stops_one_longer", "tail", "position < how.stops_from", "position <= how.stops_from", "stops"),
    _one("nan_forbidden", "nan", "    if (x != x) return x;\n", "", "not_finite"),
    _one("last_entry", "tail", "i < how.n_entries; i += FN_THREADS) {",
         "i + 1u < how.n_entries; i += FN_THREADS) {"),
    _one("first_batch", "tail", "i < how.n_entries; i += FN_THREADS) {",
         "i < how.n_entries && i < FN_THREADS; i += FN_THREADS) {", "many"),
    _one("count_of_before", "stale", "            entry.seen += FN_SEEN_ONE;\n", ""),
    _one("counted_again", "stale", "bool counts = how.counted == row.position;", "bool counts = true;"),
    _one("always_new", "layout", "if (!s.found && how.n_entries < cap) {", "if (how.n_entries < cap) {"),
    _one("behind_the_room", "tail", "how.n_entries < cap) {", "how.n_entries <= cap) {", "full"),
    _one("new_one_unedited", "stale", "        x[row.token] = edited(how, entry, row.position);\n", ""),
    _one("edited_kept", "layout",
         "        entry.raw = x[entry.id];\n        x[entry.id] = edited(how, entry, row.position);\n",
         "        entry.raw = x[entry.id];\n        x[entry.id] = edited(how, entry, row.position);\n"
         "        entry.raw = x[entry.id];\n"),
    _one("last_not_restored", "tail", "i < how.n_entries; i += FN_THREADS) x[",
         "i + 1u < how.n_entries; i += FN_THREADS) x[", "restore"),
    _one("restored_by_place", "index", "x[entries[i].id] = entries[i].raw;", "x[i] = entries[i].raw;",
         "restore"),
)
