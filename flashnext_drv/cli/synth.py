"""`flashnext-drv synth OUT`: write a synthetic pack.

Registered by cli; needs no device.  Errors leave as UsageError or CapacityError.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path

from ..errors import bytes_text
from ..model.synth import SynthPack
from ..model.synth_models import MODELS
from ..model.synth_text import write_text

__all__ = ["add_parser", "run"]


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    parser = sub.add_parser("synth", help="write a synthetic pack")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make; must be empty or absent")
    parser.add_argument(
        "--model",
        choices=sorted(MODELS),
        default="micro",
        help="micro (5 MB), tiny (20 MB), quarter (15 GB) or full (84 GB)",
    )
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes")
    parser.add_argument("--ngram-rows", type=int, metavar="N", help="about N rows in the n-gram table")
    parser.add_argument(
        "--locality", type=float, default=0.5, metavar="X", help="temporal locality of routing, 0..1"
    )
    parser.add_argument("--mixed", action="store_true", help="every width and codebook among the linears")
    parser.add_argument(
        "--tokenizer", action="store_true",
        help="also a small tokenizer, a chat template and generation defaults, so that it can serve text",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the pack and print what was made.  Returns 0."""
    pack = SynthPack(
        args.model, args.seed, locality=args.locality, mixed=args.mixed, ngram_rows=args.ngram_rows
    )
    begun = time.monotonic()
    pack.write(args.out, _Progress() if sys.stderr.isatty() else None)
    if args.tokenizer:
        write_text(args.out, pack.config)
    size = sum(tensor.size for tensor in pack.tensors.values())
    print(
        f"{args.out}: {args.model}, seed {args.seed}, {len(pack.tensors)} tensors, {bytes_text(size)}, "
        f"{time.monotonic() - begun:.1f} s"
    )
    return 0


class _Progress:
    """One line on stderr, at most ten times a second; called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown_s = 0.0

    def __call__(self, name: str, done: int, total: int) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._shown_s < 0.1 and done < total:
                return
            self._shown_s = now
            print(
                f"\r{bytes_text(done)} of {bytes_text(total)} {name:<50.50}",
                end="\n" if done == total else "",
                file=sys.stderr,
                flush=True,
            )
