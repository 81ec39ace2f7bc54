"""Planted controls of the moe family: what the check must report as wrong.

Read by the declarations; made by kernels/planting.py, run by check/controls.py.  An edit's old text stands
exactly once in its file: a changed kernel takes its controls along.
"""

from __future__ import annotations

from typing import Final

from .spec import Control, Edit

__all__ = ["MOE_ACT", "MOE_INPUT", "MOE_SUM", "ROUTER_PICK"]

_PICK: Final = "moe/router_pick.cu"
_INPUT: Final = "moe/moe_input.cu"
_ACT: Final = "moe/moe_act.cu"
_SUM: Final = "moe/moe_sum.cu"


def _one(name: str, kind: str, file: str, old: str, new: str, *cases: str) -> Control:
    return Control(name, kind, (Edit(file, old, new),), cases)


ROUTER_PICK: Final = (
    Control(
        "ties_up",
        "tie",
        (
            Edit(_PICK, "(u64)key << 32 | (u32)~id;", "(u64)key << 32 | id;"),
            Edit(_PICK, "s.chosen[rank] = ~(u32)mine,", "s.chosen[rank] = (u32)mine,"),
        ),
        cases=("equal_small", "equal"),
    ),
    _one(
        "minus_zero_below",
        "tie",
        _PICK,
        "u32 u = fn_f2u(fn_add(l, 0.f));",
        "u32 u = fn_f2u(l);",
        "equal",
        "equal_small",
    ),
    _one("nan_last", "nan", _PICK, "return l != l ? 0xffffffffu :", "return l != l ? 1u :", "nonfinite"),
    _one("floor_too_high", "index", _PICK, "before == n_active - 1u)", "before == n_active / 2u)"),
    _one(
        "falling_units",
        "order",
        _PICK,
        "all = fn_add(all, p[i]);",
        "all = fn_add(all, p[BATCH - 1u - i]);",
        "one_row_real",
        "widest",
    ),
    _one("last_unit", "tail", _PICK, "part ? segments : 1u;", "part ? segments - 1u : 1u;"),
    _one(
        "first_batch_lost",
        "leaf",
        _PICK,
        "all = fn_add(all, p[i]);",
        "all = fn_add(i ? all : -0.f, p[i]);",
        "odd_count",
    ),
    _one("sum_short", "leaf", _PICK, "for (u32 i = 0; i < 16u; i++) sum", "for (u32 i = 0; i < 3u; i++) sum"),
    _one("falling_sum", "order", _PICK, "fn_add(sum, v[i])", "fn_add(sum, v[15u - i])"),
    _one("slots_by_rank", "index", _PICK, "s.chosen[lane] < id", "lane < rank"),
    _one(
        "weight_f16",
        "rounding",
        _PICK,
        "fn_div(s.e[thread], sum)",
        "fn_h2f(fn_f2h(fn_div(s.e[thread], sum)))",
    ),
    _one("padding_row", "stale", _PICK, "if (row >= n_rows) return;", "if (row > n_rows) return;"),
    Control(
        "barrier",
        "barrier",
        (
            Edit(_PICK, "    __syncthreads();\n\n    u32 n = s.n;", "    u32 n = s.n;"),
            Edit(
                _PICK,
                "    u32 floor_key = s.floor_key[lane];\n",
                "    u32 floor_key = s.floor_key[lane];\n    if (warp == 0) fn_delay();\n",
            ),
        ),
    ),
    Control(
        "last_barrier",
        "barrier",
        (
            Edit(_PICK, "    __syncthreads();\n\n    FnRoute* to", "    FnRoute* to"),
            Edit(
                _PICK,
                "        u32 id = s.chosen[rank], slot",
                "        if (warp) fn_delay();\n        u32 id = s.chosen[rank], slot",
            ),
        ),
        cases=("one_row_real",),
    ),
)

