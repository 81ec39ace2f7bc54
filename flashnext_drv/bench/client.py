"""The measuring client: token ids to a server by HTTP, its stream back with a stamp for every token.

Called by the measurements of this folder.  Standard library alone, one connection a request.  What must stay
true: nothing a server says is repaired or assumed: what it left out is None, and a reply that broke off is
kept as far as it came with the reason in `error`.  Stamps are seconds of this process's perf_counter, taken
when the bytes that ended the token's event had been read.
"""

from __future__ import annotations

import http.client
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import urlsplit

from ..errors import FlashNextError, RemoteError, UsageError
from .sse import Event, EventParser

__all__ = ["Ask", "Cut", "Reply", "Target", "arriving", "ask", "each_alone", "get_json", "post_json",
           "together"]

_PIECE_BYTES: Final = 1 << 16
_MOST_BODY_BYTES: Final = 256 << 20
_DONE: Final = "[DONE]"


@dataclass(frozen=True)
class Target:
    """A server.  url: http://host:port[/path].  key: API key.  timeout_s: longest silence on a connection."""

    url: str
    key: str = field(default="", repr=False)
    timeout_s: float = 900.0
    model: str = ""

    def connection(self) -> tuple[http.client.HTTPConnection, str]:
        """A connection that is not open yet, and the path before routes.  Raises UsageError."""
        try:
            parts = urlsplit(self.url)
            port = parts.port
            (parts.hostname or "").encode("idna")
        except ValueError as error:
            raise UsageError("the server's address has no usable host or port", url=self.url,
                             because=str(error)) from error
        if parts.scheme != "http" or not parts.hostname or parts.query or parts.fragment:
            raise UsageError("a server's address is http://host:port", url=self.url)
        made = http.client.HTTPConnection(parts.hostname, port or 80, timeout=self.timeout_s)
        return made, parts.path.rstrip("/")

    def headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return {"Content-Type": "application/json", "Accept": "text/event-stream, application/json", **key}


@dataclass(frozen=True)
class Ask:
    """One request: prompt ids, and exactly so many new ones (no id stops it).

    text: a user's turn instead, sent through the chat endpoint; ids are then empty, and those of the reply's
    `ask` are the ones that the server made of it.
    """

    ids: tuple[int, ...]
    new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    text: str = ""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.text else "/v1/generate"

    def body(self, model: str = "") -> dict[str, Any]:
        """Of a POST to `path`: token ids out, streamed, usage and runtime block at the end."""
        asked: dict[str, Any] = {"ids": list(self.ids), "max_new_tokens": self.new_tokens}
        if self.text:
            asked = {"messages": [{"role": "user", "content": self.text}], "max_tokens": self.new_tokens,
                     "return_token_ids": True, "stream_options": {"include_usage": True}}
        return {
            **({"model": model} if model else {}),
            **asked,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": True,
        }


@dataclass(frozen=True)
class Cut:
    """Where a request is given up, and how.

    after_tokens: so many tokens have come; 0 with after_s: so many seconds after it was sent, whatever came.
    when: or as soon as this says so (asked every few milliseconds while nothing else is waited for).
    how: "disconnect" closes the connection; "cancel" asks the server to stop by the request's id and reads
    on to the stream's end.
    """

    after_tokens: int = 0
    after_s: float = 0.0
    how: str = "disconnect"
    when: Callable[[], bool] | None = None


@dataclass(frozen=True)
class Reply:
    """What came back.

    tokens, token_at: new ids and the client's stamp of each.  sent_at, done_at: before the request was sent,
    behind the last byte.  finished: the stream's end was announced.  usage, runtime: as the server told them,
    None where it did not.  error: "" or what went wrong.  cut: "" or how it was given up.
    """

    ask: Ask
    status: int = 0
    tokens: tuple[int, ...] = ()
    token_at: tuple[float, ...] = ()
    sent_at: float = 0.0
    done_at: float = 0.0
    finished: bool = False
    finish: str | None = None
    usage: Mapping[str, Any] | None = None
    runtime: Mapping[str, Any] | None = None
    request_id: str = ""
    error: str = ""
    cut: str = ""
    retry_after_s: float | None = None


def get_json(target: Target, path: str) -> tuple[int, Any]:
    """(status, parsed body; its text where it is no JSON).  Raises RemoteError when nothing answers."""
    return _exchange(target, "GET", path, None)


