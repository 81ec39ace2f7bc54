"""`flashnext-drv chat URL`: talk to a server from a terminal, or ask it one thing.

Registered by cli; standard library alone, no device.  What must stay true: the reply's text is all that goes
to stdout off a terminal (reasoning is shown, dim, on one); control characters of a reply do not reach the
terminal; leaving a reply early closes its connection, which cancels it on the server.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from ..bench.client import Target
from ..bench.sse import EventParser
from ..errors import RemoteError, UsageError
from .report import GOOD, Progress

__all__ = ["add_parser", "run"]

_URL: Final = "http://127.0.0.1:8000"
_PIECE_BYTES: Final = 1 << 16
_LONGEST_S: Final = 1e6
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_HELP: Final = "/reset forgets the conversation, /think and /nothink switch thinking, /quit leaves"


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = sub.add_parser(
        "chat",
        help="talk to a server",
        description=__doc__.splitlines()[0],
        epilog=f"in a conversation: {_HELP}",
    )
    parser.add_argument("url", nargs="?", default=_URL, metavar="URL", help=f"of the server (default {_URL})")
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        help="ask this one thing, print the reply and leave; "
        "without it, and off a terminal, the prompt is read from stdin",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--think",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="turn thinking on or off (default: as the pack's template has it)",
    )
    parser.add_argument(
        "--show-reasoning",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="print the reasoning too (default: on a terminal)",
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of a reply")
    parser.add_argument("--temperature", type=float, metavar="X", help="default: the server's")
    parser.add_argument("--seed", type=int, metavar="N", help="of the draws; the same text each time")
    parser.add_argument("--model", default="", metavar="NAME", help="default: whatever is served")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="file whose first line is the API key")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="S", help="longest silence, seconds")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask once, or talk until the end of input.  Raises RemoteError, UsageError."""
    if not 0 < args.timeout <= _LONGEST_S:
        raise UsageError("--timeout is seconds above 0", value=args.timeout, limit=_LONGEST_S)
    chat = _Chat(args, Target(args.url, _key(args.key_file), args.timeout))
    if args.prompt is not None or not sys.stdin.isatty():
        prompt = args.prompt if args.prompt is not None else _stdin()
        if not prompt:
            raise UsageError("there is no prompt", do="give --prompt, or write it to stdin")
        chat.ask(prompt)
        return GOOD
    print(f"{args.url}; {_HELP}", file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return GOOD
        if line == "/quit":
            return GOOD
        if line in ("/think", "/nothink"):
            chat.think = line == "/think"
        elif line == "/reset":
            chat.forget()
        elif line.startswith("/"):
            print(_HELP, file=sys.stderr)
        elif line:
            try:
                chat.ask(line)
            except RemoteError as error:
                print(f"\nflashnext-drv chat: {error}", file=sys.stderr)
            except KeyboardInterrupt:
                print("\n(left)", file=sys.stderr)


def _stdin() -> str:
    try:
        return sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        raise UsageError("the prompt on stdin is no text", because=str(error)) from error


class _Chat:
    """One conversation.  think: None leaves it to the template."""

    def __init__(self, args: argparse.Namespace, target: Target) -> None:
        self._args, self._target = args, target
        self._dim = sys.stdout.isatty()
        self._reasons = self._dim if args.show_reasoning is None else args.show_reasoning
        self.think: bool | None = args.think
        self._messages: list[dict[str, Any]] = []
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        system = self._args.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, text: str) -> None:
        """Send `text`, print the reply as it comes, keep both.  What fails or is left is not kept."""
        turn = {"role": "user", "content": text}
        said: dict[str, str] = {"content": "", "reasoning_content": ""}
        kind, progress = "", Progress()
        try:
            for kind_now, piece in self._pieces([*self._messages, turn], progress):
                progress.clear()
                said[kind_now] += piece
                if kind_now == "reasoning_content" and not self._reasons:
                    continue
                if kind_now != kind:
                    self._switch(kind, kind_now)
                    kind = kind_now
                sys.stdout.write(_CONTROL.sub("\N{SYMBOL FOR SUBSTITUTE}", piece))
                sys.stdout.flush()
        finally:
            progress.clear()
            self._switch(kind, "")
        reply = {"role": "assistant", "content": said["content"]}
        if said["reasoning_content"]:
            reply["reasoning_content"] = said["reasoning_content"]
        self._messages += [turn, reply]

    def _switch(self, before: str, now: str) -> None:
        """Between reasoning and content, and behind the reply."""
        dim = self._dim and before == "reasoning_content"
        sys.stdout.write(("\x1b[0m" if dim else "") + ("\n\n" if before and now else "\n" if before else ""))
        sys.stdout.write("\x1b[2m" if self._dim and now == "reasoning_content" else "")
        sys.stdout.flush()

    def _pieces(self, messages: list[dict[str, Any]], progress: Progress) -> Iterator[tuple[str, str]]:
        """("content" or "reasoning_content", text) as it is streamed; before that, how far the prompt is."""
        args = self._args
        body: dict[str, Any] = {"messages": messages, "stream": True}
        for name, value in (
            ("model", args.model or None),
            ("max_tokens", args.max_tokens),
            ("temperature", args.temperature),
            ("seed", args.seed),
            ("enable_thinking", self.think),
            ("return_progress", progress.shown or None),
        ):
            if value is not None:
                body[name] = value
        connection, path = self._target.connection()
        with closing(connection):
            try:
                connection.request(
                    "POST", f"{path}/v1/chat/completions", json.dumps(body).encode(), self._target.headers()
                )
                response = connection.getresponse()
                if response.status != 200:
                    raise _refused(response)
                parser, ended = EventParser(), False
                while not ended and (data := response.read1(_PIECE_BYTES)):
                    for event in parser.feed(data):
                        ended = ended or event.data == "[DONE]"
                        if not ended:
                            yield from _told(event.data, progress)
                if not ended:
                    raise RemoteError("the reply broke off", url=args.url)
            except (OSError, http.client.HTTPException) as error:
                raise RemoteError(
                    "the server cannot be reached",
                    url=args.url,
                    because=str(error) or type(error).__name__,
                    do="start one with flashnext-drv serve, or check the address",
                ) from error


def _told(data: str, progress: Progress) -> Iterator[tuple[str, str]]:
    """What one event says."""
    try:
        told = json.loads(data)
        if "error" in told:
            raise RemoteError("the server gave up", because=str(told["error"].get("message")))
        if "prompt_progress" in told:
            progress.prompt_done(told["prompt_progress"]["processed"], told["prompt_progress"]["total"])
        for choice in told.get("choices", ()):
            for kind in ("reasoning_content", "content"):
                piece = choice["delta"].get(kind)
                if piece:
                    yield kind, str(piece)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RemoteError("an event of the stream cannot be read", because=str(error), data=data) from error


def _refused(response: http.client.HTTPResponse) -> RemoteError:
    raw = response.read(_PIECE_BYTES).decode("utf-8", "replace")
    try:
        reason = str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        reason = raw.strip() or response.reason
    wait = response.getheader("retry-after")
    return RemoteError(
        "the server refused",
        status=response.status,
        because=reason,
        do=f"try again in {wait} s" if wait else "",
    )


def _key(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        lines = file.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("the key file cannot be read", file=str(file), because=str(error)) from error
    if not lines:
        raise UsageError("the key file is empty", file=str(file))
    return lines[0]
