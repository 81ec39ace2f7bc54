"""Operands of the move family's contract cases.

Called by check/contract.py.  The expectation of synth_fill comes from ref/move.py, element by element in
Python integers; those of the others stand in cases_lines.py and cases_ahead.py.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ..kernels.spec import Case
from ..ref import move as ref
from . import cases_ahead, cases_lines
from .contract import Operands, poison
from .operands import untouched

__all__ = ["build"]

_KINDS: Final = ("words", "rows", "signed", "bell", "uniform")
_M64: Final = (1 << 64) - 1


def build(name: str, case: Case, seed: int) -> Operands:
    """Operands of `case` of kernel `name`, drawn with `seed`."""
    if name in cases_lines.BUILDERS:
        return cases_lines.BUILDERS[name](case, seed)
    if name == "count_replay":
        return cases_ahead.BUILDERS[name](case, seed)
    if name != "synth_fill":
        raise ValueError(f"the move family has no kernel {name}")
    scalars = _scalars(case, seed)
    at, count = case.int("at"), case.int("count")
    # The elements of dst before `at` and behind the last one written must stay as they were.
    buffer = poison(at + count + 8, np.uint16)
    want = ref.synth_fill(case.int("first"), count, scalars)

    def expect(arrays: dict[str, npt.NDArray[np.generic]]) -> None:
        got = arrays["dst"].view(np.uint16)
        wrong = np.flatnonzero(got[at : at + count] != want)
        if wrong.size:
            i = int(wrong[0])
            raise AssertionError(
                f"{wrong.size} of {count} elements differ, the first is {i}: "
                f"0x{int(got[at + i]):04x}, expected 0x{int(want[i]):04x}"
            )
        outside = np.concatenate((got[:at], got[at + count :]))
        untouched("elements outside dst", outside)

    return Operands(
        arrays={"dst": buffer},
        scalars=dict(scalars),
        grid=(-(-(count + 7) // 2048), 1, 1),
        relocations=[],
        outputs=("dst",),
        expect=expect,
    )


def _scalars(case: Case, seed: int) -> dict[str, int]:
    dims = case.dims
    kind = _KINDS.index(str(dims["kind"]))

    def number(key: str, default: int) -> int:
        value = dims.get(key, default)
        assert isinstance(value, int)
        return value

    scale = number("k", 0) | number("bf16", 0) << 8 | number("shift", 0) << 16
    added = number("add", 0) & 0xFFFFFFFF
    p0, p1, p2 = {
        0: (0, 0, 0),
        1: (number("p0", 0), 0x2000, 0x7FF),
        2: (0x2D55, 0x02AB, 0),
        3: (scale, added, number("own", 128) | number("shared", 0) << 16),
        4: (scale, added, number("n", 256)),
    }[kind]
    return {
        "at": number("at", 0),
        "first": number("first", 0),
        "count": number("count", 0),
        "key": (0x6A09E667F3BCC908 + seed * 0x9E3779B97F4A7C15) & _M64,
        "key2": 0xBB67AE8584CAA73B,
        "kind": kind,
        "p0": p0,
        "p1": p1,
        "p2": p2,
        "cols": number("cols", 0),
        "group_rows": number("group_rows", 1),
    }
