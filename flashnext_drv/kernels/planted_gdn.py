"""Planted controls of the gdn family: what the check must report as wrong.

Read by the declarations; made by kernels/planting.py, run by check/controls.py.  An edit's old text stands
exactly once in its file: a changed kernel takes its controls along.
"""

from __future__ import annotations

from typing import Final

from .spec import Control, Edit

__all__ = ["GDN_CONV", "GDN_DEEP_INPUT", "GDN_GATE_INPUT", "GDN_SCAN", "GDN_STEP"]

_CONV: Final = "gdn/gdn_conv.cu"
_FINISH: Final = "exl3/finish.cuh"
_STEP: Final = "gdn/gdn_step.cu"
_GATE: Final = "gdn/gdn_gate_input.cu"
_UNIT: Final = "gdn/unit.cuh"
_DEEP: Final = "gdn/gdn_deep_input.cu"
_SCAN: Final = "gdn/gdn_scan.cu"


def _one(name: str, kind: str, file: str, old: str, new: str, *cases: str) -> Control:
    return Control(name, kind, (Edit(file, old, new),), cases)


GDN_CONV: Final = (
    _one(
        "split",
        "contraction",
        _CONV,
        "v = fn_fma(tap[i].w, f[3][i], v);",
        "v = fn_add(fn_mul(tap[i].w, f[3][i]), v);",
        "window",
        "sixteen",
    ),
    _one("oldest_tap", "leaf", _CONV, "float v = fn_mul(tap[i].x, f[0][i]);", "float v = 0.f;"),
    _one("rounded_twice", "rounding", _CONV, "    uint2 newest =",
         "    for (int i = 0; i < 4; i++) x[i] = fn_b2f(fn_f2b(x[i]));\n    uint2 newest ="),
    _one("ties_away", "tie", _CONV, "    uint2 newest =",
         "    for (int i = 0; i < 4; i++) x[i] = fn_u2f(fn_f2u(x[i]) + 1u);\n    uint2 newest =",
         "midpoints"),
    _one("old_tail", "stale", _CONV, "    before[2] = newest;", "    before[2] = before[1];"),
    _one("last_row", "tail", _CONV, "end = conv ? row + run.n_rows : row + 1u;",
         "end = conv ? row + run.n_rows - 1u : row + 1u;"),
    _one("row_again", "stale", _CONV, "finish.ask(linear, row + 1u, cap);", "finish.ask(linear, row, cap);",
         "window", "real_width"),
    _one("rows_as_runs", "index", _CONV, "place >= (conv ? now.n_runs : now.n_rows)", "place >= now.n_runs",
         "mixed_runs"),
    _one("padding_row", "stale", _CONV, "place >= (conv ? now.n_runs : now.n_rows)",
         "place >= now.n_runs + (conv ? 0u : now.n_rows)", "real_width"),
    _one("first_linear", "index", _CONV, "linears[blockIdx.y];", "linears[0];", "mixed_runs"),
    _one("first_block", "layout", _CONV, "u32 c = 128u * block +", "u32 c = 128u * (block & 3u) +",
         "mixed_runs"),
    _one("last_channel", "tail", _CONV, "if (i < n) at[i] =", "if (i + 1u < n) at[i] =", "odd_width"),
    _one("not_rotated", "leaf", _CONV, "        finish.rotate(linear, v);\n",
         "        if (!conv) finish.rotate(linear, v);\n", "real_width"),
    _one("segments_falling", "order", _FINISH, "first[i] = fn_ld_here(at + i * step);",
         "first[i] = fn_ld_here(at + (segments - 1u - i) * step);", "units"),
    _one("later_segments", "leaf", _FINISH, "from < segments; from += MANY", "from < MANY; from += MANY",
         "many_units"),
    _one("unscaled", "scale", _FINISH, "v[i] = fn_mul(v[i], scale[i]);",
         "v[i] = fn_mul(fn_mul(v[i], 11.3137085f), scale[i]);", "real_width"),
)

