"""The deep prompt pass of a rank: its buffers, its launches by row bucket, and the run of a chunk.

Made by engine/rank.py at open or at the first prompt that wants it; engine/prefill.py drives it.  What must
stay true: a chunk leaves in a sequence's pages and slot the bytes that serial decode leaves; launches keep
their arguments for the pass's whole life, but for the tiles of a batch; a pass that cannot be made changes
time only.

Where experts are offloaded the ring (state/ring.py) brings them: a layer's expert launches then run once for
each batch of experts, and the host waits for each layer's routing before it knows the batches.

Where all are resident the walk is cut into parts, what stands before the first layer and each layer, and a
bucket's walk is replayed part by part from its second chunk on: a shape that comes once is not worth the
graphs.  Behind the last layer nothing is left: rows whose logits are asked for go through decode's head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from ..drv.context import Context
from ..drv.memory import DeviceArena, Span
from ..drv.module import Launch
from ..drv.stream import Stream
from ..kernels.bind import Kernels
from ..kernels.moe_deep import deep_pairs
from ..lifetime import Owner, Undo
from ..model.deep_layout import DeepLayout
from ..model.deep_steps import deep_steps
from ..model.steps import Step
from ..state.deep import ChunkRun, DeepBuffers
from ..state.experts import ExpertStore
from ..state.ngram import ChunkRows, NgramRows
from ..state.ring import Ring, Turn
from ..state.tables import DeviceTables
from ..state.weights import WeightStore
from .graphs import GraphSet, Identity, fingerprint_of

__all__ = ["DEEP", "DeepPass", "address_of"]

DEEP = "deep"  # the device counter of all graphs of this pass; their paths are deep.embed, deep.L0, ...
_MOST_GRAPHS = 4096  # of Limits.graphs

PLANNED = "moe_plan_scan"  # its launch says which experts a layer uses
SENT = "line_fill"  # its launch sends the ring's tables; the batches' launches follow
GATHERED = "ngram_rows"  # its launch reads a mapped table's rows
BATCHED = ("moe_deep_input", "moe_deep_gu", "moe_deep_down")
Observer = Callable[[Launch], None]


@dataclass(frozen=True, eq=False)
class _Batched:
    """A launch of one batch's tiles: its argument words, and the blocks in x for each tile, 0 where blocks
    stride over any number of them."""

    launch: Launch
    tiles: np.ndarray[Any, np.dtype[np.uint64]]
    n_tiles: np.ndarray[Any, np.dtype[np.uint64]]
    blocks: int

    def run(self, stream: Stream, turn: Turn) -> None:
        self.tiles[0], self.n_tiles[0] = turn.tiles, turn.n_tiles_at
        x, y, z = self.launch.grid
        self.launch.run_grid(stream, (self.blocks * turn.n_tiles if self.blocks else x, y, z))


@dataclass(frozen=True, eq=False)
class _Layer:
    """Where a layer's PLANNED and SENT launches stand in the walk, and its batches' launches behind them."""

    planned: int
    sent: int
    batched: tuple[_Batched, ...]


@dataclass(frozen=True, eq=False)
class _Part:
    """A layer's launches, or those before the first layer.  captured: what its graph holds, the launches
    behind the counter.  gathers: whether they read the rows of a mapped n-gram table."""

    identity: Identity
    launches: Sequence[Launch]
    captured: Sequence[Launch]
    gathers: bool


class DeepPass(Owner):
    """Owns the buffers of the deep pass, its ring and its graphs.  spans: of a rank, by name; holds: what its
    launches use.  counts: of the path DEEP, 16 bytes.  experts: the store of offloaded experts, None where
    all are resident.
    ring: None where all experts are resident.  ngram: rows of a mapped table, gathered before `forward`, or
    None: the table is pinned.  graphs: None with a ring: the host takes part in each layer.  They hold what
    they captured and are closed before the buffers; their failures switch off none of decode's.
    Limits.graphs counts whole walks of them.

    All launches are bound here, and the first of every kernel is made, on no rows: the driver loads it now,
    not in a request.
    Raises OutOfMemory or another DriverError with everything given back.
    """

    def __init__(
        self,
        ctx: Context,
        stream: Stream,
        kernels: Kernels,
        deep: DeepLayout,
        tables: DeviceTables,
        weights: WeightStore,
        spans: Mapping[str, Span],
        holds: tuple[Owner, ...],
        *,
        embed_bf16: bool,
        ngram_bits: Mapping[int, int],
        counts: Span,
        experts: ExpertStore | None = None,
        ngram: NgramRows | None = None,
    ) -> None:
        super().__init__("deep", holds=(ctx, kernels, tables, weights, *holds))
        self.layout = deep
        self._ctx, self._stream, self._kernels = ctx, stream, kernels
        self._forms = (embed_bf16, dict(ngram_bits))
        self._launches: dict[int, list[Launch]] = {}
        self._layers: dict[int, list[_Layer]] = {}
        self._parts: dict[int, list[_Part]] = {}
        self._came: set[int] = set()  # buckets of which a chunk could have been replayed
        self.ring: Ring | None = None
        self.graphs: GraphSet | None = None
        self.ngram: ChunkRows | None = None
        with Undo() as undo:
            guard = ctx.facts.is_simulator
            self.buffers = undo.enter_context(DeepBuffers(ctx, stream, deep, tables, weights, guard))
            self._spans = {**spans, **self.buffers.spans}
            if experts is not None:
                self.ring = undo.enter_context(Ring(ctx, stream, deep, experts, self.buffers.spans, guard))
                self._spans |= self.ring.spans
            if ngram is not None:
                self.ngram = undo.enter_context(ngram.chunk(ctx, deep.rows))
                self._spans |= self.ngram.spans
            self._count = kernels.launch("count_replay", 1, round=self._spans["round"], counts=counts)
            if self.ring is None:
                owners = (self.buffers, *(() if self.ngram is None else (self.ngram,)))
                limits = deep.layout.limits
                most = min(limits.graphs * self.n_parts, _MOST_GRAPHS)
                captured = (kernels, tables, weights, *holds, *owners)
                self.graphs = undo.enter_context(
                    GraphSet(ctx, captured, replace(limits, graphs=most), (), "deep.graphs")
                )
            self._warm()
            self._undo = undo.pop_all()

    @property
    def arenas(self) -> tuple[DeviceArena, ...]:
        """The arenas that kernels and copies write."""
        return (self.buffers.arena, *(() if self.ring is None else (self.ring.arena,)))

    @property
    def arena(self) -> DeviceArena:
        return self.buffers.arena

    @property
    def spans(self) -> Mapping[str, Span]:
        """Of the rank and of this pass, by the names of model/deep_steps.py."""
        return self._spans

    @property
    def n_parts(self) -> int:
        """Graphs of a chunk: what stands before the first layer, and every layer."""
        return 1 + self.layout.layout.config.n_layers

    def steps(self, rows: int) -> list[Step]:
        """The walk of a chunk for grids of `rows` rows as plain data, in the order of `launches`."""
        return deep_steps(self.layout, rows, *self._forms)

    def launches(self, rows: int) -> list[Launch]:
        """The launches of a chunk; rows: one of layout.buckets()."""
        if rows not in self._launches:
            steps = self.steps(rows)
            launches = self._launches[rows] = [self._bind(step) for step in steps]
            if self.ring is None:
                self._parts[rows] = list(self._cut_parts(rows, steps, launches))
            else:
                self._layers[rows] = list(self._cut(rows, launches))
        return self._launches[rows]

    def forward(
        self, runs: Sequence[ChunkRun], observer: Observer | None = None, use_graphs: bool = False
    ) -> None:
        """Publish the chunk's rows and launch its walk on the compute stream; returns before it is done.

        observer: called after every launch, with the launch done.  use_graphs: replay what there is a graph
        of, or one can be made; never with an observer.  Slots and pages must be published.
        """
        n_rows = sum(run.n_rows for run in runs)
        bucket = self.layout.bucket(n_rows)
        launches = self.launches(bucket)
        with self._ctx.active():
            self.buffers.publish(self._stream, runs, bucket)
            if self.graphs is not None:
                self._give_parts(self.graphs, bucket, observer, use_graphs)
            elif self.ring is not None:
                try:
                    self.ring.begin(n_rows)
                    self._stream_experts(self.ring, launches, self._layers[bucket], observer)
                except BaseException:
                    self.ring.drop()
                    raise

    def _give_parts(
        self, graphs: GraphSet, bucket: int, observer: Observer | None, use_graphs: bool
    ) -> None:
        """The walk where all experts are resident: each part by its graph, else launch by launch."""
        if not use_graphs or observer is not None or not self._repeats(graphs, bucket):
            self._give(self._launches[bucket], observer)
            for part in self._parts[bucket]:
                graphs.ran_eagerly(part.identity.path)
            return
        for part in self._parts[bucket]:
            if graphs.replay(part.identity, part.captured, self._stream):
                if self.ngram is not None and part.gathers:
                    self.ngram.release(self._stream)
                continue
            self._give(part.launches, None)
            graphs.ran_eagerly(part.identity.path)

    def _repeats(self, graphs: GraphSet, bucket: int) -> bool:
        """Whether graphs of this bucket are wanted.  Not for its first chunk; nor where memory ran so low
        that not even one walk is kept: each part would push out the next one."""
        if graphs.cap < self.n_parts:
            graphs.drop_all(self._stream)
            return False
        came = bucket in self._came
        self._came.add(bucket)
        return came

    def _give(self, launches: Sequence[Launch], observer: Observer | None) -> None:
        for launch in launches:
            launch.run(self._stream)
            if self.ngram is not None and launch.name == GATHERED:
                self.ngram.release(self._stream)
            if observer is not None:
                self._stream.synchronize()
                observer(launch)

    def _stream_experts(
        self, ring: Ring, launches: list[Launch], layers: Sequence[_Layer], observer: Observer | None
    ) -> None:
        """The walk with the ring."""
        start = 0
        for i_layer, layer in enumerate(layers):
            self._give(launches[start : layer.planned + 1], observer)
            ring.routed()
            self._give(launches[layer.planned + 1 : layer.sent], observer)
            push = partial(self._give, launches[layer.sent : layer.sent + 1], observer)
            for turn in ring.turns(i_layer, push):
                for batched in layer.batched:
                    batched.run(self._stream, turn)
                    if observer is not None:
                        self._stream.synchronize()
                        observer(batched.launch)
            start = layer.sent + 1 + len(layer.batched)
        self._give(launches[start:], observer)

    def _cut_parts(
        self, rows: int, steps: Sequence[Step], launches: Sequence[Launch]
    ) -> Iterator[_Part]:
        """Cut a walk where a layer begins."""
        layout = self.layout.layout
        for stem, part in groupby(zip(steps, launches, strict=True), lambda each: _stem_of(each[0])):
            own = [launch for _, launch in part]
            captured = [self._count, *own]
            identity = Identity(f"{DEEP}.{stem}", rows, (), layout.limits.context_tokens, layout.page_form,
                                -1, (0, 1), fingerprint_of(captured))
            yield _Part(identity, own, captured, any(each.name == GATHERED for each in own))

    def _cut(self, rows: int, launches: Sequence[Launch]) -> Iterator[_Layer]:
        """Find each layer's expert launches in a walk."""
        layout = self.layout.layout
        tiles_cap = deep_pairs(rows, layout.n_slots, layout.config.n_experts)[1]
        names = [launch.name for launch in launches]
        planned = 0
        for _ in range(layout.config.n_layers):
            planned = names.index(PLANNED, planned + 1)
            sent = names.index(SENT, planned)
            batched = launches[sent + 1 : sent + 1 + len(BATCHED)]
            assert tuple(launch.name for launch in batched) == BATCHED
            yield _Layer(planned, sent, tuple(
                _Batched(each, each.word("tiles"), each.word("n_tiles"),
                         0 if self._kernels.strides(each.name) else each.grid[0] // tiles_cap)
                for each in batched
            ))

    def _warm(self) -> None:
        rows = self.layout.buckets()[0]
        for bucket in self.layout.buckets():
            self.launches(bucket)
        self.buffers.publish(self._stream, (), rows)
        seen: set[str] = set()
        for launch in self.launches(rows):
            if launch.name not in seen:
                seen.add(launch.name)
                launch.run(self._stream)
        self._stream.synchronize()

    def _bind(self, step: Step) -> Launch:
        grid = tuple(int(part) for part in step.grid)
        args = {
            name: address_of(self._spans, value) if isinstance(value, str) else value
            for name, value in step.args.items()
        }
        if "round" in self._kernels.arguments(step.kernel):
            args["round"] = self._spans["round"]
        return self._kernels.launch(step.kernel, grid, **args)

    def _release(self) -> None:
        self._launches.clear()
        self._layers.clear()
        self._parts.clear()
        self._undo.close()


def _stem_of(step: Step) -> str:
    """ "L3" of a layer's step; "embed" of those before the first layer."""
    stem = step.scope.partition(".")[0]
    return stem if stem[:1] == "L" else "embed"


def address_of(spans: Mapping[str, Span], name: str) -> Span | int:
    """ "span" or "span+offset" as an address."""
    stem, plus, offset = name.partition("+")
    return spans[stem].address + int(offset) if plus else spans[stem]
