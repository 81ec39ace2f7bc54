"""The engine's thread: opens the pack, runs the scheduler step by step, closes.

    HTTP tasks                         engine thread
    submit, cancel, stats  ----------> Scheduler (its own short lock), wake
    sink(event) -> ends    <---------- on_event, inside step(): must return at once

Made by cli/serve.py and by programs that embed the server; used by server/app.py from the event loop.  What
must stay true: nobody but this thread touches the engine; it waits for no client and for no other thread but
when it has nothing to do; whoever submitted gets exactly one event "done", also when the engine breaks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, Final, Literal, TypeVar

from ..engine.engine import Engine
from ..engine.requests import Event, Request, SchedulerStats, Ticket
from ..engine.scheduler import Scheduler
from ..errors import Cancelled, ContextLost, Draining, UsageError

__all__ = ["CLOSED", "DRAINING", "FAILED", "LOADING", "READY", "STATES", "Ends", "Loading", "Sink", "Worker"]

T = TypeVar("T")
Ends = Literal["", "stop", "cancelled"]  # how a request is to end now; "": it goes on
Sink = Callable[[Event], Ends]
Loading = tuple[str, int, int]  # what is being loaded, bytes done, bytes of all
Opener = Callable[[Callable[[str, int, int], None]], AbstractContextManager[Engine]]

LOADING: Final = "loading"
READY: Final = "ready"
DRAINING: Final = "draining"
CLOSED: Final = "closed"
FAILED: Final = "failed"
STATES: Final = (LOADING, READY, DRAINING, CLOSED, FAILED)


class Worker:
    """One engine, its scheduler and the thread that drives both.

    open_engine: called on the thread with a progress callback; gives a context manager of an engine, such as
    the engine itself, that is left at the end.  max_streams: sequences at one time; max_queue: requests that
    wait beside them.  chunk: prompt rows between two rounds while others decode; None is the scheduler's own.
    state: "loading", "ready", "draining", "closed" or "failed"; error: why it failed.
    """

    def __init__(
        self, open_engine: Opener, *, max_streams: int, max_queue: int, chunk: int | None = None
    ) -> None:
        self._open_engine = open_engine
        self._settings: dict[str, Any] = {"max_streams": max_streams, "max_queue": max_queue, "chunk": chunk}
        self.max_streams, self.max_queue = max_streams, max_queue
        self.state = LOADING
        self.error: BaseException | None = None
        self.loading: Loading = ("", 0, 0)
        self.facts: dict[str, Any] = {}  # of the opened engine, for status: device, seconds, sizes
        self.began = time.perf_counter()
        self._scheduler: Scheduler | None = None
        self._engine: Engine | None = None
        self._last: SchedulerStats | None = None
        self._sinks: set[Sink] = set()  # of requests whose "done" has not come
        self._asked: deque[tuple[Future[Any], Callable[[Engine], Any]]] = deque()
        self._lock = threading.Lock()  # state changes against what is asked; never held while a step runs
        self._wake = threading.Event()
        self._settled = threading.Event()  # no longer loading
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="flashnext-engine", daemon=True)

    # What any thread may call.

    def start(self) -> Worker:
        """Start the thread; loading goes on behind this call."""
        self._thread.start()
        return self

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Wait until loading has ended, well or not; whether the engine is ready."""
        self._settled.wait(timeout)
        return self.state == READY

    def submit(self, request: Request, sink: Sink) -> Ticket:
        """Queue a request; `sink` gets its events, "done" last, and returns at once how it is to end now.

        Raises what Scheduler.submit raises, and Draining while the engine is not ready.
        """
        scheduler = self._scheduler
        if scheduler is None or self.state != READY:
            raise Draining(f"the engine is {self.state}", do="ask /ready and come back")
        self._sinks.add(sink)  # events may come before submit returns
        try:
            ticket = scheduler.submit(request, tag=sink)
        except BaseException as error:
            self._sinks.discard(sink)
            if isinstance(error, UsageError) and self.state != READY:  # it was closed since the look above
                raise Draining(f"the engine is {self.state}") from error
            raise
        self._wake.set()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Stop a request at the next step, in whatever phase it is; its "done" follows."""
        if self._scheduler is not None:
            self._scheduler.cancel(ticket)
            self._wake.set()

    def ask(self, what: Callable[[Engine], T]) -> Future[T]:
        """Have the engine thread call what(engine) between two steps.  The future fails with Draining when
        the engine is not open."""
        future: Future[T] = Future()
        with self._lock:
            if self._engine is not None and self.state in (READY, DRAINING):
                self._asked.append((future, what))
                self._wake.set()
                return future
        future.set_exception(Draining(f"the engine is {self.state}"))
        return future

    def stats(self) -> SchedulerStats | None:
        """The scheduler's, or None while there is none; the last ones after the end."""
        return self._last or (None if self._scheduler is None else self._scheduler.stats())

    def drain(self) -> None:
        """Take no more requests, finish those that are here, close the engine, end the thread."""
        with self._lock:
            if self.state in (LOADING, READY):
                self.state = DRAINING
            self._stop.set()
        if self._scheduler is not None:
            self._scheduler.drain()
        self._wake.set()

    def abort(self) -> None:
        """As drain, but everything that is here is cancelled at the next step."""
        self.drain()
        if self._scheduler is not None:
            self._scheduler.abort()
        self._wake.set()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread's end; whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # The thread.

    def _main(self) -> None:
        failure: BaseException | None = None
        try:
            with ExitStack() as leave:
                engine = leave.enter_context(self._open_engine(self._progress))
                leave.callback(self._closing)
                scheduler = leave.enter_context(Scheduler(engine, on_event=self._on_event, **self._settings))
                self._opened(engine, scheduler)
                try:
                    self._run(engine, scheduler)
                except BaseException:
                    self.state = FAILED  # at once: closing may take a while
                    raise
        except BaseException as error:
            failure = error
        if isinstance(failure, Cancelled) and self._stop.is_set():
            failure = None  # loading was stopped, as asked
        with self._lock:
            self.error, self.state = failure, CLOSED if failure is None else FAILED
            asked, self._asked = list(self._asked), deque()
        for future, _ in asked:
            if not future.set_running_or_notify_cancel():  # who asked waits no longer
                continue
            future.set_exception(Draining(f"the engine is {self.state}"))
        self._settled.set()
        self._give_up(failure)

    def _progress(self, what: str, done: int, total: int) -> None:
        if self._stop.is_set():
            raise Cancelled("loading was stopped", done_bytes=done, total_bytes=total)
        self.loading = (what, done, total)

    def _opened(self, engine: Engine, scheduler: Scheduler) -> None:
        limits = engine.limits
        self.facts = {
            "device": str(engine.facts),
            "open_seconds": round(engine.open_seconds, 3),
            "context_tokens": limits.context_tokens,
            "max_streams": scheduler.max_streams,
            "max_queue": scheduler.max_queue,
            "round_rows": scheduler.chunk,
            "deep_rows": limits.deep_rows,
            "expert_lines": limits.expert_lines,
            "pages": engine.rank.layout.n_pages,
            "graphs": limits.graph,
        }
        with self._lock:
            self._engine, self._scheduler = engine, scheduler
            if self.state == LOADING:
                self.state = READY
        self._settled.set()
        if self._stop.is_set():
            scheduler.drain()

    def _closing(self) -> None:
        """The scheduler is closed, the engine is not yet."""
        with self._lock:
            self._last, self._engine = self.stats(), None

    def _run(self, engine: Engine, scheduler: Scheduler) -> None:
        """Steps until stopped and idle."""
        while True:
            self._wake.clear()  # before the look: whoever comes later sets it again
            self._answer(engine)
            if scheduler.step():
                continue
            if scheduler.broken:
                raise ContextLost("serve", because=scheduler.broken, do="start the server again")
            if self._stop.is_set() and scheduler.idle:
                return
            self._wake.wait()

    def _answer(self, engine: Engine) -> None:
        while self._asked:
            future, what = self._asked.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(what(engine))
            except Exception as error:
                future.set_exception(error)

    def _on_event(self, ticket: Ticket, event: Event) -> None:
        sink: Any = ticket.tag
        if event.kind == "done":
            self._sinks.discard(sink)
            sink(event)
        elif (ends := sink(event)) and self._scheduler is not None:
            if ends == "stop":
                self._scheduler.stop(ticket)
            else:
                self._scheduler.cancel(ticket)

    def _give_up(self, error: BaseException | None) -> None:
        """Whoever still waits is told that nothing more comes."""
        lost = error or Draining("the server has stopped")
        while self._sinks:
            with suppress(KeyError):
                self._sinks.pop()(Event("done", error=lost))
