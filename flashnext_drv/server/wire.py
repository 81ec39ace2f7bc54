"""What stands around every route: request ids, who may ask, errors as OpenAI bodies, one log line a request.

    uvicorn -> Edge (id, host, key, errors, log) -> routes of app.py -> read_json, Json

Called by server/app.py.  What must stay true: every failure leaves as a body of one form, with no trace of
ours in it; what was not meant by us is a 500 whose request id finds the trace in the log; a body is never
read beyond its limit, and a client that does not send one does not hold a task for ever.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import CapacityError, ContextLost, Draining, FlashNextError, OutOfMemory, QueueFull, UsageError
from .fields import ApiError
from .keys import Keys

__all__ = ["CROWDED", "Edge", "Gone", "Json", "Note", "Settings", "error_answer", "json_log", "read_json"]

CROWDED: Final = "crowded"  # in the state of a scope whose connection is one too many: how many are taken
GONE_STATUS: Final = 499  # what logs call a client that left before it was answered
RETRY_S: Final = 5
_ID: Final = re.compile(r"[\w.:@-]{1,128}", re.ASCII)
_OPEN: Final = frozenset(("/ready",))  # always answered, without a key; so is a plain /health
_HEADERS: Final = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": str(RETRY_S)}}

Log = Callable[[Mapping[str, Any]], None]


class Gone(Exception):
    """The client left; nobody is there to answer."""


def json_log(line: Mapping[str, Any]) -> None:
    """One JSON object on stderr."""
    text = json.dumps({"ts": round(time.time(), 3), **line}, ensure_ascii=True, default=str)
    with _LOG_LOCK:
        print(text, file=sys.stderr, flush=True)


_LOG_LOCK: Final = threading.Lock()


@dataclass(frozen=True)
class Settings:
    """What a server allows.

    keys: None lets everybody in.  hosts: names that a request's Host may have, None for any: without keys it
    keeps pages of other sites from reaching a loopback server by a name of theirs.  body_bytes: most of a
    request's body.  prompt_tokens: longest prompt, 0 for what the context holds.  body_seconds: a body has
    to arrive in.  request_seconds: a request may take, 0 for any time.  keepalive_seconds: silence of a
    stream before a comment is sent.  stall_seconds: a client may leave what is sent to it unread.
    """

    keys: Keys | None = None
    hosts: frozenset[str] | None = None
    body_bytes: int = 16 << 20
    prompt_tokens: int = 0
    body_seconds: float = 30.0
    request_seconds: float = 0.0
    keepalive_seconds: float = 10.0
    stall_seconds: float = 60.0
    log: Log = field(default=json_log, repr=False)


@dataclass
class Note:
    """What a request's log line will say.  facts: added by the route."""

    request_id: str
    key: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


