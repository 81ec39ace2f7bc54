"""Prompts whose experts lie in host memory: lines, rings and prefetches of every size and kind leave the
bytes of an engine that never offloads; what is ordered before what; a ring that cannot be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext_drv.check.happens import Call, findings
from flashnext_drv.drv import faults
from flashnext_drv.drv.module import Launch
from flashnext_drv.drv.stream import Event, Stream
from flashnext_drv.engine.engine import Engine, Limits, Prefill
from flashnext_drv.errors import FlashNextError
from flashnext_drv.model.synth import SynthPack
from flashnext_drv.sim import control
from flashnext_drv.state.residency import Fill
from flashnext_drv.state.ring import PREFETCH_SHARE

from .prompts import IDS, LONG, N_NEW, deep
from .ring_schedule import recorded
from .test_experts import narrow

pytestmark = pytest.mark.sim
LIMITS = Limits(context_tokens=192, rows=16, prompt_rows=16, sequences=4, deep_rows=2, expert_lines=16,
                ring_depth=2, ring_lines=3)


@pytest.fixture
def oracle(serial_run: Any) -> Any:
    return serial_run


@pytest.fixture(scope="module")
def ring_engine(micro: Path, device: str) -> Iterator[Engine]:
    """Two banks of three lines; 16 device lines, of which tests use as many as they like."""
    with Engine.open(micro, LIMITS, device=device) as opened:
        assert opened.rank.deep is not None and opened.rank.deep.ring is not None, opened.rank.deep_refused
        yield opened


@pytest.fixture
def engine(ring_engine: Engine) -> Iterator[Engine]:
    """With three experts in device lines, no prediction of a test's own."""
    seat(ring_engine, 3)
    yield ring_engine
    ring(ring_engine).predict = None
    if ring_engine.facts.is_simulator:
        control.set_seed(0)


def ring(engine: Engine) -> Any:
    assert engine.rank.deep is not None
    return engine.rank.deep.ring


def seat(engine: Engine, n_lines: int, first: int = 0) -> None:
    """The experts first, first + 1, ... in n_lines lines of every layer, and no more lines in use."""
    layers = [[(first + i) % engine.config.n_experts for i in range(n_lines)]] * engine.config.n_layers
    with engine.rank.ctx.active():
        engine.rank.experts.seat(engine.rank.stream, layers, n_lines)
        engine.rank.stream.synchronize()


def counted(engine: Engine, before: Any) -> dict[str, int]:
    """What the ring counted since, all layers together."""
    now = ring(engine).banks.counters
    return {name: int((now[name] - before[name]).sum()) for name in now.dtype.names}


RINGS = [(depth, lines, prefetch) for depth in (1, 2, 5) for lines in (1, 3, 16)
         for prefetch in ((False, True) if lines == 3 else (depth != 2,))]


@pytest.mark.parametrize(("depth", "lines", "prefetch"), RINGS)
def test_any_ring_leaves_the_bytes_of_resident_experts(
    micro: Path, device: str, oracle: Any, prompt_run: Callable[..., Any], depth: int, lines: int,
    prefetch: bool,
) -> None:
    limits = replace(LIMITS, ring_depth=depth, ring_lines=lines, ring_prefetch=prefetch)
    with Engine.open(micro, limits, device=device) as engine:
        for n_lines, chunk in ((5, 50), (0, None) if prefetch else (16, None)):
            seat(engine, n_lines, first=13)
            before = ring(engine).banks.counters.copy()
            n_new = N_NEW if n_lines == 5 else 0
            found = prompt_run(engine, IDS, deep(chunk=chunk), n_new=n_new)
            assert not oracle.differs(replace(found, tokens=found.tokens or oracle.tokens))
            counts, chunks = counted(engine, before), 1 if chunk is None else 2
            assert counts["in_place"] == n_lines * 4 * chunks and counts["wasted"] == 0
            assert counts["copied_lines"] == (16 - n_lines) * 4 * chunks
            line_bytes = engine.rank.experts.bytes_of(0)
            assert counts["copied_bytes"] == counts["copied_lines"] * line_bytes
            assert bool(counts["prefetched"]) == (prefetch and n_lines < 16)
        if engine.facts.is_simulator:
            for arena in engine.rank.guarded_arenas():
                arena.check_guards()


