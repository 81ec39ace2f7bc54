"""Refusals of the simulator that the other files do not reach: wrong context, stream, thread, memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from flashnext_drv.sim import control

pytestmark = pytest.mark.sim
THREAD, RELAXED = 1, 2


@pytest.fixture
def pair(sim: Any) -> tuple[int, int]:
    sim.function("fault")
    return sim.upload(np.arange(128, dtype=np.uint32)), sim.device(512)


@pytest.fixture
def other_stream(sim: Any) -> Iterator[Any]:
    """A stream of another context; the bench's own context is current."""
    other = sim.ok("cuCtxCreate", None, 0, 0)
    stream = sim.ok("cuStreamCreate", 1)
    sim.ok("cuCtxPopCurrent")
    yield stream
    sim.ok("cuCtxDestroy", other)


def begin(sim: Any, stream: Any, mode: int = THREAD) -> None:
    sim.ok("cuStreamBeginCapture", stream, sim.d.CUstreamCaptureMode(mode))


def executable(sim: Any, x: int, y: int) -> Any:
    begin(sim, sim.stream)
    assert sim.launch("fault", x=x, y=y, mode=0, index=0)[0] == 0
    return sim.ok("cuGraphInstantiate", sim.ok("cuStreamEndCapture", sim.stream), 0)


def test_kernel_and_stream_of_different_contexts(sim: Any, pair: tuple[int, int], other_stream: Any) -> None:
    before = control.finding_count()
    code, _ = sim.launch("fault", x=pair[0], y=pair[1], mode=0, index=0, stream=other_stream)
    assert code == 400 and control.finding_count() > before
    assert "kernel fault and stream" in control.last_finding()


def test_event_recorded_on_a_stream_of_another_context(sim: Any, other_stream: Any) -> None:
    event = sim.ok("cuEventCreate", 2)
    assert "different contexts" in sim.refused(400, "cuEventRecord", event, other_stream)


def test_capture_ended_by_another_thread(sim: Any, pair: tuple[int, int]) -> None:
    begin(sim, sim.stream)
    assert sim.launch("fault", x=pair[0], y=pair[1], mode=0, index=0)[0] == 0
    codes: list[int] = []

    def end() -> None:
        sim.ok("cuCtxPushCurrent", sim.context)
        codes.append(sim.call("cuStreamEndCapture", sim.stream)[0])
        sim.ok("cuCtxPopCurrent")

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert codes == [908] and "another thread" in control.last_finding()
    assert int(sim.ok("cuStreamEndCapture", sim.stream)) != 0, "the thread that began it can still end it"


def test_thread_local_capture_leaves_other_threads_alone(sim: Any, pair: tuple[int, int]) -> None:
    begin(sim, sim.stream)
    codes: list[int] = []

    def allocate() -> None:
        sim.ok("cuCtxPushCurrent", sim.context)
        code, address = sim.call("cuMemAlloc", 64)
        codes.extend((code, sim.call("cuMemFree", address)[0]))
        sim.ok("cuCtxPopCurrent")

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    assert codes == [0, 0]
    sim.ok("cuStreamEndCapture", sim.stream)


def test_graph_launched_into_a_capture(sim: Any, pair: tuple[int, int]) -> None:
    exec_ = executable(sim, *pair)
    begin(sim, sim.stream)
    assert "into capturing stream" in sim.refused(900, "cuGraphLaunch", exec_, sim.stream)
    sim.refused(901, "cuStreamEndCapture", sim.stream)
    sim.ok("cuGraphLaunch", exec_, sim.stream)
    assert sim.sync() == 0
    sim.ok("cuGraphExecDestroy", exec_)


def test_legacy_stream_may_not_wait_for_a_captured_event(sim: Any, pair: tuple[int, int]) -> None:
    event = sim.ok("cuEventCreate", 2)
    begin(sim, sim.stream, RELAXED)
    sim.ok("cuEventRecord", event, sim.stream)
    assert "legacy stream" in sim.refused(906, "cuStreamWaitEvent", 0, event, 0)
    sim.refused(901, "cuStreamEndCapture", sim.stream)


def test_captured_event_cannot_be_queried(sim: Any, pair: tuple[int, int]) -> None:
    event = sim.ok("cuEventCreate", 2)
    begin(sim, sim.stream, RELAXED)
    sim.ok("cuEventRecord", event, sim.stream)
    assert "captured event" in sim.refused(907, "cuEventQuery", event)
    sim.ok("cuStreamEndCapture", sim.stream)


