"""Planted controls of the glue family: what the check must report as wrong.

Read by the declarations; made by kernels/planting.py, run by check/controls.py.  An edit's old text stands
exactly once in its file: a changed kernel takes its controls along.
"""

from __future__ import annotations

from typing import Final

from .spec import Control, Edit

__all__ = ["SITE_MID", "SITE_NORM", "SITE_UP_N8", "SITE_UP_N16", "STREAM_ADD"]

_NORM: Final = "glue/site_norm.cu"
_RMS: Final = "glue/rms_row.cuh"
_MID: Final = "glue/site_mid.cu"
_UP: Final = "glue/site_up.cu"
_ADD: Final = "glue/stream_add.cu"


def _one(name: str, kind: str, file: str, old: str, new: str, *cases: str) -> Control:
    return Control(name, kind, (Edit(file, old, new),), cases)


SITE_NORM: Final = (
    _one(
        "elements_swapped",
        "order",
        _RMS,
        "    acc = fn_fma(v.x, v.x, acc);\n    acc = fn_fma(v.y, v.y, acc);\n",
        "    acc = fn_fma(v.y, v.y, acc);\n    acc = fn_fma(v.x, v.x, acc);\n",
    ),
    _one(
        "no_last_warps",
        "leaf",
        _RMS,
        "fn_add(low, fn_add(fn_add(p[4], p[5]), fn_add(p[6], p[7])))",
        "fn_add(low, fn_add(p[4], p[5]))",
        "real_width",
    ),
    Control(
        "barrier",
        "barrier",
        (
            Edit(
                _RMS,
                "    if ((threadIdx.x & 31u) == 0) shared.part[threadIdx.x >> 5] = acc;\n"
                "    __syncthreads();\n",
                "    if (threadIdx.x >= 64u) fn_delay();\n"
                "    if ((threadIdx.x & 31u) == 0) shared.part[threadIdx.x >> 5] = acc;\n",
            ),
        ),
        cases=("real_width", "beyond_registers"),
    ),
    _one(
        "norm_f16",
        "rounding",
        _NORM,
        "return fn_mul(fn_mul(s, rinv), fn_add(1.f, w));",
        "return fn_mul(fn_h2f(fn_f2h(fn_mul(s, rinv))), fn_add(1.f, w));",
    ),
    _one(
        "last_quad",
        "tail",
        _NORM,
        "i < quads; i += 256u) {\n        float4 v",
        "i + 1u < quads; i += 256u) {\n        float4 v",
        "beyond_registers",
    ),
    _one(
        "add_split",
        "contraction",
        _NORM,
        "return make_float4(fn_fma(p, y.x, s.x),",
        "return make_float4(fn_add(fn_mul(p, y.x), s.x),",
    ),
    _one(
        "other_chunk",
        "layout",
        _NORM,
        "fn_tile_at(hidden >> 4, row,",
        "fn_tile_at(hidden >> 4, row & ~1u,",
        "tiled",
    ),
    _one("other_image", "layout", _NORM, "16u * 4096u : 1024u", "8u * 4096u : 1024u", "tiled_wide"),
    _one(
        "padding_row",
        "stale",
        _NORM,
        "if (row >= n_rows) return;",
        "if (row > n_rows) return;",
    ),
)

