"""The public object: a pack opened on a device, that turns token ids into token ids and logits.

Called by the commands, the server and embedding programs.  What must stay true: a row's bytes depend on the
pack and its own earlier tokens only; every public call leaves the thread's current context as it was; after
close nothing of ours is left in the driver or the ledger.
"""

from __future__ import annotations

import hashlib
import operator
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Ids
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..drv import api
from ..drv.context import DeviceFacts
from ..errors import CapacityError, UsageError, bytes_text
from ..kernels.tables import COUNTERS
from ..ledger import Ledger, Row
from ..lifetime import Owner, Undo
from ..model.layout import Limits
from ..model.pack import PackBase
from ..model.source import open_pack
from ..state.export import read_state
from ..state.residency import COUNTERS as RING_COUNTERS
from .counters import counted_since, read_counters, ring_counters
from .decode import Ahead, decode
from .prefill import Prefill, Prompt, PromptCounters, check_prefill, run_prompts
from .rank import Progress, Rank
from .sequence import Edits, Sampling, Sequence, checked_edits, checked_ids

__all__ = ["Edits", "Engine", "Generation", "Limits", "MemoryReport", "Prefill", "Sampling", "token_sha256"]

def token_sha256(ids: Ids[int]) -> str:
    """SHA-256, hex, over all token ids as little-endian u32."""
    return hashlib.sha256(np.asarray(ids, "<u4").tobytes()).hexdigest()


@dataclass(frozen=True)
class Generation:
    """What `generate` made.

    tokens: new ids, a stop id included.  sha256: over prompt and new ids together (`token_sha256`).
    finish: "length" or "stop".  times: seconds of prompt and decode, host clock around the whole phase.
    counters: prompt_tokens, new_tokens; of graphs, in this request, those of engine.graphs.GraphCounters:
    graph_<name> (graph_replays, graph_failures, ...), head_replays, eager_rounds, eager_heads, and by path
    rank0.<path>.<name>, with device_replays and device_rows as the device counted them, rows being those
    live in its replays; deep_graph_<name> and deep_eager_parts of the deep pass's graphs, of which a chunk
    has one for what stands before the first layer and one for each layer; of the prompt: deep_chunks,
    deep_rows, batched_rows, serial_rows and deep_refusals (MemoryReport.deep says why).  With
    Limits.expert_lines also expert_<name> of kernels.tables.COUNTERS, over all layers: distinct experts of
    a round that were in a line (hits) or not (misses), those brought in (fills, filled_bytes) over others
    (evictions), and those read in host memory (in_place; reads and read_bytes by row); ring_<name> of
    state.residency.COUNTERS for the deep pass; and link_bytes, which crossed the link for either.
    """

    tokens: list[int]
    sha256: str
    finish: str
    device: str
    times: Mapping[str, float]
    counters: Mapping[str, int]


