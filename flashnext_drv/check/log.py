"""The raw log of a check: one JSON object a line, and the SUMMARY that is counted from it.

Owns: the records' form and the counting.  Called by worker.py (writes), cli/check.py (counts) and, as a
program of its own that shares no code, tools/audit_check.py.  What must stay true: the SUMMARY follows from
the lines alone; a kernel or control that was due and left no record is a failure, never a pass.

Records by "kind": begin (device, kernels and controls that are due, stages), stage (one Result), control (one
Verdict), accumulate (one factor), end (the SUMMARY).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from ..kernels.spec import STAGES

__all__ = ["FORMAT", "Counts", "Record", "begin", "count", "summary_line"]

FORMAT: Final = 1
Record = dict[str, Any]


@dataclass
class Counts:
    """What a log says.  failed: kernel -> why.  missed: "kernel/control" of controls that no stage reported.
    racecheck, hopper: controls that cannot be brought to light by running them on this device."""

    kernels: tuple[str, ...] = ()
    failed: dict[str, list[str]] = field(default_factory=dict)
    controls: int = 0
    red: int = 0
    missed: list[str] = field(default_factory=list)
    racecheck: list[str] = field(default_factory=list)
    hopper: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return bool(self.kernels) and not self.failed and not self.missed


def begin(device: str, source_digest: str, kernels: list[str], controls: list[tuple[str, str]]) -> Record:
    """The first line: what is due."""
    return {
        "kind": "begin",
        "format": FORMAT,
        "device": device,
        "source_digest": source_digest,
        "stages": list(STAGES),
        "kernels": kernels,
        "controls": [list(pair) for pair in controls],
    }


def count(records: list[Record]) -> Counts:
    """Count a log that `begin` begins."""
    head = records[0]
    counts = Counts(tuple(head["kernels"]))
    shown: dict[str, set[str]] = {name: set() for name in counts.kernels}

    def fail(kernel: str, why: str) -> None:
        counts.failed.setdefault(kernel, []).append(why)

    verdicts: dict[tuple[str, str], Record] = {}
    for record in records[1:]:
        if record["kind"] == "stage":
            shown.setdefault(record["kernel"], set()).add(record["stage"])
            if not record["ok"]:
                fail(
                    record["kernel"], f"{record['case'] or 'all cases'}, {record['stage']}: {record['text']}"
                )
        elif record["kind"] == "accumulate" and not record["ok"]:
            fail(record["kernel"], f"{record['how']} accumulation stays within the bound: {record['text']}")
        elif record["kind"] == "control":
            verdicts[record["kernel"], record["control"]] = record
    for name in counts.kernels:
        lacking = [stage for stage in head["stages"] if stage not in shown[name]]
        if lacking:
            fail(name, f"not shown: {', '.join(lacking)}")
    for kernel, control in (tuple(pair) for pair in head["controls"]):
        verdict = verdicts.get((kernel, control))
        if verdict is not None and verdict["stage"] in ("racecheck", "hopper"):
            left = counts.racecheck if verdict["stage"] == "racecheck" else counts.hopper
            left.append(f"{kernel}/{control}")
            continue
        counts.controls += 1
        if verdict is not None and verdict["red"]:
            counts.red += 1
        else:
            counts.missed.append(f"{kernel}/{control}")
    return counts


def summary_line(counts: Counts) -> str:
    """The line that every finished check ends with."""
    n, failed = len(counts.kernels), len(counts.failed)
    return (
        f"SUMMARY {n} kernels: {n - failed} pass, {failed} fail, 0 known; "
        f"{counts.controls} controls: {counts.red} red, {len(counts.missed)} missed"
    )
