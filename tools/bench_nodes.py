#!/usr/bin/env python3
"""What one decoded token costs by kernel: time of each class of graph nodes, alone and beside the whole.

    python tools/bench_nodes.py --model full --context 2048 --out nodes.json

A class is a kernel with its grid and the part of a layer it serves.  For each class a graph of its launches
alone, in the order of the walk, is captured and replayed: its time over the number of nodes is what a node
costs when nothing else runs between.  The sum over the classes and the time of the whole token's graph stand
beside each other.  States advance by replays that mean nothing, so the engine is closed afterwards.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_decode import prompt_ids

from flashnext_drv.bench.receipt import write_receipt
from flashnext_drv.drv.graph import capture
from flashnext_drv.drv.module import Launch
from flashnext_drv.engine.engine import Engine, Limits
from flashnext_drv.engine.rank import TOKEN, Rank
from flashnext_drv.engine.round import Window, run_round
from flashnext_drv.model.synth import SynthPack

_LAYER = re.compile(r"^L\d+\.")


def replay_us(rank: Rank, name: str, launches: list[Launch], repeats: int) -> float:
    """Median microseconds of one replay of a graph of these launches."""
    with rank.ctx.active():
        with capture(rank.stream) as captured:
            for launch in launches:
                launch.run(rank.stream)
        with captured.graph(name) as graph, graph.instantiate() as executable:
            executable.upload(rank.stream)
            times = []
            for _ in range(repeats + 2):
                rank.stream.synchronize()
                started = time.perf_counter()
                executable.launch(rank.stream)
                rank.stream.synchronize()
                times.append(time.perf_counter() - started)
    return median(times[2:]) * 1e6


def measure(rank: Rank, bucket: int, repeats: int) -> dict[str, Any]:
    classes: defaultdict[str, list[Launch]] = defaultdict(list)
    launches = rank.launches(TOKEN, bucket)
    for step, launch in zip(rank.steps(TOKEN), launches, strict=True):
        grid = "x".join(map(str, launch.grid))
        classes[f"{launch.name} {_LAYER.sub('', step.scope)} {grid}"].append(launch)
    nodes = [
        {"class": name, "nodes": len(some), "us": replay_us(rank, "class", some, repeats)}
        for name, some in classes.items()
    ]
    nodes.sort(key=lambda each: -float(str(each["us"])))
    whole = replay_us(rank, "token", launches, repeats)
    return {"token_us": whole, "launches": len(launches), "classes": nodes}


def show(found: dict[str, Any]) -> None:
    print(f"{'class':<58} {'nodes':>5} {'us':>8} {'us/node':>8}")
    for each in found["classes"]:
        print(f"{each['class']:<58} {each['nodes']:>5} {each['us']:>8.1f} {each['us'] / each['nodes']:>8.2f}")
    total = sum(each["us"] for each in found["classes"])
    print(f"sum of classes {total:.0f} us; the whole token {found['token_us']:.0f} us, "
          f"{found['launches']} nodes")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="full", help="micro, tiny, quarter or full")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=1, help="row bucket of the round: 1, 2, 4, 8 or 16")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--ngram-rows", type=int, default=4_000_000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--no-programmatic", action="store_true", help="no launch starts ahead of the end of the one before"
    )
    parser.add_argument("--out", help="write a receipt here")
    args = parser.parse_args()
    pack = SynthPack(args.model, 1, ngram_rows=args.ngram_rows)
    rows = max(args.rows, min(16, args.context))
    limits = Limits(context_tokens=args.context + 64, rows=rows, prompt_rows=rows, sequences=args.rows)
    with Engine.open(pack, limits, device=args.device) as engine, engine.sequence() as sequence:
        sequence.extend(prompt_ids(args.context, engine.config.vocab))
        engine.prompt([sequence], draw=True)
        sequence.extend([1])
        run_round(engine.rank, [Window(sequence, 1, draw=True)])  # the tables of a round with one row
        engine.rank.programmatic = not args.no_programmatic
        found = measure(engine.rank, args.rows, args.repeats)
        show(found)
        if args.out:
            write_receipt(args.out, engine.facts, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
