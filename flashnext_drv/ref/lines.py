"""Model of the device lines of one layer's experts, and the references of line_resolve and line_fill.

Callers: check/ and the tests.  Owns: which expert lies in which line, when each line was last used, and what
a round changes in that; who is evicted is a `Policy`'s word.  What must stay true: it is written from the
rules in words, expert by expert, with nothing of the kernels' way of doing it; a line holds at most one
expert and an expert lies in at most one line; no line used in a round is given away in it.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ..kernels.tables import COUNTERS, NO_LINE

__all__ = ["CLOCKS", "LRU", "Fill", "LineCache", "Policy", "line_fill", "line_resolve"]

CLOCKS: Final = 1 << 32  # the clock is one word
_PARTS: Final = tuple((part, field) for part in ("gate", "up", "down") for field in ("data", "suh", "svh"))


class Policy(Protocol):
    """Says which lines are given away."""

    def victims(self, ages: Sequence[int], most: int) -> list[int]:
        """Up to `most` different lines in the order in which they are given away.

        ages: of every line, rounds since it was last used; 0: used in this round, must not be given away.
        """


class LRU:
    """The lines that were used longest ago; of equal age the lower one first."""

    def victims(self, ages: Sequence[int], most: int) -> list[int]:
        """As Policy.victims: as many as there are."""
        free = [line for line, age in enumerate(ages) if age]
        return sorted(free, key=lambda line: (-ages[line], line))[:most]


@dataclass(frozen=True)
class Fill:
    """An expert that moved into a line.  evicted: the one that had to leave it, None where it was empty."""

    expert: int
    line: int
    evicted: int | None


class LineCache:
    """The lines of one layer.

    sizes: bytes of each expert.  holds: the expert in each line, None for an empty one.  used: the clock of
    the round that used each line last, 0: none did.  Raises ValueError when an expert stands in two lines or
    the policy gives away what it must not.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        holds: Iterable[int | None],
        used: Iterable[int] | None = None,
        clock: int = 0,
        policy: Policy | None = None,
    ) -> None:
        self.sizes = list(sizes)
        self.holds = list(holds)
        self.used = list(used) if used is not None else [0] * len(self.holds)
        self.clock = clock
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._policy = policy or LRU()
        seated = [expert for expert in self.holds if expert is not None]
        if len(set(seated)) != len(seated) or len(self.used) != len(self.holds):
            raise ValueError("an expert stands in two lines, or lines and uses are not as many")

    def line_of(self, expert: int) -> int | None:
        """The line that holds `expert`."""
        return self.holds.index(expert) if expert in self.holds else None

    def resolve(self, rows: Sequence[Sequence[int]]) -> list[Fill]:
        """One round: the experts that each row asks for.  Returns the fills in order; no rows change nothing.

        Experts that are in no line afterwards are read at home.
        """
        if not rows:
            return []
        self.clock = (self.clock + 1) % CLOCKS
        wanted = sorted({expert for row in rows for expert in row})
        missing = []
        for expert in wanted:
            line = self.line_of(expert)
            if line is None:
                missing.append(expert)
            else:
                self.used[line] = self.clock
        ages = [(self.clock - used) % CLOCKS for used in self.used]
        victims = self._policy.victims(ages, len(missing))
        if len(set(victims)) != len(victims) or any(ages[line] == 0 for line in victims):
            raise ValueError(f"lines {victims} were given away, of ages {[ages[line] for line in victims]}")
        fills = [Fill(expert, line, self.holds[line]) for expert, line in zip(missing, victims, strict=False)]
        for fill in fills:
            self.holds[fill.line], self.used[fill.line] = fill.expert, self.clock
        self._count(rows, len(wanted) - len(missing), missing, fills)
        return fills

    def _count(
        self, rows: Sequence[Sequence[int]], hits: int, missing: Sequence[int], fills: Sequence[Fill]
    ) -> None:
        at_home = missing[len(fills) :]
        pairs = [expert for row in rows for expert in row if expert in at_home]
        gained = {
            "hits": hits,
            "misses": len(missing),
            "fills": len(fills),
            "evictions": sum(fill.evicted is not None for fill in fills),
            "filled_bytes": sum(self.sizes[fill.expert] for fill in fills),
            "in_place": len(at_home),
            "reads": len(pairs),
            "read_bytes": sum(self.sizes[expert] for expert in pairs),
        }
        for name, n in gained.items():
            self.counters[name] += n


def line_resolve(tables: MutableMapping[str, NDArray[Any]], rows: Sequence[Sequence[int]]) -> None:
    """What the kernel does to its tables, in place.

    tables: lines (E + 1,) LINE, homes (E,) HOME, uses (at least n_lines,) USE, cache (1,) CACHE, fills FILL.
    rows: routed experts of each live row.
    """
    lines, homes, uses, cache = (tables[name] for name in ("lines", "homes", "uses", "cache"))
    n_lines, base, line_bytes = (int(cache[name][0]) for name in ("n_lines", "lines", "line_bytes"))
    model = LineCache(
        homes["bytes"].tolist(),
        [None if expert == NO_LINE else expert for expert in uses["expert"][:n_lines].tolist()],
        uses["used"][:n_lines].tolist(),
        int(cache["clock"][0]),
    )
    fills = model.resolve(rows)
    for i, fill in enumerate(fills):
        here = base + fill.line * line_bytes
        if fill.evicted is not None:
            _readdress(lines, fill.evicted, int(homes["address"][fill.evicted]) - here, 1)
            homes["line"][fill.evicted] = NO_LINE
        home = int(homes["address"][fill.expert])
        _readdress(lines, fill.expert, here - home, 0)
        homes["line"][fill.expert] = fill.line
        tables["fills"][i] = (here, home, homes["bytes"][fill.expert], 0)
    uses["expert"][:n_lines] = [NO_LINE if expert is None else expert for expert in model.holds]
    uses["used"][:n_lines] = model.used
    cache["clock"], cache["n_fills"] = model.clock, len(fills)
    for name, n in model.counters.items():
        cache[name] += np.uint64(n)


def line_fill(memory: NDArray[np.uint8], fills: Sequence[tuple[int, int, int]]) -> None:
    """Copies in `memory`, bytes, in place.  fills: (to, from, bytes), offsets."""
    for to, start, size in fills:
        memory[to : to + size] = memory[start : start + size]


def _readdress(lines: NDArray[Any], expert: int, by: int, source: int) -> None:
    for part, field in _PARTS:
        address = (int(lines[part][field][expert]) + by) % (1 << 64)
        lines[part][field][expert] = address
    lines["source"][expert] = source
