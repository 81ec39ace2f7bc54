"""Declarations of the moe_gemv family: the experts' products, one dot a (row, slot, projection).

Kernel sources: cuda_src/moe/moe_gemv_gu.cu and moe_gemv_down.cu; router, operands, activation and sum are the
moe family's.  They stand apart because each carries the decoders of all 27 EXL3 forms and compiles long.
What must stay true: the bytes are those of linear_gemv for the same operand, weights and segments.
"""

from __future__ import annotations

from typing import Final

from . import planted_exl3 as planted
from .exl3 import GEMV_BLOCK
from .limits import limits_of
from .spec import PTR, U32, Arg, Case, KernelSpec

__all__ = ["KERNELS", "MOE_GEMV_DOWN", "MOE_GEMV_GU"]

_BOUND: Final = (
    "As linear_gemv_n8: bytes of ref.orders.mma_chain; FP64 within 2^-23 (9 M + 2 A) a k step, see there."
)
_EXEMPT: Final = {"midpoints": "outputs are f32: nothing is rounded to f16"}


def _case(name: str, lines: str, **dims: int | str) -> Case:
    """lines: "<width>:<format of gate>,<of up>,<of down>" separated by ";", the shared expert last."""
    shows = ("integers",) if dims.get("data") == "onehot" else ()  # one right answer: the weight itself
    return Case(name, {"lines": lines, "hidden": 256, "rows": 1, "rows_cap": 4, "n_slots": 3, **dims}, shows)


_CASES: Final = (
    _case("one_row", "128:mul1_3,mul1_3,mul1_3; 128:mul1_3,mul1_3,mul1_3; 128:mul1_5,mul1_5,mul1_5"),
    _case(
        "mixed_formats",
        "256:mul1_2,mcg_4,3inst_1; 256:mul1_2.5,mul1_3.5,mul1_1.5; 256:mul1_4,mul1_5,mul1_6; "
        "128:3inst_7,mcg_8,mul1_8",
        rows=3,
    ),
    _case(
        "mixed_widths",
        "128:mul1_3,mul1_3,mul1_3; 384:mul1_3,mul1_4,mul1_3; 640:mul1_4,mul1_3,mul1_5; "
        "256:mul1_5,mul1_5,mul1_5",
        rows=4,
        hidden=512,
    ),
    _case(
        "real_shape", "640:mul1_3,mul1_3,mul1_3; 640:mul1_5,mul1_5,mul1_5", hidden=2560, n_slots=2, rows_cap=1
    ),
    _case(
        "many_slots",
        "128:mul1_3,mul1_3,mul1_3; " * 12 + "128:mul1_5,mul1_5,mul1_5",
        n_slots=11,
        rows=2,
        rows_cap=2,
    ),
    _case("segments", "1024:mul1_3,mul1_3,mul1_3; 512:mul1_3,mul1_3,mul1_3", hidden=1024, n_slots=2, rows=2),
    _case(
        "sixteen_rows",
        "128:mul1_4,mul1_4,mul1_4; 128:mul1_2,mul1_2,mul1_2; 128:mul1_6,mul1_6,mul1_6",
        rows=16,
        rows_cap=16,
    ),
    _case(
        "onehot",
        "128:mul1_3,mul1_4,mul1_5; 128:mul1_7,mul1_8,mcg_3; 128:mul1_1,mul1_2,3inst_5",
        data="onehot",
        rows=4,
    ),
    _case(
        "nonfinite",
        "128:mul1_3,mul1_3,mul1_3; 128:mul1_3,mul1_3,mul1_3; 128:mul1_5,mul1_5,mul1_5",
        data="nonfinite",
        rows=2,
    ),
    _case(
        "shared",
        "1024:mul1_3,mul1_3,mul1_3; 512:mul1_5,mul1_3,mul1_3; 128:mul1_3,mul1_5,mul1_3",
        hidden=1024,
        rows=3,
        blocks=7,
    ),
    _case("no_rows", "128:mul1_3,mul1_3,mul1_3; 128:mul1_5,mul1_5,mul1_5", n_slots=2, rows=0),
)

_COMMON: Final = (
    Arg("round", PTR, "FnRound", "r"),
    Arg("routes", PTR, "FnRoute (rows_cap, n_slots)", "r"),
    Arg("lines", PTR, "FnLine[n_experts + 1]", "r"),
)
_SIZES: Final = (
    Arg("hidden", U32, "multiple of 128"),
    Arg("n_slots", U32, "experts of a row, the shared one with them"),
    Arg("width_cap", U32, "largest width of a line, multiple of 128"),
)

MOE_GEMV_GU: Final = KernelSpec(
    name="moe_gemv_gu",
    source="moe/moe_gemv_gu.cu",
    order="exl3_dot_v1",
    args=(
        *_COMMON,
        Arg("x", PTR, "(rows_cap, n_slots, 2, hidden) f16, fragment order", "r"),
        Arg("part", PTR, "(units_cap, rows_cap, n_slots, 2, width_cap) f32", "w"),
        *_SIZES,
    ),
    grid="blocks, 2 n_slots, rows_cap; blocks share width / 32 * units units",
    block=GEMV_BLOCK,
    blocks_per_sm=16,
    programmatic=True,
    settled=("round", "routes", "lines"),
    spread=True,
    limits=limits_of("moe_gemv_gu"),
    reference="exl3.decode_linear",
    rows={"routes": 0, "x": 0, "part": 1},
    exempt=_EXEMPT,
    controls=planted.MOE_GEMV_GU,
    bound=_BOUND,
    cases=_CASES,
)

MOE_GEMV_DOWN: Final = KernelSpec(
    name="moe_gemv_down",
    source="moe/moe_gemv_down.cu",
    order="exl3_dot_v1",
    args=(
        *_COMMON,
        Arg("x", PTR, "(rows_cap, n_slots, width_cap) f16, fragment order", "r"),
        Arg("part", PTR, "(units_cap, rows_cap, n_slots, hidden) f32", "w"),
        *_SIZES,
    ),
    grid="blocks, n_slots, rows_cap; blocks share hidden / 32 * units units",
    block=GEMV_BLOCK,
    blocks_per_sm=16,
    programmatic=True,
    settled=("round", "routes", "lines"),
    spread=True,
    limits=limits_of("moe_gemv_down"),
    reference="exl3.decode_linear",
    rows={"routes": 0, "x": 0, "part": 1},
    exempt=_EXEMPT,
    controls=planted.MOE_GEMV_DOWN,
    bound=_BOUND,
    cases=_CASES,
)

KERNELS: Final = (MOE_GEMV_GU, MOE_GEMV_DOWN)
