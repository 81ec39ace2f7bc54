"""Chunks of the deep pass by graphs: eager's bytes, exact counts, and eager parts where a graph fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashnext_drv.cli.trace import _write_graphs
from flashnext_drv.drv import faults
from flashnext_drv.engine.deep import DeepPass
from flashnext_drv.engine.engine import Engine, Limits, Prefill
from flashnext_drv.engine.graphs import GraphSet
from flashnext_drv.engine.sequence import Sequence
from flashnext_drv.errors import UsageError

from .prompts import IDS, LONG, deep

pytestmark = pytest.mark.sim
LIMITS = Limits(context_tokens=192, rows=16, prompt_rows=16, sequences=4, deep_rows=2,
                page_order="shuffled:3")
SHORT = LONG[:9]
CALLS = ("cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphUpload", "cuGraphLaunch")
CHUNKS = 3  # of a life below


@pytest.fixture(scope="module")
def engine(micro: Path, device: str) -> Iterator[Engine]:
    with Engine.open(micro, LIMITS, device=device) as opened:
        yield opened
    assert len(opened.ledger.entries()) == 0


def pass_of(engine: Engine) -> DeepPass:
    assert engine.rank.deep is not None, engine.rank.deep_refused
    return engine.rank.deep


def graphs_of(engine: Engine) -> GraphSet:
    found = pass_of(engine).graphs
    assert found is not None
    return found


@contextmanager
def fresh(engine: Engine, **limits: Any) -> Iterator[GraphSet]:
    """The deep pass with graphs of its own, none of them made yet, for the block."""
    of_deep, before = pass_of(engine), graphs_of(engine)
    most = engine.limits.graphs * of_deep.n_parts
    own = replace(engine.limits, graphs=most, **limits)
    with GraphSet(engine.rank.ctx, before._captured, own, ()) as made:
        of_deep.graphs, came = made, set(of_deep._came)
        of_deep._came.clear()
        try:
            yield made
        finally:
            of_deep.graphs = before
            of_deep._came |= came


@contextmanager
def graphs_used(engine: Engine, used: bool) -> Iterator[None]:
    engine.rank.use_graphs = used
    try:
        yield
    finally:
        engine.rank.use_graphs = True


def state_bytes(engine: Engine, sequence: Sequence) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in engine.export_state(sequence).items()}


def life(engine: Engine, n_chunks: int = CHUNKS) -> dict[str, bytes]:
    """A prompt of some chunks that nobody draws from, so that no other graph runs; its state."""
    with engine.sequence() as sequence:
        sequence.extend(SHORT[: n_chunks * (len(SHORT) // CHUNKS)])
        engine.prompt([sequence], prefill=deep(chunk=len(SHORT) // CHUNKS))
        return state_bytes(engine, sequence)


def left(engine: Engine) -> list[str]:
    """Graphs and executables of the deep pass that are not closed."""
    return [name for kind in ("graph", "graph_exec") for name in engine.ledger.live(kind)
            if name.startswith("deep.")]


@pytest.fixture(scope="module")
def eager(engine: Engine) -> dict[str, bytes]:
    return eager_life(engine)


def eager_life(engine: Engine) -> dict[str, bytes]:
    with graphs_used(engine, False):
        return life(engine)


def test_phases_with_and_without_graphs_have_the_same_bytes(
    engine: Engine, prompt_run: Callable[..., Any]
) -> None:
    """Eager, graphs, eager, graphs in one process: logits of all rows, state and tokens."""
    n_parts = pass_of(engine).n_parts
    assert n_parts == 1 + engine.config.n_layers
    runs, counts = [], []
    with fresh(engine) as graphs:
        for used in (False, True, False, True):
            before = replace(graphs.counters)
            with graphs_used(engine, used):
                runs.append(prompt_run(engine, IDS[:66], deep(chunk=25), n_new=3))  # 25, 25, 16
            found = graphs.counters.since(before)
            counts.append([found[name] // n_parts for name in ("captures", "replays", "eager_rounds")])
            assert all(found[name] % n_parts == 0 for name in found) and not found["failures"]
    assert counts == [[0, 0, 3], [1, 2, 1], [0, 0, 3], [0, 3, 0]]
    assert not any(runs[0].differs(run) for run in runs[1:])


def test_two_buckets_have_graphs_of_their_own(engine: Engine, prompt_run: Callable[..., Any]) -> None:
    """131 rows and 9 rows, again and again: each bucket's first chunk is eager."""
    n_parts = pass_of(engine).n_parts
    with graphs_used(engine, False):
        eager = prompt_run(engine, LONG, deep(), (131,), 2)
    with fresh(engine) as graphs:
        for i_run in range(2):
            assert not eager.differs(prompt_run(engine, LONG, deep(), (131,), 2))
            assert graphs.counters.replays == 2 * n_parts * i_run
        kept = graphs.identities()
        assert len(kept) == 2 * n_parts
        for rows in (128, 256):
            assert [each.path for each in kept if each.rows == rows] == [
                "deep.embed", *(f"deep.L{i}" for i in range(engine.config.n_layers))]
        assert len({each.fingerprint for each in kept}) == len(kept)


