"""Planted controls of the kernels that make a prompt's operands: what the check must report as wrong.

Read by the declarations of the deep and moe_deep families; made by kernels/planting.py, run by
check/controls.py.  An edit's old text stands exactly once in its file: a changed kernel takes its controls
along.
"""

from __future__ import annotations

from typing import Final

from .spec import Control, Edit

__all__ = ["DEEP_INPUT", "MOE_DEEP_INPUT"]

_HALF: Final = "half_rows.cuh"
_EXL3: Final = "exl3.cuh"
_IN: Final = "deep/deep_input.cu"
_MOE: Final = "moe/moe_deep_input.cu"
_LANES: Final = "the lanes of a warp run side by side on a GPU"


def _one(name: str, kind: str, file: str, old: str, new: str, *cases: str) -> Control:
    return Control(name, kind, (Edit(file, old, new),), cases)


def _of_both(whole: str, part: str) -> tuple[Control, ...]:
    """What both kernels take from half_rows.cuh.  Cases: with whole groups of rows, and with few rows."""
    lanes = [
        Control(name, "barrier", (Edit(_HALF, old, new),), (whole,), racecheck=_LANES)
        for name, old, new in (
            ("rows_not_met", "        fn_cp_async_wait<0>();\n        __syncwarp();\n",
             "        fn_cp_async_wait<0>();\n"),
            ("scales_not_met", "            __syncwarp();\n            fn_half_load(s.scale, v);",
             "            fn_half_load(s.scale, v);"),
            ("sums_not_met", "    __syncwarp();\n#pragma unroll\n    for (u32 t = 0; t < 4; t++) {",
             "#pragma unroll\n    for (u32 t = 0; t < 4; t++) {"),
            ("sums_in_use", "    }\n    __syncwarp();\n}", "    }\n}"),
        )
    ]  # fmt: skip
    return (
        _one("stages_turned", "order", _EXL3, "for (u32 bit = 1; bit < 32u; bit <<= 1)",
             "for (u32 bit = 16; bit; bit >>= 1)", part),
        _one("unscaled", "scale", _EXL3, "v[i] = fn_mul(fn_add(mine, other), 0.088388347648f);",
             "v[i] = fn_add(mine, other);", part),
        _one("product_f16", "rounding", _HALF, "v[j] = fn_mul(x[j], v[j]);",
             "v[j] = fn_h2f(fn_f2h(fn_mul(x[j], v[j])));", part),
        _one("two_roundings", "contraction", _EXL3,
             "fn_mul(fn_fma(mine, sign, fn_mul(other, -sign)), 0.088388347648f)",
             "fn_fma(fn_mul(mine, 0.088388347648f), sign, fn_mul(other, -0.088388347648f * sign))", part),
        _one("halves_in_order", "index", _HALF, "{row + 96u * upper, row + 32u + 32u * upper}",
             "{row + 64u * upper, row + 32u + 64u * upper}", part),
        _one("pieces_in_order", "layout", _HALF, "8u * ((threadIdx.x & 7u) ^ (fn_half_row(t) & 7u))",
             "8u * (threadIdx.x & 7u)", part),
        _one("beyond_the_rows", "tail", _HALF, "if (fn_half_row(t) < unit.live) *", "*", part),
        _one("not_waited_for", "stale", _HALF, "        fn_cp_async_wait<0>();\n        __syncwarp();\n",
             "        __syncwarp();\n", whole),
        *lanes,
    )  # fmt: skip


DEEP_INPUT: Final = (
    *_of_both("rows65", "rows15"),
    _one("ties_away", "tie", _HALF, "make_uint4(fn_pack_h2(a.x, a.y),",
         "make_uint4(fn_pack_h2(fn_u2f(fn_f2u(a.x) + 1u), a.y),", "midpoints"),
    _one("beyond_k", "tail", _HALF, "|| 128u * unit.block + input >= operand.k) continue;", ") continue;",
         "plain"),
    _one("other_image", "layout", _HALF, "(to.k + 63u) / 64u", "to.k / 64u", "short_image"),
    _one("plain_beyond_the_rows", "tail", _HALF, "if (row >= unit.live ||", "if (row > unit.live ||",
         "plain"),
    _one("first_scales", "index", _IN, "fn_ldg(&linears[i].w.suh)", "fn_ldg(&linears[0].w.suh)", "rows15"),
    _one("last_linear", "tail", _IN, "if (lane < n_linears)", "if (lane + 1u < n_linears)", "rows15"),
    _one("padding_row", "stale", _IN, "fn_min_u32(n_rows - first, 16u)", "16u", "rows15"),
    _one("last_rows", "tail", _IN, "fn_min_u32(n_rows - first, 64u) + 15u", "fn_min_u32(n_rows - first, 64u)",
         "rows17"),
)  # fmt: skip

MOE_DEEP_INPUT: Final = (
    *_of_both("large", "edges"),
    _one("first_group_again", "stale", _HALF, "row = work.row(unit + 2u * warps);",
         "row = work.row(unit + warps);", "large"),
    _one("other_projection", "index", _MOE, "return i ? up_suh : gate_suh;", "return gate_suh;",
         "three_rows"),
    _one("one_image", "layout", _MOE, "x + (u64)pairs_cap * hidden,", "x,", "three_rows"),
    _one("padding_positions", "tail", _MOE, "fn_min_u32(tile.n_rows - first, 16u)", "16u", "three_rows"),
    _one("last_rows", "tail", _MOE, "(tile.n_rows + 15u) / 16u * 2u", "tile.n_rows / 16u * 2u", "edges"),
    _one("half_of_a_tile", "stale", _MOE, "fn_min_u32(i, tile.n_rows - 1u)",
         "fn_min_u32(i, fn_min_u32(tile.n_rows, 128u) - 1u)", "edges"),
    _one("unsorted", "index", _MOE, "fn_ldg(pair_of + fn_min_u32(i, tile.n_rows - 1u)) / n_slots",
         "fn_min_u32(i, tile.n_rows - 1u) / n_slots", "edges"),
    _one("beyond_the_inputs", "tail", _MOE, "128u * block < columns ? 3u : 0u", "3u", "three_rows"),
)  # fmt: skip