def post_json(target: Target, path: str, body: Any) -> tuple[int, Any]:
    """As `get_json`, for POST."""
    return _exchange(target, "POST", path, json.dumps(body).encode())


def ask(target: Target, request: Ask, cut: Cut | None = None) -> Reply:
    """Send one request and read its stream to the end, or to the cut.  Errors of the server and of the
    connection are in the reply; only a wrong address raises.
    """
    connection, prefix = target.connection()
    body = json.dumps(request.body(target.model)).encode()
    reading = _Reading(target, request, connection, cut)
    try:
        connection.connect()
        reading.socket = connection.sock
        reading.sent_at = time.perf_counter()
        headers = target.headers() | {"X-Request-Id": reading.request_id}
        connection.request("POST", f"{prefix}{request.path}", body, headers)
        reading.run()
    except (OSError, http.client.HTTPException, RemoteError) as error:
        if not (reading.cut and reading.cut_how == "disconnect"):
            reading.error = reading.error or f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return reading.reply(time.perf_counter())


def together(
    target: Target, requests: Sequence[Ask], width: int = 0, cuts: Sequence[Cut | None] = ()
) -> list[Reply]:
    """All requests at once, or at most `width` of them at a time in their order; replies in their order.

    cuts: one for each request, or none.  A thread a stream; all begin behind one barrier.
    """
    n_workers = min(width or len(requests), len(requests))
    replies: list[Reply | None] = [None] * len(requests)
    order = iter(range(len(requests)))
    lock, begin = threading.Lock(), threading.Barrier(max(n_workers, 1))

    def work() -> None:
        begin.wait()
        while True:
            with lock:
                i = next(order, None)
            if i is None:
                return
            replies[i] = ask(target, requests[i], cuts[i] if cuts else None)

    threads = [threading.Thread(target=work, name=f"client-{i}", daemon=True) for i in range(n_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [reply if reply is not None else Reply(request, error="the client's thread ended")
            for reply, request in zip(replies, requests, strict=True)]


def arriving(
    target: Target, requests: Sequence[Ask], after_s: Sequence[float], cuts: Sequence[Cut | None] = ()
) -> tuple[list[Reply], float]:
    """Each request so many seconds after the start, rising, however many still run; replies in their order,
    and how late the latest was sent, seconds.  A thread a request."""
    replies = [Reply(request, error="the client's thread ended") for request in requests]

    def work(i: int) -> None:
        replies[i] = ask(target, requests[i], cuts[i] if cuts else None)

    threads, began = [], time.perf_counter()
    for i, due in enumerate(after_s):
        time.sleep(max(began + due - time.perf_counter(), 0.0))
        threads.append(threading.Thread(target=work, args=(i,), name=f"client-{i}", daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    late = (reply.sent_at - began - due for reply, due in zip(replies, after_s, strict=True))
    return replies, max(late, default=0.0)


def each_alone(target: Target, requests: Sequence[Ask]) -> list[Reply]:
    """The requests one after the other."""
    return [ask(target, request) for request in requests]


class _Reading:
    """One reply while it is read."""

    def __init__(
        self, target: Target, request: Ask, connection: http.client.HTTPConnection, cut: Cut | None
    ) -> None:
        self.target, self.request, self.connection, self.wanted = target, request, connection, cut
        self.socket: socket.socket | None = None
        self.status, self.sent_at = 0, time.perf_counter()
        self.tokens: list[int] = []
        self.token_at: list[float] = []
        self.finished = False
        self.finish: str | None = None
        self.usage: Mapping[str, Any] | None = None
        self.runtime: Mapping[str, Any] | None = None
        self.request_id = f"bench-{secrets.token_hex(8)}"
        self.error = self.cut = self.cut_how = ""
        self.retry_after_s: float | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        over = threading.Event()
        timed = self.wanted is not None and (self.wanted.when is not None or self.wanted.after_s > 0)
        watch = threading.Thread(target=self._watch, args=(over,), daemon=True) if timed else None
        if watch is not None:
            watch.start()
        try:
            self._read()
        finally:
            over.set()
            if watch is not None:
                watch.join()

    def _read(self) -> None:
        response = self.connection.getresponse()
        self.status = response.status
        self.request_id = response.getheader("x-request-id") or self.request_id
        if response.status != 200:
            self.retry_after_s = _number(response.getheader("retry-after"))
            self.error = f"HTTP {response.status}: {response.read(_PIECE_BYTES).decode('utf-8', 'replace')}"
            return
        kind = (response.getheader("content-type") or "").split(";")[0].strip()
        if kind != "text/event-stream":
            raise RemoteError("the reply is no event stream", status=response.status, content_type=kind)
        parser = EventParser()
        while True:
            piece = response.read1(_PIECE_BYTES)
            now = time.perf_counter()
            if not piece:
                break
            for event in parser.feed(piece):
                self._take(event, now)
            if self.wanted is not None and 0 < self.wanted.after_tokens <= len(self.tokens):
                self._give_up()
                if self.cut_how == "disconnect":
                    return
        if not (self.cut and self.cut_how == "disconnect"):
            parser.finish()
            if not self.finished and not self.error:
                self.error = "the stream ended without its end being announced"

    def _take(self, event: Event, now: float) -> None:
        if self.finished:
            raise RemoteError("events behind the announced end", data=event.data)
        if event.data == _DONE:
            self.finished = True
            return
        try:
            told = json.loads(event.data)
        except ValueError as error:
            raise RemoteError("an event is no JSON", because=str(error), data=event.data) from error
        if not isinstance(told, dict):
            raise RemoteError("an event is no JSON object", data=event.data)
        if "error" in told and told["error"] is not None:
            self.error = f"the server said: {json.dumps(told['error'])}"
        if self.request.text:
            told = self._flat(told)
        ids = told.get("tokens", [])
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise RemoteError("tokens are no list of integer token ids", data=event.data)
        self.tokens += ids
        self.token_at += [now] * len(ids)
        if told.get("finish_reason") is not None:
            self.finish = str(told["finish_reason"])
        for name in ("usage", "runtime"):
            if isinstance(told.get(name), dict):
                setattr(self, name, told[name])

    def _flat(self, told: dict[str, Any]) -> dict[str, Any]:
        """A chunk of the chat endpoint in the form of the other; the prompt's ids become the request's."""
        prompt = told.get("prompt_token_ids")
        if isinstance(prompt, list) and all(type(i) is int for i in prompt):
            self.request = replace(self.request, ids=tuple(prompt))
        choices = told.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else {}
        if not isinstance(choice, dict):
            raise RemoteError("a choice is no JSON object", data=json.dumps(told))
        return told | {"tokens": choice.get("token_ids") or [], "finish_reason": choice.get("finish_reason")}

    def _watch(self, over: threading.Event) -> None:
        """Gives up at the time, or when the condition holds, also while nothing comes.  An error of either
        is the reply's."""
        assert self.wanted is not None
        until = self.sent_at + self.wanted.after_s
        try:
            while not over.wait(0.003):
                due = self.wanted.when() if self.wanted.when is not None else time.perf_counter() >= until
                if due:
                    self._give_up()
                    return
        except FlashNextError as error:
            self.error = self.error or f"{type(error).__name__}: {error}"

    def _give_up(self) -> None:
        assert self.wanted is not None
        with self._lock:
            if self.cut:
                return
            self.cut = f"{self.wanted.how} after {len(self.tokens)} tokens"
            self.cut_how = self.wanted.how
        if self.wanted.how == "cancel":
            status, said = post_json(self.target, "/v1/cancel", {"id": self.request_id})
            if status != 200:
                self.error = f"cancel was answered by HTTP {status}: {said}"
        elif self.socket is not None:
            with suppress(OSError):  # the server may have closed it already
                self.socket.shutdown(socket.SHUT_RDWR)

    def reply(self, done_at: float) -> Reply:
        return Reply(self.request, self.status, tuple(self.tokens), tuple(self.token_at), self.sent_at,
                     done_at, self.finished, self.finish, self.usage, self.runtime, self.request_id,
                     self.error, self.cut, self.retry_after_s)


def _exchange(target: Target, method: str, path: str, body: bytes | None) -> tuple[int, Any]:
    connection, prefix = target.connection()
    try:
        connection.request(method, prefix + path, body, target.headers())
        response = connection.getresponse()
        raw = response.read(_MOST_BODY_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise RemoteError(f"{method} {path} had no answer", status=0, url=target.url,
                          because=f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
    text = raw.decode("utf-8", "replace")
    try:
        return response.status, json.loads(text)
    except ValueError:
        return response.status, text


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None
