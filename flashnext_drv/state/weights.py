"""Dense weights of a rank: embedding, vectors, linears with their descriptors, and the n-gram tables.

Owned by engine/rank.py.  What must stay true: a weight's bytes are the pack's (EXL3 tiles as stored, plain
matrices reordered into mma fragments, vectors widened exactly to f32); the descriptors that kernels read name
addresses of this arena and of the scratch arena only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from ..drv.context import Context
from ..drv.memory import DeviceArena, PinnedArena, Span
from ..drv.stream import Stream
from ..kernels import tables as t
from ..kernels.deep import deep_tiles
from ..kernels.exl3 import fragment_order_weights
from ..lifetime import Owner, Undo
from ..model.deep_layout import DeepLayout, deep_operands
from ..model.layout import Layout, aligned, arena_bytes
from ..model.linears import Group, Member
from ..model.pack import PackBase
from ..model.rows import ngram_staging_bytes
from ..model.weight import LinearInfo
from .tables import DeviceTables
from .upload import Uploader

__all__ = ["Item", "WeightStore", "linear_items", "weight_bytes"]

Array = npt.NDArray[np.generic]
ROW_READ_AHEAD = 16  # bytes behind the last n-gram row: a kernel may read a row in whole words


@dataclass(frozen=True)
class Item:
    """One thing to place.  tensor: copied as stored, or `make`: an array made from the pack.  size_bytes:
    of it."""

    name: str
    size_bytes: int
    tensor: str = ""
    make: Callable[[], Array] | None = None


class WeightStore(Owner):
    """Owns the arena "weights" and, unless the table is mapped, the pinned arena "ngram".

    spans: by the names that model/steps.py uses ("embed", "L3.qsa.q_norm", "L1.ngram.table", ...).
    """

    def __init__(self, ctx: Context, layout: Layout, pack: PackBase) -> None:
        super().__init__("weights", holds=(ctx,))
        self._layout, self._pack = layout, pack
        self._items = list(_items(layout, pack))
        self._tables = list(_ngram_tables(layout, pack))
        self.spans: dict[str, Span] = {}
        with Undo() as undo:
            self._arena = DeviceArena(ctx, "weights", arena_bytes([i.size_bytes for i in self._items]))
            undo.callback(self._arena.close)
            for item in self._items:
                self.spans[item.name] = self._arena.span(item.name, item.size_bytes)
            self._ngram: PinnedArena | None = None
            if self._tables:
                self._ngram = PinnedArena(ctx, "ngram", sum(aligned(size) for _, size, _ in self._tables))
                undo.callback(self._ngram.close)
                for name, size, _ in self._tables:
                    self.spans[name] = self._ngram.span(name, size)
            self._undo = undo.pop_all()

    def load(self, uploader: Uploader) -> None:
        """Place every weight.  Raises CheckpointError from the pack; nothing needs undoing but close."""
        for item in self._items:
            address = self.spans[item.name].address
            if item.make is None:
                uploader.tensor(address, item.tensor)
            else:
                uploader.array(address, item.make())
        for name, _, sources in self._tables:
            at = self.spans[name].address
            for tensor in sources:
                uploader.tensor(at, tensor)
                at += self._pack.tensor(tensor).size

    def describe(self, stream: Stream, tables: DeviceTables, work: Mapping[str, Span]) -> None:
        """Store the FnLinear rows of every group as table `<group>.linears`.  work: the scratch spans."""
        layout = self._layout
        for name, group in layout.groups.items():
            rows = self._linear_rows(group)
            first_warp = 0
            for row, member, x, part, out in zip(
                rows, group.members, *layout.member_offsets(name), strict=True
            ):
                row["x"] = work[group.x].address + (x if group.x == "x" else 0)
                row["part"] = work["part"].address + part
                row["out"] = work[group.out].address + (out if group.out == "out" else 0) if group.out else 0
                row["x_stride"] = member.k
                row["first_warp"], row["n_warps"] = first_warp, member.n_warps
                first_warp += member.n_warps
            tables.store(stream, f"{name}.linears", rows)

    def describe_deep(
        self, deep: DeepLayout, spans: Mapping[str, Span]
    ) -> dict[str, npt.NDArray[np.void]]:
        """The FnLinear rows of every group of the deep pass: operands as tile images, finished outputs.

        spans: of the arena "deep".
        """
        found = {}
        for name in deep.linears:
            group = self._layout.groups[name]
            rows = self._linear_rows(group)
            x_span, out_span = deep_operands(group)
            first_tile = 0
            for row, member, x, out in zip(rows, group.members, *deep.member_offsets(name), strict=True):
                row["x"] = spans[x_span].address + (x if x_span == "d_x" else 0)
                row["out"] = spans[out_span].address + (out if out_span == "d_out" else 0) if out_span else 0
                row["tiled"] = 1
                row["first_warp"], row["n_warps"] = first_tile, deep_tiles(member.n)
                first_tile += deep_tiles(member.n)
            found[name] = rows
        return found

    def _linear_rows(self, group: Group) -> npt.NDArray[np.void]:
        """What both passes' descriptors of a group share: weights, sizes and the units of the sums."""
        rows = np.zeros(len(group.members), t.LINEAR)
        for row, member in zip(rows, group.members, strict=True):
            row["w"] = self.weight_row(self._pack.linear(member.prefix))
            row["k"], row["n"] = member.k, member.n
            row["leaves"], row["segments"] = member.leaves, member.segments
        return rows

    def weight_row(self, info: LinearInfo) -> npt.NDArray[np.void]:
        """The FnWeight of a dense linear placed here."""
        row = np.zeros((), t.WEIGHT)
        row["format"] = info.format
        row["data"] = self.spans[f"{info.prefix}.data"].address
        if info.is_exl3:
            row["suh"] = self.spans[f"{info.prefix}.suh"].address
            row["svh"] = self.spans[f"{info.prefix}.svh"].address
        return row

    def _release(self) -> None:
        self._undo.close()


