"""The cache of executables on launches of one small kernel: what hits, what misses, what goes, who holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from flashnext_drv.drv import faults
from flashnext_drv.drv.builder import THREAD, Build
from flashnext_drv.drv.context import Context
from flashnext_drv.drv.memory import DeviceArena
from flashnext_drv.drv.module import Launch
from flashnext_drv.drv.stream import Stream
from flashnext_drv.engine import graphs as graphs_module
from flashnext_drv.engine.graphs import FEWEST, MOST_FAILURES, GraphSet, Identity, fingerprint_of
from flashnext_drv.errors import ContextLost, UsageError
from flashnext_drv.kernels.bind import Kernels
from flashnext_drv.ledger import Ledger
from flashnext_drv.model.layout import Limits
from flashnext_drv.sim import control

from ..drv.test_launch import Site

pytestmark = pytest.mark.sim
FIRST = Identity("body", 1, (1,), 2048, "4x64", -1, (0, 1), 7)
OTHER: dict[str, Any] = {"path": "window", "rows": 2, "pattern": (1, 1), "context": 4096, "pages": "8x64",
                         "lines": 3, "ranks": (1, 2), "fingerprint": 8}
Opener = Callable[..., GraphSet]


@pytest.fixture
def kernels(ctx: Context) -> Iterator[Kernels]:
    with Kernels(ctx, ("glue",)) as made:
        yield made


@pytest.fixture
def arena(ctx: Context) -> Iterator[DeviceArena]:
    with DeviceArena(ctx, "a", 1 << 16) as made:
        yield made


@pytest.fixture
def site(arena: DeviceArena, stream: Stream) -> Site:
    return Site(arena, stream)


@pytest.fixture
def launch(site: Site, kernels: Kernels) -> Launch:
    return site.launch(kernels)


@pytest.fixture
def opened(ctx: Context, kernels: Kernels, launch: Launch) -> Iterator[Opener]:
    """opened(**limits): a GraphSet; all are closed."""
    made: list[GraphSet] = []

    def give(**limits: Any) -> GraphSet:
        made.append(GraphSet(ctx, (kernels,), Limits(**limits)))
        return made[-1]

    yield give
    for each in made:
        each.close()


def numbered(n: int, path: str = "body") -> Identity:
    return replace(FIRST, path=path, context=n)


def until_made(graphs: GraphSet, identity: Identity, launches: list[Launch], stream: Stream) -> int:
    """Sightings in vain, until a replay."""
    for n in range(1000):
        if graphs.replay(identity, launches, stream):
            return n
        if not graphs.n_pending:
            raise AssertionError(f"nothing is being made: {graphs.off}")
        stream.synchronize()
        threading.Event().wait(0.001)
    raise AssertionError("never made")


def test_the_fields_of_an_identity_are_those_flipped_here() -> None:
    assert {field.name for field in fields(Identity)} == set(OTHER)
    assert str(FIRST) == "body.rows1.1.context2048"
    assert str(replace(FIRST, rows=8, pattern=(1, 1, 1, 5), context=0)) == "body.rows8.3x1+5"


@pytest.mark.parametrize("name", list(OTHER))
def test_each_field_alone_misses(opened: Opener, launch: Launch, stream: Stream, name: str) -> None:
    graphs, other = opened(), replace(FIRST, **{name: OTHER[name]})
    for identity, n_made in ((FIRST, 1), (FIRST, 1), (other, 2), (other, 2), (FIRST, 2)):
        if name == "fingerprint" and identity is FIRST and n_made == 2:
            n_made = 3  # an address that went back: dropped too
        assert graphs.replay(identity, [launch], stream)
        assert graphs.counters.captures == graphs.counters.instantiations == n_made, identity
    assert graphs.counters.replays == 5 and graphs.counters.uploads == graphs.counters.captures
    assert len(graphs.identities()) == (1 if name == "fingerprint" else 2)
    assert graphs.counters.dropped == (2 if name == "fingerprint" else 0)


def test_a_changed_address_drops_the_paths_graphs_alone(
    opened: Opener, launch: Launch, stream: Stream
) -> None:
    graphs = opened()
    kept = [numbered(1), numbered(2), numbered(1, "head")]
    for identity in kept:
        assert graphs.replay(identity, [launch], stream)
    moved = replace(numbered(2), fingerprint=9)
    assert graphs.replay(moved, [launch], stream)
    assert graphs.identities() == (numbered(1, "head"), moved)
    assert graphs.counters_of("body").dropped == 2 and graphs.counters_of("head").dropped == 0
    assert graphs.replay(replace(numbered(1), fingerprint=9), [launch], stream)
    assert graphs.counters.dropped == 2, "what came after the change stays"


def test_the_fingerprint_sees_function_grid_and_arguments(
    ctx: Context, stream: Stream, kernels: Kernels, site: Site, launch: Launch
) -> None:
    def bound(grid: tuple[int, int] = (1, 3), hidden: int = 256, **spans: Any) -> int:
        return fingerprint_of([kernels.launch("stream_add", grid, hidden=hidden, **{**site.spans, **spans})])

    assert bound() == bound() == fingerprint_of([launch])
    with DeviceArena(ctx, "b", 1 << 16) as second:
        others = [bound(grid=(1, 2)), bound(hidden=128), bound(y=second.span("y", 4 * 256 * 3))]
    assert len({bound(), *others, fingerprint_of([launch, launch]), fingerprint_of([])}) == 6


def test_a_replay_runs_what_was_captured_once(
    opened: Opener, launch: Launch, stream: Stream, site: Site, device_name: str
) -> None:
    graphs = opened()
    assert graphs.replay(FIRST, [launch], stream)
    assert (site.found() == site.wanted(1)).all(), "capturing runs nothing"
    assert graphs.replay(FIRST, [launch], stream)
    assert (site.found() == site.wanted(2)).all()
    assert [node.name for node in graphs.graph(FIRST).nodes()] == ["stream_add"]
    (size,) = graphs.device_bytes.values()
    assert graphs.report()["bytes"] == size and (size > 0 or device_name != "sim")


def test_the_oldest_goes_first(opened: Opener, launch: Launch, stream: Stream, ledger: Ledger) -> None:
    graphs = opened(graphs=3)
    for n in (1, 2, 3, 1):
        assert graphs.replay(numbered(n, "abc"[n - 1]), [launch], stream)
    assert graphs.replay(numbered(4, "d"), [launch], stream)
    assert [each.path for each in graphs.identities()] == ["c", "a", "d"]
    assert graphs.counters.evicted == graphs.counters_of("b").evicted == 1
    assert sum(ledger.live("graph_exec").values()) == sum(ledger.live("graph").values()) == 3


def test_what_must_go_is_updated_where_the_kernels_are_the_same(
    opened: Opener, kernels: Kernels, launch: Launch, stream: Stream, site: Site, ledger: Ledger
) -> None:
    graphs = opened(graphs=2)
    wide = kernels.launch("stream_add", (1, 4), hidden=256, **site.spans)
    for n, some in ((1, [launch]), (2, [launch]), (3, [wide])):
        assert graphs.replay(numbered(n), some, stream)
    assert (graphs.counters.updates, graphs.counters.instantiations, graphs.counters.evicted) == (1, 2, 1)
    assert graphs.replay(numbered(3), [wide], stream) and (site.found() == site.wanted(4)).all()
    assert graphs.graph(numbered(3)).nodes()[0].grid == (1, 4, 1)
    # two kernels where one was: made anew
    assert graphs.replay(numbered(4), [launch, launch], stream)
    assert (graphs.counters.updates, graphs.counters.instantiations, graphs.counters.evicted) == (1, 3, 2)
    assert (site.found() == site.wanted(6)).all()
    assert sum(ledger.live("graph_exec").values()) == sum(ledger.live("graph").values()) == 2


def test_one_of_the_oldest_quarter_that_can_be_updated_goes_first(
    opened: Opener, launch: Launch, stream: Stream
) -> None:
    graphs = opened(graphs=5)
    for n, path in enumerate(("a", "body", "b", "body", "c")):
        assert graphs.replay(numbered(n, path), [launch], stream)
    assert graphs.replay(numbered(9), [launch], stream)
    assert [each.context for each in graphs.identities()] == [0, 2, 3, 4, 9]
    assert graphs.counters.updates == graphs.counters.evicted == 1
    assert graphs.replay(replace(numbered(9), rows=2), [launch], stream)
    assert [each.context for each in graphs.identities()] == [2, 3, 4, 9, 9]
    assert (graphs.counters.updates, graphs.counters.evicted) == (1, 2), "other rows are made anew"


@pytest.mark.parametrize("code", [1, 2, 910])
def test_an_update_that_fails_ends_in_an_instantiation(
    opened: Opener, launch: Launch, stream: Stream, site: Site, ledger: Ledger, code: int
) -> None:
    graphs = opened(graphs=2)
    for n in (1, 2):
        assert graphs.replay(numbered(n), [launch], stream)
    with faults.fail_nth(1, code, only="cuGraphExecUpdate") as plan:
        assert graphs.replay(numbered(3), [launch], stream)
    found = graphs.counters
    assert plan.fired == 1 and not graphs.off and (site.found() == site.wanted(3)).all()
    assert (found.updates, found.updates_refused, found.instantiations) == (0, 1, 3)
    assert sum(ledger.live("graph_exec").values()) == sum(ledger.live("graph").values()) == 2


def test_little_memory_sinks_the_cap(opened: Opener, launch: Launch, stream: Stream) -> None:
    graphs = opened(graphs=64)
    for n in range(8):
        assert graphs.replay(numbered(n, f"p{n}"), [launch], stream)
    graphs._floor_bytes = 1 << 60
    for n, cap in ((8, 7), (9, 6), (10, 5), (11, 4), (12, 4), (13, 4)):
        assert graphs.replay(numbered(n, f"p{n}"), [launch], stream)
        assert (graphs.cap, len(graphs.identities())) == (cap, cap)
    graphs._floor_bytes = 0
    assert graphs.replay(numbered(14, "p14"), [launch], stream) and graphs.cap == 4
    few = opened(graph_floor_bytes=1 << 50)
    for n in range(5):
        assert few.replay(numbered(n, f"p{n}"), [launch], stream)
        assert len(few.identities()) == min(n + 1, FEWEST)
    assert few.cap == FEWEST


def test_memory_at_the_floor_is_enough(
    ctx: Context, opened: Opener, launch: Launch, stream: Stream, device_name: str
) -> None:
    if device_name != "sim":
        pytest.skip("others use the device's memory too")
    graphs = opened()
    for n in range(4):
        assert graphs.replay(numbered(n), [launch], stream)
    graphs._floor_bytes = ctx.free_bytes()
    assert graphs.replay(numbered(4), [launch], stream) and len(graphs.identities()) == 5
    graphs._floor_bytes = ctx.free_bytes() + 1
    assert graphs.replay(numbered(5), [launch], stream) and len(graphs.identities()) == graphs.cap == 4


def test_what_goes_is_waited_for(opened: Opener, launch: Launch, stream: Stream) -> None:
    """A replay may be in flight when its executable has to make room or is dropped."""
    graphs = opened(graphs=2)
    for n in (1, 2):
        assert graphs.replay(numbered(n, f"p{n}"), [launch], stream)
    for identity in (numbered(3, "p3"), replace(numbered(3, "p3"), fingerprint=8)):
        with faults.count_calls() as count:
            assert graphs.replay(identity, [launch], stream)
        names = [name for name in count.names if name in ("cuStreamSynchronize", "cuGraphExecDestroy")]
        assert names == ["cuStreamSynchronize", "cuGraphExecDestroy"]


@pytest.mark.parametrize("call", ["cuMemGetInfo", "cuStreamSynchronize", "cuGraphDestroy",
                                  "cuGraphExecDestroy"])
@pytest.mark.parametrize("alike", [False, True])
def test_room_that_cannot_be_made_leaves_nothing_behind(
    opened: Opener, launch: Launch, stream: Stream, ledger: Ledger, call: str, alike: bool
) -> None:
    graphs = opened(graphs=2)
    for n in (1, 2):
        assert graphs.replay(numbered(n), [launch], stream)
    wanted = numbered(3) if alike else replace(numbered(3), rows=2)
    with faults.fail_nth(1, 1, only=call) as plan:
        replayed = graphs.replay(wanted, [launch], stream)
    if alike and call == "cuGraphExecDestroy":
        assert replayed and not plan.fired, "an update destroys nothing"
        return
    assert plan.fired == 1 and not replayed and call in graphs.off[wanted]
    n_kept = len(graphs.identities())
    assert n_kept == (2 if call in ("cuMemGetInfo", "cuStreamSynchronize") else 1)
    assert sum(ledger.live("graph_exec").values()) == sum(ledger.live("graph").values()) == n_kept
    assert graphs.replay(numbered(2), [launch], stream) and graphs.replay(numbered(4), [launch], stream)


def test_a_thread_without_its_stream_leaves_nothing_behind(
    opened: Opener, launch: Launch, stream: Stream, ledger: Ledger
) -> None:
    graphs = opened(graph_async=True)
    with faults.fail_nth(1, 2, only="cuStreamCreate") as plan:
        assert not graphs.replay(FIRST, [launch], stream)
    assert plan.fired == 1 and "cuStreamCreate" in graphs.off[FIRST] and not graphs.n_pending
    assert ledger.live("graph") == {} and until_made(graphs, numbered(2), [launch], stream) >= 1


def test_made_at_the_second_sighting(opened: Opener, launch: Launch, stream: Stream) -> None:
    graphs = opened(graph_after=2)
    other = numbered(2)
    for identity, replayed in ((FIRST, False), (other, False), (FIRST, True), (other, True), (FIRST, True)):
        assert graphs.replay(identity, [launch], stream) == replayed
    assert graphs.counters.captures == 2


def test_first_sightings_are_forgotten_at_a_number(
    opened: Opener, launch: Launch, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs_module, "_SEEN", 2)
    graphs = opened(graph_after=2)
    for n in (1, 2, 3):
        assert not graphs.replay(numbered(n), [launch], stream)
    assert graphs.replay(numbered(2), [launch], stream)
    assert not graphs.replay(numbered(1), [launch], stream), "its first sighting was forgotten"


def test_many_failures_switch_all_graphs_off(opened: Opener, launch: Launch, stream: Stream) -> None:
    graphs = opened()
    good = numbered(99)
    assert graphs.replay(good, [launch], stream)
    with faults.fail_nth(1, 2, only="cuGraphInstantiate", forever=True) as plan:
        for n in range(MOST_FAILURES + 2):
            assert not graphs.replay(numbered(n), [launch], stream)
    assert plan.fired == MOST_FAILURES == graphs.counters.failures == len(graphs.off)
    assert "cuGraphInstantiate" in graphs.all_off and graphs.report()["all_off"]
    assert not graphs.replay(good, [launch], stream), "all are off"


def test_what_is_captured_cannot_be_closed(
    opened: Opener, launch: Launch, stream: Stream, arena: DeviceArena, kernels: Kernels
) -> None:
    graphs = opened()
    assert "graphs" in kernels.borrowers(), "also before anything is captured"
    assert graphs.replay(FIRST, [launch], stream)
    for owner in (arena, kernels):
        with pytest.raises(UsageError, match=r"body\.rows1"):
            owner.close()
    graphs.close()
    assert not [name for name in (*arena.borrowers(), *kernels.borrowers()) if "body" in name]


def test_what_is_being_made_holds_what_it_captured(
    opened: Opener, launch: Launch, stream: Stream, arena: DeviceArena
) -> None:
    """Pending at close: the thread is joined, and nothing of it is left."""
    graphs = opened(graph_async=True)
    assert not graphs.replay(FIRST, [launch], stream)
    with pytest.raises(UsageError, match=r"body\.rows1"):
        arena.close()
    assert graphs.n_pending == 1 and not graphs.identities()
    graphs.close()
    assert not arena.borrowers()
    assert not [each for each in threading.enumerate() if each.name == "flashnext-graphs"]


def test_a_thread_makes_it_while_rounds_run_eagerly(
    opened: Opener, launch: Launch, stream: Stream, site: Site, device_name: str
) -> None:
    looks = []
    for _ in range(2):  # the same in every set: the seed and the place in the row say when
        graphs = opened(graph_async=True)
        with faults.count_calls() as mine, faults.count_calls(THREAD) as its:
            looks.append([until_made(graphs, numbered(n), [launch], stream) for n in range(4)])
        assert its.names.count("cuGraphInstantiate") == its.names.count("cuGraphUpload") == 4
        assert its.names[0] == "cuCtxPushCurrent" and its.names[-1] == "cuCtxPopCurrent"
        assert not {"cuGraphInstantiate", "cuGraphUpload"} & set(mine.names)
        assert graphs.counters.replays == 4 and graphs.counters.uploads == 4 and not graphs.off
        graphs.close()
    assert all(n >= 1 for n in looks[0])
    if device_name == "sim":
        assert looks[0] == looks[1] and len(set(looks[0])) > 1
    assert (site.found() == site.wanted(8)).all()


def test_kept_and_made_stay_within_the_cap(opened: Opener, launch: Launch, stream: Stream) -> None:
    graphs = opened(graph_async=True, graphs=FEWEST)
    for n in range(30):  # more are new than can be kept, before the first is ready
        graphs.replay(numbered(n % 6), [launch], stream)
        assert len(graphs.identities()) + graphs.n_pending <= FEWEST, n


def test_the_simulators_thread_ends_within_the_look(
    opened: Opener, launch: Launch, stream: Stream, device_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow a build is: one look at the earliest, seven at the latest."""
    if device_name != "sim":
        pytest.skip("the simulator's moments")
    run = Build.run

    def slowly(build: Build, stream: Stream, wait: bool = False) -> None:
        threading.Event().wait(0.002)
        run(build, stream, wait)

    monkeypatch.setattr(Build, "run", slowly)
    graphs = opened(graph_async=True, graphs=64)
    looks = [until_made(graphs, numbered(n), [launch], stream) for n in range(40)]
    assert (min(looks), max(looks)) == (1, 7)


