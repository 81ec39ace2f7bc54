#!/usr/bin/env python3
"""Runs all gates of the repository on one commit and writes what passed, what failed and what was not run.

    python tools/gates.py [COMMIT] --out gates.json [--long] [--device cuda] [--only NAME,...] [--list]

The commit (by default HEAD) is checked out as a worktree in a temporary folder, so nothing depends on what
lies in this tree; this file's list of gates is used for every commit.  A gate ends in one of three ways:

    passed   exit code 0, and what it has to print is there        failed   anything else, also a time limit
    not run  with the reason: left out, needs a GPU, long, what it builds on did not pass, not in the commit

Writes JSON and prints a table.  Exit 0 when no gate failed, 1 when one did; with --strict also when one was
not run.  Needs git and the Python that runs it with the extras test and build.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
_PACKAGE = ("-m", "flashnext_drv")


@dataclass(frozen=True)
class Gate:
    """command: words for the Python of this run, in the worktree; {tmp} is a folder for its files.

    after: gates that must have passed.  needs: a file of the commit without which there is no such gate.
    program: one that must be on the path, or the gate is not run.  gpu: needs one.  long: minutes to hours,
    only with --long.  says: what the output must contain; its named groups become counts.
    """

    name: str
    command: tuple[str, ...]
    what: str
    after: tuple[str, ...] = ()
    needs: str = ""
    program: str = ""
    gpu: bool = False
    long: bool = False
    limit_s: float = 3600.0
    says: str = ""


_COUNTS = r"COUNTS device=\w+ passed=(?P<passed>[1-9]\d*) failed=0 error=0 skipped=(?P<skipped>\d+)"
_HASHES = "tests/data/case_hashes.json"
_COMPARED = r"compared (?P<compared>[1-9]\d*), 0 differ, (?P<left>\d+) only in the file, 0 not in the file"
_SUMMARY = (r"SUMMARY (?P<kernels>[1-9]\d*) kernels: .* 0 fail, "
            r".* (?P<controls>[1-9]\d*) controls: .* 0 missed")
GATES = (
    Gate("build", ("build_kernels.py",), "kernel images of six architectures"),
    Gate("lint", ("-m", "ruff", "check", "."), "house rules of form"),
    Gate("types", ("-m", "mypy"), "strict types", needs="pyproject.toml"),
    Gate("records", (*_PACKAGE, "records", "--device", "sim"), "registers, spills, occupancy", ("build",)),
    Gate("registers", ("tools/wgmma_registers.py",), "no register is written while a wgmma reads it",
         ("build",), needs="tools/wgmma_registers.py", program="nvdisasm",
         says=r"(?P<products>\d+) products .* (?P<early>\d+) of them"),
    Gate("coverage", ("tools/coverage_table.py",), "the table of kernels is current", ("build",),
         needs="tools/coverage_table.py"),
    Gate("receipts", ("tools/receipt.py", "verify"), "receipts hold what they say", ("build",),
         needs="tools/receipt.py", says=r"(?P<receipts>[1-9]\d*) receipts, 0 wrong"),
    Gate("tests", ("-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"), "the suite, in the simulator",
         ("build",), says=_COUNTS),
    Gate("contract", (*_PACKAGE, "check", "--device", "sim", "--log", "{tmp}/check.log"),
         "every kernel against its contract, planted faults", ("build",), says=_SUMMARY),
    Gate("audit", ("tools/audit_check.py", "{tmp}/check.log"), "the check's log, counted again",
         ("contract",), needs="tools/audit_check.py"),
    Gate("fuzz", ("tools/fuzz.py", "--n", "2000", "--seed", "1"), "2,000 mangled inputs",
         needs="tools/fuzz.py"),
    Gate("hashes", ("tools/case_hashes.py", "--device", "sim", "--compare", _HASHES),
         "every case's bytes against the kept ones", ("build",), needs="tools/case_hashes.py", long=True,
         says=_COMPARED),
    Gate("slow", ("-m", "pytest", "-q", "--slow", "-m", "slow"), "tests of minutes", ("build",), long=True,
         says=_COUNTS, limit_s=7200),
    Gate("mutants", ("tools/mutate.py", "--sample", "60", "--seed", "1"), "60 mutants, all noticed",
         ("tests",), needs="tools/mutate.py", long=True, limit_s=14400),
    Gate("gpu-tests", ("-m", "pytest", "-q", "--device", "cuda"), "the suite, on a GPU", ("build",), gpu=True,
         says=_COUNTS),
    Gate("gpu-contract", (*_PACKAGE, "check", "--device", "cuda"), "the contract, on a GPU", ("build",),
         gpu=True, says=_SUMMARY),
    Gate("gpu-hashes", ("tools/case_hashes.py", "--device", "cuda", "--compare", _HASHES),
         "the simulator's bytes, on a GPU", ("build",), needs="tools/case_hashes.py", gpu=True,
         says=_COMPARED),
    Gate("gpu-records", (*_PACKAGE, "records", "--device", "cuda"), "the driver's attributes", ("build",),
         gpu=True),
    Gate("gpu-races", ("tools/race_controls.py",), "planted races under compute-sanitizer", ("build",),
         needs="tools/race_controls.py", gpu=True, long=True),
)


@dataclass
class Outcome:
    """state: passed, failed or not run; reason: of the last two.  counts: what the output told."""

    name: str
    state: str
    reason: str = ""
    seconds: float = 0.0
    command: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    tail: str = ""


def run_gates(
    gates: Sequence[Gate], tree: Path, tmp: Path, *, only: Sequence[str] = (), long: bool = False,
    gpu: bool = False, python: str = sys.executable,
) -> Iterator[Outcome]:
    """One outcome a gate, in order, as soon as it is known.  only: these and what they build on."""
    states: dict[str, str] = {}
    wanted = set(only)
    for gate in reversed(gates):  # each comes behind what it builds on
        wanted |= set(gate.after) if gate.name in wanted else set()
    for gate in gates:
        why = _left_out(gate, tree, states, wanted, long, gpu)
        made = Outcome(gate.name, NOT_RUN, why) if why else _run(gate, tree, tmp, python)
        states[gate.name] = made.state
        yield made


@contextmanager
def worktree(commit: str, root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """(a checkout of the commit in a temporary folder, its full name); removed on the way out."""
    name = _git(root, "rev-parse", "--verify", f"{commit}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="gates-") as folder:
        tree = Path(folder) / "tree"
        _git(root, "worktree", "add", "--quiet", "--detach", str(tree), name)
        try:
            yield tree, name
        finally:
            _git(root, "worktree", "remove", "--force", str(tree))


def table(outcomes: Sequence[Outcome]) -> str:
    """For people: a line a gate, and one of counts."""
    lines = []
    for one in outcomes:
        counts = " ".join(f"{name}={n}" for name, n in one.counts.items())
        lines.append(f"{one.name:<13} {one.state:<8} {one.seconds:8.1f} s  {counts or one.reason}".rstrip())
    states = [one.state for one in outcomes]
    lines.append(", ".join(f"{states.count(state)} {state}" for state in (PASSED, FAILED, NOT_RUN)))
    return "\n".join(lines)


def _left_out(
    gate: Gate, tree: Path, states: dict[str, str], only: Collection[str], long: bool, gpu: bool
) -> str:
    if only and gate.name not in only:
        return "left out by --only"
    if gate.gpu and not gpu:
        return "needs a GPU: --device cuda"
    if gate.long and not long:
        return "takes long: --long"
    if gate.needs and not (tree / gate.needs).exists():
        return f"the commit has no {gate.needs}"
    if gate.program and shutil.which(gate.program) is None:
        return f"{gate.program} is not on the path"
    for name in gate.after:
        if states.get(name) != PASSED:
            return f"{name} {'was not run' if states.get(name) == NOT_RUN else 'failed'}"
    return ""


def _run(gate: Gate, tree: Path, tmp: Path, python: str) -> Outcome:
    words = [word.format(tmp=tmp) for word in gate.command]
    made = Outcome(gate.name, FAILED, command=shlex.join(["python", *gate.command]))
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("FLASHNEXT_", "PYTEST_", "PYTHON"))}
    began = time.monotonic()
    with (tmp / f"{gate.name}.log").open("w+", errors="replace") as log:
        child = subprocess.Popen([python, *words], cwd=tree, env=env | {"PYTHONPATH": str(tree)}, stdout=log,
                                 stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            code: int | None = child.wait(gate.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if child.poll() is None:  # also when this run is interrupted: its own group, nothing else
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        log.seek(0)
        text = log.read()
    made.seconds, made.tail = round(time.monotonic() - began, 1), text[-2000:]
    told = re.search(gate.says, text) if gate.says else None
    if code is None:
        made.reason = f"took longer than {gate.limit_s:.0f} s"
    elif code:
        made.reason = f"exit code {code}: {(text.strip().splitlines() or ['no output'])[-1][:160]}"
    elif gate.says and told is None:
        made.reason = "ended well but never said so: its line of counts is missing"
    else:
        made.state = PASSED
        made.counts = {name: int(n) for name, n in told.groupdict().items()} if told else {}
    return made


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"gates: git {words[0]} failed: {done.stderr.strip()[:300]}")
    return done.stdout.strip()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--long", action="store_true", help="also what takes long")
    parser.add_argument("--device", choices=("sim", "cuda"), default="sim",
                        help="cuda: also what needs a GPU")
    parser.add_argument("--only", default="", help="names, with commas, and what they build on")
    parser.add_argument("--strict", action="store_true", help="exit 1 also when a gate was not run")
    parser.add_argument("--list", action="store_true", help="print the gates and stop")
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(f"{gate.name:<13} {gate.what}" for gate in GATES))
        return 0
    only = tuple(filter(None, args.only.split(",")))
    unknown = sorted(set(only) - {gate.name for gate in GATES})
    if unknown:
        parser.error(f"no gates are called {', '.join(unknown)}")
    if args.out and (args.out.is_dir() or not args.out.parent.is_dir()):
        parser.error(f"--out {args.out} is no file in an existing folder")
    outcomes: list[Outcome] = []
    began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with worktree(args.commit, ROOT) as (tree, name), tempfile.TemporaryDirectory(prefix="gates-") as tmp:
        made = run_gates(GATES, tree, Path(tmp), only=only, long=args.long, gpu=args.device == "cuda")
        for outcome in made:
            outcomes.append(outcome)
            print(f"{outcome.name}: {outcome.state} {outcome.reason}", file=sys.stderr, flush=True)
            if args.out:
                told = json.dumps(_told(name, began, outcomes), indent=1)
                args.out.write_text(told + "\n", encoding="utf-8")
    print(f"commit {name}\n{table(outcomes)}")
    bad = {FAILED, NOT_RUN} if args.strict else {FAILED}
    return 1 if any(one.state in bad for one in outcomes) else 0


def _told(commit: str, began: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Written after every gate: an interrupted run leaves what it found, the rest not run."""
    done = {one.name for one in outcomes}
    rest = [Outcome(gate.name, NOT_RUN, "the run was interrupted") for gate in GATES if gate.name not in done]
    every = [*outcomes, *rest]
    return {
        "commit": commit, "began": began, "python": platform.python_version(), "machine": platform.machine(),
        "counts": {state: sum(one.state == state for one in every) for state in (PASSED, FAILED, NOT_RUN)},
        "gates": [vars(one) for one in every],
    }


if __name__ == "__main__":
    sys.exit(main())
