"""Planted controls of the line kernels: what the check must report as wrong.

Read by the declarations; made by kernels/planting.py, run by check/controls.py.  An edit's old text stands
exactly once in its file: a changed kernel takes its controls along.
"""

from __future__ import annotations

from typing import Final

from .spec import Control, Edit

__all__ = ["LINE_FILL", "LINE_RESOLVE"]

_RESOLVE: Final = "move/line_resolve.cu"
_FILL: Final = "move/line_fill.cu"


def _one(name: str, kind: str, file: str, old: str, new: str, *cases: str) -> Control:
    return Control(name, kind, (Edit(file, old, new),), cases)


LINE_RESOLVE: Final = (
    _one("higher_line", "tie", _RESOLVE, "&& line < other_line)", "&& line > other_line)"),
    _one("youngest", "order", _RESOLVE, "return age > other_age ||", "return age < other_age ||"),
    _one("padding_rows", "stale", _RESOLVE, "fn_ld(&round->n_rows)", "fn_ld(&round->rows_cap)"),
    _one(
        "lines_in_use",
        "stale",
        _RESOLVE,
        "line < n_lines && !(s.held[line >> 5] & bit(line));",
        "line < n_lines;",
    ),
    _one("last_victim", "tail", _RESOLVE, "if (rank < n_fills) {", "if (rank + 1u < n_fills) {"),
    _one("other_word", "index", _RESOLVE, "fn_shfl(before, word) +", "fn_shfl(before, word & ~1u) +"),
    _one("not_sent_home", "stale", _RESOLVE, "            homes[out].line = FN_NO_LINE;\n", ""),
    _one("home_of_the_other", "layout", _RESOLVE, "fn_ld(&homes[out].address) - here", "from - here"),
    _one("eight_addresses", "leaf", _RESOLVE, "i < 9u; i++) *at[i]", "i < 8u; i++) *at[i]"),
    _one("pairs_once", "scale", _RESOLVE, "        reads++;\n", "        reads = 1u;\n", "most_in_place"),
    _one("clock_of_before", "stale", _RESOLVE, "fn_ld(&cache->clock) + 1u;", "fn_ld(&cache->clock);"),
    Control(
        "no_barrier_of_marks",
        "barrier",
        (
            Edit(
                _RESOLVE,
                "        u32 e = expert[i], line = home[i].y;\n",
                "        u32 e = expert[i], line = home[i].y;\n        if (warp == 0) fn_delay();\n",
            ),
            Edit(_RESOLVE, "    __syncthreads();  // every pair has left its marks\n", ""),
        ),
        cases=("published", "published_rows"),
    ),
    Control(
        "no_barrier_of_ages",
        "barrier",
        (
            Edit(
                _RESOLVE,
                "        s.age[line] = free ?",
                "        if (warp == 0) fn_delay();\n        s.age[line] = free ?",
            ),
            Edit(_RESOLVE, "    __syncthreads();  // ages and missing experts stand\n", ""),
        ),
        cases=("half", "most_missing"),
    ),
    Control(
        "no_barrier_of_victims",
        "barrier",
        (
            Edit(
                _RESOLVE,
                "            s.victim[rank] = line;\n",
                "            fn_delay();\n            s.victim[rank] = line;\n",
            ),
            Edit(_RESOLVE, "    __syncthreads();  // victims stand\n", ""),
        ),
        cases=("half", "most_missing"),
    ),
)

LINE_FILL: Final = (
    _one("last_word", "tail", _FILL, "if (w < fill.words) to[w]", "if (w + 1u < fill.words) to[w]"),
    _one("one_more", "stale", _FILL, "fn_ld(&cache->n_fills);", "fn_ld(&cache->n_fills) + 1u;"),
    _one(
        "seven_loads",
        "leaf",
        _FILL,
        "        if (w < fill.words) to[w] = v[i];\n",
        "        if (i && w < fill.words) to[w] = v[i];\n",
    ),
    _one(
        "first_home",
        "stale",
        _FILL,
        "next = fill_at(fills + fn_min_u32(i + 1u, n_fills - 1u));",
        "next.to = fill_at(fills + fn_min_u32(i + 1u, n_fills - 1u)).to;",
    ),
    _one("pieces_lost", "index", _FILL, "        piece -= pieces;\n", "        piece -= pieces - 1u;\n"),
    _one("words_turned", "layout", _FILL, "to[w] = v[i];", "to[w] = uint4{v[i].y, v[i].x, v[i].z, v[i].w};"),
)
