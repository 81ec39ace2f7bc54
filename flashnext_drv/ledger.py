"""The ledger: every allocation and every handle, by owner, with the line that asked for it.

Written by the driver layer and by whoever maps files; read by `memory()`, by error messages and at close.
What must stay true: an entry disappears only after the driver has confirmed the free, or is marked lost
together with its context; so an empty ledger means that nothing of ours is left.

Bytes asked are what the caller wanted, bytes granted what the driver took for it as far as that can be seen.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .errors import LeakError, UsageError, bytes_text

__all__ = ["HANDLES", "MEMORY", "Entry", "Ledger", "Reconciled", "Row"]

MEMORY: Final = ("device", "pinned", "mapped_file", "host")
HANDLES: Final = ("context", "stream", "event", "module", "graph", "graph_exec")
_PACKAGE: Final = str(Path(__file__).resolve().parent)
_OWN_FOLDERS: Final = tuple(f"{_PACKAGE}/{part}" for part in ("drv/", "ledger.py", "lifetime.py"))


@dataclass(frozen=True)
class Row:
    """One line of `Ledger.table`: everything of one owner on one tier.  Bytes; live is now, peak the most so
    far."""

    owner: str
    tier: str
    n_live: int
    n_total: int
    live_bytes: int
    granted_bytes: int
    peak_bytes: int
    peak_granted_bytes: int


@dataclass(frozen=True)
class Reconciled:
    """Device memory that the driver reports as gone, against what the ledger says took it.  Bytes.

    taken: free_before - free_now.  explained: device entries plus what was measured for handles.
    unexplained: taken - explained (negative: the driver served us out of memory it already had).
    """

    taken_bytes: int
    explained_bytes: int
    unexplained_bytes: int
    n_allocations: int


class Entry:
    """One allocation or handle.  `remove` it after the driver has freed it."""

    __slots__ = ("_ledger", "granted_bytes", "id", "owner", "site", "size_bytes", "tier")

    def __init__(self, ledger: Ledger, entry_id: int, owner: str, tier: str, size_bytes: int,
                 granted_bytes: int,
                 site: str) -> None:
        self._ledger = ledger
        self.id = entry_id
        self.owner = owner
        self.tier = tier
        self.size_bytes = size_bytes
        self.granted_bytes = granted_bytes
        self.site = site

    def remove(self) -> None:
        """Forget this entry.  Raises UsageError when it was removed before; an entry lost already stays
        lost."""
        self._ledger._remove(self)

    def measured(self, granted_bytes: int) -> None:
        """Device bytes the driver was seen to take for this entry (contexts, modules, graphs)."""
        self._ledger._grant(self, granted_bytes)

    def __str__(self) -> str:
        size = f" {bytes_text(self.size_bytes)}" if self.tier in MEMORY else ""
        return f"{self.owner} {self.tier}{size} from {self.site}"


class Ledger:
    """All entries of one engine.  Safe to use from the instantiation thread and the controlling thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._live: dict[int, Entry] = {}
        self._lost: dict[int, Entry] = {}
        # n_live, n_total, live, granted, peak and peak granted bytes
        self._sums: dict[tuple[str, str], list[int]] = {}
        self._tiers: dict[str, list[int]] = {}                # the same over all owners

    def add(self, owner: str, tier: str, size_bytes: int = 0, granted_bytes: int | None = None) -> Entry:
        """Enter an allocation (tiers of MEMORY) or a handle (HANDLES; size 0).

        size_bytes: asked.  granted_bytes: taken by the driver, by default the same.  The site is the nearest
        caller outside the driver layer.  Raises UsageError on an unknown tier or a negative size.
        """
        if tier not in MEMORY and tier not in HANDLES:
            raise UsageError(f"ledger tier {tier!r} is unknown",
                             do=f"use one of {', '.join(MEMORY + HANDLES)}")
        if size_bytes < 0:
            raise UsageError("a ledger entry cannot be negative", owner=owner, size_bytes=size_bytes)
        granted = size_bytes if granted_bytes is None else granted_bytes
        site = _site()
        with self._lock:
            entry = Entry(self, next(self._ids), owner, tier, size_bytes, granted, site)
            self._live[entry.id] = entry
            self._change(entry, 1, size_bytes, granted)
        return entry

    def entries(self) -> tuple[Entry, ...]:
        """Live entries, oldest first."""
        with self._lock:
            return tuple(self._live.values())

    def lost(self) -> tuple[Entry, ...]:
        """Entries that went down with a broken context: no longer ours to free, kept for the report."""
        with self._lock:
            return tuple(self._lost.values())

    def lose(self, entries: Iterable[Entry]) -> None:
        """Mark live entries as lost with their context; entries already gone are passed over."""
        with self._lock:
            for entry in entries:
                if self._live.pop(entry.id, None) is not None:
                    self._lost[entry.id] = entry
                    self._change(entry, -1, -entry.size_bytes, -entry.granted_bytes)

    def live(self, tier: str | None = None) -> dict[str, int]:
        """Bytes asked and not yet freed, by tier; with `tier` by owner on that tier.  Handles count as
        pieces."""
        with self._lock:
            if tier is None:
                return {t: s[0] if t in HANDLES else s[2] for t, s in self._tiers.items() if s[0]}
            return {owner: s[0] if tier in HANDLES else s[2]
                    for (owner, t), s in self._sums.items() if t == tier and s[0]}

    def peak(self, tier: str | None = None) -> dict[str, int]:
        """The most granted bytes alive at one time, by tier (over all owners); with `tier` by owner."""
        with self._lock:
            if tier is None:
                return {t: s[5] for t, s in self._tiers.items()}
            return {owner: s[5] for (owner, t), s in self._sums.items() if t == tier}

    def table(self) -> list[Row]:
        """One row per owner and tier, largest granted first; owners that freed everything keep their peak."""
        with self._lock:
            rows = [Row(owner, tier, *sums) for (owner, tier), sums in self._sums.items()]
        return sorted(rows, key=lambda r: (-r.granted_bytes, -r.peak_granted_bytes, r.owner, r.tier))

    def largest(self, tier: str, n_owners: int = 3) -> str:
        """The largest holders of a tier, for messages: "largest holder experts.cache 18.0 GiB, kv 2.0
        GiB"."""
        rows = [r for r in self.table() if r.tier == tier and r.granted_bytes][:n_owners]
        if not rows:
            return f"nothing of ours holds {tier} memory"
        return "largest holder " + ", ".join(f"{r.owner} {bytes_text(r.granted_bytes)}" for r in rows)

    def reconcile(self, free_before_bytes: int, free_now_bytes: int) -> Reconciled:
        """Compare the driver's loss of free device memory with the entries made since.

        free_before_bytes: free when this ledger was empty.  Handles explain what was `measured` for them.
        """
        with self._lock:
            entries = [e for e in self._live.values() if e.tier == "device" or e.tier in HANDLES]
        explained = sum(e.granted_bytes for e in entries)
        taken = free_before_bytes - free_now_bytes
        return Reconciled(taken, explained, taken - explained, sum(e.tier == "device" for e in entries))

    def require_empty(self) -> None:
        """Raises LeakError naming every live entry and its creation site."""
        left = self.entries()
        if left:
            raise LeakError(f"{len(left)} ledger entries were not closed",
                            entries=tuple(str(e) for e in left))

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries())

    def __len__(self) -> int:
        with self._lock:
            return len(self._live)

    def _remove(self, entry: Entry) -> None:
        with self._lock:
            if entry.id in self._lost:
                return
            if self._live.pop(entry.id, None) is None:
                raise UsageError(f"ledger entry removed twice: {entry}")
            self._change(entry, -1, -entry.size_bytes, -entry.granted_bytes)

    def _grant(self, entry: Entry, granted_bytes: int) -> None:
        with self._lock:
            if entry.id in self._live:
                self._change(entry, 0, 0, granted_bytes - entry.granted_bytes)
                entry.granted_bytes = granted_bytes

    def _change(self, entry: Entry, n: int, size_bytes: int, granted_bytes: int) -> None:
        for sums in (self._sums.setdefault((entry.owner, entry.tier), [0] * 6),
                     self._tiers.setdefault(entry.tier, [0] * 6)):
            sums[0] += n
            sums[1] += max(n, 0)
            sums[2] += size_bytes
            sums[3] += granted_bytes
            sums[4] = max(sums[4], sums[2])
            sums[5] = max(sums[5], sums[3])


def _site() -> str:
    """file:line of the nearest frame outside the driver layer, the file relative to the package where it lies
    there."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_FOLDERS):
        frame = frame.f_back
    path = frame.f_code.co_filename
    if path.startswith(_PACKAGE):
        path = "flashnext_drv" + path[len(_PACKAGE):]
    return f"{path}:{frame.f_lineno}"