def test_the_thread_runs_on_its_own_on_a_device(
    ctx: Context, opened: Opener, launch: Launch, stream: Stream, ledger: Ledger
) -> None:
    """Also in the simulator: nobody looks, and the build ends; closed then, it leaves nothing."""
    graphs = opened(graph_async=True)
    builder = graphs._builder
    assert builder is not None and "graphs.builder" in ctx.borrowers()
    builder._seeded = False
    assert not graphs.replay(FIRST, [launch], stream)
    for _ in range(2000):
        if builder._ended.qsize():
            break
        threading.Event().wait(0.001)
    assert builder._ended.qsize() == 1 and sum(ledger.live("graph_exec").values()) == 1
    graphs.close()
    assert ledger.live("graph") == ledger.live("graph_exec") == {}
    with pytest.raises(UsageError, match="closed"):
        builder.submit(Build(None))  # type: ignore[arg-type]


@pytest.mark.parametrize("late", [False, True])
def test_an_upload_that_fails_behind_an_update(
    opened: Opener, launch: Launch, stream: Stream, ledger: Ledger, late: bool
) -> None:
    graphs = opened(graphs=2, graph_async=late)
    for n in (1, 2):
        assert graphs.replay(numbered(n), [launch], stream) or until_made(
            graphs, numbered(n), [launch], stream)
    with faults.fail_nth(1, 2, only="cuGraphUpload", thread=THREAD if late else "") as plan:
        assert not graphs.replay(numbered(3), [launch], stream)
        while graphs.n_pending:
            assert not graphs.replay(numbered(3), [launch], stream)
            threading.Event().wait(0.001)
    assert plan.fired == 1 and "cuGraphUpload" in graphs.off[numbered(3)]
    assert (graphs.counters.updates, graphs.counters.uploads) == (1, 2)
    assert sum(ledger.live("graph_exec").values()) == sum(ledger.live("graph").values()) == 1


