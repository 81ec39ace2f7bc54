#!/usr/bin/env python3
"""SHA-256 of every kernel case and of whole runs, on one device; written, or compared with a file written
on another.

    python tools/case_hashes.py --device sim --out tests/data/case_hashes.json     # without a GPU
    python tools/case_hashes.py --device cuda --compare tests/data/case_hashes.json --receipt out.json

The simulator must be told the GPU's mma generation; sm_90 is its default.  Whole runs are the prompts of the
packs under tests/data and, with --golden, of more golden folders: logits of every row, eager and through
graphs, and rows batched 16 at a time.  Exit 1 when any hash differs, a case fails, or
a hash that was asked for was not compared: also when none was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Collection
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flashnext_drv.bench.receipt import write_receipt  # noqa: E402
from flashnext_drv.check.contract import CheckDevice, run_case  # noqa: E402
from flashnext_drv.engine.engine import Engine, Limits  # noqa: E402
from flashnext_drv.errors import FlashNextError  # noqa: E402
from flashnext_drv.kernels import catalog  # noqa: E402


def kernel_hashes(device: str, only: str) -> tuple[dict[str, str], list[str]]:
    """{"kernel/case": sha256}, and the cases whose expectation failed."""
    hashes, failed = {}, []
    with CheckDevice(device) as check:
        for spec in catalog.specs():
            if only and only not in spec.name:
                continue
            for case in spec.cases:
                key = f"{spec.name}/{case.name}"
                try:
                    hashes[key] = run_case(check, spec.name, case).sha256
                except FlashNextError as error:  # the others still say whether they differ
                    failed.append(f"{key}: {error}")
    return hashes, failed


def run_hashes(device: str, folder: Path, cases: list[str]) -> dict[str, str]:
    """{"<pack>/<case>/<mode>": sha256 of the float32 logits of all rows}."""
    golden = np.load(folder / "golden.npz")
    names = cases or sorted({key.split(".")[0] for key in golden.files if key.endswith(".input_ids")})
    out = {}
    for mode, limits in (
        ("serial", Limits(context_tokens=512, graph=False)),
        ("graph16", Limits(context_tokens=512, rows=16, prompt_rows=16)),
    ):
        with Engine.open(folder / "pack", limits, device=device) as engine:
            for name in names:
                logits = engine.logits(golden[f"{name}.input_ids"])
                out[f"{folder.name}/{name}/{mode}"] = hashlib.sha256(logits.tobytes()).hexdigest()
    return out


def compare(
    hashes: dict[str, str], known: dict[str, str], kernel: str, packs: Collection[str]
) -> tuple[int, list[str], list[str]]:
    """(how many were compared, which differ, what speaks against it in words).  kernel, packs: what was asked
    for; the rest of the file is counted and not missing."""
    asked = {key for key in known
             if (key.split("/")[0] in packs if key.count("/") > 1 else kernel in key.split("/")[0])}
    common = sorted(hashes.keys() & known.keys())
    differ = [key for key in common if hashes[key] != known[key]]
    missing, extra = sorted(asked - hashes.keys()), sorted(hashes.keys() - known.keys())
    print(f"compared {len(common)}, {len(differ)} differ, {len(known) - len(common)} only in the file, "
          f"{len(extra)} not in the file")
    against = [] if common else ["nothing was compared"]
    if missing or extra:
        against.append(f"not compared: {', '.join((missing + extra)[:8])} ...")
    return len(common), differ, against


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="sim")
    parser.add_argument(
        "--golden", action="append", default=[], help="more golden folders (pack/ and golden.npz)"
    )
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    parser.add_argument("--no-runs", action="store_true", help="kernel cases only")
    parser.add_argument("--out", help="write the hashes here")
    parser.add_argument("--compare", help="hashes to compare with")
    parser.add_argument("--receipt", help="write a receipt here")
    args = parser.parse_args(argv)
    started = time.perf_counter()
    hashes, failed = kernel_hashes(args.device, args.kernel)
    print(
        f"{len(hashes)} kernel cases, {len(failed)} failed, {time.perf_counter() - started:.1f} s", flush=True
    )
    if not hashes and not failed:
        failed.append(f"no kernel with a case is called {args.kernel!r}")
    for line in failed:
        print(f"FAIL {line}")
    folders = [] if args.no_runs else [ROOT / "tests/data/exl3_micro", *map(Path, args.golden)]
    for folder in folders:
        hashes |= run_hashes(args.device, folder, [])
        print(f"{folder.name}: {time.perf_counter() - started:.1f} s", flush=True)
    differ: list[str] = []
    compared = 0
    if args.compare:
        known = json.loads(Path(args.compare).read_text(encoding="utf-8"))
        if known["source_digest"] != catalog.source_digest():
            failed.append("the hashes were made from other kernel sources")
            print(f"FAIL {failed[-1]}")
        packs = [folder.name for folder in folders]
        compared, differ, against = compare(hashes, known["hashes"], args.kernel, packs)
        failed += against
        for line in against:
            print(f"FAIL {line}")
        for key in differ:
            print(f"DIFFERS {key}")
    if args.out:
        data = {"source_digest": catalog.source_digest(), "device": args.device, "hashes": hashes}
        Path(args.out).write_text(json.dumps(data, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    if args.receipt:
        with CheckDevice(args.device) as check:
            write_receipt(
                args.receipt,
                check.ctx.facts,
                {"compared": compared, "differ": differ, "failed": failed, "n_hashes": len(hashes)},
            )
    return 1 if differ or failed else 0


if __name__ == "__main__":
    sys.exit(main())
