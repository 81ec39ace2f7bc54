"""The stages that show a kernel's contract, one result each; every kernel that is checked goes through all.

    fp64       the case's expectation: FP64 or exact, from the operands as the kernel rounded them
    guards     zones around every array are whole, arrays that are declared read-only unchanged
    written    the case again with another poison everywhere: the expectation holds, and what is written is
    equal repeat     three runs more, outputs poisoned otherwise each time; in the simulator lanes, warps and
    blocks
               in another order each time
    order      bytes of other kernels of the order, and of the kernel it replaces (pairs.py)
    mates      rows turned round, alone, without padding; runs one token at a time (mates.py)
    integers, midpoints, nonfinite   cases made of such data (`Case.shows`) went through all of the above

Every declared case goes through all of them.  Cases are chosen in the declarations: the least shape, an odd
one at each end of a tile, batch, page or segment, every format and number of segments, the published sizes
once, as few and as many rows as fit, and one case for each kind of data; none is left out for time.

Called by worker.py.  What must stay true: a stage that does not apply to a kernel is named with its reason in
the declaration, and a stage that was not shown is a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import FlashNextError
from ..kernels.spec import STAGES, Case, KernelSpec
from ..sim import control
from .contract import (
    CheckDevice,
    Operands,
    Ran,
    Start,
    build_operands,
    inputs_kept,
    launch_case,
    poison_byte,
    poisoned_with,
)
from .mates import check_cuts, check_mates, planes
from .pairs import check_pairs

__all__ = ["Masks", "Result", "check_kernel", "poisoned_otherwise", "repeats", "written"]

Masks = dict[str, NDArray[np.bool_]]

_OTHER_POISON: Final = 0x5A  # finite in every float format
_REPEATS: Final = ((0x00, 3), (0xA5, 11), (0x7F, 77))  # poison of the outputs, simulator seed
_DATA: Final = ("integers", "midpoints", "nonfinite")


@dataclass(frozen=True)
class Result:
    """One stage of one case ("" for all of a kernel).  text: what was seen, or why it fails.  exempt: the
    stage does not apply, and text says why."""

    kernel: str
    case: str
    stage: str
    ok: bool
    text: str = ""
    exempt: bool = False


def check_kernel(open_device: Callable[[], CheckDevice], spec: KernelSpec, seed: int = 0) -> Iterator[Result]:
    """Every stage of every case of a kernel.  open_device: gives a device that works, a fresh one after a
    broken one."""
    passed: dict[str, bool] = {}
    shown: set[str] = set()
    for case in spec.cases:
        results = list(_check_case(open_device, spec, case, seed))
        yield from results
        passed[case.name] = all(one.ok for one in results)
        shown.update(one.stage for one in results)
    for stage in _DATA:
        cases = [case.name for case in spec.cases if stage in case.shows]
        for name in cases:
            text = "" if passed[name] else "the case fails another stage"
            yield Result(spec.name, name, stage, passed[name], text)
            shown.add(stage)
    for stage in STAGES:
        if stage in shown:
            continue
        why = spec.exempt.get(stage, "")
        yield Result(
            spec.name,
            "",
            stage,
            bool(why),
            why or "not shown, and the declaration does not say why",
            exempt=bool(why),
        )


def _check_case(
    open_device: Callable[[], CheckDevice], spec: KernelSpec, case: Case, seed: int
) -> Iterator[Result]:
    def result(stage: str, what: Callable[[], object]) -> Result:
        try:
            done = what()
        except (AssertionError, FlashNextError) as error:
            return Result(spec.name, case.name, stage, False, f"{type(error).__name__}: {error}"[:2000])
        return Result(spec.name, case.name, stage, True, done if isinstance(done, str) else "")

    given = build_operands(spec.name, case, seed)
    first: list[Ran] = []
    yield result("guards", lambda: _run_guarded(open_device(), spec, given, first))
    if not first:
        return
    ran = first[0]
    yield result("fp64", lambda: given.expect(ran.found))
    other, masks = poisoned_otherwise(spec, case, given, seed)
    yield result("written", lambda: written(open_device(), spec, other, ran, masks))
    yield result("repeat", lambda: repeats(open_device(), spec, given, ran, masks))
    mates = result("mates", lambda: _mates(open_device(), spec, given, ran))
    if mates.text or not mates.ok:
        yield mates
    pairs = result("order", lambda: check_pairs(open_device(), spec, case, given, ran))
    if pairs.text or not pairs.ok:
        yield pairs
    if "nonfinite" in case.shows:
        yield result("nonfinite", lambda: _reached(ran))


def _run_guarded(device: CheckDevice, spec: KernelSpec, given: Operands, out: list[Ran]) -> None:
    ran = launch_case(device, spec, given)
    inputs_kept(spec, ran.sent, ran.found)
    out.append(ran)


def written(
    device: CheckDevice,
    spec: KernelSpec,
    other: Operands,
    first: Ran,
    masks: Masks,
    start: Start | None = None,
) -> None:
    """Run a case whose padding and outputs hold another poison, against its expectation and the first run."""
    with poisoned_with(_OTHER_POISON):
        ran = launch_case(device, spec, other, start)
        other.expect(ran.found)
    _same_writes(first, ran, masks, _OTHER_POISON)


def poisoned_otherwise(
    spec: KernelSpec, case: Case, given: Operands, seed: int = 0
) -> tuple[Operands, Masks]:
    """The case with another poison, and of each output the elements that hold poison before the launch."""
    with poisoned_with(_OTHER_POISON):
        other = build_operands(spec.name, case, seed)
    return other, {
        name: _is(given.arrays[name], poison_byte()) & _is(other.arrays[name], _OTHER_POISON)
        for name in given.outputs
    }


def repeats(
    device: CheckDevice,
    spec: KernelSpec,
    given: Operands,
    first: Ran,
    masks: Masks,
    start: Start | None = None,
) -> None:
    """Run again with other poison in the outputs, in the simulator in other orders; AssertionError when a
    byte that is written differs, or one that was not is written."""
    try:
        for byte, seed in _REPEATS:
            if control.attached():
                control.set_seed(seed)
            arrays = dict(given.arrays)
            for name, mask in masks.items():
                arrays[name] = np.ascontiguousarray(arrays[name]).copy()
                _bytes(arrays[name])[mask.reshape(-1)] = byte
            ran = launch_case(device, spec, replace(given, arrays=arrays), start)
            _same_writes(first, ran, masks, byte)
    finally:
        if control.attached():
            control.set_seed(0)


def _same_writes(first: Ran, other: Ran, masks: Masks, byte: int) -> None:
    """Elements that held poison and hold it still in both runs were not written; all others must be equal."""
    for name, mask in masks.items():
        a, b = first.found[name], other.found[name]
        left = mask & _is(a, poison_byte()) & _is(b, byte)
        for x, y in zip(planes(a), planes(b), strict=True):
            differ = (x != y) & ~left
            assert not differ.any(), (
                f"{name}: {int(differ.sum())} of {x.size} elements differ between two runs (outputs first "
                f"filled with 0x{poison_byte():02x}, then 0x{byte:02x}), first at "
                f"{tuple(int(i) for i in np.argwhere(differ)[0])}"
            )


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """(elements, bytes of one) of a contiguous array."""
    return array.reshape(-1).view(np.uint8).reshape(-1, array.dtype.itemsize)


def _is(array: NDArray[Any], byte: int) -> NDArray[np.bool_]:
    """Which elements hold that byte alone."""
    whole: NDArray[np.bool_] = (_bytes(np.ascontiguousarray(array)) == byte).all(axis=1).reshape(array.shape)
    return whole


def _mates(device: CheckDevice, spec: KernelSpec, given: Operands, ran: Ran) -> str:
    n, cuts = check_mates(device, spec, given, ran), check_cuts(device, spec, given, ran)
    said = [f"{n} selections of rows"] if n else []
    return ", ".join(said + ([f"{cuts} tokens one at a time"] if cuts else []))


def _reached(ran: Ran) -> str:
    """At least one NaN, infinity or flag among the outputs of a case of nonfinite data."""
    counts: dict[str, int] = {}
    for name, array in ran.outputs.items():
        names = array.dtype.names or ("",)
        for field in names:
            values = array[field] if field else array
            if values.dtype.kind == "f":
                live = ~_is(np.ascontiguousarray(values), 0xFF)
                counts[name] = counts.get(name, 0) + int((~np.isfinite(values) & live).sum())
            elif values.dtype.kind == "u":
                counts.setdefault(name, 0)
                counts[name] += int(((values == 1) | (values == np.iinfo(values.dtype).max)).sum())
    assert sum(counts.values()), f"no NaN, infinity or flag reached an output: {counts}"
    return ", ".join(f"{name}: {n} not finite" for name, n in counts.items() if n)
