"""How the operands of the deep family become those of the decode kernels whose bytes it must give.

Called by pairs.py.  What must stay true: decode gets the same operand values, row by row, in its own order;
it takes 16 rows a launch, so rows are picked from all over the chunk.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ..kernels.spec import Case
from ..kernels.tables import LINEAR
from .contract import Operands, Ran, poison
from .operands import field_at, from_fragment, from_tiles, round_table, to_fragment
from .pairing import Expected, Pair, Then, Turned, few_rows, follow

__all__ = ["PAIRS"]

_MOST_ROWS: Final = 16


def _linears(case: Case, given: Operands, ran: Ran) -> Turned:
    """deep_linear -> linear_gemv_n16: the same linears, x in fragment order, sums to `part`."""
    rows = few_rows(given, _MOST_ROWS)
    if not rows.size:
        return None
    table = given.arrays["linears"].copy()
    arrays = {**given.arrays, "round": round_table(len(rows), len(rows)), "linears": table}
    moves, outs, first = list(given.relocations), [], 0
    for j, one in enumerate(table):
        k, n, units = int(one["k"]), int(one["n"]), int(one["leaves"]) * int(one["segments"])
        one["tiled"], one["x_stride"] = 0, k
        one["first_warp"], one["n_warps"] = first, -(-n // 32) * units
        first += int(one["n_warps"])
        arrays[f"x{j}"] = to_fragment(from_tiles(given.arrays[f"x{j}"])[rows, :k])
        arrays[f"part{j}"] = poison((units, len(rows), n), np.float32)
        arrays[f"out{j}"] = poison((len(rows), n), np.float32)
        moves.append(("linears", j * LINEAR.itemsize + field_at(LINEAR, "part"), f"part{j}", 0))
        outs.append(f"out{j}")
    operands = Operands(
        arrays, {"n_linears": len(table)}, (first, 1, 1), moves, tuple(outs), lambda _: None
    )

    def compared(other: Ran) -> Expected:
        return [(out, ran.found[out][rows], other.found[out]) for out in outs]

    return operands, compared


def _finish(given: Operands, ran: Ran) -> Operands:
    """linear_gemv_n16 -> linear_finish: the same table, whose sums are there."""
    table = given.arrays["linears"]
    rows = int(given.arrays["round"]["n_rows"][0])
    return follow(given, ran, (-(-int(table["n"].max()) // 512), len(table), rows))


def _inputs(case: Case, given: Operands, ran: Ran) -> Turned:
    """deep_input -> linear_input: the same linears, operand rows in fragment order."""
    n_rows = int(given.arrays["round"]["n_rows"][0])
    if not n_rows:
        return None
    table, cap = given.arrays["linears"].copy(), len(given.arrays["x"])
    arrays, outs = {**given.arrays, "linears": table}, []
    for j, one in enumerate(table):
        one["tiled"], one["x_stride"] = 0, one["k"]
        arrays[f"x{j}"] = poison((cap, int(one["k"])), np.float16)
        outs.append(f"x{j}")
    grid = (-(-int(table["k"].max()) // 512), len(table), cap)
    scalars = {"x_stride": given.scalars["x_stride"]}
    operands = Operands(arrays, scalars, grid, given.relocations, tuple(outs), lambda _: None)

    def compared(other: Ran) -> Expected:
        mine = [from_tiles(ran.found[out])[:n_rows] for out in outs]
        return [
            (out, image[:, : int(one["k"])], from_fragment(other.found[out][:n_rows]))
            for out, image, one in zip(outs, mine, table, strict=True)
        ]

    return operands, compared


def _site_up(case: Case, given: Operands, ran: Ran) -> Turned:
    """deep_site_up -> site_up_n16."""
    rows = few_rows(given, _MOST_ROWS)
    if not rows.size:
        return None
    linear, hidden = given.arrays["linear"].copy(), int(given.scalars["hidden"])
    rank = int(linear["k"][0])
    linear["tiled"], linear["x_stride"] = 0, rank
    arrays = {
        **given.arrays,
        "round": round_table(len(rows), len(rows)),
        "linear": linear,
        "streams": given.arrays["streams"][rows],
        "rinv": given.arrays["rinv"][rows],
        "u": to_fragment(from_tiles(given.arrays["u"])[rows, :rank]),
        "m": poison((len(rows), hidden), np.float32),
    }
    operands = Operands(
        arrays,
        {**given.scalars, "m16": 0},
        (-(-hidden // 16), 1, 1),
        given.relocations,
        ("m",),
        lambda _: None,
    )
    return operands, lambda other: [("m", ran.found["m"][rows], other.found["m"])]


PAIRS: Final = (
    Pair("deep_linear", "linear_gemv_n16", _linears, then=(Then("linear_finish", _finish),)),
    Pair("deep_site_up", "site_up_n16", _site_up),
    Pair("deep_input", "linear_input", _inputs),
)
