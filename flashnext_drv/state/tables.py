"""Device tables: host shadow, pinned staging, one ordered publish per round.

Owned by engine/rank.py, written by engine/round.py (rows), kv.py (pages) and recurrent.py (slots) between
rounds. What must stay true: the device tables lie at fixed addresses for the rank's whole life, so captured
launches keep their arguments; a round sees exactly the bytes of the last publish before it on the same
stream.

    device arena "tables": [round | rows | runs | slots | aheads] [pages: sequences x pages]
                           [edits: sequences x (head, list)] [linears] [lines]
    pinned "tables.staging": two halves of [round .. aheads | pages]; a half is written again after the event
    that its last copy recorded

Lists of logit edits have no shadow: kernel edit_logits goes on writing them, and engine/edits.py sends one
anew only where it does not end at its sequence's tokens.
"""

from __future__ import annotations

import numpy as np

from ..drv.context import Context
from ..drv.memory import DeviceArena, PinnedArena, Span, copy_async, copy_to_device
from ..drv.stream import Event, Stream
from ..kernels import tables as t
from ..lifetime import Owner, Undo
from ..model.layout import Layout

__all__ = ["DeviceTables", "shadow_bytes", "staging_bytes"]


class DeviceTables(Owner):
    """Owns the tables arena and its staging.

    round (1,), rows and runs (rows_cap,), slots and aheads (sequences,), pages (sequences, pages): host
    shadows, written freely between publishes.  Page entries changed must be announced with `touch_pages`.
    """

    def __init__(self, ctx: Context, layout: Layout) -> None:
        super().__init__("tables", holds=(ctx,))
        cap, n_slots, n_pages = layout.rows_cap, layout.limits.sequences, layout.pages_per_sequence
        head, page_bytes = _published(layout)
        with Undo() as undo:
            self._arena = DeviceArena(ctx, "tables", layout.table_bytes())
            undo.callback(self._arena.close)
            self._head = self._arena.span("head", head)
            self._pages = self._arena.span("pages", page_bytes)
            self._edits = self._arena.span("edits", n_slots * layout.edit_bytes)
            self._staging = PinnedArena(ctx, "tables.staging", staging_bytes(layout))
            undo.callback(self._staging.close)
            self._halves: list[tuple[Span, np.ndarray, Event]] = []
            for i_half in range(2):
                span = self._staging.span(f"half{i_half}", head + page_bytes)
                event = Event(ctx, f"tables.half{i_half}")
                undo.callback(event.close)
                self._halves.append((span, self._staging.host(span), event))
            shadow = ctx.ledger.add("tables", "host", shadow_bytes(layout))
            undo.callback(shadow.remove)
            self._undo = undo.pop_all()
        self._shadow = np.zeros(head, np.uint8)
        at = 0
        self.spans: dict[str, Span] = {"edits": self._edits}
        self._edit_bytes = layout.edit_bytes
        views = []
        for name, dtype, count in (
            ("round", t.ROUND, 1),
            ("rows", t.ROW, cap),
            ("runs", t.RUN, cap),
            ("slots", t.SLOT, n_slots),
            ("aheads", t.AHEAD, n_slots),
        ):
            size = dtype.itemsize * count
            views.append(self._shadow[at : at + size].view(dtype))
            self.spans[name] = self._head.sub(at, size, f"tables.{name}")
            at += size
        self.round, self.rows, self.runs, self.slots, self.aheads = views
        self.pages = np.zeros((n_slots, n_pages), t.PAGE)
        self._dirty = (0, 0)
        self._used = [False, False]
        self._i_half = 0
        for i_slot in range(n_slots):
            self.slots[i_slot]["pages"] = self._pages.address + i_slot * n_pages * t.PAGE.itemsize

    @property
    def arena(self) -> DeviceArena:
        return self._arena

    def touch_pages(self, i_slot: int, first: int, count: int) -> None:
        """Announce that entries first .. first + count - 1 of a slot's page row have changed."""
        start = i_slot * self.pages.shape[1] + first
        low, high = self._dirty
        self._dirty = (start, start + count) if low == high else (min(low, start), max(high, start + count))

    def publish(self, stream: Stream) -> int:
        """Copy what changed in one ordered step on `stream`; returns the bytes copied.  Bumps
        round.version."""
        self.round["version"] += 1
        span, host, event = self._halves[self._i_half]
        if self._used[self._i_half]:
            event.synchronize()
        n_head = self._shadow.size
        host[:n_head] = self._shadow
        copy_async(stream, self._head.address, span.address, n_head)
        low, high = self._dirty
        size = (high - low) * t.PAGE.itemsize
        if size:
            host[n_head : n_head + size] = self.pages.reshape(-1)[low:high].view(np.uint8)
            copy_async(stream, self._pages.address + low * t.PAGE.itemsize, span.address + n_head, size)
            self._dirty = (0, 0)
        stream.record(event)
        self._used[self._i_half] = True
        self._i_half ^= 1
        return n_head + size

    def put_edits(self, stream: Stream, i_slot: int, head: np.ndarray, entries: np.ndarray) -> None:
        """Send a slot's logit edits in stream order.  head: (1,) EDITS; entries: (n,) EDIT, n at most
        Layout.edit_cap."""
        both = np.concatenate([head.view(np.uint8), entries.view(np.uint8)])
        copy_to_device(stream, self._edits.sub(i_slot * self._edit_bytes, both.nbytes), both)

    def store(self, stream: Stream, name: str, rows: np.ndarray) -> Span:
        """Place a table that never changes (linear descriptors, expert lines); returns its span."""
        span = self._arena.span(name, rows.nbytes)
        copy_to_device(stream, span, rows.view(np.uint8).reshape(-1))
        self.spans[name] = span
        return span

    def _release(self) -> None:
        self._undo.close()


def shadow_bytes(layout: Layout) -> int:
    """Plain host bytes of the shadows."""
    return sum(_published(layout))


def staging_bytes(layout: Layout) -> int:
    """Pinned bytes of both staging halves."""
    return 2 * (shadow_bytes(layout) + 512)


def _published(layout: Layout) -> tuple[int, int]:
    """Bytes of the head (round, rows, runs, slots, aheads) and of the pages."""
    n_slots = layout.limits.sequences
    head = t.ROUND.itemsize + layout.rows_cap * (t.ROW.itemsize + t.RUN.itemsize)
    pages = n_slots * layout.pages_per_sequence * t.PAGE.itemsize
    return head + n_slots * (t.SLOT.itemsize + t.AHEAD.itemsize), pages
