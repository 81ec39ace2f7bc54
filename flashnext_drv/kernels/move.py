"""Declarations of the move family: kernels that make or move bytes.

Read by the build, kernels/bind.py, the simulator and check/.  Stdlib only.
"""

from __future__ import annotations

from typing import Final

from . import planted_token as planted
from .limits import limits_of
from .spec import PTR, U32, U64, Arg, Case, KernelSpec

__all__ = ["KERNELS", "SYNTH_FILL"]

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
    controls=planted.SYNTH_FILL,
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

KERNELS: Final[tuple[KernelSpec, ...]] = (SYNTH_FILL,)
