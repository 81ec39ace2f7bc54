"""Fuzzing with a seed and a bound: mangled packs, configs, tables, ids, limits and records.

    python tools/fuzz.py --n 100000 --seed 1 [--target header] [--only 17] [--device sim] [--json]

Every input may end in acceptance or in an error of our tree, and in nothing else: no other exception, no
crash, no input that takes longer than --cpu-s of processor time or --wall-s by the clock.  After each input
the ledgers it made are empty.  Over the last tenth (10,000 of 100,000) open files do not change and resident
memory grows by no more than --growth-kib.  --device sim adds inputs that go the whole way through the engine.
Exit 0 when all that held, else 1; a failure prints the command that repeats it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flashnext_drv.drv import api  # noqa: E402
from flashnext_drv.errors import FlashNextError, LeakError  # noqa: E402
from tools.fuzz_targets import DEVICE_TARGETS, TARGETS, Bench, Target  # noqa: E402

__all__ = ["Outcome", "Slow", "main", "run_fuzz"]

ENGINE_EVERY = 100      # one input in so many goes through the engine, where a device is given
SAMPLES = 100           # of files and memory, over the last tenth


class Slow(BaseException):
    """An input used up its time.  No Exception: nothing in the package may catch it."""


@dataclass
class Outcome:
    """What a run found.  outcomes: target -> ("accepted" or error type) -> inputs.  failures: texts.

    slowest: (seconds of processor time, target, index).  rss_kib, files: samples over the last tenth.
    """

    n: int = 0
    seconds: float = 0.0
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    slowest: tuple[float, str, int] = (0.0, "", 0)
    n_ledgers: int = 0
    rss_kib: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    @property
    def growth_kib(self) -> int:
        """Resident memory at the end of the last tenth less at its begin; each the least of ten samples."""
        return min(self.rss_kib[-10:]) - min(self.rss_kib[:10]) if self.rss_kib else 0

    def line(self) -> str:
        """The one line a run ends with."""
        typed = sum(n for c in self.outcomes.values() for kind, n in c.items() if kind != "accepted")
        accepted = sum(c["accepted"] for c in self.outcomes.values())
        files, memory = self.files or [0], self.rss_kib or [0]
        return (f"FUZZ {'FAIL' if self.failures else 'PASS'} {self.n} inputs in {self.seconds:.0f} s: "
                f"{typed} typed errors, {accepted} accepted, {len(self.failures)} failures; "
                f"{self.n_ledgers} ledgers empty; over the last {max(self.n // 10, 1)} open files "
                f"{min(files)}..{max(files)}, memory {min(memory)}..{max(memory)} KiB "
                f"(grew {self.growth_kib}); slowest {self.slowest[0] * 1000:.0f} ms of processor "
                f"({self.slowest[1]} {self.slowest[2]})")


def run_fuzz(n: int, seed: int, *, targets: tuple[Target, ...] = TARGETS, only: int | None = None,
             device: str = "", cpu_s: float = 3.0, wall_s: float = 120.0, growth_kib: int = 2048,
             stop_after: int = 20, folder: Path | None = None) -> Outcome:
    """Run n inputs, or the one whose index is `only`.

    device: "sim" adds the engine.  growth_kib: bound on the growth of resident memory over the last tenth.
    Stops after stop_after failures.
    """
    out = Outcome()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        bench = Bench(Path(scratch))
        tail = max(n // 10, 1)
        every = max(tail // SAMPLES, 1)
        for i in range(n) if only is None else (only,):
            rng = random.Random(f"{seed}/{i}")
            target = rng.choices(targets, [t.share for t in targets])[0]
            if device and targets is TARGETS and i % ENGINE_EVERY == ENGINE_EVERY - 1:
                target = rng.choices(DEVICE_TARGETS, [t.share for t in DEVICE_TARGETS])[0]
            _one(out, target, rng, bench, i, cpu_s, wall_s)
            if out.failures and out.failures[-1].startswith(f"#{i} "):
                out.failures[-1] += "\n  repeat with " + _repeat(seed, i, targets, device)
                if len(out.failures) >= stop_after:
                    break
            if i >= n - tail and (i - (n - tail)) % every == 0:
                out.rss_kib.append(_rss_kib())
                out.files.append(len(os.listdir("/proc/self/fd")))
    out.seconds = time.monotonic() - begun
    if len(set(out.files)) > 1:
        out.failures.append(f"open files changed over the last inputs: {min(out.files)}..{max(out.files)}")
    if out.growth_kib > growth_kib:
        out.failures.append(f"resident memory grew by {out.growth_kib} KiB over the last inputs")
    return out


def main(argv: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="fuzz.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--n", type=int, default=5000, help="inputs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=[t.name for t in (*TARGETS, *DEVICE_TARGETS)],
                        help="only this kind")
    parser.add_argument("--only", type=int, help="only the input with this index")
    parser.add_argument("--device", choices=("sim",), default="", help="also through the engine")
    parser.add_argument("--cpu-s", type=float, default=3.0, help="processor seconds an input may take")
    parser.add_argument("--wall-s", type=float, default=120.0, help="seconds an input may take")
    parser.add_argument("--growth-kib", type=int, default=2048)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    targets = tuple(t for t in (*TARGETS, *DEVICE_TARGETS) if given.target == t.name) or TARGETS
    if given.device:
        api.ensure(given.device)
    # of what can be written to: the simulator keeps the addresses of freed memory, which take none
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    found = run_fuzz(given.n, given.seed, targets=targets, only=given.only, device=given.device,
                     cpu_s=given.cpu_s, wall_s=given.wall_s, growth_kib=given.growth_kib)
    for text in found.failures:
        print(text, file=sys.stderr)
    if given.json:
        print(json.dumps({**vars(found), "growth_kib": found.growth_kib}))
    else:
        for name, counts in sorted(found.outcomes.items()):
            print(f"{name:<9} {sum(counts.values()):>7}  "
                  + ", ".join(f"{kind} {count}" for kind, count in counts.most_common()))
        print(found.line())
    return 1 if found.failures else 0


def _one(out: Outcome, target: Target, rng: random.Random, bench: Bench, index: int, cpu_s: float,
         wall_s: float) -> None:
    counts = out.outcomes.setdefault(target.name, Counter())
    start = time.process_time()
    out.n += 1
    try:
        with _bounded(cpu_s, wall_s):
            target.run(rng, bench)
        counts["accepted"] += 1
    except LeakError as error:
        out.failures.append(f"#{index} {target.name}: {error}")
    except FlashNextError as error:
        counts[type(error).__name__] += 1
        if "\n" in str(error):
            out.failures.append(f"#{index} {target.name}: a message of several lines: {str(error)!r:.300}")
    except Slow as error:
        out.failures.append(f"#{index} {target.name}: {error}\n{_where(error)}")
        bench.restore()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        out.failures.append(f"#{index} {target.name}: {type(error).__name__}: {str(error)[:200]}\n"
                            f"{_where(error)}")
    took = time.process_time() - start
    out.slowest = max(out.slowest, (took, target.name, index))
    try:
        out.n_ledgers += bench.require_empty_ledgers()
    except LeakError as error:
        out.failures.append(f"#{index} {target.name}: ledger: {error}")
        bench.ledgers.clear()


@contextmanager
def _bounded(cpu_s: float, wall_s: float) -> Iterator[None]:
    """Raises Slow inside when the body takes longer.  Processor time, so that a busy machine does not
    count."""
    def late(number: int, frame: Any) -> None:
        raise Slow(f"took longer than {cpu_s} s of processor time" if number == signal.SIGPROF
                   else f"took longer than {wall_s} s")

    before = {number: signal.signal(number, late) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return "".join(f"    {Path(f.filename).name}:{f.lineno} {f.name}: {f.line}\n" for f in frames).rstrip()


def _repeat(seed: int, index: int, targets: tuple[Target, ...], device: str) -> str:
    one = f" --target {targets[0].name}" if len(targets) == 1 else ""
    through = f" --device {device}" if device else ""
    return f"python tools/fuzz.py --seed {seed} --only {index}{one}{through}"


def _rss_kib() -> int:
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[1]) * (os.sysconf("SC_PAGE_SIZE") // 1024)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