SITE_MID: Final = (
    Control(
        "falling_segments",
        "order",
        (
            Edit(
                _MID,
                "for (u32 i = 0; i < MOST; i++) sum = fn_add(sum, p[i]);",
                "for (u32 i = 0; i < MOST; i++) sum = fn_add(sum, p[MOST - 1u - i]);",
            ),
        ),
        cases=("real_sizes",),
    ),
    _one("last_segments", "leaf", _MID, "MOST = 32;", "MOST = 16;", "real_sizes"),
    _one("no_quarter", "scale", _MID, "x = fn_mul(sum, 0.25f);", "x = fn_mul(sum, 1.f);"),
    _one("rounded_twice", "rounding", _MID, "= fn_f2h(gate);", "= fn_f2h(fn_b2f(fn_f2b(gate)));"),
    _one("natural_order", "layout", _MID, "row * rank + fn_frag_pos(i);", "row * rank + i;"),
    _one(
        "other_image",
        "layout",
        _MID,
        "fn_tile_at((rank + 63u) >> 6, row, i)",
        "fn_tile_at(rank >> 6, row, i)",
    ),
    _one(
        "no_sum",
        "leaf",
        _MID,
        "low_part = low_out, low_segments = 1u;",
        "low_part = low_out, low_segments = 0u;",
    ),
    _one("padding_row", "stale", _MID, "if (row >= n_rows) return;", "if (row > n_rows) return;"),
    _one("last_output", "tail", _MID, "(has_inject ? rank + 4u : rank);", "(has_inject ? rank + 3u : rank);"),
)

# Of both forms of site_up, one source.
_SITE_UP: Final = (
    Control(
        "barrier",
        "barrier",
        (
            Edit(
                _UP,
                "    __syncthreads();\n#pragma unroll\n    for (u32 i = 0; i < MIXED;",
                "#pragma unroll\n    for (u32 i = 0; i < MIXED;",
            ),
            Edit(
                _UP,
                "    for (u32 segment = 0; segment < segments; segment++) {\n        float d",
                "    if (stream == 3u) fn_delay();\n"
                "    for (u32 segment = 0; segment < segments; segment++) {\n"
                "        float d",
            ),
        ),
    ),
    Control(
        "warp_barrier",
        "barrier",
        (Edit(_UP, "        __syncwarp();\n", ""),),
        racecheck="lanes of a warp run together: nothing holds one of them back",
    ),
    _one(
        "second_segment_alone",
        "leaf",
        _UP,
        "sum = segment ? fn_add(sum, d[r][i]) : d[r][i];",
        "sum = d[r][i];",
    ),
    _one(
        "mix_split",
        "contraction",
        _UP,
        "sum = fn_fma(shared.g[k][row][i_channel], shared.n[k][row][i_channel], sum);",
        "sum = fn_add(fn_mul(shared.g[k][row][i_channel], shared.n[k][row][i_channel]), sum);",
    ),
    _one(
        "no_mean",
        "scale",
        _UP,
        "float mean = fn_mul(sum, 0.25f);",
        "float mean = sum;",
    ),
    _one("operand_natural", "layout", _UP, "fn_frag_pos(c)] = fn_f2h(mean)", "c] = fn_f2h(mean)", "operand"),
    _one(
        "operand_twice_rounded",
        "rounding",
        _UP,
        "= fn_f2h(mean);",
        "= fn_f2h(fn_b2f(fn_f2b(mean)));",
        "operand",
    ),
    _one(
        "padding_row",
        "stale",
        _UP,
        "if (row >= n_rows) return;  // whole warps",
        "if (row > n_rows) return;",
    ),
    _one("no_low_half", "leaf", _UP, "fn_mma_bf16(d[r], w, lo);", ";", "bf16"),
    _one("gate_f16", "rounding", _UP, "g = fn_sigmoid(g);", "g = fn_h2f(fn_f2h(fn_sigmoid(g)));"),
)

SITE_UP_N8: Final = _SITE_UP

SITE_UP_N16: Final = _SITE_UP

STREAM_ADD: Final = (
    _one("split", "contraction", _ADD, "fn_fma(p.y, v, b)", "fn_add(fn_mul(p.y, v), b)"),
    _one("other_stream", "index", _ADD, "fn_fma(p.z, v, c)", "fn_fma(p.y, v, c)"),
    _one("padding_row", "stale", _ADD, "row >= n_rows ||", "row > n_rows ||"),
    _one("last_channel", "tail", _ADD, "|| i >= hidden)", "|| i + 1u >= hidden)"),
)
