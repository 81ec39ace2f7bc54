"""Recurrent slots: DeltaNet states and convolution tails of each live sequence.

Owned by engine/rank.py.  Geometry: model/layout.RecurrentGeometry.  What must stay true: a slot belongs to
one sequence; it is zeroed on the compute stream before that sequence's first row.
"""

from __future__ import annotations

from ..drv.context import Context
from ..drv.memory import DeviceArena, Span, fill_bytes
from ..drv.stream import Stream
from ..errors import CapacityError, UsageError
from ..lifetime import Owner, Undo
from ..model.layout import Layout, arena_bytes
from .tables import DeviceTables

__all__ = ["SlotPool"]


class SlotPool(Owner):
    """Owns the arena "recurrent"; hands out slots."""

    def __init__(self, ctx: Context, layout: Layout, tables: DeviceTables, guard: bool = False) -> None:
        super().__init__("slots", holds=(ctx, tables))
        n_slots = layout.limits.sequences
        size = layout.recurrent.size_bytes
        with Undo() as undo:
            self._arena = DeviceArena(ctx, "recurrent", arena_bytes([size] * n_slots, guard), guard=guard)
            undo.callback(self._arena.close)
            self._spans = [self._arena.span(f"slot{i}", size) for i in range(n_slots)]
            self._undo = undo.pop_all()
        self._free = list(range(n_slots))[::-1]
        for i_slot, span in enumerate(self._spans):
            tables.slots[i_slot]["recurrent"] = span.address

    @property
    def arenas(self) -> tuple[DeviceArena, ...]:
        return (self._arena,)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def span(self, i_slot: int) -> Span:
        return self._spans[i_slot]

    def take(self, stream: Stream) -> int:
        """A free slot, zeroed in stream order.  Raises CapacityError when none is free."""
        if not self._free:
            raise CapacityError(
                "no sequence slot is free",
                sequences=len(self._spans),
                because="every slot belongs to a live sequence",
                do="close a sequence or raise Limits.sequences",
            )
        i_slot = self._free.pop()
        try:
            fill_bytes(stream, self._spans[i_slot], 0)
        except BaseException:
            self._free.append(i_slot)
            raise
        return i_slot

    def give_back(self, i_slot: int) -> None:
        if i_slot in self._free:
            raise UsageError("a recurrent slot is given back twice", slot=i_slot)
        self._free.append(i_slot)

    def _release(self) -> None:
        self._undo.close()
