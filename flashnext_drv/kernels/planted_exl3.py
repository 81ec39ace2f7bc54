"""Planted controls of the exl3 and moe_gemv families: what the check must report as wrong.

Read by the declarations; made by kernels/planting.py, run by check/controls.py.  An edit's old text stands
exactly once in its file: a changed kernel takes its controls along.
"""

from __future__ import annotations

from typing import Final

from .spec import Control, Edit

__all__ = [
    "LINEAR_FINISH",
    "LINEAR_GEMV_N8",
    "LINEAR_GEMV_N16",
    "LINEAR_INPUT",
    "MOE_GEMV_DOWN",
    "MOE_GEMV_GU",
]

_EXL3: Final = "exl3.cuh"
_DOT: Final = "gemv.cuh"
_GEMV: Final = "exl3/linear_gemv.cu"
_IN: Final = "exl3/linear_input.cu"
_OUT: Final = "exl3/linear_finish.cu"
_FINISH: Final = "exl3/finish.cuh"
_SLOT: Final = "moe/gemv_slot.cuh"
_GU: Final = "moe/moe_gemv_gu.cu"
_DOWN: Final = "moe/moe_gemv_down.cu"
_WIDTHS: Final = (
    "        FN_WIDTHS(0)\n        FN_WIDTHS(1)\n        FN_WIDTHS(2)\n"
    "        FN_TRELLIS(3, 2)\n        FN_TRELLIS(5, 2)\n        FN_TRELLIS(7, 2)\n"
)
# Only the decoders of mul1 with 3 and 5 bits: what the cases of these controls use, at a tenth of the time.
_NARROW: Final = Edit(_DOT, _WIDTHS, "        FN_TRELLIS(6, 2)\n        FN_TRELLIS(10, 2)\n")


def _one(name: str, kind: str, file: str, old: str, new: str, *cases: str) -> Control:
    return Control(name, kind, (Edit(file, old, new),), cases)


def _dot(name: str, kind: str, file: str, old: str, new: str, *cases: str) -> Control:
    return Control(name, kind, (_NARROW, Edit(file, old, new)), cases)


LINEAR_INPUT: Final = (
    _one(
        "unscaled",
        "scale",
        _IN,
        "        fn_hadamard128(v);\n    }\n",
        "        fn_hadamard128(v);\n"
        "        for (int i = 0; i < 4; i++) v[i] = fn_mul(v[i], 11.3137085f);\n    }\n",
    ),
    _one(
        "product_f16",
        "rounding",
        _IN,
        "v[i] = fn_mul(v[i], scale[i]);",
        "v[i] = fn_h2f(fn_f2h(fn_mul(v[i], scale[i])));",
    ),
    _one(
        "natural_order",
        "layout",
        _EXL3,
        "u32* at = reinterpret_cast<u32*>(row + fn_frag_pos(k));\n"
        "    at[0] = fn_pack_h2(v[0], v[1]);\n"
        "    at[2]",
        "u32* at = reinterpret_cast<u32*>(row + k);\n    at[0] = fn_pack_h2(v[0], v[1]);\n    at[1]",
    ),
    _one(
        "ties_away",
        "tie",
        _IN,
        "    if (k < linear.k) fn_store",
        "    for (u32 i = 0; i < 4; i++) v[i] = fn_u2f(fn_f2u(v[i]) + 1u);\n    if (k < linear.k) fn_store",
        "midpoints",
    ),
    _one(
        "padding_row", "stale", _IN, "if (row >= n_rows) return;", "if (row > n_rows) return;"
    ),
    _one("beyond_k", "tail", _IN, "if (k < linear.k) fn_store", "if (k <= linear.k) fn_store", "plain"),
    _one("first_linear", "index", _IN, "linears[blockIdx.y];", "linears[0];", "blocks", "mixed"),
)

