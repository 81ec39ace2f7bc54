"""A pack from what people write: a folder, or the name of a synthetic one.

Called by engine/engine.py and by commands that read headers alone.  Opening reads headers and metadata only,
no tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .pack import Pack, PackBase
from .synth import SynthPack

__all__ = ["open_pack"]


def open_pack(pack: str | Path | PackBase) -> PackBase:
    """A folder's pack, "synth:<model>[?seed=N&locality=X&mixed=1&ngram_rows=N]" as a pack that exists as
    rules, or the pack itself.  Raises CheckpointError, and UsageError on a setting that is not known."""
    if isinstance(pack, PackBase):
        return pack
    if isinstance(pack, str) and pack.startswith("synth:"):
        return _synthetic(pack)
    return Pack.open(pack)


def _synthetic(text: str) -> SynthPack:
    model, _, query = text.removeprefix("synth:").partition("?")
    kinds: dict[str, Callable[[str], Any]] = {
        "seed": int,
        "locality": float,
        "mixed": lambda v: bool(int(v)),
        "ngram_rows": int,
    }
    knobs: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        try:
            knobs[name] = kinds[name](value)
        except (KeyError, ValueError):
            raise UsageError(
                "a synthetic pack's setting cannot be used",
                setting=part,
                do=f"write synth:<model>?name=value with names {', '.join(kinds)}",
            ) from None
    return SynthPack(model, **knobs)
