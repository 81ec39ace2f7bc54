"""One request's answer: submitted, followed, and written as a stream of events or as one body.

Called by the routes of app.py.  What must stay true: a status is sent only when the request was taken; a
client that leaves, stalls or runs out of time cancels its request, in the queue and in the prompt too; the
stream ends with [DONE] exactly when the reply is complete; chunks and bodies are made by replies.py alone.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ..engine.requests import Token
from ..errors import FlashNextError
from . import replies
from .fields import ApiError
from .job import Job, Piece
from .parse import Delta
from .schema import Ask, Model
from .wire import Gone, Json, Note, Settings, error_answer

__all__ = ["Answer", "Streamed", "Whole"]

_PREFIX: Final = {"chat": "chatcmpl", "completion": "cmpl", "ids": "gen"}
_LONG_S: Final = 3600.0
_DONE: Final = b"data: [DONE]\n\n"
_COMMENT: Final = b": keep-alive\n\n"
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer(Response):
    """What the two forms share.

    id: of the reply, for bodies and /v1/cancel.  note: its log line.  running: where the answer stands, by
    its id, as long as it lasts.
    """

    def __init__(
        self,
        job: Job,
        ask: Ask,
        model: Model,
        settings: Settings,
        note: Note,
        device: str,
        running: dict[str, Answer],
    ) -> None:
        super().__init__()
        self.job, self.ask, self.note = job, ask, note
        self.id = f"{_PREFIX[ask.kind]}-{secrets.token_hex(12)}"
        self.cancelled = False  # by /v1/cancel
        self._model, self._settings, self._device = model, settings, device
        self._running = running
        self._head = replies.Head(ask.kind, self.id, int(job.began_at), model.name)
        self._writer = (
            None
            if ask.logprobs is None
            else replies.LogprobWriter(model.text, ask.kind, ask.logprobs, len(ask.echo))
        )
        limit = settings.request_seconds
        self._until = job.began + limit if limit else float("inf")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        self._running[self.id] = self
        try:
            await self._answer(scope, receive, send)
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher
            await self.job.close()
            del self._running[self.id]
            self.note.facts.update(self.job.facts())

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def _watch(self, receive: Receive) -> None:
        """Until the client leaves.  What it sends meanwhile is not looked at."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.job.leave()

    async def _pieces(self, beat: float) -> AsyncIterator[Piece | None]:
        """Pieces to the last; None after `beat` silent seconds.  Raises Gone, ApiError (time, stop), and
        what the engine failed with."""
        while True:
            left = self._until - time.perf_counter()
            if left <= 0:
                raise ApiError(
                    504,
                    f"the request took longer than {self._settings.request_seconds:g} s",
                    code="request_timeout",
                )
            piece = await self.job.next(min(beat, left))
            if piece is None or not piece.end:
                yield piece
                continue
            if self.job.error is not None:
                raise self.job.error
            if self.job.finish == "cancelled" and not self.cancelled:
                raise ApiError(503, "the server is stopping", code="server_stopping")
            yield piece
            return

    def _usage(self) -> dict[str, Any]:
        job = self.job
        return replies.usage(len(self.ask.prompt_ids), job.n_tokens, 0, job.stream.reasoning_tokens)

    def _runtime(self) -> dict[str, Any]:
        assert self.job.reply is not None
        return replies.runtime_block(self.job.reply, self.ask.seed, self._device)

    def _stop_reason(self) -> str | int | None:
        """The stop string, or the id that this request was to stop at and others are not."""
        job = self.job
        if job.stream.stop_reason is not None:
            return job.stream.stop_reason
        last = job.reply.tokens[-1] if job.reply is not None and job.reply.tokens else None
        return last if last in job.request.stop_ids and last not in self._model.stop_ids else None


