"""Rows of an n-gram table that is in no memory of ours: the host reads those that a launch asks for.

Owned by engine/rank.py (rounds) and engine/deep.py (chunks) where Limits.ngram is "mapped".  What must stay
true: kernel ngram_rows finds, in its `gathered` form, the bytes that it would find in the whole table, at
addresses that never change; staging is written again only after the event behind the last reader of it.

    rounds   pinned "ngram": two halves  -copy->  span "ngram" of the scratch  <-  ngram_rows, also in graphs
    chunks   pinned "deep.ngram": one chunk's rows  <-  ngram_rows reads them in place

A chunk's staging is free as soon as the last PLE layer has run, long before the chunk ends: so the host
gathers the next chunk's rows beside the device's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..drv.context import Context
from ..drv.memory import PinnedArena, Span, copy_async
from ..drv.stream import Event, Stream
from ..lifetime import Owner, Undo
from ..model.layout import Layout, aligned
from ..model.pack import PackBase
from ..model.rows import ngram_staging_bytes, row_reader

if TYPE_CHECKING:
    from .deep import ChunkRun

__all__ = ["ChunkRows", "NgramRows", "TableRows"]

Ids = npt.NDArray[np.generic]
_BLOCK = 1024  # tokens read at a time: bounds what the host takes beside the staging


class TableRows:
    """The tables of all PLE layers, by row: host work only, no driver.

    layers: PLE layers by index.  row_bytes: per PLE layer, of all heads' rows of one token.
    """

    def __init__(self, layout: Layout, pack: PackBase) -> None:
        self.layers, self._eos = layout.config.ple_layers, layout.config.eos_id
        self._infos = [pack.ngram(i_ple) for i_ple in range(len(self.layers))]
        self._readers = [row_reader(pack, info) for info in self._infos]
        self.row_bytes = [info.row_bytes * len(info.head_sizes) for info in self._infos]

    def read(self, i_ple: int, token: Ids, prev1: Ids, prev2: Ids, dest: npt.NDArray[np.uint8]) -> None:
        """The rows that n tokens name into `dest`, (n * row_bytes[i_ple],) u8: heads of a token together.

        token, prev1, prev2: (n,) ids.  Raises CheckpointError when a file lost them.
        """
        info, wide = self._infos[i_ple], self.row_bytes[i_ple]
        for first in range(0, len(token), _BLOCK):
            part = slice(first, first + _BLOCK)
            rows = info.rows_of(token[part], prev1[part], prev2[part], self._eos).reshape(-1)
            piece = dest[first * wide :][: rows.size * info.row_bytes]
            self._readers[i_ple].read(rows, piece.reshape(rows.size, info.row_bytes))


class NgramRows(Owner):
    """Rows of rounds; owns the pinned arena "ngram".

    target: the scratch span "ngram".  spans: by the names that model/steps.py uses ("L1.ngram.rows").
    """

    def __init__(self, ctx: Context, layout: Layout, pack: PackBase, target: Span) -> None:
        super().__init__("ngram", holds=(ctx, target.arena))
        self.tables, self._cap = TableRows(layout, pack), layout.rows_cap
        self._layout, self._pack = layout, pack
        self.spans: dict[str, Span] = {}
        sizes = [self._cap * wide for wide in self.tables.row_bytes]
        at = 0
        for i_layer, size in zip(self.tables.layers, sizes, strict=True):
            self.spans[f"L{i_layer}.ngram.rows"] = target.sub(at, size, f"L{i_layer}.ngram.rows")
            at += aligned(size)
        self._targets = list(self.spans.values())
        self._halves: list[tuple[list[Span], list[npt.NDArray[np.uint8]], Event]] = []
        with Undo() as undo:
            arena = PinnedArena(ctx, "ngram", ngram_staging_bytes(layout, pack, self._cap, times=2))
            undo.callback(arena.close)
            for i_half in range(2):
                spans = [arena.span(f"half{i_half}.{i}", size) for i, size in enumerate(sizes)]
                event = Event(ctx, f"ngram.half{i_half}")
                undo.callback(event.close)
                self._halves.append((spans, [arena.host(span) for span in spans], event))
            self._undo = undo.pop_all()
        self._used = [False, False]
        self._i_half = 0

    def gather(self, rows: npt.NDArray[np.void]) -> None:
        """Read what a round's rows name, FnRow (n,), into the free half; `publish` takes it from there.

        Raises CheckpointError when a file lost rows: nothing has changed then.
        """
        _, hosts, event = self._halves[self._i_half]
        if self._used[self._i_half]:
            event.synchronize()
        for i_ple, host in enumerate(hosts):
            self.tables.read(i_ple, rows["token"], rows["prev1"], rows["prev2"], host)
        self._n_rows = len(rows)

    def publish(self, stream: Stream) -> int:
        """Copy what was gathered to where the round's kernels read it; returns the bytes copied."""
        spans, _, event = self._halves[self._i_half]
        size = 0
        for target, span, wide in zip(self._targets, spans, self.tables.row_bytes, strict=True):
            copy_async(stream, target, span, self._n_rows * wide)
            size += self._n_rows * wide
        stream.record(event)
        self._used[self._i_half] = True
        self._i_half ^= 1
        return size

    def chunk(self, ctx: Context, rows: int) -> ChunkRows:
        """Staging for chunks of up to `rows` rows."""
        return ChunkRows(ctx, self._layout, self._pack, self.tables, rows)

    def _release(self) -> None:
        self._undo.close()


class ChunkRows(Owner):
    """Rows of chunks; owns the pinned arena "deep.ngram".

    spans: by the names that model/deep_steps.py uses ("L1.ngram.chunk").
    """

    def __init__(self, ctx: Context, layout: Layout, pack: PackBase, tables: TableRows, rows: int) -> None:
        super().__init__("deep.ngram", holds=(ctx,))
        self._tables = tables
        self.spans: dict[str, Span] = {}
        with Undo() as undo:
            arena = PinnedArena(ctx, "deep.ngram", ngram_staging_bytes(layout, pack, rows))
            undo.callback(arena.close)
            for i_layer, wide in zip(tables.layers, tables.row_bytes, strict=True):
                name = f"L{i_layer}.ngram.chunk"
                self.spans[name] = arena.span(name, rows * wide)
            self._hosts = [arena.host(span) for span in self.spans.values()]
            self._event = Event(ctx, "deep.ngram")
            undo.callback(self._event.close)
            self._undo = undo.pop_all()
        self._used = False

    def gather(self, runs: Sequence[ChunkRun]) -> None:
        """Read what the rows of `runs` name, in their order, after the chunk before has read its own.

        Raises CheckpointError when a file lost rows.
        """
        if self._used:
            self._event.synchronize()
        for i_ple, (host, wide) in enumerate(zip(self._hosts, self._tables.row_bytes, strict=True)):
            at = 0
            for run in runs:
                ids = run.tokens
                self._tables.read(i_ple, ids[2:], ids[1:-1], ids[:-2], host[at : at + run.n_rows * wide])
                at += run.n_rows * wide

    def release(self, stream: Stream) -> None:
        """Say that all readers of the staging so far are on `stream`: it is written again after them."""
        stream.record(self._event)
        self._used = True

    def _release(self) -> None:
        self._undo.close()