@dataclass(frozen=True)
class MemoryReport:
    """The ledger beside what the driver says.  Bytes.

    rows: by owner and tier.  total, free: the driver's, free_at_start: before anything of ours but the
    context.
    unexplained: what the driver lost since then and no entry explains.
    graphs: since the engine was opened: kept of at most cap executables, their bytes (also sizes, by
    identity), pending on the thread, counters by path, and which are off, with the reason.
    deep: of the deep prompt pass: rows it takes (0: there is none), chunk, refused (why), bytes by span, and
    its graphs as above, with sums of the counters.
    experts: with Limits.expert_lines: lines asked for (requested) and given (lines) a layer, ring_bytes, and
    in layers the counters of each since the engine was opened; else empty.
    """

    rows: list[Row]
    total_bytes: int
    free_bytes: int
    free_at_start_bytes: int
    unexplained_bytes: int
    graphs: Mapping[str, Any] = field(default_factory=dict)
    deep: Mapping[str, Any] = field(default_factory=dict)
    experts: Mapping[str, Any] = field(default_factory=dict)

    def table(self) -> str:
        """For people: one line an owner, largest first."""
        lines = [f"{'owner':<18} {'tier':<8} {'live':>11} {'granted':>11} {'peak':>11}"]
        lines += [
            f"{r.owner:<18} {r.tier:<8} {bytes_text(r.live_bytes):>11} {bytes_text(r.granted_bytes):>11} "
            f"{bytes_text(r.peak_bytes):>11}"
            for r in self.rows
            if r.n_live and (r.live_bytes or r.granted_bytes)
        ]
        lines.append(
            f"device: total {bytes_text(self.total_bytes)}, free {bytes_text(self.free_bytes)}, "
            f"free at start {bytes_text(self.free_at_start_bytes)}, "
            f"unexplained {bytes_text(self.unexplained_bytes)}"
        )
        if self.graphs:
            lines.append(_graph_line(self.graphs))
        if self.deep.get("spans"):
            spans = sorted(self.deep["spans"].items(), key=lambda item: -item[1])
            largest = ", ".join(f"{name} {bytes_text(size)}" for name, size in spans[:6])
            lines.append(f"deep pass: {self.deep['rows']} rows a chunk; largest spans {largest}")
        elif self.deep:
            lines.append(f"deep pass: none; {self.deep['refused'] or 'no prompt has asked for it'}")
        if self.experts:
            lines.append(_expert_line(self.experts))
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": [vars(r) for r in self.rows],
            "total_bytes": self.total_bytes,
            "free_bytes": self.free_bytes,
            "free_at_start_bytes": self.free_at_start_bytes,
            "unexplained_bytes": self.unexplained_bytes,
            "graphs": dict(self.graphs),
            "deep": dict(self.deep),
            "experts": dict(self.experts),
        }


