"""Devices, contexts, handles, images and launches of the simulator: facts as set, refusals by the driver's
codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashnext_drv.sim import control, load

pytestmark = pytest.mark.sim


def test_devices_are_as_many_and_as_large_as_set(sim: Any) -> None:
    control.set_devices(3)
    control.set_sms(7)
    control.set_memory_bytes(1 << 30)
    assert sim.ok("cuDeviceGetCount") == 3
    devices = [sim.ok("cuDeviceGet", i) for i in range(3)]
    assert sim.refused(101, "cuDeviceGet", 3) == ""
    assert sim.ok("cuDeviceGetName", 64, devices[2]).split(b"\0")[0] == b"flashnext simulator"
    assert sim.ok("cuDeviceTotalMem", devices[1]) == 1 << 30
    assert [
        sim.ok("cuDeviceGetAttribute", sim.d.CUdevice_attribute(a), devices[0]) for a in (16, 75, 76, 10, 1)
    ] == [7, 9, 0, 32, 1024]
    assert len({bytes(sim.ok("cuDeviceGetUuid", d).bytes) for d in devices}) == 3
    assert len({sim.ok("cuDeviceGetPCIBusId", 32, d) for d in devices}) == 3
    with pytest.raises(Exception, match="not possible"):
        control.set_devices(5)


def test_peers_copy_between_devices_once_enabled(sim: Any) -> None:
    control.set_devices(2)
    assert sim.ok("cuDeviceCanAccessPeer", 0, 1) == 1 and sim.ok("cuDeviceCanAccessPeer", 0, 0) == 0
    data = np.arange(64, dtype=np.uint32)
    here = sim.upload(data)
    other = sim.ok("cuCtxCreate", None, 0, 1)
    there = sim.device(256)
    sim.ok("cuCtxEnablePeerAccess", sim.context, 0)
    assert sim.refused(704, "cuCtxEnablePeerAccess", sim.context, 0) == ""
    stream = sim.ok("cuStreamCreate", 1)
    sim.ok("cuMemcpyPeerAsync", there, other, here, sim.context, 256, stream)
    sim.ok("cuStreamSynchronize", stream)
    assert sim.download(there, 64).tolist() == data.tolist()
    attributes = sim.d.CUpointer_attribute
    assert sim.ok("cuPointerGetAttribute", attributes.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, there) == 1
    sim.ok("cuCtxDisablePeerAccess", sim.context)
    assert sim.refused(705, "cuCtxDisablePeerAccess", sim.context) == ""
    sim.ok("cuCtxDestroy", other)


def test_contexts_stack_and_a_destroyed_one_is_refused(sim: Any) -> None:
    assert int(sim.ok("cuCtxGetCurrent")) == int(sim.context)
    other = sim.ok("cuCtxCreate", None, 0, 0)
    assert int(sim.ok("cuCtxPopCurrent")) == int(other)
    assert int(sim.ok("cuCtxGetCurrent")) == int(sim.context)
    sim.ok("cuCtxDestroy", other)
    assert "destroyed" in sim.refused(201, "cuCtxPushCurrent", other)
    assert "destroyed" in sim.refused(201, "cuCtxDestroy", other)
    sim.ok("cuCtxPopCurrent")
    assert sim.refused(201, "cuMemAlloc", 16) == ""
    sim.ok("cuCtxPushCurrent", sim.context)


def test_primary_context_lives_by_its_count(sim: Any) -> None:
    first, again = sim.ok("cuDevicePrimaryCtxRetain", 0), sim.ok("cuDevicePrimaryCtxRetain", 0)
    assert int(first) == int(again)
    sim.refused(201, "cuCtxDestroy", first)
    sim.ok("cuDevicePrimaryCtxRelease", 0)
    assert sim.ok("cuDevicePrimaryCtxGetState", 0)[1] == 1
    sim.ok("cuDevicePrimaryCtxRelease", 0)
    assert sim.ok("cuDevicePrimaryCtxGetState", 0)[1] == 0
    assert "too often" in sim.refused(201, "cuDevicePrimaryCtxRelease", 0)


@pytest.mark.parametrize("kind", ["Stream", "Event", "Module"])
def test_closed_handle_is_refused_even_after_a_new_one_was_made(sim: Any, kind: str) -> None:
    make = {
        "Stream": ("cuStreamCreate", 1),
        "Event": ("cuEventCreate", 2),
        "Module": ("cuModuleLoadData", sim.image()),
    }[kind]
    use = {
        "Stream": ("cuStreamSynchronize",),
        "Event": ("cuEventQuery",),
        "Module": ("cuModuleGetFunction", b"fault"),
    }[kind]
    close = {"Stream": "cuStreamDestroy", "Event": "cuEventDestroy", "Module": "cuModuleUnload"}[kind]
    old = sim.ok(*make)
    sim.ok(close, old)
    new = sim.ok(*make)
    assert int(new) != int(old)
    assert sim.refused(400, use[0], old, *use[1:]) != ""
    assert sim.refused(400, close, old) != ""
    sim.ok(close, new)


def test_function_of_an_unloaded_module_is_refused(sim: Any) -> None:
    function = sim.function("fault")
    sim.ok("cuModuleUnload", sim.module)
    assert "no loaded module" in sim.refused(
        400, "cuLaunchKernel", function, 1, 1, 1, 128, 1, 1, 0, sim.stream, 0, 0
    )


def test_image_of_other_sources_or_families_is_refused(sim: Any) -> None:
    assert "was built from" in sim.refused(200, "cuModuleLoadData", sim.image(digest="0" * 64))
    assert "without kernel family" in sim.refused(200, "cuModuleLoadData", unknown_family(sim))
    elf = np.frombuffer(b"\x7fELF" + bytes(60), np.uint8).copy()
    assert "not one for the simulator" in sim.refused(200, "cuModuleLoadData", elf.ctypes.data)
    module = sim.ok("cuModuleLoadData", sim.image())
    assert "no kernel named absent" in sim.refused(500, "cuModuleGetFunction", module, b"absent")


def unknown_family(sim: Any) -> int:
    packed = np.frombuffer(b"FLASHNEXT-SIM\0nothing\0" + b"0" * 64 + b"\0", np.uint8).copy()
    sim._keep.append(packed)
    return int(packed.ctypes.data)


def test_launch_of_another_shape_than_declared_is_refused(sim: Any) -> None:
    x, y = sim.upload(np.zeros(128, np.uint32)), sim.device(512)
    args = {"x": x, "y": y, "mode": 0, "index": 0}
    assert sim.launch("fault", block=64, **args)[0] == 1
    assert "declared (128,1,1)" in control.last_finding()
    assert sim.launch("fault", 0, **args)[0] == 1
    table = sim.params("fault", **args)
    sim.refused(1, "cuLaunchKernel", sim.function("fault"), 1, 65536, 1, 128, 1, 1, 0, sim.stream, table, 0)
    sim.refused(1, "cuLaunchKernel", sim.function("fault"), 1, 1, 1, 128, 1, 1, 16, sim.stream, table, 0)
    attribute = sim.d.CUfunction_attribute
    assert (
        sim.ok("cuFuncGetAttribute", attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, sim.function("fault"))
        == 128
    )
    assert (
        sim.ok("cuFuncGetAttribute", attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, sim.function("fault"))
        == 32
    )


def test_timing_needs_events_that_keep_time_and_have_passed(sim: Any) -> None:
    a, b, untimed = sim.ok("cuEventCreate", 0), sim.ok("cuEventCreate", 0), sim.ok("cuEventCreate", 2)
    sim.ok("cuEventRecord", a, sim.stream)
    sim.refused(400, "cuEventElapsedTime", a, b)
    sim.ok("cuEventRecord", b, sim.stream)
    assert sim.call("cuEventElapsedTime", a, b)[0] == 600
    assert sim.sync() == 0
    assert sim.ok("cuEventElapsedTime", a, b) >= 0
    sim.refused(400, "cuEventElapsedTime", a, untimed)


def test_codes_have_the_drivers_names_and_texts(sim: Any) -> None:
    for code in (2, 700, 719, 900, 904):
        name = sim.ok("cuGetErrorName", sim.d.CUresult(code))
        assert name.decode() == sim.d.CUresult(code).name
    assert sim.ok("cuGetErrorString", sim.d.CUresult(719)) == b"unspecified launch failure"


def test_calls_and_bytes_are_counted(sim: Any) -> None:
    calls, copied = control.call_counts(), control.counter("bytes_copied")
    sim.upload(np.zeros(100, np.uint8))
    now = control.call_counts()
    assert now["cuMemcpyHtoD"] == calls.get("cuMemcpyHtoD", 0) + 1
    assert now["cuMemAlloc"] == calls.get("cuMemAlloc", 0) + 1
    assert control.counter("bytes_copied") == copied + 100
    assert control.has_kernel("fault") and not control.has_kernel("absent")


def test_second_load_keeps_the_library(sim: Any) -> None:
    assert load.load({"seed": 3}) == load.library()
    assert control.counter("seed") == 3
    with pytest.raises(Exception, match="is not possible"):
        control.set_value("nonsense", 1)


def test_skipped_kernels_are_counted_and_leave_their_outputs(sim: Any) -> None:
    x, y = sim.upload(np.arange(128, dtype=np.uint32)), sim.upload(np.full(128, 7, np.uint32))
    before = control.counter("launches")
    control.set_skip_kernels(True)
    sim.launch("fault", x=x, y=y, mode=0, index=0)
    assert sim.sync() == 0 and control.counter("launches") == before + 1
    assert (sim.download(y, 128) == 7).all()
    assert sim.launch("fault", x=x, y=y, mode=0, index=0, block=64)[0] == 1, "a wrong shape is still refused"
    control.set_skip_kernels(False)
    sim.launch("fault", x=x, y=y, mode=0, index=0)
    assert sim.sync() == 0 and sim.download(y, 128).tolist() == list(range(128))


def test_live_handles_are_counted_until_they_are_closed(sim: Any) -> None:
    before = control.counter("handles")
    stream, event = sim.ok("cuStreamCreate", 1), sim.ok("cuEventCreate", 2)
    module = sim.ok("cuModuleLoadData", sim.image())
    sim.ok("cuStreamBeginCapture", stream, sim.d.CUstreamCaptureMode(1))
    assert control.counter("handles") == before + 4, "stream, event, module, capture"
    graph = sim.ok("cuStreamEndCapture", stream)
    exec_ = sim.ok("cuGraphInstantiate", graph, 0)
    assert control.counter("handles") == before + 5
    for name, handle in (("cuGraphExecDestroy", exec_), ("cuGraphDestroy", graph), ("cuEventDestroy", event),
                         ("cuModuleUnload", module), ("cuStreamDestroy", stream)):
        sim.ok(name, handle)
    assert control.counter("handles") == before
