"""Pages of 64 tokens: which physical page a sequence's tokens stand in.

Owned by engine/rank.py.  A page holds keys, values and index rows of all attention layers (geometry:
model/layout.PageGeometry).  What must stay true: a page is free or belongs to one sequence; its two addresses
never change; kernels see a page only after `tables.publish`.
"""

from __future__ import annotations

from ..drv.context import Context
from ..drv.memory import DeviceArena
from ..errors import CapacityError, UsageError
from ..kernels.tables import PAGE_TOKENS
from ..lifetime import Owner, Undo
from ..model.layout import Layout, arena_bytes
from .tables import DeviceTables

__all__ = ["PagePool"]

_MASK = (1 << 64) - 1


class PagePool(Owner):
    """Owns the arenas "kv" and "index"; hands pages to slots."""

    def __init__(self, ctx: Context, layout: Layout, tables: DeviceTables, guard: bool = False) -> None:
        super().__init__("pages", holds=(ctx, tables))
        self._tables = tables
        self._n_pages = layout.n_pages
        geometry = layout.pages
        with Undo() as undo:
            self._kv = DeviceArena(
                ctx, "kv", arena_bytes((layout.n_pages * geometry.kv_bytes,), guard), guard=guard
            )
            undo.callback(self._kv.close)
            self._index = DeviceArena(
                ctx, "index", arena_bytes((layout.n_pages * geometry.index_bytes,), guard), guard=guard
            )
            undo.callback(self._index.close)
            self._kv_span = self._kv.span("pages", self._n_pages * geometry.kv_bytes)
            self._index_span = self._index.span("pages", self._n_pages * geometry.index_bytes)
            self._undo = undo.pop_all()
        self._geometry = geometry
        self._free = _page_order(self._n_pages, layout.limits.page_order)
        self._taken: dict[int, list[int]] = {}

    @property
    def arenas(self) -> tuple[DeviceArena, ...]:
        return (self._kv, self._index)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_of(self, i_slot: int) -> tuple[int, ...]:
        """Page ids of a slot in token order."""
        return tuple(self._taken.get(i_slot, ()))

    def reserve(self, i_slot: int, n_tokens: int) -> None:
        """Give a slot the pages for its first n_tokens tokens; pages it has stay.

        Raises CapacityError, with nothing reserved, when free pages run out or the slot's row is full.
        """
        taken = self._taken.setdefault(i_slot, [])
        missing = -(-n_tokens // PAGE_TOKENS) - len(taken)
        if missing <= 0:
            return
        row = self._tables.pages[i_slot]
        if missing > len(self._free) or len(taken) + missing > len(row):
            raise CapacityError(
                "no pages are left for this sequence",
                needed_tokens=n_tokens,
                free_pages=len(self._free),
                page_row=len(row),
                because=f"{self._n_pages - len(self._free)} pages are held by live sequences",
                do="raise context_tokens or sequences, or close a sequence",
            )
        first = len(taken)
        for i_entry in range(first, first + missing):
            page = self._free.pop()
            taken.append(page)
            row[i_entry]["kv"] = self._kv_span.address + page * self._geometry.kv_bytes
            row[i_entry]["index"] = self._index_span.address + page * self._geometry.index_bytes
        self._tables.touch_pages(i_slot, first, missing)

    def release(self, i_slot: int) -> None:
        """Take a slot's pages back.  Raises UsageError when the slot holds none."""
        if i_slot not in self._taken:
            raise UsageError("pages of a slot that holds none are released", slot=i_slot)
        self._free.extend(reversed(self._taken.pop(i_slot)))

    def _release(self) -> None:
        self._undo.close()


def _page_order(n_pages: int, order: str) -> list[int]:
    """Free list, popped from its end."""
    pages = list(range(n_pages))
    if order == "forward":
        return pages[::-1]
    if order == "reversed":
        return pages
    state = int(order.partition(":")[2])
    for i in range(
        n_pages - 1, 0, -1
    ):  # Fisher-Yates with an integer generator of ours: the same on every host
        state = (state * 6364136223846793005 + 1442695040888963407) & _MASK
        j = (state >> 33) % (i + 1)
        pages[i], pages[j] = pages[j], pages[i]
    return pages
