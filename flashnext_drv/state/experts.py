"""Routed experts of a rank: their device lines, where their bytes lie, and the tables kernels route through.

Owned by engine/rank.py.  Either all experts are resident, one device line each, or (Limits.expert_lines) all
lie in host memory (store.py) and each layer has some device lines with copies, which the kernels of a round
choose (line_resolve, line_fill).  The form of a line stands in lines.py.  Entry n_experts of each layer's
table is the shared expert, which lies among the dense weights.

    table   L{i}.lines  FnLine[E + 1]   the parts of each expert: of its device line, or of host memory
            L{i}.homes  FnHome[E]       host memory of each expert, and its device line    one span "homes"
            L{i}.uses   FnUse[cap]      what each device line holds                        one span "uses"
            L{i}.cache  FnCache         lines, clock, counters                             one span "caches"

What must stay true: with device lines the four tables of a layer agree whenever no round runs, and only
kernels and `seat` change them; a line that a table names holds its expert's bytes by the time a kernel of
the same stream reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..drv.context import Context
from ..drv.memory import DeviceArena, copy_async, copy_to_device, copy_to_host
from ..drv.stream import Stream
from ..errors import UsageError
from ..kernels import tables as t
from ..lifetime import Owner, Undo
from ..model.layout import Layout, arena_bytes
from ..model.pack import PackBase
from .lines import PROJECTIONS, expert_parts, layer_lines
from .store import PinnedExperts
from .tables import DeviceTables
from .upload import Uploader
from .weights import WeightStore

__all__ = ["COUNTER_ROW", "ExpertStore"]

COUNTER_ROW = np.dtype([(name, "<u8") for name in t.COUNTERS])
Residents = Sequence[Sequence[int]]  # per layer the experts of lines 0, 1, ...


class ExpertStore(Owner):
    """Owns the arena "experts", and with offloading the pinned arenas "experts.store".

    n_lines: device lines a layer, 0..layout.lines_cap, by default those the limits ask for; without
    layout.offloads every expert has one.
    """

    def __init__(self, ctx: Context, layout: Layout, pack: PackBase, n_lines: int | None = None) -> None:
        super().__init__("experts", holds=(ctx,))
        self._layout, self._pack = layout, pack
        self.n_lines = _n_lines(layout, n_lines)
        self._layers = [layer_lines(pack, i) for i in range(layout.config.n_layers)]
        with Undo() as undo:
            self._store: PinnedExperts | None = None
            if layout.offloads:
                self._store = undo.enter_context(PinnedExperts(ctx, pack, self._layers))
            sizes = [layer.line_bytes * self.n_lines for layer in self._layers]
            self._arena = DeviceArena(ctx, "experts", arena_bytes(sizes))
            undo.callback(self._arena.close)
            self._bases = [self._arena.span(f"L{i}.lines", size) for i, size in enumerate(sizes)]
            self._undo = undo.pop_all()

    @property
    def offloads(self) -> bool:
        """Whether experts lie in host memory."""
        return self._store is not None

    @property
    def size_bytes(self) -> int:
        """Bytes of all experts, wherever they lie."""
        return sum(int(layer.sizes.sum()) for layer in self._layers)

    def bytes_of(self, i_layer: int) -> int:
        """Bytes of a line of a layer."""
        return self._layers[i_layer].line_bytes

    def line_base(self, i_layer: int, i_line: int) -> int:
        """The address of a device line."""
        return self._bases[i_layer].address + i_line * self._layers[i_layer].line_bytes

    def home(self, i_layer: int, i_expert: int) -> tuple[int, int, int]:
        """(device's address, host's address, bytes) of an expert in host memory.  Raises UsageError when all
        are resident."""
        store = self._offloaded()
        size = int(self._layers[i_layer].sizes[i_expert])
        return store.address(i_layer, i_expert), store.host_address(i_layer, i_expert), size

    def line_row(self, i_layer: int, i_expert: int, base: int) -> np.void:
        """The FnLine of an expert whose copy lies at device address `base`; source 0."""
        row: np.void = self._layers[i_layer].placed([i_expert], [base])[0]
        return row

    def line_rows(
        self, i_layer: int, experts: Sequence[int] | npt.NDArray[Any], bases: npt.ArrayLike
    ) -> npt.NDArray[Any]:
        """(n,) LINE: as `line_row` for several experts, one base each."""
        return self._layers[i_layer].placed(experts, bases)

    def shared_row(self, i_layer: int) -> np.void:
        """The FnLine of a layer's shared expert."""
        row: np.void = self._shared[i_layer]
        return row

    def load(self, stream: Stream, uploader: Uploader, weights: WeightStore, tables: DeviceTables) -> None:
        """Place every expert and store the tables; the lines hold experts 0 .. n_lines - 1.

        Raises CheckpointError from the pack, OutOfMemory when host memory cannot be pinned.
        """
        n_layers = len(self._layers)
        self._shared = np.stack([self._shared_row(weights, i) for i in range(n_layers)])
        if self._store is None:
            for i_layer, base in enumerate(self._bases):
                self._upload(uploader, i_layer, base.address)
        else:
            self._store.fill(uploader)
        resident = [range(self.n_lines)] * n_layers
        self._line_spans = [
            tables.store(stream, f"L{i}.lines", self._line_table(i, resident[i])) for i in range(n_layers)
        ]
        if self._store is not None:
            self._store_caches(stream, tables, resident)
            for i_layer, layer in enumerate(self._layers):  # behind the kernels that make parts of them
                size = self.n_lines * layer.line_bytes
                copy_async(stream, self._bases[i_layer].address, self._store.address(i_layer), size)

    def counters(self, stream: Stream) -> npt.NDArray[Any]:
        """(layers,) COUNTER_ROW, host: since the rank was opened, after all earlier work of the stream; waits
        for it.  Raises UsageError when all experts are resident."""
        caches = self._caches(stream)
        found = np.zeros(len(caches), COUNTER_ROW)
        for name in t.COUNTERS:
            found[name] = caches[name]
        return found

    def residents(self, stream: Stream) -> npt.NDArray[np.uint32]:
        """(layers, E) uint32, host: the device line of each expert or NO_LINE, after all earlier work of the
        stream; waits for it.  Raises UsageError when all experts are resident."""
        self._offloaded()
        homes = np.zeros((len(self._layers), self._layout.config.n_experts), t.HOME)
        copy_to_host(stream, homes, self._spans["homes"])
        lines: npt.NDArray[np.uint32] = homes["line"].copy()
        return lines

    def seat(self, stream: Stream, residents: Residents | None = None, n_lines: int | None = None) -> None:
        """Make the given experts resident and no others, in stream order; counters and clocks stay.

        residents: per layer the experts of lines 0, 1, ..., by default 0 .. n_lines - 1.  n_lines: lines in
        use from now on, by default all granted.  The lines count as never used.  Raises UsageError (nothing
        changed) on more lines than granted, more experts than lines, or an expert that is none or stands
        twice.
        """
        store = self._offloaded()
        n_lines = self.n_lines if n_lines is None else n_lines
        if not 0 <= n_lines <= self.n_lines:
            raise UsageError("lines in use are 0 to the lines granted", value=n_lines, granted=self.n_lines)
        wanted = [range(n_lines)] * len(self._layers) if residents is None else [list(r) for r in residents]
        if len(wanted) != len(self._layers):
            raise UsageError("residents are one list a layer", lists=len(wanted), layers=len(self._layers))
        for i_layer, experts in enumerate(wanted):
            known = all(0 <= e < self._layout.config.n_experts for e in experts)
            if len(experts) > n_lines or len(set(experts)) != len(experts) or not known:
                raise UsageError("these experts cannot be resident", layer=i_layer, experts=list(experts),
                                 lines=n_lines, do="name each at most once, no more than there are lines")
        caches = self._caches(stream)
        caches["n_lines"] = n_lines
        copy_to_device(stream, self._spans["caches"], caches)
        copy_to_device(stream, self._spans["homes"], self._home_table(wanted))
        copy_to_device(stream, self._spans["uses"], self._use_table(wanted))
        for i_layer, experts in enumerate(wanted):
            copy_to_device(stream, self._line_spans[i_layer], self._line_table(i_layer, experts))
            for i_line, i_expert in enumerate(experts):
                size = int(self._layers[i_layer].sizes[i_expert])
                copy_async(stream, self.line_base(i_layer, i_line), store.address(i_layer, i_expert), size)

    def _offloaded(self) -> PinnedExperts:
        if self._store is None:
            raise UsageError("all experts are resident", do="set Limits.expert_lines")
        return self._store

    def _caches(self, stream: Stream) -> npt.NDArray[Any]:
        self._offloaded()
        caches = np.zeros(len(self._layers), t.CACHE)
        copy_to_host(stream, caches, self._spans["caches"])
        return caches

    def _line_addresses(self, i_layer: int, lines: npt.ArrayLike) -> npt.NDArray[np.uint64]:
        base = np.uint64(self._bases[i_layer].address)
        return base + np.asarray(lines, np.uint64) * np.uint64(self._layers[i_layer].line_bytes)

    def _home_addresses(self, i_layer: int) -> npt.NDArray[np.uint64]:
        layer = self._layers[i_layer]
        steps = np.arange(layer.n_experts, dtype=np.uint64) * np.uint64(layer.line_bytes)
        return np.uint64(self._offloaded().address(i_layer)) + steps

    def _store_caches(self, stream: Stream, tables: DeviceTables, resident: Residents) -> None:
        caches = np.zeros(len(self._layers), t.CACHE)
        caches["lines"] = [base.address for base in self._bases]
        caches["line_bytes"] = [layer.line_bytes for layer in self._layers]
        caches["n_lines"] = self.n_lines
        rows = {"caches": caches, "homes": self._home_table(resident), "uses": self._use_table(resident)}
        self._spans = {name: tables.store(stream, name, value) for name, value in rows.items()}
        for whole, name in (("caches", "cache"), ("homes", "homes"), ("uses", "uses")):
            size = rows[whole][0].nbytes
            for i_layer in range(len(self._layers)):
                stem = f"L{i_layer}.{name}"
                tables.spans[stem] = self._spans[whole].sub(i_layer * size, size, stem)

    def _line_table(self, i_layer: int, residents: Sequence[int]) -> npt.NDArray[Any]:
        """(E + 1,) LINE with `residents` in lines 0, 1, ... and all others at home."""
        layer = self._layers[i_layer]
        bases = np.zeros(layer.n_experts, np.uint64) if self._store is None else self._home_addresses(i_layer)
        source = np.ones(layer.n_experts, np.uint32)
        experts = np.asarray(residents, np.int64)
        bases[experts] = self._line_addresses(i_layer, np.arange(len(experts)))
        source[experts] = 0
        rows = layer.placed(range(layer.n_experts), bases)
        rows["source"] = source
        return np.append(rows, self._shared[i_layer : i_layer + 1])

    def _home_table(self, residents: Residents) -> npt.NDArray[Any]:
        homes = np.zeros((len(self._layers), self._layout.config.n_experts), t.HOME)
        homes["line"] = t.NO_LINE
        for i_layer, experts in enumerate(residents):
            homes[i_layer]["address"] = self._home_addresses(i_layer)
            homes[i_layer]["bytes"] = self._layers[i_layer].sizes
            homes["line"][i_layer, np.asarray(experts, np.int64)] = np.arange(len(experts))
        return homes

    def _use_table(self, residents: Residents) -> npt.NDArray[Any]:
        uses = np.zeros((len(self._layers), self._layout.lines_cap), t.USE)
        uses["expert"] = t.NO_LINE
        for i_layer, experts in enumerate(residents):
            uses["expert"][i_layer, : len(experts)] = np.asarray(experts, np.uint32)
        return uses

    def _shared_row(self, weights: WeightStore, i_layer: int) -> npt.NDArray[Any]:
        stem = self._layout.config.names.shared(i_layer)
        infos = [self._pack.linear(f"{stem}.{name}_proj") for name in PROJECTIONS]
        row = np.zeros((), t.LINE)
        row["width"] = infos[0].n
        for name, info in zip(PROJECTIONS, infos, strict=True):
            row[name] = weights.weight_row(info)
        return row

    def _upload(self, uploader: Uploader, i_layer: int, base: int) -> None:
        for i_expert, linears in enumerate(self._pack.experts(i_layer)):
            at = base + i_expert * self._layers[i_layer].line_bytes
            for part in expert_parts(self._pack, linears):
                if part.tensor:
                    uploader.tensor(at + part.offset, part.tensor)
                else:
                    uploader.array(at + part.offset, self._pack.scale(part.info, part.part))

    def _release(self) -> None:
        self._undo.close()


def _n_lines(layout: Layout, n_lines: int | None) -> int:
    """Device lines a layer.  Raises UsageError."""
    if not layout.offloads:
        return layout.config.n_experts
    if n_lines is None:
        return min(layout.limits.expert_lines or 0, layout.config.n_experts)
    if not 0 <= n_lines <= layout.lines_cap:
        raise UsageError("more lines than the layout has room for", value=n_lines, most=layout.lines_cap)
    return n_lines
