"""Declarations of the glue family: the gated-residual sites around every sublayer.

Kernel sources: cuda_src/glue.  A site is site_norm, linear_gemv (down and inject), site_mid, site_up_n8 or
_n16; the sublayer's output is added by the next site_norm, or by stream_add where something else comes first.
What must stay true: site_norm with add and stream_add give the streams the same bytes, and the two widths of
site_up give a row the same bytes.
"""

from __future__ import annotations

from typing import Final

from . import planted_glue as planted
from .limits import limits_of
from .spec import F32, PTR, U32, Arg, Case, KernelSpec

__all__ = ["KERNELS", "SITE_MID", "SITE_NORM", "SITE_UP_N8", "SITE_UP_N16", "STREAM_ADD"]

_ROUND: Final = Arg("round", PTR, "FnRound", "r")
_HIDDEN: Final = Arg("hidden", U32, "channels of a stream, multiple of 128")
_Y: Final = Arg("y", PTR, "(rows_cap, hidden) f32, the sublayer's output", "r")
_TILED: Final = Arg("tiled", U32, "1: the f16 output is a tile image (fn_tile_at); 0: rows in fragment order")
_INJECT: Final = Arg("inject", PTR, "(rows_cap, 4) f32", "r")


_SPREAD: Final = ",".join(str(5 * i % 16) for i in range(70))  # 70 rows of the 16 that a case generates


def _case(name: str, **dims: int | str) -> Case:
    return Case(name, {"rows": 1, "rows_cap": 16, **dims})


_NORM_CASES: Final = (
    _case("one_row_128", hidden=128, add=1),
    _case("no_add_256", hidden=256, add=0, rows=3),
    _case("real_width", hidden=2560, add=1, rows=2),
    _case("all_rows_256", hidden=256, add=1, rows=16),
    _case("seven_rows_128", hidden=128, add=1, rows=7),
    _case("beyond_registers", hidden=3328, add=1, rows=2),
    _case("nonfinite", hidden=256, add=1, rows=3, special="nonfinite"),
    _case("tiled", hidden=272, add=1, rows=11, tiled=1),
    _case("tiled_two_images", hidden=64, add=0, rows=16, rows_cap=80, order=_SPREAD, tiled=1),
    _case("tiled_wide", hidden=3328, add=1, rows=2, tiled=1),
)

SITE_NORM: Final = KernelSpec(
    name="site_norm",
    source="glue/site_norm.cu",
    order="rms_row_v1",
    args=(
        _ROUND,
        Arg("streams", PTR, "(rows_cap, 4 hidden) f32", "rw"),
        _Y,
        _INJECT,
        Arg("add", U32, "1: streams += inject y first; 0: y and inject are not read"),
        Arg("w", PTR, "(4 hidden) f32, norm weight (1 + w is applied)", "r"),
        Arg("n16", PTR, "(rows_cap, 4 hidden) f16, fragment order, or a tile image", "w"),
        Arg("rinv", PTR, "(rows_cap, 4) f32, 1/rms of each stream", "w"),
        _HIDDEN,
        Arg("eps", F32, "1e-7..1e-4"),
        _TILED,
    ),
    grid="4, rows_cap",
    block=256,
    shared_bytes=32,
    blocks_per_sm=4,
    programmatic=True,
    constants=("w",),
    settled=("round",),
    limits=limits_of("site_norm"),
    reference="glue.rms_norm",
    rows=dict.fromkeys(("streams", "y", "inject", "n16", "rinv"), 0),
    exempt={"integers": "passes through a division and a root: integers have no exact answer",
            "midpoints": "what is rounded has passed through a root: no input gives an exact tie"},
    controls=planted.SITE_NORM,
    bound=(
        "streams: half an ulp (one fma) against FP64 of the same operands.  rinv: relative 2^-20: the sum "
        "of H squares has at most 4 ceil(H/1024) + 8 roundings of 2^-24 on positive terms, then division, "
        "add, sqrt, division.  n16: that and three roundings of 2^-24, then half an f16 ulp."
    ),
    cases=_NORM_CASES,
)

_MID_CASES: Final = (
    _case("micro", rank=16, hidden=128, has_inject=1),
    _case("real_sizes", rank=320, hidden=2560, has_inject=1, rows=2),
    _case("mixer_no_inject", rank=64, hidden=256, has_inject=0, rows=3),
    _case("all_rows", rank=48, hidden=256, has_inject=1, rows=16),
    _case("wide_rank", rank=416, hidden=128, has_inject=1, rows=7),
    _case("nonfinite", rank=32, hidden=256, has_inject=1, rows=3, special="nonfinite"),
    _case("tiled_out", rank=320, hidden=2560, has_inject=1, rows=11, tiled=1, out=1),
    _case("tiled_parts", rank=48, hidden=256, has_inject=1, rows=16, rows_cap=80, order=_SPREAD, tiled=1),
    _case("out_no_inject", rank=416, hidden=128, has_inject=0, rows=3, out=1),
)

