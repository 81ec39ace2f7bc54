"""Who keeps whom open, and what stands in the ledger: for each kind of driver object."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from flashnext_drv.drv import api, faults
from flashnext_drv.drv.context import Context
from flashnext_drv.drv.graph import GraphExec, capture
from flashnext_drv.drv.memory import (
    DeviceArena,
    PinnedArena,
    copy_async,
    copy_to_device,
    copy_to_host,
    fill_bytes,
)
from flashnext_drv.drv.stream import Event, Stream
from flashnext_drv.errors import CapacityError, DriverError, UsageError
from flashnext_drv.kernels.bind import Kernels
from flashnext_drv.ledger import Ledger
from flashnext_drv.lifetime import Owner

from .test_launch import Site

pytestmark = pytest.mark.sim
MAKERS: dict[str, Callable[[Context], Owner]] = {
    "stream": lambda ctx: Stream(ctx, "one"),
    "event": lambda ctx: Event(ctx, "one"),
    "device": lambda ctx: DeviceArena(ctx, "one", 4096),
    "pinned": lambda ctx: PinnedArena(ctx, "one", 4096),
    "module": lambda ctx: Kernels(ctx, ("glue",), "one"),
}


@pytest.mark.parametrize("tier", MAKERS)
def test_an_object_holds_its_context_and_stands_in_its_ledger(
    device_name: str, ctx: Context, ledger: Ledger, tier: str
) -> None:
    before = dict(ledger.live())
    made = MAKERS[tier](ctx)
    grown = {name: n for name, n in ledger.live().items() if n != before.get(name)}
    assert list(grown) == [tier], grown
    assert any(name.startswith("one") for name in ledger.live(tier))
    with pytest.raises(UsageError, match="used by .*one"):
        ctx.close()
    with faults.count_calls() as count:
        made.close()
    assert dict(ledger.live()) == before and made.closed
    freed = {"stream": "cuStreamDestroy", "event": "cuEventDestroy", "device": "cuMemFree",
             "pinned": "cuMemFreeHost", "module": "cuModuleUnload"}[tier]
    assert count.names.count(freed) == 1, "closing gives it back to the driver, once"


def executable(stream: Stream, site: Site, kernels: Kernels) -> GraphExec:
    launch = site.launch(kernels)
    with capture(stream) as cap:
        launch.run(stream)
    graph = cap.graph("g")
    made = graph.instantiate()
    graph.close()
    return made


def test_graphs_and_executables_stand_in_the_ledger(ctx: Context, stream: Stream, ledger: Ledger) -> None:
    with Kernels(ctx, ("glue",)) as kernels, DeviceArena(ctx, "a", 1 << 16) as arena:
        site = Site(arena, stream)
        launch = site.launch(kernels)
        with capture(stream) as cap:
            launch.run(stream)
        assert ledger.live("graph") == {"test.stream.capture": 1}
        graph = cap.graph("g")
        assert ledger.live("graph") == {"g": 1}
        made = graph.instantiate()
        assert (ledger.live("graph"), ledger.live("graph_exec")) == ({"g": 1}, {"g.exec": 1})
        for owner in (kernels.module("glue"), arena):
            with pytest.raises(UsageError, match="used by"):
                owner.close()
        assert {"g", "g.exec"} <= set(ctx.borrowers())
        made.close()
        graph.close()
        assert ledger.live("graph") == ledger.live("graph_exec") == {}
        assert not arena.borrowers() and not kernels.module("glue").borrowers()


def test_a_captured_copy_or_fill_keeps_its_arenas_open(ctx: Context, stream: Stream) -> None:
    with DeviceArena(ctx, "a", 4096) as a, PinnedArena(ctx, "p", 4096) as p, DeviceArena(ctx, "f", 512) as f:
        with capture(stream) as cap:
            copy_async(stream, a.span("to", 64), p.span("from", 64), 64)
            fill_bytes(stream, f.span("filled", 64), 1)
        with cap.graph("g") as graph:
            assert {o.name for o in graph.holds} == {"context", "a", "p", "f"}
            for owner in (a, p, f):
                with pytest.raises(UsageError, match="used by g"):
                    owner.close()


def test_what_the_driver_took_for_a_module_is_measured(ctx: Context, ledger: Ledger) -> None:
    free = ctx.free_bytes()
    with Kernels(ctx, ("glue",)):
        taken = free - ctx.free_bytes()
        granted = [row.granted_bytes for row in ledger.table() if row.tier == "module"]
        assert granted == [max(taken, 0)]
        assert not ctx.facts.is_simulator or taken == 64 << 10, "the simulator charges 64 KiB a module"


def test_a_copy_into_pinned_memory_is_there_on_return(ctx: Context, stream: Stream) -> None:
    """The driver runs it later: only the wait inside makes the bytes good."""
    with DeviceArena(ctx, "a", 4096) as arena, PinnedArena(ctx, "p", 4096) as pinned:
        span, sent = arena.span("x", 1024), np.arange(1024, dtype=np.uint32).astype(np.uint8)
        copy_to_device(stream, span, sent)
        found = pinned.host(pinned.span("y", 1024))
        found[:] = 0
        copy_to_host(stream, found, span)
        assert (found == sent).all()


def test_a_stream_waits_for_the_event_of_another(ctx: Context, stream: Stream) -> None:
    """Without record or wait the second copy reads what was there before the first."""
    with DeviceArena(ctx, "a", 4096) as arena, Stream(ctx, "side") as side, Event(ctx, "e") as event, \
            PinnedArena(ctx, "p", 4096) as pinned:
        first, second = arena.span("x", 256), arena.span("y", 256)
        out = pinned.span("out", 256)
        fill_bytes(stream, first, 0)
        stream.synchronize()
        fill_bytes(stream, first, 7)
        stream.record(event)
        side.wait(event)
        copy_async(side, second, first, 256)
        copy_async(side, out, second, 256)
        side.synchronize()
        assert (pinned.host(out) == 7).all()


@pytest.mark.parametrize("waits", ["stream", "event"])
def test_bounded_and_unbounded_waits_end_with_the_work_done(
    ctx: Context, stream: Stream, waits: str
) -> None:
    with PinnedArena(ctx, "p", 4096) as pinned, Event(ctx, "e") as event:
        span = pinned.span("x", 256)
        for value, timeout_s in ((3, None), (4, 60.0)):
            fill_bytes(stream, span, value)
            stream.record(event)
            (stream if waits == "stream" else event).synchronize(timeout_s)
            assert (pinned.host(span) == value).all()
            assert stream.query() and event.query()


def test_an_arena_without_guards_says_so(ctx: Context) -> None:
    with DeviceArena(ctx, "a", 4096) as arena, pytest.raises(UsageError, match="has no guards"):
        arena.check_guards()


def test_a_context_is_not_closed_inside_its_own_active(device_name: str) -> None:
    ledger = Ledger()
    ctx = Context(0, ledger=ledger)
    with ctx.active(), pytest.raises(UsageError, match=r"inside its own active"):
        ctx._release()
    ctx.close()
    ledger.require_empty()


def test_counters_start_again(device_name: str, ctx: Context) -> None:
    ctx.free_bytes()
    faults.reset_counters()
    assert faults.counters() == {}
    ctx.free_bytes()
    assert faults.counters()["cuMemGetInfo"] == 1


def test_a_capture_inside_a_capture_is_refused_before_the_driver_is_asked(
    ctx: Context, stream: Stream
) -> None:
    refused = pytest.raises(UsageError, match="capturing already")
    with Stream(ctx, "side") as side, capture(stream) as cap:
        with faults.count_calls() as count, refused, capture(side):
            pass
        assert count.names == []
    cap.discard()


def test_closing_a_used_module_is_refused_before_anything_is_closed(ctx: Context, stream: Stream) -> None:
    with DeviceArena(ctx, "a", 1 << 16) as arena, Kernels(ctx, ("glue", "move")) as kernels, \
            executable(stream, Site(arena, stream), kernels):
        with pytest.raises(UsageError, match=r"Kernels kernels cannot be closed: used by g.exec"):
            kernels.close()
        assert not kernels.closed and not kernels.module("move").closed


def test_a_host_view_is_of_its_own_arena(ctx: Context) -> None:
    with PinnedArena(ctx, "p", 4096) as one, PinnedArena(ctx, "q", 4096) as other:
        span = other.span("x", 64)
        assert other.host(span).size == 64 and other.host().size == 4096
        with pytest.raises(UsageError, match="span x is not of arena p"):
            one.host(span)
        last = one.span("all", 4096)
        assert one.host(last).size == 4096
    with pytest.raises(UsageError, match="closed"):
        other.host(span)


def test_a_module_holds_the_context_itself(ctx: Context) -> None:
    with Kernels(ctx, ("glue",), "one") as kernels:
        assert kernels.module("glue").holds == (ctx,) and "one.glue" in ctx.borrowers()


def test_an_arena_is_granted_what_the_driver_took(ctx: Context, ledger: Ledger) -> None:
    free = ctx.free_bytes()
    with DeviceArena(ctx, "a", (2 << 20) + 1):
        taken = free - ctx.free_bytes()
        row = next(row for row in ledger.table() if row.owner == "a")
        assert row.live_bytes == (2 << 20) + 1 and row.granted_bytes == taken
        assert not ctx.facts.is_simulator or taken == 4 << 20, "the simulator charges whole 2 MiB pages"


def test_closed_kernels_make_no_launches(ctx: Context) -> None:
    kernels = Kernels(ctx, ("glue",))
    kernels.close()
    with pytest.raises(UsageError, match="Kernels kernels is closed"):
        kernels.launch("stream_add", 1, round=0, streams=0, y=0, inject=0, hidden=128)


def test_closed_graphs_and_executables_refuse_every_use(ctx: Context, stream: Stream) -> None:
    with DeviceArena(ctx, "a", 1 << 16) as arena, Kernels(ctx, ("glue",)) as kernels:
        launch = Site(arena, stream).launch(kernels)
        with capture(stream) as cap:
            launch.run(stream)
        graph = cap.graph("g")
        made = graph.instantiate()
        assert (len(graph.nodes()), graph.edges()) == (1, [])
        graph.close()
        for use in (graph.nodes, graph.edges, graph.dot, graph.instantiate):
            with pytest.raises(UsageError, match="Graph g is closed"):
                use()
        with pytest.raises(UsageError, match="Graph g is closed"):
            made.update(graph)
        made.close()
        with pytest.raises(UsageError, match=r"GraphExec g\.exec is closed"):
            made.upload(stream)
        with pytest.raises(UsageError, match=r"GraphExec g\.exec is closed"):
            made.update(graph)
        with pytest.raises(DriverError, match="cuGraphLaunch"):
            made.launch(stream)


def test_a_guarded_arena_is_filled_before_it_is_handed_out(ctx: Context, stream: Stream) -> None:
    """The poison must be there, not on its way: what is written next would be lost under it."""
    with DeviceArena(ctx, "a", 4096, guard=True) as arena:
        span, found = arena.span("x", 512), np.empty(512, np.uint8)
        copy_to_device(stream, span, np.full(512, 7, np.uint8))
        stream.synchronize()
        arena.check_guards()
        copy_to_host(stream, found, span)
        assert (found == 7).all()


def test_the_driver_says_whether_a_stream_is_captured(ctx: Context, stream: Stream) -> None:
    with ctx.active():
        assert api.cuStreamIsCapturing(stream.handle) is False
        with capture(stream) as cap:
            assert api.cuStreamIsCapturing(stream.handle) is True
        assert api.cuStreamIsCapturing(stream.handle) is False
    cap.discard()


def test_spans_of_nothing_and_of_all_that_is_left(ctx: Context) -> None:
    with DeviceArena(ctx, "a", 512) as arena:
        assert arena.span("nothing", 0).size_bytes == 0
        assert arena.span("all", 512).size_bytes == arena.used_bytes == 512
        for size in (1, -1):
            with pytest.raises(CapacityError, match="arena a has no room for more"):
                arena.span("more", size)


def test_a_launch_of_a_closed_module_is_refused_by_name(ctx: Context, stream: Stream) -> None:
    with DeviceArena(ctx, "a", 1 << 16) as arena:
        kernels = Kernels(ctx, ("glue",))
        launch = Site(arena, stream).launch(kernels)
        launch.run(stream)
        stream.synchronize()
        kernels.close()
        with pytest.raises(UsageError, match=r"Module kernels\.glue is closed"):
            launch.run(stream)
