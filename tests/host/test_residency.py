"""The banks of the ring on their own: every order keeps what the ring relies on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnext_drv.state.residency import NO_BANK, Banks, Batch, Fill, runs_of

pytestmark = pytest.mark.host
ids = np.asarray


def mask(n: int, experts: list[int]) -> np.ndarray:
    found = np.zeros(n, np.bool_)
    found[experts] = True
    return found


class Model:
    """What the banks hold when the given orders are followed, and whether that may be."""

    def __init__(self, banks: Banks) -> None:
        self.banks = banks
        self.holds: list[tuple[int, list[int]] | None] = [None] * banks.depth
        self.read = [False] * banks.depth  # since the last fill
        self.filled: list[Fill] = []

    def fill(self, fill: Fill) -> None:
        assert 1 <= len(fill.experts) <= self.banks.n_lines
        assert fill.after_reads == self.read[fill.bank]
        self.holds[fill.bank] = (fill.i_layer, fill.experts.tolist())
        self.read[fill.bank] = False
        self.filled.append(fill)

    def layer(self, i_layer: int, used: np.ndarray, resident: np.ndarray, following: np.ndarray) -> list[int]:
        """Follow a layer's order; the experts it streams, batch by batch."""
        order = self.banks.layer(i_layer, used.copy(), resident.copy(), following)
        in_place = [each for each in order if isinstance(each, Batch) and each.bank == NO_BANK]
        assert [each.experts.tolist() for each in in_place] == [np.flatnonzero(used & resident).tolist()]
        streamed: list[int] = []
        for each in order:
            if isinstance(each, Fill):
                self.fill(each)
                continue
            if each.bank == NO_BANK:
                continue
            held = self.holds[each.bank]
            assert held is not None and held[0] == i_layer and len(each.experts)
            assert [held[1][line] for line in each.lines] == each.experts.tolist()
            streamed += each.experts.tolist()
            self.read[each.bank] = True
        assert sorted(streamed) == np.flatnonzero(used & ~resident).tolist()
        return streamed


@st.composite
def walks(draw: st.DrawFn) -> tuple[int, int, int, list[tuple[list[int], list[int], list[int]]], int]:
    """(experts, depth, lines, per layer (used, resident, predicted), layer after which it stops half-way)."""
    n = draw(st.integers(1, 12))
    some = st.lists(st.integers(0, n - 1), unique=True)
    layers = draw(st.lists(st.tuples(some, some, some), min_size=1, max_size=5))
    return n, draw(st.integers(1, 5)), draw(st.integers(1, n)), layers, draw(st.integers(0, 9))


@settings(max_examples=300, deadline=None)
@given(walk=walks())
def test_any_walk_streams_every_used_expert_once(
    walk: tuple[int, int, int, list[tuple[list[int], list[int], list[int]]], int]
) -> None:
    n, depth, n_lines, layers, stop = walk
    banks = Banks(depth, n_lines, len(layers))
    for _ in range(2):  # a chunk, and one more on the same banks
        model = Model(banks)
        banks.reset()
        before = banks.counters.copy()
        ahead = [ids([e for e in asked if e not in resident], np.int64) for _, resident, asked in layers]
        ahead.append(ids([], np.int64))
        for fill in banks.ahead(0, ahead[0]):
            model.fill(fill)
        for i, (used, resident, _) in enumerate(layers):
            model.layer(i, mask(n, used), mask(n, resident), ahead[i + 1])
            if i == stop:
                break
        banks.reset()
        counts = {name: banks.counters[name] - before[name] for name in ("copied_lines", "wasted", "waits")}
        for i, (used, resident, _) in enumerate(layers[: stop + 1]):
            wanted = len(set(used) - set(resident))
            assert counts["copied_lines"][i] - counts["wasted"][i] == wanted
            assert counts["waits"][i] == len({id(f) for f in model.filled if f.i_layer == i
                                             and set(f.experts.tolist()) & set(used)})


def test_prefetch_fills_each_bank_as_it_comes_free() -> None:
    banks = Banks(2, 2, 2)
    order = banks.layer(0, mask(8, [0, 1, 2, 3, 4, 7]), mask(8, [7]), ids([0, 1, 2, 3, 4, 5, 6]))
    told = [(each.bank, each.experts.tolist(), each.ahead) if isinstance(each, Fill)
            else (each.bank, each.experts.tolist()) for each in order]
    assert told == [(NO_BANK, [7]), (0, [0, 1], False), (1, [2, 3], False), (0, [0, 1]), (0, [4], False),
                    (1, [2, 3]), (1, [0, 1], True), (0, [4]), (0, [2, 3], True)]
    order = banks.layer(1, mask(8, [1, 5]), mask(8, []), ids([]))
    told = [(each.bank, each.experts.tolist()) for each in order]
    assert told == [(0, [5]), (1, [1]), (NO_BANK, []), (0, [5])]
    assert banks.counters["wasted"].tolist() == [0, 3] and banks.counters["prefetched"].tolist() == [0, 4]


def test_what_was_prefetched_for_another_layer_is_not_used() -> None:
    banks = Banks(1, 4, 3)
    banks.ahead(1, ids([0, 1, 2, 3]))
    order = banks.layer(2, mask(4, [2]), mask(4, []), ids([]))
    assert [type(each) for each in order] == [Batch, Fill, Batch]
    assert banks.counters["wasted"].tolist() == [0, 4, 0]


def test_neighbours_are_one_copy() -> None:
    assert runs_of([]) == [] and runs_of([5]) == [(0, 5, 1)]
    assert runs_of([0, 1, 2, 4, 3, 9, 10]) == [(0, 0, 3), (3, 4, 1), (4, 3, 1), (5, 9, 2)]
