"""Sequences, pages and rows of an attention case: the tables a kernel walks and the memory they lead to.

Called by cases_attn.py.  What must stay true: the values of a token depend on its sequence and place there,
not on which rows are in the launch, so that a row alone and among others has the same operands; every page
entry leads to valid memory, and what no row may read is poison.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.spec import Case
from ..kernels.tables import PAGE, PAGE_TOKENS, ROW, RUN, SLOT
from .contract import bits, poison
from .operands import round_table

__all__ = ["BLOCK", "HEAD", "INDEX_HEAD", "PART", "Pages", "attended", "blocks_seen", "parse_rows"]

HEAD: Final = 256
INDEX_HEAD: Final = 128
BLOCK: Final = 4
PART: Final = 64
_KV_GAP: Final = 512        # bytes before the layer's part of a page, and after it: another layer's, poisoned
_INDEX_GAP: Final = 256
_SHARED_PAGES: Final = 4


def parse_rows(case: Case) -> list[tuple[int, int]]:
    """(sequence, position) of each row of dims["rows"]."""
    return [(int(s), int(p)) for s, p in (item.split(":") for item in str(case["rows"]).split(","))]


def blocks_seen(position: int) -> int:
    """Complete blocks that the row at `position` sees."""
    return (position + 1) // BLOCK


def attended(position: int, budget: int, chosen: NDArray[Any]) -> NDArray[np.int64]:
    """Positions that a row attends to, rising.  chosen: its block ids, used beyond the budget only."""
    seen = blocks_seen(position)
    if seen <= budget:
        return np.arange(position + 1)
    tokens = np.asarray(chosen, np.int64)[:, None] * BLOCK + np.arange(BLOCK)
    return np.concatenate((tokens.reshape(-1), np.arange(BLOCK * seen, position + 1)))


class Pages:
    """Pages of the sequences of one case.

    k, v: (physical, 64, n_kv, 256) f16; raw (physical, 64, 128), pooled (physical, 16, 128) f16: views of
    `kv` and `index`, all poison at first.  at[sequence]: physical page of each logical page;
    local[sequence]: which of the sequence's own pages that is (with pages "shared", several logical pages
    are one).
    """

    kv_offset = _KV_GAP
    index_offset = _INDEX_GAP

    def __init__(self, case: Case, seed: int, n_kv: int):
        self.rows = parse_rows(case)
        self.n_rows, self.rows_cap = len(self.rows), len(self.rows) + 1
        last: dict[int, int] = {}
        for sequence, position in self.rows:
            last[sequence] = max(position, last.get(sequence, 0))
        self.sequences = sorted(last)
        mode = str(case["pages"])
        self.local: dict[int, NDArray[np.int64]] = {}
        total = 0
        for sequence in self.sequences:
            n = last[sequence] // PAGE_TOKENS + 1
            self.local[sequence] = np.arange(n) % _SHARED_PAGES if mode == "shared" else np.arange(n)
            total += int(self.local[sequence].max()) + 1
        shuffle = np.arange(total)
        if mode == "permuted":
            shuffle = np.argsort(np.asarray(bits(seed, "pages", (total,))), kind="stable")
        elif mode == "reversed":
            shuffle = shuffle[::-1]
        self.at: dict[int, NDArray[np.int64]] = {}
        base = 0
        for sequence in self.sequences:
            self.at[sequence] = shuffle[base + self.local[sequence]]
            base += int(self.local[sequence].max()) + 1
        self.kv, (self.k, self.v) = _paged(total, _KV_GAP, [(PAGE_TOKENS, n_kv, HEAD)] * 2)
        self.index, (self.raw, self.pooled) = _paged(
            total, _INDEX_GAP, [(PAGE_TOKENS, INDEX_HEAD), (PAGE_TOKENS // BLOCK, INDEX_HEAD)])

    def entry(self, sequence: int, position: Any) -> tuple[Any, Any]:
        """(physical page, entry) of a token, or of an array of tokens."""
        return self.at[sequence][np.asarray(position) // PAGE_TOKENS], np.asarray(position) % PAGE_TOKENS

    def runs(self) -> list[tuple[int, int]]:
        """(first row, rows) of each run: neighbouring rows of one sequence with rising positions."""
        out: list[tuple[int, int]] = []
        for i, (sequence, position) in enumerate(self.rows):
            if i and self.rows[i - 1] == (sequence, position - 1):
                out[-1] = (out[-1][0], out[-1][1] + 1)
            else:
                out.append((i, 1))
        return out

    def tables(self) -> tuple[dict[str, NDArray[Any]], list[tuple[str, int, str, int]]]:
        """Arrays round, runs, rows, slots, pages, kv and index, and where addresses go in them."""
        rows, runs = poison((self.rows_cap,), ROW), poison((self.rows_cap,), RUN)
        n_slots = self.sequences[-1] + 2
        slots = poison((n_slots,), SLOT)
        for i, (first, n) in enumerate(self.runs()):
            sequence, position = self.rows[first]
            runs[i] = (n_slots - 1 - sequence, first, n, position)
            for r in range(first, first + n):
                rows[r] = (n_slots - 1 - sequence, i, 0, position + r - first, 0, 0, 0, 0)
        pages = np.zeros(sum(len(a) for a in self.at.values()), PAGE)
        moves, base = [], 0
        kv_step, index_step = self.kv.strides[0], self.index.strides[0]
        for sequence in self.sequences:
            moves.append(("slots", SLOT.itemsize * (n_slots - 1 - sequence), "pages", PAGE.itemsize * base))
            for i, physical in enumerate(self.at[sequence]):
                moves.append(("pages", PAGE.itemsize * (base + i), "kv", kv_step * int(physical)))
                moves.append(("pages", PAGE.itemsize * (base + i) + 8, "index", index_step * int(physical)))
            base += len(self.at[sequence])
        arrays = {"round": round_table(self.n_rows, self.rows_cap, len(self.runs())), "runs": runs,
                  "rows": rows,
                  "slots": slots, "pages": pages, "kv": self.kv, "index": self.index}
        return arrays, moves

    def like(self, kv: NDArray[Any], index: NDArray[Any]) -> Pages:
        """This layout over other memory: what came back from the device."""
        other: Pages = object.__new__(Pages)
        other.__dict__.update(self.__dict__)
        other.kv, other.index = kv.reshape(self.kv.shape), index.reshape(self.index.shape)
        other.k, other.v = _views(other.kv, _KV_GAP, [self.k.shape[1:], self.v.shape[1:]])
        other.raw, other.pooled = _views(other.index, _INDEX_GAP, [self.raw.shape[1:], self.pooled.shape[1:]])
        return other


def _paged(n: int, gap: int, shapes: list[tuple[int, ...]]) -> tuple[NDArray[Any], list[NDArray[Any]]]:
    memory = poison((n, gap + sum(int(np.prod(s)) for s in shapes)), np.dtype(np.float16))
    return memory, _views(memory, gap, shapes)


def _views(memory: NDArray[Any], gap: int, shapes: Any) -> list[NDArray[Any]]:
    """Neighbouring pieces of each page, after gap bytes; the last gap bytes of a page are left over."""
    views, at = [], gap // 2
    for shape in shapes:
        size = int(np.prod(shape))
        view = memory[:, at:at + size].reshape(len(memory), *shape)
        assert np.shares_memory(view, memory)
        views.append(view)
        at += size
    return views
