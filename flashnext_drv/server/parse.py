"""A reply's token stream to what clients read: text, stop strings, reasoning, tool calls.

Called by the server for each request (`ReplyStream`).  What must stay true: the pieces joined do not depend
on how the stream was cut; a tool call is told of when it is complete and well formed, else its text stays
content; a token's text is counted where the token ended, so usage does not depend on cuts either.

    ids -> Detokenizer -> StopStrings -> ReplyParser -> Delta
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from .calls import CallReader, call_reader
from .text import Detokenizer, TextModel

__all__ = ["Delta", "ReplyParser", "ReplyStream", "StopStrings"]

_THINK: Final = "<think>"
_THINK_END: Final = "</think>"
_CALL: Final = "<tool_call>"
_SPACE: Final = " \t\r\n"


@dataclass(frozen=True)
class Delta:
    """A piece of a reply.

    kind: "reasoning", "content" or "tool_call".  text: more of it; of a call, more of its arguments.
    index, id, name: of a tool call; id and name are there in its first piece alone.
    """

    kind: str
    text: str = ""
    index: int = 0
    id: str = ""
    name: str = ""


class StopStrings:
    """Ends a text where one of `strings` is complete: the one that is complete first, the longest of those.

    include: the stop string belongs to the text.
    """

    def __init__(self, strings: Sequence[str], include: bool = False) -> None:
        self._strings = tuple(strings)
        self._include = include
        self._held = ""
        self.stopped = False
        self.found = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that cannot belong to a stop string, whether one was found); nothing after it was found."""
        if self.stopped:
            return "", True
        if not self._strings:
            return text, False
        held = len(self._held)
        text = self._held + text
        best: tuple[int, int, str] | None = None
        for stop in self._strings:
            at = text.find(stop, max(0, held - len(stop) + 1))
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        if best is not None:
            self.stopped, self.found, self._held = True, best[2], ""
            return text[: best[0] if self._include else best[1]], True
        keep = max((_overlap(text, stop) for stop in self._strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """What was held back; the text ended without it becoming a stop string."""
        held, self._held = self._held, ""
        return held


class ReplyParser:
    """A reply's text to deltas.

    reasoning: the prompt ended inside <think>.  form: of tool calls, "xml" or "json"; "" when none are looked
    for. tools: those offered; a call of another function stays content.  opening: text of a call that the
    prompt already holds.  call_id: beginning of the calls' ids.
    """

    def __init__(
        self,
        *,
        reasoning: bool = False,
        form: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        opening: str = "",
        call_id: str = "",
    ) -> None:
        self._state = "reasoning" if reasoning else "start"
        self._form = form
        self._tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._id = call_id or f"call_{secrets.token_hex(10)}"
        self._held = ""
        self._strip = reasoning  # white space is dropped until something else comes
        self._call: CallReader | None = None
        self.n_calls = 0
        if opening:
            self._state = "content"
            self.push(opening)

    @property
    def reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._state == "reasoning"

    def push(self, text: str) -> list[Delta]:
        """What became certain with `text`."""
        self._held += text
        return self._go_on(False)

    def finish(self) -> list[Delta]:
        """What was held back; an unfinished call becomes content."""
        return self._go_on(True)

    def _go_on(self, last: bool) -> list[Delta]:
        states = {
            "start": self._start,
            "reasoning": self._reason,
            "content": self._content,
            "call": self._read_call,
        }
        out: list[Delta] = []
        while states[self._state](out, last):
            pass
        return _merged(out)

    # Each state goes on as far as it can and says whether another one has something to do.

    def _start(self, out: list[Delta], last: bool) -> bool:
        """A reply may open its reasoning by itself."""
        text = self._held.lstrip(_SPACE)
        if text.startswith(_THINK):
            self._held, self._state, self._strip = text[len(_THINK) :], "reasoning", True
            return True
        if not last and _THINK.startswith(text):
            return False
        self._state = "content"
        return True

    def _reason(self, out: list[Delta], last: bool) -> bool:
        """Reasoning, without the white space around it."""
        self._drop_space()
        at = self._held.find(_THINK_END)
        if at >= 0:
            self._say(out, "reasoning", self._held[:at].rstrip(_SPACE))
            self._held, self._state, self._strip = self._held[at + len(_THINK_END) :], "content", True
            return True
        sure = self._held if last else self._sure(_THINK_END)
        sure = sure.rstrip(_SPACE)
        self._say(out, "reasoning", sure)
        self._held = "" if last else self._held[len(sure) :]
        return False

    def _content(self, out: list[Delta], last: bool) -> bool:
        """Content, without the white space between it and what is no content."""
        self._drop_space()
        at = self._held.find(_CALL) if self._form else -1
        if at >= 0:
            said = self._held[:at].rstrip(_SPACE)
            self._say(out, "content", said)
            self._held, self._state = self._held[len(said) :], "call"
            self._call = call_reader(self._form, self._tools, at - len(said) + len(_CALL))
            return True
        sure = self._held if last or not self._form else self._sure(_CALL).rstrip(_SPACE)
        self._say(out, "content", sure)
        self._held = self._held[len(sure) :]
        return False

    def _read_call(self, out: list[Delta], last: bool) -> bool:
        assert self._call is not None
        verdict = self._call.read(self._held)
        if verdict == "more" and not last:
            return False
        end = len(self._held) if verdict == "more" else self._call.end
        if verdict == "good":
            out.append(Delta("tool_call", "", self.n_calls, f"{self._id}_{self.n_calls}", self._call.name))
            out.append(Delta("tool_call", self._call.arguments, self.n_calls))
            self.n_calls += 1
        else:
            self._say(out, "content", self._held[:end])
        self._held, self._call, self._state = self._held[end:], None, "content"
        self._strip = verdict == "good"
        return True

    def _drop_space(self) -> None:
        if self._strip:
            self._held = self._held.lstrip(_SPACE)
            self._strip = not self._held

    def _sure(self, mark: str) -> str:
        """What is held and cannot belong to `mark`."""
        return self._held[: len(self._held) - _overlap(self._held, mark)]

    def _say(self, out: list[Delta], kind: str, text: str) -> None:
        if text:
            out.append(Delta(kind, text))


class ReplyStream:
    """One request's way from ids to deltas.

    text: None where ids are all that is wanted: tokens are counted, and there are no deltas.  stop_ids: ids
    that end the reply and are not part of its text.  stop_strings, include_stop: as StopStrings; include_stop
    keeps the text of a stop id too.  min_tokens: stop strings count from text after so many
    tokens.  single_call: end after the first tool call.  parser: None for plain text (completions).

    n_tokens: tokens that belong to the reply: all pushed, up to the one that completed a stop string.
    reasoning_tokens: those up to </think>.  stopped: nothing more will be taken; cancel what still draws.
    """

    def __init__(
        self,
        text: TextModel | None,
        *,
        stop_ids: Collection[int] = (),
        stop_strings: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        single_call: bool = False,
        parser: ReplyParser | None = None,
    ) -> None:
        self._detokenizer = None if text is None else Detokenizer(text)
        self._stops = StopStrings(stop_strings, include_stop)
        self._stop_ids = frozenset(stop_ids)
        self._include = include_stop
        self._min_tokens = min_tokens
        self._single = single_call
        self._parser = parser
        self._thinking = parser is not None and parser.reasoning
        self._thought = StopStrings((_THINK_END,))
        self.n_tokens = 0
        self.reasoning_tokens = 0
        self.stopped = False

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the reply."""
        return self._stops.found or None

    def push(self, ids: Iterable[int]) -> list[Delta]:
        """What became certain with `ids`; see n_tokens for how many of them belong to the reply."""
        out: list[Delta] = []
        for token_id in ids:
            if self.stopped:
                break
            self.n_tokens += 1
            if token_id in self._stop_ids and not self._include:
                continue
            if self._detokenizer is None:
                continue
            piece = self._detokenizer.push((token_id,))
            if self._thinking:
                self.reasoning_tokens += 1
                self._thinking = not self._thought.push(piece)[1]
            if self.n_tokens > self._min_tokens:
                piece, self.stopped = self._stops.push(piece)
            self._parse(piece, out)
            if not self._thinking and not self.reasoning_tokens and self._parser and self._parser.reasoning:
                self._thinking, self.reasoning_tokens = True, self.n_tokens  # it opened <think> by itself
        return _merged(out)

    def finish(self, finish: str) -> tuple[list[Delta], str]:
        """(what was held back, finish_reason) for the scheduler's "stop", "length", "cancelled", "error"."""
        out: list[Delta] = []
        if not self.stopped and self._detokenizer is not None:
            piece, self.stopped = self._stops.push(self._detokenizer.finish())
            self._parse(piece + self._stops.finish(), out)
        if self._parser is not None:
            out += self._parser.finish()
            if self._parser.n_calls and (finish == "stop" or self.stopped):
                return _merged(out), "tool_calls"
        return _merged(out), "stop" if self.stopped else finish

    def _parse(self, piece: str, out: list[Delta]) -> None:
        if self._parser is None:
            if piece:
                out.append(Delta("content", piece))
            return
        out += self._parser.push(piece)
        if self._single and self._parser.n_calls:
            self.stopped = True


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark` and is not all of it."""
    first = max(0, len(text) - len(mark) + 1)
    at = text.find(mark[0], first)
    while at >= 0:
        if mark.startswith(text[at:]):
            return len(text) - at
        at = text.find(mark[0], at + 1)
    return 0


def _merged(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of one kind as one; a call's first piece stays apart."""
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if last is not None and last.kind == delta.kind != "tool_call":
            out[-1] = replace(last, text=last.text + delta.text)
        else:
            out.append(delta)
    return out
