"""Declarations of the move family: kernels that make or move bytes.

Read by the build, kernels/bind.py, the simulator and check/.  Stdlib only.
"""

from __future__ import annotations

from typing import Final

from . import planted_ahead, planted_move, planted_token
from .limits import limits_of
from .spec import PTR, U32, U64, Arg, Case, KernelSpec

__all__ = ["COUNT_REPLAY", "KERNELS", "LINE_FILL", "LINE_RESOLVE", "SYNTH_FILL"]

_FILL: Final[dict[str, int | str]] = {"kind": "words", "first": 0, "count": 4096, "at": 0}

SYNTH_FILL: Final = KernelSpec(
    name="synth_fill",
    source="move/synth_fill.cu",
    order="",
    args=(
        Arg("dst", PTR, "(at + count,) u16, 2-byte aligned", "w"),
        Arg("at", U64, "element of dst written first"),
        Arg("first", U64, "element of the tensor that goes there"),
        Arg("count", U64, "elements"),
        Arg("key", U64, "stream of the tensor"),
        Arg("key2", U64, "stream shared by groups of rows"),
        Arg("kind", U32, "0 words, 1 rows, 2 signed, 3 bell, 4 uniform"),
        Arg("p0", U32, "rows: words a row; signed: lowest bits; bell, uniform: k | bf16 << 8 | shift << 16"),
        Arg("p1", U32, "rows: scale base; signed: span; bell, uniform: added to n, two's complement"),
        Arg("p2", U32, "rows: scale mask; bell: own | shared << 16 in 1/128; uniform: count"),
        Arg("cols", U32, "columns of a matrix with sharing, else 0"),
        Arg("group_rows", U32, "rows that share, >= 1"),
    ),
    grid="(ceil((count + 7) / (8 * 256)))",
    block=256,
    limits=limits_of("synth_fill"),
    reference="move.synth_fill",
    bound="exact: integers only",
    exempt={"order": "no sum", "mates": "one tensor at a time: it has no rows",
            "midpoints": "values are exact in the format by definition",
            "nonfinite": "its inputs are integers"},
    controls=planted_token.SYNTH_FILL,
    cases=(
        Case("words", _FILL, shows=("integers",)),
        Case("words_skewed", {**_FILL, "first": 5, "count": 2051, "at": 3}),
        Case("words_far", {**_FILL, "first": 16_320_078_336, "count": 1030, "at": 7}),
        Case("words_one", {**_FILL, "first": 7, "count": 1, "at": 5}),
        Case("words_short", {**_FILL, "first": 2, "count": 9, "at": 1}),
        Case("rows_51", {**_FILL, "kind": "rows", "p0": 51, "first": 49, "count": 5100, "at": 1}),
        Case("rows_11", {**_FILL, "kind": "rows", "p0": 11, "first": 4_000_000_003, "count": 777, "at": 6}),
        Case("signed", {**_FILL, "kind": "signed", "count": 2560}),
        Case("signed_skewed", {**_FILL, "kind": "signed", "first": 3, "count": 1023, "at": 2}),
        Case("bell_f16", {**_FILL, "kind": "bell", "k": 12, "bf16": 0}),
        Case(
            "bell_bf16_norm",
            {**_FILL, "kind": "bell", "k": 7, "bf16": 1, "shift": 1, "add": 128, "count": 129},
        ),
        Case(
            "bell_shared",
            {
                **_FILL,
                "kind": "bell",
                "k": 5,
                "bf16": 1,
                "own": 91,
                "shared": 90,
                "cols": 130,
                "group_rows": 3,
                "first": 129,
                "count": 2011,
                "at": 4,
            },
        ),
        Case(
            "bell_all_shared",
            {
                **_FILL,
                "kind": "bell",
                "k": 9,
                "bf16": 0,
                "own": 0,
                "shared": 128,
                "cols": 7,
                "group_rows": 1000000,
                "first": 1,
                "count": 700,
                "at": 7,
            },
        ),
        Case(
            "uniform_bf16",
            {**_FILL, "kind": "uniform", "k": 5, "bf16": 1, "add": -128, "n": 216, "count": 515},
        ),
        Case(
            "uniform_f16",
            {**_FILL, "kind": "uniform", "k": 0, "bf16": 0, "add": -5, "n": 256, "at": 1, "count": 513},
        ),
    ),
)

_INTEGERS: Final = {
    "order": "no sum of floats",
    "midpoints": "works on integers alone",
    "nonfinite": "works on integers alone",
}


def _lines(name: str, rows: int, n_experts: int, n_lines: int, n_active: int, **dims: int | str) -> Case:
    """wants: whether rows ask for experts "in" lines, in "none" or "any", or each row for others of those in
    none ("apart").  empty: lines without an expert.  ages: "drawn", "same", "higher" in higher lines, or
    "never" used.  clock: of the round before."""
    given = {"rows": rows, "rows_cap": max(rows, 1) + 1, "n_experts": n_experts, "n_lines": n_lines,
             "n_active": n_active, "wants": "any", "empty": 0, "ages": "drawn", "clock": 5000, **dims}
    return Case(name, given)


