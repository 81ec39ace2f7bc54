"""Continuous batching: several requests at a time over one engine, each with the tokens it has alone.

    submit -> queue -> slot and pages -> prompt, chunk by chunk -> decode visits of all -> done
    step()    sweep | admit | one chunk of prompts | sweep | one visit of decoding sequences | sweep

Driven by the server's engine thread, or by any program that calls `step` until `idle`.  One thread drives;
`submit`, `stop`, `cancel`, `drain`, `abort` and `stats` may be called from any.  What must stay true:
requests are admitted in the order they came, each with the pages of all the tokens it may come to hold, so
nobody is put out again; an error ends the requests that were in the launch and no other; whatever ends a
request, its slot and pages go back at once.
"""

from __future__ import annotations

import math
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from typing import Final

import numpy as np

from ..errors import (
    ContextLost,
    ContractError,
    Draining,
    DriverError,
    FlashNextError,
    QueueFull,
    UsageError,
)
from ..lifetime import Owner
from .counters import counted_since
from .decode import Ahead, run_ahead
from .engine import Engine
from .jobs import Job, Totals
from .prefill import Prefill, Prompt, PromptRun
from .requests import Event, Finish, Request, SchedulerStats, Ticket, Token, checked_request, tokens_held
from .round import Window, run_round
from .sequence import Edits

__all__ = ["CHUNK_ROWS", "Scheduler"]

CHUNK_ROWS: Final = 2048  # prompt rows between two decode visits, by default
_ROUNDS: Final = 16  # of prompts outside the deep pass, between two decode visits
_ROUNDS_ALONE: Final = 128  # the same while nothing decodes: how long a cancel may have to wait
_SETTLE_SECONDS: Final = 1.0
OnEvent = Callable[[Ticket, Event], None]


