"""How a prompt is run: the arguments that say so, what they mean for the engine, and what came of it.

Called by the commands that run prompts, and by `plan`, which sizes for them.  What must stay true: none of
these settings changes a byte of a result.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .report import Progress

if TYPE_CHECKING:
    from ..engine.prefill import Prefill

__all__ = ["add_prefill", "deep_limits", "prefill_of", "prompt_lines"]


def add_prefill(parser: argparse.ArgumentParser) -> None:
    """The settings of how a prompt is run; none of them changes a byte of the result."""
    parser.add_argument("--prompt-rows", type=int, default=16, metavar="N",
                        help="prompt tokens a launch outside the deep pass, 1..16")
    parser.add_argument("--serial", action="store_true", help="one prompt token a launch, by decode's path")
    parser.add_argument("--chunk", type=int, metavar="N",
                        help="most rows of a prompt's segment, 1..16384 (default: by the memory plan)")
    parser.add_argument("--deep-rows", type=int, default=512, metavar="N",
                        help="segments of at least N rows take the deep pass (default 512)")
    parser.add_argument("--no-deep", action="store_true", help="never take the deep pass, reserve nothing")


def prefill_of(args: argparse.Namespace, progress: Progress) -> Prefill:
    """The Prefill that `add_prefill`'s arguments ask for.  Raises UsageError."""
    from ..engine.prefill import Prefill

    return Prefill(serial=args.serial, chunk=args.chunk, deep_rows=args.deep_rows, deep=not args.no_deep,
                   progress=progress.prompt_done if progress.shown else None)


def deep_limits(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of Limits that `add_prefill`'s arguments give."""
    return {
        "rows": args.prompt_rows,
        "prompt_rows": args.prompt_rows,
        "chunk": args.chunk or 0,
        "deep": "off" if args.no_deep or args.serial else "open",
        "deep_rows": args.deep_rows,
    }


def prompt_lines(counters: Mapping[str, int], deep: Mapping[str, Any]) -> list[str]:
    """For people: a prompt's rows by path, and why the deep pass was refused."""
    paths = [f"{counters[f'{path}_rows']} {path}" for path in ("deep", "batched", "serial")]
    chunks = f"{counters['deep_chunks']} deep chunks of up to {deep['chunk']}"
    lines = [f"paths    {', '.join(paths)} rows; {chunks}"]
    if deep["refused"]:
        n = counters["deep_refusals"]
        lines.append(f"no deep  {f'{n} segments refused: ' if n else ''}{deep['refused']}")
    return lines
