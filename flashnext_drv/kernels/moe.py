"""Declarations of the moe family: routing and the steps around the expert products.

Kernel sources: cuda_src/moe.  A layer is router_pick, moe_input, moe_gemv_gu, moe_act, moe_gemv_down,
moe_sum; the two products are declared with the other trellis products in kernels/exl3.py.  Expert weights are
reached through a line table (FnLine per expert, entry E the shared expert), so that lines may move between
launches.  What must stay true: slots of a row are in rising expert id, the shared expert last; no sum depends
on other rows.
"""

from __future__ import annotations

from typing import Final

from . import planted_moe as planted
from .limits import limits_of
from .spec import PTR, U32, Arg, Case, KernelSpec

__all__ = ["KERNELS", "MAX_EXPERTS", "MOE_ACT", "MOE_INPUT", "MOE_SUM", "ROUTER_PICK"]

MAX_EXPERTS: Final = 1024  # router_pick holds a row's keys in shared memory
_ROUND: Final = Arg("round", PTR, "FnRound", "r")
_ROUTES: Final = Arg("routes", PTR, "FnRoute (rows_cap, n_slots)", "r")
_LINES: Final = Arg("lines", PTR, "FnLine[E + 1], EXL3", "r")
_HIDDEN: Final = Arg("hidden", U32, "channels, multiple of 128")
_SLOTS: Final = Arg("n_slots", U32, "active experts + 1, 2..33")
_WIDTH: Final = Arg("width_cap", U32, "largest expert width, multiple of 128")


def _route(
    name: str, n_experts: int, n_active: int, rows: int, special: str = "", segments: int = 8
) -> Case:
    """segments: of both linears' sums; 0: the sums are finished."""
    size = {"n_experts": n_experts, "n_active": n_active, "segments": segments}
    return Case(
        name,
        {"rows": rows, "rows_cap": 16, **size, "special": special},
        shows=("integers",) if special == "equal" else (),
    )


def _case(name: str, **dims: int | str) -> Case:
    return Case(
        name,
        {"rows": 1, "rows_cap": 16, "n_experts": 16, "n_active": 4, "hidden": 256, "widths": "128", **dims},
    )


ROUTER_PICK: Final = KernelSpec(
    name="router_pick",
    source="moe/router_pick.cu",
    order="route_v1",
    args=(
        _ROUND,
        Arg("linears", PTR, "FnLinear[2]: gate (n = n_experts), shared gate (n = 1)", "r"),
        Arg("routes", PTR, "FnRoute (rows_cap, n_active + 1)", "w"),
        Arg("n_experts", U32, f"1..{MAX_EXPERTS}"),
        Arg("n_active", U32, "1..32, at most n_experts"),
    ),
    grid="rows_cap",
    block=544,
    shared_bytes=13064,
    programmatic=True,
    constants=("linears",),
    settled=("round",),
    limits=limits_of("router_pick"),
    reference="moe.route",
    rows={"part_*": 1, "out_*": 0, "routes": 0},
    exempt={"midpoints": "outputs are f32: nothing is rounded to f16"},
    controls=planted.ROUTER_PICK,
    bound=(
        "Logits in bits as part_sum_v1.  Choices exact.  Weights: exp 2 u and u |l - max| for its argument, "
        "in numerator and sum, n_active additions, one division (u = 2^-24): (5 + n_active + 2 max|l - max|) "
        "u relative.  Shared: sigmoid 5 u."
    ),
    cases=(
        _route("small", 16, 4, 3),
        _route("one_row_real", 512, 10, 1),
        _route("all_rows_real", 512, 10, 16),
        _route("seven_rows", 16, 4, 7),
        _route("ties", 512, 10, 3, "ties"),
        _route("equal", 512, 10, 2, "equal"),
        _route("equal_small", 16, 4, 2, "equal"),
        _route("nonfinite", 64, 4, 5, "nonfinite"),
        _route("all_chosen", 8, 8, 2, segments=1),
        _route("one_expert", 1, 1, 2, segments=2),
        _route("odd_count", 77, 3, 2, segments=32),
        _route("widest", 1024, 32, 2, segments=16),
        _route("one_lane", 512, 10, 2, "one_lane"),
        _route("widest_equal", 1024, 32, 1, "equal", segments=4),
        _route("finished", 512, 10, 16, segments=0),
        _route("finished_nonfinite", 64, 4, 5, "nonfinite", segments=0),
    ),
)

