#!/usr/bin/env python3
"""Everything about prompts that needs the full-size pack, on one opened engine: speed, floors, the yardstick,
equality with serial decode, the curve, and one prompt as long as the context.

    python tools/yardstick.py --build images
    python tools/prompt_suite.py --images images --out receipts

Opening the pack takes longer than most of what is measured, so bench_prefill.py, yardstick.py and
prompt_equality.py run here one after the other on the same engine; alone they do the same on engines of their
own.  Writes a receipt a part as soon as it is done, and the curve as SVG; exit 1 when a part fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import bench_prefill
import prompt_equality
import yardstick
from bench_decode import prompt_ids

from flashnext_drv.bench.prefill_floor import Rates
from flashnext_drv.bench.receipt import write_receipt
from flashnext_drv.engine.engine import Engine, Limits

# Most that an inexact pass may be off, in deviations of the logits: over 48 layers a last bit may flip a
# choice of experts, so it is far from zero; a pass that computes something else is off by 1.4.
FAR = 0.7
PARTS = ("speed", "yardstick", "equality", "curve", "long")
Part = Callable[[], tuple[dict[str, Any], bool]]


class Suite:
    """The parts on one engine.  Each gives its results and whether it passed."""

    def __init__(self, engine: Engine, args: argparse.Namespace, stack: ExitStack) -> None:
        self.engine, self.args, self.stack, self.rates = engine, args, stack, Rates()
        self.chunk = engine.rank.chunk

    def speed(self) -> tuple[dict[str, Any], bool]:
        found: dict[str, Any] = {"buffers": bench_prefill.buffers(self.engine), "prompts": [], "profiles": {}}
        good = bool(found["buffers"]["equal"])
        for count in self.args.tokens:
            one = bench_prefill.median_prompt(self.engine, count, self.args.repeats)
            found["prompts"].append(one)
            good &= one["same_token"]
            print(
                f"{count} tokens: {one['seconds'] * 1e3:.2f} ms, {one['tokens_per_s']:.0f} tok/s", flush=True
            )
            made = bench_prefill.profile(self.engine, count, self.rates, self.chunk)
            found["profiles"][str(count)] = made
            bench_prefill.print_profile(made)
        found["peer"] = {"tokens_per_s_by_chunk": bench_prefill.PEER, "source": bench_prefill.PEER_SOURCE}
        found["decode"] = self.decode()
        found["memory"] = self.engine.memory().as_dict()
        return found, good

    def decode(self) -> dict[str, float]:
        """Decode behind a prompt, with the deep buffers held."""
        made = self.engine.generate(
            prompt_ids(min(2048, self.args.tokens[0]), self.engine.config.vocab),
            max_new_tokens=self.args.new_tokens,
            stop_ids=(),
        )
        speed = (len(made.tokens) - 1) / made.times["decode"]
        print(f"decode behind it: {speed:.1f} tok/s", flush=True)
        return {"tokens_per_s": speed, "new_tokens": len(made.tokens)}

    def yardstick(self) -> tuple[dict[str, Any], bool]:
        passes = yardstick.Passes(self.engine, self.args.images, self.stack, self.args.options)
        count = self.args.tokens[-1]
        found = yardstick.measure(passes, count, min(self.chunk, count), self.args.repeats, FAR, self.rates)
        if self.args.images is not None:
            found["images"] = json.loads((self.args.images / "manifest.json").read_text())
        yardstick.show(found)
        good = max(found["errors"].values()) < FAR
        good &= self.engine.facts.is_simulator or found["ratio"] >= 0.95
        return found, good

    def equality(self) -> tuple[dict[str, Any], bool]:
        runs = []
        for count, chunks, rows, check in self.args.equality:
            wanted = Namespace(
                pack=self.args.pack,
                rows=1,
                rows_chunks="",
                serial_rows=rows,
                serial_check=check,
                cuts=1,
                seed=1,
                deep_rows=min(64, self.engine.limits.deep_rows),
                new_tokens=min(24, self.args.new_tokens),
            )
            runs.append(prompt_equality.compare(self.engine, wanted, count, chunks))
        return {"runs": runs}, all(case["ok"] for run in runs for case in run["cases"])

    def curve(self) -> tuple[dict[str, Any], bool]:
        points = bench_prefill.curve(self.engine, self.args.curve, 1, self.rates, self.chunk)
        self.args.out.joinpath("prompt-curve.svg").write_text(
            bench_prefill.curve_svg(points), encoding="utf-8"
        )
        return {"curve": points}, True

    def long(self) -> tuple[dict[str, Any], bool]:
        count = self.engine.limits.context_tokens
        seconds, token = bench_prefill.timed_prompt(self.engine, count, None)
        memory = self.engine.memory()
        taken = memory.total_bytes - memory.free_bytes
        print(
            f"{count} tokens: {seconds:.2f} s, {count / seconds:.0f} tok/s; device bytes taken {taken}",
            flush=True,
        )
        return {"tokens": count, "seconds": seconds, "token": token, "memory": memory.as_dict()}, True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pack", default="", help="folder or synth:<model>[?...]; by default of the device's size"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "sim"))
    parser.add_argument("--images", type=Path, help="folder that yardstick.py --build made")
    parser.add_argument("--out", type=Path, required=True, help="folder for the receipts")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, in order")
    parser.add_argument("--options", default="", help="of the yardstick, comma list; '': all")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    args.pack = args.pack or ("synth:tiny" if args.device == "sim" else "synth:full?ngram_rows=4000000")
    small = args.device == "sim"
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts are of {','.join(PARTS)}, not {','.join(sorted(unknown))}")
    if "yardstick" in parts and args.images is None and not small:
        parser.error("the yardstick needs --images, the folder that yardstick.py --build made")
    args.tokens = [20, 40] if small else [2048, 16384]
    args.new_tokens = 5 if small else 97
    args.curve = [16, 32] if small else [2048, 4096, 8192, 16384, 32768, 65536]
    # tokens, chunk sizes, rows a launch of the serial run, tokens on which several rows are held to one
    args.equality = (
        [(33, [8, 16], 1, 0), (40, [16, 40], 16, 20)]
        if small
        else [(4099, [256, 1024, 2048], 1, 0), (16384, [4096, 16384], 16, 512)]
    )
    limits = Limits(
        context_tokens=128 if small else 262144,
        rows=16,
        prompt_rows=16,
        chunk=64 if small else 16384,
        deep_rows=8 if small else 512,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    verdicts: dict[str, bool] = {}
    with ExitStack() as stack:
        if small:
            yardstick.load_simulator()
        engine = stack.enter_context(Engine.open(args.pack, limits, device=args.device))
        print(f"device {engine.facts}; opened {args.pack} in {engine.open_seconds:.1f} s", flush=True)
        suite = Suite(engine, args, stack)
        for name in parts:
            started = time.perf_counter()
            part: Part = getattr(suite, name)
            found, verdicts[name] = part()
            found |= {
                "pack": args.pack,
                "limits": vars(limits),
                "open_s": engine.open_seconds,
                "ok": verdicts[name],
            }
            write_receipt(args.out / f"prompt-{name}.json", engine.facts, found)
            took = time.perf_counter() - started
            print(f"{'PASS' if verdicts[name] else 'FAIL'} {name} in {took:.1f} s", flush=True)
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
