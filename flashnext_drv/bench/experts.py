"""Parts of the measurements of experts in host memory: id sequences of a wanted hit rate, the bound of a
decoded token and of a prompt, the link's and the disk's rates, and samples of free memory.

Called by tools/bench_experts.py.  What must stay true: a bound is made of numbers of the same run (resident
time, bytes counted by the device, measured rates); nothing here changes what an engine computes.

    token   resident time + (filled bytes + bytes read in place) / link rate
    prompt  the slower of the resident prompt and (copied bytes / link rate)
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..drv.context import Context
from ..drv.memory import DeviceArena, PinnedArena, copy_async, copy_to_device
from ..drv.stream import Event, Stream, elapsed_ms
from ..errors import UsageError
from ..kernels import tables as t
from ..kernels.bind import Kernels
from ..ledger import Row
from ..model.layout import aligned, arena_bytes
from ..model.plan import Plan
from ..model.steps import FILL_BLOCKS

__all__ = [
    "READ_BYTES",
    "Band",
    "FreeSampler",
    "LinkRates",
    "Round",
    "Setting",
    "Tally",
    "drop_cached",
    "find_setting",
    "forced_ids",
    "link_rates",
    "plan_rows",
    "prompt_bound",
    "read_cold",
    "token_bound",
]

READ_BYTES: Final = 8 << 20  # of one read
MOST_TOKENS: Final = 4096  # of a working set: beyond it every token is new for a measured run
TIERS: Final = ("device", "pinned", "host")  # of a plan
STEPS: Final = 8  # halvings of the share of fresh tokens


# Ids.


def forced_ids(vocab: int, n_working: int, fresh: float, count: int, seed: int) -> list[int]:
    """(count,) ids that are drawn from a working set of n_working tokens, but a share `fresh` of them from
    the whole vocabulary.  Same arguments, same ids; a smaller set is a part of a larger one."""
    if not 1 <= n_working <= vocab or not 0.0 <= fresh <= 1.0:
        raise UsageError("a working set holds 1 token to all, with 0..1 fresh", tokens=n_working, fresh=fresh)
    draw = np.random.default_rng(seed)
    working = draw.permutation(vocab)
    picks, others, coins = draw.random(count), draw.integers(0, vocab, count), draw.random(count)
    ids = np.where(coins < fresh, others, working[(picks * n_working).astype(np.int64)])
    return [int(i) for i in ids]


@dataclass(frozen=True)
class Band:
    """A wanted hit rate.  fixed: only with the first choice of lines."""

    low: float
    high: float
    fixed: bool = False

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def holds(self, rate: float) -> bool:
        return self.low <= rate <= self.high


@dataclass(frozen=True)
class Setting:
    """What leads to a hit rate: see `forced_ids`; lines in use a layer."""

    n_working: int
    fresh: float
    lines: int


def find_setting(
    rate: Callable[[Setting], float], band: Band, lines: Sequence[int], vocab: int
) -> tuple[Setting, float] | None:
    """A setting whose hit rate lies in the band, nearest to its middle among those tried, or None.

    rate: measures one; it is expected to fall with n_working and fresh and to rise with lines.  lines:
    choices, the wanted one first.  Working sets of 1, 2, 4 .. tokens are tried first; between two of them, or
    beyond the largest, fresh tokens are mixed into the smaller one.
    """
    for n_lines in lines[:1] if band.fixed else lines:
        found: list[tuple[Setting, float]] = []
        above: int | None = None  # the largest set with too high a rate
        n_working = 1
        while n_working <= min(vocab, MOST_TOKENS):
            setting = Setting(n_working, 0.0, n_lines)
            found.append((setting, rate(setting)))
            if found[-1][1] > band.high:
                above = n_working
            if found[-1][1] < band.low:
                break
            n_working *= 2
        inside = [one for one in found if band.holds(one[1])]
        if not inside and above is not None:
            inside = _mixed(rate, band, above, n_lines)
        if inside:
            return min(inside, key=lambda one: abs(one[1] - band.middle))
    return None


def _mixed(
    rate: Callable[[Setting], float], band: Band, n_working: int, lines: int
) -> list[tuple[Setting, float]]:
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        setting = Setting(n_working, (low + high) / 2, lines)
        found = rate(setting)
        if band.holds(found):
            return [(setting, found)]
        low, high = (setting.fresh, high) if found > band.high else (low, setting.fresh)
    return []


# Bounds.


@dataclass(frozen=True)
class Tally:
    """The device's counters of all layers together (kernels/tables.py CACHE)."""

    counts: dict[str, int]

    @classmethod
    def of(cls, counters: npt.NDArray[np.void]) -> Tally:
        """counters: (layers,) records with the fields COUNTERS."""
        return cls({name: int(counters[name].sum(dtype=np.uint64)) for name in t.COUNTERS})

    def since(self, earlier: Tally) -> Tally:
        return Tally({name: value - earlier.counts[name] for name, value in self.counts.items()})

    @property
    def hit_rate(self) -> float:
        asked = self.counts["hits"] + self.counts["misses"]
        return self.counts["hits"] / asked if asked else 1.0

    @property
    def link_bytes(self) -> int:
        """Bytes of experts that crossed the link: copied into lines and read in place."""
        return self.counts["filled_bytes"] + self.counts["read_bytes"]


