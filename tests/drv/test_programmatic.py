"""Launches that may start ahead of the end of the one before: eager, captured, across events, and what the
simulator says of a kernel that does not keep to the rule."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from flashnext_drv.drv import api, faults
from flashnext_drv.drv.context import Context
from flashnext_drv.drv.graph import capture
from flashnext_drv.drv.memory import DeviceArena, Span, copy_to_device, copy_to_host
from flashnext_drv.drv.module import Launch
from flashnext_drv.drv.stream import Event, Stream
from flashnext_drv.errors import ContextLost, DriverError
from flashnext_drv.kernels.bind import Kernels
from flashnext_drv.sim import control

from .test_launch import Site

STEPS = 12
WAITS, READS_EARLY, WARP_GOES_ON = 11, 12, 13       # modes of the kernel `fault`


@pytest.fixture
def kernels(ctx: Context) -> Iterator[Kernels]:
    with Kernels(ctx, ("glue", "probe")) as made:
        yield made


@pytest.fixture
def seeded(device_name: str) -> Iterator[None]:
    """Seeds may be set; put back afterwards.  Skipped on a real device."""
    if device_name != "sim":
        pytest.skip("what the simulator does by seed")
    before = control.counter("seed")
    yield
    control.set_seed(before)


def ahead(site: Site, kernels: Kernels) -> Launch:
    launch = site.launch(kernels)
    launch.programmatic = kernels.may_lead("stream_add")
    return launch


class Chain:
    """STEPS launches of `fault`, each of which adds 1 to what the one before left."""

    def __init__(self, arena: DeviceArena, stream: Stream, kernels: Kernels, mode: int,
                 grid: int = 1) -> None:
        self.stream = stream
        self.spans: list[Span] = [arena.span(f"step{i}", 512) for i in range(STEPS + 1)]
        self.launches = [kernels.launch("fault", grid, x=x, y=y, mode=mode, index=0)
                         for x, y in zip(self.spans, self.spans[1:], strict=False)]
        for launch in self.launches:
            launch.programmatic = kernels.may_lead("fault")

    def start(self, value: int) -> None:
        for span in self.spans:
            copy_to_device(self.stream, span, np.full(128, value, np.uint32))

    def run(self) -> None:
        for launch in self.launches:
            launch.run(self.stream)

    def found(self) -> set[int]:
        out = np.empty(128, np.uint32)
        copy_to_host(self.stream, out, self.spans[-1])
        return set(map(int, out))


def test_eager_launches_ahead_add_up(ctx: Context, stream: Stream, kernels: Kernels) -> None:
    with DeviceArena(ctx, "a", 1 << 16) as arena:
        site = Site(arena, stream)
        launch = ahead(site, kernels)
        assert launch.programmatic == (ctx.facts.cc >= (9, 0))
        before = api.counters().get("cuLaunchKernelEx", 0)
        for _ in range(5):
            launch.run(stream)
        with ctx.active():
            launch.run(stream)
        assert (site.found() == site.wanted(6)).all()
        assert api.counters().get("cuLaunchKernelEx", 0) - before == (6 if launch.programmatic else 0)


def test_one_launch_on_two_streams_and_off_again(ctx: Context, stream: Stream, kernels: Kernels) -> None:
    with DeviceArena(ctx, "a", 1 << 16) as arena, Stream(ctx, "other") as other:
        site = Site(arena, stream)
        launch = ahead(site, kernels)
        stream.synchronize()
        launch.run(other)
        other.synchronize()
        launch.run(stream)
        launch.programmatic = False
        launch.run(stream)
        assert not launch.programmatic
        assert (site.found() == site.wanted(3)).all()


def test_captured_launches_have_programmatic_edges(ctx: Context, stream: Stream, kernels: Kernels) -> None:
    with DeviceArena(ctx, "a", 1 << 16) as arena:
        site = Site(arena, stream)
        launch, plain = ahead(site, kernels), site.launch(kernels)
        with capture(stream) as cap:
            for each in (launch, launch, plain, launch):
                each.run(stream)
        with cap.graph("four") as graph, graph.instantiate() as ready:
            assert graph.edges() == [(0, 1), (1, 2), (2, 3)]
            assert graph.programmatic_edges() == ([(0, 1), (2, 3)] if launch.programmatic else [])
            assert graph.dot().count("dashed") == len(graph.programmatic_edges())
            ready.launch(stream)
            ready.launch(stream)
            assert (site.found() == site.wanted(8)).all()


def test_an_update_keeps_the_edges_and_other_edges_are_refused(ctx: Context, stream: Stream,
                                                              kernels: Kernels) -> None:
    with DeviceArena(ctx, "a", 1 << 16) as first, DeviceArena(ctx, "b", 1 << 16) as second:
        one, two = Site(first, stream), Site(second, stream)
        graphs = []
        for site, programmatic in ((one, True), (two, True), (two, False)):
            with capture(stream) as cap:
                for _ in range(3):
                    launch = ahead(site, kernels)
                    launch.programmatic &= programmatic
                    launch.run(stream)
            graphs.append(cap.graph(f"graph{len(graphs)}"))
        with graphs[0].instantiate() as ready:
            assert ready.update(graphs[1])
            ready.launch(stream)
            assert (one.found() == one.streams).all() and (two.found() == two.wanted(3)).all()
            if ahead(one, kernels).programmatic and ctx.facts.is_simulator:
                assert not ready.update(graphs[2])
                ready.launch(stream)
                assert (two.found() == two.wanted(6)).all()
        for graph in graphs:
            graph.close()


def test_a_launch_ahead_waits_for_an_event(ctx: Context, stream: Stream, kernels: Kernels) -> None:
    with DeviceArena(ctx, "a", 1 << 16) as arena, Stream(ctx, "other") as other, Event(ctx, "e") as event, \
            Event(ctx, "back") as back:
        site = Site(arena, stream)
        launch = ahead(site, kernels)
        for _ in range(4):
            launch.run(stream)
            stream.record(event)
            other.wait(event)
            launch.run(other)
            other.record(back)
            stream.wait(back)
        assert (site.found() == site.wanted(8)).all()


def test_a_captured_fork_is_joined_before_a_launch_ahead(ctx: Context, stream: Stream,
                                                         kernels: Kernels) -> None:
    with DeviceArena(ctx, "a", 1 << 16) as arena, Stream(ctx, "other") as other, Event(ctx, "e") as event, \
            Event(ctx, "back") as back:
        site = Site(arena, stream)
        launch = ahead(site, kernels)
        with capture(stream) as cap:
            launch.run(stream)
            stream.record(event)
            other.wait(event)
            launch.run(other)
            other.record(back)
            stream.wait(back)
            launch.run(stream)
        with cap.graph("fork") as graph, graph.instantiate() as ready:
            for _ in range(3):
                ready.launch(stream)
            assert (site.found() == site.wanted(9)).all()


def test_a_refused_launch_ahead_runs_nothing(ctx: Context, stream: Stream, kernels: Kernels) -> None:
    with DeviceArena(ctx, "a", 1 << 16) as arena:
        site = Site(arena, stream)
        launch = ahead(site, kernels)
        name = "cuLaunchKernelEx" if launch.programmatic else "cuLaunchKernel"
        with faults.fail_nth(1, 1, only=name), pytest.raises(DriverError, match=name):
            launch.run(stream)
        launch.run(stream)
        assert (site.found() == site.wanted(1)).all()


@pytest.mark.parametrize("graph", [False, True])
def test_blocks_that_run_ahead_change_nothing_where_they_wait(ctx: Context, stream: Stream, kernels: Kernels,
                                                             seeded: None, graph: bool) -> None:
    with DeviceArena(ctx, "a", 1 << 16) as arena:
        chain = Chain(arena, stream, kernels, WAITS, grid=3)
        for seed in range(8):
            control.set_seed(seed)
            chain.start(100)
            if graph:
                with capture(stream) as cap:
                    chain.run()
                with cap.graph("chain") as made, made.instantiate() as ready:
                    ready.launch(stream)
                    assert chain.found() == {100 + STEPS}
            else:
                chain.run()
                assert chain.found() == {100 + STEPS}


@pytest.mark.parametrize("graph", [False, True])
def test_an_early_read_changes_bytes_by_seed(ctx: Context, stream: Stream, kernels: Kernels, seeded: None,
                                             graph: bool) -> None:
    with DeviceArena(ctx, "a", 1 << 16) as arena:
        chain = Chain(arena, stream, kernels, READS_EARLY)
        seen = []
        for seed in range(4):
            control.set_seed(seed)
            chain.start(100)
            if graph:
                with capture(stream) as cap:
                    chain.run()
                with cap.graph("chain") as made, made.instantiate() as ready:
                    ready.launch(stream)
                    seen.append(chain.found())
            else:
                chain.run()
                seen.append(chain.found())
        assert seen[0] == {100 + STEPS}
        assert all(found != {100 + STEPS} for found in seen[1:])


@pytest.mark.parametrize("seed", [0, 1])
def test_a_thread_that_does_not_wait_is_reported(ctx: Context, stream: Stream, kernels: Kernels, seeded: None,
                                                seed: int) -> None:
    with DeviceArena(ctx, "a", 1 << 16) as arena:
        chain = Chain(arena, stream, kernels, WARP_GOES_ON)
        chain.start(100)
        control.set_seed(seed)
        with pytest.raises(ContextLost, match="called 96 times by 128 threads"):
            chain.run()
            stream.synchronize()
