"""API keys: a file of SHA-256 digests, and which of them a request brought.

Called by server/wire.py for every request and by cli/serve.py.  What must stay true: no key is stored, logged
or compared but as its digest; the time of a look-up does not depend on which key was right, or whether one
was.

A line of the file is a digest in hex and, behind a space, a name for the logs; # begins a comment.  A key
without a name is called by its digest, whatever line it is on: requests may outlive a reading of the file.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path
from typing import Final

from ..errors import UsageError

__all__ = ["Keys", "add_key", "key_digest"]

_LINE: Final = re.compile(r"([0-9a-fA-F]{64})(?:[ \t]+([\w.@-]{1,64}))?")
_NAME: Final = re.compile(r"[\w.@-]{1,64}")


class Keys:
    """The keys of one file.  entries: digest in hex and name of each."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError as `reload`."""
        self.path = path
        self.entries: tuple[tuple[str, str], ...] = ()
        self.reload()

    def reload(self) -> None:
        """Read the file again; on an error the keys stay what they were.

        Raises UsageError: unreadable, a line that is none, or no key at all.
        """
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                "the file of API keys cannot be read",
                file=str(self.path),
                because=getattr(error, "strerror", None) or str(error),
            ) from error
        entries = []
        for number, line in enumerate(text.splitlines(), 1):
            line = line.partition("#")[0].strip()
            if not line:
                continue
            found = _LINE.fullmatch(line)
            if found is None:  # the line itself may be a key that somebody pasted: it is not shown
                raise UsageError(
                    "a line of the file of API keys is no SHA-256 digest",
                    file=str(self.path),
                    line=number,
                    do="write 64 hex digits and, if wanted, a name; "
                    "`flashnext-drv serve --api-keys FILE --add-key NAME` adds a fresh key",
                )
            digest = found[1].lower()
            entries.append((digest, found[2] or f"sha256-{digest[:12]}"))
        if not entries:
            raise UsageError(
                "the file of API keys holds none",
                file=str(self.path),
                do="add one: flashnext-drv serve --api-keys FILE --add-key NAME",
            )
        self.entries = tuple(entries)

    def name_of(self, key: str) -> str | None:
        """The name of the entry that `key` belongs to, or None.  Looks at every entry, whatever is found."""
        digest, name = key_digest(key), None
        for known, of_key in self.entries:
            if hmac.compare_digest(known, digest):
                name = of_key
        return name


def key_digest(key: str) -> str:
    """SHA-256 of a key's UTF-8 bytes, hex; of text that is no UTF-8, of its escaped form."""
    return hashlib.sha256(key.encode("utf-8", "backslashreplace")).hexdigest()


def add_key(path: Path, name: str) -> str:
    """Make a key of 256 random bits and append its digest to the file, which is made if need be.

    Returns the key, which is stored nowhere.  Raises UsageError on a name that cannot stand in a log.
    """
    if not _NAME.fullmatch(name):
        raise UsageError("a key's name is 1 to 64 letters, digits or ._@-", value=name)
    key = f"fn-{secrets.token_urlsafe(32)}"
    try:
        with open(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "a+b") as out:
            out.seek(max(0, out.seek(0, os.SEEK_END) - 1))
            begin = "\n" if out.read() not in (b"", b"\n") else ""  # the last line may not be ended
            out.write(f"{begin}{key_digest(key)} {name}\n".encode())
    except OSError as error:
        raise UsageError(
            "the file of API keys cannot be written", file=str(path), because=error.strerror or str(error)
        ) from error
    return key