def test_two_sequences_in_one_chunk(engine: Engine) -> None:
    """Graphs captured from a chunk of one sequence run chunks of two, cut anywhere, on other slots."""

    def run() -> list[Any]:
        found: list[Any] = []
        with ExitStack() as stack:
            some = [stack.enter_context(engine.sequence()) for _ in range(3)]
            for first, end in ((0, 1), (1, 3), (0, 2)):
                for i in range(first, end):
                    some[i].extend(IDS[5 * i : 5 * i + 12 + 3 * first])
                found.append(engine.prompt(some[first:end], draw=True, prefill=deep()))
            return [*found, *(state_bytes(engine, sequence) for sequence in some)]

    with graphs_used(engine, False):
        eager = run()
    with fresh(engine) as graphs:
        assert run() == eager
        assert graphs.counters.replays == 2 * pass_of(engine).n_parts
        with engine.sequence():  # takes the first slot
            assert run() == eager
        assert graphs.counters.replays == 5 * pass_of(engine).n_parts


def test_a_request_says_how_many_parts_were_replayed(engine: Engine) -> None:
    """The host's count, and the count that a node of each graph makes on the device."""
    n_parts, how = pass_of(engine).n_parts, deep(chunk=6)
    with fresh(engine):
        made = [engine.generate(IDS[:20], max_new_tokens=1, stop_ids=(), prefill=how) for _ in range(2)]
        report = engine.memory().deep["graphs"]
        assert report["kept"] == n_parts and report["cap"] == engine.limits.graphs * n_parts
        assert report["counters"]["replays"] == 7 * n_parts and report["bytes"] > 0
    names = ("deep_chunks", "deep_graph_captures", "deep_graph_replays", "deep_eager_parts",
             "deep_graph_failures", "rank0.deep.replays", "rank0.deep.device_replays",
             "rank0.deep.device_rows", "head_replays")
    assert [[each.counters[name] for name in names] for each in made] == [
        [4, n_parts, 3 * n_parts, n_parts, 0, 3 * n_parts, 3 * n_parts, 14 * n_parts, 1],
        [4, 0, 4 * n_parts, 0, 0, 4 * n_parts, 4 * n_parts, 20 * n_parts, 1]]
    assert made[0].sha256 == made[1].sha256


def test_an_observer_sees_launches_and_no_replay(
    engine: Engine, eager: dict[str, bytes]
) -> None:
    seen: list[str] = []
    with fresh(engine) as graphs:
        life(engine)
        replays = graphs.counters.replays
        engine.rank.observer = lambda launch: seen.append(launch.name)
        try:
            assert life(engine) == eager
        finally:
            engine.rank.observer = None
        assert graphs.counters.replays == replays > 0
    assert seen == [launch.name for launch in pass_of(engine).launches(128)] * CHUNKS


def test_the_second_sighting_makes_the_graph_where_asked(
    engine: Engine, eager: dict[str, bytes]
) -> None:
    with fresh(engine, graph_after=2) as graphs:
        assert life(engine) == eager
        assert graphs.counters.replays == pass_of(engine).n_parts, "the third chunk's"
        assert graphs.counters.eager_rounds == 2 * pass_of(engine).n_parts


