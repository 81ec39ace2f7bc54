"""The ring: banks of device lines through which a copy stream brings a chunk's experts from host memory.

Owned by engine/deep.py where experts are offloaded; the order of everything is residency.py's.  What must
stay true: a launch reads a bank after the event of its fill; a bank is filled after the event of the launches
that read it; staging is written while no launch that reads it is under way; which experts are resident does
not change during a chunk.

    compute  plan > routed | tables | wait full 0 | bank 0 | free 0 | wait full 1 | bank 1 | free 1 | ...
    host                  ^ reads the plan, writes the tables, gives out the rest of the layer
    copy     ... full 0 | ... full 1 | wait free 0 | ... full 0 | wait free 1 | ...

    device  "ring"          [ bank 0 | bank 1 | ... ]    a bank: ring_lines lines, as long as the layer's are
    pinned  "ring.staging"  [ push | lines, batches, tiles | plan ]    sent by line_fill; the plan is received
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..drv.context import Context
from ..drv.memory import DeviceArena, PinnedArena, Span, copy_async
from ..drv.stream import Event, Stream, elapsed_ms
from ..kernels import tables as t
from ..lifetime import Owner, Undo
from ..model.deep_layout import DeepLayout
from ..model.layout import Layout, arena_bytes
from .experts import ExpertStore
from .residency import NO_BANK, Banks, Batch, Fill, Ids, runs_of

__all__ = ["PREFETCH_SHARE", "Ring", "Turn", "ring_bytes", "ring_staging_bytes"]

# Of the experts that are not resident: how many the layer before must have used for all of the next layer's
# to be prefetched.  assumes: layers of a chunk use like shares of their experts.
PREFETCH_SHARE = 0.75
_PUSH = {"push_cache": t.CACHE.itemsize, "push_fill": t.FILL.itemsize}
_Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Turn:
    """One batch whose experts are in place: where its tiles and their number lie on the device."""

    tiles: int
    n_tiles_at: int
    n_tiles: int


class Ring(Owner):
    """Owns the banks, their staging, the copy stream and the events.  compute: the stream of the chunk.

    spans: "d_tiles" and "d_n_tiles", to which moe_plan_scan writes, and "push_cache" and "push_fill", which
    send the tables.  device: by the names of model/deep_layout.py, "ring" and its parts.
    predict: for tests, the experts to prefetch for a layer, instead of all that are not resident.
    timing: note with events how long copies take and launches wait, for `timings`.
    Raises OutOfMemory or another DriverError with everything given back.
    """

    def __init__(
        self,
        ctx: Context,
        compute: Stream,
        deep: DeepLayout,
        store: ExpertStore,
        device: Mapping[str, Span],
        guard: bool = False,
    ) -> None:
        super().__init__("ring", holds=(ctx, compute, store))
        self.predict: Callable[[int], Ids] | None = None
        self.timing = False
        self._ctx, self._compute, self._store, self._device = ctx, compute, store, device
        layout, limits = deep.layout, deep.layout.limits
        self._layout = layout
        self._n_experts, self._n_layers = layout.config.n_experts, layout.config.n_layers
        self.banks = Banks(limits.ring_depth, _lines(layout), self._n_layers)
        self._line_bytes = [store.bytes_of(i) for i in range(self._n_layers)]
        shared = [store.shared_row(i).tobytes() for i in range(self._n_layers)]
        self._shared: _Words = np.frombuffer(b"".join(shared), "<u8").reshape(self._n_layers, -1)
        with Undo() as undo:
            size = _lines(layout) * max(self._line_bytes)
            self._arena = DeviceArena(ctx, "ring", arena_bytes([size] * limits.ring_depth, guard),
                                      guard=guard)
            undo.callback(self._arena.close)
            self._bases = [self._arena.span(f"bank{i}", size).address for i in range(limits.ring_depth)]
            self._staging = PinnedArena(ctx, "ring.staging", ring_staging_bytes(deep))
            undo.callback(self._staging.close)
            self._stage(deep)
            self._copy = undo.enter_context(Stream(ctx, "copy"))
            undo.callback(self._settle)
            self._routed = undo.enter_context(Event(ctx, "ring.routed"))
            self._full = [undo.enter_context(Event(ctx, f"ring.full{i}")) for i in range(limits.ring_depth)]
            self._freed = [undo.enter_context(Event(ctx, f"ring.free{i}")) for i in range(limits.ring_depth)]
            self._clocks = undo.enter_context(_Clocks(ctx))
            self._undo = undo.pop_all()
        self._resident: npt.NDArray[np.bool_] = np.zeros((self._n_layers, self._n_experts), np.bool_)
        self._homes = np.zeros((self._n_layers, self._n_experts), np.uint64)
        self._share = 1.0

    def _stage(self, deep: DeepLayout) -> None:
        """Lay out the staging and name its parts."""
        places = {name: self._staging.span(name, size) for name, size in _PUSH.items()}
        image = self._staging.span("image", deep.sizes["ring"])
        plan = self._staging.span("plan", _end(deep.plan))
        self.spans = places | {name: plan.sub(at, size, name) for name, (at, size) in deep.plan.items()}
        host = self._staging.host
        host()[:] = 0
        self._push = host(places["push_cache"]).view(t.CACHE)
        fill = host(places["push_fill"]).view(t.FILL)
        fill["to"], fill["from"] = self._device["ring"].address, image.address
        self._push_bytes = fill["bytes"]
        sent = {name: host(image.sub(at, size)) for name, (at, size) in deep.ring.items()}
        self._lines: _Words = sent["d_lines"].view("<u8").reshape(self._n_experts + 1, -1)
        self._batch_n = sent["d_batch_n"].view("<u4")
        self._tiles = sent["d_batch_tiles"].view("<u4").reshape(-1, 4)
        self._tiles_at = deep.ring["d_batch_tiles"][0]
        self._plan_tiles = host(self.spans["d_tiles"]).view("<u4").reshape(-1, 4)
        self._plan_n = host(self.spans["d_n_tiles"]).view("<u4")

    @property
    def arena(self) -> DeviceArena:
        return self._arena

    def begin(self, n_rows: int) -> None:
        """A chunk of n_rows rows follows: see which experts are resident, and prefetch for the first layer.

        Waits for the stream's earlier work, so nothing reads a bank any more.
        """
        lines = self._store.residents(self._compute)
        self._resident = lines != t.NO_LINE
        for i_layer, size in enumerate(self._line_bytes):
            base = np.uint64(self._store.line_base(i_layer, 0))
            self._homes[i_layer] = base + lines[i_layer].astype(np.uint64) * np.uint64(size)
        self.banks.reset()
        self._clocks.clear()
        self._share = 1.0 if n_rows * self._layout.config.n_active >= 4 * self._n_experts else 0.0
        for fill in self.banks.ahead(0, self._following(0)):
            self._fill(fill)

    def routed(self) -> None:
        """Call when moe_plan_scan of a layer was given out: its plan is read once that is done."""
        self._compute.record(self._routed)

    def turns(self, i_layer: int, push: Callable[[], None]) -> Iterator[Turn]:
        """The layer's batches, each when its launches may be given out; copies go on beside them.

        push: gives out the launch that sends the tables.  A batch's launches must be given out before the
        next one is asked for, with `Turn.tiles` and `Turn.n_tiles_at` as their tiles and n_tiles.
        """
        self._routed.synchronize()
        tiles = self._read_plan()
        rows = np.zeros(self._n_experts + 1, np.bool_)
        rows[tiles[:, 0]] = True
        used, resident = rows[:-1], self._resident[i_layer]
        streamed = int(np.count_nonzero(~resident))
        self._share = np.count_nonzero(used & ~resident) / streamed if streamed else 1.0
        order = self.banks.layer(i_layer, used, resident, self._following(i_layer + 1))
        turns = iter(self._write(i_layer, tiles, [batch for batch in order if isinstance(batch, Batch)]))
        push()
        for each in order:
            if isinstance(each, Fill):
                self._fill(each)
                continue
            if each.bank != NO_BANK:
                with self._clocks.over("wait", self._compute, self.timing):
                    self._compute.wait(self._full[each.bank])
            yield next(turns)
            if each.bank != NO_BANK:
                self._compute.record(self._freed[each.bank])

    def drop(self) -> None:
        """A chunk ended half-way: forget what was prefetched.  `begin` waits for what is under way."""
        self.banks.reset()

    def timings(self) -> dict[str, float]:
        """Of the last chunk, with `timing` on: milliseconds in which the copy stream copied (copy_ms), from
        its first copy to its last (span_ms), and in which launches waited for a bank (wait_ms).  Waits for
        the chunk."""
        self._compute.synchronize()
        self._copy.synchronize()
        return {"copy_ms": self._clocks.total("copy"), "span_ms": self._clocks.span("copy"),
                "wait_ms": self._clocks.total("wait")}

    def _following(self, i_layer: int) -> Ids:
        """Experts to prefetch for a layer, in order."""
        none = np.zeros(0, np.int64)
        if not self._layout.limits.ring_prefetch or i_layer >= self._n_layers:
            return none
        away = ~self._resident[i_layer]
        if self.predict is not None:
            asked: Ids = np.asarray(self.predict(i_layer), np.int64)
            once: Ids = asked[np.sort(np.unique(asked, return_index=True)[1])]
            wanted: Ids = once[away[once]]
            return wanted
        return np.flatnonzero(away) if self._share >= PREFETCH_SHARE else none

    def _read_plan(self) -> npt.NDArray[np.uint32]:
        """(tiles, 4) uint32, host: FnTile of the layer whose plan is done."""
        return self._plan_tiles[: int(self._plan_n[0])].copy()

    def _write(self, i_layer: int, tiles: npt.NDArray[np.uint32], batches: list[Batch]) -> list[Turn]:
        """Write the layer's lines and the batches' tiles into the staging."""
        size = np.uint64(self._line_bytes[i_layer])
        batch_of = np.zeros(self._n_experts + 1, np.int64)
        bases = self._homes[i_layer].copy()
        for i_batch, batch in enumerate(batches):
            batch_of[batch.experts] = i_batch
            if batch.bank == NO_BANK:
                batch_of[-1] = i_batch
                continue
            bases[batch.experts] = np.uint64(self._bases[batch.bank]) + batch.lines.astype(np.uint64) * size
        experts = np.concatenate([batch.experts for batch in batches])
        placed = self._store.line_rows(i_layer, experts, bases[experts])
        self._lines[experts] = placed.view("<u8").reshape(len(experts), self._lines.shape[1])
        self._lines[-1] = self._shared[i_layer]
        of_tile = batch_of[tiles[:, 0]]
        self._tiles[: len(tiles)] = tiles[np.argsort(of_tile, kind="stable")]
        counts = np.bincount(of_tile, minlength=len(batches))
        self._batch_n[: len(counts)] = counts
        self._push["n_fills"] = 1
        self._push_bytes[0] = self._tiles_at + len(tiles) * t.TILE.itemsize
        starts = (np.cumsum(counts) - counts) * t.TILE.itemsize + self._device["d_batch_tiles"].address
        n_at = self._device["d_batch_n"].address
        return [Turn(int(starts[i]), n_at + 4 * i, int(counts[i])) for i in range(len(batches))]

    def _fill(self, fill: Fill) -> None:
        size = self._line_bytes[fill.i_layer]
        home = self._store.home(fill.i_layer, 0)[0]
        if fill.after_reads:
            self._copy.wait(self._freed[fill.bank])
        with self._clocks.over("copy", self._copy, self.timing):
            for line, expert, n in runs_of(fill.experts):
                copy_async(self._copy, self._bases[fill.bank] + line * size, home + expert * size, n * size)
        self._copy.record(self._full[fill.bank])
        self.banks.counters["copied_bytes"][fill.i_layer] += len(fill.experts) * size

    def _settle(self) -> None:
        """Copies under way end before the memory they read and write is given back."""
        if not self._ctx.broken:
            self._copy.synchronize()

    def _release(self) -> None:
        self._undo.close()


class _Clocks(Owner):
    """Owns pairs of timing events, made as they are needed and used again for the next chunk."""

    def __init__(self, ctx: Context) -> None:
        super().__init__("ring.clocks", holds=(ctx,))
        self._ctx = ctx
        self._pairs: list[tuple[Event, Event]] = []
        self._kinds: list[str] = []
        self._undo = Undo()

    def clear(self) -> None:
        self._kinds.clear()

    def over(self, kind: str, stream: Stream, on: bool) -> _Lap:
        """Context manager: notes what the stream is given inside, if `on`."""
        if not on:
            return _Lap(None, stream)
        if len(self._kinds) == len(self._pairs):
            name = f"ring.clock{len(self._pairs)}"
            start = self._undo.enter_context(Event(self._ctx, f"{name}.start", timing=True))
            end = self._undo.enter_context(Event(self._ctx, f"{name}.end", timing=True))
            self._pairs.append((start, end))
        self._kinds.append(kind)
        return _Lap(self._pairs[len(self._kinds) - 1], stream)

    def total(self, kind: str) -> float:
        return sum(elapsed_ms(*pair) for pair in self._of(kind))

    def span(self, kind: str) -> float:
        pairs = self._of(kind)
        return elapsed_ms(pairs[0][0], pairs[-1][1]) if pairs else 0.0

    def _of(self, kind: str) -> list[tuple[Event, Event]]:
        return [pair for found, pair in zip(self._kinds, self._pairs, strict=False) if found == kind]

    def _release(self) -> None:
        self._undo.close()


class _Lap:
    """What is given to a stream inside lies between two records; without a pair it does nothing."""

    __slots__ = ("_pair", "_stream")

    def __init__(self, pair: tuple[Event, Event] | None, stream: Stream) -> None:
        self._pair, self._stream = pair, stream

    def __enter__(self) -> None:
        if self._pair is not None:
            self._stream.record(self._pair[0])

    def __exit__(self, *_: object) -> None:
        if self._pair is not None:
            self._stream.record(self._pair[1])


def ring_bytes(layout: Layout, line_bytes: int, guard: bool = False) -> int:
    """Bytes of the banks.  line_bytes: of the largest line of any layer.  guard: with guard zones."""
    return arena_bytes([_lines(layout) * line_bytes] * layout.limits.ring_depth, guard)


def ring_staging_bytes(deep: DeepLayout) -> int:
    """Bytes of the pinned staging."""
    return arena_bytes([*_PUSH.values(), deep.sizes["ring"], _end(deep.plan)])


def _lines(layout: Layout) -> int:
    """Lines of a bank: no more than there are experts."""
    return min(layout.limits.ring_lines, layout.config.n_experts)


def _end(places: Mapping[str, tuple[int, int]]) -> int:
    return max(at + size for at, size in places.values())
