"""Parts of bench_experts.py about memory: opening with its progress seen, a small card, a pack on disk.

What must stay true: the plan that is compared is made from the limits and the card's size alone, before the
engine is opened.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_decode import prompt_ids

from flashnext_drv.bench import experts as bench
from flashnext_drv.cli.report import Progress
from flashnext_drv.engine.engine import Engine, Limits, Prefill
from flashnext_drv.engine.plan import Sizer
from flashnext_drv.errors import bytes_text
from flashnext_drv.host_memory import host_memory
from flashnext_drv.model.layout import Layout
from flashnext_drv.model.pack import PackBase
from flashnext_drv.model.plan import device_reserves
from flashnext_drv.model.synth import SynthPack
from flashnext_drv.state.store import READERS

PIECE = 1 << 30  # of host memory
NEW_TOKENS = 33  # of the run on the small card


class Told:
    """A progress callback that draws the bar and remembers what it was told."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self.calls, self.last, self.total, self.falls = 0, 0, 0, 0

    def __call__(self, what: str, done: int, total: int) -> None:
        self._bar.bytes_done(what, done, total)
        self.falls += done < self.last
        self.calls, self.last, self.total = self.calls + 1, done, total

    def as_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "last_bytes": self.last, "total_bytes": self.total,
                "rising": not self.falls, "shown_on_a_terminal": self._bar.shown}


def say(text: str) -> None:
    print(text, flush=True)


def touch_host(size_bytes: int) -> None:
    """Fill so much host memory in pieces, on one thread, and give it back; shows what is available."""
    before = host_memory().available_bytes
    pieces = [np.full(min(PIECE, size_bytes - at), 1, np.uint8) for at in range(0, size_bytes, PIECE)]
    pieces.clear()
    after = host_memory().available_bytes
    say(f"host memory available {bytes_text(before or 0)}, {bytes_text(after or 0)} after it was used")


def opened(pack: PackBase | Path, limits: Limits, device: str) -> tuple[Engine, Told]:
    """The engine, and what its progress callback was told."""
    with Progress() as bar:
        told = Told(bar)
        engine = Engine.open(pack, limits, device=device, progress=told)
    say(f"opened in {engine.open_seconds:.1f} s, {told.calls} reports of progress")
    return engine, told


def small_card(pack: PackBase, limits: Limits, card_bytes: int, device: str) -> tuple[dict[str, Any], bool]:
    """Plan against ledger, and a prompt as long as the context with tokens behind it while free memory is
    sampled.

    Memory that the card would have free is its size less what the engine took from this device.
    """
    simulated = device == "sim"
    planned = Sizer(pack, simulated).seat(Layout(pack.config, limits), card_bytes, None).plan
    engine, told = opened(pack, limits, device)
    with engine:
        rank = engine.rank
        rows = bench.plan_rows(planned, engine.ledger.table())
        for row in rows:
            say(f"{row['owner']:<18} {row['tier']:<7} planned {bytes_text(row['planned']):>11} live "
                f"{bytes_text(row['live']):>11} {'' if row['equal'] else 'DIFFERS'}")
        with bench.FreeSampler(rank.ctx) as sampler:
            made = engine.generate(
                prompt_ids(limits.context_tokens - NEW_TOKENS, pack.config.vocab), max_new_tokens=NEW_TOKENS,
                stop_ids=(), on_token=lambda _: sampler.sample(),
                prefill=Prefill(progress=lambda *_: sampler.sample()))
        taken = rank.ctx.free_at_start_bytes - sampler.least_bytes
        left, reserves = card_bytes - taken, device_reserves(limits)
        memory = engine.memory()
        say(memory.table())
        say(f"card of {bytes_text(card_bytes)}: least free {bytes_text(max(left, 0))} in {sampler.n_samples} "
            f"samples, reserves {bytes_text(reserves)}; {made.counters['deep_rows']} deep rows, chunk "
            f"{rank.chunk}")
        equal = all(row["equal"] for row in rows)
        return {
            "card_bytes": card_bytes, "reserves_bytes": reserves, "least_free_bytes": left,
            "most_taken_bytes": taken, "samples": sampler.n_samples, "rows": rows, "equal": equal,
            "open_s": engine.open_seconds, "progress": told.as_dict(), "card_limits": vars(limits),
            "lines": rank.experts.n_lines, "chunk": rank.chunk, "sha256": made.sha256,
            "times": dict(made.times), "counters": dict(made.counters), "memory": memory.as_dict(),
        }, equal and left >= reserves and len(made.tokens) == NEW_TOKENS


def open_times(
    engine: Engine, told: Told, rates: bench.LinkRates, disk: dict[str, Any] | None
) -> tuple[dict[str, Any], bool]:
    """Time to open beside what pinning alone takes, and reading alone: `disk` of bench.read_cold, or None.

    Passed when progress was told in rising steps up to the end, but for the padding of what is planned.
    """
    pinned = sum(r.live_bytes for r in engine.ledger.table() if r.tier == "pinned")
    bounds = {"pinning_s": pinned / rates.pin}
    if disk is not None:
        bounds["reading_s"] = disk["bytes"] / disk["bytes_s"]
    say(f"opened in {engine.open_seconds:.2f} s, {bytes_text(pinned)} pinned, "
        + ", ".join(f"{name.removesuffix('_s')} alone {value:.2f} s" for name, value in bounds.items()))
    return {
        "open_s": engine.open_seconds, "pinned_bytes": pinned, **bounds, "disk": disk,
        "bound_over_time": max(bounds.values()) / engine.open_seconds, "progress": told.as_dict(),
    }, told.calls > 1 and told.total * 0.98 <= told.last <= told.total and not told.falls


def open_disk(
    folder: Path, model: str, limits: Limits, device: str, rates: bench.LinkRates
) -> tuple[dict[str, Any], bool]:
    """A pack's files read once for the disk's rate, then opened, both as cold as the system allows.  The pack
    is written first where there is none."""
    if not folder.exists():
        say(f"writing {model} into {folder.name}")
        SynthPack(model, 1).write(folder)
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    disk = bench.read_cold(files, READERS)
    bench.drop_cached(files)
    engine, told = opened(folder, limits, device)
    with engine:
        return open_times(engine, told, rates, disk)
