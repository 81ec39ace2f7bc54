"""The engine's thread at its end: whoever asked or submitted meanwhile is told, and by the right error."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from flashnext_drv.engine.engine import Engine, Limits
from flashnext_drv.engine.requests import Event, Request
from flashnext_drv.errors import Draining
from flashnext_drv.server.worker import Ends, Worker

SMALL = Limits(context_tokens=256, sequences=1, deep="off", graph=False)


def started(pack: Path, device: str) -> Worker:
    worker = Worker(lambda _: Engine.open(pack, SMALL, device=device), max_streams=1, max_queue=1).start()
    assert worker.wait_ready(60), worker.error
    return worker


def test_a_question_nobody_waits_for_keeps_no_other_from_its_end(text_pack: Path, device_name: str) -> None:
    worker, release = started(text_pack, device_name), threading.Event()

    def interrupted(_: Engine) -> None:
        release.wait(30)
        raise KeyboardInterrupt

    worker.ask(interrupted)
    left, kept = worker.ask(Engine.memory), worker.ask(Engine.memory)
    assert left.cancel()  # as a scrape that took too long does
    release.set()
    with pytest.raises(Draining):
        kept.result(30)
    assert worker.join(30) and worker.state == "failed"


def test_a_request_that_meets_the_end_of_the_engine_may_come_back_later(
    text_pack: Path, device_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, told = started(text_pack, device_name), []
    scheduler = worker._scheduler
    assert scheduler is not None
    submit = scheduler.submit

    def late(request: Request, tag: object) -> object:
        worker.abort()
        assert worker.join(30)
        return submit(request, tag)

    def sink(event: Event) -> Ends:
        told.append(event)
        return ""

    monkeypatch.setattr(scheduler, "submit", late)
    with pytest.raises(Draining):
        worker.submit(Request((1,), 1), sink)
    assert worker.state == "closed" and len(told) <= 1
