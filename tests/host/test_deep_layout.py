"""Sizes and offsets of the deep pass, counted by hand for the micro pack; which layouts limits lead to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashnext_drv.kernels import catalog
from flashnext_drv.kernels import tables as t
from flashnext_drv.model import deep_layout
from flashnext_drv.model.deep_layout import DeepLayout, deep_groups, deep_layouts
from flashnext_drv.model.deep_steps import deep_steps
from flashnext_drv.model.layout import Layout, Limits, aligned
from flashnext_drv.model.pack import Pack
from flashnext_drv.state.ring import ring_bytes, ring_staging_bytes

pytestmark = pytest.mark.host
MICRO = Path(__file__).parents[1] / "data" / "exl3_micro" / "pack"
ROWS = 256
# hidden 128, 4 streams, low rank 32, 4 of 16 experts of 128, 640 DeltaNet channels, 3 value heads, 4 heads of
# 256 on 2, 640 embedded.  256 rows of 5 slots and 63 wasted places for 17 experts: 2351 pairs, 2432 in 128s.
PAIRS = 2432
PRIVATE = {
    "d_streams": 4 * 128 * 4, "d_rinv": 16, "d_inject": 16, "d_m": 128 * 4, "d_y": 128 * 4, "d_rope": 64 * 4,
    "d_rope_block": 64 * 4, "d_routes": 5 * 8, "d_pair_at": 5 * 4}
MIXER = {
    "d_wide": 512 * 2, "d_low": 64 * 2, "d_conv": 640 * 4, "d_gates": 3 * 2 * 4, "d_o": 384 * 4,
    "d_q16": 1024 * 2, "d_iq16": 512 * 2, "d_sel": 8 * 4, "d_flag": 4, "d_emb": 640 * 2, "d_ple_in": 512 * 2,
    "d_ple_g": 16}


def layout(**limits: int | str) -> Layout:
    return Layout(Pack.open(MICRO).config, Limits(**{"context_tokens": 1000, **limits}))  # type: ignore[arg-type]


def test_spans_hold_each_row_and_no_more() -> None:
    made = DeepLayout(layout(sequences=3), ROWS)
    found = made.span_bytes()
    for name, width in {**PRIVATE, **MIXER}.items():
        assert found[name] == ROWS * width, name
    assert found["d_score"] == ROWS * made.layout.max_blocks * 4 and made.layout.max_blocks == 256
    assert made.pairs == (PAIRS, 256 * 5 // 256 + 17)
    assert [found[f"d_moe_{name}"] for name in "xhv"] == [2 * PAIRS * 256, PAIRS * 256, PAIRS * 512]
    assert (found["d_counts"], found["d_starts"], found["d_tiles"]) == (2 * 17 * 4, 2 * 17 * 4, 22 * 16)
    assert (found["d_pair_of"], found["d_n_tiles"]) == (PAIRS * 4, 4)
    # qkv, z and a of DeltaNet have operands of their own; q, k, v and the index key have one each
    assert found["d_x"] == max(ROWS * 1024 * 2, 4 * ROWS * 128 * 2)
    assert found["d_out"] == ROWS * 4 * max(2048 + 512 + 512 + 640, 640 + 384 + 3 + 3, 512 + 128)
    assert made.tables == {"round": (0, 16), "runs": (256, 48), "rows": (512, ROWS * 32)}
    head = ("mixer.down", "mixer.up", "head")
    assert list(made.linears) == [group for group in made.layout.groups if group not in head]
    assert made.sizes["linears"] == sum(
        aligned(len(made.layout.groups[g].members) * t.LINEAR.itemsize) for g in deep_groups(made.layout))


def test_what_lies_in_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = DeepLayout(layout(), ROWS)
    experts = sum(aligned(made.shared[f"d_moe_{name}"][1]) for name in "xhv")
    mixer = sum(aligned(size) for name, (_, size) in made.shared.items() if not name.startswith("d_moe_"))
    assert made.sizes["shared"] == max(experts, mixer)
    assert made.size_bytes() == sum(map(aligned, made.sizes.values()))
    monkeypatch.setattr(deep_layout, "OVERLAY", False)
    apart = DeepLayout(layout(), ROWS)
    assert apart.size_bytes() == made.size_bytes() - made.sizes["shared"] + experts + mixer
    assert set(apart.sizes) | {"shared"} == set(made.span_bytes()) and not apart.shared


def test_buckets_are_powers_of_two_and_the_whole() -> None:
    made = DeepLayout(layout(), 640)
    assert made.buckets() == (128, 256, 512, 640)
    assert [made.bucket(n) for n in (1, 128, 129, 512, 513, 640)] == [128, 128, 256, 512, 640, 640]
    assert DeepLayout(layout(), 128).buckets() == (128,)


@pytest.mark.parametrize(("limits", "rows"), [
    ({}, [1024, 512]), ({"context_tokens": 512}, [512]), ({"context_tokens": 511}, []),
    ({"context_tokens": 4000}, [4096, 2048, 1024, 512]),
    ({"context_tokens": 600, "deep_rows": 1}, [640, 512]),
    ({"context_tokens": 40, "deep_rows": 40}, [128]), ({"context_tokens": 40, "deep_rows": 41}, []),
    ({"chunk": 700}, [768]), ({"chunk": 511}, []), ({"chunk": 16384}, [1024]), ({"deep": "off"}, []),
    ({"chunk": 16384, "sequences": 3}, [3072])])
def test_layouts_worth_reserving(limits: dict[str, int], rows: list[int]) -> None:
    assert [made.rows for made in deep_layouts(layout(**limits))] == rows


def test_offloaded_experts_have_lines_and_tiles_of_batches() -> None:
    """17 experts with the shared one, 112 bytes a line, 22 tiles of 16; the plan goes to pinned memory."""
    made, resident = DeepLayout(layout(expert_lines=3), ROWS), DeepLayout(layout(), ROWS)
    assert made.ring == {
        "d_lines": (0, 17 * 112), "d_batch_n": (2048, 17 * 4), "d_batch_tiles": (2304, 22 * 16)}
    assert made.plan == {"d_n_tiles": (0, 4), "d_tiles": (256, 22 * 16)} and not resident.ring
    assert made.sizes["ring"] == 2304 + 512 and "ring" not in resident.sizes
    assert not {"d_tiles", "d_n_tiles"} & set(made.span_bytes())
    assert {"d_tiles", "d_n_tiles"} < set(resident.span_bytes()) and resident.plan == {}
    assert ring_staging_bytes(made) == 256 + 256 + 2816 + 256 + 512
    assert ring_bytes(made.layout, 5000) == 4 * 80128 and made.layout.limits.ring_depth == 4
    assert ring_bytes(layout(expert_lines=0, ring_depth=2, ring_lines=3), 512, guard=True) == 2 * (1536 + 256)


@pytest.mark.parametrize("limits", [{}, {"expert_lines": 3}])
@pytest.mark.parametrize("rows", [128, 256, 384])
def test_steps_fit_the_declarations(
    rows: int, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every argument of every kernel, spans that exist, and index windows that hold each row once."""
    monkeypatch.setattr(deep_layout, "SCORE_BYTES", 1)
    made = DeepLayout(layout(**limits), 384)
    specs = {spec.name: spec for family in catalog.families() for spec in catalog.specs(family)}
    ours = {name for name in made.span_bytes() if name.startswith("d_")} | set(made.plan)
    windows: dict[str, list[tuple[int, int]]] = {}
    for step in deep_steps(made, rows, True, {1: 4}):
        given = {*step.args} if step.kernel == "line_fill" else {"round", *step.args}
        assert {arg.name for arg in specs[step.kernel].args} == given, step.kernel
        assert all(isinstance(part, int) and 1 <= part < 65536 for part in step.grid), step
        named = {str(v).partition("+")[0] for v in step.args.values() if isinstance(v, str)}
        assert {name for name in named if name.startswith("d_")} <= ours
        assert all(g.removesuffix(".deep") in made.linears for g in named if g.endswith(".deep"))
        if step.kernel == "index_select":
            windows.setdefault(step.scope, []).append((int(step.args["first_row"]), int(step.grid[0])))
    assert windows and all(
        np.array_equal(np.concatenate([np.arange(a, a + n) for a, n in found]), np.arange(rows))
        for found in windows.values())
