"""Planted controls of the attn family: what the check must report as wrong.

Read by the declarations; made by kernels/planting.py, run by check/controls.py.  An edit's old text stands
exactly once in its file: a changed kernel takes its controls along.
"""

from __future__ import annotations

from typing import Final

from .spec import Control, Edit

__all__ = ["INDEX_SCORE", "INDEX_SELECT", "QSA_ATTN", "QSA_MERGE", "QSA_PREP"]

_PAGES: Final = "attn/pages.cuh"
_PREP: Final = "attn/qsa_prep.cu"
_SCORE: Final = "attn/index_score.cu"
_SELECT: Final = "attn/index_select.cu"
_ATTN: Final = "attn/qsa_attn.cu"
_MERGE: Final = "attn/qsa_merge.cu"


def _one(name: str, kind: str, file: str, old: str, new: str, *cases: str) -> Control:
    return Control(name, kind, (Edit(file, old, new),), cases)


QSA_PREP: Final = (
    _one(
        "squares_split",
        "contraction",
        _PAGES,
        "sum = fn_fma(v[i], v[i], sum);",
        "sum = fn_add(fn_mul(v[i], v[i]), sum);",
    ),
    _one(
        "rotation_split",
        "contraction",
        _PAGES,
        "float x = fn_fma(a, cs.x, -fn_mul(b, cs.y))",
        "float x = fn_add(fn_mul(a, cs.x), -fn_mul(b, cs.y))",
    ),
    _one(
        "lanes_rising",
        "order",
        _PAGES,
        "    sum = fn_warp_sum(sum);\n",
        "    for (u32 d = 1; d < 32; d <<= 1) sum = fn_add(sum, fn_shfl_xor(sum, d));\n",
        "decode_sixteen",
        "several_sequences",
        "grouped_12",
        "over_a_page",
    ),
    _one("three_keys", "leaf", _PREP, "fn_add(fn_add(k0, k1), fn_add(k2, k3))", "fn_add(fn_add(k0, k1), k2)"),
    _one("no_quarter", "scale", _PREP, "fn_add(k2, k3)), 0.25f);", "fn_add(k2, k3)), 0.5f);"),
    _one(
        "query_rounded_first",
        "rounding",
        _PREP,
        "    fn_head_norm(v, norm, eps);\n",
        "    for (int i = 0; i < N; i++) v[i] = fn_h2f(fn_f2h(v[i]));\n    fn_head_norm(v, norm, eps);\n",
    ),
    _one(
        "ties_away",
        "tie",
        _PREP,
        "y[lane + 32u * i] = fn_f2h(v[i]);",
        "y[lane + 32u * i] = fn_f2h(fn_u2f(fn_f2u(v[i]) + 1u));",
        "midpoints",
    ),
    _one(
        "rope_of_the_row",
        "index",
        _PREP,
        "FN_INDEX_HEADS ? rope : rope_block)",
        "FN_INDEX_HEADS ? rope : rope)",
    ),
    _one(
        "block_of_three",
        "tail",
        _PREP,
        "position % FN_BLOCK_TOKENS != FN_BLOCK_TOKENS - 1u",
        "position % FN_BLOCK_TOKENS != FN_BLOCK_TOKENS - 2u",
        "block_ends",
    ),
    _one(
        "old_keys",
        "stale",
        _PREP,
        "fn_raw_in(page, index_offset, position - 3u)",
        "fn_raw_in(page, index_offset, position)",
    ),
    _one(
        "key_of_another_run",
        "index",
        _PREP,
        "fn_h2f(back <= in_run ?",
        "fn_h2f(back <= in_run + 1u ?",
        "decode_sixteen",
    ),
    _one(
        "block_in_one_run",
        "tail",
        _PREP,
        "u32 in_run = r - first_row;",
        "u32 in_run = fn_min_u32(r, 3u);",
        "several_sequences",
    ),
)