GDN_STEP: Final = (
    _one(
        "lanes_crosswise",
        "order",
        _UNIT,
        "    return fn_warp_sum4(acc);",
        "    acc = fn_add(acc, fn_shfl_xor(acc, 2u));\n    return fn_add(acc, fn_shfl_xor(acc, 1u));",
    ),
    _one(
        "update_split",
        "contraction",
        _STEP,
        "make_float4(fn_fma(k[m].x, delta, M[m].x),",
        "make_float4(fn_add(fn_mul(k[m].x, delta), M[m].x),",
    ),
    _one(
        "seven_eighths",
        "leaf",
        _UNIT,
        "    for (int m = 0; m < 8; m++) {\n        acc = fn_fma(x[m].x",
        "    for (int m = 0; m < 7; m++) {\n        acc = fn_fma(x[m].x",
    ),
    _one(
        "query_unscaled",
        "scale",
        _STEP,
        "q[m] = times(times(q[m], rq), KEY_SCALE);",
        "q[m] = times(q[m], rq);",
    ),
    _one(
        "decay_f16",
        "rounding",
        _STEP,
        "M[m] = times(M[m], decay);",
        "M[m] = times(M[m], fn_h2f(fn_f2h(decay)));",
    ),
    _one(
        "old_state",
        "stale",
        _STEP,
        "for (int m = 0; m < 8; m++) *(reinterpret_cast<float4*>(state)",
        "for (int m = 0; m < 7; m++) *(reinterpret_cast<float4*>(state)",
        "window",
        "mixed_runs",
    ),
    _one(
        "other_key_head",
        "index",
        _STEP,
        "key_head = head / (n_v / n_k)",
        "key_head = head % n_k",
        "mixed_runs",
    ),
)

GDN_GATE_INPUT: Final = (
    _one(
        "unscaled",
        "scale",
        _GATE,
        "        fn_hadamard128(v);\n",
        "        fn_hadamard128(v);\n        for (int i = 0; i < 4; i++) v[i] = fn_mul(v[i], 11.3137085f);\n",
    ),
    _one(
        "gate_f16",
        "rounding",
        _GATE,
        "fn_gate(a[i], gate != 0));",
        "fn_h2f(fn_f2h(fn_gate(a[i], gate != 0))));",
    ),
    _one("other_gate", "index", _GATE, "fn_gate(a[i], gate != 0)", "fn_gate(a[i], gate == 0)"),
    _one(
        "other_place",
        "layout",
        _GATE,
        "u32 k = 128u * head + 4u * lane;",
        "u32 k = 128u * head + 4u * (lane ^ 1u);",
    ),
    _one(
        "padding_row",
        "stale",
        _GATE,
        "if (row >= n_rows || !live) return;",
        "if (row > n_rows || !live) return;",
    ),
    _one(
        "three_of_four",
        "leaf",
        _GATE,
        "for (int i = 0; i < 4; i++) sum = fn_fma",
        "for (int i = 0; i < 3; i++) sum = fn_fma",
    ),
    _one(
        "other_image",
        "layout",
        _GATE,
        "fn_store_tile4(to, 2u * n_v, row",
        "fn_store_tile4(to, 2u, row",
        "tiled_two_images",
    ),
    _one("last_head", "tail", _GATE, "live = head < n_v;", "live = head + 1u < n_v;"),
    _one("row_before", "stale", _GATE, "if (next < n_rows) {", "if (next + 1u < n_rows) {", "by_turns"),
    _one("last_row", "tail", _GATE, "if (next >= n_rows) return;", "if (next + 1u >= n_rows) return;",
         "by_turns"),
)

