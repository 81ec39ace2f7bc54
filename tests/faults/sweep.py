"""One short life of an engine on the golden micro pack, and what must hold after a driver call in it failed.

Used by the tests of this folder.  A life is open, 3 prompt tokens, 3 new ones, close: every driver call it
makes is numbered by drv/faults.  Most lives leave kernel bodies out (sim setting skip_kernels; the draws then
read as token 0), the others compute and their tokens are compared with the golden run's.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from flashnext_drv.drv import api, faults
from flashnext_drv.drv.context import here
from flashnext_drv.drv.memory import fill_bytes
from flashnext_drv.engine import engine as engine_module
from flashnext_drv.engine.engine import Engine, Limits, Prefill
from flashnext_drv.errors import ContextLost, DriverError, FlashNextError, OutOfMemory
from flashnext_drv.ledger import Ledger
from flashnext_drv.model.pack import Pack
from flashnext_drv.sim import control
from flashnext_drv.state.ring import Ring

PACK = Path(__file__).parents[1] / "data" / "exl3_micro" / "pack"
READ_PLAN = Ring._read_plan
PROMPT = (11, 22, 33)
N_NEW = 3

INVALID_VALUE, OUT_OF_MEMORY, NOT_READY = 1, 2, 600
ILLEGAL_ADDRESS, LAUNCH_FAILED, INVALIDATED = 700, 719, 901
STICKY = (ILLEGAL_ADDRESS, LAUNCH_FAILED)
CODES = (INVALID_VALUE, OUT_OF_MEMORY, NOT_READY, ILLEGAL_ADDRESS, LAUNCH_FAILED, INVALIDATED)
TAKES_MEMORY = frozenset({
    "cuCtxCreate", "cuStreamCreate", "cuEventCreate", "cuModuleLoadData", "cuModuleGetFunction", "cuMemAlloc",
    "cuMemHostAlloc", "cuMemcpyHtoDAsync", "cuLaunchKernel", "cuLaunchKernelEx", "cuStreamEndCapture",
    "cuGraphInstantiate", "cuGraphUpload", "cuGraphLaunch"})
WAITS = frozenset({"cuStreamSynchronize", "cuEventSynchronize"})
BEFORE_A_CONTEXT = frozenset({"cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuCtxCreate"})
ALLOCATES = frozenset({"cuMemAlloc", "cuMemHostAlloc"})
# What belongs to making and replaying a graph: a failure there may end in eager rounds with the same tokens.
GRAPH_STAGE = frozenset({
    "cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphUpload", "cuGraphLaunch",
    "cuMemGetInfo", "cuLaunchKernel", "cuLaunchKernelEx"})


@dataclass(frozen=True)
class Fault:
    """Call n (1-based, called `name`) returns `code`; with `forever` every later call too."""

    n: int
    name: str
    code: int
    forever: bool

    def __str__(self) -> str:
        return f"call {self.n} {self.name} -> {self.code}{' from there on' if self.forever else ''}"


@dataclass
class Life:
    """What one life gave.  refused: why it has no deep pass.  error: what reached the caller, else None."""

    ledger: Ledger
    tokens: list[int] = field(default_factory=list)
    graph_failures: int = 0
    refused: str = ""
    error: DriverError | None = None


class Bench:
    """Lives in this process, all on one pack; knows what the simulator held before the first.

    deep: Limits.deep; with "open" or "request" the prompt takes the deep pass where it is there.
    lines: Limits.expert_lines.  ngram: Limits.ngram.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        deep: str = "off",
        lines: int | None = None,
        ngram: str = "pinned",
    ) -> None:
        self._patch = monkeypatch
        self.limits = Limits(context_tokens=64, deep=deep, deep_rows=2, expert_lines=lines, ngram=ngram)
        self.pack = Pack.open(PACK)
        self.before = held()
        self._plans = Plans(monkeypatch)
        first = self.live(compute=True)
        assert first.error is None and first.graph_failures == 0
        assert first.refused == ("Limits.deep is off" if deep == "off" else "")
        self.tokens = first.tokens
        with faults.count_calls() as count:
            assert self.live(compute=False).error is None
        self.names = count.names
        self.capturing = in_capture(count.names)
        self.making = making_the_deep_pass(count.names) if deep != "off" else range(0)
        assert held() == self.before

    def live(self, compute: bool, fault: Fault | None = None) -> Life:
        """One life.  Errors of our tree end in `Life.error`; any other one is a failed test."""
        life = Life(Ledger())
        self._patch.setattr(engine_module, "Ledger", lambda: life.ledger)
        control.set_skip_kernels(not compute)
        self._plans.begin(replay=not compute)
        try:
            with planned(fault), Engine.open(self.pack, self.limits, device="sim") as engine:
                if not compute:
                    with faults.silent():
                        for name in ("tokens", "status"):
                            fill_bytes(engine.rank.stream, engine.rank.work[name], 0)
                made = engine.generate(PROMPT, max_new_tokens=N_NEW, stop_ids=(), prefill=Prefill())
                life.tokens, life.graph_failures = made.tokens, made.counters["graph_failures"]
                life.refused = engine.rank.deep_refused
                refusals, rows = made.counters["deep_refusals"], made.counters["deep_rows"]
                if self.limits.deep != "off":
                    assert (refusals, rows) == ((1, 0) if life.refused else (0, len(PROMPT))), fault
        except DriverError as error:
            life.error = error
        except ExceptionGroup as group:     # several steps of one close failed, the first one first
            first = group.exceptions[0]
            assert isinstance(first, DriverError), repr(group)
            assert all(isinstance(each, FlashNextError) for each in group.exceptions), repr(group)
            life.error = first
        finally:
            control.set_skip_kernels(False)
        return life

    def faults(self) -> list[Fault]:
        """Every fault of the sweep."""
        return [Fault(n, name, code, forever)
                for n, name in enumerate(self.names, 1)
                for code in plausible(name, n in self.capturing)
                for forever in (False, True)]

    def check(self, fault: Fault, compute: bool) -> str:
        """Live with the fault; "error" or "fallback".  Raises AssertionError on anything else."""
        life = self.live(compute, fault)
        try:
            life.ledger.require_empty()
        except Exception as error:
            raise AssertionError(f"{fault}: {error}") from error
        # A graph that cannot be destroyed outlives its context, and must be on the list of what was lost.
        self.before["handles"] += sum(entry.tier == "graph" for entry in life.ledger.lost())
        assert held() == self.before, f"{fault}: the simulator still holds {held()}, before {self.before}"
        assert here.top is None and here.capture is None and not faults.capturing(), fault
        with faults.silent():
            assert int(api.cuCtxGetCurrent()) == 0, f"{fault}: a context is current"
        if life.error is not None:
            self._check_error(fault, life.error)
            return "error"
        assert fault.code not in STICKY, f"{fault}: no error reached the caller"
        if self.limits.deep != "off" and life.refused:
            assert f"{fault.name}(" in life.refused and life.graph_failures == 0, f"{fault}: {life.refused}"
        else:
            assert fault.name in GRAPH_STAGE, f"{fault}: no error reached the caller"
            assert life.graph_failures == 1, f"{fault}: a graph failed and was not counted"
        assert life.tokens == (self.tokens if compute else [0] * N_NEW), f"{fault}: tokens {life.tokens}"
        return "fallback"

    def _check_error(self, fault: Fault, error: DriverError) -> None:
        # the eager round that stands in for a graph fails at its first launch, where no launch was before
        calls = {*self.names[fault.n - 1:], "cuLaunchKernelEx"} if fault.forever else {fault.name}
        assert error.call in calls and error.code == fault.code, f"{fault}: {error!r} names another failure"
        kind = (OutOfMemory if fault.code == OUT_OF_MEMORY else ContextLost if fault.code in STICKY
                else DriverError)
        assert type(error) is kind, f"{fault}: {error!r}"
        assert f"{error.call}(" in str(error) and "returned CUDA_ERROR_" in str(error)
        if error.call in ALLOCATES and fault.code == OUT_OF_MEMORY:
            text = str(error)
            assert "largest holder" in text or "nothing of ours holds" in text, f"{fault}: {text}"


