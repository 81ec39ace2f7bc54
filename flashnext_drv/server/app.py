"""The routes: what each reads, asks the worker for, and answers.

Made by cli/serve.py and by programs that embed the server (`create_app`), run by server/live.py.  What must
stay true: nothing here waits for the engine but by an event of its own; the socket answers while the pack is
still loading; what a request may not ask for is refused before anything is queued.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .. import __version__
from ..engine.engine import Engine
from ..engine.requests import Request as EngineRequest
from ..errors import FlashNextError
from .answers import Answer, Streamed, Whole
from .fields import ApiError, Fields
from .job import Job
from .metrics import CONTENT_TYPE, Metrics
from .parse import ReplyStream
from .schema import Ask, Model, parse_chat, parse_completion, parse_detokenize, parse_generate, parse_tokenize
from .wire import Edge, Json, Note, Settings, read_json
from .worker import DRAINING, FAILED, LOADING, READY, Worker

__all__ = ["create_app"]

T = TypeVar("T")

_APART_BYTES: Final = 1 << 14  # a longer body is read on another thread
_DEEP_S: Final = 60.0
_MEMORY_S: Final = 2.0
_RETRY: Final = {"retry-after": "5"}


def create_app(worker: Worker, model: Model, settings: Settings | None = None) -> Starlette:
    """The ASGI application.  worker: started before or after; until its engine is open what needs the engine
    is answered by 503."""
    app = _App(worker, model, settings or Settings())
    routes = [
        Route("/v1/chat/completions", app.chat, methods=["POST"]),
        Route("/v1/completions", app.completions, methods=["POST"]),
        Route("/v1/generate", app.generate, methods=["POST"]),
        Route("/v1/cancel", app.cancel, methods=["POST"]),
        Route("/v1/models", app.models),
        Route("/v1/models/{name:path}", app.one_model),
        Route("/v1/memory", app.memory),
        Route("/tokenize", app.tokenize, methods=["POST"]),
        Route("/detokenize", app.detokenize, methods=["POST"]),
        Route("/health", app.health),
        Route("/ready", app.ready),
        Route("/metrics", app.metrics_text),
        Route("/status", app.status),
    ]
    edge = Middleware(Edge, settings=app.settings, told=app.metrics.responded)
    return Starlette(routes=routes, middleware=[edge], exception_handlers={HTTPException: _pass_on})


class _App:
    """The handlers, and what they share.  answers: of requests that run, by the reply's id."""

    def __init__(self, worker: Worker, model: Model, settings: Settings) -> None:
        self.worker, self.model, self.settings = worker, model, settings
        self.metrics = Metrics(worker, model.name)
        self.answers: dict[str, Answer] = {}
        self._made_at = int(time.time())

    # Replies.

    async def chat(self, request: Request) -> Response:
        return await self._reply(request, parse_chat)

    async def completions(self, request: Request) -> Response:
        return await self._reply(request, parse_completion)

    async def generate(self, request: Request) -> Response:
        return await self._reply(request, parse_generate)

    async def _reply(self, request: Request, parse: Callable[[object, Model], Ask]) -> Response:
        ask = await self._read(request, parse)
        most = self.settings.prompt_tokens
        if most and len(ask.prompt_ids) > most:
            raise ApiError(
                400,
                f"the prompt has {len(ask.prompt_ids)} tokens: at most {most} are taken here",
                code="prompt_too_long",
            )
        job = Job(
            self.worker,
            self.metrics,
            ask.request,
            ask.reply_stream(self.model),
            watch=bool(ask.stop_strings) or ask.single_call,
        )
        form = Streamed if ask.stream else Whole
        answer = form(
            job,
            ask,
            self.model,
            self.settings,
            _note(request),
            str(self.worker.facts.get("device", "")),
            self.answers,
        )
        job.submit()
        return answer

    async def cancel(self, request: Request) -> Response:
        """POST {"id"}: the id of a reply, or the X-Request-Id of its request."""
        fields = Fields(await read_json(request, self.settings))
        wanted, key = fields.text("id"), _note(request).key
        if wanted is None:
            raise fields.bad("id", None, "the id of a reply, or its X-Request-Id", "missing_field")
        fields.end()
        found = [
            answer
            for answer in self.answers.values()
            if wanted in (answer.id, answer.note.request_id) and answer.note.key == key
        ]
        for answer in found:
            answer.cancelled = True
            answer.job.cancel()
        return Json({"id": wanted, "cancelled": bool(found)})

    async def tokenize(self, request: Request) -> Response:
        return Json(await self._read(request, parse_tokenize))

    async def detokenize(self, request: Request) -> Response:
        return Json(await self._read(request, parse_detokenize))

    async def _read(self, request: Request, parse: Callable[[object, Model], T]) -> T:
        body = await read_json(request, self.settings)
        try:
            if int(request.headers.get("content-length") or _APART_BYTES) < _APART_BYTES:
                return parse(body, self.model)
            return await asyncio.to_thread(parse, body, self.model)
        except RecursionError:
            raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None

    # What is served.

    async def models(self, _: Request) -> Response:
        return Json({"object": "list", "data": [self._card()]})

    async def one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.model.name:
            raise ApiError(
                404,
                f"model {name[:80]!r} is not served here: {self.model.name!r} is",
                param="model",
                code="model_not_found",
            )
        return Json(self._card())

    def _card(self) -> dict[str, Any]:
        model = self.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._made_at,
            "owned_by": "flashnext_drv",
            "root": model.name,
            "parent": None,
            "max_model_len": model.context_tokens,
            "vocab": model.vocab,
            "input": ["token_ids"] if model.text is None else ["text", "token_ids"],
            "chat": model.text is not None and model.text.template is not None,
        }

    # How it is.

    async def health(self, request: Request) -> Response:
        """Alive; with ?deep=1 it takes a real token to be."""
        if self.worker.state == FAILED or (self.worker.started and not self.worker.alive):
            return _unhealthy(self.worker.error, f"the engine is {self.worker.state}")
        if request.query_params.get("deep", "0") in ("", "0", "false"):
            return Json({"status": "ok", "state": self.worker.state})
        job = Job(
            self.worker,
            self.metrics,
            EngineRequest((min(self.model.stop_ids, default=0),), 1),
            ReplyStream(None),
        )
        began = time.perf_counter()
        job.submit()
        try:
            async with asyncio.timeout(_DEEP_S):
                while not job.finish:
                    await job.next(_DEEP_S)
        except TimeoutError:
            return _unhealthy(None, f"no token within {_DEEP_S:g} s")
        finally:
            await job.close()
        if job.error is not None or job.reply is None or not job.reply.tokens:
            return _unhealthy(job.error, "no token was drawn")
        ms = round(1e3 * (time.perf_counter() - began), 3)
        return Json({"status": "ok", "state": self.worker.state, "token": job.reply.tokens[0], "ms": ms})

    async def ready(self, _: Request) -> Response:
        """Whether requests are taken; 503 while loading, draining and after the end."""
        state = self.worker.state
        found: dict[str, Any] = {"ready": state == READY, "state": state}
        if state == LOADING:
            what, done, total = self.worker.loading
            found["loading"] = {"what": what, "done_bytes": done, "total_bytes": total}
        elif state == READY:
            return Json(found)
        return Json(found, 503, headers=_RETRY)

    async def metrics_text(self, _: Request) -> Response:
        with suppress(FlashNextError, TimeoutError):
            await self._look()
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def memory(self, _: Request) -> Response:
        """MemoryReport.as_dict, taken between two steps of the engine."""
        with suppress(TimeoutError):
            await self._look()
        if not self.metrics.memory:
            raise ApiError(503, "the engine is busy and has not told its memory yet", code="not_ready")
        return Json(self.metrics.memory)

    async def status(self, _: Request) -> Response:
        """Where everything is, now."""
        worker, model = self.worker, self.model
        found: dict[str, Any] = {
            "state": worker.state,
            "draining": worker.state == DRAINING,
            "version": __version__,
            "uptime_s": round(time.perf_counter() - worker.began, 3),
            "model": {
                "name": model.name,
                "vocab": model.vocab,
                "context_tokens": model.context_tokens,
                "text": model.text is not None,
            },
            "max_streams": worker.max_streams,
            "max_queue": worker.max_queue,
            **worker.facts,
        }
        stats = worker.stats()
        if stats is not None:
            counters = stats.counters
            wanted = counters.get("expert_hits", 0) + counters.get("expert_misses", 0)
            found |= {
                name: value for name, value in vars(stats).items() if name not in ("counters", "draining")
            }
            found |= {
                "draining": stats.draining,
                "counters": dict(counters),
                "finished": dict(stats.finished),
                "expert_hit_rate": counters["expert_hits"] / wanted if wanted else None,
            }
        found["requests"] = [
            {
                "id": answer.id,
                "request_id": answer.note.request_id,
                "state": answer.job.state,
                "age_s": round(time.perf_counter() - answer.job.began, 3),
                "prompt_done": answer.job.prompt_done,
                "prompt_tokens": len(answer.ask.prompt_ids),
                "new_tokens": answer.job.n_tokens,
                "max_new_tokens": answer.ask.request.max_new_tokens,
            }
            for answer in list(self.answers.values())
        ]
        return Json(found)

    async def _look(self) -> None:
        """Bring metrics.memory up to date.  Raises Draining without an engine, TimeoutError by a busy one."""
        future = self.worker.ask(Engine.memory)
        report = await asyncio.wait_for(asyncio.wrap_future(future), _MEMORY_S)
        self.metrics.memory = report.as_dict()


def _unhealthy(error: BaseException | None, otherwise: str) -> Response:
    """Of an error only its kind is told."""
    return Json({"status": "failed", "error": type(error).__name__ if error else otherwise}, 503)


def _note(request: Request) -> Note:
    note: Note = request.scope["state"]["note"]
    return note


async def _pass_on(_: Request, error: Exception) -> Response:
    """Errors of the router are answered where all others are."""
    raise error
