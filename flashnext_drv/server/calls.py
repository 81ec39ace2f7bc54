"""Reading one tool call out of a reply's text, in the two forms that templates of the family write.

Called by parse.py with the text from <tool_call> on, again and again while it grows.  What must stay true: a
verdict follows from the text alone, not from how it grew; "good" means a function that was offered and
arguments that are one JSON object.

    xml   <tool_call><function=NAME><parameter=KEY>value</parameter> ... </function></tool_call>
    json  <tool_call>{"name": NAME, "arguments": {...}}</tool_call>

White space between tags does not count; one line break at each end of a value does not either.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["CallReader", "call_reader", "forced_opening"]

_END: Final = "</tool_call>"
_SPACE: Final = " \t\r\n"
_LONGEST_NAME: Final = 256  # characters of a function's or parameter's name


def call_reader(form: str, tools: Mapping[str, Any], first: int) -> CallReader:
    """A reader for `form`, "xml" or "json".  tools: offered functions by name.  first: where the text behind
    <tool_call> begins."""
    return _XmlReader(tools, first) if form == "xml" else _JsonReader(tools, first)


def forced_opening(form: str, name: str | None) -> str:
    """How an assistant's turn begins that must call a function: any of them, or `name`."""
    if form == "xml":
        return "<tool_call>\n<function=" + ("" if name is None else f"{name}>\n")
    return '<tool_call>\n{"name": "' + ("" if name is None else f'{name}", "arguments": ')


class CallReader(ABC):
    """name, arguments (JSON text): of the call, once read() said "good".  end: then the place behind it,
    after "bad" the place behind <tool_call>."""

    def __init__(self, tools: Mapping[str, Any], first: int) -> None:
        self._tools = tools
        self._at = first
        self.end = first
        self.name = ""
        self.arguments = ""

    @abstractmethod
    def read(self, text: str) -> str:
        """ "more", "good" or "bad".  text: what read() got last, and more behind it."""

    def _good(self, name: str, arguments: Mapping[str, Any], end: int) -> str:
        self.name, self.end = name, end
        self.arguments = json.dumps(arguments, ensure_ascii=False)
        if not _encodable(self.arguments):
            self.arguments = json.dumps(arguments)
        return "good"

    def _skip(self, text: str) -> None:
        while self._at < len(text) and text[self._at] in _SPACE:
            self._at += 1

    def _see(self, text: str, mark: str) -> str:
        """Whether `mark` stands at the place reached ("good": it was passed)."""
        here = text[self._at : self._at + len(mark)]
        if here == mark:
            self._at += len(mark)
            return "good"
        return "more" if mark.startswith(here) else "bad"


class _XmlReader(CallReader):
    def __init__(self, tools: Mapping[str, Any], first: int) -> None:
        super().__init__(tools, first)
        self._state = self._open
        self._name = ""
        self._key = ""
        self._found: dict[str, Any] = {}
        self._value_at = 0

    def read(self, text: str) -> str:
        while True:
            before = self._state
            verdict = self._state(text)
            if verdict != "next":
                return verdict
            assert self._state != before or self._at <= len(text)

    def _open(self, text: str) -> str:
        self._skip(text)
        verdict = self._see(text, "<function=")
        if verdict == "good":
            self._state = self._read_name
            return "next"
        return verdict

    def _read_name(self, text: str) -> str:
        name = self._upto(text)
        if not name:
            return "more" if name is None else "bad"
        if name not in self._tools:
            return "bad"
        self._name, self._state = name, self._body
        return "next"

    def _body(self, text: str) -> str:
        self._skip(text)
        opens = self._see(text, "<parameter=")
        if opens == "good":
            self._state = self._read_key
            return "next"
        closes = self._see(text, "</function>")
        if closes == "good":
            self._state = self._close
            return "next"
        return "more" if "more" in (opens, closes) else "bad"

    def _read_key(self, text: str) -> str:
        key = self._upto(text)
        if not key:
            return "more" if key is None else "bad"
        if key in self._found:
            return "bad"
        self._key, self._state, self._value_at = key, self._read_value, self._at
        return "next"

    def _read_value(self, text: str) -> str:
        """A value ends at the first </parameter> that a tag follows: it may hold that word itself."""
        while True:
            close = text.find("</parameter>", self._at)
            if close < 0:
                self._at = max(self._at, len(text) - len("</parameter>") + 1)
                return "more"
            behind = text[close + len("</parameter>") :].lstrip(_SPACE)
            if behind.startswith(("<parameter=", "</function>")):
                value = text[self._value_at : close].removeprefix("\n").removesuffix("\n")
                self._found[self._key] = _typed(value, self._tools[self._name], self._key)
                self._at, self._state = close + len("</parameter>"), self._body
                return "next"
            if "<parameter=".startswith(behind) or "</function>".startswith(behind):
                self._at = close
                return "more"
            self._at = close + 1

    def _close(self, text: str) -> str:
        self._skip(text)
        verdict = self._see(text, _END)
        return self._good(self._name, self._found, self._at) if verdict == "good" else verdict

    def _upto(self, text: str) -> str | None:
        """A name that ends with ">"; None while it goes on, "" when it is none."""
        end = text.find(">", self._at, self._at + _LONGEST_NAME)
        name = text[self._at : len(text) if end < 0 else end]
        if "\n" in name or "<" in name or (end < 0 and len(name) >= _LONGEST_NAME):
            return ""
        if end < 0:
            return None
        self._at = end + 1
        return name.strip()


class _JsonReader(CallReader):
    def __init__(self, tools: Mapping[str, Any], first: int) -> None:
        super().__init__(tools, first)
        self._begin = -1

    def read(self, text: str) -> str:
        if self._begin < 0:
            self._skip(text)
            begin = self._at
            verdict = self._see(text, "{")
            if verdict != "good":
                return verdict
            self._begin = begin
        while True:
            close = text.find(_END, self._at)
            if close < 0:
                self._at = max(self._at, len(text) - len(_END) + 1)
                return "more"
            body = text[self._begin : close]
            try:
                call = _loads(body)
            except (ValueError, RecursionError):
                if not _inside_string(body):
                    return "bad"
                self._at = close + 1
                continue
            name, arguments = call.get("name"), call.get("arguments", {})
            if not isinstance(name, str) or name not in self._tools or not isinstance(arguments, dict):
                return "bad"
            return self._good(name, arguments, close + len(_END))


def _typed(value: str, function: Mapping[str, Any], key: str) -> Any:
    """A written value as the schema wants it: text stays text, all else is JSON where it can be."""
    properties = (function.get("parameters") or {}).get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = kind if isinstance(kind, list) else [kind]
    if "string" in kinds and not ("null" in kinds and value == "null"):
        return value
    words = {"True": True, "False": False, "None": None}
    if value in words:
        return words[value]
    try:
        return _loads(value)
    except (ValueError, RecursionError):
        return value


def _loads(text: str) -> Any:
    return json.loads(text, parse_constant=_no_constant, parse_float=_finite)


def _finite(text: str) -> float:
    """JSON's numbers have no bounds, but what is read as infinite cannot be written again."""
    value = float(text)
    return value if math.isfinite(value) else _no_constant(text)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _inside_string(text: str) -> bool:
    """Whether JSON text `text` ends inside a string."""
    inside = escaped = False
    for char in text:
        if escaped:
            escaped = False
        elif char == "\\" and inside:
            escaped = True
        elif char == '"':
            inside = not inside
    return inside


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
