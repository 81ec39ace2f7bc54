"""Planted controls of the token and move families: what the check must report as wrong.

Read by the declarations; made by kernels/planting.py, run by check/controls.py.  An edit's old text stands
exactly once in its file: a changed kernel takes its controls along.
"""

from __future__ import annotations

from typing import Final

from .spec import Control, Edit

__all__ = ["DRAW_ROWS", "EMBED_ROWS", "NGRAM_ROWS", "PLE_CONV", "PLE_GATE", "PLE_MIX", "PLE_TAIL",
           "ROPE_ROWS", "SYNTH_FILL"]

_EMBED: Final = "token/embed_rows.cu"
_ROPE: Final = "token/rope_rows.cu"
_NGRAM: Final = "token/ngram_rows.cu"
_PLE: Final = "token/ple_mix.cu"
_PLE_ORDER: Final = "token/ple.cuh"
_PLE_GATE: Final = "token/ple_gate.cu"
_PLE_CONV: Final = "token/ple_conv.cu"
_PLE_TAIL: Final = "token/ple_tail.cu"
_DRAW: Final = "token/draw_rows.cu"
_FILL: Final = "move/synth_fill.cu"


def _one(name: str, kind: str, file: str, old: str, new: str, *cases: str) -> Control:
    return Control(name, kind, (Edit(file, old, new),), cases)


EMBED_ROWS: Final = (
    _one("first_row", "stale", _EMBED, "(u64)rows[r].token * hidden;", "(u64)rows[0].token * hidden;"),
    _one("three_streams", "tail", _EMBED, "for (u32 j = 0; j < 4; ++j)", "for (u32 j = 0; j < 3; ++j)"),
    _one(
        "other_format", "index", _EMBED, "if (format == FN_FORMAT_BF16) {", "if (format != FN_FORMAT_BF16) {"
    ),
    _one("last_channels", "tail", _EMBED, "|| i >= hidden) return;", "|| i + 4u >= hidden) return;"),
    _one(
        "swapped",
        "layout",
        _EMBED,
        "v.x = fn_b2f((u16)w.x), v.y = fn_b2f((u16)(w.x >> 16));",
        "v.y = fn_b2f((u16)w.x), v.x = fn_b2f((u16)(w.x >> 16));",
    ),
)

ROPE_ROWS: Final = (
    _one(
        "angle_unrounded",
        "rounding",
        _ROPE,
        "fn_sincos_f64((double)angle, s, c);",
        "fn_sincos_f64(fn_dmul((double)(j < half ? t : t & ~3u), (double)omega), s, c);",
    ),
    _one("swapped", "layout", _ROPE, "v.x = (float)c, v.y = (float)s;", "v.x = (float)s, v.y = (float)c;"),
    _one(
        "blocks_of_two", "index", _ROPE, "j < half ? t : t & ~3u), omega)", "j < half ? t : t & ~1u), omega)"
    ),
    _one("first_row", "stale", _ROPE, "fn_ld_here(&rows[r].position)", "fn_ld_here(&rows[0].position)"),
    _one("last_frequency", "tail", _ROPE, "j < 2u * half; j +=", "j + 1u < 2u * half; j +="),
    _one(
        "frequency_f16",
        "rounding",
        _ROPE,
        "float omega = (float)fn_exp_f64(-fn_dmul(power, ln_theta));",
        "float omega = fn_b2f(fn_f2b((float)fn_exp_f64(-fn_dmul(power, ln_theta))));",
    ),
)

