"""Declarations of the moe_deep family: the experts of a prompt's rows, sorted by expert.

Kernel sources: cuda_src/moe/moe_plan_*.cu and moe_deep_*.cu.  After router_pick a layer is moe_plan_count,
moe_plan_scan, moe_plan_place (where each (row, slot) stands when they are sorted by expert, and tiles of up
to 256 rows of one expert), moe_deep_input, moe_deep_gu, moe_deep_down, moe_deep_sum.  What must stay true:
bytes are those of the moe and moe_gemv families, whatever the tile a row comes to stand in.
"""

from __future__ import annotations

from typing import Final

from . import planted_deep_input as planted_input
from . import planted_moe_deep as planted
from .deep import DEEP_HOPPER_SHARED, DEEP_INPUT_BLOCK, DEEP_INPUT_SHARED, DEEP_SHARED
from .limits import limits_of
from .spec import PTR, U32, Arg, Case, KernelSpec

__all__ = [
    "KERNELS",
    "MOE_DEEP_DOWN",
    "MOE_DEEP_GU",
    "MOE_DEEP_INPUT",
    "MOE_DEEP_SUM",
    "MOE_PLAN_COUNT",
    "MOE_PLAN_PLACE",
    "MOE_PLAN_SCAN",
    "deep_pairs",
    "deep_sum_grid",
]

_ROUND: Final = Arg("round", PTR, "FnRound", "r")
_ROUTES: Final = Arg("routes", PTR, "FnRoute (rows_cap, n_slots)", "r")
_COUNTS_DOC: Final = "(rows_cap / 128, n_experts + 1) u32"
_TILES: Final = Arg("tiles", PTR, "FnTile (tiles_cap)", "r")
_N_TILES: Final = Arg("n_tiles", PTR, "(1) u32", "r")
_LINES: Final = Arg("lines", PTR, "FnLine[n_experts + 1], EXL3", "r")
_HIDDEN: Final = Arg("hidden", U32, "channels, multiple of 128")
_SLOTS: Final = Arg("n_slots", U32, "active experts + 1, 2..33")
_WIDTH: Final = Arg("width_cap", U32, "largest width of a line, multiple of 128")
_EXPERTS: Final = Arg("n_experts", U32, "id of the shared expert, 1..1024")
_PAIRS: Final = Arg("pairs_cap", U32, "sorted positions, multiple of 128")

_INTEGERS: Final = {
    "order": "no sum of floats",
    "mates": "the plan is of all rows together: its reference is compared whole",
    "integers": "works on integers alone: every case is exact",
    "midpoints": "works on integers alone",
    "nonfinite": "works on integers alone",
}
# as many rows as come to be 0, 1, 64, 65, 128, 129 for experts 0 .. 5
_EDGES: Final = "0,1,64,65,128,129,3"