class Engine(Owner):
    """A pack on one device.  Use `Engine.open`; a context manager.  For one thread at a time, any thread."""

    def __init__(
        self,
        pack: PackBase,
        limits: Limits,
        *,
        device: str = "auto",
        ordinal: int = 0,
        progress: Progress | None = None,
    ) -> None:
        super().__init__("engine")
        api.ensure(device)
        self.pack = pack
        self.limits = limits
        self.config = pack.config
        self.ledger = Ledger()
        self.prompts = PromptCounters()
        self._live: list[Sequence] = []
        started = time.perf_counter()
        pack.check()
        with Undo() as undo:
            self.rank = Rank(pack, limits, self.ledger, ordinal=ordinal, progress=progress)
            undo.callback(self.rank.close)
            self.open_seconds = time.perf_counter() - started
            if self.rank.kernels.warning:  # an error where warnings are; at the line that called `open`
                warnings.warn(self.rank.kernels.warning, RuntimeWarning, stacklevel=4)
            undo.pop_all()

    @classmethod
    def open(
        cls,
        pack: str | Path | PackBase,
        limits: Limits | None = None,
        *,
        device: str = "auto",
        ordinal: int = 0,
        progress: Progress | None = None,
    ) -> Engine:
        """Open a pack.

        pack: a folder, "synth:<model>[?seed=N&knob=value...]" for a synthetic pack made in memory, or a Pack.
        device: "cuda", "sim", or "auto" (a GPU when a driver with one is found, else the simulator).
        progress: called with (what, bytes done, bytes of all).
        Warns (RuntimeWarning) on a GPU generation without a receipt of byte equality.
        Raises CheckpointError, CapacityError, BuildError, DriverError; nothing is left open then.
        """
        return cls(open_pack(pack), limits or Limits(), device=device, ordinal=ordinal, progress=progress)

    @property
    def facts(self) -> DeviceFacts:
        return self.rank.ctx.facts

    def generate(
        self,
        ids: Ids[int],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: Collection[int] | None = None,
        edits: Edits | None = None,
        on_token: Callable[[int], None] | None = None,
        prefill: Prefill | None = None,
    ) -> Generation:
        """Prompt, then draw up to max_new_tokens ids.

        stop_ids: ids that end the text, by default the model's end-of-sequence id; () for none.
        edits: of the logits that are drawn from; with min_new_tokens and no stop_ids of their own, of these.
        prefill: how the prompt is run; any way gives the same bytes.
        Raises UsageError (ids, edits, prefill), CapacityError (does not fit), Cancelled (prefill.cancel),
        ContractError (a NaN logit); the engine stays usable.
        """
        self.require_open()
        before = self.counters()
        started = time.perf_counter()
        tokens: list[int] = []
        first = started
        stops = self._stops(stop_ids)
        for token in self.stream(
            ids, max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=stops, edits=edits,
            prefill=prefill,
        ):
            if not tokens:
                first = time.perf_counter()
            tokens.append(token)
            if on_token is not None:
                on_token(token)
        ended = time.perf_counter()
        finish = "stop" if tokens and tokens[-1] in stops else "length"
        return Generation(
            tokens,
            token_sha256([*map(int, ids), *tokens]),
            finish,
            str(self.facts),
            {"prompt": first - started, "decode": ended - first},
            {
                "prompt_tokens": len(ids),
                "new_tokens": len(tokens),
                **counted_since(before, self.counters()),
            },
        )

    def stream(
        self, ids: Ids[int], *, max_new_tokens: int, sampling: Sampling | None = None,
        stop_ids: Collection[int] | None = None, edits: Edits | None = None, prefill: Prefill | None = None,
    ) -> Iterator[int]:
        """The ids that `generate` would give, one by one.  Arguments are checked at the call."""
        self.require_open()
        prompt = checked_ids(ids, self.config.vocab)
        integer = isinstance(max_new_tokens, int | np.integer) and not isinstance(max_new_tokens, bool)
        if not integer or max_new_tokens < 0:
            raise UsageError("max_new_tokens is an integer, 0 or more", value=max_new_tokens)
        needed = len(prompt) + max(max_new_tokens - 1, 0)  # the last token drawn is never put into the cache
        if needed > self.limits.context_tokens:
            raise CapacityError(
                "prompt and new tokens do not fit the cache",
                needed_tokens=needed,
                context_tokens=self.limits.context_tokens,
                do="raise Limits.context_tokens or lower max_new_tokens",
            )
        how = prefill or Prefill()
        check_prefill(self.rank, how)
        stops = self._stops(stop_ids)
        edits = checked_edits(edits, self.config.vocab)
        if edits.min_new_tokens and not edits.stop_ids:
            edits = replace(edits, stop_ids=tuple(stops))
        return self._stream(prompt, max_new_tokens, sampling, stops, edits, how)

    def logits(
        self, ids: Ids[int], rows: tuple[int, int] | None = None, *, prefill: Prefill | None = None
    ) -> np.ndarray:
        """Logits after each token of `ids`: (rows, V) float32.

        rows: (first, end) positions to return, by default all.  Positions before `first` skip the head.
        prefill: how the ids are run; any way gives the same bytes.
        """
        self.require_open()
        prompt = checked_ids(ids, self.config.vocab)
        try:
            first, end = map(operator.index, rows if rows is not None else (0, len(prompt)))
        except (TypeError, ValueError) as error:
            raise UsageError("rows are two integers, first and end", value=rows) from error
        if not 0 <= first < end <= len(prompt):
            raise UsageError("rows are outside the prompt", rows=f"{first}:{end}", tokens=len(prompt))
        out = np.empty((end - first, self.config.vocab), np.float32)
        with self.sequence() as sequence:
            sequence.extend(prompt[:end])

            def keep(i_id: int, block: np.ndarray) -> None:
                out[i_id - first : i_id - first + len(block)] = block

            wanted = Prompt(sequence, keep_from=first, keep=keep)
            run_prompts(self.rank, [wanted], prefill or Prefill(), self.prompts)
        return out

    def prompt(
        self, sequences: Ids[Sequence], *, draw: bool = False, prefill: Prefill | None = None
    ) -> list[int]:
        """Run all pending tokens of live sequences, several in one chunk where they fit.

        sequences: of `sequence`, given tokens by their `extend`, each once.  draw: draw a token after each
        one's last.  Returns the drawn ids, -1 without draw or for a sequence that had nothing pending.
        Raises as `generate`, and UsageError (nothing run) on a sequence that is closed or another engine's;
        after Cancelled the sequences may go on, after DriverError those that were in the launch can only be
        closed.
        """
        self.require_open()
        if not isinstance(sequences, Iterable):
            raise UsageError("sequences is a list of live sequences", value=sequences)
        asked = [Prompt(self._own(sequence), draw=draw) for sequence in sequences]
        run_prompts(self.rank, asked, prefill or Prefill(), self.prompts)
        return [each.token for each in asked]

    def export_state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        """All bytes that a live sequence carries between its tokens, by name (state/export.py).

        Two sequences of the same tokens have the same bytes, however their prompts were run.
        Raises UsageError on a sequence that is closed, failed or another engine's.
        """
        self.require_open()
        if self._own(sequence).failed:
            raise UsageError("a sequence's state is unknown after a failed round", slot=sequence.i_slot,
                             because=sequence.failed, do="close it and start again from its tokens")
        rank = self.rank
        arrays = read_state(rank.stream, rank.layout, rank.tables, rank.slots, sequence.i_slot,
                            sequence.position)
        eos = self.config.eos_id
        ids = [sequence.token_before(sequence.n_done, distance, eos) for distance in (2, 1)]
        return arrays | {"ids": np.array(ids, np.int64)}

    @contextmanager
    def sequence(self, sampling: Sampling | None = None, edits: Edits | None = None) -> Iterator[Sequence]:
        """A live sequence for `round`; given back on the way out.  Raises CapacityError, UsageError."""
        sequence = self.rank.open_sequence(sampling, edits)
        self._live.append(sequence)
        try:
            yield sequence
        finally:
            self._live.remove(sequence)
            self.rank.close_sequence(sequence)

    def counters(self) -> dict[str, int]:
        """Since the engine was opened, by the names of Generation.counters.  Waits for the device; raises
        DriverError."""
        self.require_open()
        return read_counters(self.rank, self.prompts)

    def memory(self) -> MemoryReport:
        """Every byte by owner, and what the driver reports."""
        self.require_open()
        ctx, graphs = self.rank.ctx, self.rank.graphs
        free, deep = ctx.free_bytes(), self.rank.deep
        of_deep = None if deep is None or deep.graphs is None else deep.graphs.report()
        return MemoryReport(
            self.ledger.table(),
            ctx.facts.total_bytes,
            free,
            ctx.free_at_start_bytes,
            self.ledger.reconcile(ctx.free_at_start_bytes, free).unexplained_bytes,
            graphs.report(),
            {
                "rows": 0 if deep is None else deep.layout.rows,
                "chunk": self.rank.chunk,
                "refused": self.rank.deep_refused,
                "spans": {} if deep is None else deep.layout.span_bytes(),
                "graphs": of_deep or {},
            },
            self._experts(),
        )

    def _stream(
        self, prompt: list[int], max_new_tokens: int, sampling: Sampling | None, stops: Collection[int],
        edits: Edits, prefill: Prefill,
    ) -> Iterator[int]:
        with self.sequence(sampling, edits) as sequence:
            sequence.extend(prompt)
            if not max_new_tokens:
                return
            asked = Prompt(sequence, draw=True)
            run_prompts(self.rank, [asked], prefill, self.prompts)
            yield asked.token
            if asked.token not in stops and max_new_tokens > 1:
                sequence.extend([asked.token])
                yield from decode(self.rank, Ahead(sequence, max_new_tokens - 1, stops))

    def _experts(self) -> dict[str, Any]:
        """MemoryReport.experts."""
        experts = self.rank.experts
        if not experts.offloads:
            return {}
        layers = experts.counters(self.rank.stream)
        return {
            "requested": self.limits.expert_lines,
            "lines": experts.n_lines,
            "ring_bytes": self.ledger.live("device").get("ring", 0),
            "layers": [
                {name: int(row[name]) for name in COUNTERS}
                | {f"ring_{name}": int(of_ring[name]) for name in RING_COUNTERS.names or ()}
                for row, of_ring in zip(layers, ring_counters(self.rank), strict=True)
            ],
        }

    def _own(self, sequence: Sequence) -> Sequence:
        """The sequence, if its slot and pages are this engine's and its own.  Raises UsageError."""
        if not isinstance(sequence, Sequence):
            raise UsageError("a sequence is what Engine.sequence gives", value=sequence)
        if sequence.closed:
            raise UsageError("a closed sequence cannot be used", slot=sequence.i_slot)
        if all(sequence is not live for live in self._live):
            raise UsageError("the sequence is another engine's", slot=sequence.i_slot)
        return sequence

    def _stops(self, stop_ids: Collection[int] | None) -> Collection[int]:
        if stop_ids is None:
            return frozenset((self.config.eos_id,))
        if not isinstance(stop_ids, Iterable):
            raise UsageError("stop_ids is a collection of token ids", value=stop_ids)
        ids = list(stop_ids)
        return frozenset(checked_ids(ids, self.config.vocab) if ids else ())

    def _release(self) -> None:
        """Every step, leaves first.  Several failures leave as one ExceptionGroup: none hides another."""
        steps: list[Callable[[], None]] = [partial(self.rank.close_sequence, s) for s in self._live]
        steps += [self.rank.close, self.ledger.require_empty]
        failures: list[Exception] = []
        for step in steps:
            before = sys.exception()
            try:
                step()
            except Exception as failure:
                failures += _chain(failure, before)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise ExceptionGroup("closing the engine failed", failures)