def test_a_context_lost_in_an_update_reaches_the_caller(device_name: str, ledger: Ledger) -> None:
    with Context(0, ledger=ledger) as ctx, Stream(ctx, "s") as stream, Kernels(ctx, ("glue",)) as kernels, \
            DeviceArena(ctx, "a", 1 << 16) as arena:
        launch = Site(arena, stream).launch(kernels)
        with GraphSet(ctx, (kernels,), Limits(graphs=2)) as graphs:
            for n in (1, 2):
                assert graphs.replay(numbered(n), [launch], stream)
            with faults.fail_nth(1, 700, only="cuGraphExecUpdate"), pytest.raises(ContextLost) as found:
                graphs.replay(numbered(3), [launch], stream)
        assert ctx.broken and found.value.call == "cuGraphExecUpdate"


def test_the_seed_chooses_when(opened: Opener, launch: Launch, stream: Stream, device_name: str) -> None:
    if device_name != "sim":
        pytest.skip("the simulator's seed")
    found = set()
    try:
        for seed in range(6):
            control.set_seed(seed)
            graphs = opened(graph_async=True)
            found.add(until_made(graphs, FIRST, [launch], stream))
    finally:
        control.set_seed(0)
    assert len(found) > 2


@pytest.mark.parametrize("call", ["cuCtxPushCurrent", "cuMemGetInfo", "cuGraphInstantiate", "cuGraphUpload",
                                  "cuStreamSynchronize", "cuCtxPopCurrent"])
