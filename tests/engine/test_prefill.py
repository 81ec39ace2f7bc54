"""Prompts in segments: every path, cut and refusal leaves the bytes of serial decode."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext_drv.drv import faults
from flashnext_drv.drv.memory import copy_to_host
from flashnext_drv.engine.engine import Engine, Limits, Prefill, Sampling
from flashnext_drv.engine.plan import plan
from flashnext_drv.errors import Cancelled, DriverError, UsageError
from flashnext_drv.kernels.tables import ROUND, ROW
from flashnext_drv.model import deep_layout

from .prompts import EOS, IDS, LONG, N_NEW, SERIAL, deep

pytestmark = pytest.mark.sim


@pytest.fixture
def engine(deep_engine: Engine) -> Engine:
    return deep_engine


@pytest.fixture
def oracle(serial_run: Any) -> Any:
    return serial_run


@pytest.mark.parametrize("chunk", [21, 64, 65, 83])
def test_deep_chunks_equal_serial_decode(
    engine: Engine, oracle: Any, prompt_run: Callable[..., Any], chunk: int
) -> None:
    before = vars(engine.prompts).copy()
    found = prompt_run(engine, IDS, deep(chunk=chunk), n_new=N_NEW)
    assert not oracle.differs(found)
    assert engine.prompts.deep_rows - before["deep_rows"] == len(IDS)
    assert engine.prompts.deep_chunks - before["deep_chunks"] == -(-len(IDS) // chunk)


@pytest.mark.parametrize("cuts", [(1, 2, 3), (4, 12, 31), (63, 64), (37, 80)])
def test_prompt_given_in_pieces_by_mixed_paths(
    engine: Engine, oracle: Any, prompt_run: Callable[..., Any], cuts: tuple[int, ...]
) -> None:
    assert not oracle.differs(prompt_run(engine, IDS, deep(), cuts, N_NEW))
    assert not oracle.differs(prompt_run(engine, IDS, Prefill(deep_rows=9), cuts, N_NEW))


@pytest.mark.parametrize("chunk", [1, 9, 40])
def test_batched_rows_equal_serial_decode(
    engine: Engine, oracle: Any, prompt_run: Callable[..., Any], chunk: int
) -> None:
    before = engine.prompts.batched_rows
    assert not oracle.differs(prompt_run(engine, IDS, Prefill(deep=False, chunk=chunk), n_new=N_NEW))
    assert engine.prompts.batched_rows - before == len(IDS)


def test_every_row_of_a_tiny_model(device: str, prompt_run: Callable[..., Any]) -> None:
    """More layers and wider sums than micro; one chunk and an odd cut."""
    limits = Limits(context_tokens=96, rows=16, prompt_rows=16, deep="open", deep_rows=2)
    ids = [(53 * i + 2) % 1024 for i in range(75)]
    with Engine.open("synth:tiny?seed=3", limits, device=device) as engine:
        expected = prompt_run(engine, ids, Prefill(deep=False), n_new=3)
        assert not expected.differs(prompt_run(engine, ids, deep(), n_new=3))
        assert not expected.differs(prompt_run(engine, ids, deep(chunk=41), n_new=3))


def test_index_scores_in_two_windows(
    micro: Path, device: str, monkeypatch: pytest.MonkeyPatch, prompt_run: Callable[..., Any]
) -> None:
    """Scores for 128 rows at a time, in a bucket of 256 rows; every span with a guard zone of its own."""
    monkeypatch.setattr(deep_layout, "SCORE_BYTES", 1)
    monkeypatch.setattr(deep_layout, "OVERLAY", False)
    limits = Limits(context_tokens=192, rows=16, prompt_rows=16, deep="open", deep_rows=2)
    with Engine.open(micro, limits, device=device) as engine:
        assert engine.rank.deep is not None
        assert engine.rank.deep.layout.score_rows == 128 and engine.rank.deep.layout.rows == 256
        selects = [s.args["first_row"] for s in engine.rank.deep.steps(256) if s.kernel == "index_select"]
        assert set(selects) == {0, 128}
        expected = prompt_run(engine, LONG, Prefill(deep=False), n_new=2)
        assert not expected.differs(prompt_run(engine, LONG, deep(), n_new=2))
        if engine.facts.is_simulator:
            for arena in engine.rank.guarded_arenas():
                arena.check_guards()


def test_sampled_tokens_do_not_depend_on_the_path(engine: Engine) -> None:
    sampling = Sampling(temperature=1.0, top_k=50, top_p=0.95, seed=11)
    replies = [
        engine.generate(IDS[:41], max_new_tokens=6, sampling=sampling, stop_ids=(), prefill=prefill)
        for prefill in (SERIAL, Prefill(deep=False), deep(), deep(chunk=25))
    ]
    assert len({reply.sha256 for reply in replies}) == 1
    names = ("deep_chunks", "deep_rows", "batched_rows", "serial_rows", "deep_refusals")
    assert [[reply.counters[name] for name in names] for reply in replies] == [
        [0, 0, 0, 41, 0], [0, 0, 41, 0, 0], [1, 41, 0, 0, 0], [2, 41, 0, 0, 0]]


def test_a_short_rest_is_batched(engine: Engine) -> None:
    reply = engine.generate(IDS, max_new_tokens=1, stop_ids=(), prefill=Prefill(chunk=40, deep_rows=4))
    assert (reply.counters["deep_rows"], reply.counters["batched_rows"]) == (80, 3)


@pytest.mark.parametrize("rows", [(0, 1), (30, 45), (82, 83), (39, 41)])
def test_rows_asked_for_have_the_same_bytes(engine: Engine, oracle: Any, rows: tuple[int, int]) -> None:
    for prefill in (deep(chunk=40), Prefill(deep=False)):
        found = engine.logits(IDS, rows=rows, prefill=prefill)
        assert found.tobytes() == oracle.logits[slice(*rows)].tobytes()


def test_several_sequences_in_one_chunk(engine: Engine, oracle: Any) -> None:
    """Three runs of one walk, one of them of one row, each with the bytes it has alone."""
    others = [LONG[:1], LONG[:30]]
    with ExitStack() as stack:
        alone = [stack.enter_context(engine.sequence()) for _ in others]
        for sequence, ids in zip(alone, others, strict=True):
            sequence.extend(ids)
            engine.prompt([sequence], prefill=Prefill(deep=False))
        expected = [engine.export_state(sequence) for sequence in alone]
    for chunk in (None, 50):
        before = engine.prompts.deep_chunks
        with ExitStack() as stack:
            mates = [stack.enter_context(engine.sequence()) for _ in range(3)]
            for sequence, ids in zip(mates, (others[0], IDS, others[1]), strict=True):
                sequence.extend(ids)
            drawn = engine.prompt(mates, draw=True, prefill=deep(chunk=chunk))
            assert drawn[1] == oracle.tokens[0] and min(drawn) >= 0
            states = [engine.export_state(sequence) for sequence in mates]
        assert engine.prompts.deep_chunks - before == (1 if chunk is None else 3)
        for state, wanted in zip(states, (expected[0], oracle.state, expected[1]), strict=True):
            assert [name for name in wanted if wanted[name].tobytes() != state[name].tobytes()] == []


def test_progress_counts_every_token_once(engine: Engine) -> None:
    for prefill, n_ids, n_calls in ((deep(chunk=30), 83, 3), (Prefill(deep=False), 83, 6), (SERIAL, 7, 7)):
        told: list[tuple[int, int]] = []
        how = Prefill(**{**vars(prefill), "progress": lambda done, of, to=told: to.append((done, of))})
        engine.generate(IDS[:n_ids], max_new_tokens=1, prefill=how)
        assert len(told) == n_calls and told[-1] == (n_ids, n_ids)
        assert [done for done, _ in told] == sorted({done for done, _ in told})


@pytest.mark.parametrize(
    "prefill", [deep(chunk=20), Prefill(deep=False), SERIAL], ids=["deep", "batched", "serial"]
)
def test_cancel_between_launches(engine: Engine, oracle: Any, prefill: Prefill) -> None:
    """A stopped prompt costs nothing, another sequence keeps its bytes, and the prompt may go on: stopped at
    once, after a launch, after two."""
    rank = engine.rank
    with engine.sequence() as other, engine.sequence() as sequence:
        other.extend(LONG[:20])
        engine.prompt([other])
        before = engine.export_state(other)
        sequence.extend(IDS)
        for n_calls in (1, 2, 3):
            asks, n_done = iter(range(1, n_calls + 1)), sequence.n_done
            stop = Prefill(**{**vars(prefill), "cancel": lambda asks=asks, last=n_calls: next(asks) == last})
            with pytest.raises(Cancelled) as caught:
                engine.prompt([sequence], prefill=stop)
            assert caught.value.done_tokens == sequence.n_done - n_done
            assert sequence.n_done < n_done + caught.value.prompt_tokens == len(IDS)
            after = engine.export_state(other)
            assert all(after[name].tobytes() == value.tobytes() for name, value in before.items())
        assert engine.prompt([sequence], draw=True, prefill=prefill) == oracle.tokens[:1]
    event = threading.Event()
    event.set()
    with pytest.raises(Cancelled):
        engine.generate(IDS, max_new_tokens=1, prefill=Prefill(**{**vars(prefill), "cancel": event}))
    assert rank.slots.free_slots == 4 and rank.pages.free_pages == rank.layout.n_pages


@pytest.mark.parametrize("prefill", [deep(chunk=30), Prefill(deep=False)], ids=["deep", "batched"])
@pytest.mark.parametrize("name", ["progress", "cancel"])
def test_a_callback_that_raises_leaves_a_prompt_that_may_go_on(
    engine: Engine, oracle: Any, prefill: Prefill, name: str
) -> None:
    calls: list[int] = []

    def fail(*_: int) -> bool:
        calls.append(1)
        if len(calls) == (1 if name == "progress" else 2):
            raise KeyboardInterrupt
        return False

    with engine.sequence() as sequence:
        sequence.extend(IDS)
        with pytest.raises(KeyboardInterrupt):
            engine.prompt([sequence], prefill=Prefill(**{**vars(prefill), name: fail}))
        assert sequence.n_done and sequence.n_pending and not sequence.failed
        assert engine.prompt([sequence], draw=True, prefill=prefill) == oracle.tokens[:1]


def test_driver_error_in_a_chunk_spoils_its_sequences_only(
    engine: Engine, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.rank, "use_graphs", False)  # in a capture the error would cost the graph alone
    with engine.sequence() as other, engine.sequence() as one, engine.sequence() as two:
        other.extend(IDS[:10])
        engine.prompt([other])
        one.extend(IDS)
        two.extend(IDS[:5])
        with faults.fail_nth(30, 1, only="cuLaunchKernel"), pytest.raises(DriverError):
            engine.prompt([one, two], prefill=deep())
        assert one.failed and two.failed and not other.failed
        with pytest.raises(UsageError, match="unknown after a failed round"):
            engine.prompt([one], prefill=deep())
        other.extend(IDS[10:])
        assert engine.prompt([other], draw=True, prefill=deep()) == oracle.tokens[:1]
    assert engine.rank.slots.free_slots == 4


def test_driver_error_in_a_round_spoils_no_sequence_that_waits(engine: Engine, oracle: Any) -> None:
    with engine.sequence() as one, engine.sequence() as two:
        one.extend(IDS[:4])
        two.extend(IDS)
        with faults.fail_nth(1, 1, only="cuMemcpyAsync"), pytest.raises(DriverError):
            engine.prompt([one, two], prefill=Prefill(deep=False))
        assert one.failed and not two.failed and two.n_done == 0
        assert engine.prompt([two], draw=True, prefill=Prefill(deep=False)) == oracle.tokens[:1]


def test_a_failed_wait_after_a_round_spoils_no_sequence_that_waits(engine: Engine) -> None:
    with engine.sequence() as one, engine.sequence() as two:
        one.extend(IDS[:4])
        two.extend(IDS)
        told = Prefill(deep=False, progress=lambda done, total: None)
        with faults.fail_nth(1, 1, only="cuStreamSynchronize"), pytest.raises(DriverError):
            engine.prompt([one, two], prefill=told)
        assert one.failed and not two.failed


@pytest.mark.parametrize(("prefill", "kernel"), [(deep(), "gdn_scan"), (Prefill(deep=False), "gdn_step")])
def test_an_observer_that_raises_inside_a_launch_spoils_its_sequence(
    engine: Engine, oracle: Any, prefill: Prefill, kernel: str
) -> None:
    def fail(launch: Any) -> None:
        if launch.name == kernel:
            raise KeyboardInterrupt

    engine.rank.observer = fail
    try:
        with engine.sequence() as sequence:
            sequence.extend(IDS)
            with pytest.raises(KeyboardInterrupt):
                engine.prompt([sequence], prefill=prefill)
            assert sequence.failed == "KeyboardInterrupt" and sequence.n_done == 0
            with pytest.raises(UsageError, match="failed round .*: KeyboardInterrupt"):
                engine.prompt([sequence], prefill=prefill)
            with pytest.raises(UsageError, match="failed round .*: KeyboardInterrupt"):
                engine.export_state(sequence)
    finally:
        engine.rank.observer = None
    reply = engine.generate(IDS, max_new_tokens=1, stop_ids=(), prefill=deep())
    assert reply.tokens == oracle.tokens[:1]


@pytest.mark.parametrize("only", ["cuMemcpyAsync", "cuEventRecord", "cuLaunchKernel", "cuEventSynchronize"])
def test_a_failed_call_in_a_prompt_leaves_the_engine_usable(engine: Engine, oracle: Any, only: str) -> None:
    for n in (1, 2, 6):
        with faults.fail_nth(n, 1, only=only) as plan:
            try:
                engine.generate(IDS, max_new_tokens=1, stop_ids=(), prefill=deep(chunk=45))
            except DriverError:
                assert plan.fired == 1
        assert engine.rank.slots.free_slots == 4
        assert engine.rank.pages.free_pages == engine.rank.layout.n_pages
    found = engine.generate(IDS, max_new_tokens=1, stop_ids=(), prefill=deep(chunk=45))
    assert found.tokens == oracle.tokens[:1]


def test_plan_and_ledger_of_the_deep_buffers(engine: Engine) -> None:
    rank = engine.rank
    assert rank.deep is not None
    layout = rank.deep.layout
    planned = plan(rank.layout, engine.pack, engine.facts.is_simulator, layout)
    assert engine.ledger.live("device")["deep"] == planned.device["deep"] == rank.deep.arena.size_bytes
    report = engine.memory()
    assert report.deep["rows"] == layout.rows == 256 and report.deep["refused"] == ""
    assert {"d_streams", "d_wide", "d_moe_x", "d_score", "tables"} <= set(report.deep["spans"])
    assert "deep pass: 256 rows a chunk" in report.table()


def test_pages_in_any_order_and_a_used_slot(
    micro: Path, device: str, engine: Engine, oracle: Any, prompt_run: Callable[..., Any]
) -> None:
    limits = Limits(**{**vars(engine.limits), "page_order": "shuffled:5", "graph": False})
    with Engine.open(micro, limits, device=device) as opened, opened.sequence() as other:
        other.extend(LONG[:70])
        opened.prompt([other], prefill=deep())
        assert not oracle.differs(prompt_run(opened, IDS, deep(chunk=50), n_new=N_NEW))
        assert not oracle.differs(prompt_run(opened, IDS, deep(), n_new=N_NEW))


def test_the_deep_pass_holds_what_it_uses(engine: Engine) -> None:
    rank = engine.rank
    made = rank.deep
    assert made is not None
    for owner in (rank.ctx, rank.kernels, rank.tables, rank.pages, rank.slots, rank._work, rank.weights,
                  rank.experts):
        assert owner in made.holds and "deep" in owner.borrowers(), owner
    assert {"deep", "deep.staging", "deep.half0", "deep.buffers"} <= set(rank.ctx.borrowers())
    with pytest.raises(UsageError, match="used by .*deep"):
        rank.experts.close()
    assert not rank.experts.closed


def test_shared_spans_never_overlap_within_a_side(engine: Engine) -> None:
    assert engine.rank.deep is not None
    layout = engine.rank.deep.layout
    experts = {name for name in layout.shared if name.startswith("d_moe_")}
    for side in (experts, set(layout.shared) - experts):
        places = sorted(layout.shared[name] for name in side)
        assert all(a + size <= b for (a, size), (b, _) in zip(places, places[1:], strict=False))
        assert max(a + size for a, size in places) <= layout.sizes["shared"]


def test_launches_of_a_chunk_are_its_steps(engine: Engine) -> None:
    rank = engine.rank
    assert rank.deep is not None
    names: list[str] = []
    idle: list[bool] = []

    def observe(launch: Any) -> None:
        names.append(launch.name)
        idle.append(rank.stream.query())

    rank.observer = observe
    try:
        engine.generate(IDS, max_new_tokens=1, stop_ids=(), prefill=deep())
    finally:
        rank.observer = None
    walk = [step.kernel for step in rank.deep.steps(128)]
    assert names[: len(walk)] == walk and all(idle)
    assert names[len(walk) :] == [launch.name for launch in rank.launches("head", 1)]


def test_every_token_of_the_context_can_be_a_prompt(engine: Engine) -> None:
    ids = (LONG * 2)[:192]
    found = engine.logits(ids, rows=(191, 192), prefill=deep())
    assert found.tobytes() == engine.logits(ids, rows=(191, 192), prefill=Prefill(deep=False)).tobytes()


def test_the_rows_a_chunk_sees(engine: Engine) -> None:
    """Tokens, positions and the two tokens before each, over a chunk's border and for two sequences."""
    rank = engine.rank
    assert rank.deep is not None
    seen: list[np.ndarray] = []

    def observe(launch: Any) -> None:
        if launch.name == "embed_rows" and rank.deep is not None:
            head = np.empty(1, ROUND)
            copy_to_host(rank.stream, head.view(np.uint8), rank.deep.spans["round"])
            rows = np.empty(int(head[0]["n_rows"]), ROW)
            copy_to_host(rank.stream, rows.view(np.uint8), rank.deep.spans["rows"].sub(0, rows.nbytes))
            seen.append(rows)

    rank.observer = observe
    try:
        with engine.sequence() as one, engine.sequence() as two:
            one.extend([10, 11, 12, 13, 14])
            two.extend([20, 21])
            engine.prompt([one, two], prefill=deep(chunk=4))
            slots = (one.i_slot, two.i_slot)
    finally:
        rank.observer = None
    fields = ("slot", "run", "token", "position", "prev1", "prev2", "i_out")
    a, b = slots
    assert [[tuple(int(row[f]) for f in fields) for row in rows] for rows in seen] == [
        [(a, 0, 10, 0, EOS, EOS, 0), (a, 0, 11, 1, 10, EOS, 1), (a, 0, 12, 2, 11, 10, 2),
         (a, 0, 13, 3, 12, 11, 3)],
        [(a, 0, 14, 4, 13, 12, 0), (b, 1, 20, 0, EOS, EOS, 1), (b, 1, 21, 1, 20, EOS, 2)]]