INDEX_SCORE: Final = (
    _one(
        "heads_in_order",
        "order",
        _SCORE,
        "fn_mul(fn_add(sum.x, ox), 0x1.6a09e6p-4f)",
        "fn_mul(fn_add(fn_add(relu(d[0]), ox), relu(d[1])), 0x1.6a09e6p-4f)",
    ),
    _one(
        "two_heads",
        "leaf",
        _SCORE,
        "fn_mul(fn_add(sum.x, ox), 0x1.6a09e6p-4f)",
        "fn_mul(sum.x, 0x1.6a09e6p-4f)",
    ),
    _one("unscaled", "scale", _SCORE, "fn_mul(fn_add(sum.y, oy), 0x1.6a09e6p-4f)", "fn_add(sum.y, oy)"),
    _one(
        "nan_to_zero",
        "nan",
        _SCORE,
        "return x > 0.f || x != x ? x : 0.f;",
        "return x > 0.f ? x : 0.f;",
        "nonfinite",
    ),
    _one(
        "score_f16",
        "rounding",
        _SCORE,
        "out[low] = fn_mul(fn_add(sum.x, ox), 0x1.6a09e6p-4f);",
        "out[low] = fn_h2f(fn_f2h(fn_mul(fn_add(sum.x, ox), 0x1.6a09e6p-4f)));",
    ),
    _one("last_block", "tail", _SCORE, "if (high < seen) out[high]", "if (high + 1u < seen) out[high]"),
    _one("within_the_budget", "stale", _SCORE, "seen > budget && warp", "seen >= budget && warp"),
    _one(
        "seven_steps",
        "leaf",
        _SCORE,
        "            fn_mma_f16(d, a, b[s]);",
        "            if (s != 7u) fn_mma_f16(d, a, b[s]);",
    ),
)

INDEX_SELECT: Final = (
    _one(
        "nan_last", "nan", _SELECT, "if (x != x) return 0u;", "if (x != x) return 0xffffffffu;", "nan", "inf"
    ),
    _one("minus_zero_below", "tie", _SELECT, "    if ((u << 1) == 0u) u = 0u;\n", "", "signed_zeros"),
    _one(
        "ties_up",
        "tie",
        _SELECT,
        "if (is_better || (is_equal && equal_before < want))",
        "if (is_better || (is_equal && equal_before >= want))",
        "all_equal",
    ),
    _one(
        "want_off_by_one",
        "tail",
        _SELECT,
        "if (before < want && want <= before + own[i]) {",
        "if (before <= want && want < before + own[i]) {",
    ),
    _one("no_flag", "nan", _SELECT, "            if (v[k] != v[k]) s.any_nan = 1u;\n", "", "nan"),
    Control(
        "barrier",
        "barrier",
        (
            Edit(
                _SELECT,
                "        visit([&](u32 key) {\n",
                "        if (threadIdx.x >= 256u) fn_delay();\n        visit([&](u32 key) {\n",
            ),
            Edit(
                _SELECT,
                "        });\n        __syncthreads();\n        uint4 c",
                "        });\n        uint4 c",
            ),
        ),
    ),
    _one("scores_of_the_row", "index", _SELECT, "score + (size_t)blockIdx.x", "score + (size_t)r", "window"),
    _one("digits_mixed", "index", _SELECT, "pass == 1u ? 10u : 0u, last", "pass == 1u ? 11u : 0u, last"),
    _one(
        "candidates_short",
        "tail",
        _SELECT,
        "if (key < last || (key == last && equal < want)) out",
        "if (key < last || (key == last && equal + 1u < want)) out",
        "long_rows",
        "long_equal",
    ),
)

