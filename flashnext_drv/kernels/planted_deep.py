"""Planted controls of the deep family: what the check must report as wrong.

Read by the declarations; made by kernels/planting.py, run by check/controls.py.  An edit's old text stands
exactly once in its file: a changed kernel takes its controls along.  Edits lie in what both forms of deep.cuh
share, or in both.
"""

from __future__ import annotations

from typing import Final

from .spec import Control, Edit

__all__ = ["DEEP_LINEAR", "DEEP_SITE_UP", "WITHOUT_LAST_TILE"]

_DEEP: Final = "deep.cuh"
_LINEAR: Final = "deep/deep_linear.cu"
_SITE: Final = "deep/deep_site_up.cu"
# both walks over tiles end one early; of the moe_deep family too
WITHOUT_LAST_TILE: Final = (
    Edit(_DEEP, "if (i >= count || !tiles.take(i))", "if (i + 1u >= count || !tiles.take(i))"),
    Edit(_DEEP, "i < tiles.count(); i += gridDim.x", "i + 1u < tiles.count(); i += gridDim.x"),
)


def _one(name: str, kind: str, file: str, old: str, new: str, *cases: str) -> Control:
    return Control(name, kind, (Edit(file, old, new),), cases)


def _hopper(name: str, kind: str, file: str, old: str, new: str, *cases: str) -> Control:
    """One in text that images for sm_90a alone have."""
    return Control(name, kind, (Edit(file, old, new),), cases, hopper=True)


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
        "for (; present >> (level + 1u) & 1u; level++)",
        "for (; present > 1u && level < 1u; level++)",
        "leaves8",
    ),
    _one("leaf_lost", "leaf", _DEEP, "sum[j][0] = fn_add(w.x, sum[j][0])", "sum[j][0] = w.x", "leaves4"),
    _one(
        "first_segment_lost",
        "leaf",
        _DEEP,
        "sum[j][i] = fn_add(sum[j][i], d[j][i]);",
        "sum[j][i] = d[j][i];",
        "segments",
    ),
    _one(
        "sum_f16",
        "rounding",
        _LINEAR,
        "= deep.output(row, lane + 32u * i);",
        "= fn_h2f(fn_f2h(deep.output(row, lane + 32u * i)));",
        "f16",
    ),
    _one("last_row", "tail", _LINEAR, "row < end; row +=", "row + 1u < end; row +=", "f16", "rows65"),
    _one(
        "last_output",
        "tail",
        _LINEAR,
        "if (at + lane + 32u * i < n)",
        "if (at + lane + 32u * i + 1u < n)",
        "f16",
    ),
    _one("unscaled", "scale", _DEEP, "fn_mul(q.x, svh[0])", "q.x", "mul1_3"),
    _one("no_bias", "leaf", _DEEP, "fn_add(q.x, more[0])", "q.x", "bias"),
    _one(
        "other_linear",
        "index",
        _LINEAR,
        "if (first[l] <= tile) j = l;",
        "if (first[l] < tile) j = l;",
        "mixed",
    ),
    _one(
        "padding_row",
        "stale",
        _LINEAR,
        "fn_min_u32(n_rows - row0, of_tile)",
        "fn_min_u32(n_rows - row0 + 1u, of_tile)",
        "f16",
    ),
    _one(
        "last_rows",
        "tail",
        _LINEAR,
        "((n_rows + of_tile - 1u) / of_tile)",
        "(n_rows > of_tile ? n_rows / of_tile : 1u)",
        "wide",
    ),
    _one(
        "tile_turned",
        "layout",
        _DEEP,
        "((at + 8u * (i >> 1)) ^ turned",
        "((at + 8u * (i >> 1 ^ 1u)) ^ turned",
        "f16",
    ),
    Control("last_tile", "tail", WITHOUT_LAST_TILE, cases=("mixed",)),
    Control(
        "every_other_turn",
        "leaf",
        (
            Edit(_DEEP, "if (i >= count || !tiles.take(i))", "if (turn & 1 || i >= count || !tiles.take(i))"),
            Edit(_DEEP, "i < tiles.count(); i += gridDim.x", "i < tiles.count(); i += 2u * gridDim.x"),
        ),
        cases=("mixed",),
    ),
    Control(
        "first_part_again",
        "index",
        (
            Edit(_DEEP, "rows.x += (u64)128u * rows.k_blocks * 64u;", "rows.x += 0u;"),
            Edit(_DEEP, "{rows.x + (u64)first_row * rows.k_blocks * 64u,", "{rows.x,"),
        ),
        cases=("rows130",),
    ),
    Control(
        "barrier",
        "barrier",
        (
            Edit(
                _DEEP,
                "        spill(sum);\n        meet();\n",
                "        if (fn_thread_here() < 32u) fn_delay();\n        spill(sum);\n",
            ),
            Edit(
                _DEEP,
                "            if (computes) spill(sum);\n            meet();\n",
                "            if (fn_thread_here() < 32u) fn_delay();\n"
                "            if (computes) spill(sum);\n",
            ),
        ),
        cases=("f16",),
    ),
    _one(
        "leaves_overwritten",
        "barrier",
        _DEEP,
        "            meet();  // nobody's leaves wait there any more\n",
        "",
        "leaves2",
    ),
    _one(
        "scales_not_awaited",
        "barrier",
        _DEEP,
        "        fn_cp_async_wait<0>();\n        u32 thread",
        "        u32 thread",
        "mul1_3",
    ),
    _hopper("wgmma_steps_crosswise", "layout", _DEEP, "rows + 2u * step, more);",
            "rows + 2u * (step ^ 1u), more);", "f16"),
    _hopper("unit_goes_on", "leaf", _DEEP, "start(d, a[i & 1u], rows, i, i || b);",
            "start(d, a[i & 1u], rows, i, true);", "segments"),
    _hopper("wide_unit_goes_on", "leaf", _DEEP, "start(d[0], a[0], rows, 0, b != 0);",
            "start(d[0], a[0], rows, 0, true);", "wide"),
    _hopper("wide_first_rows_lost", "leaf", _DEEP, "            if (more) {\n", "            if (false) {\n",
            "wide"),
    _hopper("wide_second_rows_lost", "leaf", _DEEP, "sum[j][i] = fn_add(sum[j][i], d[1][j][i]);",
            "sum[j][i] = d[1][j][i];", "wide"),
    _hopper("wide_sums_of_before", "stale", _DEEP, "add_unit(unit != 0,", "add_unit(true,", "wide"),
    _hopper("wide_halves_alike", "index", _DEEP, "x + 2u * of_image, of_image);", "x, of_image);", "wide"),
    _hopper("wide_last_image", "tail", _DEEP, "copy(images - 2u, 8192u,", "copy(1u, 8192u,", "wide"),
    _hopper("wide_part_again", "index", _DEEP, "i < 4; i++) d[0][j][i] = d[1][j][i];",
            "i < 4; i++) d[0][j][i] = d[0][j][i];", "wide"),
    _hopper("wide_step_again", "index", _DEEP, "source.operand(3, a[3]);", "source.operand(2, a[3]);",
            "wide"),
    _hopper("wide_leaves_flat", "order", _DEEP, "for (; leaf >> (level + 1u) & 1u; level++)",
            "for (; leaf > 2u && level < 1u; level++)", "wide_leaves8"),
    _hopper("wide_leaf_lost", "leaf", _DEEP, "v[3] = fn_add(w[j].w, v[3]);", "v[3] = w[j].w;",
            "wide_leaves8"),
    _hopper("wide_leaves_of_second_rows", "leaf", _DEEP, "w[j] = waiting[level][h][j];",
            "w[j] = waiting[level][0][j];", "wide_leaves8"),
    _hopper("wide_pair_goes_on", "stale", _DEEP, "        add_unit(odd, !odd, d, sum);\n",
            "        add_unit(leaf != 0, !odd, d, sum);\n", "wide_leaves8"),
)