@pytest.fixture(scope="module")
def short_run(deep_engine: Engine, prompt_run: Callable[..., Any]) -> Any:
    """A prompt whose second piece uses few experts, with resident experts."""
    return prompt_run(deep_engine, IDS[:24], Prefill(deep=False), n_new=2)


CUTS = (21,)


def used_of(engine: Engine, run: Callable[[], Any]) -> list[np.ndarray]:
    """(E,) bool for every layer of every chunk: the experts that have rows."""
    found: list[np.ndarray] = []
    banks = ring(engine).banks
    real = banks.layer

    def layer(i_layer: int, used: np.ndarray, *rest: Any) -> Any:
        found.append(used.copy())
        return real(i_layer, used, *rest)

    banks.layer = layer
    try:
        run()
    finally:
        del banks.layer
    return found


@pytest.fixture(scope="module")
def used(ring_engine: Engine, prompt_run: Callable[..., Any]) -> list[np.ndarray]:
    """used_of the prompt of `short_run`, in two pieces."""
    found = used_of(ring_engine, lambda: prompt_run(ring_engine, IDS[:24], deep(), CUTS))
    assert any(not each.all() for each in found)
    return found


@pytest.mark.parametrize("kind", ["right", "wrong", "half", "twice", "backwards"])
def test_predictions_of_any_kind_leave_the_same_bytes(
    engine: Engine, short_run: Any, used: list[np.ndarray], prompt_run: Callable[..., Any], kind: str
) -> None:
    asked: list[np.ndarray] = []

    def predict(i_layer: int) -> Any:
        now = used[len(asked)]
        asked.append(now)
        right, wrong = np.flatnonzero(now), np.flatnonzero(~now)
        half = np.concatenate([wrong[::2], right[::2]])
        return {"right": right, "wrong": wrong, "half": half, "twice": np.repeat(right, 2),
                "backwards": np.arange(15, -1, -1)}[kind]

    ring(engine).predict = predict
    before = ring(engine).banks.counters.copy()
    found = prompt_run(engine, IDS[:24], deep(), CUTS, n_new=2)
    assert not short_run.differs(found) and len(asked) == len(used)
    counts = counted(engine, before)
    wanted = sum(int(each[3:].sum()) for each in used)
    assert counts["copied_lines"] - counts["wasted"] == wanted and counts["prefetched"] > 0
    if kind in ("right", "twice"):
        assert counts["wasted"] == 0
    if kind == "wrong":
        assert counts["wasted"] == counts["prefetched"]


def test_few_rows_prefetch_nothing_of_their_own(engine: Engine, prompt_run: Callable[..., Any]) -> None:
    """For the first layer four rows an expert are wanted, for others a share of the layer before."""
    for n_rows, first in ((2, 0), (15, 0), (16, 6)):
        before = ring(engine).banks.counters["prefetched"].copy()
        prompt_run(engine, IDS[:n_rows], deep())
        prefetched = (ring(engine).banks.counters["prefetched"] - before).tolist()
        assert prefetched[0] == first and (n_rows > 2 or not any(prefetched))
    for share, n in ((PREFETCH_SHARE, 13), (PREFETCH_SHARE - 1e-9, 0)):
        ring(engine)._share = share
        assert len(ring(engine)._following(1)) == n
    assert len(ring(engine)._following(engine.config.n_layers)) == 0


