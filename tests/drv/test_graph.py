"""Capture, replay and what a graph keeps open."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from flashnext_drv.drv import faults
from flashnext_drv.drv.context import Context, here
from flashnext_drv.drv.graph import capture
from flashnext_drv.drv.memory import (
    DeviceArena,
    PinnedArena,
    copy_async,
    copy_to_device,
    copy_to_host,
    fill_bytes,
)
from flashnext_drv.drv.stream import Event, Stream
from flashnext_drv.errors import DriverError, UsageError
from flashnext_drv.kernels.bind import Kernels
from flashnext_drv.ledger import Ledger

from .test_launch import HIDDEN, ROWS, Site


@pytest.fixture
def kernels(ctx: Context) -> Iterator[Kernels]:
    with Kernels(ctx, ("glue",)) as made:
        yield made


def test_a_captured_launch_runs_only_when_replayed(ctx: Context, stream: Stream, kernels: Kernels) -> None:
    with DeviceArena(ctx, "a", 1 << 16) as arena:
        site = Site(arena, stream)
        launch = site.launch(kernels)
        with capture(stream) as cap:
            launch.run(stream)
            launch.run(stream)
        with cap.graph("two") as graph, graph.instantiate() as ready:
            assert (site.found() == site.streams).all()
            ready.upload(stream)
            ready.launch(stream)
            assert (site.found() == site.wanted(2)).all()
            with ctx.active():
                ready.launch(stream)
            assert (site.found() == site.wanted(4)).all()
            nodes = graph.nodes()
            assert [(n.kind, n.name, n.grid, n.block) for n in nodes] \
                == [("kernel", "stream_add", (1, ROWS, 1), (256, 1, 1))] * 2
            assert len(graph.edges()) == 1
            dot = graph.dot()
            assert dot.count("stream_add") == 2 and dot.count("->") == 1 and dot.startswith('digraph "two"')


def test_update_takes_new_arguments_and_refuses_another_shape(ctx: Context, stream: Stream,
                                                              kernels: Kernels) -> None:
    with DeviceArena(ctx, "a", 1 << 16) as first, DeviceArena(ctx, "b", 1 << 16) as second:
        one, two = Site(first, stream), Site(second, stream)
        graphs = []
        for launches in ([one.launch(kernels)], [two.launch(kernels)],
                         [one.launch(kernels), one.launch(kernels)]):
            with capture(stream) as cap:
                for launch in launches:
                    launch.run(stream)
            graphs.append(cap.graph(f"g{len(graphs)}"))
        with graphs[0].instantiate() as ready:
            assert ready.update(graphs[1])
            ready.launch(stream)
            assert (two.found() == two.wanted()).all() and (one.found() == one.streams).all()
            assert not ready.update(graphs[2])
            ready.launch(stream)
            assert (two.found() == two.wanted(2)).all()
            for graph in graphs:
                graph.close()
            with pytest.raises(UsageError, match=r"used by g0\.exec"):
                second.close()


def test_what_an_executable_captured_cannot_be_closed(ctx: Context, stream: Stream, kernels: Kernels) -> None:
    with DeviceArena(ctx, "a", 1 << 16) as arena, PinnedArena(ctx, "p", 4096) as pinned:
        site = Site(arena, stream)
        with capture(stream) as cap:
            site.launch(kernels).run(stream)
            copy_async(stream, pinned.span("x", 16), arena.span("y", 16), 16)
        graph = cap.graph("g")
        ready = graph.instantiate()
        graph.close()
        for owner in (arena, pinned, kernels.module("glue"), kernels):
            with pytest.raises(UsageError, match=r"g\.exec"):
                owner.close()
        ready.close()
    assert not kernels.closed


def test_nothing_is_allocated_or_waited_for_while_capturing(ctx: Context, stream: Stream,
                                                            ledger: Ledger) -> None:
    with DeviceArena(ctx, "a", 4096) as arena, Event(ctx, "e") as event:
        span = arena.span("x", 64)
        for act in (lambda: DeviceArena(ctx, "b", 64), lambda: PinnedArena(ctx, "p", 64), stream.synchronize,
                    stream.query, event.synchronize, event.query, lambda: Stream(ctx, "s"),
                    lambda: copy_to_device(stream, span, np.zeros(4, np.uint8)), arena.close,
                    lambda: copy_to_host(stream, np.zeros(4, np.uint8), span)):
            with pytest.raises(UsageError, match="captur"), capture(stream):
                act()
            assert here.capture is None and not faults.capturing()
            stream.synchronize()
            if arena.closed:
                break
    assert ledger.live("graph") == {}


def test_an_error_inside_ends_the_capture_and_frees_the_graph(ctx: Context, stream: Stream,
                                                              ledger: Ledger) -> None:
    with DeviceArena(ctx, "a", 4096) as arena:
        span = arena.span("x", 64)
        with pytest.raises(KeyError), capture(stream) as cap:
            fill_bytes(stream, span, 1)
            raise KeyError
        with pytest.raises(UsageError, match="nothing captured"):
            cap.graph("g")
        fill_bytes(stream, span, 2)
        found = np.zeros(64, np.uint8)
        copy_to_host(stream, found, span)
        assert (found == 2).all() and ledger.live("graph") == {}


def test_a_capture_that_cannot_end_is_reported_and_leaves_the_stream_usable(ctx: Context, stream: Stream,
                                                                             ledger: Ledger) -> None:
    with DeviceArena(ctx, "a", 4096) as arena:
        with faults.fail_nth(1, 901, only="cuStreamEndCapture"), pytest.raises(DriverError,
                                                                               match="EndCapture"), \
                capture(stream):
            fill_bytes(stream, arena.span("x", 64), 1)
        stream.synchronize()
    assert ledger.live("graph") == {}


def test_captures_do_not_nest_and_are_used_once(ctx: Context, stream: Stream) -> None:
    with Stream(ctx, "other") as other:
        outer = capture(stream)
        with outer, pytest.raises(UsageError, match="capturing already"), capture(other):
            pass
        outer.discard()
        with pytest.raises(UsageError, match="used once"), outer:
            pass
        with pytest.raises(UsageError, match="nothing captured"):
            outer.graph("late")


def test_a_side_stream_joins_by_events(ctx: Context, stream: Stream) -> None:
    with DeviceArena(ctx, "a", 4096) as arena, Stream(ctx, "side") as side, Event(ctx, "fork") as fork, \
            Event(ctx, "join") as join:
        x, y = arena.span("x", 64), arena.span("y", 64)
        with capture(stream) as cap:
            fill_bytes(stream, x, 1)
            stream.record(fork)
            side.wait(fork)
            fill_bytes(side, y, 2)
            side.record(join)
            stream.wait(join)
            copy_async(stream, x.sub(0, 8), y.sub(0, 8), 8)
        with cap.graph("forked") as graph, graph.instantiate() as ready:
            ready.launch(stream)
            found = np.zeros(64, np.uint8)
            copy_to_host(stream, found, x)
            assert found.tolist() == [2] * 8 + [1] * 56
            assert sorted(n.kind for n in graph.nodes()) == ["memcpy", "memset", "memset"]


def test_the_grid_of_a_node_is_the_launches(ctx: Context, stream: Stream, kernels: Kernels) -> None:
    with DeviceArena(ctx, "a", 1 << 16) as arena:
        site = Site(arena, stream)
        launch = kernels.launch("stream_add", (1, 1), hidden=HIDDEN, **site.spans)
        with capture(stream) as cap:
            launch.run(stream)
        with cap.graph("g") as graph:
            assert graph.nodes()[0].grid == (1, 1, 1)
