"""Experts in host memory: the form of a line, and how the readers fill it; no driver, no compiler."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flashnext_drv.errors import CheckpointError, OutOfMemory, UsageError
from flashnext_drv.kernels import tables as t
from flashnext_drv.lifetime import Owner
from flashnext_drv.model.pack import Pack, PackBase
from flashnext_drv.model.synth import SynthPack
from flashnext_drv.state import store
from flashnext_drv.state.lines import PROJECTIONS, expert_parts, layer_line_bytes, layer_lines
from flashnext_drv.state.store import PinnedExperts

pytestmark = pytest.mark.host
MICRO = Path(__file__).parents[1] / "data" / "exl3_micro" / "pack"
ADDRESSES = [(name, field) for name in PROJECTIONS for field in ("data", "suh", "svh")]


@pytest.fixture(scope="module", params=["disk", "mixed", "oblong"])
def pack(request: pytest.FixtureRequest) -> PackBase:
    """oblong: as many inputs as outputs in no projection."""
    if request.param == "disk":
        return Pack.open(MICRO)
    return SynthPack("micro", mixed=True) if request.param == "mixed" else SynthPack("tiny")


def test_parts_lie_one_after_another(pack: PackBase) -> None:
    """Aligned, without overlap, gate before up before down; the table's addresses are those of the parts."""
    for i_layer in range(pack.config.n_layers):
        layer = layer_lines(pack, i_layer)
        assert layer.line_bytes == layer_line_bytes(pack, i_layer) == layer.sizes.max()
        assert layer.line_bytes % 256 == 0 and layer.n_experts == pack.config.n_experts
        for i_expert, linears in enumerate(pack.experts(i_layer)):
            row, end = layer.rows[i_expert], 0
            parts = list(expert_parts(pack, linears))
            assert [(part.projection, part.field) for part in parts] == ADDRESSES
            for part in parts:
                assert part.offset % 256 == 0 and end <= part.offset < end + 256
                assert not part.tensor or part.size == pack.tensor(part.tensor).size
                assert row[part.projection][part.field] == part.offset
                assert row[part.projection]["format"] == part.info.format
                end = part.offset + part.size
            assert end <= layer.sizes[i_expert] < end + 256 and row["width"] == linears[0].n


def test_mixed_experts_have_lines_of_their_own_length() -> None:
    pack = SynthPack("micro", mixed=True)
    sizes = [layer_lines(pack, i).sizes for i in range(pack.config.n_layers)]
    assert all(len(set(of_layer.tolist())) > 3 for of_layer in sizes)
    assert any(of_layer.tolist() != sizes[0].tolist() for of_layer in sizes[1:])
    legacy = [part for i in range(pack.config.n_layers) for linears in pack.experts(i)
              for part in expert_parts(pack, linears) if not part.tensor]
    assert legacy and {part.part for part in legacy} == {"svh"}


def test_placed_moves_nine_addresses_and_nothing_else(pack: PackBase) -> None:
    layer = layer_lines(pack, 1)
    before = layer.rows.tobytes()
    base = 0x7F00_1234_5600
    rows = layer.placed([3, 0, 3], [base, base + 256, 1 << 63])
    for row, i_expert, at in zip(rows, (3, 0, 3), (base, base + 256, 1 << 63), strict=True):
        expected = layer.rows[i_expert].copy()
        for name, field in ADDRESSES:
            expected[name][field] += np.uint64(at)
        assert row.tobytes() == expected.tobytes()
    assert layer.rows.tobytes() == before, "the form itself may not move"
    assert layer.placed([], []).shape == (0,) and rows.dtype == t.LINE


class Arena:
    """Host memory in place of a pinned arena; `refuse`: layers that get none."""

    made: list[Arena]
    refuse: int

    def __init__(self, ctx: object, name: str, size_bytes: int) -> None:
        if len(self.made) == self.refuse:
            raise OutOfMemory("cuMemHostAlloc", 2, "CUDA_ERROR_OUT_OF_MEMORY")
        self.bytes = np.full(size_bytes, 0xA5, np.uint8)
        self.address, self.host_address, self.closed = 1 << 40, self.bytes.ctypes.data, False
        self.made.append(self)

    def host(self) -> npt.NDArray[np.uint8]:
        return self.bytes

    def close(self) -> None:
        assert readers() == 0, "memory is given back while a reader may still write into it"
        self.closed = True