@dataclass(frozen=True)
class Round:
    """One decoded token: the host's seconds around its round, and what its layers asked for."""

    seconds: float
    tally: Tally


def token_bound(rounds: Sequence[Round], resident: Sequence[float], bytes_s: float) -> dict[str, Any]:
    """Decode against its bound: resident time and missed bytes over the link.

    resident: seconds of the same tokens with all experts resident.  bytes_s: the link's.  Milliseconds.
    ratio: the larger of the median over the rounds, each against its own bytes, and of mean over mean.
    """
    whole = Tally({name: sum(r.tally.counts[name] for r in rounds) for name in t.COUNTERS})
    base = median(resident)
    bounds = [base + r.tally.link_bytes / bytes_s for r in rounds]
    by_round = median(r.seconds / bound for r, bound in zip(rounds, bounds, strict=True))
    seconds = sum(r.seconds for r in rounds) / len(rounds)
    missed = whole.link_bytes / len(rounds)
    by_mean = seconds / (sum(resident) / len(resident) + missed / bytes_s)
    return {
        "rounds": len(rounds),
        "token_ms": median(r.seconds for r in rounds) * 1e3,
        "token_ms_mean": seconds * 1e3,
        "resident_ms": base * 1e3,
        "hit_rate": whole.hit_rate,
        "missed_bytes_a_token": missed,
        "link_ms_a_token": missed / bytes_s * 1e3,
        "bound_ms": median(bounds) * 1e3,
        "ratio_by_round": by_round,
        "ratio_by_mean": by_mean,
        "ratio": max(by_round, by_mean),
        "counters": whole.counts,
    }


def prompt_bound(seconds: float, resident_s: float, copied_bytes: int, bytes_s: float) -> dict[str, Any]:
    """A prompt against the slower of the resident prompt and its bytes over the link.  Seconds.

    overlap: the share of the shorter of the two that the three times say was hidden.
    """
    link_s = copied_bytes / bytes_s
    bound, shorter = max(resident_s, link_s), min(resident_s, link_s)
    return {
        "seconds": seconds,
        "resident_s": resident_s,
        "link_s": link_s,
        "copied_bytes": copied_bytes,
        "bound_by": "link" if link_s > resident_s else "resident",
        "ratio": bound / seconds if seconds else 0.0,
        "overlap": max(0.0, min(1.0, (resident_s + link_s - seconds) / shorter)) if shorter else 1.0,
    }


# Rates.


@dataclass(frozen=True)
class LinkRates:
    """Bytes a second of one run.  pin: cuMemHostAlloc.  copy: pinned to device by the copy engine.  fill:
    the same by kernel line_fill, line after line."""

    pin: float
    copy: float
    fill: float
    size_bytes: int
    line_bytes: int
    lines: int

    @property
    def best(self) -> float:
        """What a bound divides by."""
        return max(self.copy, self.fill)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"best": self.best}