@pytest.mark.parametrize("forever", [False, True])
def test_a_late_error_switches_the_identity_off(
    opened: Opener, launch: Launch, stream: Stream, ledger: Ledger, call: str, forever: bool
) -> None:
    graphs = opened(graph_async=True)
    with faults.fail_nth(1, 2, only=call, forever=forever, thread=THREAD) as plan:
        assert not graphs.replay(FIRST, [launch], stream)
        while graphs.n_pending:
            assert not graphs.replay(FIRST, [launch], stream)
            threading.Event().wait(0.001)
        assert plan.fired >= 1
    assert call in graphs.off[FIRST] and graphs.counters.failures == 1
    assert not graphs.replay(FIRST, [launch], stream)
    assert ledger.live("graph") == ledger.live("graph_exec") == {}
    assert until_made(graphs, numbered(5), [launch], stream) >= 1, "the thread goes on"


def test_an_update_on_the_thread(
    opened: Opener, launch: Launch, stream: Stream, site: Site, ledger: Ledger
) -> None:
    graphs = opened(graph_async=True, graphs=2)
    for n in range(4):
        until_made(graphs, numbered(n), [launch], stream)
    assert (graphs.counters.updates, graphs.counters.instantiations) == (2, 2)
    assert (site.found() == site.wanted(4)).all()
    with faults.fail_nth(1, 1, only="cuGraphExecUpdate", thread=THREAD) as plan:
        until_made(graphs, numbered(9), [launch], stream)
    assert plan.fired == 1 and graphs.counters.updates_refused == 1 and not graphs.off
    assert sum(ledger.live("graph_exec").values()) == sum(ledger.live("graph").values()) == 2


