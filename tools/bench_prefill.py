#!/usr/bin/env python3
"""Exact prompts: tokens/s, time by kernel against its floor, growth with length, and what they cost decode.

    python tools/bench_prefill.py --pack 'synth:full?ngram_rows=4000000' --tokens 2048,16384 --profile \\
        --curve 2048,4096,8192,16384,32768,65536 --svg curve.svg --check-decode --long 262144 --out out.json

A prompt's time is the host's clock around all of it, last row's logits and draw with it: the median of
--repeats after one that is not counted.  --profile times every launch of a prompt by events, one between two
launches, so a kernel's time holds the gap in front of it; floors are those of bench/prefill_floor.py.
Exit 1 when repeats drew different tokens, the deep buffers are not what was planned, or, on a GPU, the deep
pass slows decode or a short prompt.  With --device sim times mean nothing: it shows that the program works.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_decode import decode, prompt_ids

from flashnext_drv.bench.chart import Panel, chart_svg
from flashnext_drv.bench.prefill_floor import CLASSES, Rates, Work, WorkOf, kernel_class
from flashnext_drv.bench.receipt import write_receipt
from flashnext_drv.drv.module import Launch
from flashnext_drv.drv.stream import Event, elapsed_ms
from flashnext_drv.engine.engine import Engine, Limits, Prefill
from flashnext_drv.engine.plan import plan
from flashnext_drv.engine.sequence import Sequence
from flashnext_drv.model.steps import Step
from flashnext_drv.state.deep import ChunkRun

# Measured by others than us on the same kind of machine: exllamav3 1.6.5, a synthetic pack of 4 layers of the
# published widths at 3.05 bits a weight, scaled to 48 layers, prompts of 16k to 32k tokens.  tok/s by chunk.
PEER = {2048: (3400, 3700), 4096: (5100, 5500)}
PEER_SOURCE = "exllamav3 1.6.5, one H200, 4 synthetic layers of the published widths scaled to 48"
SHORT_PROMPT = 64
GRAIN = 4 << 20     # the driver takes memory in blocks of 2 MiB, of which a neighbour may hold a part
SLOWER = 1.02  # a time up to so much larger is the clock's noise
SPLIT = ("deep_linear", "deep_site_up", "deep_input")  # told apart by the part of a layer they serve


def timed_prompt(engine: Engine, n_tokens: int, prefill: Prefill | None) -> tuple[float, int]:
    """(seconds, token drawn) of one prompt."""
    with engine.sequence() as sequence:
        sequence.extend(prompt_ids(n_tokens, engine.config.vocab))
        engine.rank.stream.synchronize()
        started = time.perf_counter()
        token = engine.prompt([sequence], draw=True, prefill=prefill)[0]
        return time.perf_counter() - started, token


def median_prompt(
    engine: Engine, n_tokens: int, repeats: int, prefill: Prefill | None = None
) -> dict[str, Any]:
    runs = [timed_prompt(engine, n_tokens, prefill) for _ in range(repeats + 1)][1:]
    seconds = sorted(s for s, _ in runs)
    median = seconds[len(seconds) // 2]
    return {
        "tokens": n_tokens,
        "seconds": median,
        "seconds_all": seconds,
        "tokens_per_s": n_tokens / median,
        "token": runs[0][1],
        "same_token": len({token for _, token in runs}) == 1,
    }


def profile(engine: Engine, n_tokens: int, rates: Rates, chunk: int) -> dict[str, Any]:
    """Device time of every launch of a prompt, by kernel and by class.  A rest too short for the deep pass is
    left out; so are the head and the draw."""
    rank = engine.rank
    assert rank.deep is not None
    ms: dict[str, float] = defaultdict(float)
    by_class: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    works: dict[str, Work] = defaultdict(Work)
    floors: dict[str, float] = defaultdict(float)
    rows = 0
    with engine.sequence() as sequence, ExitStack() as stack:
        sequence.extend(prompt_ids(n_tokens, engine.config.vocab))
        events: list[Event] = []
        while (n := min(chunk, sequence.n_pending)) and (not rows or n >= engine.limits.deep_rows):
            bucket = rank.deep.layout.bucket(n)
            steps = rank.deep.steps(bucket)
            while len(events) <= len(steps):
                events.append(stack.enter_context(Event(rank.ctx, "prefill.mark", timing=True)))
            work_of = WorkOf(rank.deep.layout, engine.pack, sequence.position, n)
            marked_chunk(engine, sequence, n, bucket, rank.deep.launches(bucket), events)
            for i, step in enumerate(steps):
                name = key_of(step)
                took, work = elapsed_ms(events[i], events[i + 1]), work_of(step)
                ms[name] += took
                by_class[kernel_class(step)] += took
                calls[name] += 1
                works[name] += work
                floors[name] += work.seconds(rates) * 1e3
            rows += n
    total = sum(ms.values())
    kernels = {
        name: {
            "calls": calls[name],
            "ms": ms[name],
            "share": _ratio(ms[name], total),
            "tflop_s": _ratio(works[name].flop * 1e-9, ms[name]),
            "gb_s": _ratio(works[name].bytes * 1e-6, ms[name]),
            "floor_ms": floors[name],
            "share_of_floor": _ratio(floors[name], ms[name]),
        }
        for name in sorted(ms, key=lambda name: -ms[name])
    }
    scan = by_class["scan"]
    return {
        "tokens": n_tokens,
        "rows": rows,
        "ms": total,
        "floor_ms": sum(floors.values()),
        "products_ms": sum(work.flop for work in works.values()) / rates.flop_s * 1e3,
        "kernels": kernels,
        "classes_ms": {name: by_class[name] for name in CLASSES},
        "scan_share": _ratio(scan, total),
        "without_scan_ms": total - scan,
        "indexer_ms": by_class["index"],
    }


def key_of(step: Step) -> str:
    """The name under which a launch's time is added up."""
    where = re.sub(r"^L\d+\.?", "", step.scope)
    return f"{step.kernel} {where}" if step.kernel in SPLIT else step.kernel


