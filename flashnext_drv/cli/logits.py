"""`logits PACK`: the logits after each token of a list, into a NumPy file.

The file holds `logits` (rows, vocab) float32 and `rows` (rows) int64, the positions.  What must stay true: a
row's bytes do not depend on which other rows are asked for.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..errors import UsageError
from .ids import add_ids, parse_rows, read_ids
from .limits import add_limits, memory_limits
from .prompt import add_prefill, deep_limits, prefill_of, prompt_lines
from .report import GOOD, Progress, print_json

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.prefill import Prefill

__all__ = ["add_parser", "run"]

_ONE_PASS_BYTES: Final = 2 << 30  # wider spans of rows take one pass over the prompt for each range


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = sub.add_parser(
        "logits", help="logits of every position of an ids file", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "pack",
        nargs="?",
        metavar="PACK",
        help="folder of a pack, or synth:MODEL[?seed=N&...] made in memory (FLASHNEXT_DRV_PACK)",
    )
    add_ids(parser, inline=False)
    parser.add_argument("--out", required=True, metavar="F.npz", help="file to write")
    parser.add_argument("--rows", metavar="A:B,...", help="positions, ends exclusive (default: all)")
    add_prefill(parser)
    add_limits(parser)
    parser.add_argument(
        "--device", choices=("auto", "cuda", "sim"), help="default: FLASHNEXT_DRV_DEVICE, else auto"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Open, compute, write, print.  Raises what the engine raises; the file appears whole or not at all."""
    from ..engine.engine import Engine, Limits
    from ..engine.prefill import PromptCounters

    ids = read_ids(args)
    ranges = parse_rows(args.rows, len(ids))
    out = Path(args.out)
    if out.suffix != ".npz" or not out.absolute().parent.is_dir():
        raise UsageError("--out is a file F.npz in an existing folder", value=args.out)
    progress = Progress()
    prefill = prefill_of(args, progress)
    limits = Limits(
        context_tokens=max(end for _, end in ranges), **deep_limits(args), **memory_limits(args)
    )
    with (
        progress,
        Engine.open(args.pack, limits, device=args.device, progress=progress.bytes_done) as engine,
    ):
        started = time.perf_counter()
        logits = _rows(engine, ids, ranges, prefill)
        seconds = time.perf_counter() - started
        counters, deep = engine.prompts.since(PromptCounters()), dict(engine.memory().deep)
        device = str(engine.facts)
    _write(out, logits, np.concatenate([np.arange(*r, dtype=np.int64) for r in ranges]))
    found: dict[str, Any] = {
        "device": device,
        "pack": args.pack,
        "out": str(out),
        "shape": list(logits.shape),
        "sha256": hashlib.sha256(logits.tobytes()).hexdigest(),
        "time_s": seconds,
        "tokens_per_s": sum(counters[f"{path}_rows"] for path in ("deep", "batched", "serial")) / seconds,
        "counters": counters,
        "deep": deep,
    }
    if args.json:
        print_json(found)
    else:
        print(f"device   {device}")
        print(f"pack     {args.pack}")
        print(f"out      {out}  logits {logits.shape[0]} x {logits.shape[1]} f32")
        print(f"sha256   {found['sha256']}  (of the logits' bytes)")
        print(f"times    {seconds:.3f} s with the head's rows ({found['tokens_per_s']:.1f} tok/s)")
        print("\n".join(prompt_lines(counters, deep)))
    return GOOD


def _rows(
    engine: Engine, ids: list[int], ranges: list[tuple[int, int]], prefill: Prefill
) -> np.ndarray:
    """Rows of all ranges in order: from one pass over the span they cover, or one a range if it is large."""
    first, end = min(r[0] for r in ranges), max(r[1] for r in ranges)
    if (end - first) * engine.config.vocab * 4 <= _ONE_PASS_BYTES:
        span = engine.logits(ids, rows=(first, end), prefill=prefill)
        return np.concatenate([span[a - first : b - first] for a, b in ranges])
    return np.concatenate([engine.logits(ids, rows=r, prefill=prefill) for r in ranges])


def _write(out: Path, logits: np.ndarray, rows: np.ndarray) -> None:
    part = out.with_name(out.name + ".part")
    try:
        with part.open("wb") as file:
            np.savez(file, logits=logits, rows=rows)
        os.replace(part, out)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UsageError(
            "the output cannot be written", file=str(out), because=str(error.strerror)
        ) from error