LINE_RESOLVE: Final = KernelSpec(
    name="line_resolve",
    source="move/line_resolve.cu",
    order="",
    args=(
        Arg("round", PTR, "FnRound", "r"),
        Arg("routes", PTR, "FnRoute (rows_cap, n_slots)", "r"),
        Arg("lines", PTR, "FnLine[n_experts + 1]", "rw"),
        Arg("homes", PTR, "FnHome[n_experts]", "rw"),
        Arg("uses", PTR, "FnUse[cache.n_lines or more]", "rw"),
        Arg("cache", PTR, "FnCache", "rw"),
        Arg("fills", PTR, "FnFill[as many as lines or routed pairs]", "w"),
        Arg("n_experts", U32, "routed experts, 1..1024"),
        Arg("n_slots", U32, "active experts + 1, 2..33"),
    ),
    grid="1",
    block=256,
    shared_bytes=10624,
    programmatic=True,
    limits=limits_of("line_resolve"),
    reference="lines.line_resolve",
    bound="exact: integers only",
    exempt={**_INTEGERS, "mates": "a round's rows share the lines: its reference is compared whole",
            "integers": "works on integers alone: every case is exact"},
    controls=planted_move.LINE_RESOLVE,
    cases=(
        _lines("one_row_in", 1, 16, 8, 3, wants="in"),
        _lines("one_row_missing", 1, 16, 8, 3, wants="none"),
        _lines("opened", 1, 16, 8, 5, ages="never", clock=0),
        _lines("three_rows", 3, 40, 21, 4),
        _lines("published_in", 1, 512, 72, 10, wants="in"),
        _lines("published", 1, 512, 72, 10),
        _lines("published_rows", 16, 512, 72, 10),
        _lines("half", 4, 512, 257, 10),
        _lines("all_in_lines", 16, 512, 512, 10),
        _lines("no_lines", 2, 16, 0, 4),
        _lines("one_line", 2, 16, 1, 4, wants="none"),
        _lines("one_too_few", 1, 16, 3, 4, wants="none"),
        _lines("just_enough", 1, 16, 4, 4, wants="none"),
        _lines("one_more", 1, 16, 5, 4, wants="none"),
        _lines("few_lines_many_rows", 16, 64, 12, 8),
        _lines("empty_lines", 2, 30, 14, 5, empty=6),
        _lines("same_age", 2, 60, 33, 6, wants="none", ages="same"),
        _lines("clock_wraps", 2, 60, 33, 6, clock=0xFFFFFFFF),
        _lines("fewest_slots", 1, 2, 1, 1, wants="none"),
        _lines("most", 16, 1024, 1024, 32, ages="higher", empty=300),
        _lines("most_of_one_age", 16, 1024, 1024, 32, ages="same", empty=200),
        _lines("most_missing", 16, 1024, 500, 32),
        _lines("most_in_place", 16, 1024, 100, 32),
        _lines("most_fills", 16, 1024, 600, 32, wants="apart", empty=90),
        _lines("no_rows", 0, 16, 8, 3, wants="none"),
    ),
)


def _fills(name: str, grid: int, sizes: str) -> Case:
    """sizes: bytes of each fill."""
    return Case(name, {"grid": grid, "sizes": sizes})


LINE_FILL: Final = KernelSpec(
    name="line_fill",
    source="move/line_fill.cu",
    order="",
    args=(
        Arg("cache", PTR, "FnCache", "r"),
        Arg("fills", PTR, "FnFill[cache.n_fills or more]", "r"),
    ),
    grid="any",
    block=256,
    programmatic=True,
    limits=limits_of("line_fill"),
    reference="lines.line_fill",
    bound="exact: moves bytes",
    exempt={**_INTEGERS, "mates": "it has no rows", "integers": "moves bytes: every case is exact"},
    controls=planted_move.LINE_FILL,
    cases=(
        _fills("one_word", 1, "16"),
        _fills("one_piece", 1, "32768"),
        _fills("ends_of_pieces", 3, "32752,32768,32784,16"),
        _fills("more_blocks", 7, "40000,16"),
        _fills("one_block", 1, "70000,33024,256"),
        _fills("many", 5, ",".join(["512"] * 40)),
        _fills("published_grid", 64, "614400,409600"),
        _fills("none", 4, ""),
    ),
)

COUNT_REPLAY: Final = KernelSpec(
    name="count_replay",
    source="move/count_replay.cu",
    order="",
    args=(
        Arg("round", PTR, "FnRound[1]", "r"),
        Arg("counts", PTR, "(2,) u64: replays, rows that were live in them", "rw"),
    ),
    grid="1",
    block=32,
    programmatic=True,
    limits=limits_of("count_replay"),
    reference="ahead.count_replay",
    bound="exact: integers only",
    exempt={**_INTEGERS, "mates": "it reads how many rows there are and none of them",
            "integers": "works on integers alone: every case is exact"},
    controls=planted_ahead.COUNT_REPLAY,
    cases=(
        Case("first", {"rows": 1, "runs": 1, "replays": "0", "counted": "0"}),
        Case("rows_of_runs", {"rows": 7, "runs": 2, "replays": "41", "counted": "300"}),
        Case("no_rows", {"rows": 0, "runs": 0, "replays": "9", "counted": "9"}),
        Case("above_a_word", {"rows": 16, "runs": 16, "replays": str(2**32 - 1), "counted": str(2**32 - 5)}),
        Case("wraps", {"rows": 3, "runs": 3, "replays": str(2**64 - 1), "counted": str(2**64 - 1)}),
    ),
)

KERNELS: Final[tuple[KernelSpec, ...]] = (SYNTH_FILL, LINE_RESOLVE, LINE_FILL, COUNT_REPLAY)
