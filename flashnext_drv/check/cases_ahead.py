"""Contract cases of count_replay and advance_rows: the tables of several tokens a host visit.

Called by cases_move.py and cases_token.py.  What must stay true: tables are compared whole, field by field,
with what ref/ahead.py makes of the same ones; rows that take no part are poison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.spec import Case
from ..kernels.tables import AHEAD, DRAWN, MOST_STOPS, ROW
from ..ref import ahead as ref
from .cases_lines import same_table
from .contract import Operands, bits, poison
from .operands import round_table, run_table

__all__ = ["BUILDERS"]

Arrays = dict[str, NDArray[Any]]
_TABLES: Final = ("round", "rows", "runs", "aheads", "ring")


def _count(case: Case, seed: int) -> Operands:
    counts = np.array([int(str(case["replays"])), int(str(case["counted"]))], np.uint64)
    want = ref.count_replay(counts, case.int("rows"))

    def expect(got: Arrays) -> None:
        assert (got["counts"] == want).all(), f"counts: got {got['counts']}, wanted {want}"

    round_ = round_table(case.int("rows"), case.int("rows") + 1, case.int("runs"))
    return Operands({"round": round_, "counts": counts}, {}, (1, 1, 1), [], ("counts",), expect)


def _advance(case: Case, seed: int) -> Operands:
    """dims["what"]: a letter a row.  g goes on; s, S its last or first stop id is drawn; c an id that stands
    behind the slot's stop ids is; l its last token; n a NaN; z nothing left; e no draw asked; r the last
    place of the ring; o beyond the ring."""
    what, cap, steps = str(case["what"]), case.int("cap"), case.int("steps")
    n, n_slots = len(what), cap + 3
    slots = np.argsort(bits(seed, "slots", n_slots), kind="stable")[:n]
    rows = poison((cap,), ROW)
    for name in ("token", "prev1", "prev2"):
        rows[name][:n] = bits(seed, name, n) % 248_320
    rows["position"][:n] = bits(seed, "position", n) % 262_000
    rows["slot"][:n], rows["run"][:n], rows["i_out"][:n] = slots, np.arange(n), np.arange(n)
    rows["emit"][:n] = [1 if letter == "e" else 2 + i % 2 for i, letter in enumerate(what)]
    runs = run_table([1] * n, slots.tolist(), cap)
    runs["first_position"][:n] = rows["position"][:n]
    aheads = poison((n_slots,), AHEAD)
    tokens, status = poison((cap,), np.uint32), poison((cap,), np.uint32)
    tokens[:n], status[:n] = 500_000 + bits(seed, "tokens", n) % 1000, 0
    for i, letter in enumerate(what):
        ahead = aheads[slots[i]]
        n_stops = MOST_STOPS if i % 4 == 3 else 1 + i % 4 if letter in "sSc" else i % 4
        ahead["left"] = {"l": 1, "z": 0}.get(letter, 2 + i)
        ahead["drawn"] = {"r": steps - 1, "o": steps + i % 2}.get(letter, i % max(steps - 1, 1))
        ahead["n_stops"], ahead["stops"] = n_stops, bits(seed, f"stops {i}", MOST_STOPS) % 248_320
        if letter == "c" and n_stops < MOST_STOPS:
            ahead["stops"][n_stops] = tokens[i]
        elif letter in "sS":
            ahead["stops"][n_stops - 1 if letter == "s" else 0] = tokens[i]
        elif letter == "n":
            tokens[i], status[i] = 0xFFFFFFFF, 1
    tables: Arrays = {"round": round_table(n, cap), "rows": rows, "runs": runs, "aheads": aheads,
                      "ring": poison((n_slots, steps), DRAWN), "tokens": tokens, "status": status}
    want = {name: array.copy() for name, array in tables.items()}
    ref.advance_rows(want)

    def expect(got: Arrays) -> None:
        for name in _TABLES:
            same_table(name, got[name].reshape(-1).view(want[name].dtype), want[name].reshape(-1))

    tables["aheads"] = aheads.view(np.uint32)  # the stages compare words, or fields that are words
    return Operands(tables, {"ring_steps": steps}, (1, 1, 1), [], _TABLES, expect)


BUILDERS: Final[dict[str, Callable[[Case, int], Operands]]] = {
    "count_replay": _count, "advance_rows": _advance}
