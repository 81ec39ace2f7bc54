"""`check`: whether every kernel keeps its contract on a device, and whether wrong variants are reported.

Shares the work among processes, writes the raw log and ends with one line, `SUMMARY ...`; when a stage
raises, a process dies or the command is ended by a signal, the last line is `no result` and the exit code 1.
 With
--json stdout holds one object and the line is the last of stderr.  What must stay true: nothing is counted
that is not in the log, and no kernel is skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final

from ..bench.receipt import write_receipt
from ..check import controls, log
from ..drv import api
from ..drv.context import devices
from ..errors import FlashNextError, UsageError
from ..kernels import catalog
from ..kernels.spec import Control, KernelSpec
from .report import FAILED, GOOD, print_json

__all__ = ["add_parser", "check", "run"]

_NO_RESULT: Final = "no result"


class _Stopped(BaseException):
    """A signal asked for the end."""


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = sub.add_parser(
        "check", help="whether every kernel keeps its contract", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--device", choices=("auto", "cuda", "sim"), help="default: FLASHNEXT_DRV_DEVICE, else auto"
    )
    parser.add_argument(
        "--kernel", action="append", default=[], metavar="NAME", help="only this kernel (may be given again)"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--no-controls", action="store_true", help="leave out the planted controls")
    which.add_argument(
        "--hopper-controls",
        action="store_true",
        help="of the planted controls only those in text that images for sm_90a alone have",
    )
    parser.add_argument("--log", metavar="FILE", help="write every result here, one JSON object a line")
    parser.add_argument(
        "--processes",
        type=int,
        default=0,
        metavar="N",
        help="default: 1 on a GPU, else one a core, at most 4",
    )
    parser.add_argument("--receipt", metavar="FILE", help="write the verdict with sources, images and device")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Check, print, count; the last line on stdout is the SUMMARY or `no result`."""
    try:
        with _signals():
            return _checked(args)
    except _Stopped as stopped:
        print(f"flashnext-drv check: ended by {stopped}", file=sys.stderr)
    except UsageError:
        raise
    except (FlashNextError, OSError) as error:
        print(f"flashnext-drv check: {error}", file=sys.stderr)
    except BaseException:
        print(_NO_RESULT, flush=True)
        raise
    print(_NO_RESULT, flush=True)
    return FAILED


def _checked(args: argparse.Namespace) -> int:
    started = time.monotonic()
    specs = _chosen(args.kernel)
    catalog.require_whole()
    with _log_file(args.log) as sink:
        records = check(
            args.device,
            specs,
            wanted=lambda control: not args.no_controls and (control.hopper or not args.hopper_controls),
            processes=args.processes,
            sink=sink,
            say=None if args.json else print,
        )
        counts = log.count(records)
        line = log.summary_line(counts)
        _write(sink, {"kind": "end", "summary": line, "seconds": round(time.monotonic() - started, 1)})
    found = {
        "device": records[0]["device"],
        "summary": line,
        "good": counts.good,
        "kernels": len(counts.kernels),
        "failed": counts.failed,
        "controls": counts.controls,
        "red": counts.red,
        "missed": counts.missed,
        "racecheck": counts.racecheck,
        "hopper": counts.hopper,
        "seconds": round(time.monotonic() - started, 1),
    }
    if args.receipt:
        api.ensure(args.device)
        write_receipt(args.receipt, devices()[0], found)
    if args.json:
        print_json(found)
    else:
        print("\n".join(_coarser(records)))
        for kernel, reasons in counts.failed.items():
            print("\n".join(f"FAIL {kernel}: {why}" for why in reasons[:5]))
        for name in counts.missed:
            print(f"MISSED {name}")
        if counts.racecheck:
            print(f"left to the race checker: {', '.join(counts.racecheck)}")
        if counts.hopper:
            print(f"left to a device of compute capability 9.0: {', '.join(counts.hopper)}")
        print(f"device {records[0]['device']}, {time.monotonic() - started:.0f} s")
    print(line, flush=True, file=sys.stderr if args.json else sys.stdout)
    return GOOD if counts.good else FAILED


def check(
    device: str,
    specs: list[KernelSpec],
    *,
    wanted: Callable[[Control], bool],
    processes: int = 0,
    sink: IO[str] | None = None,
    say: Any = None,
) -> list[log.Record]:
    """Run the jobs of `specs` and return all records, the first of them `begin`.

    wanted: which controls are due.  sink: also written there, line by line.  say: called with a text a
    kernel.  Raises FlashNextError when a process ends before its job.
    """
    device = api.resolve(device)
    library: Path | None = None
    ordered = sorted(specs, key=lambda spec: -len(spec.cases))  # the longest first
    due = [(spec.name, one.name) for spec in ordered for one in spec.controls if wanted(one)]
    in_simulator = [one for spec in specs for one in spec.controls if wanted(one) and not one.hopper]
    if device == "sim" and in_simulator:
        print("building the simulator with the planted controls", file=sys.stderr, flush=True)
        library = controls.build_simulator(specs)
    jobs: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
    work = [{"job": kind, "kernel": spec.name} for kind in ("kernel", "accumulate") for spec in ordered]
    work += [{"job": "control", "kernel": kernel, "control": control} for kernel, control in due]
    for job in work:
        jobs.put(job)
    head = log.begin("", catalog.source_digest(), [spec.name for spec in specs], due)
    n = processes or (1 if device == "cuda" else min(os.cpu_count() or 1, 4))
    pool = _Pool(device, library, jobs, min(n, len(work)))
    records = [head]
    with pool:
        head["device"] = pool.facts()
        _write(sink, head)
        for record in pool.records(len(work)):
            records.append(record)
            _write(sink, record)
            if say is not None and (text := _told(record)):
                say(text)
    return records


