"""Planted controls of the probe family: what the check must report as wrong.

Read by the declarations; made by kernels/planting.py, run by check/controls.py.  An edit's old text stands
exactly once in its file: a changed kernel takes its controls along.
"""

from __future__ import annotations

from typing import Final

from .spec import Control, Edit

__all__ = ["BARRIER_TURNS", "MATH_F64", "MATH_SWEEP", "MMA_TILES_BF16", "MMA_TILES_F16", "SHARED_WIDE",
           "WARP_OPS"]

_MATH: Final = "math.cuh"
_WARP: Final = "probe/warp_ops.cu"
_TILES: Final = "probe/mma_tiles.cu"
_TURNS: Final = "probe/barrier_turns.cu"
_F64: Final = "probe/math_f64.cu"
_WIDE: Final = "probe/shared_wide.cu"
_SWEEP: Final = "probe/math_sweep.cu"


def _one(name: str, kind: str, file: str, old: str, new: str, *cases: str) -> Control:
    return Control(name, kind, (Edit(file, old, new),), cases)


MATH_SWEEP: Final = (
    _one(
        "exp_coefficient",
        "rounding",
        _MATH,
        "p = fn_fma(p, r, 0x1.5554b8p-5f);",
        "p = fn_fma(p, r, 0x1.5554p-5f);",
    ),
    _one("ln2_one_part", "leaf", _MATH, "r = fn_fma(k, 0x1.05c610p-29f, r);", ""),
    _one(
        "log_split",
        "contraction",
        _MATH,
        "return fn_fma(fe, 0x1.62e430p-1f, p);",
        "return fn_add(fn_mul(fe, 0x1.62e430p-1f), p);",
    ),
    _one(
        "nan_lost",
        "nan",
        "prelude.cuh",
        "if (a != a || b != b) return fn_nan();",
        "if (a != a && b != b) return fn_nan();",
        "max",
    ),
    _one(
        "ties_away",
        "tie",
        _SWEEP,
        "y[i] = (u32)fn_f2h(x) |",
        "y[i] = (u32)fn_f2h(fn_u2f(u + 1u)) |",
        "f2h_midpoints",
    ),
    _one("last_point", "tail", _SWEEP, "i < n; i +=", "i + 1u < n; i +="),
)

MATH_F64: Final = (
    _one(
        "swapped",
        "layout",
        _F64,
        "y[3 * i] = s;\n        y[3 * i + 1] = c;",
        "y[3 * i] = c;\n        y[3 * i + 1] = s;",
    ),
    _one(
        "through_f32",
        "rounding",
        _F64,
        "y[3 * i + 2] = fn_exp_f64(x[i]);",
        "y[3 * i + 2] = (double)(float)fn_exp_f64(x[i]);",
    ),
    _one("last_point", "tail", _F64, "i < n; i +=", "i + 1u < n; i +="),
)

MMA_TILES_F16: Final = (
    _one("other_half", "index", _TILES, "tb[g * 16 + t + 8 * i], tb", "tb[g * 16 + t], tb"),
    _one(
        "accumulator_lost",
        "leaf",
        _TILES,
        "acc[i] = c[tile * 128 + (g + 8 * (i >> 1)) * 8 + t + (i & 1)];",
        "acc[i] = 0.f;",
    ),
    _one("last_tile", "tail", _TILES, "if (tile >= n) return;", "if (tile + 1 >= n) return;"),
)

MMA_TILES_BF16: Final = (
    _one("other_half", "index", _TILES, "tb[g * 16 + t + 8 * i], tb", "tb[g * 16 + t], tb"),
    _one("as_f16", "scale", _TILES, "fn_mma_bf16(acc, ra, rb);", "fn_mma_f16(acc, ra, rb);"),
)

WARP_OPS: Final = (
    _one("other_lane", "index", _WARP, "fn_shfl_up(v, 3)", "fn_shfl_up(v, 2)"),
    _one(
        "tree_by_hand",
        "order",
        _WARP,
        "f[512 + t] = fn_warp_sum(v);",
        "float sum = v;\n"
        "    for (u32 i = 1; i < 32; i <<= 1) sum = fn_add(sum, fn_shfl_xor(sum, i));\n"
        "    f[512 + t] = sum;",
    ),
    _one("no_minimum", "leaf", _WARP, "fn_atomic_min_u64(&counts[1], w);", ""),
)

BARRIER_TURNS: Final = (
    Control(
        "after_reading",
        "barrier",
        (
            Edit(_TURNS, "#if !FN_PROBE_BROKEN", "#if 0"),
            Edit(
                _TURNS,
                "        v = shared.value",
                "        if (t >= 128u) fn_delay();\n        v = shared.value",
            ),
        ),
    ),
    Control(
        "after_writing",
        "barrier",
        (
            Edit(
                _TURNS,
                "        shared.value[t] = v;\n        __syncthreads();\n",
                "        if (t >= 128u) fn_delay();\n        shared.value[t] = v;\n",
            ),
        ),
    ),
    _one(
        "one_turn_less",
        "tail",
        _TURNS,
        "for (u32 i = 0; i < turns; i++) {",
        "for (u32 i = 1; i < turns; i++) {",
    ),
)

SHARED_WIDE: Final = (
    Control(
        "after_writing",
        "barrier",
        (
            Edit(
                _WIDE,
                "    for (u32 i = t; i < COUNT; i += FN_THREADS) shared",
                "    if (t >= 64u) fn_delay();\n"
                "    for (u32 i = t; i < COUNT; i += FN_THREADS) shared",
            ),
            Edit(_WIDE, "    __syncthreads();\n", ""),
        ),
    ),
    _one("last_word", "tail", _WIDE, "< COUNT; i += FN_THREADS) shared", "< 1023u; i += FN_THREADS) shared"),
    _one("not_reversed", "layout", _WIDE, "place(COUNT - 1u - i)", "place(i)"),
)
