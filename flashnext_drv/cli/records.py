"""`records`: launch records of every kernel on every architecture, against limits, record and driver.

Reads the cubins of this package: no GPU is needed.  Where one is found, or asked for by --device cuda, the
driver's function attributes must equal the cubins'.  Exit 0 when nothing is wrong, 1 with a table when a
record is stale or missing or a kernel is over its limits.  What must stay true: only --update writes, and
only a record that is whole.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from ..check import resources
from ..check.resources import Finding, Record
from ..errors import BuildError, DriverError, UsageError
from ..kernels import catalog
from .report import FAILED, GOOD, print_json

__all__ = ["RECORD_PATH", "add_parser", "run"]

RECORD_PATH = Path(__file__).resolve().parents[2] / "tests" / "records" / "launch_records.json"


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = sub.add_parser(
        "records", help="registers, memory and instructions of every kernel, against the committed record",
        description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cuda", "sim"),
                        help="cuda: the driver's attributes must agree; default: where there is a GPU")
    parser.add_argument("--record", metavar="FILE", type=Path, default=RECORD_PATH,
                        help="the committed record (default: the checkout's tests/records)")
    parser.add_argument("--against", metavar="FILE", type=Path,
                        help="a release's record: untouched kernels must have its instructions")
    parser.add_argument("--update", action="store_true", help="write the record instead of comparing with it")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Measure, compare, print."""
    measured = resources.measure()
    findings = list(resources.over_limits(measured))
    if args.update:
        _write(args.record, measured)
    else:
        findings += resources.compare(measured, resources.load(args.record))
    if args.against is not None:
        release = resources.load(args.against)
        if release is None:
            raise UsageError("the release's record does not exist", file=str(args.against))
        findings += resources.changed_encodings(measured, release)
    device, different = _on_device(args.device, measured)
    findings += different
    n_pairs = sum(len(entry.archs) for entry in measured.kernels.values())
    if args.json:
        print_json({"device": device, "good": not findings, "tool": dict(measured.tool), "pairs": n_pairs,
                    "kernels": {name: asdict(entry) for name, entry in measured.kernels.items()},
                    "findings": [asdict(one) for one in findings]})
    else:
        for line in _table(measured):
            print(line)
        for one in findings:
            print(one)
        print(f"driver's attributes: {device}")
        wrote = f"; wrote {args.record}" if args.update else ""
        print(f"RECORDS {'FAIL' if findings else 'PASS'} {len(measured.kernels)} kernels, "
              f"{n_pairs} pairs of kernel and architecture, {len(findings)} findings{wrote}")
        if any(one.kind in ("missing", "stale", "gone") for one in findings):
            print("to refresh the record: python build_kernels.py && flashnext-drv records --update")
    return FAILED if findings else GOOD


def _write(path: Path, measured: Record) -> None:
    """Write through a temporary name.  Raises BuildError when an architecture was not built."""
    lacking = [arch for arch in catalog.ARCHS
               if any(arch not in entry.archs for entry in measured.kernels.values())]
    if lacking:
        raise BuildError("a record needs every architecture", because=f"not built: {', '.join(lacking)}",
                         do="run python build_kernels.py")
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(resources.dump(measured), encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        raise UsageError("the record cannot be written", file=str(path),
                         because=str(error.strerror)) from error


def _on_device(device: str, measured: Record) -> tuple[str, list[Finding]]:
    """(what was compared, differences).  Raises DriverError when a GPU is asked for and there is none."""
    if device == "sim":
        return "not compared, the simulator runs no cubin", []
    from ..check.contract import CheckDevice
    from ..drv import api

    if device == "auto" and api.loaded() == "sim":
        return "not compared, this process runs on the simulator", []
    try:
        api.ensure("cuda")
    except DriverError:
        if device == "auto":
            return "not compared, no GPU", []
        raise
    with CheckDevice("cuda") as check:
        found = list(resources.device_differences(check.kernels, measured))
        return f"compared on {check.ctx.facts} with {check.kernels.arch}", found


def _table(measured: Record) -> Iterator[str]:
    yield (f"{'kernel':<24} {'arch':<7} {'regs':>5} {'shared B':>9} {'stack B':>8} {'spill st/ld B':>14} "
           f"{'blocks/SM':>9}  instructions")
    for name, entry in measured.kernels.items():
        for arch, made in entry.archs.items():
            spilled = f"{made.spill_store_bytes}/{made.spill_load_bytes}"
            yield (f"{name:<24} {arch:<7} {made.regs:>5} {made.shared_bytes + made.dynamic_bytes:>9} "
                   f"{made.stack_bytes:>8} "
                   f"{spilled:>14} {made.blocks_per_sm:>9}  {made.text_sha256[:16]}")
