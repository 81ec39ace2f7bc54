#!/usr/bin/env python3
"""Plain decode of a synthetic pack: tokens/s eager and through one captured graph, as a share of the floor.

    python tools/bench_decode.py --model full --context 2048 --tokens 64 --out receipt.json

Prompt ids are an integer hash, so the run repeats.  Each timed token is a whole step: publish, launch, draw,
read back.  Also prints the ledger beside the driver's free memory.  Runs on a GPU; with --device sim it only
shows that the program works.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flashnext_drv.bench.floor import decode_floor
from flashnext_drv.bench.receipt import write_receipt
from flashnext_drv.engine.engine import Engine, Limits, token_sha256
from flashnext_drv.engine.round import Window, run_round
from flashnext_drv.engine.sequence import Sequence
from flashnext_drv.model.synth import SynthPack


def prompt_ids(count: int, vocab: int) -> list[int]:
    return [(i * 2654435761 + 12345) % (1 << 32) % vocab for i in range(count)]


def decode(
    engine: Engine,
    sequence: Sequence,
    n_tokens: int,
    forced: list[int] | None = None,
    after: Callable[[], None] | None = None,
) -> tuple[list[int], list[float]]:
    """n_tokens greedy tokens and the seconds of each step.

    forced: the ids that go into the sequence in their place.  after: called behind each step, not timed.
    """
    tokens, seconds = [], []
    for i in range(n_tokens):
        started = time.perf_counter()
        token = run_round(engine.rank, [Window(sequence, 1, draw=True)]).tokens[0]
        seconds.append(time.perf_counter() - started)
        sequence.extend([token if forced is None else forced[i]])
        tokens.append(token)
        if after is not None:
            after()
    return tokens, seconds


def run(engine: Engine, context: int, n_tokens: int) -> dict[str, Any]:
    rank = engine.rank
    out: dict[str, Any] = {}
    hashes = set()
    for mode in ("eager", "graph"):
        rank.use_graphs = mode == "graph"
        with engine.sequence() as sequence:
            sequence.extend(prompt_ids(context, engine.config.vocab))
            started = time.perf_counter()
            while sequence.n_pending > 1:
                run_round(rank, [Window(sequence, min(engine.limits.prompt_rows, sequence.n_pending - 1))])
            rank.stream.synchronize()
            prompt_seconds = time.perf_counter() - started
            decode(engine, sequence, 4)
            tokens, seconds = decode(engine, sequence, n_tokens)
        hashes.add(token_sha256(tokens))
        median = sorted(seconds)[len(seconds) // 2]
        out[mode] = {
            "median_ms": median * 1e3,
            "tokens_per_s": 1 / median,
            "mean_ms": sum(seconds) / n_tokens * 1e3,
            "prompt_tokens_per_s": (context - 1) / prompt_seconds,
            "sha256": token_sha256(tokens),
        }
    out["launches"] = len(rank.launches("token", 1))
    out["equal"] = len(hashes) == 1
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="full", help="micro, tiny, quarter or full")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ngram-rows", type=int, default=4_000_000)
    parser.add_argument("--context", type=int, default=2048, help="tokens in the cache when decode is timed")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-rows", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--bytes-per-s", type=float, default=4.4e12, help="measured streaming read rate")
    parser.add_argument("--weights-per-s", type=float, default=3.4e12, help="measured trellis decode rate")
    parser.add_argument(
        "--no-programmatic", action="store_true", help="no launch starts ahead of the end of the one before"
    )
    parser.add_argument("--out", help="write a receipt here")
    args = parser.parse_args()
    pack = SynthPack(args.model, args.seed, ngram_rows=args.ngram_rows)
    limits = Limits(
        context_tokens=args.context + args.tokens + 16, rows=args.prompt_rows, prompt_rows=args.prompt_rows
    )
    with Engine.open(pack, limits, device=args.device) as engine:
        print(f"device {engine.facts}; opened {args.model} in {engine.open_seconds:.1f} s", file=sys.stderr)
        engine.rank.programmatic = not args.no_programmatic
        results = run(engine, args.context, args.tokens)
        results["programmatic"] = engine.rank.programmatic
        floor = decode_floor(engine.rank.layout, pack, args.context)
        seconds = floor.seconds(args.bytes_per_s, args.weights_per_s)
        memory = engine.memory()
        results |= {
            "open_s": engine.open_seconds,
            "floor_bytes": floor.bytes_read,
            "floor_trellis_weights": floor.trellis_weights,
            "floor_ms": seconds["floor"] * 1e3,
            "share_of_floor": {
                mode: seconds["floor"] * 1e3 / results[mode]["median_ms"] for mode in ("eager", "graph")
            },
            "memory": memory.as_dict(),
        }
        print(memory.table(), file=sys.stderr)
        shown = {k: v for k, v in results.items() if k != "memory"}
        print(json.dumps(shown, indent=1))
        if args.out:
            write_receipt(args.out, engine.facts, results)
    return 0 if results["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
