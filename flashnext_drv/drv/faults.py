"""What is known and done about every driver call: counts, a ring of the last ones, planned failures,
refusals.

`drv/api.py` calls `enter` before each driver call and `failed` after a bad one; tests and `tools` use the
rest.  What must stay true: counts are kept per thread, so "the n-th call" means the same call in every run;
and a call that would break a capture is refused by name before the driver sees it.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from ..errors import UsageError

__all__ = ["RESTORING", "UNSAFE", "Count", "capturing", "count_calls", "counters", "enter", "fail_nth",
           "failed", "reset_counters", "ring", "set_capturing", "silent", "working_as"]

# Calls that invalidate a capture in thread-local mode, or that wait: the driver would refuse them late and
# vaguely.
UNSAFE: Final = frozenset({
    "cuMemAlloc", "cuMemFree", "cuMemHostAlloc", "cuMemFreeHost", "cuMemHostRegister", "cuMemHostUnregister",
    "cuStreamSynchronize", "cuStreamQuery", "cuEventSynchronize", "cuEventQuery", "cuCtxSynchronize",
    "cuModuleLoadData", "cuModuleUnload", "cuCtxCreate", "cuCtxDestroy", "cuStreamCreate", "cuStreamDestroy",
    "cuEventCreate", "cuEventDestroy", "cuGraphInstantiate", "cuGraphUpload", "cuGraphLaunch",
                           "cuGraphExecUpdate",
    "cuGraphExecDestroy"})
# Calls that put things back.  A planned failure reports an error but still makes the call, as a driver does
# that reports an older error from a free: otherwise no test of "everything fails from here on" could end
# clean.
RESTORING: Final = frozenset({"cuCtxPopCurrent", "cuCtxDestroy", "cuDevicePrimaryCtxRelease"})
_RING_CALLS: Final = 256


@dataclass
class Count:
    """Calls made by this thread inside `count_calls`.  n: of all names.  names: in order."""

    n: int = 0
    names: list[str] = field(default_factory=list)


@dataclass
class _Plan:
    nth: int
    code: int
    forever: bool
    only: str | None
    seen: int = 0
    fired: int = 0

    def hit(self, name: str) -> int:
        if self.only is not None and name != self.only:
            return 0
        self.seen += 1
        if self.seen == self.nth or (self.forever and self.seen > self.nth):
            self.fired += 1
            return self.code
        return 0


class _Thread(threading.local):
    """Per thread: call counts, the ring, the plan, open captures."""

    def __init__(self) -> None:
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.ring: deque[str | tuple[str, int]] = deque(maxlen=_RING_CALLS)
        self.plan: _Plan | None = None
        self.counting: list[Count] = []
        self.captures = 0
        self.silent = 0
        self.special = False        # counting, captures or silent in force: one test on the hot path

    def settle(self) -> None:
        """Call after every change of counting, captures or silent."""
        self.special = bool(self.counting or self.captures or self.silent)


@dataclass
class _Named:
    """What was planned for a thread that works under a name (`working_as`)."""

    plan: _Plan | None = None
    counting: list[Count] = field(default_factory=list)


_here = _Thread()
_named: defaultdict[str, _Named] = defaultdict(_Named)


def enter(name: str) -> int:
    """Note a call about to be made.  Returns 0, or the code it must fail with.

    Raises UsageError when this thread is capturing and the call would break the capture.
    """
    here = _here
    if here.special:
        if here.silent:
            return 0
        if here.captures and name in UNSAFE:
            raise UsageError(f"{name} while a stream of this thread is being captured",
                             do="allocate, wait and instantiate before or after the capture")
        for count in here.counting:
            count.n += 1
            count.names.append(name)
    here.counts[name] += 1
    here.ring.append(name)
    return here.plan.hit(name) if here.plan is not None else 0


def failed(name: str, code: int) -> None:
    """Note in the ring that the call just made returned `code`."""
    _here.ring.append((name, code))


def counters() -> dict[str, int]:
    """Calls of this thread by name since it started or since `reset_counters`."""
    return dict(_here.counts)


def reset_counters() -> None:
    _here.counts.clear()


def ring() -> list[tuple[str, int]]:
    """This thread's last calls, oldest first, as (name, 0); a call that failed follows again with its
    code."""
    return [entry if isinstance(entry, tuple) else (entry, 0) for entry in _here.ring]


def set_capturing(change: int) -> None:
    """+1 when a capture begins on this thread, -1 when it has ended.  Called by drv/graph.py alone."""
    _here.captures += change
    _here.settle()


def capturing() -> bool:
    """Whether a stream of this thread is being captured."""
    return _here.captures > 0


@contextmanager
def fail_nth(n: int, code: int = 1, *, forever: bool = False, only: str | None = None,
             thread: str = "") -> Iterator[_Plan]:
    """Make this thread's n-th driver call from here on (1-based) return `code`; with `forever` all later ones
    too.

    only: count and fail calls of this name alone.  The call itself is not made, except those of RESTORING.
    thread: of the calls that are made under this name (`working_as`), not of this thread's.
    Gives the plan: `.seen` calls counted, `.fired` failures given.
    """
    if n < 1:
        raise UsageError("the call to fail is counted from 1", n=n)
    where = _named[thread] if thread else _here
    before, where.plan = where.plan, _Plan(n, code, forever, only)
    try:
        yield where.plan
    finally:
        where.plan = before


@contextmanager
def count_calls(thread: str = "") -> Iterator[Count]:
    """Count this thread's driver calls: the length of a fault sweep is `count.n`.  thread: as in
    `fail_nth`."""
    count = Count()
    where = _named[thread] if thread else _here
    where.counting.append(count)
    _here.settle()
    try:
        yield count
    finally:
        where.counting = [c for c in where.counting if c is not count]
        _here.settle()


@contextmanager
def working_as(name: str) -> Iterator[None]:
    """What was planned and is counted for threads of this name holds for this one inside: a thread that
    works for another one is reached so."""
    before = _here.plan, _here.counting
    _here.plan, _here.counting = _named[name].plan, list(_named[name].counting)
    _here.settle()
    try:
        yield
    finally:
        _here.plan, _here.counting = before
        _here.settle()


@contextmanager
def silent() -> Iterator[None]:
    """Calls in here are neither counted nor failed: for what a report or an error message looks up."""
    _here.silent += 1
    _here.settle()
    try:
        yield
    finally:
        _here.silent -= 1
        _here.settle()
