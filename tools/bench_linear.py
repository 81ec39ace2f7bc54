#!/usr/bin/env python3
"""Times the weight products at the model's real shapes against their floors.

    python3 tools/bench_linear.py --device cuda --out bench_linear.json [--only moe] [--rows 1,8,16]

Each shape runs as one captured graph of launches over enough copies of its weights that none is left in L2;
the time of a launch is the graph's divided by its launches, so it includes the gap between nodes.  The floor
is the larger of bytes / bandwidth and trellis weights / decode rate; both rates are arguments, with measured
ceilings of an H200 as defaults.  With --device sim the shapes are tiny and the times mean nothing: it only
shows that the program works.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flashnext_drv.bench.receipt import write_receipt
from flashnext_drv.check.cases_exl3 import Dot, parse_linear
from flashnext_drv.check.contract import bits
from flashnext_drv.drv import api
from flashnext_drv.drv.context import Context
from flashnext_drv.drv.graph import capture
from flashnext_drv.drv.memory import DeviceArena, Span, copy_async, copy_to_device
from flashnext_drv.drv.module import Launch
from flashnext_drv.drv.stream import Event, Stream, elapsed_ms
from flashnext_drv.kernels.bind import Kernels
from flashnext_drv.kernels.exl3 import dot_segments, gu_segments
from flashnext_drv.kernels.tables import LINE, LINEAR, ROUND, ROUTE
from flashnext_drv.ledger import Ledger

N_SLOTS = 11
REAL = {
    "moe_gu": ("moe_gemv_gu", "mul1_3 2560x640; mul1_5 2560x640"),
    "moe_down": ("moe_gemv_down", "mul1_3 640x2560; mul1_5 640x2560"),
    "gdn_in": ("linear", "mul1_5 2560x10240:2; mul1_5 2560x6144:2; f16 2560x48; f16 2560x48"),
    "gdn_out": ("linear", "mul1_5 6144x2560/8:1"),
    "qsa_in": ("linear", "mul1_5 2560x12288; mul1_5 2560x512; mul1_5 2560x512; mul1_3 2560x640"),
    "site_down": ("linear", "f16 10240x320; f16 10240x4"),
    "site_up": ("linear", "f16 320x10240"),
    "router": ("linear", "f16 2560x512; f16 2560x1"),
    "ple": ("linear", "f16 2560x10240; f16 2560x2560"),
    "lm_head": ("linear", "mul1_5 2560x248320"),
    "rate_mul1_2": ("linear", "mul1_2 2560x40960"),
    "rate_mul1_3": ("linear", "mul1_3 2560x40960"),
    "rate_mul1_4": ("linear", "mul1_4 2560x40960"),
    "rate_mul1_5": ("linear", "mul1_5 2560x40960"),
    "rate_mul1_6": ("linear", "mul1_6 2560x40960"),
    "rate_mul1_8": ("linear", "mul1_8 2560x40960"),
    "rate_mul1_2.5": ("linear", "mul1_2.5 2560x40960"),
    "rate_mcg_4": ("linear", "mcg_4 2560x40960"),
    "rate_3inst_3": ("linear", "3inst_3 2560x40960"),
    "rate_bf16": ("linear", "bf16 2560x20480"),
}
TINY = {
    "moe_gu": ("moe_gemv_gu", "mul1_3 256x128; mul1_5 256x128"),
    "moe_down": ("moe_gemv_down", "mul1_3 128x256; mul1_5 128x256"),
    "linears": ("linear", "mul1_5 512x128; mul1_3 256x128/2; f16 512x20; bf16 64x5"),
}


@dataclass
class Built:
    """Launches over the copies of one shape, and what one of them does.  bytes: read and written once."""

    launches: list[Launch]
    bytes_moved: int
    trellis_weights: int
    holds: list[DeviceArena] = field(default_factory=list)


class Bench:
    """One device, its kernels, and a block of random bytes to fill weights from."""

    def __init__(
        self,
        stack: ExitStack,
        device: str,
        cold_bytes: int,
        families: tuple[str, ...] = ("exl3", "moe_gemv"),
    ) -> None:
        api.ensure(device)
        self.arenas, self.cold_bytes = (
            stack,
            cold_bytes,
        )  # arenas: closed with it; main gives each shape its own
        self.ctx = stack.enter_context(Context(0, ledger=Ledger()))
        self.stream = stack.enter_context(Stream(self.ctx, "bench"))
        self.kernels = stack.enter_context(Kernels(self.ctx, families))
        words = bits(1, "bench", (min(cold_bytes, 8 << 20) // 4,))
        self.block = words.tobytes()
        self.finite = (words & np.uint32(0xBBFFBBFF)).tobytes()  # as f16 and bf16: no infinity, no NaN

    def filled(self, arena: DeviceArena, name: str, size: int, finite: bool) -> Span:
        """A span of random bytes: one block from the host, then copies of it on the device."""
        span = arena.span(name, size)
        head = min(size, len(self.block))
        copy_to_device(
            self.stream,
            span.sub(0, head),
            np.frombuffer((self.finite if finite else self.block)[:head], "u1"),
        )
        while head < size:
            step = min(head, size - head)
            copy_async(self.stream, span.sub(head, step), span.sub(0, step), step)
            head += step
        return span

    def put(self, arena: DeviceArena, name: str, array: np.ndarray) -> Span:
        span = arena.span(name, array.nbytes)
        copy_to_device(self.stream, span, array)
        return span

    def arena(self, name: str, size: int) -> DeviceArena:
        return self.arenas.enter_context(DeviceArena(self.ctx, name, size))

    def copies(self, size: int) -> int:
        """Copies of `size` bytes that L2 cannot hold."""
        return 1 + -(-self.cold_bytes // size)


def weight_bytes(dot: Dot) -> int:
    return int(dot.k * dot.n * dot.bits) // 8 if dot.dtype == "exl3" else -(-dot.n // 16) * 16 * dot.k * 2


def build_linear(bench: Bench, texts: str, rows: int) -> Built:
    dots = [parse_linear(text) for text in texts.split(";")]
    cap = 8 if rows <= 8 else 16
    size = sum(weight_bytes(dot) for dot in dots)
    shared = sum(cap * dot.k * 2 + dot.units * cap * dot.n * 4 + 1024 for dot in dots)
    n_copies = bench.copies(size)
    arena = bench.arena("linear", (size + 4096 * len(dots)) * n_copies + shared + (1 << 16))
    round_at = bench.put(arena, "round", np.array([(rows, rows, cap, 0)], ROUND))
    x = [bench.filled(arena, "x", cap * dot.k * 2, True) for dot in dots]
    part = [arena.span("part", dot.units * cap * dot.n * 4) for dot in dots]
    launches = []
    for _ in range(n_copies):
        table, first = np.zeros(len(dots), LINEAR), 0
        for j, dot in enumerate(dots):
            data = bench.filled(arena, "w", weight_bytes(dot), dot.dtype != "exl3")
            one = table[j]
            one["w"]["data"], one["w"]["format"], one["x"], one["part"] = (
                data.address,
                dot.format,
                x[j].address,
                part[j].address,
            )
            one["k"], one["n"], one["leaves"], one["segments"] = dot.k, dot.n, dot.leaves, dot.segments
            one["first_warp"], one["n_warps"], one["x_stride"] = first, -(-dot.n // 32) * dot.units, dot.k
            first += int(one["n_warps"])
        linears = bench.put(arena, "linears", table)
        launches.append(
            bench.kernels.launch(
                f"linear_gemv_n{cap}",
                first,
                round=round_at,
                linears=linears,
                n_linears=len(dots),
            )
        )
    moved = size + sum(rows * (dot.k * 2 + dot.units * dot.n * 4) for dot in dots)
    return Built(launches, moved, sum(dot.k * dot.n for dot in dots if dot.dtype == "exl3"), [arena])


def build_moe(bench: Bench, kernel: str, texts: str, rows: int) -> Built:
    """Every row of every copy goes to experts and a shared expert of its own."""
    expert, shared = (parse_linear(text) for text in texts.split(";"))
    up = kernel == "moe_gemv_gu"
    hidden, width = (expert.k, expert.n) if up else (expert.n, expert.k)
    parts = ("gate", "up") if up else ("down",)
    row_size = len(parts) * (weight_bytes(expert) * (N_SLOTS - 1) + weight_bytes(shared))
    n_copies = bench.copies(row_size * rows)
    units = (gu_segments if up else dot_segments)(expert.k, expert.n)
    part_size = units * rows * N_SLOTS * len(parts) * expert.n * 4
    x_size = rows * N_SLOTS * len(parts) * expert.k * 2
    n_lines = n_copies * rows * N_SLOTS
    arena = bench.arena(
        "moe",
        (row_size + 256 * len(parts) * N_SLOTS) * rows * n_copies
        + part_size
        + x_size
        + n_lines * LINE.itemsize
        + n_copies * (rows * N_SLOTS * ROUTE.itemsize + 256)
        + (1 << 16),
    )
    round_at = bench.put(arena, "round", np.array([(rows, rows, rows, 0)], ROUND))
    x, part = bench.filled(arena, "x", x_size, True), arena.span("part", part_size)
    lines = np.zeros(n_lines, LINE)
    lines["width"] = width
    for i in range(n_lines):
        dot = shared if i % N_SLOTS == N_SLOTS - 1 else expert
        for name in parts:
            lines[i][name]["data"] = bench.filled(arena, "w", weight_bytes(dot), False).address
            lines[i][name]["format"] = dot.format
    lines_at = bench.put(arena, "lines", lines)
    launches = []
    for c in range(n_copies):
        routes = np.zeros((rows, N_SLOTS), ROUTE)
        routes["expert"] = c * rows * N_SLOTS + np.arange(rows * N_SLOTS).reshape(rows, N_SLOTS)
        grid = (expert.n // 32 * units, len(parts) * N_SLOTS, rows)
        launches.append(
            bench.kernels.launch(
                kernel,
                grid,
                round=round_at,
                routes=bench.put(arena, "routes", routes),
                lines=lines_at,
                x=x,
                part=part,
                hidden=hidden,
                n_slots=N_SLOTS,
                width_cap=width,
            )
        )
    return Built(
        launches,
        row_size * rows + x_size + part_size,
        rows * N_SLOTS * len(parts) * expert.k * expert.n,
        [arena],
    )


def measure(bench: Bench, built: Built, launches: int, replays: int) -> list[float]:
    """Microseconds a launch in each replay of one graph."""
    n = max(1, launches // len(built.launches)) * len(built.launches)
    with capture(bench.stream) as cap:
        for i in range(n):
            built.launches[i % len(built.launches)].run(bench.stream)
    with (
        cap.graph("bench", tuple(built.holds)) as graph,
        graph.instantiate() as run,
        Event(bench.ctx, "start", timing=True) as start,
        Event(bench.ctx, "end", timing=True) as end,
    ):
        run.upload(bench.stream)
        run.launch(bench.stream)  # not timed
        times = []
        for _ in range(replays):
            bench.stream.record(start)
            run.launch(bench.stream)
            bench.stream.record(end)
            end.synchronize()
            times.append(elapsed_ms(start, end) * 1000 / n)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("sim", "cuda", "auto"), default="auto")
    parser.add_argument("--out", type=Path, help="JSON receipt")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--rows", default="1,8,16", help="rows a launch (moe: up to 4)")
    parser.add_argument("--launches", type=int, default=200, help="launches a graph")
    parser.add_argument("--replays", type=int, default=5)
    parser.add_argument("--bandwidth", type=float, default=4.4e12, help="bytes/s of the floor")
    parser.add_argument("--decode-rate", type=float, default=3.4e12, help="trellis weights/s of the floor")
    options = parser.parse_args()
    results: dict[str, Any] = {
        "bandwidth_bytes_s": options.bandwidth,
        "decode_rate_weights_s": options.decode_rate,
    }
    with ExitStack() as stack:
        api.ensure(options.device)
        sim = api.loaded() == "sim"
        bench = Bench(stack, options.device, 1 << 16 if sim else 192 << 20)
        print(bench.ctx.facts)
        for name, (kind, texts) in (TINY if sim else REAL).items():
            if options.only not in name:
                continue
            for rows in sorted(
                {min(int(r), 4) if kind != "linear" else int(r) for r in options.rows.split(",")}
            ):
                if name.startswith("rate_") and rows != 1:
                    continue
                with ExitStack() as bench.arenas:
                    built = (
                        build_linear(bench, texts, rows)
                        if kind == "linear"
                        else build_moe(bench, kind, texts, rows)
                    )
                    bench.stream.synchronize()
                    times = measure(bench, built, 3 if sim else options.launches, options.replays)
                results[f"{name}/rows{rows}"] = report(name, rows, built, times, options)
        if options.out:
            write_receipt(options.out, bench.ctx.facts, results)
    return 0


def report(
    name: str, rows: int, built: Built, times: list[float], options: argparse.Namespace
) -> dict[str, Any]:
    """One line on stdout, and the same as numbers."""
    best, median = min(times), statistics.median(times)
    memory = built.bytes_moved / options.bandwidth * 1e6
    decode = built.trellis_weights / options.decode_rate * 1e6
    rates = (built.bytes_moved / best * 1e-6, built.trellis_weights / best * 1e-6) if best else (0.0, 0.0)
    share = max(memory, decode) / best if best else 0.0
    achieved = f"{rates[0]:6.2f} TB/s  {rates[1]:6.2f} Tw/s"
    floors = f"floor {memory:7.2f} us bytes, {decode:7.2f} us trellis"
    timed = f"{best:8.2f} us (median {median:8.2f})"
    print(f"{name:14} rows {rows:2}  {timed}  {achieved}  {floors}  {100 * share:5.1f}%", flush=True)
    return {
        "rows": rows,
        "us_best": best,
        "us_median": median,
        "bytes": built.bytes_moved,
        "trellis_weights": built.trellis_weights,
        "floor_us_bytes": memory,
        "floor_us_trellis": decode,
        "share": share,
    }


if __name__ == "__main__":
    sys.exit(main())
