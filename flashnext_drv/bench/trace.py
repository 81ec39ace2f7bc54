"""What ran: every driver call with its time, every piece of work on a stream with the device's time, and the
two as Chrome-trace JSON (Perfetto and chrome://tracing open it).

Called by cli/trace.py.  What must stay true: work inside a capture is shown as captured and never as run;
device times come from timing events before and after each piece, so they include what the device needs to
begin it, and pieces do not overlap their neighbours on a stream; the events belong to the phase, and are gone
when it ends.

    host thread   | cuLaunchKernel | ...                          clock of the host
    stream        [event| kernel |event] [event| copy |event]     elapsed since a base event, which the host
                                                                  waited for when it was recorded
"""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from ..drv import api, faults
from ..drv.context import Context
from ..drv.graph import read_arguments
from ..drv.memory import Span
from ..drv.stream import Event, Stream, elapsed_ms
from ..drv.watch import watched
from ..errors import UsageError
from ..lifetime import Undo
from .graph_view import Label, Labels, declared

__all__ = ["DeviceWork", "HostCall", "Phase", "Recorder", "Traced", "Where", "chrome_trace", "sums",
           "write_trace"]

# What a call gives to a stream, and where in its arguments the stream stands.
_WORK: Final = {"cuLaunchKernel": ("kernel", 8), "cuLaunchKernelEx": ("kernel", 8),
                "cuMemcpyHtoDAsync": ("copy", 3),
                "cuMemcpyDtoHAsync": ("copy", 3), "cuMemcpyAsync": ("copy", 3),
                "cuMemcpyPeerAsync": ("copy", 5), "cuMemsetD8Async": ("fill", 3),
                "cuGraphLaunch": ("replay", 1), "cuStreamWaitEvent": ("wait", 0)}
_WAITS: Final = frozenset({"cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "cuStreamQuery",
                           "cuEventQuery"})
_EVENTS: Final = 2048       # timing events of a phase; when all are in use the phase waits and begins anew


def _plainly(name: str, args: Sequence[Any]) -> Sequence[Any]:
    """A call's arguments; those of cuLaunchKernelEx in the places where cuLaunchKernel has them."""
    if name != "cuLaunchKernelEx":
        return args
    c, function, *rest = args
    return (function, c.gridDimX, c.gridDimY, c.gridDimZ, c.blockDimX, c.blockDimY, c.blockDimZ,
            c.sharedMemBytes, c.hStream, *rest)


class Traced(Protocol):
    """What a phase needs of a rank."""

    ctx: Context
    stream: Stream

    @property
    def spans(self) -> dict[str, Span]: ...


@dataclass(frozen=True)
class HostCall:
    """One driver call.  Microseconds since the recorder was made.  i_work: the work it gave to a stream, or
    -1.  captured: it was recorded into a graph and ran nothing."""

    name: str
    thread: str
    start_us: float
    end_us: float
    facts: Mapping[str, Any]
    i_work: int = -1
    captured: bool = False

    @property
    def kind(self) -> str:
        """launch, copy, fill, replay, wait, graph or other."""
        if self.name in _WORK:
            kind = _WORK[self.name][0]
            return {"kernel": "launch", "wait": "other"}.get(kind, kind)
        if self.name in _WAITS:
            return "wait"
        return "graph" if self.name.startswith("cuGraph") or "Capture" in self.name else "other"


@dataclass
class DeviceWork:
    """One piece of work.  kind: kernel, copy, fill, replay, or wait: the stream stood still for an event.
    Microseconds on the host's scale; facts: grid, block, layer, part, bytes, direction ..."""

    kind: str
    name: str
    stream: str
    facts: Mapping[str, Any]
    start_us: float = 0.0
    end_us: float = 0.0


@dataclass
class Phase:
    """What was recorded while one `Recorder.phase` was open."""

    label: str
    calls: list[HostCall] = field(default_factory=list)
    work: list[DeviceWork] = field(default_factory=list)