def marked_chunk(engine: Engine, sequence: Sequence, n_rows: int, bucket: int, launches: list[Launch],
                 events: list[Event]) -> None:
    """The next n_rows rows as one chunk by `launches`, an event in front of each and one behind the last;
    waits for it."""
    rank = engine.rank
    assert rank.deep is not None
    rank.pages.reserve(sequence.i_slot, sequence.position + n_rows)
    tokens = sequence.next_tokens(n_rows, engine.config.eos_id)
    rank.tables.round[0]["n_rows"] = rank.tables.round[0]["n_runs"] = 0
    with rank.ctx.active():
        rank.tables.publish(rank.stream)
        rank.deep.buffers.publish(
            rank.stream, (ChunkRun(sequence.i_slot, sequence.position, tokens),), bucket
        )
        rank.stream.record(events[0])
        for launch, event in zip(launches, events[1:], strict=False):
            launch.run(rank.stream)
            rank.stream.record(event)
        rank.stream.synchronize()
    sequence.n_done += n_rows


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def print_profile(found: dict[str, Any]) -> None:
    print(
        f"{'kernel':<34} {'calls':>6} {'ms':>9} {'share':>6} {'TFLOP/s':>8} {'GB/s':>7} {'floor ms':>9} "
        f"{'of floor':>8}"
    )
    for name, k in found["kernels"].items():
        print(
            f"{name:<34} {k['calls']:>6} {k['ms']:>9.3f} {k['share']:>6.1%} {k['tflop_s']:>8.1f} "
            f"{k['gb_s']:>7.0f} {k['floor_ms']:>9.3f} {k['share_of_floor']:>8.1%}"
        )
    classes = ", ".join(f"{name} {ms:.2f}" for name, ms in found["classes_ms"].items())
    print(
        f"{found['rows']} rows: launches {found['ms']:.2f} ms; products alone {found['products_ms']:.2f} ms, "
        f"floor of the launches {found['floor_ms']:.2f} ms "
        f"({_ratio(found['floor_ms'], found['ms']):.1%}); scan {found['scan_share']:.1%}, without it "
        f"{found['without_scan_ms']:.2f} ms; ms by part: {classes}",
        flush=True,
    )


def buffers(engine: Engine) -> dict[str, Any]:
    """Planned bytes of the deep buffers beside what the ledger holds and the driver took."""
    rank = engine.rank
    if rank.deep is None:
        return {"planned": 0, "live": 0, "granted": 0, "equal": False, "refused": rank.deep_refused}
    layout = rank.deep.layout
    planned = plan(rank.layout, engine.pack, engine.facts.is_simulator, layout).device["deep"]
    row = next(r for r in engine.ledger.table() if (r.owner, r.tier) == ("deep", "device"))
    print(
        f"deep buffers: {layout.rows} rows, planned {planned} bytes, live {row.live_bytes}, granted "
        f"{row.granted_bytes}",
        flush=True,
    )
    return {
        "planned": planned,
        "live": row.live_bytes,
        "granted": row.granted_bytes,
        "rows": layout.rows,
        "equal": planned == row.live_bytes and abs(row.granted_bytes - planned) <= GRAIN,
        "spans": layout.span_bytes(),
    }