NGRAM_ROWS: Final = (
    Control(
        "barrier",
        "barrier",
        (
            Edit(
                _NGRAM,
                "        for (u32 w = threadIdx.x; w < n_words;",
                "        if (threadIdx.x >= 32u) fn_delay();\n        for (u32 w = threadIdx.x; w < n_words;",
            ),
            Edit(_NGRAM, "    __syncthreads();\n", ""),
        ),
        cases=("bits8_dim160", "bits5_dim320"),
    ),
    _one("last_word", "tail", _NGRAM, "w + 1u < n_words ? fn_ld_here", "w + 2u < n_words ? fn_ld_here"),
    _one(
        "value_f16",
        "rounding",
        _NGRAM,
        "float v = bits ? fn_mul(mul1_value(state(s, i, bits, row_dim)), scale)",
        "float v = bits ? fn_h2f(fn_f2h(fn_mul(mul1_value(state(s, i, bits, row_dim)), scale)))",
    ),
    _one(
        "contracted",
        "contraction",
        _NGRAM,
        "if (head_bias) v = fn_add(v, fn_h2f(fn_ldg(head_bias + (u64)head * row_dim + i)));",
        "if (head_bias && bits) v = fn_fma(mul1_value(state(s, i, bits, row_dim)), scale, "
        "fn_h2f(fn_ldg(head_bias + (u64)head * row_dim + i)));",
    ),
    _one(
        "heads_of_three", "index", _NGRAM, "if (head >= n_heads >> 1) x ^=", "if (head > n_heads >> 1) x ^="
    ),
    _one(
        "no_cut",
        "stale",
        _NGRAM,
        "(u64)(row.prev1 == eos ? eos : row.prev2)",
        "(u64)(row.prev2)",
        "eos_places",
    ),
    _one("ring_open", "tail", _NGRAM, "i = i ? i - 1u : row_dim - 1u;", "i = i ? i - 1u : 0u;"),
    _one(
        "ties_away",
        "tie",
        _NGRAM,
        "emb[at] = fn_f2h(v);",
        "emb[at] = fn_f2h(fn_u2f(fn_f2u(v) + 1u));",
        "midpoints",
    ),
    _one(
        "other_image",
        "layout",
        _NGRAM,
        "fn_tile_at(k_blocks, r, k)",
        "fn_tile_at(k_blocks, r & ~1u, k)",
        "tiled_bits4",
    ),
    _one(
        "gathered_by_head",
        "index",
        _NGRAM,
        "i_row = (u64)r * n_heads + head",
        "i_row = (u64)head * gridDim.y + r",
        "gathered_bits5",
    ),
)

PLE_MIX: Final = (
    _one(
        "warps_in_order",
        "order",
        _PLE_ORDER,
        "return fn_add(fn_add(fn_add(p[0], p[1]), fn_add(p[2], p[3])),",
        "return fn_add(fn_add(fn_add(fn_add(p[0], p[1]), p[2]), p[3]),",
    ),
    Control(
        "half_the_warps",
        "leaf",
        (Edit(_PLE_ORDER, "fn_add(fn_add(p[4], p[5]), fn_add(p[6], p[7])));", "0.f);"),),
        cases=("real_width",),
    ),
    Control(
        "barrier",
        "barrier",
        (
            Edit(
                _PLE,
                "        float(&part)[4][8]",
                "        if (warp >= 1u) fn_delay();\n        float(&part)[4][8]",
            ),
            Edit(_PLE, "        __syncthreads();\n", ""),
        ),
        cases=("real_width", "three_runs"),
    ),
    _one(
        "split",
        "contraction",
        _PLE_ORDER,
        "sum[0] = fn_fma(k, k, sum[0]);",
        "sum[0] = fn_add(fn_mul(k, k), sum[0]);",
    ),
    _one(
        "conv_f32",
        "rounding",
        _PLE_ORDER,
        "c = fn_fma(w.y, fn_h2f((u16)t6), c);",
        "c = fn_fma(w.y, fn_b2f(fn_f2b(fn_h2f((u16)t6))), c);",
    ),
    Control(
        "one_set",
        "barrier",
        (Edit(_PLE, "shared.part[i_row & 1u];", "shared.part[0];"),),
        cases=("long_run", "three_runs"),
        racecheck="needs a warp a whole row ahead of another, which a delay in one warp does not give",
    ),
    _one("tail_short", "tail", _PLE, "for (u32 t = 0; t < 8; ++t)", "for (u32 t = 0; t < 7; ++t)"),
    _one(
        "other_tap",
        "index",
        _PLE,
        "fn_ple_conv(w0, past[0], past[3], past[6], n0);",
        "fn_ple_conv(w0, past[0], past[2], past[6], n0);",
    ),
    _one("unscaled", "scale", _PLE_ORDER, "rk), rq), fn_sqrt(width));", "rk), rq), 1.f);"),
    _one(
        "nan_to_zero",
        "nan",
        _PLE_ORDER,
        "score < 0.f ? -root : score);",
        "score < 0.f ? -root : 0.f);",
        "nonfinite",
    ),
    _one("old_row", "stale", _PLE, "u64 r = run.first_row + i_row;", "u64 r = run.first_row;", "three_runs"),
)