# Of both forms of linear_gemv, one source.
_LINEAR_DOT: Final = (
    _dot(
        "k_falling",
        "order",
        _DOT,
        "for (u32 i = 0; i < depth; i++) fn_dot_step(weights, words[i], x[i], d);",
        "for (u32 i = 0; i < depth; i++) fn_dot_step(weights, words[depth - 1u - i], x[depth - 1u - i], d);",
        "leaves2",
        "segments2",
    ),
    _dot("last_step", "tail", _EXL3, "k1 = k0 + size;", "k1 = k0 + size - 16u;", "leaves2", "segments2"),
    _dot(
        "sum_f16",
        "rounding",
        _DOT,
        "            fn_mma_f16(d[r], a, b);",
        "            fn_mma_f16(d[r], a, b);\n"
        "            for (int i = 0; i < 4; i++) d[r][i] = fn_h2f(fn_f2h(d[r][i]));",
        "leaves2",
        "segments2",
    ),
    _dot(
        "codebook_split",
        "contraction",
        _EXL3,
        "return fn_hfma2(fn_prmt(h0, h1, 0x5410u), 0x1EEE1EEEu, 0xC931C931u);",
        "return fn_hadd2(fn_hfma2(fn_prmt(h0, h1, 0x5410u), 0x1EEE1EEEu, 0x80008000u), 0xC931C931u);",
        "leaves2",
        "segments2",
    ),
    _dot(
        "from_one",
        "scale",
        _DOT,
        "d[r][0] = d[r][1] = d[r][2] = d[r][3] = 0.f;",
        "d[r][0] = d[r][1] = d[r][2] = d[r][3] = 0x1p-20f;",
        "leaves2",
        "segments2",
    ),
    _dot(
        "bf16_low_first",
        "order",
        _DOT,
        "            fn_mma_bf16(d[r], a, hi);\n            fn_mma_bf16(d[r], a, lo);",
        "            fn_mma_bf16(d[r], a, lo);\n            fn_mma_bf16(d[r], a, hi);",
        "bf16_512x1",
        "bf16_512x4",
        "bf16_512x48",
    ),
    _dot("bf16_no_low", "leaf", _DOT, "            fn_mma_bf16(d[r], a, lo);\n", "", "bf16_512x1"),
    _dot("rest_lost", "leaf", _DOT, "i < n_rest; i++)", "i + 1u < n_rest; i++)", "f16_80x1"),
    _dot(
        "next_row",
        "stale",
        _GEMV,
        "rows.at[r] += (u64)row * x_stride;",
        "rows.at[r] += (u64)(row + 1u) * x_stride;",
        "leaves2",
        "leaves4",
    ),
    _dot(
        "padding_row",
        "stale",
        _GEMV,
        "if (row < n_rows && output < n)",
        "if (row <= n_rows && output < n)",
        "leaves2",
        "leaves4",
    ),
    _dot(
        "last_output",
        "tail",
        _GEMV,
        "if (row < n_rows && output < n)",
        "if (row < n_rows && output + 1u < n)",
        "leaves2",
    ),
    _dot("unit_in_place", "index", _GEMV, "        part += 4u * unit_stride;\n", "", "at_once2", "at_once4"),
    _dot(
        "carried_over",
        "stale",
        _DOT,
        "                    fn_clear(d);\n",
        "",
        "at_once2",
        "at_once4",
    ),
    _dot(
        "other_linear",
        "index",
        _GEMV,
        "if (first[i] <= warp) j = i;",
        "if (first[i] < warp) j = i;",
        "one_step",
    ),
)

LINEAR_GEMV_N8: Final = _LINEAR_DOT

LINEAR_GEMV_N16: Final = _LINEAR_DOT

LINEAR_FINISH: Final = (
    _one(
        "segments_falling",
        "order",
        _FINISH,
        "first[i] = fn_ld_here(at + i * step);",
        "first[i] = fn_ld_here(at + (segments - 1u - i) * step);",
        "segments",
    ),
    _one(
        "leaves_in_order",
        "order",
        _FINISH,
        "all = fn_add_quads(all, fn_add_quads(first[2], first[3]));",
        "all = fn_add_quads(fn_add_quads(all, first[2]), first[3]);",
        "leaves",
    ),
    _one("last_leaf", "leaf", _FINISH, "if (leaves > 4u)", "if (leaves > 8u)", "leaves"),
    _one("later_segments", "leaf", _FINISH, "from < segments; from += MANY", "from < MANY; from += MANY",
         "many_segments"),
    _one(
        "unscaled",
        "scale",
        _FINISH,
        "for (int i = 0; i < 4; i++) v[i] = fn_mul(v[i], scale[i]);",
        "for (int i = 0; i < 4; i++) v[i] = fn_mul(fn_mul(v[i], 11.3137085f), scale[i]);",
    ),
    _one(
        "contracted",
        "contraction",
        _FINISH,
        "for (int i = 0; i < 4; i++) v[i] = fn_add(v[i], b[i]);",
        "for (int i = 0; i < 4; i++) v[i] = fn_fma(v[i], 0x1.000002p+0f, b[i]);",
        "bias",
    ),
    _one(
        "sum_f16",
        "rounding",
        _OUT,
        "    finish.values(linear, row, cap, v);\n",
        "    finish.values(linear, row, cap, v);\n"
        "    for (u32 i = 0; i < 4; i++) v[i] = fn_h2f(fn_f2h(v[i]));\n",
    ),
    _one("padding_row", "stale", _OUT, "if (row >= n_rows ||", "if (row > n_rows ||"),
    _one("last_output", "tail", _FINISH, "if (at + i < n) out[i]", "if (at + i + 1u < n) out[i]"),
)