def curve(engine: Engine, counts: list[int], repeats: int, rates: Rates, chunk: int) -> list[dict[str, Any]]:
    points = []
    for count in counts:
        point = median_prompt(engine, count, repeats)
        made = profile(engine, count, rates, chunk)
        point |= {
            "indexer_ms": made["indexer_ms"],
            "launches_ms": made["ms"],
            "scan_share": made["scan_share"],
        }
        point["us_a_token_less_indexer"] = (point["seconds"] * 1e6 - made["indexer_ms"] * 1e3) / count
        points.append(point)
        print(
            f"{count:>7} tokens: {point['seconds'] * 1e3:10.2f} ms, {point['tokens_per_s']:9.0f} tok/s, "
            f"indexer {made['indexer_ms']:8.2f} ms, rest {point['us_a_token_less_indexer']:7.2f} us a token",
            flush=True,
        )
    return points


def curve_svg(points: list[dict[str, Any]]) -> str:
    whole = [(p["tokens"], p["seconds"] * 1e3) for p in points]
    index = [(p["tokens"], p["indexer_ms"]) for p in points]
    rest = [(p["tokens"], p["seconds"] * 1e3 - p["indexer_ms"]) for p in points]
    each = [(p["tokens"], p["us_a_token_less_indexer"]) for p in points]
    speed = [(p["tokens"], p["tokens_per_s"]) for p in points]
    return chart_svg(
        [
            Panel(
                "Time of a prompt",
                "tokens",
                "ms",
                {"whole": whole, "without indexer": rest, "indexer": index},
            ),
            Panel("Speed", "tokens", "tok/s", {"exact prompt": speed}),
            Panel("Time of a token without the indexer", "tokens", "us", {"a token": each}),
        ]
    )


