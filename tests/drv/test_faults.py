"""Every driver call of a small life fails once, and once from there on: typed error, empty ledger, nothing
left."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from flashnext_drv.drv import api, faults
from flashnext_drv.drv.context import Context, here
from flashnext_drv.drv.graph import capture
from flashnext_drv.drv.memory import DeviceArena, PinnedArena, copy_async, copy_to_host
from flashnext_drv.drv.stream import Event, Stream
from flashnext_drv.errors import DriverError, OutOfMemory, UsageError
from flashnext_drv.kernels.bind import Kernels
from flashnext_drv.ledger import Ledger

from .test_launch import Site


def small_life(ledger: Ledger) -> None:
    """Open, upload, launch, capture, replay, read back, close."""
    with Context(0, ledger=ledger) as ctx, Stream(ctx, "s") as stream, Event(ctx, "e") as event, \
            Kernels(ctx, ("glue",)) as kernels, PinnedArena(ctx, "p", 4096) as pinned, \
            DeviceArena(ctx, "a", 1 << 16, guard=True) as arena:
        site = Site(arena, stream)
        launch = site.launch(kernels)
        launch.run(stream)
        with capture(stream) as cap:
            launch.run(stream)
            copy_async(stream, pinned.span("x", 64), site.spans["streams"], 64)
        with cap.graph("g") as graph, graph.instantiate() as ready:
            ready.upload(stream)
            ready.launch(stream)
            stream.record(event)
            event.synchronize(timeout_s=60.0)
        found = np.empty_like(site.streams)
        copy_to_host(stream, found, site.spans["streams"])
        assert (found == site.wanted(2)).all()
        assert (pinned.host()[:64].view(np.float32) == found.reshape(-1)[:16]).all()
        arena.check_guards()


def leftovers() -> dict[str, int]:
    """What the simulator still holds for this process; nothing is known of a GPU."""
    if api.loaded() != "sim":
        return {}
    from flashnext_drv.sim import control
    return {name: control.counter(name) for name in ("contexts", "used_bytes")}


@pytest.mark.parametrize("forever", [False, True], ids=["once", "from_there_on"])
def test_sweep_over_every_call(device_name: str, forever: bool) -> None:
    before = leftovers()
    with faults.count_calls() as count:
        small_life(Ledger())
    assert count.n > 60
    silent = []
    for n in range(1, count.n + 1):
        ledger = Ledger()
        with faults.fail_nth(n, 1, forever=forever) as plan:
            try:
                small_life(ledger)
                silent.append(count.names[n - 1])
            except DriverError as error:
                assert error.call in count.names, error
        assert plan.fired >= 1, f"call {n} {count.names[n - 1]} was not reached"
        try:
            ledger.require_empty()
        except Exception as error:
            raise AssertionError(f"call {n} {count.names[n - 1]}: {error}") from error
        assert here.top is None and here.capture is None and not faults.capturing()
        with faults.silent():
            assert int(api.cuCtxGetCurrent()) == 0, f"call {n} {count.names[n - 1]} left a context current"
        assert leftovers() == before, f"call {n} {count.names[n - 1]}"
    assert not silent, f"no error reached the caller after a failure of {silent}"
    small_life(Ledger())


def test_the_nth_call_is_the_same_call_every_time(device_name: str) -> None:
    runs = []
    for _ in range(2):
        with faults.count_calls() as count:
            small_life(Ledger())
        runs.append(count.names)
    assert runs[0] == runs[1]


def test_counts_and_plans_are_per_thread(device_name: str, ctx: Context) -> None:
    seen: list[object] = []

    def work() -> None:
        with faults.count_calls() as count:
            ctx.free_bytes()
        seen.append(count.names)

    with faults.fail_nth(1, 1), faults.count_calls() as mine:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [["cuCtxPushCurrent", "cuMemGetInfo", "cuCtxPopCurrent"]] and mine.n == 0


def test_code_two_is_out_of_memory_and_only_named_calls_fail(device_name: str, ctx: Context) -> None:
    with faults.fail_nth(1, 2, only="cuMemAlloc") as plan:
        with pytest.raises(OutOfMemory, match=r"cuMemAlloc\(size_bytes=64\)"):
            DeviceArena(ctx, "a", 64)
        DeviceArena(ctx, "b", 64).close()
    assert (plan.seen, plan.fired) == (2, 1)


def test_a_failed_call_is_in_the_ring_with_its_code(device_name: str, ctx: Context) -> None:
    with faults.fail_nth(1, 1, only="cuMemGetInfo"), pytest.raises(DriverError):
        ctx.free_bytes()
    assert ("cuMemGetInfo", 1) in api.ring()[-3:]


def test_calls_are_counted_from_one() -> None:
    with pytest.raises(UsageError, match="counted from 1"), faults.fail_nth(0):
        pass
