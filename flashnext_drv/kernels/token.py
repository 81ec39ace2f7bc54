"""Declarations of the token family: embedding rows, rotary rows, n-gram rows, the n-gram mixer (PLE), draws,
edits of logits.

Read by build_kernels.py, kernels/bind.py, sim/build.py and check/cases_token.py.  Sources: cuda_src/token.
"""

from __future__ import annotations

from typing import Final

from . import planted_ahead, planted_edits
from . import planted_token as planted
from .limits import limits_of
from .spec import F32, PTR, U32, U64, Arg, Case, KernelSpec

__all__ = ["KERNELS", "MAX_ROW_DIM", "MAX_VOCAB"]

MAX_VOCAB: Final = 262_144     # draw_rows: 18 bits of id in a key, and weight limbs that cannot carry
MAX_ROW_DIM: Final = 1024      # ngram_rows: code words of one row in shared memory

_ROUND = Arg("round", PTR, "FnRound[1]", "r")
_ROWS = Arg("rows", PTR, "FnRow[rows_cap]", "r")
_RUNS = Arg("runs", PTR, "FnRun[rows_cap]", "r")
_SLOTS = Arg("slots", PTR, "FnSlot[n_slots]; ple_mix and ple_tail write the tail its entries point to", "r")
_TAIL = Arg("tail_offset", U64, "bytes from slot.recurrent to the f16 (9, 4 * hidden) tail, multiple of 4")
_EVEN = Arg("hidden", U32, "channels, even")
_EPS = Arg("eps", F32, "1e-7..1e-4")
_NORMS = tuple(Arg(f"norm_{name}", PTR, "(4 * hidden) f32", "r") for name in ("key", "query", "conv"))
_TAPS = Arg("conv", PTR, "(4 * hidden, 4) f32, taps t-9, t-6, t-3, t", "r")

EMBED_ROWS: Final = KernelSpec(
    name="embed_rows", source="token/embed_rows.cu", order="",
    args=(_ROUND, _ROWS,
          Arg("table", PTR, "(vocab, hidden) f16 or bf16", "r"),
          Arg("format", U32, "1 f16, 2 bf16"),
          Arg("streams", PTR, "(rows_cap, 4 * hidden) f32", "w"),
          Arg("hidden", U32, "channels, multiple of 4")),
    programmatic=True,
    constants=("table",),
    grid="(ceil(hidden / 512), rows_cap)", block=128, limits=limits_of("embed_rows"),
    reference="model.Model", bound="exact",
    rows={"rows": 0, "streams": 0},
    exempt={"order": "no sum", "integers": "copies: every case is compared bit for bit",
            "midpoints": "both conversions are exact"},
    controls=planted.EMBED_ROWS,
    cases=(Case("f16", {"rows": 3, "cap": 4, "hidden": 512, "format": 1}, shows=("nonfinite",)),
           Case("bf16_ragged", {"rows": 5, "cap": 5, "hidden": 640, "format": 2}, shows=("nonfinite",))))

ROPE_ROWS: Final = KernelSpec(
    name="rope_rows", source="token/rope_rows.cu", order="rope_v1",
    args=(_ROUND, _ROWS,
          Arg("theta", F32, "base of the frequencies, > 1"),
          Arg("rope_dim", U32, "rotated channels, even"),
          Arg("rope", PTR, "(rows_cap, rope_dim / 2, 2) f32: cos, sin at the position", "w"),
          Arg("rope_block", PTR, "the same at 4 * (position >> 2)", "w")),
    programmatic=True,
    settled=("round", "rows"),
    grid="(rows_cap)", block=64, limits=limits_of("rope_rows"),
    reference="glue.rope_table",
    rows={"rows": 0, "rope": 0, "rope_block": 0},
    exempt={"order": "the only kernel of its order",
            "integers": "positions are integers; sines of them have no exact answer",
            "midpoints": "outputs are f32: nothing is rounded to f16",
            "nonfinite": "its inputs are integers and theta, checked when the pack is opened"},
    controls=planted.ROPE_ROWS,
    bound="half an ulp of f32 plus 2e-15: the angle is exact by definition, sin and cos are within 1e-15 "
          "before the one rounding",
    cases=(Case("low", {"rows": 6, "cap": 6, "theta": 1e7, "rope_dim": 64, "positions": "0 1 2 3 300 2047"}),
           Case("high", {"rows": 16, "cap": 16, "theta": 1e7, "rope_dim": 64, "first": 262_000, "step": 9}),
           Case("last", {"rows": 4, "cap": 6, "theta": 1e7, "rope_dim": 64,
                         "positions": "262140 262141 262142 262143"}),
           Case("other_base", {"rows": 3, "cap": 3, "theta": 1e4, "rope_dim": 32,
                               "positions": "5 77 131071"})))