QSA_ATTN: Final = (
    Control(
        "keys_barrier",
        "barrier",
        (
            Edit(
                _ATTN,
                "fn_min_u32(tid, live - 1u);\n",
                "fn_min_u32(tid, live - 1u);\n    if (tid >= 32u) fn_delay();\n",
            ),
            Edit(_ATTN, "    __syncthreads();\n\n    // All keys", "\n    // All keys"),
        ),
        cases=(
            "part_ends",
            "two_parts",
        ),
        racecheck="a warp reads addresses that were not written: it may fault",
    ),
    Control(
        "scores_barrier",
        "barrier",
        (
            Edit(
                _ATTN,
                "    if (16u * warp < live) {\n",
                "    if (warp == 3u) fn_delay();\n    if (16u * warp < live) {\n",
            ),
            Edit(_ATTN, "    }\n    __syncthreads();\n\n    weights(", "    }\n\n    weights("),
        ),
        cases=(
            "part_ends",
            "two_parts",
        ),
    ),
    Control(
        "weights_barrier",
        "barrier",
        (
            Edit(_ATTN, "    weights(sh, live,", "    if (warp == 0u) fn_delay();\n    weights(sh, live,"),
            Edit(_ATTN, "part, max_parts);\n    __syncthreads();\n", "part, max_parts);\n"),
        ),
        cases=(
            "part_ends",
            "two_parts",
        ),
    ),
    _one(
        "sum_in_order",
        "order",
        _ATTN,
        "fn_add(fn_add(fn_add(e[0], e[4]), fn_add(e[2], e[6])),",
        "fn_add(fn_add(fn_add(fn_add(e[0], e[4]), e[2]), e[6]),",
    ),
    _one(
        "sum_of_rounded",
        "rounding",
        _ATTN,
        "        sh.e[h][j + 8u * i] = fn_f2h(e[i]);",
        "        sh.e[h][j + 8u * i] = fn_f2h(e[i]);\n        e[i] = fn_h2f(fn_f2h(e[i]));",
    ),
    _one(
        "ninth_query",
        "layout",
        "attn/queries.cuh",
        "u32 heads = group <= 8u ? 8u : 16u;",
        "u32 heads = 8u;",
        "grouped_12",
        "group_9",
    ),
    _one("unscaled", "scale", _ATTN, "fn_mul(d[n][i], 0.0625f)", "d[n][i]"),
    _one(
        "last_entry",
        "tail",
        _ATTN,
        "e[i] = j + 8u * i < live ? fn_exp",
        "e[i] = j + 8u * i + 1u < live ? fn_exp",
    ),
    _one(
        "absent_values",
        "stale",
        _ATTN,
        " >= live) v[s][j] = make_uint4(0u, 0u, 0u, 0u);",
        " >= FN_PART) v[s][j] = make_uint4(0u, 0u, 0u, 0u);",
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
        "absent_step_of_keys",
        "leaf",
        _ATTN,
        "            fn_mma_f16(d[n], a, b);",
        "            if (s != 15u) fn_mma_f16(d[n], a, b);",
    ),
    _one(
        "tail_of_blocks",
        "index",
        _PAGES,
        "return FN_BLOCK_TOKENS * seen + (i - FN_BLOCK_TOKENS * budget);",
        "return FN_BLOCK_TOKENS * (seen - 1u) + (i - FN_BLOCK_TOKENS * budget);",
        "budget_edges",
    ),
)

QSA_MERGE: Final = (
    _one(
        "split",
        "contraction",
        _MERGE,
        "o.x = fn_fma(v[j].x, f.y, fn_mul(o.x, f.x));",
        "o.x = fn_add(fn_mul(v[j].x, f.y), fn_mul(o.x, f.x));",
        "real_budget",
        "large_budget",
    ),
    _one(
        "last_part",
        "leaf",
        _MERGE,
        "                if (i + j >= n) continue;\n",
        "                if (i + j + 1u >= n && n > 1u) continue;\n",
        "real_budget",
    ),
    Control(
        "factors_barrier",
        "barrier",
        (
            Edit(
                _MERGE,
                "                if (tid < 32u) scales.store(",
                "                if (tid < 32u) fn_delay();\n                if (tid < 32u) scales.store(",
            ),
            Edit(_MERGE, "sh, m, lane);\n                __syncthreads();\n", "sh, m, lane);\n"),
        ),
        cases=(
            "real_budget",
            "one_part",
        ),
    ),
    Control(
        "outputs_barrier",
        "barrier",
        (
            Edit(
                _MERGE,
                "    sh.o[2u * tid] = broken",
                "    if (tid >= 64u) fn_delay();\n    sh.o[2u * tid] = broken",
            ),
            Edit(_MERGE, "    __syncthreads();\n    if (tid >= 64u) return;", "    if (tid >= 64u) return;"),
        ),
        cases=(
            "real_budget",
            "one_part",
        ),
    ),
    _one("nan_lost", "nan", _MERGE, "bool broken = flag[r] != 0u;", "bool broken = flag[r] > 1u;", "flagged"),
    _one(
        "length_f16",
        "rounding",
        _MERGE,
        "l = fn_fma(f.z, f.y, fn_mul(l, f.x));",
        "l = fn_h2f(fn_f2h(fn_fma(f.z, f.y, fn_mul(l, f.x))));",
        "real_budget",
        "large_budget",
    ),
    _one("no_gate", "scale", _MERGE, "fn_mul(fn_div(o.x, l), fn_sigmoid(gate.x))", "fn_div(o.x, l)"),
    _one("padding_row", "stale", _MERGE, "    if (r >= n_rows) return;\n", "    if (r > n_rows) return;\n"),
    _one(
        "ties_away",
        "tie",
        _MERGE,
        "    float out[4] = {w.x, w.y, w.z, w.w};",
        "    float out[4] = {fn_u2f(fn_f2u(w.x) + 1u), w.y, w.z, w.w};",
        "midpoints",
    ),
    Control(
        "merge_barrier",
        "barrier",
        (
            Edit(
                _MERGE, "        if (base != 0u) __syncthreads();  // the factors before have been used\n", ""
            ),
        ),
        cases=("large_budget",),
        racecheck="needs a warp a whole batch ahead of another: a delay in one does not give that",
    ),
)
