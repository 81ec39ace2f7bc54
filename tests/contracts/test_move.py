"""The move kernels against their contract; synthetic tensors made in device memory and in mapped pinned
memory against the bytes that numpy makes and that a written pack holds; many rounds of device lines against
the model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flashnext_drv.check import cases_lines, cases_move, contract
from flashnext_drv.check.operands import round_table
from flashnext_drv.drv.context import Context
from flashnext_drv.drv.memory import DeviceArena, PinnedArena, copy_to_device, copy_to_host
from flashnext_drv.drv.stream import Stream
from flashnext_drv.kernels import move
from flashnext_drv.kernels.bind import Kernels
from flashnext_drv.kernels.tables import NO_LINE, ROUTE
from flashnext_drv.model.fill import FillRule
from flashnext_drv.model.pack import Pack
from flashnext_drv.model.synth import SynthPack
from flashnext_drv.ref.lines import line_resolve
from flashnext_drv.sim import control

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


@pytest.mark.parametrize("kernel", ["line_resolve", "line_fill"])
def test_order_of_lanes_warps_and_blocks_does_not_matter(
    check_device: Callable[[str], contract.CheckDevice], kernel: str, case_seed: int
) -> None:
    device = check_device("move")
    if not device.ctx.facts.is_simulator:
        pytest.skip("only the simulator's order can be chosen")
    try:
        for case in next(spec for spec in move.KERNELS if spec.name == kernel).cases:
            control.set_seed(0)
            first = contract.run_case(device, kernel, case, case_seed).sha256
            control.set_seed(5)
            assert contract.run_case(device, kernel, case, case_seed).sha256 == first, case.name
    finally:
        control.set_seed(0)


@pytest.mark.parametrize(
    ("n_experts", "n_lines", "n_active", "most_rows", "rounds"),
    [(12, 0, 3, 2, 4), (12, 1, 3, 2, 40), (24, 5, 4, 1, 120), (40, 12, 6, 16, 80), (300, 259, 9, 16, 30)],
)
def test_many_rounds_leave_the_tables_and_bytes_of_the_model(
    ctx: Context,
    stream: Stream,
    case_seed: int,
    n_experts: int,
    n_lines: int,
    n_active: int,
    most_rows: int,
    rounds: int,
) -> None:
    """Rounds of drawn rows, some without any: after each the five tables are the model's byte for byte, each
    line holds its expert's bytes, and both kernels run one behind the other without the host between them."""
    rng = random.Random(f"{case_seed} {n_experts} {n_lines}")
    holds = rng.sample(range(n_experts), n_lines)
    for line in range(0, n_lines, 4):
        holds[line] = NO_LINE
    tables = cases_lines.line_tables(case_seed, n_experts, holds, [0] * n_lines, 0, max(n_lines, 1))
    line_bytes = int(tables["cache"]["line_bytes"][0])
    with (
        Kernels(ctx, ("move",)) as kernels,
        DeviceArena(ctx, "tables", 1 << 20) as arena,
        DeviceArena(ctx, "lines", max(n_lines, 1) * line_bytes) as lines,
        PinnedArena(ctx, "homes", n_experts * line_bytes) as pinned,
    ):
        store = pinned.span("all", n_experts * line_bytes)
        at_home = contract.bits(case_seed, "store", n_experts * line_bytes // 4).view(np.uint8)
        pinned.host(store)[:] = at_home
        there = lines.span("all", max(n_lines, 1) * line_bytes)
        move_tables(tables, store.address, there.address)
        moving = {"round": round_table(0, most_rows), "routes": np.zeros((most_rows, n_active + 1), ROUTE)}
        spans = {name: arena.span(name, array.nbytes) for name, array in (tables | moving).items()}
        for name, array in tables.items():
            copy_to_device(stream, spans[name], array)
        resolve = kernels.launch("line_resolve", 1, **spans, n_experts=n_experts, n_slots=n_active + 1)
        fill = kernels.launch("line_fill", 3, cache=spans["cache"], fills=spans["fills"])
        copies = np.zeros((max(n_lines, 1), line_bytes), np.uint8)
        for line, expert in enumerate(holds):
            if expert != NO_LINE:
                copies[line] = at_home.reshape(n_experts, -1)[expert]
        copy_to_device(stream, there, copies)
        for n_round in range(rounds):
            rows = drawn_rows(rng, n_experts, n_active, rng.choice((0, 1, 1, 2, most_rows)), most_rows)
            moving["round"]["n_rows"] = len(rows)
            moving["routes"]["expert"] = rng.randrange(n_experts)  # of rows that take no part
            moving["routes"]["expert"][: len(rows), :n_active] = rows or np.zeros((0, n_active), np.uint32)
            for name, array in moving.items():
                copy_to_device(stream, spans[name], array)
            resolve.run(stream)
            fill.run(stream)
            if rows:
                line_resolve(tables, rows)
            else:
                tables["cache"]["n_fills"] = 0
            n_fills = int(tables["cache"]["n_fills"][0])
            for name in tables:
                got = np.empty_like(tables[name])
                copy_to_host(stream, got, spans[name])
                assert got.tobytes() == tables[name].tobytes(), f"{name} after round {n_round}, {rows}"
            for to, start, size, _ in tables["fills"][:n_fills]:
                line = (int(to) - there.address) // line_bytes
                first = int(start) - store.address
                copies[line, :size] = at_home[first : first + int(size)]
            got = np.empty_like(copies)
            copy_to_host(stream, got, there)
            assert np.array_equal(got, copies), f"lines after round {n_round}, {rows}"
            for line, expert in enumerate(tables["uses"]["expert"][:n_lines].tolist()):
                if expert != NO_LINE:
                    size, first = int(tables["homes"]["bytes"][expert]), expert * line_bytes
                    assert np.array_equal(got[line, :size], at_home[first : first + size])


def drawn_rows(rng: random.Random, n_experts: int, n_active: int, n: int, most: int) -> list[list[int]]:
    """Up to `most` rows of different experts in rising id, low ids more often."""
    few = range(max(n_experts // 2, n_active))
    return [sorted(rng.sample(rng.choice((few, range(n_experts))), n_active)) for _ in range(min(n, most))]


def move_tables(tables: dict[str, NDArray[Any]], store: int, lines: int) -> None:
    """Put homes at `store` and lines at `lines`, and every expert's addresses with them."""
    homes, cache = tables["homes"], tables["cache"]
    by_home = np.uint64((store - int(homes["address"][0])) % (1 << 64))
    by_line = np.uint64((lines - int(cache["lines"][0])) % (1 << 64))
    homes["address"] += by_home
    cache["lines"] += by_line
    for expert, line in enumerate(homes["line"].tolist()):
        for part in ("gate", "up", "down"):
            for field in ("data", "suh", "svh"):
                tables["lines"][part][field][expert] += by_home if line == NO_LINE else by_line