_BITS = tuple(Case(f"bits{b}_dim160", {"rows": 4, "cap": 5, "bits": b, "dim": 160, "heads": 16, "bias": 1})
              for b in range(1, 9))

NGRAM_ROWS: Final = KernelSpec(
    name="ngram_rows", source="token/ngram_rows.cu", order="",
    args=(_ROUND, _ROWS,
          Arg("table", PTR, "(rows, words) u16, 2-byte aligned, may be mapped host memory", "r"),
          Arg("bits", U32, "1..8; 0: rows are (row_dim) bf16"),
          Arg("head_bias", PTR, "(n_heads, row_dim) f16, or null", "r"),
          Arg("head_offsets", PTR, "(n_heads) i64", "r"),
          Arg("head_sizes", PTR, "(n_heads) i64", "r"),
          Arg("multipliers", PTR, "(3) i64", "r"),
          Arg("eos", U32, "token id that cuts the context"),
          Arg("n_heads", U32, "heads of both orders together, even"),
          Arg("row_dim", U32, "values a row, multiple of 16, at most 1024"),
          Arg("emb", PTR, "(rows_cap, n_heads * row_dim) f16, fragment order, or a tile image", "w"),
          Arg("tiled", U32, "1: emb is a tile image (fn_tile_at); 0: rows in fragment order"),
          Arg("gathered", U32, "1: the table is (rows_cap * n_heads, words), the rows asked for in order; "
                               "tokens and hash constants are not read")),
    programmatic=True,
    constants=("head_bias", "head_offsets", "head_sizes", "multipliers"),
    settled=("round", "rows", "table"),
    grid="(n_heads, rows_cap)", block=128, shared_bytes=1032, limits=limits_of("ngram_rows"),
    reference="exl3.ngram_rows",
    rows={"rows": 0, "emb": 0},
    exempt={"order": "no sum"},
    controls=planted.NGRAM_ROWS,
    bound="exact: integers, then one fp32 multiply, one add, one rounding to f16",
    cases=(*_BITS,
           Case("bits5_dim320", {"rows": 3, "cap": 3, "bits": 5, "dim": 320, "heads": 8, "bias": 1}),
           Case("bits4_nobias", {"rows": 3, "cap": 3, "bits": 4, "dim": 160, "heads": 16, "bias": 0}),
           Case("bf16", {"rows": 3, "cap": 4, "bits": 0, "dim": 160, "heads": 16, "bias": 0}),
           Case("bf16_bias_dim320", {"rows": 2, "cap": 2, "bits": 0, "dim": 320, "heads": 4, "bias": 1}),
           Case("tiled_bits4", {"rows": 67, "cap": 70, "bits": 4, "dim": 48, "heads": 2, "bias": 1,
                                "tiled": 1}),
           Case("tiled_bf16", {"rows": 3, "cap": 4, "bits": 0, "dim": 160, "heads": 16, "bias": 0,
                               "tiled": 1}),
           Case("gathered_bits5", {"rows": 3, "cap": 5, "bits": 5, "dim": 160, "heads": 16, "bias": 1,
                                   "gathered": 1}),
           Case("gathered_tiled_bf16", {"rows": 66, "cap": 68, "bits": 0, "dim": 48, "heads": 2, "bias": 0,
                                        "tiled": 1, "gathered": 1}),
           Case("eos_places", {"rows": 8, "cap": 8, "bits": 3, "dim": 32, "heads": 4, "bias": 1},
                shows=("integers",)),
           Case("midpoints", {"rows": 3, "cap": 3, "bits": 0, "dim": 32, "heads": 4, "bias": 1,
                              "special": "midpoints"}),
           Case("nonfinite", {"rows": 3, "cap": 3, "bits": 4, "dim": 32, "heads": 4, "bias": 1,
                              "special": "nonfinite"})))

