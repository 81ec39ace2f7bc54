"""Kernels with more shared memory than an image may hold: the launcher asks the driver once, and the
simulator refuses what a GPU refuses."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext_drv.drv.context import Context
from flashnext_drv.drv.faults import count_calls, fail_nth
from flashnext_drv.drv.memory import DeviceArena, copy_to_device, copy_to_host
from flashnext_drv.drv.stream import Stream
from flashnext_drv.errors import ContractError, DriverError
from flashnext_drv.kernels import bind, catalog
from flashnext_drv.kernels.bind import Kernels
from flashnext_drv.kernels.catalog import Image, KernelRecord, Manifest
from flashnext_drv.kernels.probe import SHARED_WIDE

BYTES = SHARED_WIDE.shared_bytes
MOST_DYNAMIC = 8        # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@pytest.fixture
def kernels(ctx: Context) -> Iterator[Kernels]:
    with Kernels(ctx, ("probe",)) as made:
        yield made


def test_the_driver_is_asked_once_and_the_kernel_runs(ctx: Context, stream: Stream, kernels: Kernels) -> None:
    x = np.arange(2048, dtype=np.uint32).reshape(2, 1024)
    y = np.zeros_like(x)
    with DeviceArena(ctx, "a", 1 << 15) as arena:
        spans = {"x": arena.span("x", x.nbytes), "y": arena.span("y", y.nbytes)}
        copy_to_device(stream, spans["x"], x)
        with count_calls() as count:
            launches = [kernels.launch("shared_wide", 2, **spans) for _ in range(3)]
        assert count.names.count("cuFuncSetAttribute") == 1
        assert {launch.shared_bytes for launch in launches} == {SHARED_WIDE.dynamic_on(kernels.arch)} != {0}
        for launch in launches:
            launch.run(stream)
        copy_to_host(stream, y, spans["y"])
    assert (y == x[:, ::-1]).all()


def test_a_kernel_within_48_kib_asks_for_nothing(kernels: Kernels) -> None:
    with count_calls() as count:
        launch = kernels.launch("barrier_turns", 1, x=0, y=0, turns=1)
    assert launch.shared_bytes == 0 and "cuFuncSetAttribute" not in count.names


def test_a_refusal_is_named_and_the_next_launch_asks_again(kernels: Kernels) -> None:
    named = pytest.raises(DriverError, match=r"cuFuncSetAttribute\(.*value=")
    with fail_nth(1, 1, only="cuFuncSetAttribute"), named:
        kernels.launch("shared_wide", 1, x=0, y=0)
    with count_calls() as count:
        kernels.launch("shared_wide", 1, x=0, y=0)
    assert "cuFuncSetAttribute" in count.names


def test_more_than_a_block_may_have_is_refused(kernels: Kernels) -> None:
    function = kernels.module("probe").function("shared_wide")
    with pytest.raises(DriverError, match="cuFuncSetAttribute"):
        function.allow_shared((227 << 10) + 1)
    function.allow_shared(227 << 10)


@pytest.mark.sim
def test_the_simulator_refuses_what_was_not_allowed_or_declared(sim: Any) -> None:
    x, y = sim.upload(np.arange(1024, dtype=np.uint32)), sim.device(4096)
    table, wide = sim.params("shared_wide", x=x, y=y), sim.function("shared_wide")
    shape = (wide, 1, 1, 1, 128, 1, 1)
    said = sim.refused(1, "cuLaunchKernel", *shape, BYTES, sim.stream, table, 0)
    assert "allows it no more than 49152" in said
    attribute = sim.d.CUfunction_attribute(MOST_DYNAMIC)
    assert sim.ok("cuFuncGetAttribute", attribute, wide) == 49152
    assert "a block has 232448 left" in sim.refused(1, "cuFuncSetAttribute", wide, attribute, 232449)
    assert "cannot be set" in sim.refused(1, "cuFuncSetAttribute", wide, sim.d.CUfunction_attribute(0), 1)
    small = sim.function("fault")
    assert "a block has 232416 left" in sim.refused(1, "cuFuncSetAttribute", small, attribute, 232417)
    sim.ok("cuFuncSetAttribute", wide, attribute, BYTES)
    assert sim.ok("cuFuncGetAttribute", attribute, wide) == BYTES
    assert sim.ok("cuFuncGetAttribute", sim.d.CUfunction_attribute(1), wide) == 0
    for other in (0, BYTES - 4, BYTES + 4):
        said = sim.refused(1, "cuLaunchKernel", *shape, other, sim.stream, table, 0)
        assert f"with {other} dynamic bytes, declared (128,1,1) with {BYTES}" in said
    sim.ok("cuLaunchKernel", *shape, BYTES, sim.stream, table, 0)
    assert sim.sync() == 0
    blocks = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
    assert sim.ok(blocks, wide, 128, BYTES) == 2 and sim.ok(blocks, wide, 128, 227 << 10) == 1


@pytest.mark.sim
def test_a_captured_launch_keeps_its_bytes(sim: Any) -> None:
    x, y = sim.upload(np.arange(1024, dtype=np.uint32)), sim.device(4096)
    table, wide = sim.params("shared_wide", x=x, y=y), sim.function("shared_wide")
    sim.ok("cuFuncSetAttribute", wide, sim.d.CUfunction_attribute(MOST_DYNAMIC), BYTES)
    sim.ok("cuStreamBeginCapture", sim.stream, sim.d.CUstreamCaptureMode(1))
    sim.ok("cuLaunchKernel", wide, 1, 1, 1, 128, 1, 1, BYTES, sim.stream, table, 0)
    graph = sim.ok("cuStreamEndCapture", sim.stream)
    node = sim.ok("cuGraphGetNodes", graph, 1)[0][0]
    params = sim.ok("cuGraphKernelNodeGetParams", node)
    assert params.sharedMemBytes == BYTES
    exec_ = sim.ok("cuGraphInstantiate", graph, 0)
    sim.ok("cuGraphExecKernelNodeSetParams", exec_, node, params)
    params.sharedMemBytes = 0
    said = sim.refused(1, "cuGraphExecKernelNodeSetParams", exec_, node, params)
    assert f"with {BYTES} bytes of dynamic shared memory" in said


@pytest.mark.sim
@pytest.mark.parametrize(("built", "refused"), [(0, False), (16, True)])
def test_an_image_holds_none_of_what_launches_ask_for(ctx: Context, tmp_path: Path, built: int, refused: bool,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"\x7fELF not loaded"
    (tmp_path / "probe.cubin").write_bytes(data)
    records = {spec.name: KernelRecord(32, spec.static_on("sm_90a"), 0, 0, 0, spec.block, 0, spec.offsets())
               for spec in catalog.specs("probe")}
    records["shared_wide"] = dataclasses.replace(records["shared_wide"], shared_bytes=built)
    image = Image("probe", "sm_90a", "probe.cubin", hashlib.sha256(data).hexdigest(), len(data),
                  catalog.image_digest("probe"), records)
    monkeypatch.setattr(catalog, "manifest", lambda: Manifest({}, (), "", "", (image,)))
    monkeypatch.setattr(catalog, "cubin_root", lambda: tmp_path)
    monkeypatch.setattr(ctx, "facts", dataclasses.replace(ctx.facts, is_simulator=False, cc=(9, 0)))
    assert bind._arch(ctx) == "sm_90a"
    if refused:
        with pytest.raises(ContractError, match="shared_wide was built for another launch"):
            bind._image(ctx, "sm_90a", "probe")
    else:
        assert bind._image(ctx, "sm_90a", "probe")[0] == data
