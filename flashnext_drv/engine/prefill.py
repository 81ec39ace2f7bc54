"""How a prompt's tokens enter the state: cut into segments, each by the deep pass, in batches or row by row.

Called by engine/engine.py for whole prompts and by engine/scheduler.py for a segment at a time.  What must
stay true: the choice of path, the cut and what was refused change time
only; between two launches the caller may look at the progress and may stop.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from threading import Event

import numpy as np
import numpy.typing as npt

from ..errors import Cancelled, ContractError, DriverError, UsageError
from ..model.layout import MAX_CHUNK
from .chunk import run_chunk
from .rank import Rank
from .round import Window, run_round
from .sequence import Sequence

__all__ = ["Prefill", "Prompt", "PromptCounters", "PromptRun", "Segment", "check_prefill", "run_prompts"]


@dataclass(frozen=True)
class Prefill:
    """How a request's prompt is run.  Every choice gives the same bytes.

    serial: one row a launch through decode, whatever else is said.  chunk: most rows of a segment, 1..16384
    and at most the plan's; None = the plan's.  deep_rows: segments of at least so many rows take the deep
    pass; None = Limits.deep_rows.  deep: False never takes it.
    progress: called with (tokens done, of all) after each launch of rows.  cancel: a threading.Event, or
    a callable that says whether to stop; asked before each launch of rows, `Cancelled` is raised then.  What
    either of them raises itself passes through, and leaves the sequences as `Cancelled` does.
    """

    serial: bool = False
    chunk: int | None = None
    deep_rows: int | None = None
    deep: bool = True
    progress: Callable[[int, int], None] | None = None
    cancel: Event | Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        for name, most in (("chunk", MAX_CHUNK), ("deep_rows", 1 << 20)):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value <= most:
                raise UsageError(
                    f"{name} is outside its range", value=value, range=f"1..{most}",
                    do="leave it out for the engine's own",
                )
        for name in ("serial", "deep"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} is True or False", value=getattr(self, name))
        if self.progress is not None and not callable(self.progress):
            raise UsageError("progress is a callable of (tokens done, of all)", value=self.progress)
        if self.cancel is not None and not isinstance(self.cancel, Event) and not callable(self.cancel):
            raise UsageError("cancel is a threading.Event or a callable", value=self.cancel)


@dataclass
class PromptCounters:
    """Since the rank was opened.  Rows of prompts by path; deep_refusals: segments that wanted the deep pass
    and did not get it (Rank.deep_refused says why)."""

    deep_chunks: int = 0
    deep_rows: int = 0
    batched_rows: int = 0
    serial_rows: int = 0
    deep_refusals: int = 0

    def since(self, earlier: PromptCounters) -> dict[str, int]:
        return {name: value - getattr(earlier, name) for name, value in vars(self).items()}


@dataclass(eq=False)
class Prompt:
    """All pending tokens of a sequence.

    draw: draw a token after the last one.  keep_from: index in sequence.ids of the first token whose logits
    are handed to `keep` as (index, (rows, V) float32); None: of none.  token: the one drawn, or -1.
    error: the NaN that it would have been drawn from, where a PromptRun keeps those apart.
    """

    sequence: Sequence
    draw: bool = False
    keep_from: int | None = None
    keep: Callable[[int, npt.NDArray[np.float32]], None] | None = None
    token: int = field(default=-1, init=False)
    error: ContractError | None = field(default=None, init=False)

    def window(self, n_rows: int) -> Window:
        """The next n_rows rows."""
        first = self.sequence.n_done
        kept = self.keep_from is not None and self.keep_from < first + n_rows
        skip = max((self.keep_from or 0) - first, 0) if kept else 0
        last = n_rows == self.sequence.n_pending
        return Window(self.sequence, n_rows, draw=self.draw and last, logits=kept, skip=skip)

    def kept(self, i_id: int, logits: npt.NDArray[np.float32]) -> None:
        if self.keep is not None:
            self.keep(i_id, logits)


Segment = List[tuple[Prompt, int]]  # prompts in their order, each with how many of its pending rows


def run_prompts(rank: Rank, prompts: List[Prompt], prefill: Prefill, counters: PromptCounters) -> None:
    """Run every prompt to its last pending token.

    Raises UsageError (nothing run) on a chunk above the plan or a sequence given twice, Cancelled, and what
    run_round and run_chunk raise.
    """
    check_prefill(rank, prefill)
    if len({id(prompt.sequence) for prompt in prompts}) != len(prompts):
        raise UsageError("a sequence is given twice", sequences=len(prompts))
    run = PromptRun(rank, prompts, prefill, counters)
    while segment := run.segment():
        run.step(segment)


def check_prefill(rank: Rank, prefill: Prefill) -> None:
    """Raises UsageError on what is no Prefill, or one of a chunk that the rank's plan does not hold."""
    if not isinstance(prefill, Prefill):
        raise UsageError("prefill is a Prefill", value=prefill)
    if prefill.chunk is not None and prefill.chunk > rank.chunk:
        raise UsageError("chunk is above the engine's plan", chunk=prefill.chunk, plan=rank.chunk,
                         do="raise Limits.chunk or leave chunk out")