SITE_MID: Final = KernelSpec(
    name="site_mid",
    source="glue/site_mid.cu",
    order="part_sum_v1",
    args=(
        _ROUND,
        Arg("linears", PTR, "FnLinear[2]: down (n = R), inject (n = 4; only with has_inject)", "r"),
        Arg("has_inject", U32, "0 or 1"),
        Arg("u", PTR, "(rows_cap, R) f16, fragment order, or a tile image", "w"),
        Arg("inject", PTR, "(rows_cap, 4) f32", "w"),
        _TILED,
    ),
    grid="rows_cap",
    block=384,
    programmatic=True,
    constants=("linears",),
    settled=("round",),
    limits=limits_of("site_mid"),
    reference="glue.Site",
    rows={"u": 0, "inject": 0, "part_*": 1},
    exempt={"order": "part_sum_v1 is followed by other functions in every kernel that uses it",
            "integers": "passes through a sigmoid: integers have no exact answer",
            "midpoints": "what is rounded has passed through a sigmoid: no input gives an exact tie"},
    controls=planted.SITE_MID,
    bound=(
        "From the partial sums as given: the sum of U units errs by (U - 1) 2^-24 times the sum of "
        "magnitudes, which silu and sigmoid (slope <= 1.1 and 1/4) pass on; silu and sigmoid 3 ulp; then "
        "half an f16 ulp (u) or none."
    ),
    cases=_MID_CASES,
)


def _up(rows_max: int) -> KernelSpec:
    """The two widths of site_up: for rounds of at most 8 and at most 16 rows."""
    rows = (1, 2, 3, 7) if rows_max == 8 else (1, 3, 16)
    shapes = [
        {"hidden": 128, "rank": 16},
        {"hidden": 256, "rank": 64},
        {"hidden": 128, "rank": 512},
        {"hidden": 256, "rank": 48},
    ]
    cases = [
        _case(f"rows{n}", rows=n, rows_cap=rows_max, dtype="f16", **shape)
        for n, shape in zip(rows, shapes, strict=False)
    ]
    cases += [
        _case("bf16", rows=3, rows_cap=rows_max, dtype="bf16", hidden=128, rank=320),
        _case("real_sizes", rows=2, rows_cap=rows_max, dtype="f16", hidden=2560, rank=320),
        _case("nonfinite", rows=3, rows_cap=rows_max, dtype="f16", hidden=128, rank=32, special="nonfinite"),
        _case("operand", rows=rows_max - 1, rows_cap=rows_max, dtype="f16", hidden=256, rank=64, operand=1),
        _case("operand_nonfinite", rows=3, rows_cap=rows_max, dtype="f16", hidden=128, rank=32, operand=1,
              special="nonfinite"),
    ]
    return KernelSpec(
        name=f"site_up_n{rows_max}",
        source="glue/site_up.cu",
        order="site_mix_v1",
        args=(
            _ROUND,
            Arg("linear", PTR, "FnLinear: up (k = R, n = 4 hidden), x = u of site_mid", "r"),
            Arg("streams", PTR, "(rows_cap, 4 hidden) f32", "r"),
            Arg("rinv", PTR, "(rows_cap, 4) f32", "r"),
            Arg("w", PTR, "(4 hidden) f32, norm weight", "r"),
            Arg("m", PTR, "(rows_cap, hidden) f32", "w"),
            Arg("m16", PTR, "(rows_cap, hidden) f16, m as an operand in fragment order, or null", "w"),
            _HIDDEN,
        ),
        grid="ceil(hidden / 16)",
        block=128,
        shared_bytes=2 * 4 * rows_max * 20 * 4,
        defines=(("FN_ROWS", str(rows_max)),),
        blocks_per_sm=1,
        programmatic=True,
        constants=("linear", "w"),
        settled=("round",),
        limits=limits_of(f"site_up_n{rows_max}"),
        reference="glue.Site",
        rows={"u": 0, "streams": 0, "rinv": 0, "m": 0, "m16": 0},
        exempt={"integers": "passes through a sigmoid: integers have no exact answer",
                "midpoints": "what is rounded has passed through a sigmoid: no input gives an exact tie",
                **({} if rows_max == 8 else {"order": "compared from site_up_n8, on its cases"})},
        controls=planted.SITE_UP_N8 if rows_max == 8 else planted.SITE_UP_N16,
        bound=(
            "From u and the weights as given: the chain of K/16 mma steps errs by 2^-23 of the largest term "
            "a step (bf16: two steps), sigmoid has slope 1/4 and 3 ulp, n three roundings, the chain over "
            "four streams four: (K/16 2^-23 max|u w| 16 / 4 + 10 2^-24) sum |n_j|.  m16: f16 of m, in bits."
        ),
        cases=tuple(cases),
    )


SITE_UP_N8: Final = _up(8)
SITE_UP_N16: Final = _up(16)

STREAM_ADD: Final = KernelSpec(
    name="stream_add",
    source="glue/stream_add.cu",
    order="",
    args=(_ROUND, Arg("streams", PTR, "(rows_cap, 4 hidden) f32", "rw"), _Y, _INJECT, _HIDDEN),
    grid="ceil(hidden / 256), rows_cap",
    block=256,
    programmatic=True,
    settled=("round",),
    limits=limits_of("stream_add"),
    reference="orders.fma32",
    bound="half an ulp: one fma an element",
    rows={"streams": 0, "y": 0, "inject": 0},
    exempt={"order": "compared from site_norm, on its cases",
            "midpoints": "outputs are f32: nothing is rounded to f16"},
    controls=planted.STREAM_ADD,
    cases=(
        _case("one_row_128", hidden=128),
        _case("real_width", hidden=2560, rows=2),
        _case("all_rows", hidden=256, rows=16),
        _case("nonfinite", hidden=256, rows=3, special="nonfinite"),
        _case("integers", hidden=256, rows=3, special="integers"),
    ),
)

KERNELS: Final = (SITE_NORM, SITE_MID, SITE_UP_N8, SITE_UP_N16, STREAM_ADD)
