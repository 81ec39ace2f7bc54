"""Contract cases of the moe family: routing, expert operands, activation and the weighted sum.

Called by check/contract.py.  Choices, operands and sums are held to bits (integer comparison, or the oracles
of ref/orders.py); what passes through exp or sigmoid is held to FP64 from the operands as the kernel rounded
them.  A row's routes and data do not depend on the other rows, an expert's scales not on who chose it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.exl3 import dot_segments, gu_segments
from ..kernels.spec import Case
from ..kernels.tables import FORMAT_F16, LINE, LINEAR, ROUTE, exl3_format
from ..ref.orders import canonical, fma32, hadamard128, tree
from .contract import Operands, bits, poison
from .operands import (
    F32_ULP,
    field_at,
    from_fragment,
    linear_table,
    near,
    poisoned_rows,
    rotated,
    round_table,
    row_order,
    rows_of,
    same_bits,
    sigmoid64,
    signed,
    untouched,
    within_f16,
)

__all__ = ["build"]

Arrays = dict[str, NDArray[Any]]
N_ROWS: Final = 16


def build(name: str, case: Case, seed: int) -> Operands:
    """Operands of one case of a moe kernel.  Raises KeyError for a kernel of another family."""
    return _BUILDERS[name](case, seed)


# ---- routing ----


def _router_pick(case: Case, seed: int) -> Operands:
    n_experts, n_active, order = case.int("n_experts"), case.int("n_active"), row_order(case)
    n, cap, segments = len(order), case.int("rows_cap"), case.int("segments")
    linears = linear_table(2)
    arrays: Arrays = {"round": round_table(n, cap), "linears": linears}
    relocations, sums = [], []
    wanted = (("gate", _logits(case, seed)), ("shared", signed(seed, "shared", (N_ROWS, 1), 8.0)))
    for i, (name, values) in enumerate(wanted):
        linears[i]["n"], linears[i]["leaves"] = values.shape[1], 1
        linears[i]["segments"] = segments or 8  # of finished sums it says nothing
        linears[i]["w"]["format"] = FORMAT_F16
        field, array = "out", rows_of(values, order, cap)
        if segments:
            units = _units(case, seed, name, values)
            field, values = "part", _chain(units)
            array = np.ascontiguousarray(rows_of(units, order, cap).swapaxes(0, 1))
        arrays[f"{field}_{name}"] = array
        sums.append(values[order])
        relocations.append(
            ("linears", i * LINEAR.itemsize + field_at(LINEAR, field), f"{field}_{name}", 0)
        )
    arrays["routes"] = poison((cap, n_active + 1), ROUTE)
    logits, shared = sums

    def expect(got: Arrays) -> None:
        for i in range(n):
            _check_routes(f"row {i}", got["routes"][i], logits[i], float(shared[i, 0]), n_active)
        untouched("routes", got["routes"][n:])

    return Operands(
        arrays=arrays,
        scalars={"n_experts": n_experts, "n_active": n_active},
        grid=(cap, 1, 1),
        relocations=relocations,
        outputs=("routes",),
        expect=expect,
    )


def _units(case: Case, seed: int, name: str, logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """(rows, segments, n) f32 whose sum in order is near the logits, or they themselves where a case is about
    equal ones.  What the last unit takes back is large, so another order gives other logits."""
    segments = case.int("segments")
    units = np.full((len(logits), segments, logits.shape[1]), -0.0, np.float32)
    if case.dims.get("special") in ("equal", "ties"):
        units[:, 0] = logits  # adding -0 changes nothing
        return units
    units[:, :-1] = signed(seed, f"units {name}", units[:, :-1].shape, 2048.0)
    with np.errstate(invalid="ignore"):
        units[:, -1] = logits - _chain(units[:, :-1]) if segments > 1 else logits
    return units


def _chain(units: NDArray[np.float32]) -> NDArray[np.float32]:
    """part_sum_v1 of one leaf, over axis 1."""
    with np.errstate(invalid="ignore"):
        total = units[:, 0]
        for i in range(1, units.shape[1]):
            total = total + units[:, i]
    return total


def _logits(case: Case, seed: int) -> NDArray[np.float32]:
    n_experts, special = case.int("n_experts"), case.dims.get("special")
    logits = signed(seed, "logits", (N_ROWS, n_experts), 8.0)
    if special == "equal":
        logits[:] = 0.0
        logits[1::2, ::2] = -0.0  # equal to +0: the id decides
    elif special == "ties":
        logits = np.round(logits * 0.5)  # 9 different values among 512
    elif special == "one_lane":
        logits[:, 5::32] += np.float32(64.0)  # the largest all lie with one lane
    elif special == "nonfinite":
        logits[0, 9] = np.nan
        logits[1, [3, 40, 41, 50, 60]] = np.nan
        logits[2, 7] = np.inf
        logits[3, [1, 2]] = -np.inf
        logits[4] = -np.inf
    return logits


def _check_routes(name: str, got: NDArray[Any], logits: NDArray[Any], shared: float, n_active: int) -> None:
    nan = np.isnan(logits)
    place = np.lexsort((np.arange(len(logits)), -np.where(nan, 0.0, logits), ~nan))[:n_active]
    chosen = np.sort(place)
    assert got["expert"][:-1].tolist() == chosen.tolist(), (
        f"{name}: chose {got['expert'][:-1]}, wanted {chosen}"
    )
    assert int(got["expert"][-1]) == len(logits), (
        f"{name}: the last slot is expert {got['expert'][-1]}, not the shared one"
    )
    with np.errstate(invalid="ignore"):
        distance = logits[chosen].astype(np.float64) - float(logits[place[0]])
        e = np.exp(distance)
        want = e / e.sum()
        far = np.abs(distance[np.isfinite(distance)]).max(initial=0.0)
    near(
        f"{name} weights",
        got["weight"][:-1],
        want,
        np.nan_to_num(want) * (5 + n_active + 2 * far) * F32_ULP + 2.0**-149,
    )
    if (logits == logits[0]).all() and np.isfinite(logits[0]):
        same_bits(f"{name} equal weights", got["weight"][:-1].copy(),
                  np.full(n_active, np.float32(1) / np.float32(n_active), np.float32))
    gate = sigmoid64(np.array([shared]))
    near(f"{name} shared weight", got["weight"][-1:], gate, gate * 5 * F32_ULP)


# ---- experts ----


class _Experts:
    """The line table of a case, the routes of its rows and the scales of the experts they name."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.seed = case, seed
        self.hidden, self.n_experts, self.n_active = (
            case.int("hidden"),
            case.int("n_experts"),
            case.int("n_active"),
        )
        self.widths = [int(w) for w in str(case["widths"]).split(",")]
        self.width_cap = max(self.widths)
        self.order, self.cap = row_order(case), case.int("rows_cap")
        self.n, self.n_slots = len(self.order), self.n_active + 1
        self.routes = rows_of(self._routes(), self.order, self.cap)
        self.used = sorted({int(e) for e in self.routes["expert"][: self.n].reshape(-1)})

    def _routes(self) -> NDArray[Any]:
        out = np.zeros((N_ROWS, self.n_slots), ROUTE)
        keys = bits(self.seed, "routes", (N_ROWS, self.n_experts))
        if self.case.dims.get("special") == "low_ids":  # all chosen experts in one leaf
            keys = keys // np.uint32(2)
            keys[:, self.n_experts // 8 :] += np.uint32(1 << 31)
        out["expert"][:, :-1] = np.sort(np.argsort(keys, axis=1, kind="stable")[:, : self.n_active], axis=1)
        out["expert"][:, -1] = self.n_experts
        out["weight"] = np.abs(signed(self.seed, "weights", (N_ROWS, self.n_slots), 1.0))
        if self.case.dims.get("special") == "nonfinite":
            out["weight"][1, 2] = np.nan
        return out

    def width(self, expert: int) -> int:
        return self.widths[expert % len(self.widths)]

    def scales(self, part: str, expert: int) -> NDArray[np.float16]:
        """suh or svh of one projection: "gate_suh" ... "down_svh"."""
        size = self.hidden if part in ("gate_suh", "up_suh", "down_svh") else self.width(expert)
        return signed(self.seed, f"{part}{expert}", (size,), 2.0).astype(np.float16)

    def arrays(self, *parts: str) -> Arrays:
        lines = np.zeros(self.n_experts + 1, LINE)
        for e in range(self.n_experts + 1):
            lines[e]["width"] = self.width(e)
        for projection in ("gate", "up", "down"):
            lines[projection]["format"] = exl3_format(3, "mul1")
        out: Arrays = {"round": round_table(self.n, self.cap), "routes": self.routes, "lines": lines}
        for part in parts:
            rows = [self.scales(part, e) for e in self.used]
            out[part] = np.zeros((len(rows), max(len(r) for r in rows)), np.float16)
            for i, row in enumerate(rows):
                out[part][i, : len(row)] = row
        return out

    def relocations(self, arrays: Arrays, *parts: str) -> list[tuple[str, int, str, int]]:
        return [
            ("lines", e * LINE.itemsize + field_at(LINE, *part.split("_")), part, i * arrays[part].strides[0])
            for part in parts
            for i, e in enumerate(self.used)
        ]

    def slots(self) -> list[tuple[int, int, int]]:
        """(row, slot, expert) of every live slot."""
        return [(r, s, int(self.routes["expert"][r, s])) for r in range(self.n) for s in range(self.n_slots)]


def _moe_input(case: Case, seed: int) -> Operands:
    x = _Experts(case, seed)
    m = signed(seed, "m", (N_ROWS, x.hidden), 4.0)
    if case.dims.get("special") == "nonfinite":
        m[1, 3], m[2, 130] = np.nan, np.inf
    m_in, parts = rows_of(m, x.order, x.cap), ("gate_suh", "up_suh")
    arrays = x.arrays(*parts)

    def expect(got: Arrays) -> None:
        for row, slot, expert in x.slots():
            for i, part in enumerate(parts):
                with np.errstate(over="ignore", invalid="ignore"):
                    scaled = m_in[row] * x.scales(part, expert).astype(np.float32)
                    want = hadamard128(scaled.reshape(-1, 128)).reshape(-1).astype(np.float16)
                same_bits(f"row {row} slot {slot} {part}", from_fragment(got["x"][row, slot, i]), want)
        untouched("x", got["x"][x.n :])

    return Operands(
        arrays={**arrays, "m": m_in, "x": poisoned_rows(x.cap, x.n_slots, 2, x.hidden, dtype=np.float16)},
        scalars={"hidden": x.hidden, "n_slots": x.n_slots, "n_experts": x.n_experts},
        grid=(-(-x.hidden // 512), 2 * x.n_slots, x.cap),
        relocations=x.relocations(arrays, *parts),
        outputs=("x",),
        expect=expect,
    )


def _finished(part: NDArray[np.float32], svh: NDArray[np.float16]) -> NDArray[np.float32]:
    """Bit oracle: units (u, n) summed in rising order, Hadamard, times svh."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = part[0]
        for unit in part[1:]:
            total = total + unit
        return canonical(hadamard128(total.reshape(-1, 128)).reshape(-1) * svh.astype(np.float32))


def _moe_act(case: Case, seed: int) -> Operands:
    x = _Experts(case, seed)
    units_cap = max(gu_segments(x.hidden, w) for w in x.widths)
    parts = ("gate_svh", "up_svh", "down_suh")
    arrays = x.arrays(*parts)
    data = signed(seed, "part", (N_ROWS, units_cap, x.n_slots, 2, x.width_cap), 2.0)
    if case.dims.get("special") == "nonfinite":
        data[1, 0, 1, 0, 5], data[2, 0, 0, 1, 7] = np.nan, np.inf
    part = np.ascontiguousarray(rows_of(data, x.order, x.cap).swapaxes(0, 1))
    for row, slot, expert in x.slots():  # what no product wrote must not be read
        part[gu_segments(x.hidden, x.width(expert)) :, row, slot] = poison((), np.float32)
        part[:, row, slot, :, x.width(expert) :] = poison((), np.float32)

    def expect(got: Arrays) -> None:
        for row, slot, expert in x.slots():
            width = x.width(expert)
            units = gu_segments(x.hidden, width)
            gate, up = (
                _finished(part[:units, row, slot, i, :width], x.scales(name, expert)).astype(np.float64)
                for i, name in enumerate(("gate_svh", "up_svh"))
            )
            with np.errstate(invalid="ignore", over="ignore"):
                h = gate * sigmoid64(gate) * up * x.scales("down_suh", expert).astype(np.float64)
                want, before = rotated(h, 8 * F32_ULP)
            within_f16(f"row {row} slot {slot}", from_fragment(got["x"][row, slot, :width]), want, before)
            untouched("x beyond the width", got["x"][row, slot, width:])
        untouched("x", got["x"][x.n :])

    return Operands(
        arrays={**arrays, "part": part, "x": poisoned_rows(x.cap, x.n_slots, x.width_cap, dtype=np.float16)},
        scalars={"hidden": x.hidden, "n_slots": x.n_slots, "width_cap": x.width_cap},
        grid=(-(-x.width_cap // 512), x.n_slots, x.cap),
        relocations=x.relocations(arrays, *parts),
        outputs=("x",),
        expect=expect,
    )


def _moe_sum(case: Case, seed: int) -> Operands:
    x = _Experts(case, seed)
    units_cap = max(dot_segments(w, x.hidden, 1) for w in x.widths)
    arrays = x.arrays("down_svh")
    data = signed(seed, "part", (N_ROWS, units_cap, x.n_slots, x.hidden), 2.0)
    if case.dims.get("special") == "nonfinite":
        data[2, 0, 1, 5], data[3, 0, x.n_slots - 1, 7] = np.nan, np.inf
    part = np.ascontiguousarray(rows_of(data, x.order, x.cap).swapaxes(0, 1))
    for row, slot, expert in x.slots():
        part[dot_segments(x.width(expert), x.hidden, 1) :, row, slot] = poison((), np.float32)

    def expect(got: Arrays) -> None:
        for row in range(x.n):
            acc = np.zeros((8, x.hidden), np.float32)
            for slot in range(x.n_slots):
                expert = int(x.routes["expert"][row, slot])
                weight = x.routes["weight"][row, slot]
                units = dot_segments(x.width(expert), x.hidden, 1)
                v = _finished(part[:units, row, slot], x.scales("down_svh", expert))
                if slot < x.n_active:
                    leaf = 8 * expert // x.n_experts
                    acc[leaf] = fma32(weight, v, acc[leaf])
                else:
                    same_bits(f"row {row}", got["y"][row], fma32(weight, v, tree(acc)))
        untouched("y", got["y"][x.n :])

    return Operands(
        arrays={**arrays, "part": part, "y": poisoned_rows(x.cap, x.hidden)},
        scalars={
            "hidden": x.hidden,
            "n_slots": x.n_slots,
            "n_experts": x.n_experts,
            "width_cap": x.width_cap,
        },
        grid=(x.hidden // 128, x.cap, 1),
        relocations=x.relocations(arrays, "down_svh"),
        outputs=("y",),
        expect=expect,
    )


_BUILDERS: Final[dict[str, Callable[[Case, int], Operands]]] = {
    "router_pick": _router_pick,
    "moe_input": _moe_input,
    "moe_act": _moe_act,
    "moe_sum": _moe_sum,
}