DEEP_SITE_UP: Final = (
    _one(
        "streams_falling",
        "order",
        _SITE,
        "return j ? fn_fma(g, n, sum) : fn_mul(g, n);",
        "return j ? fn_add(fn_mul(g, n), sum) : fn_mul(g, n);",
    ),
    _one("fourth_lost", "scale", _SITE, "fn_mul(sum, 0.25f)", "fn_mul(sum, 0.2500001f)"),
    _one(
        "n_f16",
        "rounding",
        _SITE,
        "float n = fn_mul(fn_mul(x, rinv), scale), g",
        "float n = fn_h2f(fn_f2h(fn_mul(fn_mul(x, rinv), scale))), g",
    ),
    _one("last_row", "tail", _SITE, "if (row >= end) continue;", "if (row + 1u >= end) continue;"),
    _one(
        "last_rows",
        "tail",
        _SITE,
        "((n_rows + ROWS - 1u) / ROWS)",
        "(n_rows > ROWS ? n_rows / ROWS : 1u)",
        "rows200",
    ),
    _one("first_rinv", "index", _SITE, "rinv4[j], scale[j], sum);", "rinv4[0], scale[j], sum);"),
    _one(
        "other_streams",
        "layout",
        _SITE,
        "deep.output(row, 32u * j + lane)",
        "deep.output(row, 4u * lane + j)",
    ),
    _one("first_rows", "index", _SITE, "row0 = ROWS * of_rows;", "row0 = 0u * of_rows;", "rows200"),
    _hopper("resident_first_stream", "index", _SITE, "group + stream * (all.hidden / 16u);", "group;",
            "rows200"),
    _hopper("resident_images", "layout", _SITE, "s.rows[stage] + 8192u * (k / 4u)",
            "s.rows[stage] + 8192u * (k / 8u)", "rows200"),
    _hopper("resident_last_tile", "tail", _SITE, "count * (blockIdx.x + 1u) / gridDim.x);",
            "count * (blockIdx.x + 1u) / gridDim.x) - 1u;", "rows200"),
    _hopper("resident_last_row", "tail", _SITE, "if (row0 + row >= all.n_rows) return;",
            "if (row0 + row + 1u >= all.n_rows) return;", "rows200"),
    _hopper("resident_first_rinv", "index", _SITE, "rinv[j], scale[j][c], sum[c]);",
            "rinv[0], scale[j][c], sum[c]);", "rows200"),
    Control(
        "resident_dots",
        "barrier",
        (
            Edit(
                _SITE,
                "            fn_named_barrier(1u + group, 128u);  // the turn before of these dots was read "
                "before the last barrier\n",
                "",
            ),
            Edit(
                _SITE,
                "            fn_hold(d);\n            __syncwarp();\n",
                "            fn_hold(d);\n            if (stream == 1u) fn_delay();\n"
                "            __syncwarp();\n",
            ),
        ),
        cases=("rows200",),
        hopper=True,
    ),
)