def deep_pairs(rows: int, n_slots: int, n_experts: int) -> tuple[int, int]:
    """(pairs_cap, tiles_cap): the most sorted positions and tiles that `rows` rows come to.

    rows: a multiple of 128.  Every expert, the shared one with them, may waste 63 positions and have
    one tile that is not full.
    """
    positions = rows * n_slots + 63 * (n_experts + 1)
    return -(-positions // 128) * 128, rows * n_slots // 256 + n_experts + 1


def deep_sum_grid(rows: int, hidden: int) -> tuple[int, int]:
    """Blocks of moe_deep_sum, which stride over the rows: at the published width five on each of 132 SMs."""
    return -(-hidden // 512), min(rows, 132)


def _case(name: str, rows: int, **dims: int | str) -> Case:
    """members: rows of each routed expert; without it n_active of n_experts are drawn for each row."""
    return Case(name, {"rows": rows, "rows_cap": 256, "n_experts": 7, "n_active": 3, "members": "", **dims})


_PLAN_CASES: Final = (
    _case("one_row", 1),
    _case("three_rows", 3),
    _case("one_more_than_half", 65),
    _case("whole_block", 128, rows_cap=128),
    _case("edges", 130, members=_EDGES),
    _case("three_blocks", 300, rows_cap=512),
    _case("published", 17, rows_cap=128, n_experts=512, n_active=10),
    _case("most_experts", 9, rows_cap=128, n_experts=1024, n_active=32),
    _case("one_expert", 66, rows_cap=128, n_experts=1, n_active=1),
    _case("no_rows", 0, rows_cap=128),
)

MOE_PLAN_COUNT: Final = KernelSpec(
    name="moe_plan_count",
    source="moe/moe_plan_count.cu",
    order="",
    args=(_ROUND, _ROUTES, Arg("counts", PTR, _COUNTS_DOC, "w"), _SLOTS, _EXPERTS),
    grid="rows_cap / 128",
    block=128,
    shared_bytes=4112,
    limits=limits_of("moe_plan_count"),
    reference="moe_deep.plan",
    exempt=_INTEGERS,
    controls=planted.MOE_PLAN_COUNT,
    bound="Exact.",
    cases=_PLAN_CASES,
)

MOE_PLAN_SCAN: Final = KernelSpec(
    name="moe_plan_scan",
    source="moe/moe_plan_scan.cu",
    order="",
    args=(
        _ROUND,
        Arg("counts", PTR, _COUNTS_DOC, "r"),
        Arg("starts", PTR, _COUNTS_DOC, "w"),
        Arg("tiles", PTR, "FnTile (tiles_cap)", "w"),
        Arg("n_tiles", PTR, "(1) u32", "w"),
        _EXPERTS,
        Arg("tiles_cap", U32, "tiles that fit"),
    ),
    grid="1",
    block=1024,
    shared_bytes=128,
    limits=limits_of("moe_plan_scan"),
    reference="moe_deep.plan",
    exempt=_INTEGERS,
    controls=planted.MOE_PLAN_SCAN,
    bound="Exact.",
    cases=(
        *_PLAN_CASES,
        _case("many_blocks", 128 * 19 + 5, rows_cap=128 * 20),
        _case("few_tiles", 300, rows_cap=384, special="few_tiles"),
        _case("large_tiles", 700, rows_cap=768, n_experts=8, members="0,1,256,257,384,385,640,177"),
    ),
)

MOE_PLAN_PLACE: Final = KernelSpec(
    name="moe_plan_place",
    source="moe/moe_plan_place.cu",
    order="",
    args=(
        _ROUND,
        _ROUTES,
        Arg("starts", PTR, _COUNTS_DOC, "r"),
        Arg("pair_at", PTR, "(rows_cap, n_slots) u32", "w"),
        Arg("pair_of", PTR, "(pairs_cap) u32", "w"),
        _SLOTS,
        _EXPERTS,
    ),
    grid="rows_cap / 128",
    block=128,
    shared_bytes=16400,
    limits=limits_of("moe_plan_place"),
    reference="moe_deep.plan",
    exempt=_INTEGERS,
    controls=planted.MOE_PLAN_PLACE,
    bound="Exact.",
    cases=_PLAN_CASES,
)

MOE_DEEP_INPUT: Final = KernelSpec(
    name="moe_deep_input",
    source="moe/moe_deep_input.cu",
    order="exl3_dot_v1",
    args=(
        _ROUND,
        _TILES,
        _N_TILES,
        Arg("pair_of", PTR, "(pairs_cap) u32", "r"),
        _LINES,
        Arg("m", PTR, "(rows_cap, hidden) f32", "r"),
        Arg("x", PTR, "f16, two tile images of (pairs_cap, hidden): gate, up", "w"),
        _HIDDEN,
        _SLOTS,
        _PAIRS,
    ),
    grid="tiles_cap, ceil(hidden / 256)",
    block=DEEP_INPUT_BLOCK,
    shared_bytes=DEEP_INPUT_SHARED,
    blocks_per_sm=3,
    limits=limits_of("moe_deep_input"),
    reference="orders.hadamard128",
    replaces="moe_input",
    exempt={
        "mates": "works by tile; a test gives rows other company, and the order check compares each",
        "integers": "the rotation's scale 1/sqrt(128) is no power of two: integers have no exact answer",
        "midpoints": "what is rounded has passed through that scale: no input gives an exact tie",
    },
    controls=planted_input.MOE_DEEP_INPUT,
    bound="Equal in bits to the order's oracle: one product, seven stages, one scale, f16 once.",
    cases=(
        _case("one_row", 1, hidden=128),
        _case("three_rows", 3, hidden=384),
        _case("one_more_than_half", 65, hidden=128),
        _case("edges", 130, hidden=128, members=_EDGES),
        _case("large", 150, n_experts=2, n_active=1, hidden=256, members="149,1"),
        _case("published", 2, rows_cap=128, n_experts=64, n_active=10, hidden=2560),
        _case("nonfinite", 5, hidden=256, special="nonfinite"),
        _case("no_rows", 0, hidden=128, special="stale_tiles"),
    ),
)

MOE_DEEP_SUM: Final = KernelSpec(
    name="moe_deep_sum",
    source="moe/moe_deep_sum.cu",
    order="moe_sum_v1",
    args=(
        _ROUND,
        _ROUTES,
        Arg("pair_at", PTR, "(rows_cap, n_slots) u32", "r"),
        Arg("v", PTR, "(pairs_cap, hidden) f32", "r"),
        Arg("y", PTR, "(rows_cap, hidden) f32", "w"),
        _HIDDEN,
        _SLOTS,
        _EXPERTS,
    ),
    grid="ceil(hidden / 512), 1 .. rows_cap: deep_sum_grid",
    block=128,
    shared_bytes=800,
    blocks_per_sm=5,
    limits=limits_of("moe_deep_sum"),
    reference="moe.Experts",
    replaces="moe_sum",
    rows={"routes": 0, "pair_at": 0, "y": 0, "part": 1},
    exempt={
        "integers": "the order check finishes v with the scale 1/sqrt(128): integers have no exact answer",
        "midpoints": "outputs are f32: nothing is rounded to f16",
    },
    controls=planted.MOE_DEEP_SUM,
    bound="Equal in bits to the order's oracle.",
    cases=(
        _case("one_row", 1, rows_cap=128, hidden=128),
        _case("three_rows", 3, rows_cap=128, hidden=640),
        _case("edges", 130, hidden=128, members=_EDGES),
        _case("three_experts", 2, rows_cap=128, n_experts=3, hidden=256),
        _case("one_leaf", 2, rows_cap=128, n_experts=256, n_active=4, hidden=128, special="low_ids"),
        _case("widest", 1, rows_cap=128, n_experts=64, n_active=32, hidden=128),
        _case("published", 2, rows_cap=128, n_experts=512, n_active=10, hidden=2560),
        _case("by_turns", 13, rows_cap=128, n_active=4, hidden=128, at_once=3),
        _case("by_turns_wide", 5, rows_cap=128, n_active=5, hidden=640, at_once=2),
        _case("nonfinite", 4, rows_cap=128, hidden=128, special="nonfinite"),
    ),
)


def _tiles(name: str, rows: int, lines: str, **dims: int | str) -> Case:
    """lines: "<width>:<format of gate>,<of up>,<of down>" separated by ";", the shared expert's last."""
    n_experts = lines.count(";")
    given = {"rows_cap": 128, "n_experts": n_experts, "n_active": 1, "hidden": 128, "lines": lines, **dims}
    return _case(name, rows, **given)


_LINE: Final = "128:mul1_3,mul1_3,mul1_3"
_TILE_CASES: Final = (
    _tiles("one_row", 1, f"{_LINE}; 128:mul1_5,mul1_5,mul1_5"),
    _tiles("half_and_one", 65, f"{_LINE}; {_LINE}; 128:mul1_5,mul1_4,mul1_5", members="64,1"),
    _tiles("whole_and_one", 129, f"{_LINE}; {_LINE}; {_LINE}; {_LINE}", members="0,128,1", rows_cap=256),
    _tiles(
        "wide",
        300,
        f"640:mul1_3,mul1_5,mul1_3; {_LINE}; 128:mul1_3,mul1_8,mul1_8",
        members="171,129",
        rows_cap=384,
        hidden=1024,
    ),
    _tiles(
        "wide_widths",
        130,
        "128:mul1_1,mul1_1.5,mul1_2; 256:mul1_2.5,mul1_3,mul1_3.5; 128:mul1_4,mul1_5,mul1_6",
        members="130,130",
        rows_cap=256,
        n_active=2,
    ),
    _tiles("narrow_and_long", 66, "128:mul1_3,mul1_4,mul1_3; 256:mul1_5,mul1_4,mul1_3"),
    _tiles(
        "mixed",
        5,
        "256:mul1_2,mcg_4,3inst_1; 128:mul1_2.5,mul1_3.5,mul1_1.5; 384:mul1_4,mul1_5,mul1_6; "
        "128:3inst_7,mcg_8,mul1_8",
        n_active=2,
        hidden=640,
    ),
    _tiles("segments", 2, "1024:mul1_3,mul1_3,mul1_3; 640:mul1_4,mul1_4,mul1_4", hidden=1024),
    _tiles("published", 1, "640:mul1_3,mul1_3,mul1_3; 640:mul1_5,mul1_5,mul1_5", hidden=2560),
    _tiles("nonfinite", 3, f"{_LINE}; {_LINE}", data="nonfinite"),
    _tiles("no_rows", 0, f"{_LINE}; {_LINE}", special="stale_tiles"),
)

MOE_DEEP_GU: Final = KernelSpec(
    name="moe_deep_gu",
    source="moe/moe_deep_gu.cu",
    order="exl3_dot_v1, part_sum_v1",
    args=(
        _ROUND,
        _TILES,
        _N_TILES,
        _LINES,
        Arg("x", PTR, "f16, two tile images of (pairs_cap, hidden): gate, up", "r"),
        Arg("h", PTR, "f16, tile image of (pairs_cap, width_cap)", "w"),
        Arg("gate", PTR, "(pairs_cap, max(hidden, width_cap)) f32, scratch: the finished gates", "w"),
        _HIDDEN,
        _WIDTH,
        _PAIRS,
    ),
    grid="width_cap / 128 * tiles_cap",
    block=384,
    shared_bytes=DEEP_SHARED,
    hopper_shared_bytes=DEEP_HOPPER_SHARED,
    strides=True,
    limits=limits_of("moe_deep_gu"),
    reference="moe.swiglu",
    replaces="moe_act",
    exempt={
        "mates": "works by tile; a test gives rows other company, and the order check compares each",
        "integers": "passes through silu: integers have no exact answer",
        "midpoints": "what is rounded has passed through silu: no input gives an exact tie",
    },
    controls=planted.MOE_DEEP_GU,
    bound=(
        "gate and up: bytes of ref.orders.mma_chain a unit, rising sum, hadamard128, svh.  From there as "
        "moe_act: silu 6 u and the product; suh, seven stages and the scale 16 u of the block's magnitudes; "
        "half an f16 ulp (u = 2^-24)."
    ),
    cases=_TILE_CASES,
)

MOE_DEEP_DOWN: Final = KernelSpec(
    name="moe_deep_down",
    source="moe/moe_deep_down.cu",
    order="exl3_dot_v1, part_sum_v1",
    args=(
        _ROUND,
        _TILES,
        _N_TILES,
        _LINES,
        Arg("h", PTR, "f16, tile image of (pairs_cap, width_cap)", "r"),
        Arg("v", PTR, "(pairs_cap, hidden) f32", "w"),
        _HIDDEN,
        _WIDTH,
    ),
    grid="hidden / 128 * tiles_cap",
    block=384,
    shared_bytes=DEEP_SHARED,
    hopper_shared_bytes=DEEP_HOPPER_SHARED,
    strides=True,
    limits=limits_of("moe_deep_down"),
    reference="exl3.decode_linear",
    replaces="moe_gemv_down",
    exempt={
        "mates": "works by tile; a test gives rows other company, and the order check compares each",
        "integers": "the scale 1/sqrt(128) is no power of two: integers have no exact answer",
        "midpoints": "outputs are f32: nothing is rounded to f16",
    },
    controls=planted.MOE_DEEP_DOWN,
    bound="Bytes of ref.orders.mma_chain a unit, rising sum, hadamard128, svh; FP64 as linear_gemv_n8 says.",
    cases=_TILE_CASES,
)

KERNELS: Final = (
    MOE_PLAN_COUNT,
    MOE_PLAN_SCAN,
    MOE_PLAN_PLACE,
    MOE_DEEP_INPUT,
    MOE_DEEP_GU,
    MOE_DEEP_DOWN,
    MOE_DEEP_SUM,
)
