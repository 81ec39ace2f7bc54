"""Kernels that must agree in bytes: those of one order wherever both accept the operands, and a kernel with
the one, or the several in turn, that it replaces.

Owns: which pairs there are, and how the operands of one become those of the other; for prompt kernels
pairs_<family>.py say that.  Called by stages.py on the cases of the first of a pair.  What must stay true:
every kernel of a shared order stands in a pair, or its declaration says why not; one that replaces another
has a pair that ends with it, or takes the same operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import ContractError
from ..kernels import catalog
from ..kernels.exl3 import dot_segments, gu_segments
from ..kernels.spec import Case, KernelSpec
from ..kernels.tables import LINE, LINEAR
from .cases_gdn_deep import PAIRS as GDN
from .contract import CheckDevice, Operands, Ran, launch_case, poison
from .mates import planes
from .operands import field_at, round_table
from .pairing import Expected, Pair, Then, Turned, as_it_is, follow, same_operands
from .pairs_attn import PAIRS as ATTN
from .pairs_deep import PAIRS as DEEP
from .pairs_moe_deep import PAIRS as MOE_DEEP
from .pairs_ple import after_conv, after_gate, as_mix

__all__ = ["PAIRS", "check_pairs", "pairs_of"]

_MOST_LINEARS: Final = 96


def check_pairs(device: CheckDevice, spec: KernelSpec, case: Case, given: Operands, ran: Ran) -> str:
    """Run every partner of the kernel; "" when it has none for this case.  AssertionError on other bytes."""
    said = []
    for pair in pairs_of(spec):
        turned = pair.turn(case, given, _onward(device, pair.more, given, ran))
        if turned is None:
            continue
        operands, compared = turned
        other = _onward(device, pair.then, operands, launch_case(device, catalog.spec(pair.other), operands))
        for name, mine, theirs in compared(other):
            for a, b in zip(planes(mine), planes(theirs), strict=True):
                assert a.shape == b.shape, f"{name}: {a.shape} here, {b.shape} in {pair}"
                differ = a != b
                assert not differ.any(), (
                    f"{name}: {int(differ.sum())} of {a.size} elements differ from those of "
                    f"{pair}, first at {tuple(int(i) for i in np.argwhere(differ)[0])}"
                )
        said.append(str(pair))
    return f"bytes of {', '.join(said)}" if said else ""


def _onward(device: CheckDevice, kernels: tuple[Then, ...], first: Operands, ran: Ran) -> Ran:
    for one in kernels:
        ran = launch_case(device, catalog.spec(one.kernel), one.operands(first, ran))
    return ran


def pairs_of(spec: KernelSpec) -> tuple[Pair, ...]:
    """Every pair whose first kernel is this one.  Raises ContractError when it replaces a kernel that no pair
    ends with and that takes other operands."""
    found = tuple(pair for pair in PAIRS if pair.kernel == spec.name)
    if not spec.replaces or spec.replaces in {pair.last for pair in found}:
        return found
    if not same_operands(spec, catalog.spec(spec.replaces)):
        raise ContractError(f"kernel {spec.name} is compared with none that it replaces",
                            because=f"{spec.replaces} takes other operands, and no pair ends with it",
                            do="add a Pair to check/pairs.py")
    return (*found, Pair(spec.name, spec.replaces, as_it_is))


def _streams(case: Case, given: Operands, ran: Ran) -> Turned:
    """site_norm with add -> stream_add."""
    if not case.int("add"):
        return None
    arrays = {name: given.arrays[name] for name in ("round", "streams", "y", "inject")}
    hidden, cap = int(given.scalars["hidden"]), len(arrays["y"])
    operands = Operands(
        arrays, {"hidden": hidden}, (-(-hidden // 256), cap, 1), [], ("streams",), lambda _: None
    )
    return operands, lambda other: [("streams", ran.found["streams"], other.found["streams"])]


def _slots(case: Case, given: Operands, parts: tuple[str, ...]) -> Iterator[tuple[int, int, int, str, int]]:
    """(row, slot, index of the part, part, expert) of every dot of a launch, few enough for one."""
    rows, n_slots = int(given.arrays["round"]["n_rows"][0]), int(given.scalars["n_slots"])
    for row in range(min(rows, max(_MOST_LINEARS // (n_slots * len(parts)), 1))):
        for slot in range(n_slots):
            for p, part in enumerate(parts):
                yield row, slot, p, part, int(given.arrays["routes"]["expert"][row, slot])


def _target(given: Operands, expert: int, *path: str) -> tuple[str, int]:
    """(array, byte offset) that a pointer of an expert's line leads to."""
    at = expert * LINE.itemsize + field_at(LINE, *path)
    return next(
        (name, offset) for table, place, name, offset in given.relocations if table == "lines" and place == at
    )


