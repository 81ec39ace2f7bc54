"""Contract cases of the moe_gemv family: routes to lines of any width and format, compared dot by dot.

Called by check/contract.py.  Weights, chains and bounds are those of cases_exl3.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels.exl3 import dot_segments, fragment_order_rows, gu_segments
from ..kernels.spec import Case
from ..kernels.tables import LINE, ROUTE, WEIGHT
from .cases_exl3 import Dot, Weights, check_unit, make_weights, operand_rows, unit_ranges
from .contract import Operands, bits, poison
from .operands import field_at, round_table, same_bits, untouched

__all__ = ["build"]

Arrays = dict[str, NDArray[Any]]


def build(name: str, case: Case, seed: int) -> Operands:
    """Operands of moe_gemv_gu or moe_gemv_down.  Raises KeyError for another kernel."""
    parts = {"moe_gemv_gu": ("gate", "up"), "moe_gemv_down": ("down",)}[name]
    hidden, rows, cap = case.int("hidden"), case.int("rows"), case.int("rows_cap")
    n_slots, data = case.int("n_slots"), str(case.dims.get("data", ""))
    texts = [text.strip().split(":") for text in str(case["lines"]).split(";") if text.strip()]
    widths = [int(width) for width, _ in texts]
    width_cap, n_lines = max(widths), len(texts)
    arrays: Arrays = {"round": round_table(rows, cap)}
    relocations: list[tuple[str, int, str, int]] = []
    lines = np.zeros(n_lines, LINE)
    weights: dict[tuple[int, str], Weights] = {}
    for e, (_, forms) in enumerate(texts):
        lines[e]["width"] = widths[e]
        for part, form in zip(("gate", "up", "down"), forms.split(","), strict=True):
            if part not in parts:
                continue
            codebook, width_bits = form.split("_")
            k, n = (widths[e], hidden) if part == "down" else (hidden, widths[e])
            dot = Dot("exl3", codebook, float(width_bits), k, n)
            lines[e][part]["format"] = dot.format
            weights[e, part] = make_weights(seed, f"{part}{e}", dot)
            arrays[f"{part}{e}"] = weights[e, part].data
            at = e * LINE.itemsize + field_at(LINE, part) + field_at(WEIGHT, "data")
            relocations.append(("lines", at, f"{part}{e}", 0))
    arrays["lines"] = lines
    routes = poison((cap, n_slots), ROUTE)
    routes["expert"][:rows] = _experts(seed, rows, n_slots, n_lines)
    routes["weight"][:rows] = 0.5
    if rows:  # what a round of more rows left behind: the last row's experts, which nobody may run for it
        routes[rows:] = routes[rows - 1]
    arrays["routes"] = routes

    k_cap, n_cap = (hidden, width_cap) if name == "moe_gemv_gu" else (width_cap, hidden)
    x = poison((cap, n_slots, len(parts), k_cap), np.float16)
    operands: dict[tuple[int, int, int], NDArray[np.float16]] = {}
    for row, slot, p in np.ndindex(rows, n_slots, len(parts)):
        k = hidden if name == "moe_gemv_gu" else widths[routes["expert"][row, slot]]
        values = (
            operand_rows(seed, f"x{row}.{slot}.{p}", 8, k, data)[(row + slot) % 8 :][:1]
            if data != "nonfinite"
            else (operand_rows(seed, f"x{row}.{slot}.{p}", 2, k, data)[row % 2 :][:1])
        )
        operands[row, slot, p] = values
        x[row, slot, p, :k] = fragment_order_rows(values[0])
    arrays["x"] = x
    units_cap = max(_units(name, hidden, width) for width in widths)
    arrays["part"] = poison((units_cap, cap, n_slots, len(parts), n_cap), np.float32)

    def expect(after: Arrays) -> None:
        part = after["part"]
        untouched("partial sums", part[:, rows:])
        for row, slot, p in np.ndindex(rows, n_slots, len(parts)):
            e = int(routes["expert"][row, slot])
            n = widths[e] if name == "moe_gemv_gu" else hidden
            got, w = part[:, row, slot, p], weights[e, parts[p]]
            units = _units(name, hidden, widths[e])
            untouched("units beyond the line's", got[units:])
            untouched("outputs beyond the line's", got[:, n:])
            label = f"row {row} slot {slot} {parts[p]}"
            for u, unit in enumerate(unit_ranges(w.value.shape[1], units)):
                check_unit(f"{label} unit {u}", got[u : u + 1, :n], operands[row, slot, p], w, unit)
            if data == "onehot":
                at = int(np.argmax(operands[row, slot, p][0] != 0))
                same_bits(
                    f"{label}: W_q", got[:units, :n].sum(axis=0).astype(np.float16), w.value[:, at].copy()
                )

    warps = n_cap // 32 * units_cap
    return Operands(
        arrays,
        {"hidden": hidden, "n_slots": n_slots, "width_cap": width_cap},
        (int(case.dims.get("blocks", warps)), len(parts) * n_slots, cap),
        relocations,
        ("part",),
        expect,
    )


def _units(name: str, hidden: int, width: int) -> int:
    return gu_segments(hidden, width) if name == "moe_gemv_gu" else dot_segments(width, hidden)


def _experts(seed: int, rows: int, n_slots: int, n_lines: int) -> NDArray[np.uint32]:
    """(rows, n_slots): n_slots - 1 different experts in rising id, then the shared one (the last line)."""
    out = np.zeros((rows, n_slots), np.uint32)
    for row in range(rows):
        order = np.argsort(bits(seed, f"route{row}", (n_lines - 1,)), kind="stable")
        out[row, :-1] = np.sort(order[: n_slots - 1])
        out[row, -1] = n_lines - 1
    return out