PLE_GATE: Final = (
    _one(
        "warps_in_order",
        "order",
        _PLE_ORDER,
        "return fn_add(fn_add(fn_add(p[0], p[1]), fn_add(p[2], p[3])),",
        "return fn_add(fn_add(fn_add(fn_add(p[0], p[1]), p[2]), p[3]),",
    ),
    _one(
        "first_channels_lost",
        "leaf",
        _PLE_GATE,
        "        if (i < hidden) add_pair(sum,",
        "        if (i < hidden && c) add_pair(sum,",
    ),
    Control(
        "barrier",
        "barrier",
        (
            Edit(
                _PLE_GATE,
                "    float sum[4] =",
                "    if (threadIdx.x >= 32u) fn_delay();\n    float sum[4] =",
            ),
            Edit(_PLE_GATE, "    __syncthreads();\n", ""),
        ),
        cases=("real_width", "three_runs"),
    ),
    _one(
        "gate_f16",
        "rounding",
        _PLE_GATE,
        "[(u64)row * 4u + stream] = gate;",
        "[(u64)row * 4u + stream] = fn_h2f(fn_f2h(gate));",
    ),
    _one(
        "beyond_registers",
        "tail",
        _PLE_GATE,
        "i += 512u)\n        store_pair(",
        "i += 1024u)\n        store_pair(",
        "beyond_registers",
    ),
    _one("padding_row", "stale", _PLE_GATE, "if (row >= fn_ld(", "if (row > fn_ld("),
    _one("nan_to_zero", "nan", _PLE_ORDER, "score < 0.f ? -root : score);", "score < 0.f ? -root : 0.f);"),
)

PLE_CONV: Final = (
    _one(
        "taps_turned",
        "order",
        _PLE_ORDER,
        "    c = fn_fma(w.y, fn_h2f((u16)t6), c);\n    c = fn_fma(w.z, fn_h2f((u16)t3), c);\n",
        "    c = fn_fma(w.z, fn_h2f((u16)t3), c);\n    c = fn_fma(w.y, fn_h2f((u16)t6), c);\n",
    ),
    _one(
        "other_sum",
        "order",
        _PLE_CONV,
        "fn_add(s[b].x, fn_add(y0, c0))",
        "fn_add(fn_add(s[b].x, y0), c0)",
    ),
    _one(
        "tail_of_neighbour",
        "stale",
        _PLE_CONV,
        "tail + (u64)(place + 3u * j) * width;",
        "conv_in + (row >= back ? row - back : 0u) * width;",
        "three_runs",
    ),
    _one("place_short", "tail", _PLE_CONV, "place >= back ?", "place > back ?"),
    _one(
        "reach_short",
        "tail",
        _PLE_CONV,
        "row - run.first_row, REACH)",
        "row - run.first_row, 8u)",
        "long_run",
    ),
    _one("other_stream", "index", _PLE_CONV, "shared.g[i][stream]", "shared.g[i][0]"),
    Control(
        "barrier",
        "barrier",
        (
            Edit(
                _PLE_CONV,
                "    if (threadIdx.x < live) {",
                "    if (threadIdx.x < 32u) fn_delay();\n    if (threadIdx.x < live) {",
            ),
            Edit(_PLE_CONV, "    __syncthreads();\n", ""),
        ),
        cases=("real_width", "three_runs"),
    ),
    _one(
        "nan_lost",
        "nan",
        _PLE_CONV,
        "gate, v[b].x)",
        "gate, v[b].x == v[b].x ? v[b].x : 0.f)",
        "nonfinite",
    ),
)

