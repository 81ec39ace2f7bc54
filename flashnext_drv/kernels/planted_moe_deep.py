"""Planted controls of the moe_deep family: what the check must report as wrong.

Read by the declarations; made by kernels/planting.py, run by check/controls.py.  An edit's old text stands
exactly once in its file: a changed kernel takes its controls along.
"""

from __future__ import annotations

from typing import Final

from .planted_deep import WITHOUT_LAST_TILE
from .spec import Control, Edit

__all__ = [
    "MOE_DEEP_DOWN",
    "MOE_DEEP_GU",
    "MOE_DEEP_SUM",
    "MOE_PLAN_COUNT",
    "MOE_PLAN_PLACE",
    "MOE_PLAN_SCAN",
]

_COUNT: Final = "moe/moe_plan_count.cu"
_SCAN: Final = "moe/moe_plan_scan.cu"
_PLACE: Final = "moe/moe_plan_place.cu"
_SUM: Final = "moe/moe_deep_sum.cu"


def _one(name: str, kind: str, file: str, old: str, new: str, *cases: str) -> Control:
    return Control(name, kind, (Edit(file, old, new),), cases)


MOE_PLAN_COUNT: Final = (
    _one(
        "shared_left_out",
        "leaf",
        _COUNT,
        "e <= n_experts; e += FN_THREADS) counts[e] = s.n[e];",
        "e < n_experts; e += FN_THREADS) counts[e] = s.n[e];",
    ),
    _one("padding_rows", "stale", _COUNT, "fn_min_u32(n_rows - first, ROWS)", "ROWS", "three_rows"),
    _one("last_slot", "tail", _COUNT, "i < live * n_slots;", "i + 1u < live * n_slots;"),
    _one(
        "blocks_without_rows",
        "tail",
        _COUNT,
        "    counts += (u64)",
        "    if (!live) return;\n    counts += (u64)",
        "one_row",
        "no_rows",
    ),
)

MOE_PLAN_SCAN: Final = (
    _one("by_32", "layout", _SCAN, "(n[t] + 63u) & ~63u", "(n[t] + 31u) & ~31u"),
    _one(
        "last_block",
        "tail",
        _SCAN,
        "(fn_ld(&round->n_rows) + 127u) / 128u",
        "fn_ld(&round->n_rows) / 128u",
        "edges",
        "three_blocks",
    ),
    _one("whole_tiles", "tail", _SCAN, "fn_min_u32(n[t] - 256u * i, 256u)", "256u"),
    _one("half_is_large", "tail", _SCAN, "left > 128u ?", "left >= 128u ?", "edges"),
    _one(
        "large_last",
        "layout",
        _SCAN,
        "(first[t] & 0xffffu) + i : n_large + (first[t] >> 16);",
        "(both >> 16) + (first[t] & 0xffffu) + i : first[t] >> 16;",
        "edges",
        "large_tiles",
    ),
    _one("turns_apart", "index", _SCAN, "= both + scan_block", "= scan_block", "most_experts"),
    _one("warps_apart", "leaf", _SCAN, "here - v + (warp ? before : 0u)", "here - v", "published"),
    Control(
        "barrier",
        "barrier",
        (
            Edit(_SCAN, "    __syncthreads();\n    u32 sums = ", "    u32 sums = "),
            Edit(
                _SCAN,
                "    if (lane == 31u) s.sums",
                "    if (warp == 1u) fn_delay();\n    if (lane == 31u) s.sums",
            ),
        ),
        cases=("published",),
    ),
    Control(
        "scan_over_scan",
        "barrier",
        (
            Edit(_SCAN, "    __syncthreads();  // the scan before has been read\n", ""),
            Edit(_SCAN, "    u32 sums = ", "    if (warp == 1u) fn_delay();\n    u32 sums = "),
        ),
        cases=("published",),
    ),
)

