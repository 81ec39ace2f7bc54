"""Planted controls of the attention kernels for prompts: what the check must report as wrong.

Read by the declarations (attn.py), as planted_attn.py is.  An edit's old text stands exactly once in its
file: a changed kernel takes its controls along.
"""

from __future__ import annotations

from typing import Final

from .spec import Control, Edit

__all__ = ["INDEX_SCORE_DEEP", "QSA_DEEP"]

_SCORE: Final = "attn/index_score_deep.cu"
_ATTN: Final = "attn/qsa_deep.cu"
_ARRIVED: Final = "a copy has arrived long before it is needed: that it is not awaited changes nothing"


def _one(name: str, kind: str, file: str, old: str, new: str, *cases: str) -> Control:
    return Control(name, kind, (Edit(file, old, new),), cases)


INDEX_SCORE_DEEP: Final = (
    _one(
        "heads_in_order",
        "order",
        _SCORE,
        "fn_add(odd ? y : x, fn_shfl_xor(odd ? x : y, 1u))",
        "fn_add(fn_add(relu(d[m][odd ? 2 : 0]), fn_shfl_xor(odd ? x : y, 1u)), relu(d[m][odd ? 3 : 1]))",
    ),
    _one("unscaled", "scale", _SCORE, "out[at] = fn_mul(sum, 0x1.6a09e6p-4f);", "out[at] = sum;"),
    _one(
        "score_f16",
        "rounding",
        _SCORE,
        "out[at] = fn_mul(sum, 0x1.6a09e6p-4f);",
        "out[at] = fn_h2f(fn_f2h(fn_mul(sum, 0x1.6a09e6p-4f)));",
    ),
    _one(
        "nan_to_zero",
        "nan",
        _SCORE,
        "return x > 0.f || x != x ? x : 0.f;",
        "return x > 0.f ? x : 0.f;",
        "nonfinite",
    ),
    _one(
        "seven_steps",
        "leaf",
        _SCORE,
        "fn_mma_f16(d[m], a[m][s], b);",
        "if (s != 7u) fn_mma_f16(d[m], a[m][s], b);",
    ),
    _one("last_block", "tail", _SCORE, "if (at < limit) out", "if (at + 1u < limit) out"),
    _one(
        "rows_of_another_run",
        "tail",
        _SCORE,
        "row >= first && row < last ? sh.seen[row] : 0u",
        "row < last ? sh.seen[row] : 0u",
        "odd_runs",
    ),
    _one("odd_last_row", "tail", _SCORE, "2u * n < last; n++", "2u * n + 1u < last; n++", "odd_runs"),
    _one("within_the_budget", "stale", _SCORE, "seen > budget ? seen : 0u;", "seen >= budget ? seen : 0u;"),
    _one("not_the_window", "index", _SCORE, "r = first_row + base,", "r = base,", "window", "last_window"),
    Control(
        "queries_barrier",
        "barrier",
        (
            Edit(
                _SCORE,
                "    load_queries(sh, iq16",
                "    if (tid >= 32u) fn_delay();\n    load_queries(sh, iq16",
            ),
            Edit(
                _SCORE,
                "FN_INDEX_HEAD), n);\n    __syncthreads();\n",
                "FN_INDEX_HEAD), n);\n",
            ),
        ),
        cases=("two_tiles", "edges"),
    ),
)