class Where:
    """Which memory an address lies in: what the process allocated since somebody began to look."""

    def __init__(self) -> None:
        self._pinned: dict[int, int] = {}               # bytes by first address, the host's and the device's
        self._host: dict[int, tuple[int, list[int]]] = {}   # of an allocation: bytes, all its addresses
        self._starts: list[int] = []

    def note(self, name: str, args: Sequence[Any], result: Sequence[Any]) -> None:
        """Take notice of a driver call that was made."""
        if name == "cuMemHostAlloc":
            self._host[int(result[1])] = (int(args[0]), [int(result[1])])
        elif name == "cuMemHostGetDevicePointer" and int(args[0]) in self._host:
            self._host[int(args[0])][1].append(int(result[1]))
        elif name == "cuMemFreeHost":
            self._host.pop(int(args[0]), None)
        else:
            return
        self._pinned = {address: size for size, addresses in self._host.values() for address in addresses}
        self._starts = sorted(self._pinned)

    def tier(self, address: int) -> str:
        """"pinned" or "device"."""
        i = bisect_right(self._starts, address) - 1
        inside = i >= 0 and address < self._starts[i] + self._pinned[self._starts[i]]
        return "pinned" if inside else "device"


class Recorder:
    """Records driver calls in phases.  A context manager: enter it before the engine is opened, so that it
    knows which memory is pinned; outside phases nothing else is kept.  Raises UsageError before a driver was
    chosen, and on a phase inside another."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self._where = Where()
        self._zero_ns = time.perf_counter_ns()
        self._open: _Recording | None = None
        self._undo = Undo()

    def __enter__(self) -> Recorder:
        self._undo.enter_context(watched(self._seen))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    @contextmanager
    def phase(self, label: str, rank: Traced) -> Iterator[Phase]:
        """Record what is done inside.  Waits for the rank's stream at both ends; the rank must stay open."""
        if self._open is not None:
            raise UsageError("a phase of a trace is open already", phase=self._open.phase.label,
                             do="end it first")
        phase = Phase(label)
        with Undo() as undo:
            recording = _Recording(phase, rank, self._where, self._zero_ns, undo)
            self._open = recording
            try:
                yield phase
            finally:
                self._open = None
            recording.finish()
        self.phases.append(phase)

    def _seen(self, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self._open is not None:
            return self._open.seen(name, call, args)
        result = call(*args)
        if not int(result[0]):
            self._where.note(name, args, result)
        return result


class _Busy(threading.local):
    now = False


class _Recording:
    """An open phase: its clock, its events, and what is kept of each call."""

    def __init__(self, phase: Phase, rank: Traced, where: Where, zero_ns: int, undo: Undo) -> None:
        self.phase = phase
        self._ctx, self._where, self._zero_ns = rank.ctx, where, zero_ns
        self._labels = Labels(rank.spans)
        self._known: dict[tuple[int, int], tuple[str, Label]] = {}
        self._busy = _Busy()
        self._lock = threading.Lock()
        self._marks = _Marks(rank, undo, self._now)

    def seen(self, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Make a call, and keep it."""
        if self._busy.now:      # the recorder's own
            return call(*args)
        captured = faults.capturing()
        if name not in _WORK or captured:
            start = self._now()
            result = call(*args)
            facts = self._facts(name, _plainly(name, args)) if name in _WORK else {}
            self._keep(name, start, self._now(), result, facts, captured=captured and name in _WORK)
            if not int(result[0]):
                self._where.note(name, args, result)
            return result
        kind, at = _WORK[name]
        given = _plainly(name, args)
        facts = self._facts(name, given)
        with self._lock:
            stream = self._ctx.stream_names.get(int(given[at]), f"stream {int(given[at]):#x}")
            with self._own():
                self._marks.make_room()
                first = self._marks.take(given[at])
            start = self._now()
            result = call(*args)
            end = self._now()
            i_work = -1
            if int(result[0]):
                self._marks.give_back(first)
            else:
                with self._own():
                    last = self._marks.take(given[at])
                i_work = len(self.phase.work)
                title = facts.get("kernel") or facts.get("graph") or facts.get("direction") or kind
                work = DeviceWork(kind, str(title), stream, facts)
                self.phase.work.append(work)
                self._marks.pending.append((work, first, last))
        self._keep(name, start, end, result, facts, i_work)
        return result

    def finish(self) -> None:
        """Wait for all work and read its times."""
        with self._own():
            self._marks.settle()

    @contextmanager
    def _own(self) -> Iterator[None]:
        self._busy.now = True
        try:
            yield
        finally:
            self._busy.now = False

    def _now(self) -> float:
        return (time.perf_counter_ns() - self._zero_ns) / 1000

    def _keep(self, name: str, start: float, end: float, result: Sequence[Any], facts: Mapping[str, Any],
              i_work: int = -1, captured: bool = False) -> None:
        if int(result[0]):
            facts = {**facts, "code": int(result[0])}
        self.phase.calls.append(HostCall(name, threading.current_thread().name, start, end, facts, i_work,
                                         captured))

    def _facts(self, name: str, args: Sequence[Any]) -> dict[str, Any]:
        if name in ("cuLaunchKernel", "cuLaunchKernelEx"):
            kernel, label = self._label(int(args[0]), int(args[9]))
            return {"kernel": kernel, "grid": list(args[1:4]), "block": list(args[4:7]),
                    "layer": label.layer, "part": label.part, "reads": list(label.reads)}
        if name == "cuMemcpyAsync":
            tiers = (self._where.tier(int(args[1])), self._where.tier(int(args[0])))
            return {"bytes": int(args[2]), "direction": " to ".join(tiers)}
        if name in ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync"):
            to = name == "cuMemcpyHtoDAsync"
            return {"bytes": int(args[2]), "direction": "host to device" if to else "device to host"}
        if name == "cuMemcpyPeerAsync":
            return {"bytes": int(args[4]), "direction": "device to device of another context"}
        if name == "cuGraphLaunch":
            return {"graph": self._ctx.graph_names.get(int(args[0]), "?")}
        return {"bytes": int(args[2])} if name == "cuMemsetD8Async" else {}

    def _label(self, function: int, address: int) -> tuple[str, Label]:
        """What a launch is.  assumes: launches that run inside a phase live as long as it does."""
        key = (function, address)
        if key not in self._known:
            kernel = self._ctx.function_names.get(function, "?")
            spec = declared().get(kernel)
            sizes = [size for _, size in spec.offsets()] if spec is not None else []
            self._known[key] = (kernel, self._labels.launch(kernel, read_arguments(address, sizes)))
        return self._known[key]


class _Marks:
    """Timing events before and after pieces of work.  pending: work whose events were not read."""

    def __init__(self, rank: Traced, undo: Undo, now: Callable[[], float]) -> None:
        self._ctx, self._stream, self._undo = rank.ctx, rank.stream, undo
        self.pending: list[tuple[DeviceWork, int, int]] = []
        self._free: list[int] = []
        self._events: list[Event] = []
        self._bases = [undo.enter_context(Event(rank.ctx, f"trace.base{i}", timing=True)) for i in range(2)]
        self._stream.synchronize()
        self._stream.record(self._bases[0])
        self._bases[0].synchronize()
        self._base_us = now()
        self._ends: dict[str, float] = {}

    def make_room(self) -> None:
        """At least two events are free afterwards."""
        if len(self.pending) * 2 + 2 > _EVENTS:
            self.settle()

    def take(self, stream: Any) -> int:
        """Record a free event on the stream of that handle; its index."""
        if not self._free:
            self._free.append(len(self._events))
            name = f"trace.{len(self._events)}"
            self._events.append(self._undo.enter_context(Event(self._ctx, name, timing=True)))
        i = self._free.pop()
        api.cuEventRecord(self._events[i].handle, stream)
        return i

    def give_back(self, i_event: int) -> None:
        self._free.append(i_event)

    def settle(self) -> None:
        """Wait for the pending work, give it its times, and begin anew from a later base."""
        for work, first, last in self.pending:
            self._events[last].synchronize()
            start = self._base_us + 1000 * elapsed_ms(self._bases[0], self._events[first])
            end = self._base_us + 1000 * elapsed_ms(self._bases[0], self._events[last])
            work.start_us = max(start, self._ends.get(work.stream, start))      # f32 milliseconds round
            work.end_us = max(end, work.start_us)
            self._ends[work.stream] = work.end_us
            self._free += [first, last]
        self.pending.clear()
        self._stream.record(self._bases[1])
        self._bases[1].synchronize()
        self._base_us += 1000 * elapsed_ms(*self._bases)
        self._bases.reverse()


def chrome_trace(phases: Sequence[Phase], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The phases in the Chrome trace format: for each a process of host threads and one of streams, and an
    arrow from each call to the work it gave.  facts: kept as otherData."""
    events: list[dict[str, Any]] = []
    flow = 0
    for i_phase, phase in enumerate(phases):
        host, device = 2 * i_phase + 1, 2 * i_phase + 2
        tracks: dict[tuple[int, str], int] = {}
        for pid, what in ((host, "host driver calls"), (device, "device streams")):
            events.append(_meta("process_name", pid, 0, f"{phase.label}: {what}"))
            events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0,
                           "args": {"sort_index": pid}})

        def track(pid: int, name: str, known: dict[tuple[int, str], int] = tracks) -> int:
            if (pid, name) not in known:
                known[(pid, name)] = len(known) + 1
                events.append(_meta("thread_name", pid, known[(pid, name)], name))
            return known[(pid, name)]

        for call in phase.calls:
            tid = track(host, call.thread)
            name = f"{call.name} (captured)" if call.captured else call.name
            events.append(_span(name, call.kind, host, tid, call.start_us, call.end_us, call.facts))
            if call.i_work >= 0:
                work, flow = phase.work[call.i_work], flow + 1
                to = track(device, work.stream)
                arrow = {"name": "gives", "cat": "flow", "id": flow}
                events.append({**arrow, "ph": "s", "pid": host, "tid": tid, "ts": call.start_us})
                events.append({**arrow, "ph": "f", "bp": "e", "pid": device, "tid": to, "ts": work.start_us})
        for work in phase.work:
            events.append(_span(work.name, work.kind, device, track(device, work.stream), work.start_us,
                                work.end_us, work.facts))
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": dict(facts)}