class Told:
    """An uploader without a device: everything must be read, or with `kernels` what a rule makes is made."""

    def __init__(self, pack: PackBase, kernels: bool = False) -> None:
        self.bytes, self.placed, self._pack, self._kernels = 0, 0, pack, kernels

    def made(self, address: int, name: str) -> bool:
        done = self._kernels and self._pack.fill_plan(name) is not None
        self.placed += self._pack.tensor(name).size if done else 0
        return done

    def told(self, size: int) -> None:
        self.bytes += size


def readers() -> int:
    return sum(thread.name.startswith("flashnext-experts") for thread in threading.enumerate())


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Arena]]:
    Arena.made, Arena.refuse = [], -1
    monkeypatch.setattr(store, "PinnedArena", Arena)
    yield Arena.made
    assert all(arena.closed for arena in Arena.made) and readers() == 0


def opened(pack: PackBase) -> PinnedExperts:
    ctx: Any = Owner("context")
    return PinnedExperts(ctx, pack, [layer_lines(pack, i) for i in range(pack.config.n_layers)])


def expected_part(pack: PackBase, part: Any) -> bytes:
    return (pack.read(part.tensor) if part.tensor else pack.scale(part.info, part.part)).tobytes()


def test_readers_place_every_byte(pack: PackBase, arenas: list[Arena]) -> None:
    uploader: Any = Told(pack)
    with opened(pack) as experts:
        experts.fill(uploader)
        assert len(arenas) == pack.config.n_layers and readers() == 0
        n_bytes = 0
        for i_layer, arena in enumerate(arenas):
            untouched = np.ones(arena.bytes.size, np.bool_)
            for i_expert, linears in enumerate(pack.experts(i_layer)):
                start = i_expert * layer_line_bytes(pack, i_layer)
                assert experts.address(i_layer, i_expert) == arena.address + start
                assert experts.host_address(i_layer, i_expert) == arena.host_address + start
                for part in expert_parts(pack, linears):
                    place = slice(start + part.offset, start + part.offset + part.size)
                    assert arena.bytes[place].tobytes() == expected_part(pack, part), (i_layer, part)
                    untouched[place] = False
                    n_bytes += part.size
            assert (arena.bytes[untouched] == 0xA5).all(), "a reader wrote outside its part"
        assert uploader.bytes == n_bytes, "progress counts every byte once"


def test_the_context_outlives_the_store(arenas: list[Arena]) -> None:
    pack = Pack.open(MICRO)
    ctx: Any = Owner("context")
    layers = [layer_lines(pack, i) for i in range(pack.config.n_layers)]
    with PinnedExperts(ctx, pack, layers), pytest.raises(UsageError, match=store.OWNER):
        ctx.close()
    assert not arenas


def test_what_kernels_make_is_not_read(arenas: list[Arena]) -> None:
    pack = SynthPack("micro", mixed=True)
    uploader: Any = Told(pack, kernels=True)
    with opened(pack) as experts:
        experts.fill(uploader)
        sizes = [part.size for i in range(pack.config.n_layers) for linears in pack.experts(i)
                 for part in expert_parts(pack, linears)]
        assert 0 < uploader.bytes < uploader.placed and uploader.bytes + uploader.placed == sum(sizes)


class Failing(Pack):
    """Reading some tensors fails."""

    failing: tuple[str, ...] = ()

    def read_parts(self, parts: Sequence[tuple[str, npt.NDArray[np.uint8]]]) -> None:
        for name, _ in parts:
            if name in self.failing:
                raise CheckpointError("file lost bytes since it was opened", tensor=name)
        super().read_parts(parts)


def test_first_error_wins_and_stops_the_readers(arenas: list[Arena]) -> None:
    pack = Failing.open(MICRO)
    assert isinstance(pack, Failing)
    stem = "model.language_model.layers.{}.mlp.experts.{}.up_proj.trellis"
    pack.failing = tuple(stem.format(*at) for at in ((0, 7), (2, 1), (3, 15)))
    uploader: Any = Told(pack)
    with opened(pack) as experts:
        with pytest.raises(CheckpointError) as caught:
            experts.fill(uploader)
        assert caught.value.facts["tensor"] == pack.failing[0] and readers() == 0
        assert not any(arena.closed for arena in arenas), "close gives them back, with the readers gone"


def test_refused_memory_leaves_no_reader(arenas: list[Arena]) -> None:
    pack = Failing.open(MICRO)
    Arena.refuse = 2
    uploader: Any = Told(pack)
    with opened(pack) as experts:
        with pytest.raises(OutOfMemory):
            experts.fill(uploader)
        assert len(arenas) == 2 and readers() == 0
