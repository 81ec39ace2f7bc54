"""How the operands of a moe_deep kernel become those of the decode kernels whose bytes it must give.

Called by pairs.py.  What must stay true: the other kernels get the same values row by row and slot by slot;
nothing of the sorted order reaches them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.exl3 import dot_segments, gu_segments
from ..kernels.spec import Case
from .cases_moe_tiles import finished
from .contract import Operands, Ran, poison
from .operands import from_fragment, from_tiles, to_fragment
from .pairing import Expected, Pair, Then, Turned, follow

__all__ = ["PAIRS"]

Index = NDArray[np.int64]


def _tiles(given: Operands) -> list[tuple[int, Index, Index, Index]]:
    """Expert, positions, rows and slots of every tile; none where no row is live."""
    if not given.arrays["round"]["n_rows"][0]:
        return []
    out = []
    for tile in given.arrays["tiles"][: int(given.arrays["n_tiles"][0])]:
        at = int(tile["first"]) + np.arange(int(tile["n_rows"]))
        row, slot = np.divmod(given.arrays["pair_of"][at].astype(np.int64), int(given.scalars["n_slots"]))
        out.append((int(tile["expert"]), at, row, slot))
    return out


def _tables(given: Operands) -> dict[str, NDArray[Any]]:
    """What the tables of a case need, and they themselves."""
    named = {target for _, _, target, _ in given.relocations}
    return {name: given.arrays[name] for name in ("round", "routes", "lines", *sorted(named))}


def _input(case: Case, given: Operands, ran: Ran) -> Turned:
    """moe_deep_input -> moe_input."""
    tiles, hidden = _tiles(given), int(given.scalars["hidden"])
    if not tiles:
        return None
    cap, n_slots = given.arrays["routes"].shape
    arrays = {**_tables(given), "m": given.arrays["m"], "x": poison((cap, n_slots, 2, hidden), np.float16)}
    scalars: dict[str, int | float] = {
        "hidden": hidden, "n_slots": n_slots, "n_experts": len(given.arrays["lines"]) - 1
    }
    grid = (-(-hidden // 512), 2 * n_slots, cap)
    operands = Operands(arrays, scalars, grid, given.relocations, ("x",), lambda _: None)

    def compared(other: Ran) -> Expected:
        mine, theirs = [from_tiles(image) for image in ran.found["x"]], other.found["x"]
        return [
            (f"{part} of expert {expert}", mine[p][at], from_fragment(theirs[row, slot, p]))
            for expert, at, row, slot in tiles
            for p, part in enumerate(("gate", "up"))
        ]

    return operands, compared


def _gate_up(case: Case, given: Operands, ran: Ran) -> Turned:
    """moe_deep_gu -> moe_gemv_gu, which moe_act follows."""
    tiles, hidden = _tiles(given), int(given.scalars["hidden"])
    if not tiles:
        return None
    (cap, n_slots), width_cap = given.arrays["routes"].shape, int(given.scalars["width_cap"])
    x = poison((cap, n_slots, 2, hidden), np.float16)
    for p, image in enumerate(given.arrays["x"]):
        values = from_tiles(image)
        for _, at, row, slot in tiles:
            x[row, slot, p] = to_fragment(values[at])
    widths = given.arrays["lines"]["width"]
    units_cap = max(gu_segments(hidden, int(width)) for width in widths)
    part = poison((units_cap, cap, n_slots, 2, width_cap), np.float32)
    operands = Operands(
        {**_tables(given), "x": x, "part": part},
        {"hidden": hidden, "n_slots": n_slots, "width_cap": width_cap},
        (-(-width_cap // 32 * units_cap), 2 * n_slots, cap),
        given.relocations,
        ("part",),
        lambda _: None,
    )

    def compared(other: Ran) -> Expected:
        mine, theirs = from_tiles(ran.found["h"]), other.found["x"]
        return [
            (f"expert {e}", mine[at, : widths[e]], from_fragment(theirs[row, slot, : widths[e]]))
            for e, at, row, slot in tiles
        ]

    return operands, compared


def _act(given: Operands, ran: Ran) -> Operands:
    """moe_gemv_gu -> moe_act."""
    cap, n_slots = given.arrays["routes"].shape
    width_cap = int(given.scalars["width_cap"])
    after = follow(given, ran, (-(-width_cap // 512), n_slots, cap), given.scalars)
    x = poison((cap, n_slots, width_cap), np.float16)
    return replace(after, arrays={**after.arrays, "x": x}, outputs=("x",))


def _down(case: Case, given: Operands, ran: Ran) -> Turned:
    """moe_deep_down -> moe_gemv_down, its units finished by the oracle."""
    tiles, hidden = _tiles(given), int(given.scalars["hidden"])
    if not tiles:
        return None
    (cap, n_slots), width_cap = given.arrays["routes"].shape, int(given.scalars["width_cap"])
    x, values = poison((cap, n_slots, 1, width_cap), np.float16), from_tiles(given.arrays["h"])
    for _, at, row, slot in tiles:
        x[row, slot, 0] = to_fragment(values[at])
    widths = given.arrays["lines"]["width"]
    units_cap = max(dot_segments(int(width), hidden) for width in widths)
    operands = Operands(
        {**_tables(given), "x": x, "part": poison((units_cap, cap, n_slots, hidden), np.float32)},
        {"hidden": hidden, "n_slots": n_slots, "width_cap": width_cap},
        (-(-hidden // 32 * units_cap), n_slots, cap),
        given.relocations,
        ("part",),
        lambda _: None,
    )

    def compared(other: Ran) -> Expected:
        out = []
        for e, at, row, slot in tiles:
            units = np.ascontiguousarray(
                other.found["part"][: dot_segments(int(widths[e]), hidden), row, slot]
            )
            out.append((f"expert {e}", ran.found["v"][at], finished(units, given.arrays[f"down_svh{e}"])))
        return out

    return operands, compared


def _sum(case: Case, given: Operands, ran: Ran) -> Turned:
    """moe_deep_sum -> moe_sum, which finishes `part` itself."""
    hidden, cap = int(given.scalars["hidden"]), len(given.arrays["routes"])
    arrays = {**_tables(given), "part": given.arrays["part"], "y": poison((cap, hidden), np.float32)}
    operands = Operands(
        arrays,
        {**given.scalars, "width_cap": 128},
        (hidden // 128, cap, 1),
        given.relocations,
        ("y",),
        lambda _: None,
    )
    return operands, lambda other: [("y", ran.found["y"], other.found["y"])]


PAIRS: Final = (
    Pair("moe_deep_input", "moe_input", _input),
    Pair("moe_deep_gu", "moe_gemv_gu", _gate_up, then=(Then("moe_act", _act),)),
    Pair("moe_deep_down", "moe_gemv_down", _down),
    Pair("moe_deep_sum", "moe_sum", _sum),
)
