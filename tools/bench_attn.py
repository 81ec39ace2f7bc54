#!/usr/bin/env python3
"""Times the sparse attention of a prompt chunk of one sequence at the model's shapes: scores of blocks, their
choice, and attention.

    python3 tools/bench_attn.py --device cuda --out bench_attn.json [--rows 2048,16384] [--first 0,65536]

A launch covers all rows of the chunk; first: tokens of the sequence before it.  Each kernel runs as one
captured graph of launches, on the choice that the kernels before it made from random queries and keys.
Printed beside the time: operations of the scores a second, and bytes of scores, or of keys and values, a
second, each counted once a row.  With --device sim the chunk is tiny and the times mean nothing: it only
shows that the program works.
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

from bench_linear import Bench, Built, measure

from flashnext_drv.bench.receipt import write_receipt
from flashnext_drv.check.attn_pages import attended, blocks_seen
from flashnext_drv.check.operands import signed
from flashnext_drv.drv import api
from flashnext_drv.kernels import catalog
from flashnext_drv.kernels.attn import SCORE_ROWS, score_grid
from flashnext_drv.kernels.tables import FORMAT_F16, LINEAR, PAGE, PAGE_TOKENS, ROUND, ROW, RUN, SLOT

HEAD, INDEX_HEAD, PAGE_BLOCKS = 256, 128, 16


def build(bench: Bench, rows: int, first: int, n_q: int, n_kv: int, budget: int) -> dict[str, Built]:
    """A launch of each kernel, to be run in this order."""
    pages, cap = -(-(first + rows) // PAGE_TOKENS), -(-rows // 128) * 128
    max_blocks, k = PAGE_BLOCKS * pages, HEAD * n_q
    kv, index = PAGE_TOKENS * n_kv * HEAD * 4, (PAGE_TOKENS + PAGE_BLOCKS) * INDEX_HEAD * 2
    sizes = {
        "kv": pages * kv,
        "index": pages * index,
        "q": cap * n_q * 2048,
        "q16": cap * k * 2,
        "iq16": cap * 4 * INDEX_HEAD * 2,
    }
    outputs = {
        "score": -(-cap // SCORE_ROWS) * SCORE_ROWS * max_blocks * 4,
        "sel": cap * budget * 4,
        "flag": cap * 4,
        "x": cap * k * 2,
    }
    tables = 16 * pages + 64 * cap
    arena = bench.arena("attn", sum(sizes.values()) + sum(outputs.values()) + tables + (1 << 16))
    spans = {name: bench.filled(arena, name, size, True) for name, size in sizes.items()}
    spans |= {name: arena.span(name, size) for name, size in outputs.items()}
    page, slot, linear = np.zeros(pages, PAGE), np.zeros(1, SLOT), np.zeros(1, LINEAR)
    page["kv"] = spans["kv"].address + kv * np.arange(pages)
    page["index"] = spans["index"].address + index * np.arange(pages)
    slot["pages"] = bench.put(arena, "pages", page).address
    linear["k"], linear["n"], linear["x"], linear["tiled"] = k, 128, spans["x"].address, 1
    linear["w"]["format"] = FORMAT_F16
    row = np.zeros(rows, ROW)
    row["position"] = first + np.arange(rows)
    args: dict[str, Any] = {
        "round": bench.put(arena, "round", np.array([(rows, 1, cap, 0)], ROUND)),
        "rows": bench.put(arena, "rows", row),
        "slots": bench.put(arena, "slots", slot),
        "runs": bench.put(arena, "runs", np.array([(0, 0, rows, first)], RUN)),
        "linear": bench.put(arena, "linear", linear),
        "index_offset": 0,
        "kv_offset": 0,
        "max_blocks": max_blocks,
        "budget": budget,
        "first_row": 0,
        "n_q": n_q,
        "n_kv": n_kv,
        **spans,
    }
    seen = np.array([blocks_seen(p) for p in range(first, first + rows)])
    scored = int(seen[seen > budget].sum())
    entries = sum(len(attended(p, budget, np.arange(budget))) for p in range(first, first + rows))
    work = {
        "index_score_deep": scored * 4 * 2 * INDEX_HEAD,
        "index_select": scored * 4,
        "qsa_deep": entries * n_kv * HEAD * 4,
    }
    grids = {"index_score_deep": score_grid(cap, max_blocks), "index_select": (cap,), "qsa_deep": (n_kv, cap)}
    return {name: Built([_launch(bench, name, grids[name], args)], work[name], 0, [arena]) for name in grids}


def _launch(bench: Bench, name: str, grid: tuple[int, ...], args: dict[str, Any]) -> Any:
    return bench.kernels.launch(name, grid, **{arg.name: args[arg.name] for arg in catalog.spec(name).args})


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("sim", "cuda", "auto"), default="auto")
    parser.add_argument("--out", type=Path, help="JSON receipt")
    parser.add_argument("--rows", default="2048,16384")
    parser.add_argument("--first", default="0,16384", help="tokens before the chunk")
    parser.add_argument("--launches", type=int, default=5, help="launches a graph")
    parser.add_argument("--replays", type=int, default=3)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        api.ensure(options.device)
        sim = api.loaded() == "sim"
        bench = Bench(stack, options.device, 8 << 20, ("attn",))
        bench.finite = signed(1, "values", (1 << 20,), 2.0).astype(np.float16).tobytes()
        bench.block = bench.block[: len(bench.finite)]
        print(bench.ctx.facts)
        chunks = [(int(r), int(f)) for f in options.first.split(",") for r in options.rows.split(",")]
        for rows, first in [(20, 30)] if sim else chunks:
            with ExitStack() as bench.arenas:
                shape = (2, 1, 8) if sim else (24, 2, 512)
                for name, built in build(bench, rows, first, *shape).items():
                    bench.stream.synchronize()
                    best = min(measure(bench, built, 1 if sim else options.launches, options.replays))
                    rate = built.bytes_moved / best * 1e-6 if best else 0.0
                    unit = "TFLOP/s" if name == "index_score_deep" else "TB/s"
                    print(
                        f"{name:17} rows {rows:6} after {first:6} {best:10.1f} us {rate:7.2f} {unit}",
                        flush=True,
                    )
                    results[f"{name}/rows{rows}/first{first}"] = {"us_best": best, "work": built.bytes_moved}
        if options.out:
            write_receipt(options.out, bench.ctx.facts, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