def test_graphs_made_on_the_thread(
    engine: Engine, eager: dict[str, bytes]
) -> None:
    with fresh(engine, graph_async=True) as graphs:
        for _ in range(3):
            assert life(engine) == eager
        found = graphs.counters
        assert found.replays + found.eager_rounds == 3 * CHUNKS * pass_of(engine).n_parts
        assert found.captures == pass_of(engine).n_parts and found.replays > 0 == found.failures
    with fresh(engine, graph_async=True) as graphs:
        life(engine, 2)
        assert graphs.n_pending > 0, "closed with some still being made"
    assert not left(engine)


def test_what_is_being_made_goes_too_where_memory_is_low(engine: Engine, eager: dict[str, bytes]) -> None:
    with fresh(engine, graph_async=True) as graphs:
        life(engine, 2)
        assert graphs.n_pending > 0
        graphs.cap = pass_of(engine).n_parts - 1
        for _ in range(9):  # the simulator's thread has ended by then
            life(engine, 1)
        assert life(engine) == eager
        assert graphs.n_pending == 0 == len(graphs.identities()) and not graphs.off
        assert graphs.counters.dropped == graphs.counters.captures > 0
    assert not left(engine)


def test_what_graphs_captured_outlives_them(micro: Path, device: str) -> None:
    with Engine.open(micro, LIMITS, device=device) as opened:
        life(opened)
        of_deep, graphs = pass_of(opened), graphs_of(opened)
        names = {str(identity) for identity in graphs.identities()}
        assert len(names) == of_deep.n_parts
        assert graphs in of_deep.buffers._borrowers
        for owner in (of_deep.buffers, of_deep.arena, opened.rank.tables, opened.rank.weights,
                      opened.rank.pages, opened.rank._work, opened.rank.kernels):
            assert names <= set(owner.borrowers()), owner
            with pytest.raises(UsageError, match="cannot be closed"):
                owner.close()
        of_deep.close()
        assert graphs.closed and of_deep.buffers.closed
        assert names.isdisjoint(opened.rank.tables.borrowers())
    assert len(opened.ledger.entries()) == 0


def test_where_not_one_walk_is_kept_chunks_are_eager(
    engine: Engine, eager: dict[str, bytes]
) -> None:
    """Memory ran below the floor: graphs that would push each other out go, and no more are made."""
    with fresh(engine) as graphs:
        life(engine)
        n_parts, replays = pass_of(engine).n_parts, graphs.counters.replays
        graphs.cap = n_parts - 1
        assert life(engine) == eager
        assert graphs.identities() == () and graphs.counters.dropped == n_parts
        assert graphs.counters.replays == replays
    with fresh(engine, graph_floor_bytes=1 << 50) as graphs:  # never so much is free
        assert life(engine) == eager and life(engine) == eager
        assert graphs.cap < n_parts and graphs.identities() == () and not graphs.off


def test_rows_of_a_mapped_table_are_free_after_a_replay(micro: Path, device: str) -> None:
    """The staging that the host writes for the next chunk is released behind each layer that reads it."""
    limits = replace(LIMITS, ngram="mapped")
    with Engine.open(micro, limits, device=device) as opened:
        rows = pass_of(opened).ngram
        assert rows is not None
        released, release = [], rows.release

        def told(stream: Any) -> None:
            released.append(graphs_of(opened).counters.replays)
            release(stream)

        rows.release = told  # type: ignore[method-assign]
        eager = eager_life(opened)
        n_layers = len(opened.config.ple_layers)
        assert released == [0] * CHUNKS * n_layers
        assert life(opened) == eager and life(opened) == eager
        assert len(released) == 3 * CHUNKS * n_layers and released[-1] > released[CHUNKS * n_layers] == 0
        assert graphs_of(opened).counters.replays == (2 * CHUNKS - 1) * pass_of(opened).n_parts


def test_with_a_ring_the_host_is_in_the_walk(device: str) -> None:
    limits = Limits(context_tokens=64, rows=16, prompt_rows=16, deep_rows=2, expert_lines=4, ring_lines=8)
    with Engine.open("synth:micro?seed=5", limits, device=device) as opened:
        assert pass_of(opened).graphs is None
        made = opened.generate(SHORT, max_new_tokens=1, stop_ids=(), prefill=deep(chunk=3))
        names = ("deep_chunks", "deep_graph_replays", "deep_eager_parts")
        assert [made.counters[name] for name in names] == [3, 0, 0]
        assert opened.memory().deep["graphs"] == {}