PLE_MIX: Final = KernelSpec(
    name="ple_mix", source="token/ple_mix.cu", order="ple_v1",
    args=(_ROUND, _RUNS, _SLOTS,
          Arg("key", PTR, "(rows_cap, 4 * hidden) f32", "r"),
          Arg("value", PTR, "(rows_cap, hidden) f32", "r"),
          Arg("streams", PTR, "(rows_cap, 4 * hidden) f32", "rw"),
          *_NORMS, _TAPS, _TAIL, _EVEN, _EPS),
    programmatic=True,
    constants=("norm_key", "norm_query", "norm_conv", "conv"),
    settled=("round", "runs", "slots"),
    grid="(4, rows_cap)", block=256, shared_bytes=256, limits=limits_of("ple_mix"),
    reference="token.Ple",
    rows={"key": 0, "value": 0, "streams": 0},
    exempt={"order": "compared from ple_gate, on its cases",
            "integers": "passes through roots and a sigmoid: integers have no exact answer",
            "midpoints": "what is rounded has passed through a root: no input gives an exact tie"},
    controls=planted.PLE_MIX,
    bound="derived in check/cases_token.py from the rounding points of ple_v1",
    cases=(Case("one_row", {"cap": 1, "hidden": 256, "runs": "1"}),
           Case("three_runs", {"cap": 8, "hidden": 384, "runs": "3 1 2"}),
           Case("long_run", {"cap": 12, "hidden": 128, "runs": "9"}),
           Case("real_width", {"cap": 2, "hidden": 2560, "runs": "1 1"}),
           Case("nonfinite", {"cap": 8, "hidden": 256, "runs": "4 2", "special": "nonfinite"})))

# The three kernels of a launch of many rows: each on the operands of the whole, which are ple_mix's too.
_PLE_CASES = (Case("one_row", {"cap": 1, "hidden": 256, "runs": "1"}),
              Case("three_runs", {"cap": 24, "hidden": 392, "runs": "3 1 12"}),
              Case("long_run", {"cap": 40, "hidden": 130, "runs": "2 33"}),
              Case("real_width", {"cap": 3, "hidden": 2560, "runs": "1 2"}),
              Case("beyond_registers", {"cap": 2, "hidden": 3334, "runs": "2"}),
              Case("nonfinite", {"cap": 16, "hidden": 256, "runs": "11 2", "special": "nonfinite"}))

PLE_GATE: Final = KernelSpec(
    name="ple_gate", source="token/ple_gate.cu", order="ple_v1",
    args=(_ROUND,
          Arg("key", PTR, "(rows_cap, 4 * hidden) f32", "r"),
          Arg("value", PTR, "(rows_cap, hidden) f32", "r"),
          Arg("streams", PTR, "(rows_cap, 4 * hidden) f32", "r"),
          *_NORMS,
          Arg("conv_in", PTR, "(rows_cap, 4 * hidden) f16, natural order", "w"),
          Arg("g", PTR, "(rows_cap, 4) f32, the gates", "w"),
          _EVEN, _EPS),
    grid="(4, rows_cap)", block=256, shared_bytes=128, limits=limits_of("ple_gate"),
    reference="token.Ple",
    rows=dict.fromkeys(("key", "value", "streams", "conv_in", "g"), 0),
    exempt={"integers": "passes through roots and a sigmoid: integers have no exact answer",
            "midpoints": "what is rounded has passed through a root: no input gives an exact tie"},
    controls=planted.PLE_GATE, replaces="ple_mix",
    bound="derived in check/cases_token.py from the rounding points of ple_v1",
    cases=_PLE_CASES)

