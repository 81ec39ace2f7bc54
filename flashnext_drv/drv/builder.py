"""Executables made from captured graphs, at once or on a thread of their own while the caller goes on.

Owned by engine/graphs.py.  What must stay true: a build ends with one executable or with one error, and what
it made half-way is closed; the thread has the context current only while it builds, and is joined before its
builder is closed; in the simulator a build runs at a moment that the seed chooses, with the caller waiting,
so that the same calls fail and the same rounds run eagerly in every run.

    caller   capture -> submit(build) ... eager rounds ... finished() -> [build] -> launch
    thread                  update or instantiate, upload, wait
"""

from __future__ import annotations

import queue
import random
import threading
from typing import Final

from ..errors import ContextLost, DriverError
from ..lifetime import Undo
from ..sim import control
from . import faults
from .context import Context, DriverOwner
from .graph import Graph, GraphExec
from .stream import Stream

__all__ = ["THREAD", "Build", "Builder"]

THREAD: Final = "graphs"  # what drv/faults calls the thread's work
_LATEST: Final = 8        # looks of the caller in which the simulator has a build run


class Build:
    """One executable being made.

    graph: stays the caller's.  spare: an executable to take over by an update where the driver can; else it
    is closed.  updated, refused: whether that worked, or was tried in vain.  error: why there is no
    executable.
    """

    def __init__(self, graph: Graph, spare: GraphExec | None = None) -> None:
        self.graph = graph
        self.spare = spare
        self.executable: GraphExec | None = None
        self.updated = self.refused = self.instantiated = self.uploaded = False
        self.error: BaseException | None = None

    def run(self, stream: Stream, wait: bool = False) -> None:
        """Make and upload it on `stream`.  Leaves `executable` or `error`; raises nothing."""
        try:
            with Undo() as undo:
                made = self._updated(undo)
                if made is None:
                    made = self.graph.instantiate()
                    undo.callback(made.close)
                    self.instantiated = True
                made.upload(stream)
                self.uploaded = True
                if wait:
                    stream.synchronize()
                undo.pop_all()
            self.executable = made
        except BaseException as error:  # belongs to whoever takes the build up
            self.error = error

    def drop(self) -> None:
        """Close what a build that is not wanted holds: executable or spare, and the graph."""
        with Undo() as undo:
            undo.callback(self.graph.close)
            for each in (self.spare, self.executable):
                if each is not None:
                    undo.callback(each.close)

    def _updated(self, undo: Undo) -> GraphExec | None:
        spare, self.spare = self.spare, None
        if spare is None:
            return None
        undo.callback(spare.close)
        try:
            self.updated = spare.update(self.graph)
        except DriverError as error:
            if isinstance(error, ContextLost) or self.graph.ctx.broken:
                raise
        self.refused = not self.updated
        if self.updated:
            return spare
        undo.pop_all()
        spare.close()
        return None


class Builder(DriverOwner):
    """Owns the thread, and the stream it uploads on; both come with the first build.

    In the simulator a build waits for a number of looks of the caller (`finished`, `close`) that the seed and
    its place in the row of builds give, and the caller waits while it runs.
    """

    def __init__(self, ctx: Context) -> None:
        super().__init__("graphs.builder", holds=(ctx,))
        self._ctx = ctx
        self._seeded = ctx.facts.is_simulator
        self._stream: Stream | None = None
        self._thread: threading.Thread | None = None
        self._asked: queue.SimpleQueue[Build | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[Build] = queue.SimpleQueue()
        self._ran = threading.Event()
        self._closing = False
        self._waiting: list[tuple[int, Build]] = []
        self._n_builds = 0

    def submit(self, build: Build) -> None:
        """Have the thread run `build`; from now on it is this owner's, until `finished` gives it back.

        Raises DriverError, with nothing taken, when the thread's stream cannot be made.
        """
        self.require_open()
        if self._thread is None:
            if self._stream is None:
                self._stream = Stream(self._ctx, "graphs.upload")
            thread = threading.Thread(target=self._work, name="flashnext-graphs", daemon=True)
            thread.start()
            self._thread = thread
        self._n_builds += 1
        if not self._seeded:
            self._asked.put(build)
            return
        choose = random.Random(control.counter("seed") << 20 | self._n_builds)
        self._waiting.append((choose.randrange(1, _LATEST), build))

    def finished(self) -> list[Build]:
        """The builds that have ended since the last look, in order."""
        self._advance()
        found = []
        while not self._ended.empty():
            found.append(self._ended.get())
        return found

    def _advance(self) -> None:
        """Simulator: one look has passed."""
        self._waiting = [(looks - 1, build) for looks, build in self._waiting]
        while due := next((each for each in self._waiting if each[0] <= 0), None):
            self._waiting.remove(due)
            self._ran.clear()
            self._asked.put(due[1])
            self._ran.wait()

    def _work(self) -> None:
        """The thread."""
        while (build := self._asked.get()) is not None:
            if not self._closing:
                self._run(build)
            self._ended.put(build)
            self._ran.set()

    def _run(self, build: Build) -> None:
        assert self._stream is not None
        try:
            with faults.working_as(THREAD), self._ctx.active():
                build.run(self._stream, wait=True)
        except BaseException as error:  # the context could not be made current, or not be left
            build.error = build.error or error

    def _release(self) -> None:
        """Join the thread; what it has begun ends first, and nothing it made is left."""
        self._advance()
        self._closing = True
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join()
        with Undo() as undo:
            if self._stream is not None:
                undo.callback(self._stream.close)
            for _, build in self._waiting:
                undo.callback(build.drop)
            while not self._ended.empty():
                undo.callback(self._ended.get().drop)