GDN_DEEP_INPUT: Final = (
    _one(
        "lanes_crosswise",
        "order",
        _UNIT,
        "    return fn_warp_sum4(acc);",
        "    acc = fn_add(acc, fn_shfl_xor(acc, 2u));\n    return fn_add(acc, fn_shfl_xor(acc, 1u));",
    ),
    _one(
        "split",
        "contraction",
        _DEEP,
        "v = fn_fma(tap.w, f3, v);",
        "v = fn_add(fn_mul(tap.w, f3), v);",
    ),
    _one("rounded_twice", "rounding", _DEEP, "float f3 = fn_h2f(fn_f2h(in[i]));",
         "float f3 = fn_h2f(fn_f2h(fn_b2f(fn_f2b(in[i]))));"),
    _one("ties_away", "tie", _DEEP, "float f3 = fn_h2f(fn_f2h(in[i]));",
         "float f3 = fn_h2f(fn_f2h(fn_u2f(fn_f2u(in[i]) + 1u)));", "midpoints"),
    _one("first_run", "stale", _DEEP, "fn_ld(&slots[run.slot].recurrent)",
         "fn_ld(&slots[runs[0].slot].recurrent)", "mixed_runs"),
    _one("row_after", "index", _DEEP, "(u64)(row + i - 3u)", "(u64)(row + i - 2u)", "blocks", "long"),
    _one("last_row", "tail", _DEEP, "if (first + mine >= end) return;",
         "if (first + mine + 1u >= end) return;"),
    _one("query_unscaled", "scale", _DEEP, "head < n_k ? fn_unit::times", "head > n_k ? fn_unit::times"),
    _one("too_early", "barrier", _DEEP, "    __syncthreads();\n", ""),
    _one("gates_swapped", "layout", _DEEP,
         "make_float2(fn_exp_down(-fn_mul(rate, soft)), fn_sigmoid(fn_ldg(b + at)))",
         "make_float2(fn_sigmoid(fn_ldg(b + at)), fn_exp_down(-fn_mul(rate, soft)))"),
)

GDN_SCAN: Final = (
    _one(
        "lanes_crosswise",
        "order",
        _SCAN,
        "    v = fn_add(v, fn_shfl_xor(v, 1u));\n    return fn_add(v, fn_shfl_xor(v, 2u));",
        "    v = fn_add(v, fn_shfl_xor(v, 2u));\n    return fn_add(v, fn_shfl_xor(v, 1u));",
    ),
    _one("update_split", "contraction", _SCAN, "make_float4(fn_fma(k.x, delta, M.x),",
         "make_float4(fn_add(fn_mul(k.x, delta), M.x),"),
    _one("three_of_four", "leaf", _SCAN, "    acc = fn_fma(x.z, y.z, acc);\n", ""),
    _one("decay_f16", "rounding", _SCAN, "lane.decay = gate.x;", "lane.decay = fn_h2f(fn_f2h(gate.x));"),
    _one("query_of_the_next", "index", _SCAN, "lane.q[m] = part(now + 128u, m);",
         "lane.q[m] = part(after + 128u, m);", "mixed_runs"),
    _one("other_column", "layout", _SCAN, "float mine = odd ? out[1] : out[0];",
         "float mine = odd ? out[0] : out[1];", "mixed_runs"),
    _one("even_runs_short", "tail", _SCAN, "        if (t + 1u < n) {\n", "        if (t + 2u < n) {\n",
         "mixed_runs"),
    _one("old_tail", "stale", _SCAN, "f[i] = n + i >= 3u ?", "f[i] = n + i >= 4u ?", "two_rows"),
    _one("no_wait", "barrier", _SCAN, "            fn_cp_async_wait<1>();\n", "", "ring"),
    _one("one_group_less", "barrier", _SCAN, "fn_cp_async_wait<1>();", "fn_cp_async_wait<2>();", "ring"),
    _one("target_in_use", "barrier", _SCAN, "n, q, q + n_k * 128u, v, gate, channels, n_v, unit, units);\n"
         "        }\n", "n, q, q + n_k * 128u, v, gate, channels, n_v, unit, units);\n"
         "            fill(shared, i + 4u, n, q, q + n_k * 128u, v, gate, channels, n_v, unit, units);\n"
         "        }\n", "ring"),
)
