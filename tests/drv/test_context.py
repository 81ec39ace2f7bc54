"""Contexts: the caller's current context is never disturbed, broken contexts close without the driver."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashnext_drv.drv import api, faults
from flashnext_drv.drv.context import Context, devices, here
from flashnext_drv.drv.memory import DeviceArena, copy_to_host
from flashnext_drv.drv.stream import Stream
from flashnext_drv.errors import ContextLost, DriverError, UsageError
from flashnext_drv.ledger import Ledger

ILLEGAL_ADDRESS = 700


@pytest.fixture
def driver(device_name: str) -> Any:
    """The binding itself, as a host program of ours would use it."""
    from cuda.bindings import driver
    return driver


def now_current(driver: Any) -> int:
    code, handle = driver.cuCtxGetCurrent()
    assert int(code) == 0
    return int(handle)


def test_facts_are_those_of_the_device(device_name: str) -> None:
    facts = devices()[0]
    assert facts.ordinal == 0 and facts.n_sms > 0 and facts.total_bytes > 1 << 20 and facts.cc[0] >= 8
    assert facts.is_simulator == (device_name == "sim")
    assert ("simulator" in str(facts)) == facts.is_simulator


def test_opening_and_closing_leaves_no_context_current(driver: Any, ledger: Ledger) -> None:
    assert now_current(driver) == 0
    with Context(0, ledger=ledger) as ctx:
        assert now_current(driver) == 0
        with ctx.active():
            assert now_current(driver) == int(ctx.handle)
            with ctx.active():
                assert now_current(driver) == int(ctx.handle)
        assert now_current(driver) == 0 and here.top is None
    assert now_current(driver) == 0


@pytest.mark.parametrize("primary", [False, True])
def test_a_foreign_current_context_stays_current(driver: Any, ledger: Ledger, primary: bool) -> None:
    _, device = driver.cuDeviceGet(0)
    code, foreign = driver.cuCtxCreate(None, 0, device)
    assert int(code) == 0
    try:
        with Context(0, ledger=ledger, primary=primary) as ctx:
            assert now_current(driver) == int(foreign)
            with Stream(ctx, "s") as stream, DeviceArena(ctx, "a", 4096, guard=True) as arena:
                assert now_current(driver) == int(foreign)
                found = np.zeros(16, np.uint8)
                copy_to_host(stream, found, arena.span("x", 16))
                assert (found == 0xFF).all()
                with ctx.active(), pytest.raises(KeyError):
                    raise KeyError
            assert now_current(driver) == int(foreign)
        assert now_current(driver) == int(foreign)
    finally:
        driver.cuCtxDestroy(foreign)
    assert now_current(driver) == 0


def test_primary_context_of_the_caller_is_shared_and_survives(driver: Any, ledger: Ledger) -> None:
    _, device = driver.cuDeviceGet(0)
    code, mine = driver.cuDevicePrimaryCtxRetain(device)
    assert int(code) == 0
    try:
        driver.cuCtxPushCurrent(mine)
        code, address = driver.cuMemAlloc(256)
        assert int(code) == 0
        with Context(0, ledger=ledger, primary=True) as ctx:
            assert int(ctx.handle) == int(mine)
        assert now_current(driver) == int(mine)
        code, = driver.cuMemFree(address)
        assert int(code) == 0
        driver.cuCtxPopCurrent()
    finally:
        driver.cuDevicePrimaryCtxRelease(device)


def test_two_contexts_nest(driver: Any, ledger: Ledger) -> None:
    with Context(0, ledger=ledger, name="one") as one, Context(0, ledger=ledger, name="two") as two:
        with one.active():
            with two.active():
                with one.active():
                    assert now_current(driver) == int(one.handle)
                assert now_current(driver) == int(two.handle)
            assert now_current(driver) == int(one.handle)
        assert now_current(driver) == 0


def test_a_device_that_does_not_exist_is_refused(device_name: str, ledger: Ledger) -> None:
    with pytest.raises(UsageError, match="device 99 does not exist"):
        Context(99, ledger=ledger)


def test_closing_inside_active_is_refused_and_a_used_context_stays(ledger: Ledger, device_name: str) -> None:
    with Context(0, ledger=ledger) as ctx:
        stream = Stream(ctx, "s")
        with pytest.raises(UsageError, match="used by s"):
            ctx.close()
        stream.close()


def test_a_sticky_error_breaks_the_context_and_close_is_host_work(driver: Any, device_name: str) -> None:
    ledger = Ledger()
    ctx = Context(0, ledger=ledger)
    stream, arena = Stream(ctx, "s"), DeviceArena(ctx, "a", 4096)
    with faults.fail_nth(1, ILLEGAL_ADDRESS,
                         only="cuStreamSynchronize"), pytest.raises(ContextLost) as caught:
        stream.synchronize()
    assert caught.value.code == ILLEGAL_ADDRESS and "ILLEGAL_ADDRESS" in str(caught.value)
    assert ctx.broken
    with pytest.raises(ContextLost, match="is broken"):
        stream.query()
    with faults.count_calls() as count:
        arena.close()
        stream.close()
    assert count.n == 0
    ctx.close()
    ledger.require_empty()
    assert {e.owner for e in ledger.lost()} == {"a", "s", "context.service"}
    assert now_current(driver) == 0


def test_a_free_that_fails_once_is_tried_again_and_reported(device_name: str, ledger: Ledger) -> None:
    with Context(0, ledger=ledger) as ctx:
        arena = DeviceArena(ctx, "a", 4096)
        with faults.fail_nth(1, 1, only="cuMemFree") as plan, pytest.raises(DriverError, match="cuMemFree"):
            arena.close()
        assert plan.seen == 2 and not ctx.broken
        assert ledger.live("device") == {}


def test_a_free_that_never_works_costs_the_context(device_name: str) -> None:
    ledger = Ledger()
    ctx = Context(0, ledger=ledger)
    arena = DeviceArena(ctx, "a", 4096)
    with faults.fail_nth(1, 1, only="cuMemFree", forever=True), pytest.raises(DriverError, match="cuMemFree"):
        arena.close()
    assert ctx.broken and [e.owner for e in ledger.lost()] == ["a"]
    ctx.close()
    ledger.require_empty()


def test_calls_are_counted_by_name_and_kept_in_a_ring(device_name: str, ctx: Context) -> None:
    before = api.counters().get("cuMemGetInfo", 0)
    ctx.free_bytes()
    assert api.counters()["cuMemGetInfo"] == before + 1
    assert [name for name, _ in api.ring()[-3:]] == ["cuCtxPushCurrent", "cuMemGetInfo", "cuCtxPopCurrent"]


def test_another_device_in_one_process_is_refused(device_name: str) -> None:
    assert api.ensure("auto") == device_name
    with pytest.raises(UsageError, match="this process runs on"):
        api.ensure("cuda" if device_name == "sim" else "sim")
    with pytest.raises(UsageError, match="unknown"):
        api.ensure("tpu")
