"""Everything one GPU owns, built in order on one undo stack and closed leaves first.

    Rank
     +- Context, stream                  own context by default; never reset
     +- Kernels                          one module per family
     +- tables, pages, slots, work       what rounds read and write
     +- weights, experts                 the pack's bytes
     +- graphs                           hold all of the above
     +- deep                             the deep prompt pass; may be missing, or come with the first prompt

Made by engine/engine.py; engine/round.py drives it.  What must stay true: a launch's arguments are fixed when
the rank opens, and every address in them is stable until it closes; a failure at any call while opening gives
back what was there; compute happens on one stream.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..drv.context import Context
from ..drv.memory import DeviceArena, PinnedArena, Span, copy_async, copy_to_host, fill_bytes
from ..drv.module import Launch
from ..drv.stream import Event, Stream
from ..errors import ContextLost, DriverError
from ..host_memory import host_memory
from ..kernels.bind import Kernels
from ..kernels.tables import DRAWN
from ..ledger import Ledger
from ..lifetime import Owner, Undo
from ..model.layout import Layout, Limits, arena_bytes
from ..model.pack import PackBase
from ..model.steps import Step, ahead_steps, body_steps, draw_steps, edit_steps, head_steps
from ..state.experts import ExpertStore
from ..state.kv import PagePool
from ..state.ngram import NgramRows
from ..state.recurrent import SlotPool
from ..state.tables import DeviceTables
from ..state.upload import Uploader
from ..state.weights import WeightStore
from .deep import DEEP, DeepPass, address_of
from .graphs import GraphSet, Identity, fingerprint_of
from .plan import Sizer
from .sequence import Edits, Sampling, Sequence, checked_edits

__all__ = ["BODY", "HEAD", "HEAD_EDITS", "NEXT", "NEXT_EDITS", "STEP", "STEP_EDITS", "TOKEN", "TOKEN_EDITS",
           "Progress", "Rank"]

BODY = "body"  # state advances, no logits
HEAD = "head"  # head and draws of rows whose streams, last expert output and inject lie in the scratch
TOKEN = "token"  # body, then head: two graphs
NEXT = "next"  # head and draws of rows that all draw, then the tables' rows become those of the next token
STEP = "step"  # body, then next: two graphs
# The same where at least one row draws from edited logits; the body is that of TOKEN and STEP.
HEAD_EDITS, NEXT_EDITS, TOKEN_EDITS, STEP_EDITS = "head_edits", "next_edits", "token_edits", "step_edits"
_PARTS = {BODY: (BODY,), HEAD: (HEAD,), NEXT: (NEXT,), TOKEN: (BODY, HEAD), STEP: (BODY, NEXT),
          HEAD_EDITS: (HEAD_EDITS,), NEXT_EDITS: (NEXT_EDITS,), TOKEN_EDITS: (BODY, HEAD_EDITS),
          STEP_EDITS: (BODY, NEXT_EDITS)}
_HEADS = (HEAD, NEXT, HEAD_EDITS, NEXT_EDITS)
_COUNTED = (BODY, HEAD, NEXT, DEEP, HEAD_EDITS, NEXT_EDITS)  # in the order of their counters on the device
_IDENTITIES = 4096  # kept; window patterns are many
Progress = Callable[[str, int, int], None]  # what, done, of all; bytes


class Rank(Owner):
    """One GPU's share of an engine (all of it, with one rank).

    pack: checked against `layout.config`.  progress: told of bytes loaded.  Raises CapacityError before
    anything is allocated when the plan does not fit; OutOfMemory, BuildError and CheckpointError with
    everything given back.
    ngram: the rows of a mapped n-gram table, or None: the table is pinned.
    use_graphs: whether rounds replay graphs, by default Limits.graph; may be changed between rounds.
    deep: the deep prompt pass, or None.  deep_refused: why there is none ("": there is one, or none was
    asked for yet).  chunk: most rows of a prompt's segment.
    """

    def __init__(
        self,
        pack: PackBase,
        limits: Limits,
        ledger: Ledger,
        *,
        ordinal: int = 0,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(f"rank{ordinal}")
        self.layout = Layout(pack.config, limits)
        self.use_graphs = limits.graph
        self._programmatic = True
        self.observer: Callable[[Launch], None] | None = None
        self.deep: DeepPass | None = None
        self.deep_refused = ""
        self._embed_bf16 = pack.tensor(f"{pack.config.names.embed}.weight").dtype == "BF16"
        self._ngram_bits = {
            i_layer: pack.ngram(i_ple).bits for i_ple, i_layer in enumerate(pack.config.ple_layers)
        }
        with Undo() as undo:
            self.ctx = undo.enter_context(Context(ordinal, ledger=ledger, primary=limits.primary_context))
            with self.ctx.active():
                self._open(pack, undo, progress)
            self._undo = undo.pop_all()

    def _open(self, pack: PackBase, undo: Undo, progress: Progress | None) -> None:
        ctx, layout = self.ctx, self.layout
        guard = ctx.facts.is_simulator
        self.stream = undo.enter_context(Stream(ctx, "compute"))
        self._done = undo.enter_context(Event(ctx, "round.done"))
        self.kernels = undo.enter_context(Kernels(ctx))
        seating = Sizer(pack, guard).seat(layout, ctx.free_bytes(), host_memory().available_bytes)
        self._deep_layout, self.deep_refused = seating.deep, seating.refused
        self.chunk, planned = seating.chunk, seating.plan
        self.tables = undo.enter_context(DeviceTables(ctx, layout))
        self.pages = undo.enter_context(PagePool(ctx, layout, self.tables, guard))
        self.slots = undo.enter_context(SlotPool(ctx, layout, self.tables, guard))
        self._work = undo.enter_context(
            DeviceArena(ctx, "work", arena_bytes(layout.work.values(), guard), guard=guard)
        )
        self.work = {name: self._work.span(name, size) for name, size in layout.work.items()}
        self._draws = undo.enter_context(PinnedArena(ctx, "draws", 8 * layout.rows_cap))
        self._draw_span = self._draws.span("draws", 8 * layout.rows_cap)
        self._ahead = undo.enter_context(PinnedArena(ctx, "ahead", layout.ahead_bytes))
        self._ahead_span = self._ahead.span("ahead", layout.ahead_bytes)
        self._ahead.host()[:] = 0
        self.weights = undo.enter_context(WeightStore(ctx, layout, pack))
        self.ngram: NgramRows | None = None
        table_bytes = planned.pinned["ngram"]
        if layout.limits.ngram == "mapped":
            self.ngram = undo.enter_context(NgramRows(ctx, layout, pack, self.work["ngram"]))
            table_bytes = 0
        n_lines = planned.lines if layout.offloads else None
        self.experts = undo.enter_context(ExpertStore(ctx, layout, pack, n_lines))
        self._load(pack, progress, planned.device["weights"] + self.experts.size_bytes + table_bytes)
        self.weights.describe(self.stream, self.tables, self.work)
        self._spans: dict[str, Span] = {**self.work, **self.weights.spans, **self.tables.spans}
        self._spans["ahead"] = self._ahead_span
        if self.ngram is not None:
            self._spans |= self.ngram.spans
        self._launches: dict[tuple[str, int, int], list[Launch]] = {}
        self._captured: dict[tuple[str, int, int], list[Launch]] = {}
        self._identities: dict[tuple[str, int, tuple[int, ...], int], Identity] = {}
        self.graphs = undo.enter_context(
            GraphSet(
                ctx,
                (self.kernels, self.tables, self.pages, self.slots, self._work, self._ahead, self.weights,
                 self.experts),
                layout.limits,
                _HEADS,
            )
        )
        undo.callback(self._close_deep)
        if layout.limits.deep == "open":
            self._make_deep()
        self._warm()

    def want_deep(self) -> DeepPass | None:
        """The deep pass; with Limits.deep "request" it is made now if it is not there.  None: see
        deep_refused."""
        if self.deep is None and self.layout.limits.deep == "request" and self._deep_layout is not None:
            with self.ctx.active():
                self._make_deep()
        return self.deep

    def _make_deep(self) -> None:
        """Make the deep pass; a driver's refusal leaves `deep_refused`.  Raises ContextLost, or any
        DriverError that left the context broken."""
        if self._deep_layout is None:
            return
        try:
            self.deep = DeepPass(
                self.ctx,
                self.stream,
                self.kernels,
                self._deep_layout,
                self.tables,
                self.weights,
                self._spans,
                (self.pages, self.slots, self._work, self.experts),
                embed_bf16=self._embed_bf16,
                ngram_bits=self._ngram_bits,
                counts=self._counts_of(DEEP),
                experts=self.experts if self.layout.offloads else None,
                ngram=self.ngram,
            )
            self.deep_refused = ""
        except ContextLost:
            raise
        except DriverError as error:
            if self.ctx.broken:
                raise
            self.deep_refused = str(error)

    def _close_deep(self) -> None:
        if self.deep is not None:
            self.deep.close()

    def _load(self, pack: PackBase, progress: Progress | None, total: int) -> None:
        done = 0

        def told(size: int) -> None:
            nonlocal done
            done += size
            if progress is not None:
                progress("loading", min(done, total), total)

        with Uploader(self.ctx, self.stream, self.kernels, pack, told) as uploader:
            self.weights.load(uploader)
            self.experts.load(self.stream, uploader, self.weights, self.tables)
            uploader.finish()

    def _warm(self) -> None:
        """Run empty rounds: the driver loads every kernel now, not inside a request or a capture.

        One row uses the forms for up to 8 rows; a rank for more than 8 has those for 16 too.
        """
        self.tables.round[0]["n_rows"] = self.tables.round[0]["n_runs"] = 0
        for bucket in sorted({1, self.layout.rows_cap}):
            self.tables.round[0]["rows_cap"] = bucket
            self.tables.publish(self.stream)
            for launch in self.launches(STEP, bucket):
                launch.run(self.stream)
        next(each for each in self.launches(HEAD_EDITS, 1) if each.name == "edit_logits").run(self.stream)
        self._graph_launches(BODY, 1, 0)[0].run(self.stream)
        fill_bytes(self.stream, self.work["counts"], 0)
        self.stream.synchronize()

    @property
    def programmatic(self) -> bool:
        """Whether a round's launches may start ahead of the end of those before them (programmatic dependent
        launch), where kernel and device can.  On at first; may be changed between rounds, same bytes: graphs
        made so far are dropped.
        """
        return self._programmatic

    @programmatic.setter
    def programmatic(self, wanted: bool) -> None:
        if wanted == self._programmatic:
            return
        for path in self.graphs.paths:
            self.graphs.drop(path, self.stream)
        self._identities.clear()
        self._programmatic = wanted
        for (path, *_), launches in self._launches.items():
            if len(_PARTS[path]) == 1:
                self._lead(launches)

    def _lead(self, launches: list[Launch]) -> None:
        """Of a path's launches all but the first may start ahead of those before them.  So behind the first
        everything is done that came before the path: tables and states that none of its launches writes may
        be read early (KernelSpec.settled)."""
        for i, launch in enumerate(launches):
            launch.programmatic = self._programmatic and i > 0 and self.kernels.may_lead(launch.name)

    @property
    def spans(self) -> dict[str, Span]:
        """Everything that launches point into, by name; with the deep pass's where it is there."""
        return dict(self._spans if self.deep is None else self.deep.spans)

    def steps(self, path: str, context: int = 0) -> list[Step]:
        """The walk of one round as plain data, in the order of `launches`.  context: as in `body_steps`."""
        if path == BODY:
            return list(body_steps(self.layout, self._embed_bf16, self._ngram_bits, context))
        if path == HEAD:
            return [*head_steps(self.layout), *draw_steps(self.layout)]
        if path == HEAD_EDITS:
            return [*head_steps(self.layout), *edit_steps(self.layout, restore=False),
                    *draw_steps(self.layout), *edit_steps(self.layout, restore=True)]
        if path in (NEXT, NEXT_EDITS):
            return [*self.steps(HEAD if path == NEXT else HEAD_EDITS), *ahead_steps(self.layout)]
        return [step for part in _PARTS[path] for step in self.steps(part, context)]

    def launches(self, path: str, bucket: int, context: int = 0) -> list[Launch]:
        """The launches of one round, of a path named above, padded to `bucket` rows.

        context: tokens that the attention grids reach, a value of Layout.context_bucket; 0 = all.
        """
        context = 0 if path in _HEADS else context or self.layout.limits.context_tokens
        key = (path, bucket, context)
        if key not in self._launches:
            if len(_PARTS[path]) > 1:
                made = [each for part in _PARTS[path] for each in self.launches(part, bucket, context)]
            else:
                made = [self._bind(step, bucket) for step in self.steps(path, context)]
                self._lead(made)
            self._launches[key] = made
        return self._launches[key]

    def rebind(self) -> None:
        """Bind all launches anew from the spans as they are.  Where an address has changed the path's graphs
        are dropped at its next round."""
        self._launches.clear()
        self._captured.clear()
        self._identities.clear()

    def identity(
        self, path: str, bucket: int, pattern: tuple[int, ...] = (), context: int = 0
    ) -> Identity:
        """What a graph of a path of one part is kept under.  pattern, context: of BODY alone."""
        if path in _HEADS:
            pattern, context = (), 0
        key = (path, bucket, pattern, context)
        found = self._identities.get(key)
        if found is None:
            if len(self._identities) >= _IDENTITIES:
                self._identities.clear()
            layout = self.layout
            found = self._identities[key] = Identity(
                path, bucket, pattern, context,
                layout.page_form,
                self.experts.n_lines if layout.offloads else -1,
                (0, 1),
                fingerprint_of(self._graph_launches(path, bucket, context)),
            )
        return found

    def forward(self, path: str, bucket: int, pattern: tuple[int, ...] = (), longest: int = 0,
                times: int = 1) -> None:
        """Publish the tables and run one round on the compute stream; returns before it is done.
        With path STEP or STEP_EDITS `times` rounds, one token each.

        Replays the round's graphs where they are wanted and can be made, else runs its launches; same bytes.
        pattern: rows of each window.  A round of decode is one however many sequences it has: a graph serves
        all of its bucket.  longest: tokens of the longest sequence after the round.

        observer, when set, is called after every launch of an eager round, with the launch done.
        """
        with self.ctx.active():
            self.tables.publish(self.stream)
            context = self.layout.context_bucket(longest)
            if all(n == 1 for n in pattern):
                pattern = pattern[:1]
            for part in _PARTS[path] * times:
                self._run(part, bucket, pattern, context)
            if path in (STEP, STEP_EDITS):
                self.stream.record(self._done)
            elif path != BODY:
                size = 4 * bucket
                copy_async(self.stream, self._draw_span.sub(0, size), self.work["tokens"].sub(0, size), size)
                copy_async(
                    self.stream, self._draw_span.sub(size, size), self.work["status"].sub(0, size), size
                )
                self.stream.record(self._done)
                self._n_drawn = bucket

    def _run(self, path: str, bucket: int, pattern: tuple[int, ...], context: int) -> None:
        """Body or head of a round."""
        if self.use_graphs and self.observer is None:
            identity = self.identity(path, bucket, pattern, context)
            if self.graphs.replay(identity, self._graph_launches(path, bucket, context), self.stream):
                return
        for launch in self.launches(path, bucket, context):
            launch.run(self.stream)
            if self.observer is not None:
                self.stream.synchronize()
                self.observer(launch)
        self.graphs.ran_eagerly(path)

    def _graph_launches(self, path: str, bucket: int, context: int) -> list[Launch]:
        """What a graph of this path captures: `launches`, which an eager round runs, behind its counter."""
        key = (path, bucket, context)
        if key not in self._captured:
            count = self.kernels.launch("count_replay", 1, round=self._spans["round"],
                                        counts=self._counts_of(path))
            self._captured[key] = [count, *self.launches(path, bucket, context)]
        return self._captured[key]

    def _counts_of(self, path: str) -> Span:
        """What the device counts of a path: u64 replays, u64 rows."""
        return self.work["counts"].sub(16 * _COUNTED.index(path), 16)

    def device_replays(self) -> dict[str, tuple[int, int]]:
        """By path what the device counted since the rank opened: replays of graphs, and rows that were live
        in them.  Waits for the stream."""
        found = np.empty((len(_COUNTED), 2), "<u8")
        copy_to_host(self.stream, found, self.work["counts"].sub(0, found.nbytes))
        return {path: (int(n), int(rows)) for path, (n, rows) in zip(_COUNTED, found, strict=True)}

    def read_draws(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, status), u32 of the last round's padded rows, after it is done."""
        with self.ctx.active():
            self._done.synchronize()
        drawn = self._draws.host(self._draw_span).view("<u4").copy()
        return drawn[: self._n_drawn], drawn[self._n_drawn : 2 * self._n_drawn]

    def read_ahead(self) -> np.ndarray:
        """(sequences, steps_ahead) DRAWN: by slot what the rounds of the last STEP or STEP_EDITS drew, after
        they are done.  How many of a slot's entries are new follows from what it was allowed to draw and from
        its tokens."""
        with self.ctx.active():
            self._done.synchronize()
        drawn = self._ahead.host(self._ahead_span).view(DRAWN).reshape(self.layout.limits.sequences, -1)
        return drawn.copy()

    def read_logits(self, first_row: int, n_rows: int) -> np.ndarray:
        """(n_rows, V) float32 of the last round."""
        row_bytes = self.layout.config.vocab * 4
        out = np.empty((n_rows, self.layout.config.vocab), np.float32)
        copy_to_host(self.stream, out, self.work["logits"].sub(first_row * row_bytes, n_rows * row_bytes))
        return out

    def guarded_arenas(self) -> tuple[DeviceArena, ...]:
        """The arenas that kernels write, for `check_guards`; they have guard zones in the simulator."""
        deep = () if self.deep is None else self.deep.arenas
        return (self._work, *self.pages.arenas, *self.slots.arenas, *deep)

    def open_sequence(self, sampling: Sampling | None = None, edits: Edits | None = None) -> Sequence:
        """A new sequence with a zeroed slot.  Raises CapacityError when no slot is free, UsageError on edits
        of ids outside the vocabulary."""
        edits = checked_edits(edits, self.layout.config.vocab)
        with Undo() as undo:
            with self.ctx.active():  # leaving it may fail too
                i_slot = self.slots.take(self.stream)
                undo.callback(self.slots.give_back, i_slot)
            undo.pop_all()
        self.pages.reserve(i_slot, 0)
        return Sequence(i_slot, self.layout.limits.context_tokens, sampling or Sampling(), edits=edits)

    def close_sequence(self, sequence: Sequence) -> None:
        """Give pages and slot back, once; a second call does nothing."""
        if not sequence.closed:
            sequence.closed = True
            self.pages.release(sequence.i_slot)
            self.slots.give_back(sequence.i_slot)

    def _bind(self, step: Step, bucket: int) -> Launch:
        kernel = step.kernel.replace("*", "8" if bucket <= 8 else "16")
        grid = [bucket if part == "rows" else int(part) for part in step.grid] + [1] * (3 - len(step.grid))
        grid[0] = -(-grid[0] // step.units_a_block[bucket > 1])
        args = {
            name: address_of(self._spans, value) if isinstance(value, str) else value
            for name, value in step.args.items()
        }
        if "round" in self.kernels.arguments(kernel):
            args["round"] = self._spans["round"]
        return self.kernels.launch(kernel, (grid[0], grid[1], grid[2]), **args)

    def _release(self) -> None:
        self._undo.close()
