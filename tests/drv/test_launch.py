"""Streams, events, modules, packed launches and the binder's argument checks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from flashnext_drv.drv import api
from flashnext_drv.drv.context import Context
from flashnext_drv.drv.graph import capture
from flashnext_drv.drv.memory import DeviceArena, Span, copy_to_device, copy_to_host
from flashnext_drv.drv.module import Launch, Module, pack
from flashnext_drv.drv.stream import Event, Stream, elapsed_ms
from flashnext_drv.errors import ContractError, DriverError, UsageError
from flashnext_drv.kernels import catalog
from flashnext_drv.kernels.bind import Kernels
from flashnext_drv.kernels.tables import ROUND

HIDDEN, ROWS = 256, 3


@pytest.fixture
def kernels(ctx: Context) -> Iterator[Kernels]:
    with Kernels(ctx, ("glue",)) as made:
        yield made


class Site:
    """Operands of stream_add: streams (rows, 4 hidden) += inject (rows, 4) x y (rows, hidden)."""

    def __init__(self, arena: DeviceArena, stream: Stream) -> None:
        self.stream = stream
        self.streams = np.ones((ROWS, 4 * HIDDEN), np.float32)
        self.y = np.arange(ROWS * HIDDEN, dtype=np.float32).reshape(ROWS, HIDDEN)
        self.inject = np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4)
        self.spans = {name: self._up(arena, name, data) for name, data in (
            ("round", np.array([(ROWS, ROWS, ROWS, 1)], ROUND)), ("streams", self.streams), ("y", self.y),
            ("inject", self.inject))}

    def _up(self, arena: DeviceArena, name: str, data: np.ndarray) -> Span:
        span = arena.span(name, data.nbytes)
        copy_to_device(self.stream, span, data)
        return span

    def launch(self, kernels: Kernels) -> Launch:
        return kernels.launch("stream_add", (1, ROWS), hidden=HIDDEN, **self.spans)

    def found(self) -> np.ndarray:
        out = np.empty_like(self.streams)
        copy_to_host(self.stream, out, self.spans["streams"])
        return out

    def wanted(self, n_times: int = 1) -> np.ndarray:
        add = (self.inject[:, :, None] * self.y[:, None, :]).reshape(ROWS, 4 * HIDDEN)
        return self.streams + n_times * add


def test_a_run_may_have_another_grid_and_other_pointers(
    ctx: Context, stream: Stream, kernels: Kernels
) -> None:
    """What was given to the stream keeps its arguments."""
    with DeviceArena(ctx, "a", 1 << 16) as arena:
        site, other = Site(arena, stream), Site(arena, stream)
        launch = site.launch(kernels)
        word = launch.word("streams")
        assert word.tolist() == [site.spans["streams"].address]
        launch.run_grid(stream, (1, 2, 1))
        word[0] = other.spans["streams"].address
        launch.run_grid(stream, (1, 1, 1))
        launch.run(stream)
        expected = site.wanted()
        expected[2:] = site.streams[2:]
        assert np.array_equal(site.found(), expected)
        expected = site.wanted(2)
        expected[1:] = site.wanted()[1:]
        assert np.array_equal(other.found(), expected)
        with pytest.raises(UsageError, match="no argument called 'stream'"):
            launch.word("stream")


def test_another_grid_cannot_be_captured(ctx: Context, stream: Stream, kernels: Kernels) -> None:
    with DeviceArena(ctx, "a", 1 << 16) as arena:
        launch = Site(arena, stream).launch(kernels)
        with pytest.raises(UsageError, match="cannot be captured"), capture(stream):
            launch.run_grid(stream, (1, 1, 1))


def test_a_launch_runs_again_and_again(ctx: Context, stream: Stream, kernels: Kernels) -> None:
    with DeviceArena(ctx, "a", 1 << 16) as arena:
        site = Site(arena, stream)
        launch = site.launch(kernels)
        launch.run(stream)
        assert (site.found() == site.wanted()).all()
        with ctx.active():
            launch.run(stream)
            launch.run(stream)
        assert (site.found() == site.wanted(3)).all()
        assert (launch.name, launch.grid, launch.block) == ("stream_add", (1, ROWS, 1), (256, 1, 1))


def test_work_on_two_streams_is_ordered_by_an_event(ctx: Context, stream: Stream, kernels: Kernels) -> None:
    with DeviceArena(ctx, "a", 1 << 16) as arena, Stream(ctx, "other") as other, Event(ctx, "e") as event:
        site = Site(arena, stream)
        stream.record(event)
        other.wait(event)
        site.launch(kernels).run(other)
        other.record(event)
        stream.wait(event)
        assert (site.found() == site.wanted()).all()
        event.synchronize()
        assert event.query() and other.query()
        other.synchronize(timeout_s=5.0)


def test_elapsed_time_between_timing_events(ctx: Context, stream: Stream) -> None:
    with Event(ctx, "a", timing=True) as start, Event(ctx, "b", timing=True) as end:
        stream.record(start)
        stream.record(end)
        end.synchronize(timeout_s=5.0)
        assert 0.0 <= elapsed_ms(start, end) < 5000.0


@pytest.mark.parametrize(("change", "text"), [
    ({"hidden": None}, "missing"), ({"extra": 1}, "unknown"), ({"hidden": -1}, "outside u32"),
    ({"hidden": 2**32}, "outside u32"), ({"hidden": 2.0}, "no u32"), ({"y": 1.5}, "no ptr"),
                                              ({"hidden": True}, "no u32"),
    ({"y": -8}, "outside ptr")])
def test_arguments_are_checked_by_name_and_kind(kernels: Kernels, change: dict[str, object],
                                                text: str) -> None:
    args: dict[str, object] = {"round": 0, "streams": 0, "y": 0, "inject": 0, "hidden": HIDDEN, **change}
    given = {name: value for name, value in args.items() if value is not None}
    with pytest.raises(ContractError, match=text):
        kernels.launch("stream_add", 1, **given)


def test_spans_fit_pointers_alone_and_must_be_alive(ctx: Context, kernels: Kernels) -> None:
    with DeviceArena(ctx, "a", 4096) as arena:
        span = arena.span("x", 64)
        with pytest.raises(ContractError, match="not a pointer"):
            kernels.launch("stream_add", 1, round=0, streams=0, y=0, inject=0, hidden=span)
    with pytest.raises(UsageError, match="is closed"):
        kernels.launch("stream_add", 1, round=0, streams=span, y=0, inject=0, hidden=HIDDEN)


def test_unknown_kernels_and_impossible_grids_are_refused(kernels: Kernels) -> None:
    with pytest.raises(ContractError, match="no kernel is called 'nothing'"):
        kernels.launch("nothing", 1)
    for grid in (0, (1, 0), (1, 70000), (1, 1, 1, 1), 2**31):
        with pytest.raises(ContractError, match="grid of kernel stream_add"):
            kernels.launch("stream_add", grid, round=0, streams=0, y=0, inject=0, hidden=HIDDEN)


def test_attributes_agree_with_the_declaration(kernels: Kernels) -> None:
    for spec in catalog.specs("glue"):
        found = kernels.module("glue").function(spec.name).attributes()
        assert found.max_threads >= spec.block and found.shared_bytes == spec.shared_bytes


def test_an_image_that_is_none_is_refused(ctx: Context) -> None:
    with pytest.raises(DriverError, match="cuModuleLoadData"):
        Module(ctx, "bad", b"not an image" + bytes(64))


def test_a_kernel_the_image_lacks_is_refused(kernels: Kernels) -> None:
    with pytest.raises(DriverError, match="cuModuleGetFunction"):
        kernels.module("glue").function("no_such_kernel")


def test_packed_arguments_have_the_declared_layout() -> None:
    offsets = ((0, 4), (8, 8), (16, 4))
    packed = pack(offsets, [np.uint32(7), np.uint64(1 << 40), np.float32(1.5)])
    assert packed.data[0:4].view(np.uint32)[0] == 7 and packed.data[16:20].view(np.float32)[0] == 1.5
    base = packed.data.ctypes.data
    assert packed.pointers.tolist() == [base, base + 8, base + 16]
    assert packed.data[8:16].view(np.uint64)[0] == 1 << 40
    with pytest.raises(UsageError, match="wrong size"):
        pack(((0, 8),), [np.uint32(1)])


def test_the_hot_launch_makes_one_driver_call(ctx: Context, stream: Stream, kernels: Kernels) -> None:
    with DeviceArena(ctx, "a", 1 << 16) as arena:
        launch = Site(arena, stream).launch(kernels)
        with ctx.active():
            before = sum(api.counters().values())
            launch.run(stream)
            assert sum(api.counters().values()) == before + 1