MOE_INPUT: Final = KernelSpec(
    name="moe_input",
    source="moe/moe_input.cu",
    order="exl3_dot_v1",
    args=(
        _ROUND,
        _ROUTES,
        _LINES,
        Arg("m", PTR, "(rows_cap, hidden) f32", "r"),
        Arg("x", PTR, "(rows_cap, n_slots, 2, hidden) f16, fragment order", "w"),
        _HIDDEN,
        _SLOTS,
        Arg("n_experts", U32, "E: the lines are asked for in L2, all of them"),
    ),
    grid="ceil(hidden / 512), 2 n_slots, rows_cap",
    block=128,
    programmatic=True,
    fence=True,
    settled=("round",),
    limits=limits_of("moe_input"),
    reference="orders.hadamard128",
    rows={"m": 0, "x": 0, "routes": 0},
    exempt={"integers": "the rotation's scale 1/sqrt(128) is no power of two: integers have no exact answer",
            "midpoints": "what is rounded has passed through that scale: no input gives an exact tie"},
    controls=planted.MOE_INPUT,
    bound="Equal in bits to the order's oracle: one product, seven stages, one scale, f16 once.",
    cases=(
        _case("one_row"),
        _case("hidden128", hidden=128, rows=3),
        _case("all_rows", rows=16, hidden=128),
        _case("seven_rows", rows=7),
        _case("real_sizes", hidden=2560, n_experts=512, n_active=10, rows=2),
        _case("nonfinite", rows=3, special="nonfinite"),
    ),
)

_ACT_CASES: Final = (
    _case("one_row"),
    _case("hidden128", hidden=128, rows=3),
    _case("mixed_widths", widths="128,384,256", rows=7),
    _case("all_rows", rows=16, hidden=128),
    _case("segments16", hidden=8192, widths="128", n_active=2, rows=1),
    _case("real_sizes", hidden=2560, widths="640", n_experts=512, n_active=10, rows=2),
    _case("nonfinite", rows=3, special="nonfinite"),
)

MOE_ACT: Final = KernelSpec(
    name="moe_act",
    source="moe/moe_act.cu",
    order="part_sum_v1",
    args=(
        _ROUND,
        _ROUTES,
        _LINES,
        Arg("part", PTR, "(units, rows_cap, n_slots, 2, width_cap) f32", "r"),
        Arg("x", PTR, "(rows_cap, n_slots, width_cap) f16, fragment order", "w"),
        _HIDDEN,
        _SLOTS,
        _WIDTH,
    ),
    grid="ceil(width_cap / 512), n_slots, rows_cap",
    block=128,
    programmatic=True,
    settled=("round", "routes", "lines"),
    limits=limits_of("moe_act"),
    reference="moe.swiglu",
    rows={"part": 1, "x": 0, "routes": 0},
    exempt={"order": "part_sum_v1 is followed by other functions in every kernel that uses it",
            "integers": "passes through silu: integers have no exact answer",
            "midpoints": "what is rounded has passed through silu: no input gives an exact tie"},
    controls=planted.MOE_ACT,
    bound=(
        "From gate and up as the order gives them (bit oracle): silu 6 u and the product; then suh, seven "
        "stages and the scale on the block's magnitudes: 16 u; then half an f16 ulp (u = 2^-24)."
    ),
    cases=_ACT_CASES,
)

MOE_SUM: Final = KernelSpec(
    name="moe_sum",
    source="moe/moe_sum.cu",
    order="moe_sum_v1",
    args=(
        _ROUND,
        _ROUTES,
        _LINES,
        Arg("part", PTR, "(units, rows_cap, n_slots, hidden) f32", "r"),
        Arg("y", PTR, "(rows_cap, hidden) f32", "w"),
        _HIDDEN,
        _SLOTS,
        Arg("n_experts", U32, "E"),
        _WIDTH,
    ),
    grid="hidden / 128, rows_cap",
    block=384,
    shared_bytes=17160,
    programmatic=True,
    settled=("round", "routes", "lines"),
    limits=limits_of("moe_sum"),
    reference="moe.Experts",
    rows={"part": 1, "y": 0, "routes": 0},
    exempt={"order": "the only kernel of its order",
            "integers": "the rotation's scale 1/sqrt(128) is no power of two: integers have no exact answer",
            "midpoints": "outputs are f32: nothing is rounded to f16"},
    controls=planted.MOE_SUM,
    bound="Equal in bits to the order's oracle.",
    cases=(
        _case("one_row"),
        _case("hidden128", hidden=128, rows=3),
        _case("mixed_widths", widths="128,1024", rows=7),
        _case("all_rows", rows=16, hidden=128),
        _case("three_experts", n_experts=3, n_active=3, rows=2),
        _case("one_leaf", n_experts=256, n_active=4, rows=2, special="low_ids"),
        _case("widest", n_experts=64, n_active=32, hidden=128, rows=1),
        _case("real_sizes", hidden=2560, widths="640", n_experts=512, n_active=10, rows=2),
        _case("nonfinite", rows=4, special="nonfinite"),
    ),
)

KERNELS: Final = (ROUTER_PICK, MOE_INPUT, MOE_ACT, MOE_SUM)
