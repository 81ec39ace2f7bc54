"""A device that fails under the server: the requests concerned are told, and a lost one ends it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashnext_drv.drv import faults
from flashnext_drv.engine.engine import Engine
from flashnext_drv.errors import Draining
from flashnext_drv.model.source import open_pack
from flashnext_drv.server.schema import Model
from flashnext_drv.server.worker import Worker

from .served import LIMITS, serving


@contextmanager
def failing(worker: Worker, *plan: Any, **more: Any) -> Iterator[None]:
    """Driver calls of the engine's thread fail by this plan."""
    armed = faults.fail_nth(*plan, **more)
    worker.ask(lambda _: armed.__enter__()).result(30)
    yield
    with suppress(Draining):  # the thread has ended, and its plan with it
        worker.ask(lambda _: armed.__exit__(None, None, None)).result(30)


def test_a_failed_round_ends_its_requests_and_a_lost_context_the_server(
    text_pack: Path, device_name: str
) -> None:
    limits = replace(LIMITS, graph=False, deep="off", sequences=2)
    worker = Worker(
        lambda progress: Engine.open(text_pack, limits, device=device_name, progress=progress),
        max_streams=2,
        max_queue=2,
    ).start()
    assert worker.wait_ready(60)
    config = open_pack(text_pack).config
    model = Model.of("micro", config.vocab, limits.context_tokens, config.eos_id)
    body = {"ids": [1, 2], "max_new_tokens": 3, "ignore_eos": True}
    with serving(worker, model) as served:
        alone = served.generate([1, 2], 3)["tokens"]
        with failing(worker, 5, 1, only="cuLaunchKernelEx"):
            failed = served.ask("POST", "/v1/generate", body, {"X-Request-Id": "r-1"})
        assert failed.status == 500 and failed.error()["code"] == "engine_failed"
        assert "cuLaunchKernel" in served.line("r-1")["error"] and "trace" not in served.line("r-1")
        assert served.generate([1, 2], 3)["tokens"] == alone
        assert served.ask("GET", "/health?deep=1").status == 200
        with failing(worker, 5, 700, only="cuLaunchKernelEx"):
            lost = served.ask("POST", "/v1/generate", {**body, "stream": True})
        assert lost.events()[-1]["error"]["code"] in ("device_failed", "engine_failed")
        assert worker.join(60) and worker.state == "failed" and worker.error is not None
        assert served.ask("GET", "/health").status == 503 and served.ask("GET", "/ready").status == 503
        refused = served.ask("POST", "/v1/generate", body)
        assert refused.status == 503 and refused.error()["code"] == "not_ready"
        assert served.ask("GET", "/status").json()["requests"] == []
        assert b'flashnext:state{state="failed"} 1.0' in served.ask("GET", "/metrics").raw