class Plans:
    """What the ring reads of each layer's routing: kept from the first life, given again where no kernel
    runs, so that both make the same calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._kept: list[np.ndarray] = []
        self._n_read, self._replay = 0, False
        monkeypatch.setattr(Ring, "_read_plan", lambda ring: self._read(ring))

    def _read(self, ring: Ring) -> np.ndarray:
        self._n_read += 1
        if self._replay:
            return self._kept[self._n_read - 1].copy()
        plan = READ_PLAN(ring)
        if self._n_read > len(self._kept):
            self._kept.append(plan.copy())
        return plan

    def begin(self, replay: bool) -> None:
        """A life begins."""
        self._n_read, self._replay = 0, replay


def held() -> dict[str, int]:
    """What the simulator holds for this process."""
    return {name: control.counter(name) for name in ("contexts", "handles", "used_bytes")}


@contextmanager
def planned(fault: Fault | None) -> Iterator[None]:
    if fault is None:
        yield
        return
    with faults.fail_nth(fault.n, fault.code, forever=fault.forever) as plan:
        yield
        # reached only when no error came out
        assert plan.fired, f"{fault} was not reached"


def in_capture(names: list[str]) -> frozenset[int]:
    """Numbers of the calls from each cuStreamBeginCapture to its end."""
    inside: set[int] = set()
    open_ = False
    for n, name in enumerate(names, 1):
        open_ = open_ or name == "cuStreamBeginCapture"
        if open_:
            inside.add(n)
        open_ = open_ and name != "cuStreamEndCapture"
    return frozenset(inside)


def making_the_deep_pass(names: list[str]) -> range:
    """Numbers of the calls that make the deep pass: from its arena, the last one allocated, to the end of
    the launches on no rows that follow (the guard zones' fill waits first)."""
    first = max(n for n, name in enumerate(names, 1) if name == "cuMemAlloc")
    waits = [n for n, name in enumerate(names, 1) if n > first and name == "cuStreamSynchronize"]
    return range(first, waits[1] + 1)


def plausible(name: str, capturing: bool) -> Iterator[int]:
    """The codes that a driver may give for this call."""
    yield INVALID_VALUE
    if name in TAKES_MEMORY:
        yield OUT_OF_MEMORY
    if name in WAITS:
        yield NOT_READY
    if name not in BEFORE_A_CONTEXT:
        yield from STICKY
    if capturing:
        yield INVALIDATED


def sample(found: list[Fault], seed: int) -> list[Fault]:
    """One fault for each (call name, code), its call and its kind chosen by the seed."""
    kinds: dict[tuple[str, int], list[Fault]] = {}
    for fault in found:
        kinds.setdefault((fault.name, fault.code), []).append(fault)
    choose = random.Random(seed)
    return [choose.choice(some) for some in kinds.values()]


def table(outcomes: Counter[tuple[int, bool, str]]) -> str:
    """Lives by code, kind and outcome."""
    lines = [f"{'code':>5} {'kind':<14} {'error':>7} {'fallback':>9}"]
    for code in CODES:
        for forever in (False, True):
            row = [outcomes[code, forever, what] for what in ("error", "fallback")]
            if sum(row):
                kind = "from there on" if forever else "once"
                lines.append(f"{code:>5} {kind:<14} {row[0]:>7} {row[1]:>9}")
    return "\n".join([*lines, f"lives {sum(outcomes.values())}"])


def run(bench: Bench, some: Iterable[Fault], seed: int) -> Counter[tuple[int, bool, str]]:
    """Check each fault; a seeded tenth computes, and a clean life follows those."""
    choose = random.Random(seed)
    outcomes: Counter[tuple[int, bool, str]] = Counter()
    for fault in some:
        compute = choose.randrange(10) == 0
        outcomes[fault.code, fault.forever, bench.check(fault, compute)] += 1
        if compute:
            after = bench.live(compute=True)
            assert after.error is None and after.tokens == bench.tokens, f"the life after {fault}: {after}"
            assert after.graph_failures == 0
    return outcomes
