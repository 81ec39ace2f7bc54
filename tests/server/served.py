"""The real server on loopback over the synthetic micro pack, and what its tests share."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai

from flashnext_drv.engine.engine import Engine, Generation, Limits, Sampling
from flashnext_drv.model.source import open_pack
from flashnext_drv.server.app import create_app
from flashnext_drv.server.live import Server
from flashnext_drv.server.schema import Model
from flashnext_drv.server.text import TextModel
from flashnext_drv.server.wire import Settings
from flashnext_drv.server.worker import Worker

# The deep pass is what runs prompts fastest on the simulator.
LIMITS = Limits(
    context_tokens=2048, sequences=8, rows=16, prompt_rows=16, chunk=256, deep_rows=17, steps_ahead=2
)
MAX_QUEUE = 8


@dataclass
class Served:
    """A running server.  log: the lines that it wrote."""

    worker: Worker
    model: Model
    settings: Settings
    server: Server
    log: list[dict[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.server.url

    def client(self, **more: Any) -> openai.OpenAI:
        """The official client; it does not try again by itself."""
        given = {"api_key": "none", "max_retries": 0, "timeout": 60.0, **more}
        return openai.OpenAI(base_url=f"{self.url}/v1", **given)

    def solo(self, ids: list[int], n_new: int, *, stop_ids: Any = (), **sampling: Any) -> Generation:
        """The same tokens by Engine.generate on the engine that serves."""
        return self.worker.ask(
            lambda engine: engine.generate(
                ids, max_new_tokens=n_new, sampling=Sampling(**sampling), stop_ids=stop_ids
            )
        ).result(60)

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.server.host, self.server.port, timeout=60)

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answered:
        """One request; body: bytes as they are, anything else as JSON."""
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = self.connection()
        try:
            connection.request(method, path, raw, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return Answered(response.status, response.headers, response.read())
        finally:
            connection.close()

    def generate(self, ids: list[int], n_new: int, **more: Any) -> Any:
        """The JSON of /v1/generate, or the events of its stream."""
        body = {"ids": ids, "max_new_tokens": n_new, "ignore_eos": True, **more}
        answered = self.ask("POST", "/v1/generate", body)
        assert answered.status == 200, answered.raw
        return answered.events() if more.get("stream") else answered.json()

    def line(self, request_id: str) -> dict[str, Any]:
        """The log line of a request; it is written behind the response."""
        limit = time.monotonic() + 10
        while not (found := [line for line in self.log if line.get("request_id") == request_id]):
            assert time.monotonic() < limit, request_id
            time.sleep(0.005)
        return found[0]

    def settled(self, seconds: float = 30.0) -> Any:
        """Stats once nothing is queued or live; fails when that does not come."""
        return self.until(lambda stats: not stats.queued + stats.prompting + stats.decoding, seconds)

    def until(self, holds: Callable[[Any], bool], seconds: float = 30.0) -> Any:
        limit = time.monotonic() + seconds
        while not holds(stats := self.worker.stats()):
            assert time.monotonic() < limit, stats
            time.sleep(0.005)
        return stats


@dataclass(frozen=True)
class Answered:
    status: int
    headers: Any
    raw: bytes

    def json(self) -> Any:
        return json.loads(self.raw)

    def events(self) -> list[Any]:
        """Parsed events of a stream; [DONE] as its text."""
        return events_of(self.raw)

    def error(self) -> dict[str, Any]:
        """The error, which has to be in OpenAI's form."""
        assert self.headers["content-type"] == "application/json", self.raw[:300]
        body = self.json()
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
        assert body["error"]["message"] and body["error"]["type"], body
        assert b"Traceback" not in self.raw and b".py" not in self.raw, body
        return dict(body["error"])


def events_of(raw: bytes) -> list[Any]:
    found = []
    for block in raw.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            assert len(lines) == 1 and lines[0].startswith("data: "), lines
            text = lines[0].removeprefix("data: ")
            found.append(text if text == "[DONE]" else json.loads(text))
    return found


@contextmanager
def worker_of(
    folder: Path, device: str, *, limits: Limits = LIMITS, max_queue: int = MAX_QUEUE
) -> Iterator[tuple[Worker, Model]]:
    """The engine of a pack on its thread, loaded; at the end it must have closed well."""
    config = open_pack(folder).config
    model = Model.of("micro", config.vocab, limits.context_tokens, config.eos_id, TextModel.load(folder))
    worker = Worker(
        lambda progress: Engine.open(folder, limits, device=device, progress=progress),
        max_streams=limits.sequences,
        max_queue=max_queue,
    )
    worker.start()
    try:
        assert worker.wait_ready(120), worker.error
        yield worker, model
    finally:
        worker.abort()
        assert worker.join(60)
    assert worker.error is None and worker.state == "closed"


@contextmanager
def serving(worker: Worker, model: Model, *, max_connections: int = 256, **settings: Any) -> Iterator[Served]:
    """Another server of the same engine, with settings of its own."""
    log: list[dict[str, Any]] = []
    made = replace(Settings(**settings), log=lambda line: log.append(dict(line)))
    app = create_app(worker, model, made)
    with Server(app, grace=2, max_connections=max_connections) as server:
        yield Served(worker, model, made, server, log)
