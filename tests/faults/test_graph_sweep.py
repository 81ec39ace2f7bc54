"""Every graph call of a generation fails, once and from there on, on the calling thread and on the thread
that makes executables: the same tokens, counted, nothing left.

The graphs are made anew for each fault, on one engine, with room for two executables and a small reach of
attention, so that a generation also evicts and updates.  `--slow -s` runs all calls and prints the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest

from flashnext_drv.drv import faults
from flashnext_drv.drv.builder import THREAD
from flashnext_drv.engine.engine import Engine, Limits
from flashnext_drv.engine.graphs import GraphCounters, GraphSet
from flashnext_drv.model import layout as layout_module

from .sweep import PACK, PROMPT

pytestmark = pytest.mark.sim
MAKING = ("cuGraphInstantiate", "cuGraphUpload", "cuGraphExecUpdate")
MAIN = ("cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphLaunch", *MAKING)
CLOSING = ("cuGraphDestroy", "cuGraphExecDestroy")
LATE = (*MAKING, "cuStreamSynchronize", "cuMemGetInfo", "cuCtxPushCurrent", "cuCtxPopCurrent")


@dataclass(frozen=True)
class Fault:
    """The n-th call of this name, on this thread ("" or THREAD), returns 2."""

    name: str
    n: int
    forever: bool
    thread: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.n}{' from there on' if self.forever else ''} {self.thread}"


class Planned:
    """The fault in force.  fired: how often it was given."""

    def __init__(self, fault: Fault) -> None:
        self._plan = faults.fail_nth(fault.n, 2, forever=fault.forever, only=fault.name, thread=fault.thread)
        self.fired = 0

    def __enter__(self) -> None:
        self._fired = self._plan.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.fired = self._fired.fired
        self._plan.__exit__(*error)


class Lives:
    """Generations on one engine, each with graphs of its own."""

    def __init__(self, engine: Engine, late: bool) -> None:
        self.engine, self.late = engine, late
        self.n_new = 8 if late else 4
        engine.rank.use_graphs = False
        self.wanted = engine.generate(PROMPT, max_new_tokens=self.n_new, stop_ids=()).tokens
        engine.rank.use_graphs = True
        self.calls: dict[str, Counter[str]] = {}
        counters = self.live(counted=True)
        assert counters.failures == counters.updates_refused == 0 < counters.replays + counters.head_replays
        assert counters.updates > 0 < counters.evicted
        assert late == bool(self.calls[THREAD])

    def live(self, fault: Planned | None = None, counted: bool = False) -> GraphCounters:
        """One generation; its tokens, and that its graphs leave nothing, are asserted."""
        rank, ledger = self.engine.rank, self.engine.ledger
        before, limits = rank.graphs, replace(self.engine.limits, graph_async=self.late)
        with GraphSet(rank.ctx, before._captured, limits, before._heads) as graphs:
            rank.graphs = graphs
            try:
                with fault or nullcontext(), faults.count_calls() as mine, faults.count_calls(THREAD) as its:
                    made = self.engine.generate(PROMPT, max_new_tokens=self.n_new, stop_ids=())
            finally:
                rank.graphs = before
        if counted:
            self.calls = {"": Counter(mine.names), THREAD: Counter(its.names)}
        assert made.tokens == self.wanted
        assert ledger.live("graph") == ledger.live("graph_exec") == {}
        assert set(ledger.live("stream")) == {"compute", "context.service"}
        assert len(graphs.off) == graphs.counters.failures
        return graphs.counters

    def faults(self, thread: str, names: tuple[str, ...], both: bool = True) -> Iterator[Fault]:
        for name in names:
            for n in range(1, self.calls[thread][name] + 1):
                yield Fault(name, n, False, thread)
                # a capture that can never be ended breaks the context: tests/faults/test_graph_fallback.py
                if both and name != "cuStreamEndCapture":
                    yield Fault(name, n, True, thread)

    def check(self, fault: Fault) -> str:
        """What the fault led to: "eager" (identities off) or "instantiated" (instead of updated)."""
        planned = Planned(fault)
        counters = self.live(planned)
        assert planned.fired >= 1, fault
        if fault.name == "cuGraphExecUpdate":
            assert counters.updates_refused == planned.fired and counters.failures == 0, fault
            return "instantiated"
        assert counters.failures >= 1 and counters.eager_rounds + counters.eager_heads > 0, fault
        assert fault.forever or counters.failures == 1, fault
        if fault.thread == "" and fault.name in MAIN:
            assert counters.failures == planned.fired, fault
        return "eager"

    def run(self, some: list[Fault]) -> None:
        """Check each; the life after the last is a good one."""
        found = Counter((fault.name, fault.forever, self.check(fault)) for fault in some)
        assert self.live().failures == 0
        for (name, forever, what), n in sorted(found.items()):
            print(f"{name:<22} {'from there on' if forever else 'once':<14} {what:<13} {n:>4}")
        print(f"lives {sum(found.values())}", flush=True)


@pytest.fixture
def engine(device_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    if device_name != "sim":
        pytest.skip("the counts are the simulator's")
    monkeypatch.setattr(layout_module, "CONTEXT_BUCKET", 2)
    with Engine.open(PACK, Limits(context_tokens=64, deep="off", graphs=2), device=device_name) as opened:
        yield opened


def sampled(some: Iterator[Fault]) -> list[Fault]:
    """The first and the last call of each kind."""
    kinds: dict[tuple[str, bool], list[Fault]] = {}
    for fault in some:
        kinds.setdefault((fault.name, fault.forever), []).append(fault)
    return [fault for found in kinds.values() for fault in (found[0], found[-1])[: len(found)]]


def test_sample_on_the_calling_thread(engine: Engine) -> None:
    lives = Lives(engine, late=False)
    some = sampled(lives.faults("", MAIN)) + sampled(lives.faults("", CLOSING, both=False))
    assert {fault.name for fault in some} == {*MAIN, *CLOSING} and len(some) > 20
    lives.run(some)


def test_sample_on_the_thread_that_makes_executables(engine: Engine) -> None:
    lives = Lives(engine, late=True)
    some = sampled(lives.faults(THREAD, LATE))
    assert {fault.name for fault in some} >= {*LATE} - {"cuGraphExecUpdate"} and len(some) > 12
    lives.run(some)


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_whole_sweep_of_graph_calls(engine: Engine, late: bool) -> None:
    lives = Lives(engine, late)
    some = list(lives.faults(THREAD, LATE)) if late else [
        *lives.faults("", MAIN), *lives.faults("", CLOSING, both=False)]
    lives.run(some)