# Of both expert products, which share gemv_slot.cuh and the dot of exl3.cuh.
_SLOT_DOT: Final = (
    _dot(
        "k_falling",
        "order",
        _DOT,
        "for (u32 i = 0; i < depth; i++) fn_dot_step(weights, words[i], x[i], d);",
        "for (u32 i = 0; i < depth; i++) fn_dot_step(weights, words[depth - 1u - i], x[depth - 1u - i], d);",
        "segments",
        "one_row",
    ),
    _dot("last_step", "tail", _SLOT, "unit * size, size, together", "unit * size, size - 16u, together",
         "segments", "one_row"),
    _dot(
        "sum_f16",
        "rounding",
        _DOT,
        "            fn_mma_f16(d[r], a, b);",
        "            fn_mma_f16(d[r], a, b);\n"
        "            for (int i = 0; i < 4; i++) d[r][i] = fn_h2f(fn_f2h(d[r][i]));",
        "segments",
        "one_row",
    ),
    _dot(
        "codebook_split",
        "contraction",
        _EXL3,
        "return fn_hfma2(fn_prmt(h0, h1, 0x5410u), 0x1EEE1EEEu, 0xC931C931u);",
        "return fn_hadd2(fn_hfma2(fn_prmt(h0, h1, 0x5410u), 0x1EEE1EEEu, 0x80008000u), 0xC931C931u);",
        "segments",
        "one_row",
    ),
    _dot(
        "from_one",
        "scale",
        _DOT,
        "d[r][0] = d[r][1] = d[r][2] = d[r][3] = 0.f;",
        "d[r][0] = d[r][1] = d[r][2] = d[r][3] = 0x1p-20f;",
        "segments",
        "one_row",
    ),
    _dot(
        "other_segments",
        "order",
        _EXL3,
        "by_size = 31 - (i32)least_log2",
        "by_size = 30 - (i32)least_log2",
        "segments",
    ),
    _dot(
        "last_unit",
        "leaf",
        _SLOT,
        "if ((first_unit >= n_units) | ",
        "if ((first_unit + 1u >= n_units) | ",
        "segments",
    ),
    _dot(
        "rows_mixed",
        "layout",
        _SLOT,
        "part[at[i] + to + 8u] = d[0][2u + i];",
        "part[at[i] + to + 8u] = d[0][i];",
        "one_row",
    ),
    _dot(
        "operand_of_the_first",
        "index",
        _SLOT,
        "u32 from = mine != FN_NO_SLOT ?",
        "u32 from = n_units == 0 ?",
        "many_slots",
    ),
    _dot(
        "slot_of_the_first",
        "index",
        _SLOT,
        "dots.n_slots + theirs)",
        "dots.n_slots + slot)",
        "many_slots",
    ),
    _dot("unit_in_place", "index", _SLOT, "        to += unit_stride;\n", "", "shared"),
    _dot("next_pair", "tail", _SLOT, "i += together", "i += 2u * together", "shared"),
)

MOE_GEMV_GU: Final = (
    *_SLOT_DOT,
    _dot(
        "first_slot",
        "stale",
        _GU,
        "(u64)row * n_slots + slot]",
        "(u64)row * n_slots]",
        "one_row",
    ),
    _dot(
        "gate_for_up",
        "index",
        _GU,
        "blockIdx.y & 1u ? line.up : line.gate",
        "blockIdx.y & 1u ? line.gate : line.gate",
        "one_row",
    ),
)

MOE_GEMV_DOWN: Final = (
    *_SLOT_DOT,
    _dot(
        "first_slot",
        "stale",
        _DOWN,
        "(u64)row * n_slots + slot]",
        "(u64)row * n_slots]",
        "one_row",
    ),
    _dot("next_operand", "index", _DOWN,
         "hidden, x, width_cap", "hidden, x + width_cap, width_cap", "segments"),
)
