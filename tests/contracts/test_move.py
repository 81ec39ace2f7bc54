"""The move kernels against their contract, and synthetic tensors made in device memory and in mapped pinned
memory against the bytes that numpy makes and that a written pack holds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flashnext_drv.check import cases_move, contract
from flashnext_drv.drv.context import Context
from flashnext_drv.drv.memory import DeviceArena, PinnedArena, copy_to_host
from flashnext_drv.drv.stream import Stream
from flashnext_drv.kernels import move
from flashnext_drv.kernels.bind import Kernels
from flashnext_drv.model.fill import FillRule
from flashnext_drv.model.pack import Pack
from flashnext_drv.model.synth import SynthPack

pytestmark = pytest.mark.sim
ALL = [(spec.name, case) for spec in move.KERNELS for case in spec.cases]
NGRAM = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
# One tensor of every rule, and shards of rows that stand back to back in one array.
NAMES = (
    "lm_head.trellis",
    "lm_head.svh",
    "model.language_model.embed_tokens.weight",
    "model.language_model.layers.3.mlp.gate.weight",
    "model.language_model.layers.0.linear_attn.norm.weight",
    "model.language_model.layers.0.linear_attn.A_log",
    f"{NGRAM}.head_bias",
)


@pytest.mark.parametrize(("kernel", "case"), ALL, ids=[f"{k}-{c.name}" for k, c in ALL])
def test_case_meets_its_expectation(
    check_device: Callable[[str], contract.CheckDevice], kernel: str, case: contract.Case, case_seed: int
) -> None:
    contract.run_case(check_device("move"), kernel, case, case_seed)


def test_wrong_bytes_are_reported(case_seed: int) -> None:
    """The expectation goes red for one flipped bit and for a write outside its elements."""
    case = next(c for c in move.SYNTH_FILL.cases if c.name == "words_skewed")
    operands = cases_move.build("synth_fill", case, case_seed)
    good = operands.arrays["dst"].copy()
    s = {name: int(value) for name, value in operands.scalars.items()}
    at, end = s["at"], s["at"] + s["count"]
    from flashnext_drv.ref.move import synth_fill

    good[at:end] = synth_fill(s["first"], s["count"], s)
    operands.expect({"dst": good})
    for i in (at, end - 1, at - 1, end):
        bad = good.copy()
        bad[i] ^= 1
        with pytest.raises(AssertionError):
            operands.expect({"dst": bad})


@pytest.mark.parametrize("mixed", [False, True])
def test_disk_device_and_pinned_memory_hold_the_same_bytes(
    ctx: Context, stream: Stream, tmp_path: Path, mixed: bool
) -> None:
    made = SynthPack("micro", 5, mixed=mixed)
    made.write(tmp_path / "pack")
    disk = Pack.open(tmp_path / "pack")
    plan = [(name, made.fill_plan(name), made.tensors[name].size) for name in NAMES]
    rows = made.ngram()
    plan += [(name, made.fill_plan(name), n * rows.row_bytes) for name, _, n in rows.sources]
    total = sum(size for _, _, size in plan) + 64
    with (
        Kernels(ctx, ("move",)) as kernels,
        DeviceArena(ctx, "filled", total) as device,
        PinnedArena(ctx, "filled.pinned", total) as pinned,
    ):
        there, here = device.span("all", total), pinned.span("all", total)
        for address in (there, here):
            at = 3  # elements: no tensor starts at a piece's boundary
            for name, rule, size in plan:
                assert isinstance(rule, FillRule), name
                grid = -(-(size // 2 + 7) // 2048)
                kernels.launch("synth_fill", grid, dst=address, **rule.arguments(0, size // 2, at)).run(
                    stream
                )
                at += size // 2
        got = np.empty(total, dtype=np.uint8)
        copy_to_host(stream, got, there)
        mapped = pinned.host(here).copy()
    at = 6
    for name, _, size in plan:
        want = disk.read(name).tobytes()
        assert got[at : at + size].tobytes() == want, f"{name} on the device"
        assert mapped[at : at + size].tobytes() == want, f"{name} in pinned memory"
        at += size


def test_middle_of_a_tensor_can_be_made_alone(ctx: Context, stream: Stream) -> None:
    made = SynthPack("micro", 5)
    name = "model.language_model.embed_tokens.weight"
    rule, first, count = made.fill_plan(name), 12_345, 6_789
    assert rule is not None
    with Kernels(ctx, ("move",)) as kernels, DeviceArena(ctx, "filled", 2 * count) as device:
        span = device.span("part", 2 * count)
        grid = -(-(count + 7) // 2048)
        kernels.launch("synth_fill", grid, dst=span, **rule.arguments(first, count)).run(stream)
        got = np.empty(count, dtype=np.uint16)
        copy_to_host(stream, got, span)
    assert np.array_equal(got, made.read(name).reshape(-1)[first : first + count])