PLE_CONV: Final = KernelSpec(
    name="ple_conv", source="token/ple_conv.cu", order="ple_v1",
    args=(_ROUND, _ROWS, _RUNS, _SLOTS,
          Arg("value", PTR, "(rows_cap, hidden) f32", "r"),
          Arg("g", PTR, "(rows_cap, 4) f32 of ple_gate", "r"),
          Arg("conv_in", PTR, "(rows_cap, 4 * hidden) f16 of ple_gate", "r"),
          _TAPS,
          Arg("streams", PTR, "(rows_cap, 4 * hidden) f32", "rw"),
          _TAIL, _EVEN),
    grid="(ceil(4 * hidden / 512), ceil(rows_cap / 16))", block=256, shared_bytes=448, blocks_per_sm=3,
    limits=limits_of("ple_conv"),
    reference="token.Ple",
    rows=dict.fromkeys(("rows", "value", "g", "conv_in", "streams"), 0),
    exempt={"order": "compared from ple_gate, on its cases",
            "integers": "passes through silu: integers have no exact answer",
            "midpoints": "outputs are f32: nothing is rounded to f16"},
    controls=planted.PLE_CONV,
    bound="derived in check/cases_token.py from the rounding points of ple_v1",
    cases=_PLE_CASES)

PLE_TAIL: Final = KernelSpec(
    name="ple_tail", source="token/ple_tail.cu", order="",
    args=(_ROUND, _RUNS, _SLOTS,
          Arg("conv_in", PTR, "(rows_cap, 4 * hidden) f16 of ple_gate", "r"),
          _TAIL, _EVEN),
    grid="(ceil(4 * hidden / 512), rows_cap as runs)", block=256, limits=limits_of("ple_tail"),
    reference="token.Ple", bound="exact",
    rows={"conv_in": 0},
    exempt={"order": "no sum; compared from ple_gate, on its cases",
            "integers": "copies: every case is compared bit for bit",
            "midpoints": "copies: every case is compared bit for bit"},
    controls=planted.PLE_TAIL,
    cases=_PLE_CASES)

DRAW_ROWS: Final = KernelSpec(
    name="draw_rows", source="token/draw_rows.cu", order="draw_v1",
    args=(_ROUND, _ROWS, _SLOTS,
          Arg("logits", PTR, "(rows_cap, vocab) f32", "r"),
          Arg("tokens", PTR, "(rows_cap) u32", "w"),
          Arg("status", PTR, "(rows_cap) u32: 0, or 1 when a logit is NaN", "w"),
          Arg("vocab", U32, "tokens, 1..262144")),
    programmatic=True,
    settled=("round", "rows", "slots"),
    grid="(rows_cap)", block=1024, shared_bytes=44328, limits=limits_of("draw_rows"),
    rows={"rows": 0, "logits": 0, "tokens": 0, "status": 0},
    exempt={"order": "the only kernel of its order", "midpoints": "outputs are integers"},
    controls=planted.DRAW_ROWS,
    reference="check.draw_model.draw", bound="exact: the choice is made of integers and of fn_ functions",
    cases=(Case("greedy_ties", {"cap": 4, "vocab": 512, "kind": "greedy"}),
           Case("greedy_odd", {"cap": 2, "vocab": 1003, "kind": "greedy"}),
           Case("nan", {"cap": 3, "vocab": 512, "kind": "nan"}, shows=("nonfinite",)),
           Case("sampled_512", {"cap": 16, "vocab": 512, "kind": "sampled"}),
           Case("sampled_1024", {"cap": 16, "vocab": 1024, "kind": "sampled"}),
           Case("flat_4096", {"cap": 8, "vocab": 4096, "kind": "flat"}, shows=("integers",)),
           Case("real_vocab", {"cap": 3, "vocab": 248_320, "kind": "real"})))

def _ahead(name: str, what: str, cap: int, steps: int, *shows: str) -> Case:
    """what: a letter a row (check/cases_ahead.py)."""
    return Case(name, {"what": what, "cap": cap, "steps": steps}, shows=shows)