def test_work_for_an_invalidated_capture_is_refused(sim: Any, pair: tuple[int, int]) -> None:
    event = sim.ok("cuEventCreate", 2)
    begin(sim, sim.stream)
    sim.refused(900, "cuStreamSynchronize", sim.stream)
    assert sim.launch("fault", x=pair[0], y=pair[1], mode=0, index=0)[0] == 901
    assert sim.call("cuEventRecord", event, sim.stream)[0] == 901
    assert sim.call("cuMemsetD8Async", pair[1], 0, 512, sim.stream)[0] == 901
    sim.refused(901, "cuStreamEndCapture", sim.stream)
    assert sim.launch("fault", x=pair[0], y=pair[1], mode=0, index=0)[0] == 0 and sim.sync() == 0


def test_pinned_memory_held_by_an_executable_cannot_go(sim: Any, pair: tuple[int, int]) -> None:
    pinned = int(sim.ok("cuMemHostAlloc", 512, 2))
    begin(sim, sim.stream)
    sim.ok("cuMemcpyAsync", pinned, pair[1], 512, sim.stream)
    exec_ = sim.ok("cuGraphInstantiate", sim.ok("cuStreamEndCapture", sim.stream), 0)
    assert "copy or fill" in sim.refused(1, "cuMemFreeHost", pinned)
    assert "captured it" in sim.refused(1, "cuMemFree", pair[1])
    sim.ok("cuGraphExecDestroy", exec_)
    sim.ok("cuMemFreeHost", pinned)


def test_each_kind_of_memory_has_its_own_free(sim: Any) -> None:
    device, pinned = sim.device(64), int(sim.ok("cuMemHostAlloc", 64, 2))
    assert "cuMemFree of pinned" in sim.refused(1, "cuMemFree", pinned)
    assert "cuMemFreeHost of device" in sim.refused(1, "cuMemFreeHost", device)
    assert "not pinned host memory" in sim.refused(1, "cuMemHostGetDevicePointer", device, 0)
    sim.ok("cuMemFreeHost", pinned)
    assert "double free" in sim.refused(1, "cuMemFreeHost", pinned)


def test_sizes_and_addresses_of_nothing(sim: Any) -> None:
    assert "0 bytes" in sim.refused(1, "cuMemAlloc", 0)
    address = sim.device(64)
    assert "null address" in sim.refused(1, "cuMemcpyAsync", address, 0, 64, sim.stream)
    assert sim.refused(1, "cuMemcpyDtoHAsync", np.zeros(65, np.uint8).ctypes.data, address, 65, sim.stream)
    assert sim.refused(1, "cuMemsetD8Async", address + 1, 0, 64, sim.stream)


def test_pinned_bounds_hold_for_copies_too(sim: Any) -> None:
    address, pinned = sim.device(128), int(sim.ok("cuMemHostAlloc", 64, 2))
    assert "past the end" in sim.refused(1, "cuMemcpyAsync", address, pinned, 65, sim.stream)
    assert "past the end" in sim.refused(1, "cuMemcpyAsync", pinned + 32, address, 33, sim.stream)
    sim.ok("cuMemFreeHost", pinned)
    assert "use after free" in sim.refused(1, "cuMemcpyAsync", address, pinned, 64, sim.stream)


def test_a_launch_without_blocks(sim: Any, pair: tuple[int, int]) -> None:
    assert sim.launch("fault", 0, x=pair[0], y=pair[1], mode=0, index=0)[0] == 1
    assert "grid (0,1,1)" in control.last_finding()


def test_peer_access_of_a_device_to_itself(sim: Any) -> None:
    assert "to itself" in sim.refused(101, "cuCtxEnablePeerAccess", sim.context, 0)


def test_node_of_another_graph_is_refused(sim: Any, pair: tuple[int, int]) -> None:
    exec_ = executable(sim, *pair)
    begin(sim, sim.stream)
    assert sim.launch("fault", x=pair[0], y=pair[1], mode=0, index=0)[0] == 0
    other = sim.ok("cuStreamEndCapture", sim.stream)
    node = sim.ok("cuGraphGetNodes", other, 1)[0][0]
    params = sim.ok("cuGraphKernelNodeGetParams", node)
    assert "is not in the graph" in sim.refused(1, "cuGraphExecKernelNodeSetParams", exec_, node, params)
    sim.ok("cuGraphExecDestroy", exec_)
