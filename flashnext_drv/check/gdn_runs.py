"""Runs of a gdn case: their tables, their slots, and the state that a slot holds.

Used by cases_gdn.py and cases_gdn_deep.py.  `dims["runs"]` ("3,1,2") gives the rows of each run.  Run i is
sequence i, whose inputs and first state are the same whatever the other runs are; it lives in slot n-1-i of
n = runs + 1 slots, so that slot and run never agree by chance.  `dims["sequences"]` ("2,0") picks other
sequences, `dims["first"]` the sequences' first row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.spec import Case
from ..kernels.tables import ROW, SLOT
from .contract import poison
from .operands import field_at, round_table, rows_of, run_table, untouched

__all__ = ["HEAD", "OFFSET", "Arrays", "Runs", "run_lengths"]

Arrays = dict[str, NDArray[Any]]
HEAD: Final = 128
OFFSET: Final = 512  # bytes before the state of the layer under test: another layer's, must stay


def run_lengths(case: Case) -> list[int]:
    """Rows of each run."""
    return [int(n) for n in str(case["runs"]).split(",")]


class Runs:
    """The runs of a case: tables, slots, and rows gathered from per-sequence data."""

    def __init__(self, case: Case, seed: int, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.size = int(np.prod(shape))
        self.before = OFFSET // self.dtype.itemsize
        self.case, self.seed = case, seed
        self.lengths = run_lengths(case)
        self.cap = case.int("rows_cap")
        self.first = int(case.dims.get("first", 0))
        picked = str(case.dims.get("sequences", ",".join(str(i) for i in range(len(self.lengths)))))
        self.sequences = [int(i) for i in picked.split(",")]
        self.slots = [len(self.lengths) - i for i in range(len(self.lengths))]
        self.n_rows = sum(self.lengths)
        self.stride = OFFSET + -(-self.size * self.dtype.itemsize // 256) * 256
        self.state = poison((len(self.lengths) + 1, self.stride // self.dtype.itemsize), self.dtype)

    def rows(self, values: Callable[[int], NDArray[Any]]) -> NDArray[Any]:
        """(rows_cap, ...) of the launch; values(sequence) gives that sequence's (N_ROWS, ...)."""
        joined = np.concatenate(
            [
                values(q)[self.first : self.first + n]
                for q, n in zip(self.sequences, self.lengths, strict=True)
            ]
        )
        return rows_of(joined, range(self.n_rows), self.cap)

    def fill(self, i_run: int, state: NDArray[Any]) -> None:
        self.state[self.slots[i_run], self.before : self.before + self.size] = state.reshape(-1)

    def read(self, state: NDArray[Any], i_run: int) -> NDArray[Any]:
        """The state of run i out of the array after the launch; everything around it must still be poison."""
        mine = state[self.slots[i_run]]
        untouched("state of another layer", mine[: self.before])
        untouched("bytes behind the state", mine[self.before + self.size :])
        untouched("slot without a run", state[0])
        found: NDArray[Any] = mine[self.before : self.before + self.size].reshape(self.shape)
        return found

    def spans(self) -> list[slice]:
        ends = np.cumsum([0, *self.lengths])
        return [slice(int(a), int(b)) for a, b in zip(ends[:-1], ends[1:], strict=True)]

    def arrays(self) -> Arrays:
        return {
            "round": round_table(self.n_rows, self.cap, len(self.lengths)),
            "runs": run_table(self.lengths, self.slots, self.cap),
            "slots": np.zeros(len(self.state), SLOT),
            "state": self.state,
        }

    def relocations(self) -> list[tuple[str, int, str, int]]:
        at = field_at(SLOT, "recurrent")
        return [("slots", s * SLOT.itemsize + at, "state", s * self.stride) for s in self.slots]

    def row_table(self) -> NDArray[Any]:
        """FnRow[rows_cap]: slot and run of each live row; all else is poison."""
        rows = poison((self.cap,), ROW)
        for i, span in enumerate(self.spans()):
            rows["slot"][span], rows["run"][span] = self.slots[i], i
        return rows
