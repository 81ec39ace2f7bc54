#!/usr/bin/env python3
"""Times the dense products of a prompt chunk at the model's real shapes against the tensor cores' peak.

    python3 tools/bench_deep.py --device cuda --out bench_deep.json [--only gdn] [--rows 2048,16384]

Each shape runs as one captured graph of launches.  The floor is the products' operations (padding not
counted) over the peak, an argument whose default is an H200's: 989 TFLOP/s of f16.  With --device sim the
shapes are tiny and the times mean nothing: it only shows that the program works.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_linear import Bench, Built, measure, weight_bytes

from flashnext_drv.bench.receipt import write_receipt
from flashnext_drv.check.cases_exl3 import Dot, parse_linear
from flashnext_drv.drv import api
from flashnext_drv.kernels.deep import deep_tiles
from flashnext_drv.kernels.tables import LINEAR, ROUND

REAL = {
    "gdn_in": "mul1_5 2560x10240:2; mul1_5 2560x6144:2; f16 2560x48; f16 2560x48",
    "gdn_out": "mul1_5 6144x2560/8:1",
    "qsa_in": "mul1_5 2560x12288; mul1_5 2560x512; mul1_5 2560x512; mul1_3 2560x640",
    "site_down": "f16 10240x320; f16 10240x4",
    "site_up": "f16 320x10240",
    "router": "f16 2560x512; f16 2560x1",
    "ple": "f16 2560x10240; f16 2560x2560",
}
TINY = {"gdn_in": "mul1_5 256x128; f16 256x5", "site_up": "f16 32x512"}


def build(bench: Bench, name: str, texts: str, rows: int) -> Built:
    dots = [parse_linear(text) for text in texts.split(";")]
    cap = -(-rows // 128) * 128
    sizes = [
        weight_bytes(d) + 2 * (d.k + d.n) + cap * -(-d.k // 64) * 128 + cap * d.n * 4 + 4096 for d in dots
    ]
    site = 4 * cap * (dots[0].n + 8 + dots[0].n // 4) + 8 * dots[0].n if name == "site_up" else 0
    arena = bench.arena("deep", sum(sizes) + site + (1 << 16))
    table, first = np.zeros(len(dots), LINEAR), 0
    for j, dot in enumerate(dots):
        _describe(bench, arena, table[j], dot, cap)
        table[j]["first_warp"], table[j]["n_warps"] = first, deep_tiles(dot.n)
        first += deep_tiles(dot.n)
    args: dict[str, Any] = {"round": bench.put(arena, "round", np.array([(rows, 1, cap, 0)], ROUND))}
    linears = bench.put(arena, "linears", table)
    if name == "site_up":
        hidden = dots[0].n // 4
        args |= {"linear": linears, "hidden": hidden, "m": arena.span("m", cap * hidden * 4)}
        for span, count in (("streams", cap * 4 * hidden), ("rinv", cap * 4), ("w", 4 * hidden)):
            args[span] = bench.filled(arena, span, 4 * count, True)
        launch = bench.kernels.launch("deep_site_up", hidden // 32 * (cap // 128), **args)
    else:
        args |= {"linears": linears, "n_linears": len(dots)}
        launch = bench.kernels.launch("deep_linear", first * (cap // 128), **args)
    flop = 2 * rows * sum(d.k * d.n for d in dots)
    return Built([launch], flop, 0, [arena])


def _describe(bench: Bench, arena: Any, one: Any, dot: Dot, cap: int) -> None:
    one["k"], one["n"], one["leaves"], one["segments"], one["tiled"] = (
        dot.k,
        dot.n,
        dot.leaves,
        dot.segments,
        1,
    )
    one["w"]["format"] = dot.format
    one["w"]["data"] = bench.filled(arena, "w", weight_bytes(dot), dot.dtype != "exl3").address
    if dot.dtype == "exl3":
        one["w"]["svh"] = bench.filled(arena, "svh", 2 * dot.n, True).address
    one["x"] = bench.filled(arena, "x", cap * -(-dot.k // 64) * 128, True).address
    one["out"] = arena.span("out", cap * dot.n * 4).address


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("sim", "cuda", "auto"), default="auto")
    parser.add_argument("--out", type=Path, help="JSON receipt")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--rows", default="2048,16384")
    parser.add_argument("--launches", type=int, default=20, help="launches a graph")
    parser.add_argument("--replays", type=int, default=3)
    parser.add_argument("--peak", type=float, default=989e12, help="FLOP/s of the floor")
    options = parser.parse_args()
    results: dict[str, Any] = {"peak_flop_s": options.peak}
    with ExitStack() as stack:
        api.ensure(options.device)
        sim = api.loaded() == "sim"
        bench = Bench(stack, options.device, 1 << 16 if sim else 192 << 20, ("deep",))
        print(bench.ctx.facts)
        for name, texts in (TINY if sim else REAL).items():
            for rows in [5] if sim else [int(r) for r in options.rows.split(",")]:
                if options.only not in name:
                    continue
                with ExitStack() as bench.arenas:
                    built = build(bench, name, texts, rows)
                    bench.stream.synchronize()
                    best = min(measure(bench, built, 1 if sim else options.launches, options.replays))
                floor = built.bytes_moved / options.peak * 1e6  # here: operations
                rate = built.bytes_moved / best * 1e-6 if best else 0.0
                print(
                    f"{name:10} rows {rows:6} {best:9.1f} us {rate:7.1f} TFLOP/s, floor {floor:8.1f} us "
                    f"({100 * floor / best if best else 0:.0f}%)",
                    flush=True,
                )
                results[f"{name}/rows{rows}"] = {
                    "us_best": best,
                    "flop": built.bytes_moved,
                    "floor_us": floor,
                }
        if options.out:
            write_receipt(options.out, bench.ctx.facts, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