def decode_cost(pack: Any, limits: Limits, device: str, repeats: int, n_tokens: int) -> dict[str, Any]:
    """Decode and a short prompt with the deep pass reserved and without, each the faster of two engines'
    medians: the modes take turns, as the host warms up and its clock drifts."""
    names = ("decode_ms", "short_prompt_ms")
    found: dict[str, Any] = {}
    equal = True
    for mode in ("open", "off", "off", "open"):
        with Engine.open(pack, replace(limits, deep=mode), device=device) as engine:
            with engine.sequence() as sequence:
                sequence.extend(prompt_ids(SHORT_PROMPT, engine.config.vocab))
                sequence.extend([engine.prompt([sequence], draw=True, prefill=Prefill(deep=False))[0]])
                decode(engine, sequence, 4)
                tokens, seconds = decode(engine, sequence, n_tokens)
            short = median_prompt(engine, min(SHORT_PROMPT, limits.context_tokens), repeats)
            one = {
                "deep": engine.rank.deep is not None,
                "decode_ms": sorted(seconds)[len(seconds) // 2] * 1e3,
                "short_prompt_ms": short["seconds"] * 1e3,
                "tokens": tokens,
                "short_token": short["token"],
            }
            simulated = engine.facts.is_simulator
        before = found.setdefault(mode, one)
        before |= {name: min(before[name], one[name]) for name in names}
        before["decode_tokens_per_s"] = 1e3 / before["decode_ms"]
        equal = equal and all(one[name] == found["open"][name] for name in ("tokens", "short_token"))
    found["ratios"] = {name: found["open"][name] / found["off"][name] for name in names}
    found["equal"] = equal
    found["ok"] = found["equal"] and (simulated or max(found["ratios"].values()) <= SLOWER)
    print(
        f"with the deep pass / without: {json.dumps(found['ratios'])}, tokens equal {found['equal']}; decode "
        f"{found['open']['decode_tokens_per_s']:.1f} and {found['off']['decode_tokens_per_s']:.1f} tok/s"
    )
    return found


def long_prompt(pack: Any, limits: Limits, device: str, n_tokens: int) -> dict[str, Any]:
    """One prompt of n_tokens on an engine of its own."""
    with Engine.open(pack, replace(limits, context_tokens=n_tokens), device=device) as engine:
        held = buffers(engine)
        seconds, token = timed_prompt(engine, n_tokens, None)
        memory = engine.memory()
        print(memory.table(), file=sys.stderr)
        print(
            f"{n_tokens} tokens: {seconds:.2f} s, {n_tokens / seconds:.0f} tok/s, token {token}; "
            f"device bytes taken {memory.total_bytes - memory.free_bytes}",
            flush=True,
        )
        return {
            "tokens": n_tokens,
            "seconds": seconds,
            "tokens_per_s": n_tokens / seconds,
            "token": token,
            "prompts": vars(engine.prompts),
            "memory": memory.as_dict(),
            "buffers": held,
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pack", default="", help="folder or synth:<model>[?...]; by default of the device's size"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "sim"))
    parser.add_argument("--tokens", default="2048,16384", help="prompt lengths, comma list; '' for none")
    parser.add_argument("--chunk", type=int, default=0, help="most rows of a segment; 0: the memory plan's")
    parser.add_argument("--deep-rows", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="time by kernel for each of --tokens")
    parser.add_argument("--curve", default="", help="prompt lengths of the curve, comma list")
    parser.add_argument("--svg", help="write the curve here")
    parser.add_argument(
        "--long", type=int, default=0, help="run one prompt of so many tokens, engine of its own"
    )
    parser.add_argument("--check-decode", action="store_true", help="what the deep pass costs decode")
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--flop-s", type=float, default=Rates.flop_s)
    parser.add_argument("--vector-s", type=float, default=Rates.vector_s)
    parser.add_argument("--bytes-s", type=float, default=Rates.bytes_s)
    parser.add_argument("--out", help="write a receipt here")
    args = parser.parse_args()
    args.pack = args.pack or ("synth:tiny" if args.device == "sim" else "synth:full?ngram_rows=4000000")
    rates = Rates(args.flop_s, args.vector_s, args.bytes_s)
    counts = [int(n) for n in args.tokens.split(",") if n]
    points = [int(n) for n in args.curve.split(",") if n]
    limits = Limits(
        context_tokens=max([*counts, *points, SHORT_PROMPT + args.decode_tokens]) + 16,
        rows=16,
        prompt_rows=16,
        chunk=args.chunk,
        deep_rows=args.deep_rows,
    )
    results: dict[str, Any] = {
        "peer": {"tokens_per_s_by_chunk": PEER, "source": PEER_SOURCE},
        "rates": vars(rates),
        "limits": vars(limits),
        "profiles": {},
    }
    good = True
    with Engine.open(args.pack, limits, device=args.device) as engine:
        pack, facts, chunk = engine.pack, engine.facts, engine.rank.chunk
        print(f"device {facts}; opened {args.pack} in {engine.open_seconds:.1f} s", file=sys.stderr)
        results |= {"open_s": engine.open_seconds, "chunk": chunk, "buffers": buffers(engine)}
        good &= results["buffers"]["equal"]
        results["prompts"] = []
        for count in counts:
            found = median_prompt(engine, count, args.repeats)
            results["prompts"].append(found)
            good &= found["same_token"]
            print(
                f"{count} tokens, chunk {chunk}: {found['seconds'] * 1e3:.2f} ms, "
                f"{found['tokens_per_s']:.0f} tok/s",
                flush=True,
            )
            if args.profile and engine.rank.deep is not None:
                results["profiles"][str(count)] = profile(engine, count, rates, chunk)
                print_profile(results["profiles"][str(count)])
        print(
            "peer: "
            + "; ".join(f"{a}-{b} tok/s at chunk {n}" for n, (a, b) in PEER.items())
            + f" ({PEER_SOURCE})"
        )
        if points and engine.rank.deep is not None:
            results["curve"] = curve(engine, points, min(args.repeats, 3), rates, chunk)
            if args.svg:
                Path(args.svg).write_text(curve_svg(results["curve"]), encoding="utf-8")
        results["memory"] = engine.memory().as_dict()
        print(engine.memory().table(), file=sys.stderr)
        if args.out:  # what was measured stays, whatever the engines after this one do
            write_receipt(args.out, facts, results)
    if args.check_decode:
        results["decode"] = decode_cost(pack, limits, args.device, args.repeats, args.decode_tokens)
        good &= results["decode"]["ok"]
    if args.long:
        results["long"] = long_prompt(pack, limits, args.device, args.long)
        good &= results["long"]["buffers"]["equal"]
    if args.out:
        write_receipt(args.out, facts, results | {"ok": good})
    print("PASS" if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