ADVANCE_ROWS: Final = KernelSpec(
    name="advance_rows", source="token/advance_rows.cu", order="",
    args=(Arg("round", PTR, "FnRound[1]", "rw"),
          Arg("rows", PTR, "FnRow[rows_cap]", "rw"),
          Arg("runs", PTR, "FnRun[rows_cap], one row each", "rw"),
          Arg("aheads", PTR, "FnAhead[n_slots]", "rw"),
          Arg("tokens", PTR, "(rows_cap) u32 of draw_rows", "r"),
          Arg("status", PTR, "(rows_cap) u32 of draw_rows", "r"),
          Arg("ring", PTR, "FnDrawn (n_slots, ring_steps), may be mapped host memory", "w"),
          Arg("ring_steps", U32, "places of the ring a slot, 1 or more")),
    grid="(1)", block=32, limits=limits_of("advance_rows"), programmatic=True,
    reference="ahead.advance_rows", bound="exact: integers only",
    exempt={"order": "no sum", "mates": "rows move to the front: the tables are compared whole",
            "integers": "works on integers alone: every case is exact",
            "midpoints": "works on integers alone"},
    controls=planted_ahead.ADVANCE_ROWS,
    cases=(_ahead("one_row", "g", 1, 4),
           _ahead("one_row_stops", "s", 1, 1),
           _ahead("last_token", "l", 2, 8),
           _ahead("all_go_on", "gggg", 4, 8),
           _ahead("stops", "gsgSgcsS", 8, 8),
           _ahead("gaps", "lgggslgn", 8, 5),
           _ahead("padding", "gsg", 8, 4),
           _ahead("nan", "gnlng", 6, 4, "nonfinite"),
           _ahead("ring_ends", "grogrogg", 8, 3),
           _ahead("unasked", "gegzeg", 6, 4),
           _ahead("none_left", "zzz", 4, 4),
           _ahead("no_rows", "", 4, 4),
           _ahead("sixteen", "gsglgcgnggSgrgog", 16, 8),
           _ahead("most", "gggsgggg" * 4, 32, 2)))


def _edits(name: str, what: str, cap: int, vocab: int, room: int, restore: int = 0, *shows: str) -> Case:
    """what: a letter a row; room: entries a slot has (check/cases_edits.py)."""
    return Case(name, {"what": what, "cap": cap, "vocab": vocab, "room": room, "restore": restore},
                shows=shows)


EDIT_LOGITS: Final = KernelSpec(
    name="edit_logits", source="token/edit_logits.cu", order="edit_v1",
    args=(_ROUND, _ROWS,
          Arg("edits", PTR, "(n_slots) of FnEdits and the slot's FnEdit[cap] behind it", "rw"),
          Arg("logits", PTR, "(rows_cap, vocab) f32", "rw"),
          Arg("vocab", U32, "tokens"),
          Arg("cap", U32, "entries a slot may have"),
          Arg("restore", U32, "0 edits, 1 puts the raw logits back")),
    programmatic=True,
    settled=("round", "rows"),
    grid="(rows_cap)", block=1024, shared_bytes=4, limits=limits_of("edit_logits"),
    rows={"rows": 0, "logits": 0},
    exempt={"order": "the only kernel of its order",
            "midpoints": "outputs are f32: nothing is rounded to f16"},
    controls=planted_edits.EDIT_LOGITS,
    reference="edits.edit_logits", bound="exact: single steps of fp32, each rounded to nearest",
    cases=(_edits("one_row", "c", 1, 512, 41),
           _edits("one_entry", "1", 1, 96, 8),
           _edits("no_entry", "0a", 2, 96, 8),
           _edits("kinds", "cakxnes0", 8, 500, 64),
           _edits("padding", "cak", 8, 100, 20),
           _edits("full", "fcfa", 4, 300, 24),
           _edits("stops", "sStT", 4, 300, 40),
           _edits("many", "cak", 3, 4099, 2600),
           _edits("sixteen", "cakxnesScaknfs0a", 16, 333, 48),
           _edits("no_rows", "", 4, 64, 8),
           _edits("plain_numbers", "iIi", 3, 400, 60, 0, "integers"),
           _edits("not_finite", "cNsN", 4, 256, 40, 0, "nonfinite"),
           _edits("restore", "caknes0", 8, 500, 64, 1),
           _edits("restore_many", "ck", 2, 4099, 2600, 1),
           _edits("restore_not_finite", "NN", 3, 256, 40, 1)))

KERNELS: Final = (EMBED_ROWS, ROPE_ROWS, NGRAM_ROWS, PLE_MIX, PLE_GATE, PLE_CONV, PLE_TAIL, DRAW_ROWS,
                  ADVANCE_ROWS, EDIT_LOGITS)