def write_trace(path: str | Path, trace: Mapping[str, Any]) -> None:
    """Write the JSON, an event a line.  Raises UsageError when the file cannot be written."""
    rest = {name: value for name, value in trace.items() if name != "traceEvents"}
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in trace["traceEvents"])
    try:
        Path(path).write_text(f'{json.dumps(rest)[:-1]}, "traceEvents": [\n{lines}\n]}}\n', encoding="utf-8")
    except OSError as error:
        raise UsageError("a trace cannot be written", file=str(path), because=str(error.strerror)) from error


def sums(work: Sequence[DeviceWork], key: Callable[[DeviceWork], str]) -> list[dict[str, Any]]:
    """Count and device time of work by `key` ("" is left out), longest first: name, n, ms, us_each, share."""
    found: dict[str, list[float]] = {}
    for each in work:
        if name := key(each):
            found.setdefault(name, []).append(each.end_us - each.start_us)
    total = sum(map(sum, found.values())) or 1.0
    return [{"name": name, "n": len(times), "ms": sum(times) / 1000, "us_each": sum(times) / len(times),
             "share": sum(times) / total}
            for name, times in sorted(found.items(), key=lambda item: (-sum(item[1]), item[0]))]


def _meta(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _span(name: str, kind: str, pid: int, tid: int, start_us: float, end_us: float,
          facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": tid, "ts": round(start_us, 3),
            "dur": round(max(end_us - start_us, 0.0), 3), "args": dict(facts)}
