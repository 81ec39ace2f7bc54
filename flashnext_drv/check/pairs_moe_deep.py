"""How the operands of a moe_deep kernel become those of the decode kernels whose bytes it must give.

Called by pairs.py.  What must stay true: the other kernel gets the same values row by row and slot by slot;
nothing of the sorted order reaches it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels.spec import Case
from .contract import Operands, Ran, poison
from .operands import from_fragment, from_tiles

__all__ = ["Expected", "Turned", "sorted_pairs", "turned_input", "turned_sum"]

Expected = list[tuple[str, NDArray[Any], NDArray[Any]]]  # name, by the first kernel, by the other
Turned = tuple[Operands, Callable[[Ran], Expected]] | None


def sorted_pairs(given: Operands) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Position, row and slot of every pair, from the tiles and pair_of of a case."""
    tiles = given.arrays["tiles"][: int(given.arrays["n_tiles"][0])]
    at = np.concatenate([np.arange(int(t["first"]), int(t["first"]) + int(t["n_rows"])) for t in tiles])
    row, slot = np.divmod(given.arrays["pair_of"][at].astype(np.int64), int(given.scalars["n_slots"]))
    return at, row, slot


def turned_input(case: Case, given: Operands, ran: Ran) -> Turned:
    """moe_deep_input -> moe_input."""
    if not given.arrays["round"]["n_rows"][0]:
        return None
    hidden, (cap, n_slots) = int(given.scalars["hidden"]), given.arrays["routes"].shape
    arrays = {name: given.arrays[name] for name in ("round", "routes", "lines", "m", "gate_suh", "up_suh")}
    arrays["x"] = poison((cap, n_slots, 2, hidden), np.float16)
    grid = (-(-hidden // 512), 2 * n_slots, cap)
    operands = Operands(
        arrays, {"hidden": hidden, "n_slots": n_slots}, grid, given.relocations, ("x",), lambda _: None
    )
    at, row, slot = sorted_pairs(given)

    def compared(other: Ran) -> Expected:
        return [
            (part, from_tiles(ran.found["x"][p])[at], from_fragment(other.found["x"][row, slot, p]))
            for p, part in enumerate(("gate", "up"))
        ]

    return operands, compared


def turned_sum(case: Case, given: Operands, ran: Ran) -> Turned:
    """moe_deep_sum -> moe_sum, which finishes `part` itself."""
    arrays = {name: given.arrays[name] for name in ("round", "routes", "lines", "part", "down_svh")}
    hidden, cap = int(given.scalars["hidden"]), len(given.arrays["routes"])
    arrays["y"] = poison((cap, hidden), np.float32)
    operands = Operands(
        arrays,
        {**given.scalars, "width_cap": 128},
        (hidden // 128, cap, 1),
        given.relocations,
        ("y",),
        lambda _: None,
    )
    return operands, lambda other: [("y", ran.found["y"], other.found["y"])]
