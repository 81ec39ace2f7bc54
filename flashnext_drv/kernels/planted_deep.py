"""Planted controls of the deep family: what the check must report as wrong.

Read by the declarations; made by kernels/planting.py, run by check/controls.py.  An edit's old text stands
exactly once in its file: a changed kernel takes its controls along.  Edits lie in what both forms of deep.cuh
share, or in both.
"""

from __future__ import annotations

from typing import Final

from .spec import Control, Edit

__all__ = ["DEEP_LINEAR", "DEEP_SITE_UP"]

_DEEP: Final = "deep.cuh"
_LINEAR: Final = "deep/deep_linear.cu"
_SITE: Final = "deep/deep_site_up.cu"


def _one(name: str, kind: str, file: str, old: str, new: str, *cases: str) -> Control:
    return Control(name, kind, (Edit(file, old, new),), cases)


DEEP_LINEAR: Final = (
    _one(
        "segments_by_tree",
        "order",
        _DEEP,
        "const float (&d)[ROW_TILES][4], float (&sum)[ROW_TILES][4]) {\n",
        "const float (&d)[ROW_TILES][4], float (&sum)[ROW_TILES][4]) {\n"
        "        leaves *= segments, segments = 1u;\n",
        "segments",
    ),
    _one(
        "tree_flat",
        "order",
        _DEEP,
        "for (; leaf >> level & 1u; level++)",
        "for (; leaf && level < 1u; level++)",
        "leaves4",
        "leaves8",
    ),
    _one(
        "first_segment_lost",
        "leaf",
        _DEEP,
        "sum[j][i] = fn_add(sum[j][i], d[j][i]);",
        "sum[j][i] = d[j][i];",
        "segments",
    ),
    _one("sum_f16", "rounding", _LINEAR, "float v[4] = {x.x,", "float v[4] = {fn_h2f(fn_f2h(x.x)),", "f16"),
    _one("last_row", "tail", _LINEAR, "row < live; row", "row + 1u < live; row", "f16", "rows65"),
    _one("last_output", "tail", _LINEAR, "if (at + i < n) to[i]", "if (at + i + 1u < n) to[i]", "f16"),
    _one(
        "unscaled", "scale", _LINEAR, "v[i] = fn_mul(v[i], scale[i]);", "v[i] = fn_mul(v[i], 1.f);", "mul1_3"
    ),
    _one("no_bias", "leaf", _LINEAR, "v[i] = fn_add(v[i], bias[i]);", "v[i] = fn_add(v[i], 0.f);", "bias"),
    _one(
        "other_linear",
        "index",
        _LINEAR,
        "if (linears[l].first_warp <= tile) j = l;",
        "if (linears[l].first_warp < tile) j = l;",
        "mixed",
    ),
    _one(
        "padding_row",
        "stale",
        _LINEAR,
        "fn_min_u32(n_rows - row0, FN_DEEP_ROWS);",
        "fn_min_u32(n_rows - row0 + 1u, FN_DEEP_ROWS);",
        "f16",
    ),
    _one(
        "tile_turned",
        "layout",
        _DEEP,
        "8u * (i >> 1)] = sum[j][i];",
        "8u * (i >> 1 ^ 1u)] = sum[j][i];",
        "f16",
    ),
)

DEEP_SITE_UP: Final = (
    _one(
        "streams_falling",
        "order",
        _SITE,
        "sum = j ? fn_fma(g, n, sum) : fn_mul(g, n);",
        "sum = j ? fn_add(fn_mul(g, n), sum) : fn_mul(g, n);",
    ),
    _one("fourth_lost", "scale", _SITE, "fn_mul(sum, 0.25f)", "fn_mul(sum, 0.2500001f)"),
    _one(
        "n_f16",
        "rounding",
        _SITE,
        "float n = fn_mul(fn_mul(x[i][j], rinv[j]), scale[j]);",
        "float n = fn_h2f(fn_f2h(fn_mul(fn_mul(x[i][j], rinv[j]), scale[j])));",
    ),
    _one("last_row", "tail", _SITE, "if (row >= live) continue;", "if (row + 1u >= live) continue;"),
    _one("first_rinv", "index", _SITE, "rinv[j]), scale[j]);", "rinv[0]), scale[j]);"),
    _one(
        "other_streams",
        "layout",
        _SITE,
        "s.deep.tile[row][32u * j + lane]",
        "s.deep.tile[row][4u * lane + j]",
    ),
)