class Json(Response):
    """A JSON body, compact, UTF-8."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
            "utf-8", "backslashreplace"
        )


class Edge:
    """ASGI middleware: see the module's picture.  told: called with the status of each response."""

    def __init__(self, app: ASGIApp, settings: Settings, told: Callable[[int], None]) -> None:
        self._app, self._settings, self._told = app, settings, told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        note = Note(given if _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}")
        state = scope.setdefault("state", {})
        state["note"] = note
        began, status, body_bytes = time.perf_counter(), 0, 0

        async def tell(message: Message) -> None:
            nonlocal status, body_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                answer = MutableHeaders(scope=message)
                answer["x-request-id"] = note.request_id
                if CROWDED in state:
                    answer["connection"] = "close"
                self._told(status)
            else:
                body_bytes += len(message.get("body", b""))
            await send(message)

        trace = ""
        try:
            self._admit(scope, headers, note)
            await self._app(scope, receive, tell)
        except (Gone, ClientDisconnect):
            status = status or GONE_STATUS
        except Exception as error:
            code, body, extra = error_answer(error, note.request_id)
            if code >= 500 and not isinstance(error, FlashNextError | ApiError):
                trace = traceback.format_exc()
            note.facts.setdefault("error", str(error) or type(error).__name__)
            if status:  # too late for a body; the connection is closed and the client sees that
                trace = trace or traceback.format_exc()
            else:
                await Json(body, code, headers=extra)(scope, receive, tell)
        finally:
            line: dict[str, Any] = {
                "event": "request",
                "request_id": note.request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "ms": round(1e3 * (time.perf_counter() - began), 3),
                "sent_bytes": body_bytes,
                "client": (scope.get("client") or ("",))[0],
            }
            if note.key is not None:
                line["key"] = note.key
            self._settings.log(line | note.facts | ({"trace": trace} if trace else {}))

    def _admit(self, scope: Scope, headers: Headers, note: Note) -> None:
        """Raises ApiError for a request that may not come in."""
        hosts = self._settings.hosts
        if hosts is not None and _host(headers.get("host", "")) not in hosts:
            raise ApiError(
                403,
                "the Host header names another machine; without API keys only loopback names are served",
                code="host_not_allowed",
            )
        if scope["path"] in _OPEN or (scope["path"] == "/health" and not scope["query_string"]):
            return
        if (most := scope["state"].get(CROWDED)) is not None:
            raise ApiError(
                503, f"{most} connections are open, and no more are taken", code="too_many_connections"
            )
        keys = self._settings.keys
        if keys is None:
            return
        kind, _, key = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not key.strip():
            raise ApiError(
                401, "an API key is needed: send it as Authorization: Bearer KEY", code="missing_api_key"
            )
        note.key = keys.name_of(key.strip())
        if note.key is None:
            raise ApiError(401, "the API key is not known", code="invalid_api_key")


async def read_json(request: Request, settings: Settings) -> Any:
    """The request's body as JSON.

    Raises ApiError: 408 too slow, 411/413 too long, 415 no JSON by its type, 400 no JSON by its bytes; Gone.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415, "the body has to be application/json", param="Content-Type", code="unsupported_media_type"
        )
    too_long = ApiError(413, f"the body is longer than {settings.body_bytes} bytes", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 18 or int(length) > settings.body_bytes):
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > settings.body_bytes:
                    raise too_long
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {settings.body_seconds:g} s", code="body_too_slow"
        ) from None
    except ClientDisconnect:
        raise Gone from None
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        text = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is no JSON: {text}"[:400], code="invalid_json") from None


def error_answer(error: BaseException, request_id: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and further headers for an error.  Nothing of an error that is not ours gets into the
    body."""
    if isinstance(error, ApiError):
        return error.status, error.body(), _HEADERS.get(error.status, {})
    if isinstance(error, HTTPException):  # of the router: 404 and 405
        text = f"{HTTPStatus(error.status_code).phrase}: see /v1/models and the README for what is served"
        code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
        return error.status_code, _body(error.status_code, text, code), dict(error.headers or {})
    if isinstance(error, QueueFull):
        seconds = max(1, round(float(error.retry_after_seconds)))
        return 429, _body(429, str(error), "queue_full"), {"retry-after": str(seconds)}
    if isinstance(error, Draining):
        return 503, _body(503, str(error), "not_ready"), _HEADERS[503]
    if isinstance(error, CapacityError):
        return 400, _body(400, str(error), "context_length_exceeded"), {}
    if isinstance(error, UsageError):
        return 400, _body(400, str(error), "invalid_value"), {}
    if isinstance(error, ContextLost | OutOfMemory):
        return (
            503,
            _body(
                503, f"the device failed ({type(error).__name__}), request id {request_id}", "device_failed"
            ),
            {},
        )
    if isinstance(error, FlashNextError):
        return (
            500,
            _body(
                500, f"the engine failed ({type(error).__name__}), request id {request_id}", "engine_failed"
            ),
            {},
        )
    return 500, _body(500, f"internal error, request id {request_id}", "internal_error"), {}


def _body(status: int, message: str, code: str) -> dict[str, Any]:
    return ApiError(status, message, code=code).body()


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _host(header: str) -> str:
    """The name in a Host header, without its port."""
    if header.startswith("["):
        return header.partition("]")[0][1:].lower()
    return header.rpartition(":")[0].lower() if ":" in header else header.lower()
