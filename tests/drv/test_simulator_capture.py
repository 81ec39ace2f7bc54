"""Capture, graphs and their refusals in the simulator, by the codes a driver gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext_drv.sim import control

pytestmark = pytest.mark.sim
GLOBAL, THREAD, RELAXED = 0, 1, 2


@pytest.fixture
def pair(sim: Any) -> tuple[int, int]:
    """x = 0..127 and y on the device; modules loaded before any capture."""
    sim.function("fault")
    return sim.upload(np.arange(128, dtype=np.uint32)), sim.device(512)


def begin(sim: Any, stream: Any = None, mode: int = THREAD) -> None:
    sim.ok("cuStreamBeginCapture", sim.stream if stream is None else stream, sim.d.CUstreamCaptureMode(mode))


def copied(sim: Any, x: int, y: int, stream: Any = None) -> None:
    assert sim.launch("fault", x=x, y=y, mode=0, index=0, stream=stream)[0] == 0


def captured(sim: Any, x: int, y: int) -> Any:
    begin(sim)
    copied(sim, x, y)
    return sim.ok("cuStreamEndCapture", sim.stream)


def test_capture_runs_nothing_and_replay_runs_each_time(sim: Any, pair: tuple[int, int]) -> None:
    x, y = pair
    before = control.counter("launches")
    graph = captured(sim, x, y)
    exec_ = sim.ok("cuGraphInstantiate", graph, 0)
    sim.ok("cuGraphDestroy", graph)
    assert control.counter("launches") == before
    for turn in range(3):
        sim.ok("cuMemsetD8Async", y, 0, 512, sim.stream)
        sim.ok("cuGraphLaunch", exec_, sim.stream)
        assert sim.sync() == 0
        assert sim.download(y, 128).tolist() == list(range(128))
        assert control.counter("launches") == before + turn + 1
    sim.ok("cuGraphExecDestroy", exec_)
    assert "closed" in sim.refused(400, "cuGraphLaunch", exec_, sim.stream)


@pytest.mark.parametrize("mode", [GLOBAL, THREAD])
@pytest.mark.parametrize(
    "name",
    [
        "cuMemAlloc",
        "cuMemFree",
        "cuMemcpyHtoD",
        "cuStreamSynchronize",
        "cuStreamQuery",
        "cuCtxSynchronize",
        "cuMemHostAlloc",
        "cuEventQuery",
    ],
)
def test_call_that_a_capture_forbids_is_refused_and_ends_the_capture(
    sim: Any, pair: tuple[int, int], name: str, mode: int
) -> None:
    event = sim.ok("cuEventCreate", 2)
    data = np.zeros(16, np.uint8)
    args = {
        "cuMemAlloc": (16,),
        "cuMemFree": (pair[0],),
        "cuMemcpyHtoD": (pair[0], data.ctypes.data, 16),
        "cuMemHostAlloc": (16, 0),
        "cuStreamSynchronize": (sim.stream,),
        "cuStreamQuery": (sim.stream,),
        "cuCtxSynchronize": (),
        "cuEventQuery": (event,),
    }
    begin(sim, mode=mode)
    assert "capturing" in sim.refused(900, name, *args[name])
    sim.refused(901, "cuStreamEndCapture", sim.stream)
    assert sim.sync() == 0, "the stream works again"


def test_relaxed_capture_lets_other_work_go_on(sim: Any, pair: tuple[int, int]) -> None:
    begin(sim, mode=RELAXED)
    sim.ok("cuMemFree", sim.device(64))
    copied(sim, *pair)
    sim.ok("cuStreamEndCapture", sim.stream)


def test_fork_and_join_by_events_enter_the_graph_with_their_edges(sim: Any, pair: tuple[int, int]) -> None:
    x, y = pair
    z = sim.device(512)
    side, fork, join = sim.ok("cuStreamCreate", 1), sim.ok("cuEventCreate", 2), sim.ok("cuEventCreate", 2)
    begin(sim)
    copied(sim, x, y)
    sim.ok("cuEventRecord", fork, sim.stream)
    sim.ok("cuStreamWaitEvent", side, fork, 0)
    assert int(sim.ok("cuStreamIsCapturing", side)) == 1
    copied(sim, y, z, side)
    sim.ok("cuEventRecord", join, side)
    sim.ok("cuMemcpyDtoDAsync", x, y, 512, sim.stream)
    sim.ok("cuStreamWaitEvent", sim.stream, join, 0)
    sim.ok("cuMemsetD8Async", y, 0, 512, sim.stream)
    graph = sim.ok("cuStreamEndCapture", sim.stream)
    assert int(sim.ok("cuStreamIsCapturing", side)) == 0
    nodes = list(sim.ok("cuGraphGetNodes", graph, 4)[0])
    assert [int(sim.ok("cuGraphNodeGetType", n)) for n in nodes] == [0, 0, 1, 2]
    code, sources, targets, *_ = sim.d.cuGraphGetEdges(graph, 8)
    place = {int(n): i for i, n in enumerate(nodes)}
    edges = sorted((place[int(a)], place[int(b)]) for a, b in zip(sources, targets, strict=True) if int(a))
    assert int(code) == 0 and edges == [(0, 1), (0, 2), (1, 3), (2, 3)]
    exec_ = sim.ok("cuGraphInstantiate", graph, 0)
    for seed in range(5):
        control.set_seed(seed)
        sim.ok("cuMemsetD8Async", z, 0, 512, sim.stream)
        sim.ok("cuGraphLaunch", exec_, sim.stream)
        assert sim.sync() == 0
        assert sim.download(z, 128).tolist() == list(range(128)) and not sim.download(y, 128).any()
    sim.ok("cuGraphExecDestroy", exec_)


def test_fork_that_is_not_joined_back_is_refused(sim: Any, pair: tuple[int, int]) -> None:
    side, fork = sim.ok("cuStreamCreate", 1), sim.ok("cuEventCreate", 2)
    begin(sim)
    copied(sim, *pair)
    sim.ok("cuEventRecord", fork, sim.stream)
    sim.ok("cuStreamWaitEvent", side, fork, 0)
    copied(sim, *pair, side)
    assert "not joined back" in sim.refused(904, "cuStreamEndCapture", sim.stream)
    assert int(sim.ok("cuStreamIsCapturing", side)) == 0
    assert sim.sync(side) == 0


def test_codes_of_misplaced_captures(sim: Any, pair: tuple[int, int]) -> None:
    side, fork, plain = sim.ok("cuStreamCreate", 1), sim.ok("cuEventCreate", 2), sim.ok("cuEventCreate", 2)
    sim.refused(401, "cuStreamEndCapture", sim.stream)
    sim.ok("cuEventRecord", plain, side)
    begin(sim)
    sim.refused(401, "cuStreamBeginCapture", sim.stream, sim.d.CUstreamCaptureMode(THREAD))
    sim.ok("cuEventRecord", fork, sim.stream)
    sim.ok("cuStreamWaitEvent", side, fork, 0)
    sim.refused(903, "cuStreamEndCapture", side)
    sim.refused(901, "cuStreamEndCapture", sim.stream)
    begin(sim)
    sim.refused(905, "cuStreamWaitEvent", sim.stream, plain, 0)
    sim.refused(901, "cuStreamEndCapture", sim.stream)
    begin(sim, mode=RELAXED)
    sim.ok("cuEventRecord", fork, sim.stream)
    sim.refused(907, "cuEventSynchronize", fork)
    begin(sim, side, RELAXED)
    sim.refused(902, "cuStreamWaitEvent", side, fork, 0)
    sim.refused(901, "cuStreamEndCapture", side)
    sim.refused(901, "cuStreamEndCapture", sim.stream)
    assert "has ended" in sim.refused(907, "cuStreamWaitEvent", side, fork, 0)


def test_legacy_stream_beside_a_capturing_blocking_stream_is_refused(sim: Any, pair: tuple[int, int]) -> None:
    blocking = sim.ok("cuStreamCreate", 0)
    begin(sim, blocking, RELAXED)
    assert sim.launch("fault", x=pair[0], y=pair[1], mode=0, index=0, stream=0)[0] == 906
    sim.refused(901, "cuStreamEndCapture", blocking)
    sim.refused(900, "cuStreamBeginCapture", 0, sim.d.CUstreamCaptureMode(RELAXED))


def test_memory_and_modules_held_by_an_executable_cannot_go(sim: Any, pair: tuple[int, int]) -> None:
    x, y = pair
    graph = captured(sim, x, y)
    exec_ = sim.ok("cuGraphInstantiate", graph, 0)
    assert "node 0 (fault) of live graph executable" in sim.refused(1, "cuMemFree", x)
    assert "holds its kernel fault" in sim.refused(1, "cuModuleUnload", sim.module)
    sim.ok("cuGraphExecDestroy", exec_)
    sim.ok("cuMemFree", x)
    sim.ok("cuModuleUnload", sim.module)


def kernel_params(sim: Any, x: int, y: int, block: int = 128) -> Any:
    p = sim.d.CUDA_KERNEL_NODE_PARAMS()
    p.func = sim.function("fault")
    p.gridDimX = p.gridDimY = p.gridDimZ = 1
    p.blockDimX, p.blockDimY, p.blockDimZ = block, 1, 1
    p.kernelParams = sim.params("fault", x=x, y=y, mode=0, index=0)
    return p


def test_node_change_takes_effect_for_later_launches_only(sim: Any, pair: tuple[int, int]) -> None:
    x, y = pair
    z = sim.device(512)
    sim.ok("cuMemsetD8", z, 0, 512)
    graph = captured(sim, x, y)
    exec_ = sim.ok("cuGraphInstantiate", graph, 0)
    node = sim.ok("cuGraphGetNodes", graph, 1)[0][0]
    found = sim.ok("cuGraphKernelNodeGetParams", node)
    assert (found.gridDimX, found.blockDimX) == (1, 128)
    sim.ok("cuGraphLaunch", exec_, sim.stream)
    sim.ok("cuGraphExecKernelNodeSetParams", exec_, node, kernel_params(sim, x, z))
    assert sim.sync() == 0
    assert not sim.download(z, 128).any() and sim.download(y, 128).tolist() == list(range(128))
    sim.ok("cuGraphLaunch", exec_, sim.stream)
    assert sim.sync() == 0
    assert sim.download(z, 128).tolist() == list(range(128))
    assert "block must stay" in sim.refused(
        1, "cuGraphExecKernelNodeSetParams", exec_, node, kernel_params(sim, x, z, 64)
    )
    sim.ok("cuGraphExecDestroy", exec_)


def test_update_takes_equal_topology_and_names_the_difference_otherwise(
    sim: Any, pair: tuple[int, int]
) -> None:
    x, y = pair
    z = sim.device(512)
    exec_ = sim.ok("cuGraphInstantiate", captured(sim, x, y), 0)
    sim.ok("cuGraphExecUpdate", exec_, captured(sim, x, z))
    sim.ok("cuGraphLaunch", exec_, sim.stream)
    assert sim.sync() == 0
    assert sim.download(z, 128).tolist() == list(range(128))
    sim.ok("cuMemFree", y)
    begin(sim)
    copied(sim, x, z)
    copied(sim, x, z)
    longer = sim.ok("cuStreamEndCapture", sim.stream)
    assert "topology" in sim.refused(910, "cuGraphExecUpdate", exec_, longer)
    begin(sim)
    sim.ok("cuMemsetD8Async", z, 0, 512, sim.stream)
    fill = sim.ok("cuStreamEndCapture", sim.stream)
    assert "a node's type" in sim.refused(910, "cuGraphExecUpdate", exec_, fill)
    sim.ok("cuGraphExecDestroy", exec_)


def test_dot_file_lists_kernels_and_edges(sim: Any, pair: tuple[int, int], tmp_path: Path) -> None:
    begin(sim)
    copied(sim, *pair)
    sim.ok("cuMemsetD8Async", pair[1], 0, 512, sim.stream)
    graph = sim.ok("cuStreamEndCapture", sim.stream)
    path = tmp_path / "graph.dot"
    sim.ok("cuGraphDebugDotPrint", graph, str(path).encode(), 0)
    text = path.read_text()
    assert text.startswith("digraph") and "fault" in text and '"node_0" -> "node_1"' in text