MOE_PLAN_PLACE: Final = (
    _one(
        "falling_rows",
        "order",
        _PLACE,
        "& ((1u << (row & 31u)) - 1u)",
        "& ~((2u << (row & 31u)) - 1u)",
        "edges",
        "three_rows",
    ),
    _one("itself_too", "tail", _PLACE, "((1u << (row & 31u)) - 1u)", "((2u << (row & 31u)) - 1u)"),
    _one("first_word", "leaf", _PLACE, "w < row >> 5; w++", "w + 1u < row >> 5; w++", "edges"),
    _one("padding_rows", "stale", _PLACE, "fn_min_u32(n_rows - first, ROWS)", "ROWS", "whole_block", "edges"),
    _one(
        "other_block",
        "index",
        _PLACE,
        "starts += (u64)blockIdx.x *",
        "starts += 0u *",
        "edges",
        "three_blocks",
    ),
    Control(
        "barrier",
        "barrier",
        (
            Edit(_PLACE, "    __syncthreads();\n    starts +=", "    starts +="),
            Edit(
                _PLACE,
                "    u32 n = fn_min_u32(",
                "    if (threadIdx.x < 32u) fn_delay();\n    u32 n = fn_min_u32(",
            ),
        ),
        cases=("edges", "published"),
    ),
)

MOE_DEEP_SUM: Final = (
    _one(
        "leaves_in_order",
        "order",
        _SUM,
        "fn_add(fn_add(acc[0][i], acc[1][i]), fn_add(acc[2][i], acc[3][i]));",
        "fn_add(fn_add(fn_add(acc[0][i], acc[1][i]), acc[2][i]), acc[3][i]);",
    ),
    _one("last_leaf", "leaf", _SUM, "fn_add(acc[6][i], acc[7][i])", "acc[6][i]"),
    _one(
        "split",
        "contraction",
        _SUM,
        "acc[j][i] = fn_fma(weight, x[i], acc[j][i]);",
        "acc[j][i] = fn_add(fn_mul(weight, x[i]), acc[j][i]);",
    ),
    _one("last_slot", "tail", _SUM, "if (first + b >= n) {", "if (first + b + 1u >= n) {"),
    _one(
        "slot_by_slot",
        "index",
        _SUM,
        "slot.at = fn_ldg(pair_at + row * n_slots + threadIdx.x);",
        "slot.at = row * n_slots + threadIdx.x;",
    ),
    Control(
        "padding_row",
        "stale",
        (
            Edit(_SUM, "if (row >= sum.n_rows) return;", "if (row > sum.n_rows) return;"),
            Edit(_SUM, "for (; row < sum.n_rows;", "for (; row <= sum.n_rows;"),
        ),
        cases=(),
    ),
    _one(
        "shared_f16",
        "rounding",
        _SUM,
        "y4[i] = fn_fma(s.weight[turn & 1u][n], shared[i], t);",
        "y4[i] = fn_fma(fn_h2f(fn_f2h(s.weight[turn & 1u][n])), shared[i], t);",
    ),
    Control(
        "barrier",
        "barrier",
        (
            Edit(_SUM, "    sum.keep(1, next);\n    __syncthreads();\n", "    sum.keep(1, next);\n"),
            Edit(
                _SUM,
                "        s.weight[turn & 1u][threadIdx.x] = slot.route.weight;\n",
                "        fn_delay();\n        s.weight[turn & 1u][threadIdx.x] = slot.route.weight;\n",
            ),
        ),
        cases=("published", "widest"),
    ),
    Control(
        "row_after_row",
        "barrier",
        (
            Edit(_SUM, "        __syncthreads();  // all have read what is known of this row\n", ""),
            Edit(
                _SUM,
                "        float y4[4];\n",
                "        if (threadIdx.x >= 32u) fn_delay();\n        float y4[4];\n",
            ),
        ),
        cases=("by_turns", "by_turns_wide"),
    ),
    _one("same_row_again", "index", _SUM, "sum.load(last ? turn + 1u : turn,", "sum.load(turn,", "by_turns"),
    _one("row_missed", "tail", _SUM, "row += gridDim.y, turn++", "row += 2u * gridDim.y, turn++", "by_turns"),
)

