"""The deep prompt pass of a rank: its buffers, its launches by row bucket, and the run of a chunk.

Made by engine/rank.py at open or at the first prompt that wants it; engine/prefill.py drives it.  What must
stay true: a chunk leaves in a sequence's pages and slot the bytes that serial decode leaves; launches keep
their arguments for the pass's whole life; a pass that cannot be made changes time only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..drv.context import Context
from ..drv.memory import DeviceArena, Span
from ..drv.module import Launch
from ..drv.stream import Stream
from ..kernels.bind import Kernels
from ..lifetime import Owner, Undo
from ..model.deep_layout import DeepLayout
from ..model.deep_steps import deep_steps
from ..model.steps import Step
from ..state.deep import ChunkRun, DeepBuffers
from ..state.ngram import ChunkRows, NgramRows
from ..state.tables import DeviceTables
from ..state.weights import WeightStore

__all__ = ["DeepPass", "address_of"]


class DeepPass(Owner):
    """Owns the buffers of the deep pass.  spans: of a rank, by name; holds: what its launches use.
    ngram: rows of a mapped table, gathered before `forward`, or None: the table is pinned.

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
        ngram: NgramRows | None = None,
    ) -> None:
        super().__init__("deep", holds=(ctx, kernels, tables, weights, *holds))
        self.layout = deep
        self._ctx, self._stream, self._kernels = ctx, stream, kernels
        self._forms = (embed_bf16, dict(ngram_bits))
        self._launches: dict[int, list[Launch]] = {}
        self.ngram: ChunkRows | None = None
        with Undo() as undo:
            guard = ctx.facts.is_simulator
            self.buffers = undo.enter_context(DeepBuffers(ctx, stream, deep, tables, weights, guard))
            self._spans = {**spans, **self.buffers.spans}
            if ngram is not None:
                self.ngram = undo.enter_context(ngram.chunk(ctx, deep.rows))
                self._spans |= self.ngram.spans
            self._warm()
            self._undo = undo.pop_all()

    @property
    def arena(self) -> DeviceArena:
        return self.buffers.arena

    @property
    def spans(self) -> Mapping[str, Span]:
        """Of the rank and of this pass, by the names of model/deep_steps.py."""
        return self._spans

    def steps(self, rows: int) -> list[Step]:
        """The walk of a chunk for grids of `rows` rows as plain data, in the order of `launches`."""
        return deep_steps(self.layout, rows, *self._forms)

    def launches(self, rows: int) -> list[Launch]:
        """The launches of a chunk; rows: one of layout.buckets()."""
        if rows not in self._launches:
            self._launches[rows] = [self._bind(step) for step in self.steps(rows)]
        return self._launches[rows]

    def forward(self, runs: Sequence[ChunkRun], observer: Callable[[Launch], None] | None = None) -> None:
        """Publish the chunk's rows and launch its walk on the compute stream; returns before it is done.

        observer: called after every launch, with the launch done.  Slots and pages must be published.
        """
        bucket = self.layout.bucket(sum(run.n_rows for run in runs))
        launches = self.launches(bucket)
        with self._ctx.active():
            self.buffers.publish(self._stream, runs, bucket)
            for launch in launches:
                launch.run(self._stream)
                if self.ngram is not None and launch.name == "ngram_rows":
                    self.ngram.release(self._stream)
                if observer is not None:
                    self._stream.synchronize()
                    observer(launch)

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
        return self._kernels.launch(step.kernel, grid, round=self._spans["round"], **args)

    def _release(self) -> None:
        self._launches.clear()
        self._undo.close()


def address_of(spans: Mapping[str, Span], name: str) -> Span | int:
    """ "span" or "span+offset" as an address."""
    stem, plus, offset = name.partition("+")
    return spans[stem].address + int(offset) if plus else spans[stem]
