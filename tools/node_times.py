#!/usr/bin/env python3
"""How long each node of a decode round holds up the next one, inside the graph as it is served.

    python tools/node_times.py --build DIR --archs sm_90a       # anywhere NVRTC is; needs no GPU
    python tools/node_times.py --package DIR --out node_times.json

--build makes a copy of the package in which fn_wait_prior notes the time: block 0 of every launch writes when
it began and when the launches before it were done.  A node's time is from its own such moment to the next
node's, so the times of a round add up to the round: what a launch costs where it stands, its start behind and
beside its neighbours with it.  `early` is how long before that moment it had begun.  profile_round.py times
the same launches without their neighbours.

The copy does the same arithmetic and takes longer by what the notes cost.  GPU alone.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("flashnext_drv", "cuda_src", "tools", "build_kernels.py", "pyproject.toml")
ROOM = 16384  # moments of one image
WAIT = """FN_DEVICE void fn_wait_prior() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}"""
NOTING = f"""extern "C" {{
__device__ u64 fn_moments[2 * {ROOM}];
__device__ u32 fn_n_moments;
}}
FN_DEVICE u64 fn_now() {{
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
    return t;
}}
FN_DEVICE void fn_wait_prior() {{
#if __CUDA_ARCH__ >= 900
    bool notes = (threadIdx.x | blockIdx.x | blockIdx.y | blockIdx.z) == 0;
    u64 began = notes ? fn_now() : 0;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (notes) {{
        u64 t = fn_now();
        u32 i = atomicAdd(&fn_n_moments, 1u) & {ROOM - 1}u;
        fn_moments[2 * i] = began, fn_moments[2 * i + 1] = t;
    }}
#endif
}}"""


def build(folder: Path, archs: str) -> int:
    """The copy that notes times, with its images."""
    for name in COPIED:
        source, to = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__", "*.cubin"))
        else:
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, to)
    prelude = folder / "cuda_src" / "prelude.cuh"
    text = prelude.read_text(encoding="utf-8")
    if text.count(WAIT) != 1:
        raise SystemExit(f"{prelude}: fn_wait_prior is not what this program knows")
    prelude.write_text(text.replace(WAIT, NOTING), encoding="utf-8")
    command = [sys.executable, str(folder / "build_kernels.py"), "--archs", archs]
    return subprocess.run(command, cwd=folder, check=False).returncode


def measure(model: str, context: int, rows: int, tokens: int) -> tuple[dict[str, Any], Any]:
    """Times of one round's nodes over `tokens` rounds of `rows` sequences, and the engine's facts."""
    import numpy as np
    from bench_decode import prompt_ids
    from cuda.bindings import driver

    from flashnext_drv.engine.decode import Ahead, run_ahead
    from flashnext_drv.engine.engine import Engine, Limits
    from flashnext_drv.kernels import catalog
    from flashnext_drv.model.synth import SynthPack

    family = {spec.name: name for name in catalog.families() for spec in catalog.specs(name)}
    limits = Limits(
        context_tokens=context + tokens + 64, rows=16, prompt_rows=16, sequences=rows, steps_ahead=1,
        chunk=2048,
    )
    pack = SynthPack(model, 1, ngram_rows=4_000_000)
    with Engine.open(pack, limits, device="cuda") as engine, ExitStack() as stack:
        rank = engine.rank
        live = [stack.enter_context(engine.sequence()) for _ in range(rows)]
        for sequence in live:
            sequence.extend(prompt_ids(context, engine.config.vocab))
        for sequence, token in zip(live, engine.prompt(live, draw=True), strict=True):
            sequence.extend([token])

        def decode(count: int) -> None:
            for _ in range(count):
                drawn = run_ahead(rank, [Ahead(sequence, 1) for sequence in live], 1)
                for sequence, one in zip(live, drawn, strict=True):
                    sequence.extend(one.tokens)

        decode(4)  # eager, captured, replayed
        spans = {}
        with rank.ctx.active():
            for name in catalog.families():
                handle = rank.kernels.module(name).handle
                symbols = (b"fn_moments", b"fn_n_moments")
                found = [driver.cuModuleGetGlobal(handle, symbol) for symbol in symbols]
                if all(error == driver.CUresult.CUDA_SUCCESS for error, *_ in found):
                    spans[name] = found[0][1], found[1][1]
                    driver.cuMemsetD32(found[1][1], 0, 1)
        if not spans:
            raise SystemExit("this package notes no times: give the folder of --build as --package")
        decode(tokens)
        moments: list[tuple[int, int, str]] = []
        with rank.ctx.active():
            for name, (at, count) in spans.items():
                n, both = np.zeros(1, np.uint32), np.zeros(2 * ROOM, np.uint64)
                driver.cuMemcpyDtoH(n.ctypes.data, count, n.nbytes)
                driver.cuMemcpyDtoH(both.ctypes.data, at, both.nbytes)
                if n[0] > ROOM:
                    raise SystemExit(f"{n[0]} launches of family {name}: fewer --tokens")
                moments += [(int(t), int(began), name) for began, t in both[:2 * int(n[0])].reshape(-1, 2)]
        steps = rank.steps("body")
        form = "8" if rows <= 8 else "16"
        walk = [family[step.kernel.replace("*", form)] for step in steps]
        names = [(step.kernel, re.sub(r"^L\d+\.?", "", step.scope)) for step in steps]
        return by_node(sorted(moments), walk, names), engine.facts


def by_node(
    moments: list[tuple[int, int, str]], walk: list[str], names: list[tuple[str, str]]
) -> dict[str, Any]:
    """moments: (done before, began, family) of launches in the order of time; walk: families of a round's."""
    families, starts, at = [family for _, _, family in moments], [], 0
    while at + len(walk) < len(families):
        if families[at:at + len(walk)] == walk:
            starts.append(at)
            at += len(walk)
        else:
            at += 1
    if not starts:
        raise SystemExit("no whole round was found among the noted times")
    times: dict[tuple[str, str], list[int]] = defaultdict(list)
    early: dict[tuple[str, str], list[int]] = defaultdict(list)
    for start in starts:
        for i, name in enumerate(names, start):
            times[name].append(moments[i + 1][0] - moments[i][0])
            early[name].append(moments[i][0] - moments[i][1])
    whole = median(moments[start + len(walk)][0] - moments[start][0] for start in starts)
    nodes = {
        f"{kernel} {part}".strip(): {
            "nodes": len(found) // len(starts),
            "us": median(found) / 1e3,
            "early_us": median(early[kernel, part]) / 1e3,
            "ms": sum(found) / len(starts) / 1e6,
        }
        for (kernel, part), found in times.items()
    }
    return {"rounds": len(starts), "nodes": len(walk), "whole_ms": whole / 1e6, "kernels": nodes}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", type=Path, help="make the copy in this new folder, and stop")
    parser.add_argument("--archs", default="sm_90a")
    parser.add_argument("--package", type=Path, help="what --build made")
    parser.add_argument("--model", default="full")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rows", default="1", help="sequences at a time, comma list")
    parser.add_argument("--tokens", type=int, default=8, help="rounds that are timed")
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    if args.build:
        return build(args.build, args.archs)
    if not args.package:
        parser.error("--build DIR or --package DIR")
    sys.path[:0] = [str(args.package.resolve()), str(Path(__file__).resolve().parent)]
    import flashnext_drv  # noqa: F401  the copy's, before bench_decode puts its own checkout in front

    results = {}
    for rows in map(int, args.rows.split(",")):
        found, facts = measure(args.model, args.context, rows, args.tokens)
        results[f"rows{rows}"] = found
        print(f"{facts}\n{rows} rows, {found['nodes']} nodes: {found['whole_ms']:.3f} ms")
        for name, part in sorted(found["kernels"].items(), key=lambda item: -item[1]["ms"]):
            print(f"  {name:<34} {part['nodes']:>4} x {part['us']:>7.2f} us = {part['ms']:>6.3f} ms, "
                  f"early {part['early_us']:>6.2f} us")
    if args.out:
        from flashnext_drv.bench.receipt import write_receipt

        write_receipt(args.out, facts, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
