"""One request between the engine's thread and the client's task.

    engine thread   sink(event) -> text, where a stop string may end it -> inbox -> wake the loop
    client's task   next() -> text, where nothing in it can end it -> piece

Made by server/answers.py.  What must stay true: the engine thread only ever appends to the inbox, so a client
that reads slowly, or not at all, holds up nobody; the inbox is bounded by the tokens that the request may
draw; a request that nobody waits for any more is cancelled, and its "done" is still taken in and counted.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from ..engine.engine import token_sha256
from ..engine.requests import Event, Reply, Request, Ticket, Token
from .metrics import Metrics
from .parse import Delta, ReplyStream
from .wire import Gone
from .worker import Ends, Worker

__all__ = ["Job", "Piece"]

_END_S: Final = 5.0
_REASONS = {"cancelled": "abort", "tool_calls": "stop"}  # of a reply's end -> vLLM's word


@dataclass(frozen=True)
class Piece:
    """What an event brought.

    tokens: those that belong to the reply; what was drawn behind a stop string does not.  deltas: text that
    became certain.  end: the reply is complete; see Job.reply and Job.finish.
    """

    kind: str
    tokens: tuple[Token, ...] = ()
    deltas: tuple[Delta, ...] = ()
    prompt_done: int = 0
    prompt_total: int = 0
    end: bool = False


class Job:
    """A request that was submitted.

    stream: its text side.  watch: text may end it, so it is looked at on the engine thread, and the request
    then ends with its visit.
    reply: once complete: as the client is told it, tokens behind a stop string left out and hashed without
    them.  finish: "stop", "length", "tool_calls", "cancelled" or "error".  error: what failed.
    """

    def __init__(
        self, worker: Worker, metrics: Metrics, request: Request, stream: ReplyStream, *, watch: bool = False
    ) -> None:
        self.request, self.stream = request, stream
        self.began_at = time.time()
        self.began = time.perf_counter()
        self.reply: Reply | None = None
        self.finish = ""
        self.error: BaseException | None = None
        self.prompt_done, self.n_tokens = 0, 0
        self.gone = False
        self._worker, self._metrics = worker, metrics
        self._watch = watch
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[tuple[Event, Piece | None]] = deque()
        self._news = asyncio.Event()
        self._told = False
        self._tokens: list[Token] = []
        self._ticket: Ticket | None = None
        self._finish_text = ""  # the reply's end as its text tells it
        self._closing = False
        self._end: asyncio.Task[None] | None = None  # the loop itself holds no task

    def submit(self) -> None:
        """Queue it.  Raises what Worker.submit raises."""
        self._ticket = self._worker.submit(self.request, self._sink)

    @property
    def state(self) -> str:
        """queued, prompt, decode or done."""
        return "done" if self.finish else "queued" if self._ticket is None else self._ticket.state

    def cancel(self) -> None:
        """Stop drawing; "done" follows."""
        if self._ticket is not None and not self.finish:
            self._worker.cancel(self._ticket)

    def leave(self) -> None:
        """The client is gone: `next` raises Gone from now on."""
        self.gone = True
        self.cancel()
        self._news.set()

    async def next(self, seconds: float) -> Piece | None:
        """The next piece, or None when none came in so many seconds.  Raises Gone."""
        piece = None if self.gone else await self._next(seconds)
        if self.gone:
            raise Gone
        return piece

    async def close(self) -> None:
        """Cancel what still runs and take in its end; texts are not made any more.

        An engine that does not come to the end of its step is not waited for: the end is taken in when it
        comes.
        """
        self._closing = True
        self.cancel()
        if self._ticket is not None and not self.finish:
            self._end = asyncio.create_task(self._take_end())
            await asyncio.wait((self._end,), timeout=_END_S)

    async def _take_end(self) -> None:
        while not self.finish:
            await self._next(60.0)

    async def _next(self, seconds: float) -> Piece | None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0.0)):
                while not self._inbox:
                    self._news.clear()  # before the look: whoever appends behind it wakes us
                    self._told = False
                    if not self._inbox:
                        await self._news.wait()
                    if self.gone and not self._inbox:
                        break
        if not self._inbox:
            return None
        event, piece = self._inbox.popleft()
        if piece is None:
            piece = Piece(event.kind) if self._closing else self._piece(event)
        self.n_tokens += len(piece.tokens)
        self.prompt_done = max(self.prompt_done, piece.prompt_done)
        return piece if event.kind != "done" else self._ended(event, piece)

    # On the engine thread.

    def _sink(self, event: Event) -> Ends:
        piece: Piece | None = None
        ends: Ends = ""
        if self._watch:
            try:
                piece = self._piece(event)
            except Exception as error:  # of ours: this request fails, the thread goes on
                self.error, ends = error, "cancelled"
                piece = Piece(event.kind, end=event.kind == "done")
            else:
                ends = "stop" if self.stream.stopped else ""
        self._inbox.append((event, piece))
        if not self._told:
            self._told = True
            with suppress(RuntimeError):  # the loop has ended: nobody waits
                self._loop.call_soon_threadsafe(self._news.set)
        return ends

    # On either.

    def _piece(self, event: Event) -> Piece:
        """The event with its text; called once an event, in order."""
        stream = self.stream
        if event.kind == "tokens":
            before = stream.n_tokens
            deltas = stream.push(token.id for token in event.tokens)
            tokens = event.tokens[: stream.n_tokens - before]
            self._tokens += tokens
            return Piece("tokens", tokens, tuple(deltas))
        if event.kind == "done" and event.reply is not None:
            deltas, self._finish_text = stream.finish(event.reply.finish)
            return Piece("done", deltas=tuple(deltas), end=True)
        return Piece(
            event.kind,
            prompt_done=event.prompt_done,
            prompt_total=event.prompt_total,
            end=event.kind == "done",
        )

    def _ended(self, event: Event, piece: Piece) -> Piece:
        reply = event.reply
        if reply is None or not self.stream.stopped:  # what went wrong behind its end is not its business
            self.error = self.error or event.error
        finish = self._finish_text or ("error" if reply is None else reply.finish)
        self.finish = "error" if self.error is not None else finish
        if reply is None:
            return piece
        n = len(self._tokens) if self.stream.stopped else len(reply.tokens)
        behind = len(reply.tokens) - n
        if behind:  # drawn behind a stop string: no part of the reply
            tokens = reply.tokens[:n]
            reply = replace(
                reply,
                tokens=tokens,
                token_at=reply.token_at[:n],
                new_sha256=token_sha256(tokens),
                sha256=token_sha256([*self.request.ids, *tokens]),
            )
        self.reply = replace(reply, counters={**reply.counters, "new_tokens": n, "drawn_behind_stop": behind})
        self.n_tokens = n
        self._metrics.finished(self.reply, _REASONS.get(self.finish, self.finish), self.request)
        return piece

    def facts(self) -> dict[str, Any]:
        """For the log and /status."""
        found: dict[str, Any] = {
            "prompt_tokens": len(self.request.ids),
            "new_tokens": self.n_tokens,
            "finish": self.finish or self.state,
        }
        reply = self.reply
        if reply is None:
            return found
        stamps, at = reply.stamps, reply.token_at
        for name, first, last in (("queue_ms", "submitted", "admitted"), ("run_ms", "submitted", "done")):
            if first in stamps and last in stamps:
                found[name] = round(1e3 * (stamps[last] - stamps[first]), 3)
        if at and "submitted" in stamps:
            found["ttft_ms"] = round(1e3 * (at[0] - stamps["submitted"]), 3)
        return found | {"token_sha256": reply.sha256}
