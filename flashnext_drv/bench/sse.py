"""Server-sent events out of bytes: pieces of any length in, whole events out.

Called by bench/client.py.  What must stay true: the events do not depend on where the bytes were cut; bytes
that are no event stream raise RemoteError and never become an event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..errors import RemoteError

__all__ = ["MOST_EVENT_BYTES", "Event", "EventParser"]

MOST_EVENT_BYTES: Final = 64 << 20  # an event beyond it is taken for a broken stream
_MARK: Final = b"\xef\xbb\xbf"  # of UTF-8, allowed at the start


@dataclass(frozen=True)
class Event:
    """One event.  name: "message" unless the stream said otherwise.  data: its data lines, joined."""

    name: str
    data: str


class EventParser:
    """Give it bytes by `feed`; it gives the events that they end.  Comments are counted, not given.

    Source: the event stream format of the HTML standard, section 9.2.6; `id` and `retry` are passed over.
    """

    def __init__(self) -> None:
        self.n_comments = 0
        self._left = b""
        self._data: list[str] = []
        self._name = ""
        self._size = 0
        self._begun = False
        self._after_cr = False

    def feed(self, data: bytes) -> list[Event]:
        """The events that end within `data`, in order.  Raises RemoteError on text that is not UTF-8."""
        events = []
        for line in self._lines(data):
            if line:
                self._take(line)
                continue
            if self._data:
                events.append(Event(self._name or "message", "\n".join(self._data)))
            self._data, self._name, self._size = [], "", 0
        return events

    def finish(self) -> None:
        """The stream has ended.  Raises RemoteError when it ended inside an event."""
        if self._left or self._data:
            raise RemoteError("the stream ended inside an event", left_bytes=len(self._left) + self._size)

    def _lines(self, data: bytes) -> list[bytes]:
        """Whole lines so far; they end by LF, CR, or CR LF, also with the LF in the next piece."""
        if self._after_cr and data:
            data = data[1:] if data[:1] == b"\n" else data
            self._after_cr = False
        whole = self._left + data
        if not self._begun:
            if len(whole) < len(_MARK) and _MARK.startswith(whole):
                self._left = whole
                return []
            self._begun = True
            whole = whole.removeprefix(_MARK)
        self._after_cr = whole.endswith(b"\r")
        lines = whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._left = lines.pop()
        if len(self._left) + self._size > MOST_EVENT_BYTES:
            raise RemoteError("an event is too large", most_bytes=MOST_EVENT_BYTES)
        return lines

    def _take(self, line: bytes) -> None:
        if line[:1] == b":":
            self.n_comments += 1
            return
        name, _, value = line.partition(b":")
        try:
            text = value.removeprefix(b" ").decode("utf-8")
        except UnicodeDecodeError as error:
            raise RemoteError("an event is not UTF-8", because=str(error)) from error
        if name == b"data":
            self._data.append(text)
            self._size += len(line)
        elif name == b"event":
            self._name = text