_GU: Final = "moe/moe_deep_gu.cu"
_DOWN: Final = "moe/moe_deep_down.cu"
_DEEP: Final = "deep.cuh"
# Of every product; the cases that show them are the kernel's.
_SHARED: Final = (
    _one(
        "last_unit_alone",
        "leaf",
        _DEEP,
        "sum[j][i] = fn_add(sum[j][i], d[j][i]);",
        "sum[j][i] = d[j][i];",
        "segments",
    ),
    _one(
        "stages_turned",
        "order",
        "exl3.cuh",
        "for (u32 bit = 1; bit < 32u; bit <<= 1)",
        "for (u32 bit = 16; bit; bit >>= 1)",
    ),
    _one("quarters_in_order", "index", _DEEP, "(j >> 3 ^ upper);", "(j >> 3);"),
    Control("last_piece", "tail", WITHOUT_LAST_TILE, cases=("whole_and_one",)),
)

MOE_DEEP_GU: Final = (
    *_SHARED,
    _one("gate_f16", "rounding", _GU, "fn_mul(fn_silu(gs[i]),", "fn_mul(fn_h2f(fn_f2h(fn_silu(gs[i]))),"),
    _one("gate_for_up", "index", _GU, "fn_mul(v[i], up_out[i])", "fn_mul(gs[i], up_out[i])"),
    _one("scales_of_gate", "index", _GU, "(up ? line->up.svh : line->gate.svh)", "(line->gate.svh)"),
    _one("up_of_gate", "index", _GU, "x, x + (u64)pairs_cap * hidden, h,", "x, x, h,"),
    _one(
        "other_gate",
        "index",
        _GU,
        "(u64)fn_min_u32(row + r, stop - 1u) * gate_pitch",
        "(u64)(fn_min_u32(row + r, stop - 1u) ^ 1u) * gate_pitch",
        "half_and_one",
    ),
    _one(
        "first_gates",
        "index",
        _GU,
        "float* gates = gate + (u64)first * gate_pitch",
        "float* gates = gate + 0u * (u64)first * gate_pitch",
        "half_and_one",
    ),
    _one("padding_positions", "tail", _GU, "stop = fn_min_u32(own + 16u, end);", "stop = own + 16u;"),
    _one("padding_gates", "tail", _DEEP, "stop = fn_min_u32(row + 16u, end);", "stop = row + 16u;"),
    _one("last_own_row", "tail", _GU, "own + 16u, end);", "own + 15u, end);", "half_and_one"),
    _one(
        "beyond_the_width",
        "tail",
        _GU,
        "return channel < line->width;",
        "return channel <= line->width;",
        "mixed",
    ),
    _one(
        "width_for_cap",
        "layout",
        _GU,
        "k_blocks = width_cap / 64u;",
        "k_blocks = line->width / 64u;",
        "mixed",
        "segments",
    ),
    _one("unscaled", "scale", _GU, "v[i] = fn_mul(product, down_in[i]);", "v[i] = product;"),
)

MOE_DEEP_DOWN: Final = (
    *_SHARED,
    _one(
        "sum_f16",
        "rounding",
        _DEEP,
        "fn_mul(q.x, svh[0])",
        "fn_mul(fn_h2f(fn_f2h(q.x)), svh[0])",
    ),
    _one("padding_positions", "tail", _DEEP, "stop = fn_min_u32(row + 16u, end);", "stop = row + 16u;"),
    _one("first_outputs", "index", _DOWN, "output / 16u, 2u, hidden / 16u", "0u, 2u, hidden / 16u", "mixed"),
    _one(
        "width_for_cap",
        "layout",
        _DOWN,
        "width_cap / 64u, live};",
        "line->width / 64u, live};",
        "narrow_and_long",
    ),
    _one("unscaled", "scale", _DEEP, "fn_mul(q.x, svh[0])", "q.x"),
    _one(
        "first_expert",
        "stale",
        _DOWN,
        "line = lines + tile.expert;",
        "line = lines;",
        "mixed",
        "half_and_one",
    ),
)
