"""The attention kernels of prompts against those of decode: index_score_deep and index_score; qsa_deep and
qsa_attn with qsa_merge after it.

Called by pairs.py.  What must stay true: both sides read the same pages, queries and choices, and only the
parts that qsa_attn wrote reach qsa_merge.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from ..kernels.spec import Case
from .attn_pages import BLOCK, PART
from .contract import Operands, Ran, poison
from .pairing import Expected, Pair, Then, Turned, follow

__all__ = ["PAIRS"]


def _score_rows(case: Case, given: Operands, ran: Ran) -> Turned:
    """index_score on all rows; a window of them is compared."""
    cap, first = len(given.arrays["rows"]), int(given.scalars["first_row"])
    rows = min(int(given.arrays["round"]["n_rows"][0]) - first, len(given.arrays["score"]))
    arrays = {name: array for name, array in given.arrays.items() if name != "runs"}
    arrays["score"] = poison((cap, int(given.scalars["max_blocks"])), np.float32)
    operands = replace(given, arrays=arrays, grid=(1, cap, 1))

    def compared(other: Ran) -> Expected:
        return [("score", ran.found["score"][:rows], other.found["score"][first : first + rows])]

    return operands, compared


def _parts(case: Case, given: Operands, ran: Ran) -> Turned:
    """qsa_attn on the same rows, with room for every part."""
    live = int(given.arrays["round"]["n_rows"][0])
    cap, n_q = len(given.arrays["rows"]), int(given.scalars["n_q"])
    attended = min(int(given.arrays["rows"]["position"][:live].max()) + 1,
                   BLOCK * int(given.scalars["budget"]) + BLOCK - 1)
    most = -(-attended // PART)
    parts = {name: poison((cap, n_q, most, *more), np.float32)
             for name, more in (("part_m", ()), ("part_l", ()), ("part_o", (256,)))}
    operands = replace(given, arrays=given.arrays | parts, grid=(most, int(given.scalars["n_kv"]), cap),
                       scalars=given.scalars | {"max_parts": most}, outputs=tuple(parts))
    return operands, lambda merged: [("x", ran.found["x"], merged.found["x"])]


def _merge(given: Operands, ran: Ran) -> Operands:
    """qsa_merge of the parts that qsa_attn left."""
    cap, n_q = given.arrays["part_m"].shape[:2]
    return replace(follow(given, ran, (n_q, cap, 1), given.scalars), outputs=("x",))


PAIRS: Final = (
    Pair("index_score_deep", "index_score", _score_rows),
    Pair("qsa_deep", "qsa_attn", _parts, then=(Then("qsa_merge", _merge),)),
)