def _expert_dots(case: Case, given: Operands, ran: Ran) -> Turned:
    """moe_gemv_gu, moe_gemv_down -> linear_gemv_n8: every (row, slot, projection) as a linear of one row."""
    parts = ("gate", "up") if given.arrays["x"].shape[2] == 2 else ("down",)
    dots = list(_slots(case, given, parts))
    if not dots:
        return None
    hidden, lines = int(given.scalars["hidden"]), given.arrays["lines"]
    table = np.zeros(len(dots), LINEAR)
    arrays: dict[str, NDArray[Any]] = {"round": round_table(1, 1), "linears": table}
    moves, first = [], 0
    for j, (row, slot, p, part, expert) in enumerate(dots):
        width = int(lines[expert]["width"])
        k, n = (width, hidden) if part == "down" else (hidden, width)
        segments, one = dot_segments(k, n) if part == "down" else gu_segments(k, n), table[j]
        one["k"], one["n"], one["leaves"], one["segments"], one["x_stride"] = k, n, 1, segments, k
        one["w"]["format"] = lines[expert][part]["format"]
        one["first_warp"], one["n_warps"] = first, n // 32 * segments
        first += int(one["n_warps"])
        data, offset = _target(given, expert, part, "data")
        arrays[data] = given.arrays[data]
        arrays[f"x{j}"] = given.arrays["x"][row, slot, p : p + 1, :k].copy()
        arrays[f"part{j}"] = poison((segments, 1, n), np.float32)
        at = j * LINEAR.itemsize
        moves += [
            ("linears", at + field_at(LINEAR, "w", "data"), data, offset),
            ("linears", at + field_at(LINEAR, "x"), f"x{j}", 0),
            ("linears", at + field_at(LINEAR, "part"), f"part{j}", 0),
        ]
    names = tuple(f"part{j}" for j in range(len(dots)))
    operands = Operands(
        arrays, {"n_linears": len(dots)}, (first, 1, 1), moves, names, lambda _: None
    )

    def compared(other: Ran) -> Expected:
        out = []
        for j, (row, slot, p, part, _) in enumerate(dots):
            theirs = other.found[f"part{j}"][:, 0]
            mine = ran.found["part"][: theirs.shape[0], row, slot, p, : theirs.shape[1]]
            out.append((f"row {row} slot {slot} {part}", np.ascontiguousarray(mine), theirs))
        return out

    return operands, compared


def _expert_operands(case: Case, given: Operands, ran: Ran) -> Turned:
    """moe_input -> linear_input: every (row, slot, projection) as a linear of that row alone."""
    dots = list(_slots(case, given, ("gate", "up")))
    hidden = int(given.scalars["hidden"])
    by_row = [dot for dot in dots if dot[0] == dots[0][0]]
    row = by_row[0][0]
    table = np.zeros(len(by_row), LINEAR)
    arrays: dict[str, NDArray[Any]] = {
        "round": round_table(1, 1),
        "linears": table,
        "x": given.arrays["m"][row : row + 1].copy(),
    }
    moves = []
    for j, (_, _, _, part, expert) in enumerate(by_row):
        table[j]["k"], table[j]["n"], table[j]["x_stride"] = hidden, 128, hidden
        table[j]["w"]["format"] = given.arrays["lines"][expert][part]["format"]
        suh, offset = _target(given, expert, part, "suh")
        arrays[suh] = given.arrays[suh]
        arrays[f"to{j}"] = poison((1, hidden), np.float16)
        moves += [
            ("linears", j * LINEAR.itemsize + field_at(LINEAR, "w", "suh"), suh, offset),
            ("linears", j * LINEAR.itemsize + field_at(LINEAR, "x"), f"to{j}", 0),
        ]
    operands = Operands(
        arrays,
        {"x_stride": hidden},
        (-(-hidden // 512), len(by_row), 1),
        moves,
        tuple(f"to{j}" for j in range(len(by_row))),
        lambda _: None,
    )

    def compared(other: Ran) -> Expected:
        return [
            (f"row {row} slot {slot} {part}", ran.found["x"][row, slot, p], other.found[f"to{j}"][0])
            for j, (_, slot, p, part, _) in enumerate(by_row)
        ]

    return operands, compared


def _finished_logits(case: Case, given: Operands, ran: Ran) -> Turned:
    """router_pick on units -> linear_finish, then router_pick on the sums."""
    if not case.int("segments"):
        return None
    linears, cap = given.arrays["linears"], len(given.arrays["routes"])
    outs = ("out_gate", "out_shared")
    arrays = {**given.arrays, **{out: poison((cap, int(one["n"])), np.float32)
                                 for out, one in zip(outs, linears, strict=True)}}
    moves = [("linears", i * LINEAR.itemsize + field_at(LINEAR, "out"), out, 0)
             for i, out in enumerate(outs)]
    operands = Operands(arrays, {}, (-(-int(linears["n"].max()) // 512), len(linears), cap),
                        [*given.relocations, *moves], outs, lambda _: None)
    return operands, lambda other: [("routes", ran.found["routes"], other.found["routes"])]


def _pick_again(given: Operands, ran: Ran) -> Operands:
    """linear_finish -> router_pick on what it finished."""
    cap, n_slots = given.arrays["routes"].shape
    finished = [move for move in given.relocations if move[2] in given.outputs]
    scalars: dict[str, int | float] = {
        "n_experts": int(given.arrays["linears"]["n"][0]), "n_active": n_slots - 1
    }
    return replace(follow(given, ran, (cap, 1, 1), scalars), relocations=finished, outputs=("routes",))


PAIRS: Final = (
    Pair("linear_gemv_n8", "linear_gemv_n16", as_it_is),
    Pair("site_up_n8", "site_up_n16", as_it_is),
    Pair("site_norm", "stream_add", _streams),
    Pair("moe_gemv_gu", "linear_gemv_n8", _expert_dots),
    Pair("moe_gemv_down", "linear_gemv_n8", _expert_dots),
    Pair("moe_input", "linear_input", _expert_operands),
    Pair("router_pick", "linear_finish", _finished_logits, then=(Then("router_pick", _pick_again),)),
    *ATTN,
    *DEEP,
    *GDN,
    Pair("ple_gate", "ple_mix", as_mix, more=(Then("ple_conv", after_gate), Then("ple_tail", after_conv))),
    *MOE_DEEP,
)
