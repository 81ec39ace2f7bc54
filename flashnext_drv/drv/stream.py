"""Streams and events, and waits that end.

Made by `engine/rank.py`, the contract runner and the tests.  What must stay true: a stream never waits for
the default stream; a bounded wait returns within its time whatever the device does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from ..errors import DriverError
from ..lifetime import Undo
from . import api
from .context import Context, DriverOwner

__all__ = ["Event", "Stream", "elapsed_ms"]

_NON_BLOCKING: Final = 1
_NO_TIMING: Final = 2
_SPINS: Final = 2000        # queries before the wait begins to sleep: short waits stay short
_NAP_S: Final = 50e-6


class Stream(DriverOwner):
    """Owns one stream of `ctx`."""

    def __init__(self, ctx: Context, name: str) -> None:
        super().__init__(name, holds=(ctx,))
        self.ctx = ctx
        with Undo() as undo:
            with ctx.active():
                self.handle = api.cuStreamCreate(_NON_BLOCKING)
                undo.callback(ctx.free, api.cuStreamDestroy, self.handle, ctx.ledger.add(name, "stream"))
            ctx.stream_names[int(self.handle)] = name
            self._undo = undo.pop_all()

    def record(self, event: Event) -> None:
        """The event is done when all work given to this stream so far is done."""
        with self.ctx.active():
            api.cuEventRecord(event.handle, self.handle)

    def wait(self, event: Event) -> None:
        """Work given from here on starts after the event's last record."""
        with self.ctx.active():
            api.cuStreamWaitEvent(self.handle, event.handle)

    def query(self) -> bool:
        """Whether all work is done."""
        with self.ctx.active():
            return api.cuStreamQuery(self.handle)

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait until all work is done.  Raises DriverError after `timeout_s` seconds (None: no limit)."""
        with self.ctx.active():
            if timeout_s is None:
                api.cuStreamSynchronize(self.handle)
            else:
                _wait(lambda: api.cuStreamQuery(self.handle), "cuStreamQuery", self.name, timeout_s)

    def _release(self) -> None:
        self.ctx.stream_names.pop(int(self.handle), None)
        self._undo.close()


class Event(DriverOwner):
    """Owns one event of `ctx`.  timing: it can be an end of `elapsed_ms`."""

    def __init__(self, ctx: Context, name: str, timing: bool = False) -> None:
        super().__init__(name, holds=(ctx,))
        self.ctx = ctx
        self.timing = timing
        with Undo() as undo:
            with ctx.active():
                self.handle = api.cuEventCreate(0 if timing else _NO_TIMING)
                undo.callback(ctx.free, api.cuEventDestroy, self.handle, ctx.ledger.add(name, "event"))
            self._undo = undo.pop_all()

    def query(self) -> bool:
        """Whether the last record is done; an event never recorded is done."""
        with self.ctx.active():
            return api.cuEventQuery(self.handle)

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait for the last record.  Raises DriverError after `timeout_s` seconds (None: no limit)."""
        with self.ctx.active():
            if timeout_s is None:
                api.cuEventSynchronize(self.handle)
            else:
                _wait(lambda: api.cuEventQuery(self.handle), "cuEventQuery", self.name, timeout_s)

    def _release(self) -> None:
        self._undo.close()


def elapsed_ms(start: Event, end: Event) -> float:
    """Milliseconds between the records of two timing events that are both done."""
    with start.ctx.active():
        return api.cuEventElapsedTime(start.handle, end.handle)


def _wait(done: Callable[[], bool], call: str, name: str, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    n_queries = 0
    while not done():
        n_queries += 1
        if time.monotonic() > end:
            raise DriverError(call, 0, "NOT_READY for too long", of=name, timeout_s=timeout_s,
                              do="the device hangs or has more work than the limit allows")
        if n_queries > _SPINS:
            time.sleep(_NAP_S)