def link_rates(ctx: Context, line_bytes: int, size_bytes: int, repeats: int = 3) -> LinkRates:
    """Pin about `size_bytes`, copy them to the device and fill as many lines from them; the best of
    `repeats` by events, after a first one that is not counted.

    Takes as much device memory.  Raises OutOfMemory, everything given back.
    """
    line = aligned(line_bytes)
    lines = max(-(-size_bytes // line), 1)
    with ExitStack() as stack:
        stream = stack.enter_context(Stream(ctx, "bench.link"))
        kernels = stack.enter_context(Kernels(ctx, ("move",), name="bench.kernels"))
        started = time.perf_counter()
        source = stack.enter_context(PinnedArena(ctx, "bench.source", lines * line))
        pin_s = time.perf_counter() - started
        source.host()[:] = 1  # pages are really there
        target = stack.enter_context(DeviceArena(ctx, "bench.target", lines * line))
        tables = stack.enter_context(
            DeviceArena(ctx, "bench.tables", arena_bytes([t.CACHE.itemsize, lines * t.FILL.itemsize])))
        cache = np.zeros(1, t.CACHE)
        cache["lines"], cache["line_bytes"] = target.address, line
        cache["n_lines"] = cache["n_fills"] = lines
        fills = np.zeros(lines, t.FILL)
        at = np.arange(lines, dtype=np.uint64) * np.uint64(line)
        fills["to"], fills["from"] = at + np.uint64(target.address), at + np.uint64(source.address)
        fills["bytes"] = line_bytes // 16 * 16
        spans = {}
        for name, rows in (("cache", cache), ("fills", fills)):
            spans[name] = tables.span(name, rows.nbytes)
            copy_to_device(stream, spans[name], rows)
        fill = kernels.launch("line_fill", (FILL_BLOCKS,), cache=spans["cache"], fills=spans["fills"])
        copy_s = _timed(ctx, stream, lambda: copy_async(stream, target.address, source.address, lines * line),
                        repeats)
        fill_s = _timed(ctx, stream, lambda: fill.run(stream), repeats)
        size = lines * line
        return LinkRates(size / pin_s, size / copy_s, int(fills["bytes"].sum(dtype=np.uint64)) / fill_s,
                         size, line_bytes, lines)


def _timed(ctx: Context, stream: Stream, work: Callable[[], None], repeats: int) -> float:
    """Seconds of the fastest of `repeats`."""
    best = float("inf")
    with Event(ctx, "bench.start", timing=True) as start, Event(ctx, "bench.end", timing=True) as end, \
            ctx.active():
        for i in range(repeats + 1):
            stream.record(start)
            work()
            stream.record(end)
            stream.synchronize()
            if i:
                best = min(best, max(elapsed_ms(start, end) / 1e3, 1e-9))
    return best


def drop_cached(files: Iterable[Path]) -> None:
    """Ask the system to forget the files' cached pages; written ones are written out first."""
    os.sync()
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def read_cold(files: Sequence[Path], threads: int) -> dict[str, Any]:
    """Read all bytes once, as cold as the system allows: bytes, seconds, and bytes a second."""
    drop_cached(files)

    def read(piece: tuple[Path, int]) -> int:
        path, first = piece
        with open(path, "rb", buffering=0) as stream:
            stream.seek(first)
            return len(stream.read(READ_BYTES))

    pieces = [(path, first) for path in files for first in range(0, path.stat().st_size, READ_BYTES)]
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        size = sum(pool.map(read, pieces))
    seconds = time.perf_counter() - started
    return {"bytes": size, "seconds": seconds, "bytes_s": size / seconds, "threads": threads}


# Memory.


def plan_rows(planned: Plan, rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Plan beside ledger by owner and tier, what is there only while opening left out: owner, tier, planned,
    live, equal.  Owners of no bytes on both sides are left out too."""
    live = {(r.tier, r.owner): r.live_bytes for r in rows if r.tier in TIERS and r.live_bytes}
    plan = {
        (tier, owner): size
        for tier in TIERS
        for owner, size in getattr(planned, tier).items()
        if size
    }
    return [
        {"owner": owner, "tier": tier, "planned": plan.get((tier, owner), 0),
         "live": live.get((tier, owner), 0),
         "equal": plan.get((tier, owner), 0) == live.get((tier, owner), 0)}
        for tier, owner in sorted(plan.keys() | live.keys())
    ]


@dataclass
class FreeSampler:
    """The least free device memory while it is entered.

    A thread asks the driver every `every_s` seconds; in the simulator there is none and `sample` is to be
    called between rounds.  least_bytes: as the driver reports it.
    """

    ctx: Context
    every_s: float = 0.002
    least_bytes: int = field(default=1 << 62, init=False)
    n_samples: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._failed: BaseException | None = None
        self._thread = None if self.ctx.facts.is_simulator else threading.Thread(target=self._run)

    def sample(self) -> None:
        self.least_bytes = min(self.least_bytes, self.ctx.free_bytes())
        self.n_samples += 1

    def __enter__(self) -> FreeSampler:
        self.sample()
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._failed is not None and error is None:
            raise self._failed
        if error is None:
            self.sample()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self.every_s):
                self.sample()
        except BaseException as error:  # seen by whoever leaves the context
            self._failed = error
