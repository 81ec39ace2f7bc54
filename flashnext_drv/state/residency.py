"""Which experts the banks of the ring hold, and in which order a layer's experts are streamed through them.

Used by ring.py, which does what stands here; pure, so that tests can follow every order.  What must stay
true: every used expert of a layer stands in exactly one batch; a bank is filled again only after the batches
that read it were issued; nothing that was prefetched is used for another layer.

    layer i     bank 0 | bank 1 | bank 2 | bank 3 | bank 0 | residents | bank 1     batches, in order of issue
    fills              0 <- i   1 <- i   then banks for layer i + 1, each as soon as it is free

The residents need no copy: they come first where nothing was prefetched, and last but one where something
was, so that banks come free early and the last copies have time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["COUNTERS", "NAMES", "NO_BANK", "Banks", "Batch", "Fill", "Ids", "runs_of"]

NO_BANK = -1
NAMES = ("batches", "in_place", "copied_lines", "copied_bytes", "prefetched", "wasted", "waits")
COUNTERS = np.dtype([(name, "<u8") for name in NAMES])
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Fill:
    """Copy `experts` of a layer into lines 0, 1, ... of a bank.  after_reads: launches issued before read the
    bank, so the copy waits for them.  ahead: the layer's routing is not known yet."""

    bank: int
    i_layer: int
    experts: Ids
    after_reads: bool
    ahead: bool


@dataclass(frozen=True, eq=False)
class Batch:
    """Run the rows of `experts`.  bank: where they lie, in `lines` of it; NO_BANK: in their device lines,
    and the shared expert goes with them."""

    bank: int
    experts: Ids
    lines: Ids


class Banks:
    """The banks of one ring.  depth: banks; n_lines: lines of each.

    counters: (layers,) COUNTERS since it was made.  Of experts: in_place are used ones read in their device
    lines, prefetched those copied before the routing was known, wasted those of them that had no rows.
    waits: batches that need a bank.  copied_bytes is counted by who copies.
    """

    def __init__(self, depth: int, n_lines: int, n_layers: int) -> None:
        self.depth, self.n_lines = depth, n_lines
        self.counters = np.zeros(n_layers, COUNTERS)
        self.reset()

    def reset(self) -> None:
        """All banks are free and no reads of them are left; what was prefetched counts as wasted."""
        for i_layer, _, experts in getattr(self, "_ahead", ()):
            self.counters["wasted"][i_layer] += len(experts)
        self._free = deque(range(self.depth))
        self._read = [False] * self.depth
        self._ahead: list[tuple[int, int, Ids]] = []

    def ahead(self, i_layer: int, experts: Ids) -> list[Fill]:
        """Fill the free banks for a layer whose routing is not known yet: as many of `experts` as they
        hold."""
        fills = []
        for first in range(0, min(len(experts), len(self._free) * self.n_lines), self.n_lines):
            fills.append(self._fill(i_layer, experts[first : first + self.n_lines], ahead=True))
        return fills

    def layer(self, i_layer: int, used: Mask, resident: Mask, following: Ids) -> list[Fill | Batch]:
        """What to do for a layer, in the order of issue.

        used, resident: (E,) bool.  following: experts of layer i_layer + 1 to prefetch, in order, each once
        and none of them resident; as many as find a bank.
        """
        counters = self.counters[i_layer]
        in_place, streamed = np.flatnonzero(used & resident), used & ~resident
        batches = deque(self._prefetched(i_layer, streamed))
        rest = np.flatnonzero(streamed)
        n_batches = len(batches) + -(-len(rest) // self.n_lines)
        before = n_batches - 1 if batches else 0  # of the banks' batches, the one that the residents precede
        order: list[Fill | Batch] = []
        i_batch = 0
        while True:
            if i_batch == before:
                order.append(Batch(NO_BANK, in_place, in_place))
            while self._free and len(rest):
                fill = self._fill(i_layer, rest[: self.n_lines], ahead=False)
                rest = rest[self.n_lines :]
                order.append(fill)
                batches.append(Batch(fill.bank, fill.experts, np.arange(len(fill.experts))))
            if not len(rest) and self._free and len(following):
                fills = self.ahead(i_layer + 1, following)
                following = following[sum(len(fill.experts) for fill in fills) :]
                order += fills
            if not batches:
                break
            batch = batches.popleft()
            order.append(batch)
            i_batch += 1
            self._read[batch.bank] = True
            self._free.append(batch.bank)
        counters["in_place"] += len(in_place)
        counters["waits"] += n_batches
        counters["batches"] += n_batches + 1
        return order

    def _prefetched(self, i_layer: int, streamed: Mask) -> list[Batch]:
        """Batches of the banks filled ahead; their experts are taken out of `streamed`.  A bank without a
        used expert is free again."""
        batches = []
        for for_layer, bank, experts in self._ahead:
            wanted = streamed[experts] if for_layer == i_layer else np.zeros(len(experts), np.bool_)
            lines = np.flatnonzero(wanted)
            self.counters["wasted"][for_layer] += len(experts) - len(lines)
            if len(lines):
                batches.append(Batch(bank, experts[lines], lines))
                streamed[experts[lines]] = False
            else:
                self._free.append(bank)
        self._ahead = []
        return batches

    def _fill(self, i_layer: int, experts: Ids, ahead: bool) -> Fill:
        bank = self._free.popleft()
        fill = Fill(bank, i_layer, experts, self._read[bank], ahead)
        self._read[bank] = False
        self.counters["copied_lines"][i_layer] += len(experts)
        if ahead:
            self.counters["prefetched"][i_layer] += len(experts)
            self._ahead.append((i_layer, bank, experts))
        return fill


def runs_of(experts: Sequence[int] | Ids) -> list[tuple[int, int, int]]:
    """(first place, first expert, count) of the pieces whose experts are neighbours in rising order."""
    ids = np.asarray(experts, np.int64)
    if not len(ids):
        return []
    cuts = (np.flatnonzero(ids[1:] - ids[:-1] != 1) + 1).tolist()
    return [(a, int(ids[a]), b - a) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