PLE_TAIL: Final = (
    _one("row_early", "tail", _PLE_TAIL, "u32 at = t + run.n_rows;", "u32 at = t + run.n_rows - 1u;"),
    _one("edge", "tail", _PLE_TAIL, "kept[t] = at < REACH ?", "kept[t] = at <= REACH ?"),
    _one(
        "first_run",
        "stale",
        _PLE_TAIL,
        "FnRun run = runs[blockIdx.y];",
        "FnRun run = runs[0];",
        "three_runs",
    ),
    _one(
        "eight",
        "leaf",
        _PLE_TAIL,
        "for (u32 t = 0; t < REACH; t++) *",
        "for (u32 t = 0; t + 1u < REACH; t++) *",
    ),
    _one("last_channels", "tail", _PLE_TAIL, "|| c >= width)", "|| c + 2u >= width)"),
)

DRAW_ROWS: Final = (
    Control(
        "ties_up",
        "tie",
        (
            Edit(_DRAW, "<< kIdBits | (kIdMask - id);", "<< kIdBits | id;"),
            Edit(_DRAW, "return kIdMask - ((u32)key & kIdMask);", "return (u32)key & kIdMask;"),
        ),
        cases=("greedy_ties",),
    ),
    Control(
        "minus_zero_below",
        "tie",
        (
            Edit(_DRAW, "float_order(fn_add(z, 0.f))", "float_order(z)"),
            Edit(
                _DRAW,
                "if (z > best || best_id == vocab) best = z",
                "if (float_order(z) > float_order(best) || best_id == vocab) best = z",
            ),
        ),
        cases=("greedy_ties",),
    ),
    _one("nan_lost", "nan", _DRAW, "if (nan) return (u64)0xffffffffu << kIdBits;", "", "nan"),
    _one(
        "noise_bits",
        "scale",
        _DRAW,
        "(u32)(splitmix64(row_key ^ id) >> 41)",
        "(u32)(splitmix64(row_key ^ id) & 0x7fffffu)",
        "sampled_512",
    ),
    _one(
        "prefix_short",
        "tail",
        _DRAW,
        "if (upto >= need && upto - own < need) {",
        "if (upto > need && upto - own <= need) {",
        "sampled_512",
        "flat_4096",
    ),
    _one(
        "first_position",
        "stale",
        _DRAW,
        "position = fn_ld_here(&rows[r].position)",
        "position = fn_ld_here(&rows[0].position)",
        "sampled_512",
        "sampled_1024",
    ),
    _one(
        "no_request",
        "index",
        _DRAW,
        "fn_ld_here(&rows[r].emit) & 2u",
        "fn_ld_here(&rows[r].emit) & 1u",
        "greedy_ties",
    ),
    Control(
        "barrier",
        "barrier",
        (
            Edit(
                _DRAW,
                "    if ((threadIdx.x & 31u) == 0) fn_atomic_max_u64(&s.best, mine);\n    __syncthreads();\n",
                "    if (threadIdx.x >= 64u) fn_delay();\n"
                "    if ((threadIdx.x & 31u) == 0) fn_atomic_max_u64(&s.best, mine);\n",
            ),
        ),
        cases=("greedy_odd", "sampled_1024"),
    ),
    _one(
        "temperature",
        "scale",
        _DRAW,
        "fn_div(logit, temperature);",
        "fn_mul(logit, temperature);",
        "sampled_512",
    ),
)

SYNTH_FILL: Final = (
    _one("next_element", "index", _FILL, "u64 x = key + (j + 1) *", "u64 x = key + (j + 2) *"),
    _one(
        "last_of_piece",
        "tail",
        _FILL,
        "(u32)(count + skew - begin) : 8;",
        "(u32)(count + skew - begin - 1u) : 8;",
        "words_skewed",
        "words_short",
    ),
    _one("bell_shifted", "scale", _FILL, "- 510) >> 2;", "- 508) >> 2;", "bell_f16"),
    _one(
        "rounded_up",
        "rounding",
        _FILL,
        "n >>= p0 >> 16;",
        "n = n + (i32)(p0 >> 16) >> (p0 >> 16);",
        "bell_bf16_norm",
    ),
    _one(
        "row_stale",
        "stale",
        _FILL,
        "if (++row_at == p0) row_at = 0;",
        "if (++row_at > p0) row_at = 0;",
        "rows_51",
    ),
)
