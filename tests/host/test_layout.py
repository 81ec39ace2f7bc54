"""Sizes and offsets of a rank's memory, counted by hand for the micro pack; limits at their edges."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashnext_drv.engine.requests import Request, checked_request
from flashnext_drv.errors import CapacityError, UsageError
from flashnext_drv.kernels import tables as t
from flashnext_drv.model.layout import Layout, Limits, aligned, arena_bytes, bucket_of
from flashnext_drv.model.pack import Pack
from flashnext_drv.model.plan import Plan

pytestmark = pytest.mark.host
MICRO = Path(__file__).parents[1] / "data" / "exl3_micro" / "pack"
# hidden 128, 4 streams, low rank 32, 4 of 16 experts, 3 value heads, 4 heads of 256 on 2, 4 index heads of
# 128, 64 rotated channels, 640 embedded, 512 tokens; a context of 100 tokens has 25 blocks, 8 are chosen.
ROW_BYTES = {
    "streams": 4 * 128 * 4, "n16": 4 * 128 * 2, "rinv": 4 * 4, "inject": 4 * 4, "u16": 32 * 2, "m": 128 * 4,
    "y": 128 * 4, "conv": 640 * 4, "o": 3 * 128 * 4, "q16": 4 * 256 * 2, "iq16": 4 * 128 * 2, "score": 32 * 4,
    "sel": 8 * 4, "flag": 4, "part_m": 4 * 4, "part_l": 4 * 4, "part_o": 4 * 256 * 4, "rope": 64 * 4,
    "rope_block": 64 * 4, "emb": 640 * 2, "routes": 5 * 8, "moe_x": 5 * 2 * 128 * 2, "moe_h": 5 * 128 * 2,
    "moe_part": 5 * 4 * 2 * 128, "logits": 512 * 4, "tokens": 4, "status": 4}


def layout(**limits: int) -> Layout:
    return Layout(Pack.open(MICRO).config, Limits(**{"context_tokens": 100, **limits}))


@pytest.mark.parametrize("rows", [1, 16])
def test_scratch_holds_each_row_and_no_more(rows: int) -> None:
    made = layout(rows=rows)
    grouped = {name: made.work[name] for name in ("x", "part", "out")}
    assert made.work.pop("counts") == 8 * 16
    assert {k: v for k, v in made.work.items() if k not in grouped} == {
        name: rows * size for name, size in ROW_BYTES.items()}
    assert grouped == {"x": rows * 2048, "part": rows * 14848, "out": rows * 14848}


def test_members_of_a_group_lie_one_behind_another() -> None:
    made = layout(rows=16)
    assert made.member_offsets("L0.gdn_in") == (
        [0, 4096, 8192, 8192], [0, 40960, 65536, 65792], [0, 40960, 65536, 65792])
    assert made.member_offsets("L0.attn_site.down") == ([0, 0], [0, 4096], [0, 2048])


def test_recurrent_slot() -> None:
    state, tail, ple = 3 * 128 * 128 * 4, 3 * 640 * 2, 9 * 4 * 128 * 2
    found = layout().recurrent
    assert dict(found.state) == {0: 0, 1: state + tail, 2: 2 * (state + tail)}
    assert dict(found.tail) == {i: at + state for i, at in found.state.items()}
    assert dict(found.ple_tail) == {1: 3 * (state + tail)}
    assert found.size_bytes == 3 * (state + tail) + ple


def test_pages_and_what_follows_from_the_context() -> None:
    made = layout(sequences=2)
    assert (made.pages.kv_bytes, made.pages.index_bytes) == (2 * 64 * 2 * 256 * 2, (64 + 16) * 128 * 2)
    assert (made.pages_per_sequence, made.n_pages, made.max_blocks, made.budget) == (2, 4, 32, 8)
    assert [layout(context_tokens=n).pages_per_sequence for n in (1, 64, 65, 128)] == [1, 1, 2, 2]
    assert [layout(context_tokens=n).max_blocks for n in (1, 64, 67, 68)] == [16, 16, 16, 32]
    assert [layout(context_tokens=n).max_parts for n in (34, 35, 64)] == [1, 1, 1]
    assert (made.n_slots, made.width_cap, made.moe_units) == (5, 128, (1, 1))
    lines = 4 * aligned(17 * t.LINE.itemsize)
    linears = sum(aligned(len(g.members) * t.LINEAR.itemsize) for g in made.groups.values())
    head = t.ROUND.itemsize + t.ROW.itemsize + t.RUN.itemsize + 2 * (t.SLOT.itemsize + 64)
    edits = aligned(2 * (32 + 16 * 512))  # as many ids as the vocabulary has
    assert made.table_bytes() == aligned(head) + aligned(2 * 2 * 16) + edits + linears + lines


def test_rounding_of_sizes() -> None:
    assert [aligned(n) for n in (0, 1, 255, 256, 257)] == [0, 256, 256, 256, 512]
    assert arena_bytes([]) == 256 and arena_bytes([1, 257]) == 256 + 512
    assert arena_bytes([1, 257], guard=True) == 512 + 768
    assert [bucket_of(n) for n in (1, 2, 3, 4, 5, 8, 9, 16)] == [1, 2, 4, 4, 8, 8, 16, 16]


@pytest.mark.parametrize(("name", "low", "high"), [
    ("context_tokens", 1, 1 << 20), ("sequences", 1, 4096), ("rows", 1, 16), ("device_bytes", 0, 1 << 50),
    ("reserve_bytes", 0, 1 << 50), ("chunk", 0, 16384), ("deep_rows", 1, 1 << 20), ("graphs", 2, 4096),
    ("graph_floor_bytes", 0, 1 << 50), ("graph_after", 1, 2), ("steps_ahead", 1, 64),
    ("expert_lines", 0, 1024), ("expert_reserve_bytes", 0, 1 << 50), ("server_reserve_bytes", 0, 1 << 50),
    ("ring_depth", 1, 64), ("ring_lines", 1, 1024), ("host_bytes", 0, 1 << 50),
    ("host_reserve_bytes", 0, 1 << 50)])
def test_limits_hold_at_their_edges(name: str, low: int, high: int) -> None:
    for value in (low, high):
        assert getattr(Limits(**{name: value}), name) == value
    for value in (low - 1, high + 1, 1.5):
        with pytest.raises(UsageError, match=name):
            Limits(**{name: value})  # type: ignore[arg-type]


def test_more_lines_go_up_to_1024() -> None:
    assert Limits(expert_lines=1, expert_lines_most=1024).expert_lines_most == 1024
    with pytest.raises(UsageError, match="expert_lines_most"):
        Limits(expert_lines=1, expert_lines_most=1025)


def test_limits_not_given() -> None:
    made = Limits()
    assert (made.context_tokens, made.sequences, made.device_bytes) == (4096, 1, 0)
    assert (made.reserve_bytes, made.graph, made.page_order) == (256 * 2**20, True, "forward")
    assert (made.chunk, made.deep, made.deep_rows) == (0, "open", 512)


def test_prompt_rows_go_up_to_rows_and_16() -> None:
    assert Limits(rows=16, prompt_rows=16).prompt_rows == 16
    with pytest.raises(UsageError, match="prompt_rows"):
        Limits(rows=4, prompt_rows=5)
    with pytest.raises(UsageError, match="prompt_rows"):
        Limits(rows=16, prompt_rows=17)


def test_a_plan_that_fits_exactly_is_taken() -> None:
    plan = Plan({"weights": 60, "kv": 40}, {"ngram": 1000})
    plan.require_fits(1000, Limits(device_bytes=100))
    plan.require_fits(100 + 50, Limits(reserve_bytes=50))
    with pytest.raises(CapacityError, match="allows 99 B; largest owner weights 60 B, kv 40 B"):
        plan.require_fits(1000, Limits(device_bytes=99))
    with pytest.raises(CapacityError, match="149 B are free, of which 50 B stay"):
        plan.require_fits(149, Limits(reserve_bytes=50))


def test_the_models_last_position_can_be_used() -> None:
    assert layout(context_tokens=4096).limits.context_tokens == 4096
    with pytest.raises(CapacityError, match="max_positions=4096"):
        layout(context_tokens=4097)


def test_a_request_may_fill_the_cache_to_its_last_token() -> None:
    """The last token drawn is never put there: 40 + 25 - 1 are all 64 of the only page."""
    made = layout(context_tokens=64)
    assert made.n_pages == 1
    assert checked_request(Request((1,) * 40, 25), made).max_new_tokens == 25
    with pytest.raises(CapacityError, match="needed_tokens=65"):
        checked_request(Request((1,) * 40, 26), made)