def weight_bytes(layout: Layout, pack: PackBase) -> tuple[int, int]:
    """Bytes of the device arena "weights" and of the pinned arena "ngram": the tables, or with a mapped table
    the staging of a round's rows (state/ngram.py)."""
    tables = sum(aligned(size) for _, size, _ in _ngram_tables(layout, pack))
    if layout.limits.ngram == "mapped":
        tables = ngram_staging_bytes(layout, pack, layout.rows_cap, times=2)
    return arena_bytes(i.size_bytes for i in _items(layout, pack)), tables


def _items(layout: Layout, pack: PackBase) -> Iterator[Item]:
    c, names = layout.config, layout.config.names
    embed = f"{names.embed}.weight"
    yield Item("embed", pack.tensor(embed).size, tensor=embed)
    for group in layout.groups.values():
        for member in group.members:
            yield from linear_items(pack, pack.linear(member.prefix), member)
    for i_layer in range(c.n_layers):
        stem = f"L{i_layer}"
        vectors = {
            f"{stem}.attn_site.norm": f"{names.attn_site(i_layer)}.hc_norm.weight",
            f"{stem}.mlp_site.norm": f"{names.mlp_site(i_layer)}.hc_norm.weight",
        }
        if c.layer_kinds[i_layer] == "gdn":
            gdn = names.gdn(i_layer)
            vectors |= {
                f"{stem}.gdn.conv": f"{gdn}.conv1d.weight",
                f"{stem}.gdn.norm": f"{gdn}.norm.weight",
                f"{stem}.gdn.a_log": f"{gdn}.A_log",
                f"{stem}.gdn.dt_bias": f"{gdn}.dt_bias",
            }
        else:
            qsa = names.qsa(i_layer)
            vectors |= {
                f"{stem}.qsa.q_norm": f"{qsa}.q_norm.weight",
                f"{stem}.qsa.k_norm": f"{qsa}.k_norm.weight",
                f"{stem}.qsa.iq_norm": f"{qsa}.indexer.q_layernorm.weight",
                f"{stem}.qsa.ik_norm": f"{qsa}.indexer.k_layernorm.weight",
            }
        if i_layer in c.ple_layers:
            ple = names.ple(i_layer)
            vectors |= {
                f"{stem}.ple.{n}": f"{ple}.{n}.weight" for n in ("norm_key", "norm_query", "norm_conv")
            }
            vectors[f"{stem}.ple.conv"] = f"{ple}.conv1d.weight"
        for name, tensor in vectors.items():
            yield _vector(pack, name, tensor)
        for shared in ("gate_proj", "up_proj", "down_proj"):
            yield from linear_items(pack, pack.linear(f"{names.shared(i_layer)}.{shared}"))
    yield _vector(pack, "mixer.norm", f"{names.mixer}.hc_norm.weight")
    for i_ple, i_layer in enumerate(c.ple_layers):
        info = pack.ngram(i_ple)
        for part in ("head_offsets", "head_sizes", "multipliers"):
            values = getattr(info, part)
            yield Item(f"L{i_layer}.ngram.{part}", values.nbytes, make=partial(np.asarray, values))
        if info.head_bias is not None:
            yield Item(f"L{i_layer}.ngram.head_bias", pack.tensor(info.head_bias).size, tensor=info.head_bias)


def _vector(pack: PackBase, name: str, tensor: str) -> Item:
    count = int(np.prod(pack.tensor(tensor).shape, dtype=np.int64))
    return Item(name, 4 * count, make=lambda: pack.vector(tensor))


def linear_items(pack: PackBase, info: LinearInfo, member: Member | None = None) -> Iterator[Item]:
    """What a linear needs in memory, under `<prefix>.data`, `.suh` and `.svh`."""
    if member is not None and (member.k, member.n) != (info.k, info.n):
        raise AssertionError(f"{info.prefix} is {info.k} x {info.n}, the model says {member.k} x {member.n}")
    if not info.is_exl3:
        name = info.parts["weight"]
        yield Item(
            f"{info.prefix}.data",
            (info.n + 15) // 16 * 16 * info.k * 2,
            make=lambda: fragment_order_weights(pack.read(name).view("<u2")),
        )
        return
    yield Item(f"{info.prefix}.data", pack.tensor(info.parts["trellis"]).size, tensor=info.parts["trellis"])
    for part, count in (("suh", info.k), ("svh", info.n)):
        yield Item(f"{info.prefix}.{part}", 2 * count, make=partial(pack.scale, info, part))


def _ngram_tables(layout: Layout, pack: PackBase) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """(name, bytes, tensors) of every table that is held whole."""
    if layout.limits.ngram == "mapped":
        return
    for i_ple, i_layer in enumerate(layout.config.ple_layers):
        info = pack.ngram(i_ple)
        yield (
            f"L{i_layer}.ngram.table",
            info.rows * info.row_bytes + ROW_READ_AHEAD,
            tuple(source[0] for source in info.sources),
        )
