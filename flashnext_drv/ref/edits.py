"""Reference of edit_logits, entry by entry in NumPy's float32: order edit_v1 of cuda_src/ARITHMETIC.md.

Called by check/cases_edits.py and tests.  What must stay true: written from the formula, one rounding to
float32 a step (NumPy's float32 division, product, difference and sum are correctly rounded everywhere).
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels.tables import EMIT_EDITED, SEEN_ONE, SEEN_PROMPT, SEEN_STOP

__all__ = ["edit_logits", "edited"]


def edited(how: NDArray[Any], entry: NDArray[Any], raw: np.float32, position: int) -> np.float32:
    """The logit that a row at `position` draws from.  how: one EDITS; entry: one EDIT; raw: its logit."""
    x = np.float32(raw)
    seen, bias = int(entry["seen"]), np.float32(entry["bias"])
    count = seen // SEEN_ONE
    with np.errstate(all="ignore"):
        if count or seen & SEEN_PROMPT:
            x = np.float32(x / how["repetition"] if x > 0 else x * how["repetition"])
        if count:
            x = np.float32(x - np.float32(how["frequency"] * np.float32(count)))
            x = np.float32(x - how["presence"])
        if seen & SEEN_STOP and position < int(how["stops_from"]):
            bias = np.float32(-np.inf)
        if np.isnan(x):
            return x
        return np.float32(-np.inf) if bias == -np.inf else np.float32(x + bias)


def edit_logits(tables: MutableMapping[str, NDArray[Any]], cap: int, restore: bool) -> None:
    """What the kernel does to its tables, in place.

    tables: round (1,) ROUND, rows (rows_cap,) ROW; heads (slots,) EDITS, entries (slots, cap) EDIT and logits
    (rows_cap, vocab) float32, which may change.
    """
    for i_row in range(int(tables["round"]["n_rows"][0])):
        row = tables["rows"][i_row]
        if int(row["emit"]) & EMIT_EDITED != EMIT_EDITED:
            continue
        head, entries = tables["heads"][row["slot"]], tables["entries"][row["slot"]]
        logits = tables["logits"][i_row]
        used = entries[: int(head["n_entries"])]
        if restore:
            for entry in used:
                logits[entry["id"]] = entry["raw"]
            continue
        token, position = int(row["token"]), int(row["position"])
        if int(head["counted"]) == position:
            head["counted"] += 1
            if token in used["id"]:
                used["seen"][used["id"] == token] += SEEN_ONE
            elif len(used) < cap:
                entries[len(used)] = (token, SEEN_ONE, 0.0, 0.0)
                head["n_entries"] += 1
                used = entries[: len(used) + 1]
        for entry in used:
            entry["raw"] = logits[entry["id"]]
            logits[entry["id"]] = edited(head, entry, entry["raw"], position)