def _graph_line(graphs: Mapping[str, Any]) -> str:
    """What `MemoryReport.table` says of graphs."""
    paths = ", ".join(f"{path} {of['replays']} replays and {of['eager_rounds']} eager"
                      for path, of in graphs["paths"].items())
    off = f"; off: {graphs['all_off'] or len(graphs['off'])}" if graphs["off"] else ""
    kept = f"{graphs['kept']} of at most {graphs['cap']}, {bytes_text(graphs['bytes'])}"
    return f"graphs: {kept}; {paths or 'no round'}{off}"


def _expert_line(experts: Mapping[str, Any]) -> str:
    """What `MemoryReport.table` says of experts in host memory."""
    sums = {name: sum(layer[name] for layer in experts["layers"]) for name in experts["layers"][0]}
    wanted = sums["hits"] + sums["misses"]
    rate = f"{sums['hits'] / wanted:.1%} of {wanted}" if wanted else "none wanted"
    return (
        f"experts in host memory: {experts['lines']} lines a layer, {experts['requested']} asked for, ring "
        f"{bytes_text(experts['ring_bytes'])}; in lines {rate}, filled {sums['fills']} "
        f"({bytes_text(sums['filled_bytes'])}), read in host memory {sums['in_place']} "
        f"({bytes_text(sums['read_bytes'])}), through the ring {sums['ring_copied_lines']} "
        f"({bytes_text(sums['ring_copied_bytes'])})"
    )


def _chain(last: Exception, before: BaseException | None) -> list[Exception]:
    """The failures that an undo stack raised as one chain, first one first; `before` was there already."""
    chain = [last]
    while isinstance(earlier := chain[0].__context__, Exception) and earlier is not before:
        chain.insert(0, earlier)
    return chain