def test_two_sequences_in_a_chunk_and_several_chunks(
    engine: Engine, oracle: Any, deep_engine: Engine
) -> None:
    with deep_engine.sequence() as alone:
        alone.extend(LONG[:30])
        deep_engine.prompt([alone], prefill=Prefill(deep=False))
        expected = deep_engine.export_state(alone)
    for chunk in (None, 50):
        with ExitStack() as stack:
            mates = [stack.enter_context(engine.sequence()) for _ in range(2)]
            for sequence, ids in zip(mates, (LONG[:30], IDS), strict=True):
                sequence.extend(ids)
            drawn = engine.prompt(mates, draw=True, prefill=deep(chunk=chunk))
            states = [engine.export_state(sequence) for sequence in mates]
        assert drawn[1] == oracle.tokens[0]
        for state, wanted in zip(states, (expected, oracle.state), strict=True):
            assert [name for name in wanted if wanted[name].tobytes() != state[name].tobytes()] == []


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_any_order_that_the_driver_may_choose(
    engine: Engine, oracle: Any, prompt_run: Callable[..., Any], seed: int
) -> None:
    if not engine.facts.is_simulator:
        pytest.skip("orders are chosen by seed in the simulator only")
    control.set_seed(seed)
    found = prompt_run(engine, IDS, deep(chunk=50))
    assert not oracle.differs(replace(found, tokens=oracle.tokens))


def run_states(engine: Engine) -> dict[str, Any]:
    """A prompt of two chunks without logits between them: its state and its token."""
    with engine.sequence() as sequence:
        sequence.extend(IDS)
        token = engine.prompt([sequence], draw=True, prefill=deep(chunk=50))
        return {**engine.export_state(sequence), "token": np.array(token)}


def same(state: dict[str, Any], oracle: Any) -> bool:
    wanted = {**oracle.state, "token": np.array(oracle.tokens[:1])}
    return all(state[name].tobytes() == value.tobytes() for name, value in wanted.items())


def kind_of(call: Call, copy: str, routed: str) -> str:
    """Of the waits: "full" (launches for a copy), "free" (a copy for launches), "routed" (the host for a
    plan), "begin" (the host for all launches), "" of others."""
    if call.kind == "sync" and (call.event == routed or not call.event):
        return "routed" if call.event else "begin"
    if call.kind == "wait":
        return "free" if call.where == copy else "full"
    return ""


def test_nothing_reads_or_fills_out_of_order(engine: Engine, oracle: Any) -> None:
    """The recorded calls of a real run, and the same without any one of their waits."""
    with recorded(engine) as (recorder, reads):
        assert same(run_states(engine), oracle)
    calls = recorder.calls
    assert findings(calls) == [] and reads.batches > 2 * 4 * 13
    copy, routed = (f"{int(each.handle):#x}" for each in (ring(engine)._copy, ring(engine)._routed))
    scans = [i for i, call in enumerate(calls) if call.text == "moe_plan_scan"]
    found: dict[str, list[bool]] = {}
    for i in range(scans[0], len(calls)):  # the begin of the first chunk orders nothing
        if kind := kind_of(calls[i], copy, routed):
            without = findings([*calls[:i], *calls[i + 1 :]])
            found.setdefault(kind, []).append(bool(without) or i > scans[-1] and kind == "begin")
    assert found.keys() == {"full", "free", "routed", "begin"} and len(found["full"]) > 2 * 4 * 4
    assert all(all(each) for each in found.values()), found