class PromptRun:
    """Prompts on their way into the state, one segment after the other.

    prefill: as `check_prefill` wants it.  apart: a draw from a NaN is left in its prompt, else it is raised.
    running: the prompts of the launch in progress, or of the one that raised.
    """

    def __init__(
        self, rank: Rank, prompts: List[Prompt], prefill: Prefill, counters: PromptCounters, *,
        apart: bool = False
    ) -> None:
        self.rank, self.prefill, self.counters, self.apart = rank, prefill, counters, apart
        self.prompts: list[Prompt] = []
        self.running: List[Prompt] = ()
        self.total = self.done = 0
        limits = rank.layout.limits
        self.chunk = int(prefill.chunk or rank.chunk)
        self.rows = 1 if prefill.serial else limits.prompt_rows
        self.deep_rows = int(prefill.deep_rows or limits.deep_rows)
        self.wants_deep = prefill.deep and not prefill.serial and limits.deep != "off"
        for prompt in prompts:
            self.add(prompt)

    def add(self, prompt: Prompt) -> None:
        """One more prompt, behind the others."""
        self.prompts.append(prompt)
        self.total += prompt.sequence.n_pending
        self.asked = False

    def drop(self, prompt: Prompt) -> None:
        """Forget a prompt, whether it came to its end or not."""
        self.prompts.remove(prompt)

    def segment(self, most: int | None = None) -> Segment:
        """The next rows, in the prompts' order, up to a chunk and to `most`; empty when none is pending."""
        room = self.chunk if most is None else min(most, self.chunk)
        found = []
        for prompt in self.prompts:
            n = min(prompt.sequence.n_pending, room)
            if n:
                found.append((prompt, n))
                room -= n
        return found

    def step(self, segment: Segment, rounds: int | None = None) -> None:
        """Run a segment that was just made; where it is not run deep, only its first `rounds` rounds.

        Raises as run_prompts.
        """
        n_rows = sum(n for _, n in segment)
        self.running = [prompt for prompt, _ in segment]
        if self._goes_deep(n_rows):
            self._deep(segment)
            self._told(n_rows)
            return
        for prompt, n in segment:
            used = self._batched(prompt, n, rounds)
            if rounds is not None:
                rounds -= used
                if not rounds:
                    return

    def _goes_deep(self, n_rows: int) -> bool:
        if not self.wants_deep or n_rows < self.deep_rows:
            return False
        self._check_cancel()
        if not self.asked:  # once a prompt: a refusal holds for the rest of it
            self.asked = True
            self.rank.want_deep()
        if self.rank.deep is None:
            self.counters.deep_refusals += 1
        return self.rank.deep is not None

    def _deep(self, segment: Segment) -> None:
        """The segment through the deep pass, in one walk."""
        windows = [prompt.window(n) for prompt, n in segment]
        starts = [prompt.sequence.n_done for prompt, _ in segment]

        def sink(i_window: int, first: int, block: npt.NDArray[np.float32]) -> None:
            segment[i_window][0].kept(starts[i_window] + first, block)

        result = run_chunk(self.rank, windows, sink, apart=self.apart)
        for i_window, (prompt, _) in enumerate(segment):
            if windows[i_window].draw:
                prompt.token, prompt.error = result.tokens[i_window], result.errors.get(i_window)
        self.counters.deep_chunks += 1
        self.counters.deep_rows += sum(window.n_rows for window in windows)

    def _batched(self, prompt: Prompt, n_rows: int, rounds: int | None) -> int:
        """The prompt's next rows in at most so many rounds; how many it took."""
        sequence = prompt.sequence
        end = sequence.n_done + n_rows
        self.running = [prompt]
        used = 0
        while sequence.n_done < end and used != rounds:
            self._check_cancel()
            first = sequence.n_done
            n = min(self.rows, end - first)
            if prompt.keep_from is not None and first < prompt.keep_from:
                n = min(n, prompt.keep_from - first)  # no head for rows nobody asked for
            window = prompt.window(n)
            result = run_round(self.rank, [window], apart=self.apart)
            if window.draw:
                prompt.token, prompt.error = result.tokens[0], result.errors.get(0)
            if result.logits is not None:
                prompt.kept(first + window.skip, result.logits)
            if self.prefill.serial:
                self.counters.serial_rows += n
            else:
                self.counters.batched_rows += n
            self._told(n)
            used += 1
        return used

    def _check_cancel(self) -> None:
        cancel = self.prefill.cancel
        if cancel is not None and (cancel.is_set() if isinstance(cancel, Event) else cancel()):
            raise Cancelled("the prompt was cancelled", done_tokens=self.done, prompt_tokens=self.total,
                            do="tokens already run stay in the sequence's state")

    def wait(self) -> None:
        """Until the launch in progress is done; a driver error is that of its prompts."""
        try:
            self.rank.stream.synchronize()
        except DriverError as error:
            for prompt in self.running:
                prompt.sequence.fail(error)
            raise

    def _told(self, n_rows: int) -> None:
        """The launch of n_rows rows of `running` is made."""
        self.done += n_rows
        if self.prefill.progress is not None or self.prefill.cancel is not None:
            self.wait()  # done means done, and a stop takes effect within one launch
        if self.prefill.progress is not None:
            self.prefill.progress(self.done, self.total)
