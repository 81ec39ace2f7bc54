"""The process that does a check's work: jobs on stdin, records on stdout, one JSON object a line.

    python -m flashnext_drv.check.worker DEVICE [LIBRARY]

Started by cli/check.py, so that a crash ends a worker and not the command.  LIBRARY: a simulator that holds
the controls too.  A job is {"job": "kernel" | "control" | "accumulate", "kernel": name}; its records are
followed by {"kind": "done"}, with "over" when this process cannot go on: a GPU that a kernel broke stays
broken in it. What must stay true: whatever ends this process early leaves its job without
"done".
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from ..kernels import catalog
from ..sim import load
from . import controls, stages
from .accumulate import factors
from .contract import CheckDevice
from .log import Record

__all__ = ["Worker", "main"]


class Worker:
    """Holds the device of a check; a broken context is replaced."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._open: CheckDevice | None = None

    def give(self) -> CheckDevice:
        """A device that works."""
        if self._open is not None and self._open.ctx.broken:
            self.close()
        if self._open is None:
            self._open = CheckDevice(self.device)
        return self._open

    def close(self) -> None:
        """Close the device, if one is open."""
        if self._open is not None:
            closing, self._open = self._open, None
            closing.close()

    @property
    def over(self) -> bool:
        """Whether a kernel broke a real device, for good in this process."""
        if self._open is None or self._open.ctx.facts.is_simulator:
            return False
        return bool(self._open.ctx.broken)

    def run(self, job: Record) -> Iterator[Record]:
        """The records of one job."""
        spec = catalog.spec(job["kernel"])
        if job["job"] == "kernel":
            for result in stages.check_kernel(self.give, spec):
                yield {"kind": "stage", **asdict(result)}
        elif job["job"] == "control":
            control = next(one for one in spec.controls if one.name == job["control"])
            yield {"kind": "control", **asdict(controls.judge(self.give, spec, control))}
        else:
            for factor in factors(spec.name):
                yield {"kind": "accumulate", **asdict(factor), "ok": factor.ok}


def main(argv: list[str]) -> int:
    """Serve jobs until stdin ends."""
    warnings.simplefilter("ignore", RuntimeWarning)  # nonfinite data is what many cases are about
    if len(argv) > 1:
        load.load(built=Path(argv[1]))
    worker = Worker(argv[0])
    _say({"kind": "ready", "device": str(worker.give().ctx.facts)})
    for line in sys.stdin:
        for record in worker.run(json.loads(line)):
            _say(record)
        _say({"kind": "done", "over": worker.over})
        if worker.over:
            return 0
    worker.close()
    return 0


def _say(record: Record) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
