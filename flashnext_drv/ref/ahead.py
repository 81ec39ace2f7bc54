"""References of advance_rows and count_replay, row by row in Python integers.

Called by check/cases_ahead.py and tests.  What must stay true: written from the rules in words, with nothing
of the kernels' way of doing it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["advance_rows", "count_replay"]


def advance_rows(tables: MutableMapping[str, NDArray[Any]]) -> None:
    """What the kernel does to its tables, in place.

    tables: round (1,) ROUND, rows (cap,) ROW, runs (cap,) RUN, aheads (slots,) AHEAD, ring (slots, steps)
    DRAWN, all of which may change; tokens and status (cap,) u32.
    """
    n_rows = int(tables["round"]["n_rows"][0])
    steps = tables["ring"].shape[1]
    following = []
    for i_row in range(n_rows):
        row = {name: int(tables["rows"][name][i_row]) for name in tables["rows"].dtype.names or ()}
        token, status = int(tables["tokens"][i_row]), int(tables["status"][i_row])
        ahead = tables["aheads"][row["slot"]]
        if row["emit"] & 2 == 0 or ahead["left"] == 0:
            continue
        at = int(ahead["drawn"])
        if at < steps:
            tables["ring"][row["slot"], at] = (token, status)
        ahead["drawn"] += 1
        ahead["left"] -= 1
        stopped = token in ahead["stops"][: int(ahead["n_stops"])].tolist()
        if ahead["left"] == 0 or at + 1 >= steps or status != 0 or stopped:
            continue
        following.append((row["slot"], token, row["position"] + 1, row["token"], row["prev1"], row["emit"]))
    for i_row, (slot, token, position, prev1, prev2, emit) in enumerate(following):
        tables["rows"][i_row] = (slot, i_row, token, position, prev1, prev2, emit, i_row)
        tables["runs"][i_row] = (slot, i_row, 1, position)
    tables["round"]["n_rows"] = tables["round"]["n_runs"] = len(following)


def count_replay(counts: NDArray[np.uint64], n_rows: int) -> NDArray[np.uint64]:
    """(2,) u64: replays and rows after one more replay of a round of n_rows rows; both wrap."""
    return np.array([(int(counts[0]) + 1) % 2**64, (int(counts[1]) + n_rows) % 2**64], np.uint64)