class _Pool:
    """Worker processes that share a queue of jobs."""

    def __init__(
        self, device: str, library: Path | None, jobs: queue.SimpleQueue[dict[str, str]], n: int
    ) -> None:
        self._jobs = jobs
        self._found: queue.SimpleQueue[log.Record] = queue.SimpleQueue()
        command = [
            sys.executable,
            "-m",
            "flashnext_drv.check.worker",
            device,
            *([str(library)] if library else []),
        ]
        root = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        self._command, self._environment = command, {**os.environ, "PYTHONPATH": paths}
        self._workers: list[subprocess.Popen[str]] = []
        self._closed = False
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(n)]

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for worker in self._workers:
            worker.kill()
            worker.wait()

    def facts(self) -> str:
        """Start; what the first worker says of its device."""
        for thread in self._threads:
            thread.start()
        return str(self._next()["device"])

    def records(self, n_jobs: int) -> Iterator[log.Record]:
        """Every record of `n_jobs` jobs, as they come."""
        while n_jobs:
            record = self._next()
            if record["kind"] == "done":
                n_jobs -= 1
            elif record["kind"] != "ready":
                yield record

    def _next(self) -> log.Record:
        while True:
            try:
                record = self._found.get(timeout=0.5)  # so that a signal is seen
            except queue.Empty:
                continue
            if record["kind"] == "died":
                raise FlashNextError(
                    f"a check process ended early, exit {record['code']}",
                    because=f"during {record['job']}",
                    do="see what it said above",
                )
            return record

    def _serve(self) -> None:
        """One worker's thread: give it jobs one by one, pass on what it says; a new one when it is over."""
        job: object = "its start"
        worker = self._start()
        try:
            self._found.put(_heard(worker))
            while True:
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    return
                assert worker.stdin is not None
                worker.stdin.write(json.dumps(job) + "\n")
                worker.stdin.flush()
                while (record := _heard(worker))["kind"] != "done":
                    self._found.put(record)
                self._found.put(record)
                if record["over"]:
                    worker = self._start()
                    _heard(worker)
        except (OSError, ValueError):
            self._found.put({"kind": "died", "code": worker.wait(), "job": job})

    def _start(self) -> subprocess.Popen[str]:
        worker = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment
        )
        self._workers.append(worker)
        if self._closed:
            worker.kill()
        return worker


def _heard(worker: subprocess.Popen[str]) -> log.Record:
    """The next line of a worker.  Raises ValueError when there is none."""
    assert worker.stdout is not None
    record: log.Record = json.loads(worker.stdout.readline())
    return record


def _chosen(names: list[str]) -> list[KernelSpec]:
    """Kernels by name, or all that have a contract."""
    known = {spec.name: spec for spec in catalog.specs() if not spec.broken}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"no kernel is called {unknown[0]!r}", do=f"use one of {', '.join(known)}")
    return [known[name] for name in names] or list(known.values())


def _told(record: log.Record) -> str:
    """A line for what somebody who watches wants to see."""
    if record["kind"] == "stage" and not record["ok"]:
        return f"FAIL {record['kernel']} {record['case']} {record['stage']}: {record['text'][:200]}"
    if record["kind"] == "control" and not record["red"] and not record["stage"]:
        return f"not red {record['kernel']}/{record['control']}: {record['text'][:200]}"
    return ""


def _coarser(records: list[log.Record]) -> Iterator[str]:
    """A line for each kernel with sums: by what the coarser ones miss its bound, and what roundings it may
    make."""
    found: dict[str, list[log.Record]] = {}
    for record in records:
        if record["kind"] == "accumulate":
            found.setdefault(record["kernel"], []).append(record)
    for kernel, factors in found.items():
        least = {
            kind: min(r["factor"] for r in factors if r["how"].startswith(kind)) for kind in ("fp16", "bf16")
        }
        said = ", ".join(f"{kind} {factor:.3g}" for kind, factor in least.items())
        allowed = factors[0]["allowed"]
        yield f"{kernel}: coarser sums miss the bound at least by {said} times; allowed: {allowed}"


def _write(sink: IO[str] | None, record: log.Record) -> None:
    if sink is not None:
        sink.write(json.dumps(record) + "\n")
        sink.flush()


@contextmanager
def _log_file(path: str | None) -> Iterator[IO[str] | None]:
    if path is None:
        yield None
        return
    with open(path, "w", encoding="utf-8") as file:
        yield file


@contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and SIGINT end the check by an exception, so that workers are ended and the last line is
    said."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {one: signal.signal(one, stop) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