QSA_DEEP: Final = (
    Control(
        "scores_barrier",
        "barrier",
        (
            Edit(
                _ATTN,
                "        if (16u * warp < live) scores",
                "        if (warp == 3u) fn_delay();\n        if (16u * warp < live) scores",
            ),
            Edit(
                _ATTN,
                "step, after, warp, lane);\n        __syncthreads();\n\n        weights",
                "step, after, warp, lane);\n\n        weights",
            ),
        ),
        cases=("two_parts", "five_parts"),
    ),
    Control(
        "weights_barrier",
        "barrier",
        (
            Edit(
                _ATTN,
                "        weights(sh, live,",
                "        if (warp == 0u) fn_delay();\n        weights(sh, live,",
            ),
            Edit(
                _ATTN,
                "all but the next keys\n        __syncthreads();\n",
                "all but the next keys\n        __syncwarp();\n",
            ),
        ),
        cases=("two_parts", "five_parts"),
    ),
    Control(
        "keys_not_awaited",
        "barrier",
        (
            Edit(
                _ATTN,
                "        fn_cp_async_wait<1>();  // all but the values\n",
                "        fn_cp_async_wait<2>();\n",
            ),
        ),
        cases=("one", "five_parts"),
        racecheck=_ARRIVED,
    ),
    Control(
        "values_not_awaited",
        "barrier",
        (
            Edit(
                _ATTN,
                "        fn_cp_async_wait<1>();  // all but the next keys\n",
                "        fn_cp_async_wait<2>();\n",
            ),
        ),
        cases=("one", "five_parts"),
        racecheck=_ARRIVED,
    ),
    Control(
        "keys_too_early",
        "barrier",
        (
            Edit(
                _ATTN,
                "        __syncwarp();\n        copy_keys(sh, here, step, after, warp, lane);\n",
                "        __syncwarp();\n",
            ),
            Edit(
                _ATTN,
                "        if (16u * warp < live) scores",
                "        copy_keys(sh, here, step, after, warp, lane);\n        fn_delay();\n"
                "        if (16u * warp < live) scores",
            ),
        ),
        cases=("five_parts", "two_parts"),
    ),
    _one(
        "values_too_early",
        "barrier",
        _ATTN,
        "        values<Tiles>(sh, live,",
        "        if (after != 0u) copy_values(sh, here, step, to_value, after, warp, lane);\n"
        "        fn_delay();\n"
        "        values<Tiles>(sh, live,",
        "five_parts",
        "two_parts",
    ),
    _one(
        "sum_in_order",
        "order",
        _ATTN,
        "fn_add(fn_add(fn_add(e[0], e[4]), fn_add(e[2], e[6])),",
        "fn_add(fn_add(fn_add(fn_add(e[0], e[4]), e[2]), e[6]),",
    ),
    _one(
        "join_split",
        "contraction",
        _ATTN,
        "fn_fma(d[n][i][j], f[j & 1u].y, fn_mul(o[n][i][j], f[j & 1u].x))",
        "fn_add(fn_mul(d[n][i][j], f[j & 1u].y), fn_mul(o[n][i][j], f[j & 1u].x))",
    ),
    _one(
        "sum_of_rounded",
        "rounding",
        _ATTN,
        "        sh.e[h][j + 8u * i] = fn_f2h(e[i]);",
        "        sh.e[h][j + 8u * i] = fn_f2h(e[i]);\n        e[i] = fn_h2f(fn_f2h(e[i]));",
    ),
    _one("unscaled", "scale", _ATTN, "fn_mul(d[n][i], 0.0625f)", "d[n][i]"),
    _one("old_maximum", "scale", _ATTN, "    m = top;\n", "", "five_parts", "large"),
    _one(
        "last_entry",
        "tail",
        _ATTN,
        "e[i] = j + 8u * i < live ? w : 0.f;",
        "e[i] = j + 8u * i + 1u < live ? w : 0.f;",
    ),
    _one(
        "values_of_the_part_before",
        "stale",
        _ATTN,
        "        if (entry < live)\n",
        "        if (entry < ((live + 15u) & ~15u))\n",
        "nonfinite_later",
        "nonfinite_last",
    ),
    _one(
        "last_step",
        "leaf",
        _ATTN,
        "        if (16u * s >= live) continue;",
        "        if (16u * s >= live || s == 3u) continue;",
        "part_ends",
        "two_parts",
    ),
    _one(
        "fifteen_steps",
        "leaf",
        _ATTN,
        "            fn_mma_f16(d[n], a, b);",
        "            if (s != 15u) fn_mma_f16(d[n], a, b);",
    ),
    _one(
        "tail_block",
        "index",
        _ATTN,
        "fn_ldg(sel + at) : seen;",
        "fn_ldg(sel + at) : seen - 1u;",
        "budget_edges",
    ),
    _one("nan_lost", "nan", _ATTN, "bool broken = flag[r] != 0u;", "bool broken = flag[r] > 1u;", "flagged"),
    _one(
        "no_gate",
        "scale",
        _ATTN,
        "fn_mul(fn_div(v[i], sh.l[head]), fn_sigmoid(z[i]))",
        "fn_div(v[i], sh.l[head])",
    ),
    _one("padding_row", "stale", _ATTN, "    if (r >= n_rows) return;\n", "    if (r > n_rows) return;\n"),
    _one(
        "ties_away",
        "tie",
        _ATTN,
        "        fn_linear_store_input(v, linear,",
        "        if (lane == 0u) v[0] = fn_u2f(fn_f2u(v[0]) + 1u);\n        fn_linear_store_input(v, linear,",
        "midpoints",
    ),
)
