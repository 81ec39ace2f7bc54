"""Contract cases of line_resolve and line_fill: the tables of one layer's device lines, and copies into them.

Called by cases_move.py.  What must stay true: tables are compared whole, field by field, with what
ref/lines.py makes of the same ones; entries that no round may touch are poison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.spec import Case
from ..kernels.tables import CACHE, COUNTERS, FILL, HOME, LINE, NO_LINE, ROUTE, USE
from ..ref import lines as ref
from .contract import Operands, bits, poison
from .operands import bytes_of, round_table

__all__ = ["BUILDERS", "line_tables", "same_table"]

Arrays = dict[str, NDArray[Any]]

TABLES: Final = ("lines", "homes", "uses", "cache", "fills")
_LINES_AT: Final = 0x7_0400_0000  # device addresses as they may be; nothing reads through them
_HOMES_AT: Final = 0x7F3A_1C00_0000
_SPARE: Final = 3  # entries behind the last of uses and fills


def line_tables(
    seed: int, n_experts: int, holds: list[int], used: list[int], clock: int, fills_cap: int
) -> Arrays:
    """lines, homes, uses, cache and fills of a layer whose line i holds expert holds[i] (NO_LINE: none).

    Experts are of different sizes; counters are above 2^32; spare entries are poison.
    """
    sizes = 256 * (1 + bits(seed, "sizes", n_experts).astype(np.int64) % 40)
    line_bytes = int(sizes.max())
    homes = np.zeros(n_experts, HOME)
    homes["address"] = _HOMES_AT + line_bytes * np.arange(n_experts, dtype=np.uint64)
    homes["bytes"], homes["line"] = sizes, NO_LINE
    uses = poison(len(holds) + _SPARE, USE)
    uses["expert"][: len(holds)], uses["used"][: len(holds)] = holds, used
    lines = np.zeros(n_experts + 1, LINE)
    bytes_of(lines)[:] = bits(seed, "lines", (n_experts + 1, LINE.itemsize)).astype(np.uint8).reshape(-1)
    base = homes["address"].copy()
    lines["source"] = 1
    for line, expert in enumerate(holds):
        if expert != NO_LINE:
            homes["line"][expert] = line
            base[expert], lines["source"][expert] = _LINES_AT + line * line_bytes, 0
    for i_part, part in enumerate(("gate", "up", "down")):
        for i_field, field in enumerate(("data", "suh", "svh")):
            lines[part][field][:-1] = base + np.uint64(16 * (3 * i_part + i_field))
    cache = np.zeros(1, CACHE)
    cache["lines"], cache["line_bytes"], cache["n_lines"] = _LINES_AT, line_bytes, len(holds)
    cache["clock"], cache["n_fills"] = clock, 77
    for name in COUNTERS:
        cache[name] = np.uint64((1 << 33) - 2) + bits(seed, name, 1)
    return {
        "lines": lines,
        "homes": homes,
        "uses": uses,
        "cache": cache,
        "fills": poison(fills_cap + _SPARE, FILL),
    }


def same_table(name: str, got: NDArray[Any], want: NDArray[Any]) -> None:
    """Equal bytes; AssertionError names the first field that differs."""
    g, w = (x.view(np.uint8).reshape(len(x), -1) for x in (got, want))
    assert g.shape == w.shape, f"{name}: {g.shape}, wanted {w.shape}"
    if not (g != w).any():
        return
    entry, at = (int(i) for i in np.argwhere(g != w)[0])
    assert got.dtype.fields is not None
    field = [key for key, (_, offset, *_) in got.dtype.fields.items() if offset <= at][-1]
    raise AssertionError(
        f"{name}: {int((g != w).any(axis=1).sum())} of {len(g)} entries differ, first {entry}, {field}: "
        f"got {got[field][entry]}, wanted {want[field][entry]}"
    )


def _resolve(case: Case, seed: int) -> Operands:
    rows, cap, n_active = (case.int(key) for key in ("rows", "rows_cap", "n_active"))
    n_experts, n_lines, clock = (case.int(key) for key in ("n_experts", "n_lines", "clock"))
    holds = _mixed(seed, "holds", range(n_experts))[:n_lines]
    empty = _mixed(seed, "empty", range(n_lines))[: case.int("empty")]
    if case["ages"] == "never":
        holds, used = list(range(n_lines)), [0] * n_lines
    elif case["ages"] == "same":
        used = [clock - 3] * n_lines
    elif case["ages"] == "higher":
        used = [clock - 3 - line for line in range(n_lines)]
    else:  # of few clocks, so some are alike; some never
        age = bits(seed, "used", n_lines).tolist()
        used = [0 if a % 7 == 0 else clock - a % (n_lines // 2 + 2) for a in age]
    for line in empty:
        holds[line], used[line] = NO_LINE, 0 if case["ages"] == "drawn" else used[line]
    tables = line_tables(seed, n_experts, holds, used, clock, max(min(cap * n_active, n_lines), 1))
    routes = _routes(case, seed, holds)
    want = {name: array.copy() for name, array in tables.items()}
    if rows:
        ref.line_resolve(want, routes["expert"][:rows, :n_active].tolist())
    else:
        want["cache"]["n_fills"] = 0

    def expect(got: Arrays) -> None:
        for name in TABLES:
            same_table(name, got[name], want[name])

    return Operands(
        arrays={"round": round_table(rows, cap), "routes": routes, **tables},
        scalars={"n_experts": n_experts, "n_slots": n_active + 1},
        grid=(1, 1, 1),
        relocations=[],
        outputs=TABLES,
        expect=expect,
    )


def _routes(case: Case, seed: int, holds: list[int]) -> NDArray[Any]:
    """(rows_cap, n_slots) routes; rows that do not take part name experts all the same."""
    cap, n_active, n_experts = (case.int(key) for key in ("rows_cap", "n_active", "n_experts"))
    routes = np.zeros((cap, n_active + 1), ROUTE)
    routes["weight"] = 0.25
    routes["expert"][:, n_active] = n_experts
    wants_in = {"in": True, "none": False, "apart": False}.get(str(case["wants"]))
    taken: list[int] = []
    for row in range(cap):
        any_ = wants_in is None or row >= case.int("rows")
        pool = [expert for expert in range(n_experts) if any_ or (expert in holds) == wants_in]
        chosen = _mixed(seed, f"row {row}", [expert for expert in pool if expert not in taken])[:n_active]
        taken += chosen if case["wants"] == "apart" else []
        assert len(chosen) == n_active, f"case {case.name} has too few experts"
        routes["expert"][row, :n_active] = sorted(chosen)
    return routes


def _mixed(seed: int, name: str, values: Any) -> list[int]:
    """`values` in an order drawn by seed and name."""
    listed = list(values)
    return [listed[i] for i in np.argsort(bits(seed, name, len(listed)), kind="stable")]


def _fill(case: Case, seed: int) -> Operands:
    """Lines lie apart in `device` and homes in another order in `host`; a stale entry stands behind the
    last one."""
    sizes = [int(size) for size in str(case["sizes"]).split(",") if size]
    every = [*sizes, 48]
    line_bytes = max(every) // 256 * 256 + 256
    host = bits(seed, "host", line_bytes * len(every)).astype(np.uint8)
    device = poison(line_bytes * len(every), np.uint8)
    fills = poison(len(every), FILL)
    fills["bytes"] = every
    cache = poison(1, CACHE)
    cache["n_fills"] = len(sizes)
    at = _mixed(seed, "homes", range(len(every)))
    copies = [(i * line_bytes, at[i] * line_bytes, size) for i, size in enumerate(every)]
    moves = []
    for i, (to, start, _) in enumerate(copies):
        moves.append(("fills", i * FILL.itemsize, "device", to))
        moves.append(("fills", i * FILL.itemsize + 8, "host", start))
    memory = np.concatenate((device, host))
    ref.line_fill(memory, [(to, len(device) + start, size) for to, start, size in copies[: len(sizes)]])
    want = memory[: len(device)]

    def expect(got: Arrays) -> None:
        differ = np.flatnonzero(got["device"] != want)
        if differ.size:
            line, byte = divmod(int(differ[0]), line_bytes)
            raise AssertionError(f"{differ.size} bytes differ, the first is byte {byte} of line {line}")
        assert (got["host"] == host).all(), "the copies at home changed"

    return Operands(
        arrays={"cache": cache, "fills": fills, "device": device, "host": host},
        scalars={},
        grid=(case.int("grid"), 1, 1),
        relocations=moves,
        outputs=("device",),
        expect=expect,
    )


BUILDERS: Final[dict[str, Callable[[Case, int], Operands]]] = {"line_resolve": _resolve, "line_fill": _fill}
