"""What a random model never says: tool calls, reasoning, split characters, failures; a scripted engine."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import openai
import pytest

from flashnext_drv.engine.engine import Engine, token_sha256
from flashnext_drv.engine.requests import Event, Reply, Request, Ticket, Token
from flashnext_drv.errors import BuildError, ContractError
from flashnext_drv.server.worker import READY, Sink, Worker

from . import texts
from .served import Served, serving

CALL = (
    b"Let me see.\n</think>\n\nI ask.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nM\xc3\xbcnchen\n"
    b"</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
MESSAGES: Any = [{"role": "user", "content": "weather?"}]


class Scripted(Worker):
    """Says `ids`, then ends by `finish`; `step` tokens an event."""

    def __init__(self, ids: Sequence[int], *, step: int = 1, error: Exception | None = None) -> None:
        super().__init__(lambda _: pytest.fail("nothing is opened"), max_streams=1, max_queue=0)
        self.ids, self.step, self.failure = ids, step, error
        self.state = READY
        self.drawn = 0
        self.enough = False

    def submit(self, request: Request, sink: Sink) -> Ticket:
        ticket = Ticket(1, request, state="decode")
        threading.Thread(target=self._say, args=(ticket, sink), daemon=True).start()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        ticket.cancelled = True

    def _say(self, ticket: Ticket, sink: Sink) -> None:
        said: list[int] = []
        ids = self.ids[: ticket.request.max_new_tokens]
        finish: Any = "stop"
        for first in range(0, len(ids), self.step):
            said += ids[first : first + self.step]
            tokens = tuple(Token(i, at=time.perf_counter()) for i in ids[first : first + self.step])
            self.drawn = len(said)
            if sink(Event("tokens", tokens)) or ticket.cancelled:
                self.enough, finish = True, "cancelled"
                break
        error = self.failure
        reply = Reply(
            tuple(said),
            token_sha256([*ticket.request.ids, *said]),
            token_sha256(said),
            "error" if error else finish,
            error,
            {"new_tokens": len(said)},
            {"submitted": 0.0, "done": 1.0},
            tuple(float(i) for i in range(len(said))),
        )
        ticket.state, ticket.reply = "done", reply
        sink(Event("done", reply=reply, error=error))


@contextmanager
def saying(raw: bytes, *, context: int = 4096, **more: Any) -> Iterator[tuple[Served, Scripted]]:
    settings = {name: more.pop(name) for name in list(more) if name.endswith("_seconds")}
    worker = Scripted(texts.ids_of(raw), **more)
    with serving(worker, replace(texts.model(), context_tokens=context), **settings) as served:
        yield served, worker


@pytest.mark.parametrize("step", (1, 3, 1000))
def test_a_tool_call_arrives_whole_and_in_pieces(step: int) -> None:
    with saying(CALL, step=step) as (served, _):
        given: Any = {"model": "micro", "messages": MESSAGES, "tools": [texts.WEATHER, texts.CLOCK]}
        whole = served.client().chat.completions.create(**given).choices[0]
        chunks = list(served.client().chat.completions.create(**given, stream=True))
    assert whole.finish_reason == "tool_calls" and whole.message.content == "I ask."
    assert whole.message.model_extra["reasoning_content"] == "Let me see."
    [call] = whole.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "München", "days": 3}
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [one for delta in deltas for one in delta.tool_calls or ()]
    assert calls[0].id and calls[0].function.name == "weather" and {one.index for one in calls} == {0}
    assert "".join(one.function.arguments or "" for one in calls) == call.function.arguments
    assert "".join(delta.content or "" for delta in deltas) == "I ask."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("step", (1, 2, 5))
def test_characters_are_never_split(step: int) -> None:
    text = "é→🦀ü, \u200d👩\u200d🚀 fin"
    with saying(text.encode(), step=step) as (served, _):
        chunks = list(
            served.client().completions.create(model="micro", prompt="x", max_tokens=99, stream=True)
        )
        cut = served.client().completions.create(model="micro", prompt="x", max_tokens=99, stop="🦀ü")
    pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert cut.choices[0].text == "é→" and cut.choices[0].finish_reason == "stop"


def test_a_stop_string_ends_the_drawing_before_the_client_reads(text: bytes = b"one two three four") -> None:
    with saying(text * 40, step=2) as (served, worker):
        reply = served.client().completions.create(model="micro", prompt="x", max_tokens=700, stop="three")
        assert reply.choices[0].text == "one two " and worker.enough
        assert worker.drawn - len("one two three") in (0, 1)
        assert reply.usage.completion_tokens == len("one two three")
        assert reply.model_extra["runtime"]["new_sha256"] == token_sha256(texts.ids_of(b"one two three"))


def test_a_clock_that_is_set_back_changes_no_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    with saying(b"abc") as (served, _):
        monkeypatch.setattr(time, "time", lambda: 0.0)
        assert 0 <= served.ask("GET", "/status").json()["uptime_s"] < 1e6


def test_one_call_at_a_time_ends_behind_the_first() -> None:
    with saying(CALL + b"\n" + CALL.partition(b"I ask.\n\n")[2] + b" and more") as (served, worker):
        reply = served.client().chat.completions.create(
            model="micro", messages=MESSAGES, tools=[texts.WEATHER], parallel_tool_calls=False
        )
        assert len(reply.choices[0].message.tool_calls) == 1 and worker.drawn == len(CALL)
        assert reply.choices[0].finish_reason == "tool_calls"


def test_a_failure_is_a_500_or_an_event_and_names_the_request() -> None:
    error = ContractError("a logit is NaN", position=7)
    with saying(b"abc", error=error) as (served, _):
        client = served.client()
        with pytest.raises(openai.InternalServerError) as failed:
            client.completions.create(model="micro", prompt="x", extra_headers={"X-Request-Id": "r-1"})
        assert failed.value.code == "engine_failed" and "r-1" in str(failed.value)
        stream = client.completions.create(model="micro", prompt="x", stream=True)
        pieces = []
        with pytest.raises(openai.APIError, match="the engine failed"):
            pieces += [chunk.choices[0].text for chunk in stream]
        assert "position=7" in served.line("r-1")["error"]


class Stuck(Scripted):
    """Its engine does not come back from a step before `release`."""

    def __init__(self) -> None:
        super().__init__(texts.ids_of(b"abc"))
        self.release = threading.Event()

    def _say(self, ticket: Ticket, sink: Sink) -> None:
        self.release.wait()
        super()._say(ticket, sink)


def test_an_engine_that_is_stuck_holds_up_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashnext_drv.server.job._END_S", 0.1)
    monkeypatch.setattr("flashnext_drv.server.app._DEEP_S", 0.1)
    worker = Stuck()
    with serving(worker, texts.model(), request_seconds=0.1) as served:
        try:
            assert served.ask("GET", "/health?deep=1").status == 503
            late = served.ask("POST", "/v1/generate", {"ids": [1], "max_new_tokens": 1})
            assert late.status == 504 and late.error()["code"] == "request_timeout"
        finally:
            worker.release.set()
        limit = time.monotonic() + 10  # their ends are counted when they come
        while b'reason="abort",model_name="micro"} 2.0' not in served.ask("GET", "/metrics").raw:
            assert time.monotonic() < limit
            time.sleep(0.01)


def test_a_client_that_reads_nothing_is_given_up() -> None:
    with saying(b"x" * 6000, stall_seconds=0.2, context=8192) as (served, worker):
        served.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = json.dumps({"ids": [1], "max_new_tokens": 6000, "stream": True}).encode()
        with socket.socket() as stuck:
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            stuck.connect((served.server.host, served.server.port))
            stuck.sendall(
                b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: r-2\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body) + body
            )
            line = served.line("r-2")
            limit = time.monotonic() + 10
            while served.server._server.server_state.connections:  # it does not hold its connection either
                assert time.monotonic() < limit
                time.sleep(0.01)
        assert "read nothing" in line["error"]
        assert worker.enough or worker.drawn == 6000  # it was cancelled, if it had not ended before
        assert served.ask("GET", "/status").json()["requests"] == []


def test_a_head_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashnext_drv.server.live._HEAD_S", 0.1)
    with saying(b"abc") as (served, _):
        with socket.create_connection((served.server.host, served.server.port), timeout=30) as bare:
            bare.sendall(b"GET /health HT")
            assert bare.recv(100) == b""
        with socket.create_connection((served.server.host, served.server.port), timeout=30) as bare:
            assert bare.recv(100) == b""


def test_connections_beyond_the_limit_are_told_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashnext_drv.server.live._CROWDED_S", 0.1)
    models = ("GET", "/v1/models")
    with serving(Scripted(texts.ids_of(b"abc")), texts.model(), max_connections=2) as served:
        first, second = served.connection(), served.connection()

        def asked(connection: http.client.HTTPConnection) -> int:
            connection.request(*models)
            with connection.getresponse() as answered:
                assert answered.read()
                return answered.status

        assert [asked(each) for each in (first, second)] == [200, 200]
        refused = served.ask(*models, headers={"X-Request-Id": "r-3"})
        assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.headers["connection"] == "close" and refused.headers["x-request-id"] == "r-3"
        assert refused.error()["code"] == "too_many_connections"
        assert "2 connections" in refused.error()["message"]
        assert served.line("r-3")["status"] == 503
        for path in ("/health", "/ready"):  # whoever watches the server is answered
            watched = served.ask("GET", path)
            assert watched.status == 200 and watched.headers["connection"] == "close"
        with socket.create_connection((served.server.host, served.server.port), timeout=10) as silent:
            assert silent.recv(100) == b""
        assert [asked(each) for each in (first, second)] == [200, 200], "those that were there stay"
        first.close()
        limit = time.monotonic() + 10
        while (room := served.ask(*models)).status != 200:  # the server has yet to see it
            assert time.monotonic() < limit
        assert "connection" not in room.headers
        second.close()


def held(until: threading.Event, error: Exception) -> Callable[..., Engine]:
    def opener(progress: Callable[[str, int, int], None]) -> Engine:
        progress("loading", 3, 4)
        until.wait(30)
        progress("loading", 4, 4)
        raise error

    return opener


def test_it_answers_while_loading_and_says_when_that_failed() -> None:
    release = threading.Event()
    worker = Worker(held(release, BuildError("no image for this device")), max_streams=1, max_queue=1)
    worker.start()
    with serving(worker, texts.model()) as served:
        ready = served.ask("GET", "/ready")
        assert ready.status == 503 and ready.headers["retry-after"]
        assert ready.json()["state"] == "loading"
        assert served.ask("GET", "/health").status == 200 and served.ask("GET", "/v1/models").status == 200
        assert served.ask("POST", "/tokenize", {"prompt": "x"}).json()["count"] == 1
        early = served.ask("POST", "/v1/generate", {"ids": [1], "max_new_tokens": 1})
        assert early.status == 503 and early.headers["retry-after"] and early.error()["code"] == "not_ready"
        assert served.ask("GET", "/v1/memory").status == 503
        assert b'flashnext:state{state="loading"} 1.0' in served.ask("GET", "/metrics").raw
        release.set()
        assert worker.join(10) and worker.state == "failed"
        assert served.ask("GET", "/health").status == 503
        assert served.ask("POST", "/v1/generate", {"ids": [1], "max_new_tokens": 1}).status == 503


def test_loading_can_be_stopped() -> None:
    release = threading.Event()
    worker = Worker(held(release, BuildError("not reached")), max_streams=1, max_queue=1).start()
    while not worker.loading[0]:
        time.sleep(0.001)
    worker.drain()
    release.set()
    assert worker.join(10) and worker.state == "closed" and worker.error is None
    with serving(worker, texts.model()) as served:
        ended = served.ask("GET", "/health")
        assert ended.status == 503 and ended.json()["error"] == "the engine is closed"


@pytest.mark.parametrize("stop", (None, "zz"), ids=("by-the-client", "by-the-engine"))
@pytest.mark.parametrize("stream", (False, True))
def test_a_bug_in_reading_text_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, stream: bool, stop: str | None
) -> None:
    with saying(b"abc" * 50) as (served, worker):
        body = {"prompt": "x", "max_tokens": 99, "stream": stream, "stop": stop}
        with monkeypatch.context() as patched:
            patched.setattr("flashnext_drv.server.parse.ReplyStream.push", lambda *_: 1 / 0)
            broken = served.ask("POST", "/v1/completions", body, {"X-Request-Id": "r-3"})
            line = served.line("r-3")
        code = broken.events()[-1]["error"]["code"] if stream else broken.error()["code"]
        assert code == "internal_error" and broken.status == (200 if stream else 500)
        assert "ZeroDivisionError" in line["trace"] and line["finish"] in ("error", "cancelled", "stop")
        assert stop is None or worker.enough
        assert served.ask("GET", "/status").json()["requests"] == []
        assert served.ask("POST", "/v1/completions", {**body, "stream": False}).status == 200
