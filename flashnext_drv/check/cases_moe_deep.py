"""Contract cases of the moe_deep family: the plan, and the experts' steps over tiles of sorted rows.

Called by check/contract.py.  The plan is compared with ref/moe_deep.py; operands and sums are held to bits by
the oracles of ref/orders.py.  Every case lays out its rows by that reference's plan, so a kernel is given
what the ones before it would have written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.spec import Case
from ..kernels.tables import TILE
from ..ref.orders import canonical, fma32, hadamard128, tree
from .cases_moe_tiles import down, gate_up
from .contract import Operands, poison
from .moe_layer import Layer
from .operands import from_tiles, same_bits, signed, untouched

__all__ = ["build"]

Arrays = dict[str, NDArray[Any]]


def build(name: str, case: Case, seed: int) -> Operands:
    """Operands of one case of a moe_deep kernel.  Raises KeyError for a kernel of another family."""
    return _BUILDERS[name](case, seed)


# ---- the plan ----------------------------------------------------------------------------------------------


def _count(case: Case, seed: int) -> Operands:
    x = Layer(case, seed)

    def expect(got: Arrays) -> None:
        want = np.zeros((x.cap // 128, x.n_experts + 1), np.uint32)
        want[: len(x.plan.counts)] = x.plan.counts
        same_bits("counts", got["counts"], want)

    return Operands(
        arrays={
            "round": x.round,
            "routes": x.routes,
            "counts": poison((x.cap // 128, x.n_experts + 1), np.uint32),
        },
        scalars={"n_slots": x.n_slots, "n_experts": x.n_experts},
        grid=(x.cap // 128, 1, 1),
        relocations=[],
        outputs=("counts",),
        expect=expect,
    )


def _scan(case: Case, seed: int) -> Operands:
    x = Layer(case, seed)
    tiles_cap = len(x.plan.tiles) - 2 if x.special == "few_tiles" else x.tiles_cap

    def expect(got: Arrays) -> None:
        blocks, want = len(x.plan.starts), x.tables()
        same_bits("starts", got["starts"][:blocks], x.by_block(x.plan.starts)[:blocks])
        untouched("starts of blocks without rows", got["starts"][blocks:])
        n = min(len(x.plan.tiles), tiles_cap)
        same_bits("n_tiles", got["n_tiles"], np.array([n], np.uint32))
        for name in ("expert", "first", "n_rows", "pad"):
            same_bits(f"tiles: {name}", got["tiles"][name][:n], want["tiles"][name][:n])
        untouched("tiles beyond the last", got["tiles"][n:])

    return Operands(
        arrays={
            "round": x.round,
            "counts": x.by_block(x.plan.counts),
            "starts": poison((x.cap // 128, x.n_experts + 1), np.uint32),
            "tiles": poison(x.tiles_cap, TILE),
            "n_tiles": poison(1, np.uint32),
        },
        scalars={"n_experts": x.n_experts, "tiles_cap": tiles_cap},
        grid=(1, 1, 1),
        relocations=[],
        outputs=("starts", "tiles", "n_tiles"),
        expect=expect,
    )


def _place(case: Case, seed: int) -> Operands:
    x = Layer(case, seed)

    def expect(got: Arrays) -> None:
        same_bits("pair_at", got["pair_at"][: x.rows], x.pair_at()[: x.rows])
        untouched("pair_at", got["pair_at"][x.rows :])
        at = list(x.plan.pair_of)
        same_bits("pair_of", got["pair_of"][at], x.pair_of()[at])
        untouched("pair_of of padding", got["pair_of"][x.padding()])

    return Operands(
        arrays={
            "round": x.round,
            "routes": x.routes,
            "starts": x.by_block(x.plan.starts),
            "pair_at": poison((x.cap, x.n_slots), np.uint32),
            "pair_of": poison(x.pairs_cap, np.uint32),
        },
        scalars={"n_slots": x.n_slots, "n_experts": x.n_experts},
        grid=(x.cap // 128, 1, 1),
        relocations=[],
        outputs=("pair_at", "pair_of"),
        expect=expect,
    )


# ---- before and behind the products ------------------------------------------------------------------------


def _input(case: Case, seed: int) -> Operands:
    x, hidden, parts = Layer(case, seed), case.int("hidden"), ("gate_suh", "up_suh")
    m = poison((x.cap, hidden), np.float32)
    m[: x.rows] = signed(seed, "m", (x.rows, hidden), 4.0)
    if x.special == "nonfinite":
        m[1, 3], m[2, 130] = np.nan, np.inf
    lines, moves = x.line_table(*parts, size=hidden)
    images = poison((2, x.pairs_cap // 64, hidden // 64, 64, 64), np.float16)

    def expect(got: Arrays) -> None:
        for image, part in zip(got["x"], parts, strict=True):
            rows = from_tiles(image)
            for position, row, slot, expert in x.pairs():
                with np.errstate(over="ignore", invalid="ignore"):
                    scaled = m[row] * x.scales(part, expert, hidden).astype(np.float32)
                    want = hadamard128(scaled.reshape(-1, 128)).reshape(-1).astype(np.float16)
                same_bits(f"row {row} slot {slot} {part}", rows[position], want)
            untouched(f"padding of {part}", rows[x.padding()])

    return Operands(
        arrays={**x.tables(), **lines, "m": m, "x": images, "routes": x.routes},
        scalars={"hidden": hidden, "n_slots": x.n_slots, "pairs_cap": x.pairs_cap},
        grid=(x.tiles_cap, -(-hidden // 256), 1),
        relocations=moves,
        outputs=("x",),
        expect=expect,
    )


def _sum(case: Case, seed: int) -> Operands:
    """v is what moe_sum makes of `part` (one unit), which the order check gives that kernel."""
    x, hidden = Layer(case, seed), case.int("hidden")
    part = poison((1, x.cap, x.n_slots, hidden), np.float32)
    part[0, : x.rows] = signed(seed, "part", (x.rows, x.n_slots, hidden), 2.0)
    if x.special == "nonfinite":
        part[0, 2, 1, 5], part[0, 3, x.n_slots - 1, 7] = np.nan, np.inf
    lines, moves = x.line_table("down_svh", size=hidden)
    v = poison((x.pairs_cap, hidden), np.float32)
    for position, row, slot, expert in x.pairs():
        with np.errstate(over="ignore", invalid="ignore"):
            rotated = hadamard128(part[0, row, slot].reshape(-1, 128)).reshape(-1)
            v[position] = canonical(rotated * x.scales("down_svh", expert, hidden).astype(np.float32))

    def expect(got: Arrays) -> None:
        for row in range(x.rows):
            acc = np.zeros((8, hidden), np.float32)
            for slot in range(x.n_slots):
                expert, weight = int(x.routes["expert"][row, slot]), x.routes["weight"][row, slot]
                mine = v[x.plan.pair_at[row, slot]]
                if expert < x.n_experts:
                    leaf = 8 * expert // x.n_experts
                    acc[leaf] = fma32(weight, mine, acc[leaf])
                else:
                    same_bits(f"row {row}", got["y"][row], fma32(weight, mine, tree(acc)))
        untouched("y", got["y"][x.rows :])

    return Operands(
        arrays={
            "round": x.round,
            "routes": x.routes,
            "pair_at": x.pair_at(),
            "v": v,
            "y": poison((x.cap, hidden), np.float32),
            **lines,
            "part": part,
        },
        scalars={"hidden": hidden, "n_slots": x.n_slots, "n_experts": x.n_experts},
        grid=(-(-hidden // 512), int(case.dims.get("at_once", x.cap)), 1),
        relocations=moves,
        outputs=("y",),
        expect=expect,
    )


_BUILDERS: Final[dict[str, Callable[[Case, int], Operands]]] = {
    "moe_plan_count": _count,
    "moe_plan_scan": _scan,
    "moe_plan_place": _place,
    "moe_deep_input": _input,
    "moe_deep_gu": gate_up,
    "moe_deep_down": down,
    "moe_deep_sum": _sum,
}
