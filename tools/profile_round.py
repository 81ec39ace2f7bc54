#!/usr/bin/env python3
"""Where a decode round's time goes: every kernel's launches of one round, captured alone and replayed.

    python tools/profile_round.py --model full --context 2048 --out profile.json

For each kernel name (products also by the part of a layer they belong to) the launches of one TOKEN round are
captured into a graph of their own, in their order, and that graph is timed by events over many replays.  The
parts run without their neighbours, so their sum differs a little from the whole round, timed the same way.
State is advanced by garbage; nothing is checked here.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flashnext_drv.bench.receipt import write_receipt
from flashnext_drv.drv.graph import capture
from flashnext_drv.drv.module import Launch
from flashnext_drv.drv.stream import Event, elapsed_ms
from flashnext_drv.engine.engine import Engine, Limits
from flashnext_drv.engine.round import Window, run_round
from flashnext_drv.model.synth import SynthPack


def time_launches(engine: Engine, launches: list[Launch], n_replays: int) -> float:
    """Milliseconds of one replay of `launches` as a graph."""
    rank = engine.rank
    with rank.ctx.active():
        with capture(rank.stream) as captured:
            for launch in launches:
                launch.run(rank.stream)
        with (
            captured.graph("profile") as graph,
            graph.instantiate() as executable,
            Event(rank.ctx, "profile.start", timing=True) as start,
            Event(rank.ctx, "profile.end", timing=True) as end,
        ):
            executable.launch(rank.stream)
            rank.stream.record(start)
            for _ in range(n_replays):
                executable.launch(rank.stream)
            rank.stream.record(end)
            rank.stream.synchronize()
            return elapsed_ms(start, end) / n_replays


def profile(engine: Engine, context: int, rows: int, n_replays: int) -> dict[str, Any]:
    rank = engine.rank
    with engine.sequence() as sequence:
        sequence.extend([(i * 7919 + 3) % engine.config.vocab for i in range(context + rows)])
        while sequence.n_done < context:
            run_round(rank, [Window(sequence, min(engine.limits.rows, context - sequence.n_done))])
        run_round(rank, [Window(sequence, rows, draw=True)])
        launches = rank.launches("token", rows)
        groups: dict[str, list[Launch]] = defaultdict(list)
        for launch, step in zip(launches, rank.steps("token"), strict=True):
            where = re.sub(r"^L\d+\.?", "", step.scope)
            groups[f"{launch.name} {where}" if "gemv" in launch.name else launch.name].append(launch)
        whole = time_launches(engine, launches, n_replays)
        parts = {
            name: {"launches": len(group), "ms": time_launches(engine, group, n_replays)}
            for name, group in groups.items()
        }
    for part in parts.values():
        part["us_each"] = part["ms"] * 1e3 / part["launches"]
    return {"rows": rows, "context": context, "whole_ms": whole, "launches": len(launches), "kernels": parts}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="full")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ngram-rows", type=int, default=4_000_000)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rows", default="1", help="row counts, comma list of 1, 2, 4, 8, 16")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", help="write a receipt here")
    args = parser.parse_args()
    pack = SynthPack(args.model, args.seed, ngram_rows=args.ngram_rows)
    results = []
    limits = Limits(context_tokens=args.context + 32, rows=16, prompt_rows=16)
    with Engine.open(pack, limits, device=args.device) as engine:
        for rows in map(int, args.rows.split(",")):
            result = profile(engine, args.context, rows, args.replays)
            results.append(result)
            print(f"{rows} rows: {result['whole_ms']:.3f} ms, {result['launches']} launches")
            for name, part in sorted(result["kernels"].items(), key=lambda item: -item[1]["ms"]):
                print(
                    f"  {name:<34} {part['launches']:>5} x {part['us_each']:>8.2f} us = {part['ms']:>7.3f} ms"
                )
        if args.out:
            write_receipt(args.out, engine.facts, {"rounds": results})
    print(json.dumps({"whole_ms": [r["whole_ms"] for r in results]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
