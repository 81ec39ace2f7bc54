"""The form of a line: where the parts of one routed expert lie, in device lines and in host memory alike.

Used by experts.py (device lines and line tables) and store.py (host memory).  What must stay true: a line
holds gate, up and down of one expert one after another, each as trellis, suh and svh, every part at a
multiple of 256 bytes; all lines of a layer are as long as its largest expert; the bytes of an expert's line
are the same wherever it lies, so that moving it is one copy and one addition to nine addresses.

    line   [ gate: trellis | suh | svh ][ up: trellis | suh | svh ][ down: trellis | suh | svh ][ rest ]
            <------------------------- bytes of this expert, FnHome.bytes --------------------->
            <------------------------- line_bytes, the same for the whole layer --------------------->
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..kernels import tables as t
from ..model.layout import aligned
from ..model.pack import PackBase
from ..model.weight import LinearInfo

__all__ = ["PROJECTIONS", "LayerLines", "Part", "expert_parts", "layer_line_bytes", "layer_lines",
           "part_bytes"]

PROJECTIONS = ("gate", "up", "down")
PARTS = (("data", "trellis"), ("suh", "suh"), ("svh", "svh"))  # field of FnWeight, part of the pack
ADDRESS_WORDS = [0, 1, 2, 4, 5, 6, 8, 9, 10]  # of the 14 words of an FnLine


@dataclass(frozen=True)
class Part:
    """One part of an expert's line.  offset, size: bytes from the line's start.  tensor: of the pack, ""
    where the scale is made from legacy sign words."""

    projection: str
    field: str
    info: LinearInfo
    part: str
    tensor: str
    offset: int
    size: int


@dataclass(frozen=True, eq=False)
class LayerLines:
    """The lines of one layer.

    rows: (E,) LINE, host, addresses counted from the line's start.  sizes: (E,) int64, bytes of each expert.
    """

    line_bytes: int
    rows: npt.NDArray[Any]
    sizes: npt.NDArray[np.int64]

    @property
    def n_experts(self) -> int:
        return len(self.rows)

    def placed(self, experts: Sequence[int] | npt.NDArray[Any], bases: npt.ArrayLike) -> npt.NDArray[Any]:
        """(n,) LINE of copies of `experts` at device addresses `bases`, one each; source 0."""
        table = self.rows.view("<u8").reshape(len(self.rows), t.LINE.itemsize // 8)
        words = table[np.asarray(experts, np.int64)]
        words[:, ADDRESS_WORDS] += np.asarray(bases, np.uint64)[:, None]
        return words.reshape(-1).view(t.LINE)


def expert_parts(pack: PackBase, linears: Sequence[LinearInfo]) -> Iterator[Part]:
    """The nine parts of an expert's line, in order.  linears: its gate, up and down."""
    at = 0
    for name, info in zip(PROJECTIONS, linears, strict=True):
        for field, part in PARTS:
            size = part_bytes(pack, info, part)
            yield Part(name, field, info, part, info.parts.get(part, ""), at, size)
            at += aligned(size)


def layer_lines(pack: PackBase, i_layer: int) -> LayerLines:
    """Sizes and offsets of all experts of a layer.  Raises CheckpointError from the pack."""
    experts = pack.experts(i_layer)
    rows = np.zeros(len(experts), t.LINE)
    sizes = np.zeros(len(experts), np.int64)
    for row, i_expert in zip(rows, range(len(experts)), strict=True):
        linears = experts[i_expert]
        row["width"] = linears[0].n
        for name, info in zip(PROJECTIONS, linears, strict=True):
            row[name]["format"] = info.format
        for part in expert_parts(pack, linears):
            row[part.projection][part.field] = part.offset
        sizes[i_expert] = part.offset + aligned(part.size)
    return LayerLines(int(sizes.max()), rows, sizes)


def layer_line_bytes(pack: PackBase, i_layer: int) -> int:
    """Bytes of a line of a layer: its largest expert."""
    return max(
        sum(aligned(part_bytes(pack, info, part)) for info in linears for _, part in PARTS)
        for linears in pack.experts(i_layer)
    )


def part_bytes(pack: PackBase, info: LinearInfo, part: str) -> int:
    """Bytes of one part of an expert's projection in its line."""
    if part == "trellis":
        return pack.tensor(info.parts[part]).size
    return 2 * (info.k if part == "suh" else info.n)