def test_listings_of_the_graphs_name_what_they_read(engine: Engine, tmp_path: Path) -> None:
    with fresh(engine) as graphs:
        life(engine)
        found = {each["name"]: each for each in _write_graphs(engine, tmp_path)}
        of_deep = {name for name in found if name.startswith("deep.")}
        assert of_deep == {str(each) for each in graphs.identities()}
        assert sum(found[name]["nodes"] - 1 for name in of_deep) == len(pass_of(engine).launches(128))
        text = "".join((tmp_path / f"{found[name]['files']}.json").read_text() for name in of_deep)
        assert '"count_replay"' in text and "elsewhere" not in text


@pytest.mark.parametrize("call", [*CALLS, "cuLaunchKernel"])
def test_a_graph_call_that_fails_once_leaves_one_part_eager(
    engine: Engine, eager: dict[str, bytes], call: str
) -> None:
    n_parts, n_launches = pass_of(engine).n_parts, len(pass_of(engine).launches(128))
    for n in (1, n_parts):
        n_call = n_launches + 2 * n if call == "cuLaunchKernel" else n  # of the second chunk's capture
        with fresh(engine) as graphs:
            with faults.fail_nth(n_call, 2, only=call) as plan:
                assert life(engine) == eager, (call, n)
            assert plan.fired == 1
            found = graphs.counters
            assert [found.failures, found.replays, found.eager_rounds] == [
                1, 2 * (n_parts - 1), n_parts + 2], (call, n)
            (off, why), = graphs.off.items()
            assert call in why and off.path.startswith("deep.")
        assert not left(engine)
    assert not graphs_of(engine).off and not engine.rank.graphs.off


@pytest.mark.slow
def test_every_graph_call_of_chunks_fails(engine: Engine, eager: dict[str, bytes]) -> None:
    """Each call n once and from there on; `--slow -s` prints how many lives that is."""
    n_parts = pass_of(engine).n_parts
    with fresh(engine), faults.count_calls() as counted:
        assert life(engine) == eager
    n_lives = 0
    for call in CALLS:
        for n in range(1, counted.names.count(call) + 1):
            # a capture that can never be ended breaks the context
            for forever in (False,) if call == "cuStreamEndCapture" else (False, True):
                with fresh(engine) as graphs, faults.fail_nth(n, 2, only=call, forever=forever) as plan:
                    assert life(engine) == eager, (call, n, forever)
                    found = graphs.counters
                    assert found.failures == plan.fired >= 1, (call, n, forever)
                    assert found.replays + found.eager_rounds == CHUNKS * n_parts
                assert not left(engine)
                n_lives += 1
    print(f"lives {n_lives}", flush=True)


@pytest.mark.parametrize("call", ["cuStreamBeginCapture", "cuGraphInstantiate", "cuGraphUpload",
                                  "cuGraphLaunch"])
def test_a_graph_call_that_always_fails_leaves_all_chunks_eager(
    engine: Engine, eager: dict[str, bytes], call: str
) -> None:
    n_parts = pass_of(engine).n_parts
    with fresh(engine) as graphs, faults.fail_nth(1, 2, only=call, forever=True) as plan:
        assert life(engine) == eager
        assert plan.fired == n_parts, "what is off is not asked for again"
        found = graphs.counters
        assert [found.failures, found.replays, found.eager_rounds] == [n_parts, 0, CHUNKS * n_parts]
    assert not left(engine)


def test_failures_of_chunks_switch_off_no_graph_of_decode(micro: Path, device: str) -> None:
    with Engine.open(micro, LIMITS, device=device) as opened:
        with faults.fail_nth(1, 2, only="cuGraphInstantiate", forever=True):
            life(opened, 2)
        assert len(graphs_of(opened).off) == pass_of(opened).n_parts
        made = opened.generate(SHORT, max_new_tokens=2, stop_ids=(), prefill=Prefill(deep=False))
        assert made.counters["graph_replays"] > 0 == made.counters["graph_failures"]
    assert len(opened.ledger.entries()) == 0