MOE_INPUT: Final = (
    _one(
        "unscaled",
        "scale",
        _INPUT,
        "    u64 to = (u64)((row",
        "    for (int i = 0; i < 4; i++) v[i] = fn_mul(v[i], 11.3137085f);\n    u64 to = (u64)((row",
    ),
    _one(
        "other_projection",
        "index",
        _INPUT,
        "which ? line.up.suh : line.gate.suh",
        "which ? line.gate.suh : line.up.suh",
    ),
    _one(
        "other_place",
        "layout",
        _INPUT,
        "128u * block + 4u * lane, v);",
        "128u * block + 4u * (lane ^ 1u), v);",
    ),
    _one(
        "first_slot",
        "stale",
        _INPUT,
        "fn_ld(&routes[row * n_slots + slot].expert)",
        "fn_ld(&routes[row * n_slots].expert)",
    ),
    _one("row_f16", "rounding", _INPUT, "float v[4] = {in.x,", "float v[4] = {fn_h2f(fn_f2h(in.x)),"),
    _one(
        "last_block",
        "tail",
        _INPUT,
        "128u * block >= hidden) return;",
        "128u * block + 128u >= hidden) return;",
    ),
)

MOE_ACT: Final = (
    Control(
        "falling_units",
        "order",
        (
            Edit(
                _ACT,
                "const float* at = part + (first + i) * stride;",
                "const float* at = part + (units - 1u - first - i) * stride;",
            ),
        ),
        cases=("segments16", "real_sizes"),
    ),
    _one(
        "last_unit_alone",
        "leaf",
        _ACT,
        "up[j] = start ? b[j] : fn_add(up[j], b[j]);",
        "up[j] = b[j];",
        "segments16",
        "real_sizes",
    ),
    _one(
        "unscaled",
        "scale",
        _ACT,
        "    fn_hadamard128(h);\n",
        "    fn_hadamard128(h);\n    for (int i = 0; i < 4; i++) h[i] = fn_mul(h[i], 11.3137085f);\n",
    ),
    _one(
        "gate_f16",
        "rounding",
        _ACT,
        "fn_mul(fn_silu(fn_mul(gate[i], gate_out[i])),",
        "fn_mul(fn_h2f(fn_f2h(fn_silu(fn_mul(gate[i], gate_out[i])))),",
    ),
    _one(
        "beyond_the_width",
        "tail",
        _ACT,
        "if (128u * block >= width) return;",
        "if (128u * block > width) return;",
        "mixed_widths",
    ),
    _one(
        "first_expert",
        "stale",
        _ACT,
        "lines[fn_ld_here(&routes[slot].expert)]",
        "lines[fn_ld_here(&routes[row * n_slots].expert)]",
    ),
    _one("gate_for_up", "index", _ACT, "fn_mul(up[i], up_out[i])", "fn_mul(gate[i], up_out[i])"),
)

MOE_SUM: Final = (
    _one(
        "leaves_in_order",
        "order",
        _SUM,
        "float low = fn_add(fn_add(acc[0], acc[1]), fn_add(acc[2], acc[3]));",
        "float low = fn_add(fn_add(fn_add(acc[0], acc[1]), acc[2]), acc[3]);",
    ),
    _one("last_leaf", "leaf", _SUM, "fn_add(acc[6], acc[7])", "acc[6]"),
    _one(
        "split",
        "contraction",
        _SUM,
        "acc[j] = fn_fma(weight, v, acc[j]);",
        "acc[j] = fn_add(fn_mul(weight, v), acc[j]);",
    ),
    Control(
        "barrier",
        "barrier",
        (
            Edit(_SUM, "    __syncthreads();\n    u32 i = threadIdx.x;", "    u32 i = threadIdx.x;"),
            Edit(
                _SUM,
                "#pragma unroll 1\n    for (u32 slot = first;",
                "    if (warp == 1u) fn_delay();\n#pragma unroll 1\n    for (u32 slot = first;",
            ),
        ),
        cases=("real_sizes", "one_row"),
    ),
    _one(
        "leaf_by_rest",
        "index",
        _SUM,
        "s.leaf[slot] = 8u * route.expert / n_experts;",
        "s.leaf[slot] = route.expert % 8u;",
    ),
    _one("last_slot", "tail", _SUM, "slot + 1u < n_slots; slot++", "slot + 2u < n_slots; slot++"),
    _one(
        "unscaled",
        "scale",
        _SUM,
        "fn_hadamard128(v);  // as fn_exl3_rotate_out\n",
        "fn_hadamard128(v);\n        for (int i = 0; i < 4; i++) v[i] = fn_mul(v[i], 11.3137085f);\n",
    ),
    _one(
        "shared_f16",
        "rounding",
        _SUM,
        "= fn_fma(s.weight[n_slots - 1u], s.v[n_slots - 1u][i], sum);",
        "= fn_fma(fn_h2f(fn_f2h(s.weight[n_slots - 1u])), s.v[n_slots - 1u][i], sum);",
    ),
)
