"""Exit codes, progress and output that the commands share.

Called by __main__.py and the commands.  What must stay true: progress appears on stderr only, and only when
that is a terminal; the exit code follows from the type of the error, never from its text.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

from ..errors import (
    BuildError,
    CapacityError,
    CheckpointError,
    DriverMissing,
    OutOfMemory,
    UsageError,
    bytes_text,
)

__all__ = [
    "CAPACITY",
    "FAILED",
    "GOOD",
    "INTERRUPTED",
    "MISSING",
    "USAGE",
    "Progress",
    "exit_code",
    "print_json",
]

GOOD: Final = 0
FAILED: Final = 1  # a check failed, or something broke that should not
USAGE: Final = 2
MISSING: Final = 3  # a pack, driver, compiler or kernel image that is not there or cannot be used
CAPACITY: Final = 4  # memory or a limit is too small
INTERRUPTED: Final = 130  # the shell's code for SIGINT

_REDRAW_S: Final = 0.1


def exit_code(error: BaseException) -> int:
    """The exit code of an error; that of a group is its first member's whose code is not FAILED."""
    if isinstance(error, BaseExceptionGroup):
        codes = [exit_code(e) for e in error.exceptions]
        return next((code for code in codes if code != FAILED), FAILED)
    if isinstance(error, UsageError):
        return USAGE
    if isinstance(error, CapacityError | OutOfMemory):
        return CAPACITY
    if isinstance(error, CheckpointError | BuildError | DriverMissing):
        return MISSING
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED


def print_json(data: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    json.dump(data, sys.stdout, indent=1, ensure_ascii=False)
    sys.stdout.write("\n")


class Progress:
    """A line on stderr that is drawn over; silent when stderr is no terminal.  Leaving the context clears
    it.
    """

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._last = 0.0
        self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Take the line away; the next call draws it anew."""
        self._draw("")

    @property
    def shown(self) -> bool:
        return self._shown

    def bytes_done(self, what: str, done: int, total: int) -> None:
        """For loading: `done` of `total` bytes."""
        self._due(f"{what}: {bytes_text(done)} of {bytes_text(total)}")

    def prompt_done(self, n_tokens: int, total: int) -> None:
        """For prompts: `n_tokens` of `total`."""
        self._due(f"prompt: {n_tokens} of {total} tokens")

    def tokens_done(self, n_tokens: int, total: int) -> None:
        """For decoding: `n_tokens` of at most `total`."""
        self._due(f"decode: {n_tokens} of {total} tokens")

    def _due(self, text: str) -> None:
        if self._shown and time.monotonic() - self._last >= _REDRAW_S:
            self._draw(text)

    def _draw(self, text: str) -> None:
        if not self._shown or (not text and not self._width):
            return
        sys.stderr.write("\r" + text.ljust(self._width) + ("" if text else "\r"))
        sys.stderr.flush()
        self._last, self._width = time.monotonic(), len(text)
