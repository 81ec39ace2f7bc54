"""Token ids and row ranges as people write them.

Called by `generate` and `logits`.  What must stay true: text that is not wholly understood raises UsageError;
checks against a model are the engine's.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from ..errors import UsageError

__all__ = ["add_ids", "parse_ids", "parse_rows", "read_ids"]

# Split first: one pattern over the whole text could try every way to share out a long run of commas.
_BETWEEN = re.compile(r"[\s,]+")
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")


def add_ids(parser: argparse.ArgumentParser, *, inline: bool) -> None:
    """Declare --ids-file and, if `inline`, --ids; exactly one must be given."""
    group = parser.add_mutually_exclusive_group(required=True)
    if inline:
        group.add_argument("--ids", metavar="LIST", help='token ids, such as "1,2,3"')
    group.add_argument(
        "--ids-file", metavar="F", help="file with a JSON list or whitespace-separated token ids"
    )


def read_ids(args: argparse.Namespace) -> list[int]:
    """The ids of --ids or --ids-file.  Raises UsageError: unreadable, not integers, or none at all."""
    if getattr(args, "ids", None) is not None:
        return parse_ids(args.ids, "--ids")
    try:
        text = Path(args.ids_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            "the ids file cannot be read",
            file=args.ids_file,
            because=getattr(error, "strerror", None) or str(error),
        ) from error
    return parse_ids(text, args.ids_file)


def parse_ids(text: str, where: str) -> list[int]:
    """Integers from a JSON list, or separated by whitespace or commas.  where: for the message."""
    ids: object
    if text.lstrip().startswith("["):
        try:
            ids = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where} is no JSON list", because=str(error)) from error
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise UsageError(f"{where} is no flat JSON list of integers")
    else:
        words = [word for word in _BETWEEN.split(text) if word]
        if not all(_INTEGER.fullmatch(word) for word in words):
            raise UsageError(f"{where} holds something else than integers", do="write 1,2,3 or a JSON list")
        ids = [int(word) for word in words]
    if not ids:
        raise UsageError(f"{where} holds no token id", do="give at least one")
    return ids


def parse_rows(text: str | None, n_tokens: int) -> list[tuple[int, int]]:
    """ "a:b,c,..." as (first, end) ranges, end exclusive, in the order written; all rows without a text."""
    if text is None:
        return [(0, n_tokens)]
    ranges = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})(?::([0-9]{1,18}))?\s*", part)
        if match is None:
            raise UsageError(
                "--rows is not understood", part=repr(part), do="write a:b, or a:b,c:d, or single rows"
            )
        first = int(match[1])
        end = first + 1 if match[2] is None else int(match[2])
        if not first < end <= n_tokens:
            raise UsageError("--rows are outside the prompt", rows=f"{first}:{end}", tokens=n_tokens)
        ranges.append((first, end))
    return ranges
