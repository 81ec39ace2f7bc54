"""`generate PACK`: token ids in, token ids out, with what it took.

Prints the new tokens, the SHA-256 over prompt and new ids (as little-endian u32), the device, times and
memory by owner.  What must stay true: the same pack, ids and sampling print the same tokens and hash on
every run.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .ids import add_ids, read_ids
from .limits import add_limits, memory_limits
from .prompt import add_prefill, deep_limits, prefill_of, prompt_lines
from .report import GOOD, Progress, print_json

if TYPE_CHECKING:
    from ..engine.engine import Engine, Generation

__all__ = ["add_parser", "run"]


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = sub.add_parser("generate", help="prompt ids to new ids", description=__doc__.splitlines()[0])
    parser.add_argument(
        "pack",
        nargs="?",
        metavar="PACK",
        help="folder of a pack, or synth:MODEL[?seed=N&...] made in memory (FLASHNEXT_DRV_PACK)",
    )
    add_ids(parser, inline=True)
    parser.add_argument("--max-new", type=int, required=True, metavar="N", help="most tokens to draw")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 draws the likeliest token (default)"
    )
    parser.add_argument("--top-k", type=int, default=0, help="0: off")
    parser.add_argument("--top-p", type=float, default=1.0, help="1: off")
    parser.add_argument("--min-p", type=float, default=0.0, help="0: off")
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="R",
        help="divides positive logits of prompt and output tokens, multiplies others; 1: off",
    )
    parser.add_argument(
        "--presence-penalty", type=float, default=0.0, metavar="P", help="taken off output tokens' logits"
    )
    parser.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="F",
        help="taken off output tokens' logits, times how often they stand there",
    )
    parser.add_argument(
        "--logit-bias", action="append", default=[], metavar="ID=B",
        help="added to a token's logit, -inf: never drawn; may be repeated",
    )
    parser.add_argument(
        "--min-new", type=int, default=0, metavar="N", help="tokens drawn before one may end the text"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws, 0..2^64-1")
    parser.add_argument(
        "--stop-id",
        type=int,
        action="append",
        metavar="ID",
        help="token that ends the text; may be repeated (default: the model's end of sequence)",
    )
    parser.add_argument("--no-stop", action="store_true", help="draw --max-new tokens whatever they are")
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens of cache (default: prompt and --max-new)"
    )
    add_prefill(parser)
    add_limits(parser, switch=True)
    parser.add_argument(
        "--device", choices=("auto", "cuda", "sim"), help="default: FLASHNEXT_DRV_DEVICE, else auto"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Open, generate, print.  Raises what the engine raises."""
    from ..engine.engine import Edits, Engine, Limits, Sampling
    from ..errors import UsageError

    ids = read_ids(args)
    if args.max_new < 0:
        raise UsageError("--max-new is 0 or more", value=args.max_new)
    if args.no_stop and args.stop_id:
        raise UsageError("--stop-id and --no-stop exclude each other")
    sampling = Sampling(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=args.seed
    )
    edits = Edits(
        repetition=args.repetition_penalty, presence=args.presence_penalty, frequency=args.frequency_penalty,
        bias=tuple(map(_bias, args.logit_bias)), min_new_tokens=args.min_new,
    )
    progress = Progress()
    prefill = prefill_of(args, progress)
    limits = Limits(
        context_tokens=len(ids) + args.max_new if args.context is None else args.context,
        **deep_limits(args),
        **memory_limits(args),
    )
    stop_ids = () if args.no_stop else args.stop_id
    n_new = 0

    with progress:

        def told(_: int) -> None:
            nonlocal n_new
            n_new += 1
            progress.tokens_done(n_new, args.max_new)

        with Engine.open(args.pack, limits, device=args.device, progress=progress.bytes_done) as engine:
            made = engine.generate(
                ids,
                max_new_tokens=args.max_new,
                sampling=sampling,
                stop_ids=stop_ids,
                edits=edits,
                on_token=told,
                prefill=prefill,
            )
            found = _result(args, ids, engine, made)
            table = engine.memory().table()
    if args.json:
        print_json(found)
    else:
        _print(found, table)
    return GOOD


def _bias(text: str) -> tuple[int, float]:
    """"17=-2.5" as (17, -2.5).  Raises UsageError."""
    from ..errors import UsageError

    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError as error:
        raise UsageError("--logit-bias is an id and a number", value=text, do="use e.g. 17=-2.5") from error


def _result(args: argparse.Namespace, ids: list[int], engine: Engine, made: Generation) -> dict[str, Any]:
    times = {"open": engine.open_seconds, **made.times}
    n = len(made.tokens)
    rates = {
        "prompt": len(ids) / times["prompt"] if times["prompt"] else 0.0,
        "decode": (n - 1) / times["decode"] if n > 1 and times["decode"] else 0.0,
    }
    return {
        "device": made.device,
        "pack": args.pack,
        "prompt_tokens": len(ids),
        "tokens": made.tokens,
        "sha256": made.sha256,
        "finish": made.finish,
        "times_s": times,
        "tokens_per_s": rates,
        "counters": dict(made.counters),
        "memory": engine.memory().as_dict(),
    }


def _print(found: dict[str, Any], table: str) -> None:
    times, rates = found["times_s"], found["tokens_per_s"]
    print(f"device   {found['device']}")
    print(f"pack     {found['pack']}")
    print(f"prompt   {found['prompt_tokens']} tokens")
    print(f"tokens   {' '.join(map(str, found['tokens']))}")
    print(f"sha256   {found['sha256']}  (prompt and new ids, little-endian u32)")
    print(f"finish   {found['finish']} after {len(found['tokens'])} tokens")
    print(
        f"times    open {times['open']:.3f} s, prompt {times['prompt']:.3f} s ({rates['prompt']:.1f} tok/s), "
        f"decode {times['decode']:.3f} s ({rates['decode']:.1f} tok/s)"
    )
    print("\n".join(prompt_lines(found["counters"], found["memory"]["deep"])))
    print(table)
