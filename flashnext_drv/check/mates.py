"""Other launches of the same rows: fewer, in another order, with less padding, or one token at a time.

Owns: what a row is in the operands of any kernel (`KernelSpec.rows`, the tables FnRound, FnRun and FnRow) and
comparison of outputs as far as they belong to the same rows.  Called by stages.py.  What must stay true: a
selection changes which rows are launched and nothing that a row may depend on.

Where a kernel works in runs, a run is the unit that is moved; elsewhere a row is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels.spec import KernelSpec
from ..kernels.tables import RUN
from .contract import Arrays, CheckDevice, Operands, Ran, Start, launch_case, poison
from .operands import from_tiles, is_tiles, to_tiles

__all__ = ["Selection", "check_cuts", "check_mates", "longest_run", "planes", "select", "units"]

_MOST_STEPS = 16


@dataclass(frozen=True)
class Selection:
    """Operands of a selection, and which row of the whole launch each of its rows is."""

    operands: Operands
    order: tuple[int, ...]


def units(spec: KernelSpec, given: Operands) -> int:
    """How many runs, or rows, a launch holds.

    0 for a kernel without rows, and for a launch on a window of the rows: its arrays begin with other rows.
    """
    if not spec.rows or "round" not in given.arrays or given.scalars.get("first_row"):
        return 0
    return int(given.arrays["round"]["n_runs" if _by_run(spec) else "n_rows"][0])


def longest_run(spec: KernelSpec, given: Operands) -> int:
    """Rows of the longest run; 1 for kernels that know no runs."""
    if not _by_run(spec) or not units(spec, given):
        return 1
    return int(given.arrays["runs"]["n_rows"][: units(spec, given)].max())


def select(
    spec: KernelSpec, given: Operands, wanted: Sequence[int], *, step: int | None = None, shrink: bool = False
) -> Selection:
    """The launch of the `wanted` units alone, in that order.

    step: of each run only its row of this index (the run must have it).  shrink: rows_cap becomes the number
    of rows, so nothing is padded.
    """
    arrays = dict(given.arrays)
    old_cap = int(arrays["round"]["rows_cap"][0])
    order: list[int] = []
    runs = []
    for unit in wanted:
        if not _by_run(spec):
            order.append(unit)
            continue
        slot, first, length, position = (int(v) for v in arrays["runs"][unit])
        if step is not None:
            first, length, position = first + step, 1, position + step
        runs.append((slot, len(order), length, position))
        order.extend(range(first, first + length))
    cap = max(len(order), 1) if shrink else old_cap
    for name, array in given.arrays.items():
        axis = 0 if name in given.by_row else _row_axis(spec, name)
        if axis is not None:
            arrays[name] = _taken(array, axis, order, old_cap, cap, name)
    if _by_run(spec):
        arrays["runs"] = poison((cap,), RUN)
        for i, run in enumerate(runs):
            arrays["runs"][i] = run
            if "rows" in arrays:
                arrays["rows"]["run"][run[1] : run[1] + run[2]] = i
    arrays["round"] = arrays["round"].copy()
    arrays["round"]["n_rows"], arrays["round"]["rows_cap"] = len(order), cap
    arrays["round"]["n_runs"] = len(runs) if _by_run(spec) else len(order)
    grid = tuple(cap if per_row else n for n, per_row in zip(given.grid, _grid_of_rows(spec), strict=True))
    changed = replace(given, arrays=arrays, grid=(grid[0], grid[1], grid[2]))
    return Selection(changed, tuple(order))


def check_mates(
    device: CheckDevice, spec: KernelSpec, given: Operands, whole: Ran, start: Start | None = None
) -> int:
    """All units turned round, the last alone without padding, and all but the last: equal bytes for each row,
    and the same changes elsewhere.  Returns how many launches were compared; AssertionError says what
    differs."""
    n = units(spec, given)
    if n < 2:
        return 0
    turned = select(spec, given, range(n - 1, -1, -1))
    _same_rows("turned round", spec, whole, turned, launch_case(device, spec, turned.operands, start))
    parts = []
    for name, wanted, shrink in (
        ("the last alone", [n - 1], True),
        ("without the last", range(n - 1), False),
    ):
        part = select(spec, given, list(wanted), shrink=shrink)
        parts.append((name, part, launch_case(device, spec, part.operands, start)))
    for name, part, ran in parts:
        _same_rows(name, spec, whole, part, ran, elsewhere=False)
    for array in _elsewhere(spec, whole):
        before, after = whole.sent[array], whole.found[array]
        joined = before.copy()
        for name, _, ran in parts:
            changed = _raw(ran.found[array]) != _raw(before)
            wrong = changed & (_raw(ran.found[array]) != _raw(after))
            assert not wrong.any(), (
                f"{array}, {name}: {int(wrong.sum())} elements differ from the whole launch"
            )
            _raw(joined)[changed] = _raw(ran.found[array])[changed]
        lost = _raw(joined) != _raw(after)
        assert not lost.any(), f"{array}: {int(lost.sum())} elements change in the whole launch alone"
    return 1 + len(parts)


def check_cuts(
    device: CheckDevice, spec: KernelSpec, given: Operands, whole: Ran, start: Start | None = None
) -> int:
    """The runs one row at a time, the state handed on: the bytes of the whole launch.  Returns the launches;
    0 where no run has two rows, or the kernel leaves no state: another one, later, hands it on."""
    longest = longest_run(spec, given)
    if not 1 < longest <= _MOST_STEPS or not _elsewhere(spec, whole):
        return 0
    lengths = given.arrays["runs"]["n_rows"][: units(spec, given)]
    state: Arrays = {}
    for step in range(longest):
        wanted = [i for i, n in enumerate(lengths) if n > step]
        part = select(spec, given, wanted, step=step)
        part.operands.arrays.update(state)
        ran = launch_case(device, spec, part.operands, start)
        _same_rows(f"token {step} of each run", spec, whole, part, ran, elsewhere=False)
        state = {name: ran.found[name] for name in _elsewhere(spec, whole)}
    for name, array in state.items():
        differ = _raw(array) != _raw(whole.found[name])
        assert not differ.any(), f"{name}: {int(differ.sum())} elements differ after one token at a time"
    return longest


def planes(array: NDArray[Any]) -> list[NDArray[Any]]:
    """Unsigned words of each field, NaNs made one."""
    if array.dtype.names is not None:
        return [p for name in array.dtype.names for p in planes(np.ascontiguousarray(array[name]))]
    words = _raw(array).copy()
    if array.dtype.kind == "f":
        words[np.isnan(array)] = np.iinfo(words.dtype).max >> 1
    return [words]


def _same_rows(
    name: str, spec: KernelSpec, whole: Ran, part: Selection, ran: Ran, *, elsewhere: bool = True
) -> None:
    n = len(part.order)
    for output in whole.names:
        axis = _row_axis(spec, output)
        if axis is None:
            if elsewhere:
                wrong = _raw(ran.found[output]) != _raw(whole.found[output])
                assert not wrong.any(), f"{output}, {name}: {int(wrong.sum())} elements differ"
            continue
        found, sent, first = (_natural(x[output]) for x in (ran.found, ran.sent, whole.found))
        live = np.take(found, range(n), axis)
        rest = np.take(found, range(n, found.shape[axis]), axis)
        wanted = np.take(first, part.order, axis)
        for got, want in zip(planes(live), planes(wanted), strict=True):
            differ = got != want
            assert not differ.any(), (
                f"{output}, {name}: {int(differ.sum())} of {got.size} elements differ from "
                f"the whole launch, first at {tuple(int(i) for i in np.argwhere(differ)[0])}"
            )
        kept = np.take(sent, range(n, sent.shape[axis]), axis)
        assert rest.tobytes() == kept.tobytes(), f"{output}, {name}: padding rows were written"


def _elsewhere(spec: KernelSpec, whole: Ran) -> list[str]:
    """Outputs that are not by row: state, pages."""
    return [name for name in whole.names if _row_axis(spec, name) is None]


def _by_run(spec: KernelSpec) -> bool:
    return any(arg.name == "runs" for arg in spec.args)


def _row_axis(spec: KernelSpec, array: str) -> int | None:
    return next((axis for name, axis in spec.rows.items() if fnmatchcase(array, name)), None)


def _grid_of_rows(spec: KernelSpec) -> tuple[bool, bool, bool]:
    """Which grid dimensions are rows_cap, from the declaration's words."""
    words = spec.grid.split(";")[0].strip()
    if words.startswith("(") and words.endswith(")"):
        words = words[1:-1]
    parts, depth = [""], 0
    for letter in words:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    per_row = [part.strip().startswith("rows_cap") for part in parts] + [False, False]
    return per_row[0], per_row[1], per_row[2]


def _taken(
    array: NDArray[Any], axis: int, order: Sequence[int], old_cap: int, cap: int, name: str
) -> NDArray[Any]:
    if is_tiles(array):
        rows = _taken(from_tiles(array)[:old_cap], axis, order, old_cap, cap, name)
        return to_tiles(rows)
    assert array.shape[axis] == old_cap, (
        f"array {name} has {array.shape} and no {old_cap} rows on axis {axis}"
    )
    out = poison((*array.shape[:axis], cap, *array.shape[axis + 1 :]), array.dtype)
    out[(slice(None),) * axis + (slice(0, len(order)),)] = np.take(array, list(order), axis)
    return out


def _natural(array: NDArray[Any]) -> NDArray[Any]:
    """A tile image by rows, anything else as it is."""
    return from_tiles(array) if is_tiles(array) else array


def _raw(array: NDArray[Any]) -> NDArray[Any]:
    """The array's elements as unsigned words (a view where its memory is whole)."""
    size = array.dtype.itemsize
    return array.view(np.dtype(f"u{size}") if size in (1, 2, 4, 8) else np.dtype(np.uint8))
