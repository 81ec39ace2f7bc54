"""What is ordered before what in a recorded run of driver calls, by vector clocks.

`Recorder` notes the copies, launches, event records and waits that this process gives to the driver, and what
they read and write; `findings` says which accesses nothing orders, and which reads meet other bytes than they
are meant to.  Used by tests of the ring.  What must stay true: an order is believed only where a stream, an
event or a wait of the host makes it; how the run really went plays no part.

    host    give A | give B | ... sync e        a stream's work follows what the host did before giving it
    copy      A: write bank | record e
    compute   wait e | B: read bank             without the wait: "B reads what A writes"
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..drv import api
from ..kernels import catalog

__all__ = ["HOST", "Access", "Call", "Recorder", "findings"]

HOST = "host"
Clock = dict[str, int]


@dataclass(frozen=True)
class Access:
    """Bytes start .. start + size - 1.  holds: of a copy's destination, where its bytes came from; of a read,
    where the bytes that it wants came from; None: nothing is known or wanted."""

    start: int
    size: int
    write: bool = False
    holds: int | None = None


@dataclass(frozen=True)
class Call:
    """One step of a run.  kind: "work" on a stream or the host, "record" and "wait" of an event on a stream,
    "sync" of the host with an event, or with a whole stream where event is "".  text: for people."""

    kind: str
    where: str
    text: str
    event: str = ""
    accesses: tuple[Access, ...] = ()


def findings(calls: Sequence[Call]) -> list[str]:
    """What is wrong with a run; empty when every two accesses of the same bytes, one of them a write, are
    ordered, and every read meets the bytes it wants."""
    ends = {end for call in calls for a in call.accesses for end in (a.start, a.start + a.size)}
    memory = _Memory(sorted(ends), calls)
    clocks: dict[str, Clock] = {}
    events: dict[str, Clock] = {}
    for i, call in enumerate(calls):
        clock = clocks.setdefault(call.where, {})
        if call.kind == "sync":
            seen = events.get(call.event, {}) if call.event else clock
            _join(clocks.setdefault(HOST, {}), seen)
            continue
        _join(clock, clocks.setdefault(HOST, {}))
        if call.kind == "record":
            events[call.event] = dict(clock)
        elif call.kind == "wait":
            _join(clock, events.get(call.event, {}))
        else:
            clock[call.where] = clock.get(call.where, 0) + 1
            for access in call.accesses:
                memory.touch(i, access, clock)
    return memory.found


def _join(into: Clock, other: Clock) -> None:
    for where, n in other.items():
        if n > into.get(where, 0):
            into[where] = n


@dataclass
class _Cell:
    """Bytes between two neighbouring ends.  write: (call, where, its clock, source of these bytes); reads:
    (call, its clock), of each stream the last one since."""

    write: tuple[int, str, int, int | None] | None = None
    reads: dict[str, tuple[int, int]] = field(default_factory=dict)


class _Memory:
    """All bytes that a run touches."""

    def __init__(self, ends: list[int], calls: Sequence[Call]) -> None:
        self._ends, self._calls = ends, calls
        self._cells = [_Cell() for _ in ends]
        self.found: list[str] = []

    def touch(self, i_call: int, access: Access, clock: Clock) -> None:
        where = self._calls[i_call].where
        first = bisect_left(self._ends, access.start)
        for i in range(first, bisect_left(self._ends, access.start + access.size)):
            cell, past = self._cells[i], self._ends[i] - access.start
            source = None if access.holds is None else access.holds + past
            if cell.write is not None and clock.get(cell.write[1], 0) < cell.write[2]:
                self._say(i_call, cell.write[0], "writes" if access.write else "reads", "writes", i)
            if not access.write:
                cell.reads[where] = (i_call, clock[where])
                if source is not None and (cell.write is None or cell.write[3] != source):
                    self._say_bytes(i_call, cell, i)
                continue
            for reader, (i_read, n) in cell.reads.items():
                if clock.get(reader, 0) < n:
                    self._say(i_call, i_read, "writes", "reads", i)
            cell.write, cell.reads = (i_call, where, clock[where], source), {}

    def _say(self, i_call: int, i_other: int, does: str, other: str, i_cell: int) -> None:
        mine, theirs = self._calls[i_call], self._calls[i_other]
        self.found.append(f"call {i_call} ({mine.where}: {mine.text}) {does} what call {i_other} "
                          f"({theirs.where}: {theirs.text}) {other} at {self._ends[i_cell]:#x}: no order")

    def _say_bytes(self, i_call: int, cell: _Cell, i_cell: int) -> None:
        call = self._calls[i_call]
        holds = "no copy" if cell.write is None else f"what call {cell.write[0]} wrote"
        self.found.append(f"call {i_call} ({call.where}: {call.text}) reads other bytes than it wants at "
                          f"{self._ends[i_cell]:#x}: there is {holds}")


Expand = Callable[[Mapping[str, int], tuple[int, int, int]], Sequence[Access]]


class Recorder:
    """Notes this process's driver calls while `on`.

    names: of functions by handle, as Context.function_names.  expand: for a kernel by name, what a launch
    with these arguments and grid reads and writes, asked when the launch is given out; other kernels touch
    nothing.
    """

    def __init__(self, names: Mapping[int, str], expand: Mapping[str, Expand]) -> None:
        self.calls: list[Call] = []
        self._names, self._expand = names, expand
        self._specs = {spec.name: spec for family in catalog.families() for spec in catalog.specs(family)}

    def host(self, text: str, *accesses: Access) -> None:
        """The host reads or writes memory that the device sees."""
        self.calls.append(Call("work", HOST, text, accesses=accesses))

    @contextmanager
    def on(self) -> Iterator[Recorder]:
        """Record what is given to the driver inside.  Only one recorder of a process at a time."""
        real = {name: getattr(api, name) for name in vars(_Notes) if name.startswith("cu")}
        notes = _Notes(self)
        for name, call in real.items():
            setattr(api, name, _both(getattr(notes, name), call))
        try:
            yield self
        finally:
            for name, call in real.items():
                setattr(api, name, call)

    def launch(self, launch: Sequence[Any]) -> None:
        name = self._names[int(launch[0])]
        accesses: Sequence[Access] = ()
        if name in self._expand:
            accesses = self._expand[name](self._arguments(name, launch[9]), tuple(launch[1:4]))
        self.calls.append(Call("work", _text(launch[8]), name, accesses=tuple(accesses)))

    def _arguments(self, name: str, pointers: int) -> dict[str, int]:
        """The integer arguments of a launch, by name."""
        spec = self._specs[name]
        each = (ctypes.c_void_p * len(spec.args)).from_address(pointers)
        return {arg.name: int.from_bytes(ctypes.string_at(each[i] or 0, size), "little")
                for i, (arg, (_, size)) in enumerate(zip(spec.args, spec.offsets(), strict=True))}


class _Notes:
    """What a recorder notes of each driver call, by the call's name."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._add = recorder, recorder.calls.append

    def cuLaunchKernel(self, *launch: Any) -> None:
        self._recorder.launch(launch)

    def cuLaunchKernelEx(self, config: Any, function: Any, *rest: Any) -> None:
        # what is ordered is the same: a programmatic launch waits before it reads (fn_wait_prior)
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        self._recorder.launch((function, *grid, *block, config.sharedMemBytes, config.hStream, *rest))

    def cuMemcpyAsync(self, dst: int, src: int, size_bytes: int, stream: Any) -> None:
        moved = (Access(src, size_bytes), Access(dst, size_bytes, write=True, holds=src))
        self._add(Call("work", _text(stream), f"copy of {size_bytes} bytes", accesses=moved))

    def cuEventRecord(self, event: Any, stream: Any) -> None:
        self._add(Call("record", _text(stream), "record", _text(event)))

    def cuStreamWaitEvent(self, stream: Any, event: Any) -> None:
        self._add(Call("wait", _text(stream), "wait", _text(event)))

    def cuEventSynchronize(self, event: Any) -> None:
        self._add(Call("sync", HOST, "wait for an event", _text(event)))

    def cuStreamSynchronize(self, stream: Any) -> None:
        self._add(Call("sync", _text(stream), "wait for a stream"))


def _both(note: Callable[..., None], call: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any) -> Any:
        note(*args)
        return call(*args)

    return made


def _text(handle: Any) -> str:
    return f"{int(handle):#x}"
