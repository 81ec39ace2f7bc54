"""Memory of the simulator: sizes, poison, guards, and what is said about addresses that are not valid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashnext_drv.sim import control

pytestmark = pytest.mark.sim
MIB = 1 << 20


def test_memory_that_does_not_fit_is_refused_and_the_rest_still_fits(sim: Any) -> None:
    free, total = sim.ok("cuMemGetInfo")
    control.set_memory_bytes(total - free + 8 * MIB)
    text = sim.refused(2, "cuMemAlloc", 9 * MIB)
    assert "9437184 bytes asked" in text and "8388608 of" in text
    address = sim.device(8 * MIB)
    assert sim.ok("cuMemGetInfo")[0] == 0
    sim.ok("cuMemFree", address)
    assert sim.ok("cuMemGetInfo")[0] == 8 * MIB


def test_memory_setting_below_what_is_in_use_is_refused(sim: Any) -> None:
    sim.device(4 * MIB)
    with pytest.raises(Exception, match="contradicts what is open"):
        control.set_memory_bytes(MIB)


def test_large_allocations_are_charged_in_whole_pages_of_2_mib(sim: Any) -> None:
    before = sim.ok("cuMemGetInfo")[0]
    sim.device(2 * MIB + 1)
    assert before - sim.ok("cuMemGetInfo")[0] == 4 * MIB


@pytest.mark.parametrize("n", [1, 100, 4096, 70000])
def test_fresh_device_memory_is_poison(sim: Any, n: int) -> None:
    assert (sim.download(sim.device(n), n, np.uint8) == 255).all()


def test_copy_past_the_end_is_refused(sim: Any) -> None:
    address, data = sim.device(1000), np.zeros(1001, np.uint8)
    assert "1 bytes past" not in sim.refused(1, "cuMemcpyHtoD", address, data.ctypes.data, 1001) != ""
    assert "past the end" in control.last_finding()
    sim.refused(1, "cuMemcpyDtoH", data.ctypes.data, address + 999, 2)
    sim.refused(1, "cuMemcpyDtoD", address, address + 500, 501)
    sim.refused(1, "cuMemsetD8", address, 0, 1001)
    sim.refused(1, "cuMemcpyHtoDAsync", address, data.ctypes.data, 1001, sim.stream)
    sim.ok("cuMemcpyHtoD", address + 999, data.ctypes.data, 1)


def test_host_address_given_as_device_memory_is_refused(sim: Any) -> None:
    data = np.zeros(8, np.uint8)
    assert "in no allocation" in sim.refused(1, "cuMemcpyHtoD", data.ctypes.data, data.ctypes.data, 8)


def test_copy_from_freed_memory_is_named_as_such(sim: Any) -> None:
    address, data = sim.device(256), np.zeros(256, np.uint8)
    sim.ok("cuMemFree", address)
    assert "use after free" in sim.refused(1, "cuMemcpyDtoH", data.ctypes.data, address, 256)


def test_memory_freed_twice_is_refused(sim: Any) -> None:
    address = sim.device(256)
    sim.ok("cuMemFree", address)
    assert "double free" in sim.refused(1, "cuMemFree", address)


def test_free_of_an_address_inside_an_allocation_is_refused(sim: Any) -> None:
    address = sim.device(512)
    sim.refused(1, "cuMemFree", address + 256)
    sim.ok("cuMemFree", address)


def test_kernel_that_writes_just_past_the_end_is_found_at_free(sim: Any) -> None:
    x, y = sim.upload(np.zeros(128, np.uint32)), sim.device(512)
    assert sim.launch("fault", x=x, y=y, mode=9, index=130)[0] == 0
    assert sim.sync() == 0
    text = sim.refused(700, "cuMemFree", y)
    assert "guard" in text and "12 bytes past its end" in text


def test_guard_is_checked_when_the_context_goes(sim: Any) -> None:
    other = sim.ok("cuCtxCreate", None, 0, 0)
    stream = sim.ok("cuStreamCreate", 1)
    module = sim.ok("cuModuleLoadData", sim.image())
    function = sim.ok("cuModuleGetFunction", module, b"fault")
    x, y = sim.device(512), sim.device(512)
    sim.ok(
        "cuLaunchKernel",
        function,
        1,
        1,
        1,
        128,
        1,
        1,
        0,
        stream,
        sim.params("fault", x=x, y=y, mode=9, index=128),
        0,
    )
    sim.ok("cuStreamSynchronize", stream)
    assert "guard" in sim.refused(700, "cuCtxDestroy", other)


def test_kernel_far_outside_is_an_illegal_address_and_the_context_is_lost(sim: Any) -> None:
    x, y = sim.upload(np.zeros(128, np.uint32)), sim.device(512)
    sim.launch("fault", x=x, y=y, mode=7, index=0)
    assert sim.sync() == 700
    text = control.last_finding()
    assert (
        text.startswith("kernel fault block (0,0,0) thread 64: illegal address")
        and "in no allocation" in text
    )
    assert sim.call("cuMemAlloc", 16)[0] == 700
    assert sim.call("cuStreamSynchronize", sim.stream)[0] == 700
    assert sim.call("cuMemFree", x)[0] == 700


def test_kernel_that_reads_freed_memory_is_named(sim: Any) -> None:
    x, y = sim.upload(np.zeros(128, np.uint32)), sim.device(512)
    sim.ok("cuMemFree", x)
    sim.launch("fault", x=x, y=y, mode=0, index=0)
    assert sim.sync() == 700
    assert "use after free: byte 0 of freed device allocation" in control.last_finding()


def test_kernel_that_runs_off_the_end_of_an_allocation_is_stopped(sim: Any) -> None:
    x, y = sim.upload(np.zeros(128, np.uint32)), sim.device(4096)
    sim.launch("fault", x=x, y=y, mode=9, index=1024)
    assert sim.sync() == 700
    assert "0 bytes past the end of device allocation" in control.last_finding()


@pytest.mark.parametrize("index", [65536, 3 << 20])
def test_kernel_that_writes_far_behind_an_allocation_hits_nobody_elses_bytes(sim: Any, index: int) -> None:
    x, y = sim.upload(np.zeros(128, np.uint32)), sim.device(4096)
    others = [sim.device(4096) for _ in range(8)]
    sim.launch("fault", x=x, y=y, mode=9, index=index)
    assert sim.sync() == 700 and len(others) == 8
    assert f"{4 * index - 4096} bytes past the end of device allocation" in control.last_finding()


def test_write_to_a_read_only_argument_is_found_when_asked_for(sim: Any) -> None:
    data = np.arange(128, dtype=np.uint32)
    x, y = sim.upload(data), sim.device(512)
    sim.launch("fault", x=x, y=y, mode=6, index=0)
    assert sim.sync() == 0, "without the check nothing is said"
    control.set_check_rights(True)
    sim.launch("fault", x=x, y=y, mode=0, index=0)
    assert sim.sync() == 0
    sim.launch("fault", x=x, y=y, mode=6, index=0)
    assert sim.sync() == 719
    assert "wrote bytes of argument 0" in control.last_finding()


def test_pageable_source_is_read_at_the_call_and_a_pinned_one_at_execution(sim: Any) -> None:
    pinned = int(sim.ok("cuMemHostAlloc", 512, 2))
    sim.ok("cuMemcpyHtoD", sim.device(512), np.zeros(512, np.uint8).ctypes.data, 512)
    target_a, target_b = sim.device(512), sim.device(512)
    pageable = np.full(512, 1, np.uint8)
    import ctypes

    ctypes.memset(pinned, 1, 512)
    sim.ok("cuMemcpyHtoDAsync", target_a, pageable.ctypes.data, 512, sim.stream)
    sim.ok("cuMemcpyHtoDAsync", target_b, pinned, 512, sim.stream)
    pageable[:] = 2
    ctypes.memset(pinned, 2, 512)
    assert sim.sync() == 0
    assert (sim.download(target_a, 512, np.uint8) == 1).all()
    assert (sim.download(target_b, 512, np.uint8) == 2).all()
    assert int(sim.ok("cuMemHostGetDevicePointer", pinned, 0)) == pinned
    sim.ok("cuMemFreeHost", pinned)


def test_registered_host_memory_is_known_until_it_is_let_go(sim: Any) -> None:
    data = np.zeros(4096, np.uint8)
    sim.ok("cuMemHostRegister", data.ctypes.data, data.nbytes, 2)
    assert sim.refused(712, "cuMemHostRegister", data.ctypes.data + 100, 8, 2) == ""
    assert int(sim.ok("cuMemHostGetDevicePointer", data.ctypes.data, 0)) == data.ctypes.data
    sim.ok("cuMemHostUnregister", data.ctypes.data)
    assert sim.refused(713, "cuMemHostUnregister", data.ctypes.data) == ""


def test_fill_writes_bytes_and_words_in_stream_order(sim: Any) -> None:
    address = sim.device(64)
    sim.ok("cuMemsetD8Async", address, 7, 64, sim.stream)
    sim.ok("cuMemsetD32Async", address + 16, 0x01020304, 4, sim.stream)
    assert sim.sync() == 0
    assert sim.download(address, 16).tolist() == [0x07070707] * 4 + [0x01020304] * 4 + [0x07070707] * 8
    assert "not a multiple" in sim.refused(1, "cuMemsetD32Async", address + 2, 0, 1, sim.stream)