def test_dropped_while_it_is_made(
    opened: Opener, launch: Launch, stream: Stream, ledger: Ledger
) -> None:
    graphs = opened(graph_async=True)
    assert not graphs.replay(FIRST, [launch], stream)
    moved = replace(FIRST, fingerprint=8)
    until_made(graphs, moved, [launch], stream)
    while graphs.n_pending:
        graphs.replay(moved, [launch], stream)
        threading.Event().wait(0.001)
    assert graphs.identities() == (moved,) and graphs.counters.dropped == 1
    assert sum(ledger.live("graph_exec").values()) == sum(ledger.live("graph").values()) == 1


def test_a_context_lost_on_the_thread_reaches_the_caller(device_name: str, ledger: Ledger) -> None:
    with Context(0, ledger=ledger) as ctx, Stream(ctx, "s") as stream, Kernels(ctx, ("glue",)) as kernels, \
            DeviceArena(ctx, "a", 1 << 16) as arena:
        launch = Site(arena, stream).launch(kernels)
        with GraphSet(ctx, (kernels,), Limits(graph_async=True)) as graphs, \
                faults.fail_nth(1, 700, only="cuGraphInstantiate", thread=THREAD), \
                pytest.raises(ContextLost):
            for n in range(1000):
                graphs.replay(numbered(n % 3), [launch], stream)
                threading.Event().wait(0.001)
        assert ctx.broken
