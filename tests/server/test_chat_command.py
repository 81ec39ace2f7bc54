"""`flashnext-drv chat` against a server of a few lines: what it sends, prints and keeps, how it fails."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from flashnext_drv.__main__ import main
from flashnext_drv.cli import report

DONE = "data: [DONE]\n\n"


@dataclass
class Served:
    """url of the server; what requests get (`first`: the first one, when not empty), and what was sent."""

    url: str = ""
    status: int = 200
    reply: str = ""
    first: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


def told(**delta: str) -> str:
    chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    return f"data: {json.dumps(chunk)}\n\n"


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served(
        reply=told(role="assistant", content="")
        + ": wait\n\n"
        + told(reasoning_content="Hm.")
        + told(content="Hel")
        + told(content="lo\x1b[31m")
        + DONE
    )

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            made.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            made.keys.append(self.headers["authorization"])
            self.send_response(made.status)
            for name, value in made.headers.items():
                self.send_header(name, value)
            self.end_headers()
            reply, made.first = made.first or made.reply, ""
            self.wfile.write(reply.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
    thread.join()


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> Terminal:
    """A terminal where these lines are typed; its screen."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal("\n".join(lines) + "\n"))
    monkeypatch.setattr(sys, "stdout", screen)
    return screen


def test_one_question_prints_the_reply_alone(
    served: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("secret\n")
    argv = [
        "chat",
        served.url,
        "--prompt",
        "Hi",
        "--system",
        "S",
        "--no-think",
        "--max-tokens",
        "5",
        "--temperature",
        "0",
        "--seed",
        "7",
        "--model",
        "m",
        "--key-file",
        str(tmp_path / "key"),
    ]
    assert main(argv) == report.GOOD
    assert capsys.readouterr() == ("Hello\N{SYMBOL FOR SUBSTITUTE}[31m\n", "")
    assert served.keys == ["Bearer secret"]
    assert served.bodies == [
        {
            "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}],
            "stream": True,
            "model": "m",
            "max_tokens": 5,
            "temperature": 0.0,
            "seed": 7,
            "enable_thinking": False,
        }
    ]


def test_the_prompt_may_come_from_stdin(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO("How are\nyou?\n"))
    assert main(["chat", served.url, "--show-reasoning"]) == report.GOOD
    assert capsys.readouterr().out.startswith("Hm.\n\nHello")
    assert served.bodies == [{"messages": [{"role": "user", "content": "How are\nyou?"}], "stream": True}]
    monkeypatch.setattr(sys, "stdin", StringIO(" \n"))
    assert main(["chat", served.url]) == report.USAGE
    assert "there is no prompt" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"caf\xe9"), "utf-8"))
    assert main(["chat", served.url]) == report.USAGE
    assert "no text" in capsys.readouterr().err


def test_a_long_prompt_shows_how_far_it_is_on_a_terminal(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    chunk = {"choices": [], "prompt_progress": {"total": 9000, "cache": 0, "processed": 2048, "time_ms": 3}}
    served.first = f"data: {json.dumps(chunk)}\n\n" + served.reply
    assert main(["chat", served.url, "--prompt", "Hi"]) == report.GOOD
    assert served.bodies[0]["return_progress"] is True
    line = "prompt: 2048 of 9000 tokens"
    assert screen.getvalue() == f"\r{line}\r{' ' * len(line)}\r", "gone before the reply"
    assert capsys.readouterr().out.startswith("Hello")
    served.first = 'data: {"prompt_progress": {"total": 3}}\n\n'
    assert main(["chat", served.url, "--prompt", "Hi"]) == report.FAILED
    assert "cannot be read" in screen.getvalue()


def test_a_conversation_keeps_what_was_said(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = typed(
        monkeypatch, "One", "/nothink", "Two", "/reset", "/think", "/help", "", "Three", "/quit", "x"
    )
    assert main(["chat", served.url]) == report.GOOD
    said = {"role": "assistant", "content": "Hello\x1b[31m", "reasoning_content": "Hm."}
    one, two, three = ({"role": "user", "content": text} for text in ("One", "Two", "Three"))
    assert [body["messages"] for body in served.bodies] == [[one], [one, said, two], [three]]
    assert [body.get("enable_thinking") for body in served.bodies] == [None, False, True]
    assert screen.getvalue().count("\x1b[2mHm.\x1b[0m\n\nHello") == 3 and "\x1b[31m" not in screen.getvalue()
    assert capsys.readouterr().err.count("/reset") == 2


def test_a_reply_that_fails_is_not_kept(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served.first = told(content="Hal") + 'data: {"error": {"message": "lost"}}\n\n'
    screen = typed(monkeypatch, "One", "Two")
    assert main(["chat", served.url]) == report.GOOD
    assert [body["messages"][0]["content"] for body in served.bodies] == ["One", "Two"]
    assert "lost" in capsys.readouterr().err and "Hal" in screen.getvalue()


@pytest.mark.parametrize(
    ("status", "reply", "headers", "says"),
    [
        (400, '{"error": {"message": "temperature is 9"}}', {}, "temperature is 9"),
        (429, '{"error": {"message": "full"}}', {"retry-after": "3"}, "try again in 3 s"),
        (502, "<html>", {}, "<html>"),
        (200, told(content="a"), {}, "broke off"),
        (200, "data: {]\n\n" + DONE, {}, "cannot be read"),
        (200, "data: 5\n\n" + DONE, {}, "cannot be read"),
        (200, 'data: {"error": {"message": "out of pages"}}\n\n', {}, "out of pages"),
    ],
)
def test_failures_are_one_line(
    served: Served,
    capsys: pytest.CaptureFixture[str],
    status: int,
    reply: str,
    headers: dict[str, str],
    says: str,
) -> None:
    served.status, served.reply, served.headers = status, reply, headers
    assert main(["chat", served.url, "--prompt", "Hi"]) == report.FAILED
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and "Traceback" not in err


def test_nobody_there_and_bad_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["chat", "http://127.0.0.1:9", "--prompt", "a"]) == report.FAILED
    assert "cannot be reached" in capsys.readouterr().err
    (tmp_path / "empty").write_text("")
    for argv, says in (
        (["ftp://x"], "http://host:port"),
        (["--timeout", "-1"], "--timeout"),
        (["--timeout", "inf"], "--timeout"),
        (["--key-file", str(tmp_path / "none")], "cannot be read"),
        (["--key-file", str(tmp_path / "empty")], "empty"),
    ):
        assert main(["chat", *argv, "--prompt", "a"]) == report.USAGE
        assert says in capsys.readouterr().err