@pytest.mark.parametrize("kind", ["full", "free", "routed"])
def test_a_dropped_wait_shows_in_the_bytes(
    engine: Engine, oracle: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The same wait left out everywhere: the checker finds it, and some order of the simulator shows it.

    Not the wait of `begin`: of what the last layer leaves only the head reads, and the host waits for that.
    """
    if not engine.facts.is_simulator:
        pytest.skip("a wait left out shows in the simulator only")
    if kind == "routed":
        real_sync = Event.synchronize
        monkeypatch.setattr(Event, "synchronize", lambda self, *args: None if self.name == "ring.routed"
                            else real_sync(self, *args))
    else:
        real_wait = Stream.wait
        monkeypatch.setattr(Stream, "wait", lambda self, event: None if event.name.startswith(f"ring.{kind}")
                            else real_wait(self, event))
    caught = []
    for seed in range(12):
        control.set_seed(seed)
        try:
            with recorded(engine) as (recorder, _):
                caught.append(not same(run_states(engine), oracle))
        except (FlashNextError, IndexError, ValueError) as error:
            assert not engine.rank.ctx.broken, error
            caught.append(True)
        assert findings(recorder.calls) != []
        if any(caught):
            break
        seat(engine, 3)
    assert any(caught)


def test_an_error_in_a_chunk_drops_what_was_prefetched(engine: Engine, oracle: Any) -> None:
    """After a launch, a copy or a wait fails, the next prompt has the right bytes."""
    for only, n in (("cuLaunchKernel", 60), ("cuMemcpyAsync", 9), ("cuStreamWaitEvent", 5),
                    ("cuEventRecord", 12), ("cuEventSynchronize", 2)):
        with faults.fail_nth(n, 1, only=only) as plan, pytest.raises(FlashNextError):
            run_states(engine)
        assert plan.fired == 1
        banks = ring(engine).banks
        assert not banks._ahead and len(banks._free) == banks.depth
        assert same(run_states(engine), oracle)


def test_an_observer_sees_every_batch(engine: Engine, oracle: Any) -> None:
    seen: list[str] = []
    filled: list[Fill] = []
    real = ring(engine)._fill
    ring(engine)._fill = lambda fill: (filled.append(fill), real(fill))
    engine.rank.observer = lambda launch: seen.append(launch.name)
    try:
        assert same(run_states(engine), oracle)
    finally:
        engine.rank.observer = None
        del ring(engine)._fill
    layers = 4 * 2
    assert seen.count("moe_deep_gu") == len(filled) + layers and seen.count("moe_deep_sum") == layers

    def fail(launch: Launch) -> None:
        if launch.name == "moe_deep_down":
            raise KeyboardInterrupt

    engine.rank.observer = fail
    with engine.sequence() as sequence:
        sequence.extend(IDS)
        with pytest.raises(KeyboardInterrupt):
            engine.prompt([sequence], prefill=deep())
        engine.rank.observer = None
        assert sequence.failed == "KeyboardInterrupt"
    assert not ring(engine).banks._ahead and same(run_states(engine), oracle)


def test_times_of_copies_and_waits(engine: Engine) -> None:
    ring(engine).timing = True
    try:
        run_states(engine)
        took = ring(engine).timings()
    finally:
        ring(engine).timing = False
    assert 0 <= took["copy_ms"] <= took["span_ms"] and took["wait_ms"] >= 0 and took["span_ms"] > 0
    fills = waits = 4 * 5  # 13 experts a layer in banks of 3
    clocks = ring(engine)._clocks
    assert (len(clocks._of("copy")), len(clocks._of("wait"))) == (fills, waits)
    run_states(engine)
    assert ring(engine).timings() == {"copy_ms": 0.0, "span_ms": 0.0, "wait_ms": 0.0}


def test_times_wait_for_the_chunk(engine: Engine) -> None:
    """Also for copies that no launch waits for: each row's experts are in lines, all that is copied is
    wasted."""
    made = ring(engine)

    def run() -> None:
        with engine.sequence() as sequence:
            sequence.extend(IDS[:1])
            engine.prompt([sequence], prefill=deep())

    used = used_of(engine, run)
    with engine.rank.ctx.active():
        engine.rank.experts.seat(engine.rank.stream, [np.flatnonzero(each).tolist() for each in used])
    before = made.banks.counters.copy()
    made.predict, made.timing = lambda i_layer: np.arange(16), True
    try:
        run()
        assert made.timings()["wait_ms"] == 0.0
    finally:
        made.timing = False
    counts = counted(engine, before)
    assert counts["wasted"] == counts["copied_lines"] == 4 * 6 and counts["waits"] == 0


def test_the_ring_holds_what_it_uses(engine: Engine) -> None:
    rank = engine.rank
    for owner in (rank.ctx, rank.stream, rank.experts):
        assert "ring" in owner.borrowers()
    assert "ring.clocks" in rank.ctx.borrowers()


def test_a_ring_that_cannot_be_made_costs_time_only(
    micro: Path, device: str, oracle: Any, prompt_run: Callable[..., Any]
) -> None:
    """Each kind of driver call in its making fails once; that prompt is batched, and a later one is not."""
    limits = replace(LIMITS, deep="request", expert_lines=3)
    with Engine.open(micro, limits, device=device) as engine:
        with faults.count_calls() as count:
            engine.generate(IDS[:8], max_new_tokens=1, prefill=deep())
        rank = engine.rank
        assert ring(engine) is not None
        with faults.count_calls() as closing:
            rank._close_deep()
        assert "cuStreamSynchronize" in closing.names, "copies may be under way"
        rank.deep = None
        live = engine.ledger.live("device"), engine.ledger.live("pinned")
        assert "ring" not in live[0] and "ring.staging" not in live[1]
        for only, last in (("cuMemAlloc", 2), ("cuMemHostAlloc", 2), ("cuStreamCreate", 1),
                           ("cuEventCreate", 7), ("cuMemHostGetDevicePointer", 2)):
            assert count.names.count(only) == last
            with faults.fail_nth(last, 2, only=only) as plan:
                found = engine.generate(IDS[:24], max_new_tokens=1, stop_ids=(), prefill=deep())
            assert plan.fired == 1 and found.counters["deep_refusals"] == 1 and rank.deep_refused
            assert found.tokens == oracle.greedy(24)
            assert live == (engine.ledger.live("device"), engine.ledger.live("pinned"))
        assert not oracle.differs(replace(prompt_run(engine, IDS, deep()), tokens=oracle.tokens))
        assert ring(engine) is not None and rank.deep_refused == ""


def test_the_walk_names_what_is_launched(engine: Engine) -> None:
    made = engine.rank.deep
    assert made is not None
    for rows in made.layout.buckets():
        kernels = [step.kernel for step in made.steps(rows)]
        assert kernels == [launch.name for launch in made.launches(rows)]
        assert kernels.count("line_fill") == kernels.count("moe_deep_gu") == engine.config.n_layers


@pytest.mark.parametrize("form", ["between layers", "in a layer"])
def test_lines_of_different_lengths(
    micro: Path, device: str, prompt_run: Callable[..., Any], tmp_path: Path, form: str
) -> None:
    """A bank holds lines as long as the layer's are, and guard zones behind it stay whole."""
    limits = replace(LIMITS, expert_lines=None)
    between = form == "between layers"
    pack: Any = narrow(micro, tmp_path / "pack") if between else SynthPack("micro", mixed=True)
    with Engine.open(pack, limits, device=device) as engine:
        expected = prompt_run(engine, IDS[:40], Prefill(deep=False), n_new=2)
    with Engine.open(pack, replace(limits, expert_lines=3), device=device) as engine:
        experts = engine.rank.experts
        lengths = [experts.bytes_of(i) for i in range(4)]
        sizes = {experts.home(2, e)[2] for e in range(16)}
        assert len(set(lengths) if between else sizes) > 1
        before = ring(engine).banks.counters.copy()
        assert not expected.differs(prompt_run(engine, IDS[:40], deep(chunk=23), n_new=2))
        copied = ring(engine).banks.counters["copied_lines"] - before["copied_lines"]
        assert counted(engine, before)["copied_bytes"] == int(copied @ np.array(lengths, np.uint64)) > 0
        if engine.facts.is_simulator:
            for arena in engine.rank.guarded_arenas():
                arena.check_guards()


@pytest.mark.parametrize("draw", range(6))
def test_whatever_is_resident_predicted_and_cut(
    engine: Engine, oracle: Any, prompt_run: Callable[..., Any], case_seed: int, draw: int
) -> None:
    """Experts in lines, predictions, chunk and the simulator's order drawn together."""
    rng = np.random.default_rng([case_seed, draw])
    layers = [rng.permutation(16)[: rng.integers(0, 17)].tolist() for _ in range(engine.config.n_layers)]
    with engine.rank.ctx.active():
        engine.rank.experts.seat(engine.rank.stream, layers)
    ring(engine).predict = lambda i_layer: rng.permutation(16)[: rng.integers(0, 17)]
    if engine.facts.is_simulator:
        control.set_seed(int(rng.integers(0, 1000)))
    chunk = int(rng.integers(13, 90))
    found = prompt_run(engine, IDS, Prefill(chunk=chunk, deep_rows=int(rng.integers(1, 9))))
    assert not oracle.differs(replace(found, tokens=oracle.tokens)), (case_seed, draw, chunk, layers)