class Scheduler(Owner):
    """Up to max_streams requests at a time on one engine, which nothing else should use meanwhile.

    max_streams: 1..the engine's Limits.sequences and Limits.rows; None: the most.  max_queue: requests that
    may wait beside them.  chunk: prompt rows between two decode visits while others decode, None: 2,048 and
    at most the plan's chunk, which is taken while nothing decodes.
    on_event: called in `step` and `close`, by their thread; what it raises passes through, and the events
    behind come with the next step.
    An owner: the engine cannot be closed before it.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_streams: int | None = None,
        max_queue: int = 64,
        chunk: int | None = None,
        on_event: Callable[[Ticket, Event], None] | None = None,
    ) -> None:
        super().__init__("scheduler", holds=(engine,))
        limits, plan = engine.limits, engine.rank.chunk
        most = min(limits.sequences, limits.rows)
        self.max_streams = _in_range("max_streams", most if max_streams is None else max_streams, 1, most)
        self.max_queue = _in_range("max_queue", max_queue, 0, 1 << 20)
        self.chunk = min(CHUNK_ROWS, plan) if chunk is None else _in_range("chunk", chunk, 1, plan)
        self._engine, self._rank, self._on_event = engine, engine.rank, on_event
        self._lock = threading.Lock()  # of everything that other threads may see: queue, live, totals
        self._queue: deque[Job] = deque()
        self._live: list[Job] = []
        self._jobs: dict[int, Job] = {}  # by ticket, queued and live
        self._events: deque[tuple[Ticket, Event]] = deque()
        self._ids = count(1)
        self._draining, self._broken = False, ""
        self._totals = Totals()
        self._service_seconds = 0.0  # how long an admitted request takes, newer ones count more
        self._prompts = PromptRun(engine.rank, (), Prefill(), engine.prompts, apart=True)
        self._opened_with = self._settled = engine.counters()
        self._before: dict[str, int] | None = self._settled  # None: could not be read
        self._settled_at, self._unsettled = time.perf_counter(), False
        self._members: list[Job] = []  # who shares what is counted since then
        self._visiting: list[Job] = []  # whose launch or bookkeeping is in progress

    @property
    def idle(self) -> bool:
        """Nothing is queued, live or still to be told."""
        with self._lock:
            return not self._jobs and not self._events

    @property
    def broken(self) -> str:
        """Why nothing can run any more (a sticky driver error); "" while all is well."""
        return self._broken

    def submit(self, request: Request, tag: object = None) -> Ticket:
        """Take a request; it runs in `step`.  tag: the caller's own, kept in the ticket.

        Raises UsageError on a value outside its range, CapacityError when it could never fit, QueueFull,
        Draining, ContextLost when the scheduler is broken; nothing is taken then.
        """
        request = checked_request(request, self._rank.layout)
        with self._lock:
            self.require_open()
            if self._broken:
                raise ContextLost("submit", because=self._broken, do="close the engine and open it anew")
            if self._draining:
                raise Draining("the scheduler takes nothing new", because="it is draining")
            most = self.max_streams + self.max_queue
            if len(self._jobs) >= most:
                self._totals.refused += 1
                after = max(1, math.ceil(self._service_seconds / self.max_streams))
                raise QueueFull("the queue is full", retry_after_seconds=after, requests=len(self._jobs),
                                limit=most, do="try again later or raise max_queue")
            ticket = Ticket(next(self._ids), request, tag)
            job = Job(ticket, stamps={"submitted": time.perf_counter()})
            self._totals.submitted += 1
            self._jobs[ticket.id] = job
            self._queue.append(job)
            self._events.append((ticket, Event("queued", prompt_total=len(request.ids))))
        return ticket

    def stop(self, ticket: Ticket) -> None:
        """End a ticket with "stop": the tokens told so far are all that is wanted.

        Called from on_event, it ends behind the visit that made the event, also where that was to end it
        otherwise.
        """
        ticket.stopped = True

    def cancel(self, ticket: Ticket) -> None:
        """End a ticket with the next step, whatever it is doing; nothing when it is done."""
        ticket.cancelled = True

    def drain(self) -> None:
        """Take nothing new; what was taken is finished."""
        self._draining = True

    def abort(self) -> None:
        """Take nothing new, and cancel all there is with the next step."""
        with self._lock:
            self._draining = True
            for job in self._jobs.values():
                job.ticket.cancelled = True

    def step(self) -> bool:
        """One chunk of the prompts, if any is pending, then one visit of all that decode.

        Returns whether anything was done; False: wait for a submit or cancel.  An error of the engine ends
        the requests concerned and is told in their replies; KeyboardInterrupt and its like pass through.
        """
        self.require_open()
        done = self._deliver()
        for part in (self._sweep, self._admit, self._prompt, self._sweep, self._decode, self._sweep):
            try:
                done = part() or done
            except BaseException as error:  # between the launch and its bookkeeping: no state is known
                for job in self._visiting:
                    job.fail(error)
                raise
            self._visiting = []
            self._broken = self._broken or self._rank.ctx.broken
            self._deliver()
        return done

    def stats(self) -> SchedulerStats:
        """Where it stands.  A snapshot."""
        with self._lock:
            states = [job.ticket.state for job in self._live]
            return SchedulerStats(
                self.max_streams, self.max_queue, len(self._queue), states.count("prompt"),
                states.count("decode"), self._rank.slots.free_slots, self._rank.pages.free_pages,
                **{**vars(self._totals), "finished": dict(self._totals.finished)},
                counters=counted_since(self._opened_with, self._settled),
                draining=self._draining, broken=self._broken,
            )

    def _deliver(self) -> bool:
        told = False
        while self._events:
            ticket, event = self._events.popleft()
            told = True
            if self._on_event is not None:
                self._on_event(ticket, event)
        return told

    def _tell(self, job: Job, event: Event) -> None:
        self._events.append((job.ticket, event))

    def _sweep(self) -> bool:
        """End what is complete or cancelled, and what a round that was interrupted left behind."""
        complete = self._end_complete()
        with self._lock:
            jobs = list(self._jobs.values())
        if self._broken or self._rank.ctx.broken:
            self._end_all()
            return complete or bool(jobs)
        cancelled = [job for job in jobs if job.ticket.cancelled]
        for job in cancelled:
            self._finish(job, "cancelled")
        failed = [job for job in self._live if job.interrupted]
        for job in failed:
            self._finish(job, "error", FlashNextError("the request was interrupted", because=job.interrupted))
        return bool(complete or cancelled or failed)

    def _end_complete(self) -> bool:
        """End what has its last token.  Only after that was told: who hears it may find the text complete."""
        with self._lock:
            jobs = [job for job in self._jobs.values() if job.ends or job.ticket.stopped]
        for job in jobs:
            finish, error = ("stop", None) if job.ticket.stopped or job.ends is None else job.ends
            self._finish(job, finish, error)
        return bool(jobs)

    def _admit(self) -> bool:
        """Give the first in the queue slot and pages, as long as there are; nobody overtakes it."""
        admitted = False
        while (job := self._next()) is not None:
            admitted = True
            try:
                request = job.request
                edits = replace(request.edits or Edits(), min_new_tokens=request.min_new_tokens,
                                stop_ids=tuple(sorted(request.stop_ids)) if request.min_new_tokens else ())
                opened = self._engine.sequence(request.sampling, edits=edits)
                job.sequence = job.leave.enter_context(opened)
                self._rank.pages.reserve(job.sequence.i_slot, tokens_held(job.request))
                job.sequence.extend(job.request.ids)
            except Exception as error:
                self._fail([job], error)
                continue
            job.stamps["admitted"] = time.perf_counter()
            kept = None if job.request.logprobs is None else len(job.request.ids) - 1
            job.prompt = Prompt(job.sequence, draw=True, keep_from=kept, keep=job.keep)
            self._prompts.add(job.prompt)
            with self._lock:
                self._totals.queue_seconds += job.stamps["admitted"] - job.stamps["submitted"]
                job.ticket.state = "prompt"
            self._tell(job, Event("prompt", prompt_total=len(job.request.ids)))
        return admitted

    def _next(self) -> Job | None:
        """The first of the queue, moved to the live ones, if there is room for it."""
        with self._lock:
            if not self._queue or len(self._live) >= self.max_streams or not self._rank.slots.free_slots:
                return None
            if self._queue[0].pages > self._rank.pages.free_pages:
                return None
            job = self._queue.popleft()
            self._live.append(job)
            return job

    def _prompt(self) -> bool:
        """One chunk of the prompts that are pending."""
        alone = all(job.ticket.state != "decode" for job in self._live)
        segment = self._prompts.segment(None if alone else self.chunk)
        if not segment:
            return False
        of_prompt = {id(job.prompt): job for job in self._live}
        jobs = [of_prompt[id(prompt)] for prompt, _ in segment]
        before = [prompt.sequence.n_done for prompt, _ in segment]
        self._account(jobs)
        self._visiting = jobs
        started = time.perf_counter()
        try:
            self._prompts.step(segment, _ROUNDS_ALONE if alone else _ROUNDS)
            self._prompts.wait()
        except Exception as error:
            running = {id(prompt) for prompt in self._prompts.running}
            self._fail([job for job in jobs if id(job.prompt) in running], error)
        at = time.perf_counter()
        with self._lock:
            self._totals.prompt_chunks += 1
        for job, n_before in zip(jobs, before, strict=True):
            self._advanced(job, n_before, started, at)
        return True

    def _advanced(self, job: Job, n_before: int, started: float, at: float) -> None:
        """Tell what a chunk did to a prompt."""
        sequence, prompt = job.sequence, job.prompt
        if sequence is None or prompt is None or sequence.closed or sequence.n_done == n_before:
            return
        job.stamps.setdefault("first_chunk", started)
        job.prompt_chunks += 1
        with self._lock:
            self._totals.prompt_tokens += sequence.n_done - n_before
        self._tell(job, Event("prompt", prompt_done=sequence.n_done, prompt_total=len(job.request.ids)))
        if sequence.n_pending:
            return
        self._prompts.drop(prompt)
        job.prompt = None
        if prompt.error is None:
            job.ticket.state = "decode"
        self._take(job, [] if prompt.error else [prompt.token], at, prompt.error)

    def _decode(self) -> bool:
        """One visit of all sequences that decode."""
        jobs = [job for job in self._live if job.ticket.state == "decode"]
        if not jobs:
            return False
        self._account(jobs)
        self._visiting = jobs
        for job in jobs:
            job.visited(len(jobs))
        try:
            drawn = self._visit(jobs)
        except Exception as error:
            self._fail(jobs, error)
            return True
        at = time.perf_counter()
        with self._lock:
            self._totals.decode_visits += 1
            self._totals.decode_rounds += max(len(tokens) + (nan is not None) for tokens, nan in drawn)
        for job, (tokens, nan) in zip(jobs, drawn, strict=True):
            job.decoded += len(tokens)
            self._take(job, tokens, at, nan)
        return True

    def _visit(self, jobs: list[Job]) -> list[tuple[list[int], ContractError | None]]:
        """What each draws: several tokens, or one where somebody wants its logits."""
        asked = [(job, job.sequence) for job in jobs if job.sequence is not None]
        if all(job.request.logprobs is None for job in jobs):
            ahead = [Ahead(sequence, job.request.max_new_tokens - len(job.tokens), job.request.stop_ids)
                     for job, sequence in asked]
            drawn = run_ahead(self._rank, ahead, self._rank.layout.limits.steps_ahead)
            return [(one.tokens, one.error) for one in drawn]
        windows = [Window(sequence, draw=True, logits=job.request.logprobs is not None)
                   for job, sequence in asked]
        result = run_round(self._rank, windows, apart=True)
        rows = iter(result.logits if result.logits is not None else ())
        for job in jobs:
            job.logits = None if job.request.logprobs is None else next(rows)
        found: list[tuple[list[int], ContractError | None]] = []
        for i, token in enumerate(result.tokens):
            nan = result.errors.get(i)
            found.append(([] if nan else [token], nan))
        return found

    def _take(self, job: Job, drawn: list[int], at: float, error: ContractError | None) -> None:
        """New tokens of a visit, and perhaps why the request ends with them."""
        request = job.request
        tokens = tuple(Token.of(token, job.logits, request.logprobs or 0, at) for token in drawn)
        job.logits = None
        if tokens:
            job.stamps.setdefault("first_token", at)
            job.tokens += tokens
            with self._lock:
                self._totals.new_tokens += len(tokens)
            self._tell(job, Event("tokens", tokens))
        if error is not None:
            job.ends = ("error", error)
        elif drawn[-1] in request.stop_ids:
            job.ends = ("stop", None)
        elif len(job.tokens) >= request.max_new_tokens:
            job.ends = ("length", None)
        elif job.sequence is not None:
            job.sequence.extend(drawn[-1:])

    def _fail(self, jobs: Iterable[Job], error: Exception) -> None:
        for job in jobs:
            self._finish(job, "error", error)

    def _finish(self, job: Job, finish: Finish, error: BaseException | None = None) -> None:
        """Give back what the request holds and make its reply; once."""
        if job.ticket.state == "done":
            return
        if self._unsettled and any(job is member for member in self._members):
            self._settle()
        if job.prompt is not None:
            self._prompts.drop(job.prompt)
            job.prompt = None
        job.leave.close()
        job.stamps["done"] = time.perf_counter()
        job.ticket.reply = reply = job.reply(finish, error)
        with self._lock:
            job.ticket.state = "done"
            del self._jobs[job.ticket.id]
            self._queue = deque(each for each in self._queue if each is not job)
            self._live = [each for each in self._live if each is not job]
            self._totals.finished[finish] = self._totals.finished.get(finish, 0) + 1
            if finish in ("length", "stop") and "admitted" in job.stamps:
                took = job.stamps["done"] - job.stamps["admitted"]
                self._service_seconds = took if not self._service_seconds else (
                    0.8 * self._service_seconds + 0.2 * took)
        self._tell(job, Event("done", reply=reply, error=error))

    def _counters(self) -> dict[str, int] | None:
        """The engine's, or None where the driver refuses."""
        try:
            return self._engine.counters()
        except DriverError:
            return None

    def _account(self, jobs: list[Job]) -> None:
        """What is counted from now on is counted for these; read from the device when they change."""
        same = len(jobs) == len(self._members) and all(
            a is b for a, b in zip(jobs, self._members, strict=True))
        if not same or time.perf_counter() - self._settled_at > _SETTLE_SECONDS:
            self._settle()
            self._before = self._before or self._counters()
            self._members = list(jobs)
        self._unsettled = True

    def _settle(self) -> None:
        """Add what was counted since the last time to those who ran meanwhile."""
        before, now = self._before, self._counters()
        added = None if before is None or now is None else counted_since(before, now)
        for job in self._members:
            job.count(added)
        self._before, self._unsettled, self._settled_at = now, False, time.perf_counter()
        if now is not None:
            with self._lock:
                self._settled = now

    def _release(self) -> None:
        """Cancel all there is and tell it."""
        self._draining = True
        self._end_all()
        self._deliver()

    def _end_all(self) -> None:
        """Cancelled, or with the error that broke the context; but what is complete as that."""
        self._end_complete()
        self._broken = why = self._broken or self._rank.ctx.broken
        error = ContextLost("step", because=why, do="close the engine and open it anew") if why else None
        with self._lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            self._finish(job, "error" if error else "cancelled", error)


def _in_range(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise UsageError(f"{name} is an integer in its range", value=value, range=f"{low}..{high}",
                         do="raise the engine's Limits or lower it")
    return operator.index(value)
