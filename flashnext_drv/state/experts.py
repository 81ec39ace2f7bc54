"""Routed experts of a rank: one device line per expert and layer, and the line tables kernels route through.

Owned by engine/rank.py.  All experts are resident here.  A line holds gate, up and down of one expert one
after another; the table entry holds per projection the addresses of trellis and scales, the width and the
codebook, so experts of one layer may differ.  Entry n_experts of each layer's table is the shared expert,
which lies among the dense weights.
"""

from __future__ import annotations

import numpy as np

from ..drv.context import Context
from ..drv.memory import DeviceArena
from ..drv.stream import Stream
from ..kernels import tables as t
from ..lifetime import Owner, Undo
from ..model.layout import Layout, aligned, arena_bytes
from ..model.pack import PackBase
from ..model.weight import LinearInfo
from .tables import DeviceTables
from .upload import Uploader
from .weights import WeightStore

__all__ = ["ExpertStore", "expert_bytes", "layer_line_bytes", "part_bytes"]

PROJECTIONS = ("gate", "up", "down")


class ExpertStore(Owner):
    """Owns the arena "experts"."""

    def __init__(self, ctx: Context, layout: Layout, pack: PackBase) -> None:
        super().__init__("experts", holds=(ctx,))
        self._layout, self._pack = layout, pack
        with Undo() as undo:
            sizes = _layer_bytes(layout, pack)
            self._arena = DeviceArena(ctx, "experts", arena_bytes(sizes))
            undo.callback(self._arena.close)
            self._bases = [self._arena.span(f"L{i}.lines", size) for i, size in enumerate(sizes)]
            self._undo = undo.pop_all()

    def load(self, stream: Stream, uploader: Uploader, weights: WeightStore, tables: DeviceTables) -> None:
        """Place every expert and store the tables `L<i>.lines`."""
        c = self._layout.config
        for i_layer in range(c.n_layers):
            lines = np.zeros(c.n_experts + 1, t.LINE)
            line_bytes = layer_line_bytes(self._pack, i_layer)
            for i_expert, linears in enumerate(self._pack.experts(i_layer)):
                at = self._bases[i_layer].address + i_expert * line_bytes
                lines[i_expert]["width"] = linears[0].n
                for name, info in zip(PROJECTIONS, linears, strict=True):
                    at = self._place(uploader, lines[i_expert][name], info, at)
            shared = [self._pack.linear(f"{c.names.shared(i_layer)}.{name}_proj") for name in PROJECTIONS]
            lines[c.n_experts]["width"] = shared[0].n
            for name, info in zip(PROJECTIONS, shared, strict=True):
                lines[c.n_experts][name] = weights.weight_row(info)
            tables.store(stream, f"L{i_layer}.lines", lines)

    def _place(self, uploader: Uploader, row: np.void, info: LinearInfo, at: int) -> int:
        row["format"] = info.format
        for field, part in (("data", "trellis"), ("suh", "suh"), ("svh", "svh")):
            row[field] = at
            if part in info.parts:
                uploader.tensor(at, info.parts[part])
            else:
                uploader.array(at, self._pack.scale(info, part))
            at += aligned(part_bytes(self._pack, info, part))
        return at

    def _release(self) -> None:
        self._undo.close()


def part_bytes(pack: PackBase, info: LinearInfo, part: str) -> int:
    """Bytes of one part of an expert's projection in its line."""
    if part == "trellis":
        return pack.tensor(info.parts[part]).size
    return 2 * (info.k if part == "suh" else info.n)


def layer_line_bytes(pack: PackBase, i_layer: int) -> int:
    """Bytes of a line of a layer: its largest expert."""
    return max(
        sum(aligned(part_bytes(pack, info, part)) for info in linears for part in ("trellis", "suh", "svh"))
        for linears in pack.experts(i_layer)
    )


def expert_bytes(layout: Layout, pack: PackBase) -> int:
    """Bytes of the expert arena."""
    return arena_bytes(_layer_bytes(layout, pack))


def _layer_bytes(layout: Layout, pack: PackBase) -> list[int]:
    return [layer_line_bytes(pack, i) * layout.config.n_experts for i in range(layout.config.n_layers)]
