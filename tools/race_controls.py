#!/usr/bin/env python3
"""The planted controls that only a race checker can report on a GPU, each under compute-sanitizer.

    python build_kernels.py --controls && python tools/race_controls.py

Each control runs in a process of its own; it is red when racecheck reports a hazard.  The kernel itself runs
the same way and must be clean.  Ends with `RACE n controls: r red, x missed; k kernels clean, d with
hazards`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flashnext_drv.check.contract import CheckDevice, run_case
from flashnext_drv.check.controls import launch_control
from flashnext_drv.kernels import catalog


def run_one(kernel: str, control: str) -> int:
    """Launch one control, or with an empty name the kernel, on the cases concerned; runs being watched."""
    spec = catalog.spec(kernel)
    with CheckDevice("cuda") as device:
        if control:
            launch_control(device, spec, next(c for c in spec.controls if c.name == control))
        else:
            named = {name for c in spec.controls if c.racecheck for name in c.cases}
            for case in spec.cases:
                if case.name in named or not named:
                    run_case(device, kernel, case)
    return 0


def hazards(kernel: str, control: str) -> int:
    """Hazards that racecheck reports; raises RuntimeError when it gave no summary."""
    command = ["compute-sanitizer", "--tool", "racecheck", sys.executable, __file__, "--one", kernel, control]
    output = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300).stdout
    found = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", output)
    if found is None:
        raise RuntimeError(f"racecheck gave no summary for {kernel}/{control}: {output[-400:]}")
    return int(found[1])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--one", nargs=2, metavar=("KERNEL", "CONTROL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return run_one(*args.one)
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit", file=sys.stderr)
        return 3
    red = missed = clean = dirty = 0
    for spec in catalog.specs():
        controls = [c for c in spec.controls if c.racecheck]
        if not controls:
            continue
        n = hazards(spec.name, "")
        clean, dirty = clean + (n == 0), dirty + (n > 0)
        print(f"{spec.name}: {n} hazards", flush=True)
        for control in controls:
            n = hazards(spec.name, control.name)
            red, missed = red + (n > 0), missed + (n == 0)
            print(f"{spec.name}/{control.name}: {n} hazards, {'red' if n else 'MISSED'}", flush=True)
    verdict = f"{red + missed} controls: {red} red, {missed} missed"
    print(f"RACE {verdict}; {clean} kernels clean, {dirty} with hazards")
    return 1 if missed or dirty else 0


if __name__ == "__main__":
    sys.exit(main())