class Whole(Answer):
    """One JSON body."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        tokens: list[Token] = []
        deltas = [Delta("content", self.ask.echo)] if self.ask.echo else []
        async for piece in self._pieces(_LONG_S):
            if piece is not None:
                tokens += piece.tokens
                deltas += piece.deltas
        ask, head, finish = self.ask, self._head, self.job.finish
        usage, runtime = self._usage(), self._runtime()
        body: dict[str, Any]
        if ask.kind == "ids":
            body = replies.generate_reply(head, tokens, finish, usage, runtime, ask.logprobs)
        else:
            told: dict[str, Any] = {
                "usage": usage,
                "runtime": runtime,
                "stop_reason": self._stop_reason(),
                "logprobs": None if self._writer is None else self._writer.write(tokens),
                "token_ids": [token.id for token in tokens] if ask.return_ids else None,
                "prompt_ids": ask.prompt_ids if ask.return_ids and self._model.text is not None else None,
            }
            if ask.kind == "chat":
                body = replies.chat_reply(head, deltas, finish, **told)
            else:
                body = replies.completion_reply(head, "".join(d.text for d in deltas), finish, **told)
        await Json(body)(scope, receive, send)


class Streamed(Answer):
    """Server-sent events."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self._abort = send, scope["state"].get("abort")
        self.note.facts["stream"] = True
        await self._put({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        opened = False
        try:
            async for piece in self._pieces(self._settings.keepalive_seconds):
                if piece is None:
                    await self._say(_COMMENT)
                    continue
                chunks: list[dict[str, Any]] = []
                if piece.kind == "prompt" and self.ask.progress:
                    chunks.append(self._progress(piece))
                if not opened and (piece.tokens or piece.end):
                    opened = True
                    chunks += self._opening()
                chunks += self._chunks(piece)
                if piece.end:
                    chunks += self._ending()
                await self._say(b"".join(map(_event, chunks)) + (_DONE if piece.end else b""))
        except Gone:
            raise
        except Exception as error:  # the status is out: what went wrong goes into the stream
            status, body, _ = error_answer(error, self.note.request_id)
            self.note.facts |= {"error": f"{status}: {error}"}
            await self._say(_event(body))
            await self._put({"type": "http.response.body", "body": b""})
            if status == 500 and not isinstance(error, FlashNextError):
                raise
            return
        await self._put({"type": "http.response.body", "body": b""})

    def _opening(self) -> list[dict[str, Any]]:
        ask, head = self.ask, self._head
        told = {"prompt_token_ids": list(ask.prompt_ids)} if ask.return_ids and self._model.text else {}
        if ask.kind == "chat":
            return [replies.chat_opening(head) | told]
        if ask.echo:
            return [chunk | told for chunk in replies.completion_chunks(head, [Delta("content", ask.echo)])]
        return []

    def _chunks(self, piece: Piece) -> list[dict[str, Any]]:
        ask, head, tokens = self.ask, self._head, piece.tokens
        if ask.kind == "ids":
            return [replies.generate_chunk(head, tokens, ask.logprobs)] if tokens else []
        logprobs = self._writer.write(tokens) if self._writer is not None and tokens else None
        ids = [token.id for token in tokens] if ask.return_ids else None
        make = replies.chat_chunks if ask.kind == "chat" else replies.completion_chunks
        return make(head, piece.deltas, logprobs, ids)

    def _ending(self) -> list[dict[str, Any]]:
        ask, head, finish = self.ask, self._head, self.job.finish
        usage, runtime = self._usage(), self._runtime()
        if ask.kind == "ids":
            return [replies.generate_end(head, finish, usage, runtime)]
        end = replies.chat_end if ask.kind == "chat" else replies.completion_end
        if ask.include_usage:
            return [end(head, finish, self._stop_reason()), replies.usage_chunk(head, usage, runtime)]
        return [end(head, finish, self._stop_reason(), runtime=runtime)]

    def _progress(self, piece: Piece) -> dict[str, Any]:
        chunk = replies.progress_chunk(self._head, piece.prompt_done, piece.prompt_total)
        chunk["prompt_progress"]["time_ms"] = round(1e3 * (time.perf_counter() - self.job.began))
        return chunk

    async def _say(self, body: bytes) -> None:
        if body:
            await self._put({"type": "http.response.body", "body": body, "more_body": True})

    async def _put(self, message: Message) -> None:
        """Send, as long as the client takes it within the time that it has for that."""
        try:
            async with asyncio.timeout(self._settings.stall_seconds):
                await self._send(message)
        except TimeoutError:
            self.note.facts["error"] = f"the client read nothing for {self._settings.stall_seconds:g} s"
            self.job.leave()
            if self._abort is not None:  # nothing else ends a connection whose buffers nobody empties
                self._abort()
            raise Gone from None


def _event(body: dict[str, Any]) -> bytes:
    return (
        b"data: "
        + json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
            "utf-8", "backslashreplace"
        )
        + b"\n\n"
    )
