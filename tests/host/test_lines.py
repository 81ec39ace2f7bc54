"""The model of device lines under long sequences of requests: what holds after every round, the least
recently used expert against an ordered dictionary, policies that misbehave, and tables that follow the model.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
from numpy.typing import NDArray

from flashnext_drv.check.cases_lines import line_tables
from flashnext_drv.kernels.tables import COUNTERS, NO_LINE
from flashnext_drv.ref.lines import LRU, LineCache, Policy, line_resolve

pytestmark = pytest.mark.host

Rows = list[list[int]]
Tables = dict[str, NDArray[Any]]


def requests(rng: random.Random, n_experts: int, n_rounds: int) -> list[Rows]:
    """Rounds of 1 to 16 rows that ask for 1 to 8 experts each, most for some that are asked for often;
    which these are changes after one round in ten."""
    popular = rng.sample(range(n_experts), max(n_experts // 4, 1))
    out = []
    for _ in range(n_rounds):
        n_active = rng.randint(1, min(8, n_experts))
        rows = []
        for _ in range(rng.choice((1, 1, 1, 2, 5, 16))):
            pool = popular if rng.random() < 0.6 and len(popular) >= n_active else range(n_experts)
            rows.append(sorted(rng.sample(list(pool), n_active)))
        out.append(rows)
        if rng.random() < 0.1:
            popular = rng.sample(range(n_experts), len(popular))
    return out


class Youngest:
    """The other way round than LRU, and never more than two lines."""

    def victims(self, ages: Sequence[int], most: int) -> list[int]:
        free = [line for line, age in enumerate(ages) if age]
        return sorted(free, key=lambda line: (ages[line], -line))[: min(most, 2)]


def start(rng: random.Random, n_experts: int, n_lines: int, policy: Policy | None = None) -> LineCache:
    sizes = [256 * rng.randint(1, 9) for _ in range(n_experts)]
    holds: list[int | None] = [*rng.sample(range(n_experts), n_lines)]
    for line in range(n_lines):
        if rng.random() < 0.2:
            holds[line] = None
    return LineCache(sizes, holds, policy=policy)


@pytest.mark.parametrize("policy", [None, Youngest()], ids=["lru", "youngest"])
@pytest.mark.parametrize("n_lines", [0, 1, 3, 8, 9, 20, 39, 40])
def test_every_round_keeps_what_must_hold(n_lines: int, policy: Policy | None) -> None:
    rng = random.Random(f"rounds {n_lines}")
    cache = start(rng, 40, n_lines, policy)
    seen = dict.fromkeys(COUNTERS, 0)
    for n_round, rows in enumerate(requests(rng, 40, 1500), 1):
        holds, used = list(cache.holds), list(cache.used)
        fills = cache.resolve(rows)
        wanted = sorted({expert for row in rows for expert in row})
        missing = [expert for expert in wanted if expert not in holds]
        here = [expert for expert in cache.holds if expert is not None]
        assert len(set(here)) == len(here), "an expert lies in two lines"
        assert all(cache.holds[line] == e for line, e in enumerate(holds) if e in wanted), "one in use left"
        assert [fill.expert for fill in fills] == missing[: len(fills)], "fills are not in rising id"
        assert all(holds[f.line] == f.evicted and cache.holds[f.line] == f.expert for f in fills)
        assert len({fill.line for fill in fills}) == len(fills)
        for line in range(n_lines):
            assert cache.used[line] == (n_round if cache.holds[line] in wanted else used[line])
            if line not in {fill.line for fill in fills}:
                assert cache.holds[line] == holds[line], "a line changed without a fill"
        if policy is None:
            free = [line for line in range(n_lines) if holds[line] not in wanted]
            order = sorted(free, key=lambda line: (used[line], line))
            assert [fill.line for fill in fills] == order[: len(missing)]
        at_home = set(missing[len(fills) :])
        pairs = [expert for row in rows for expert in row if expert in at_home]
        seen["hits"] += len(wanted) - len(missing)
        seen["misses"] += len(missing)
        seen["fills"] += len(fills)
        seen["evictions"] += len([fill for fill in fills if fill.evicted is not None])
        seen["filled_bytes"] += sum(cache.sizes[fill.expert] for fill in fills)
        seen["in_place"] += len(at_home)
        seen["reads"] += len(pairs)
        seen["read_bytes"] += sum(cache.sizes[expert] for expert in pairs)
        assert cache.counters == seen
    assert cache.clock == 1500
    if 0 < n_lines < 20:
        assert min(seen["hits"], seen["evictions"], seen["in_place"]) > 0, f"too tame: {seen}"


@pytest.mark.parametrize("n_lines", [1, 2, 7, 16])
def test_one_expert_a_round_is_the_least_recently_used_dictionary(n_lines: int) -> None:
    rng = random.Random(n_lines)
    cache = LineCache([16] * 24, list(range(n_lines)))
    known = OrderedDict((expert, expert) for expert in range(n_lines))  # expert -> line, oldest first
    for _ in range(2000):
        expert = min(rng.randrange(24), rng.randrange(24))
        fills = cache.resolve([[expert]])
        if expert in known:
            assert not fills
            known.move_to_end(expert)
            continue
        out, line = known.popitem(last=False)
        known[expert] = line
        assert [(f.expert, f.line, f.evicted) for f in fills] == [(expert, line, out)]
    assert cache.counters["evictions"] == cache.counters["misses"] > 100


def test_no_rows_change_nothing() -> None:
    cache = LineCache([16, 32, 48], [1, None], [4, 0], clock=9)
    assert cache.resolve([]) == []
    assert (cache.holds, cache.used, cache.clock) == ([1, None], [4, 0], 9)
    assert not any(cache.counters.values())


def test_clock_that_wraps_keeps_the_order_of_ages() -> None:
    cache = LineCache([16] * 6, [0, 1, 2], [2**32 - 3, 2**32 - 1, 2**32 - 2], clock=2**32 - 1)
    assert [(f.line, f.evicted) for f in cache.resolve([[1, 4]])] == [(0, 0)]
    assert (cache.clock, cache.used) == (0, [0, 0, 2**32 - 2])
    assert [f.line for f in cache.resolve([[3, 5]])] == [2, 0]


@pytest.mark.parametrize(("gives", "why"), [([0], "ages"), ([1, 1], "given away")])
def test_a_policy_that_gives_away_what_it_must_not_is_refused(gives: list[int], why: str) -> None:
    class Wrong:
        def victims(self, ages: Sequence[int], most: int) -> list[int]:
            return gives

    cache = LineCache([16] * 5, [0, 1], policy=Wrong())
    with pytest.raises(ValueError, match=why):
        cache.resolve([[0, 2, 3]])


def test_an_expert_in_two_lines_is_refused() -> None:
    with pytest.raises(ValueError, match="stands in two lines"):
        LineCache([16] * 3, [1, 1])
    with pytest.raises(ValueError, match="not as many"):
        LineCache([16] * 3, [1, 2], [0])


def test_lru_names_only_lines_that_are_free() -> None:
    assert LRU().victims([0, 4, 0, 9, 4, 1], 9) == [3, 1, 4, 5]
    assert LRU().victims([0, 4, 0, 9, 4, 1], 2) == [3, 1]
    assert LRU().victims([0, 0], 2) == []


def test_tables_follow_the_model_and_each_other() -> None:
    """Homes and uses name each other, and an expert's addresses are those of its copy, after every round."""
    rng = random.Random(5)
    n_experts, n_lines, clock = 30, 11, 3
    holds = [*rng.sample(range(n_experts), n_lines - 2), NO_LINE, NO_LINE]
    tables = line_tables(1, n_experts, holds, [0] * n_lines, clock, n_lines)
    first = {name: array.copy() for name, array in tables.items()}
    cache = tables["cache"]
    model = LineCache(tables["homes"]["bytes"].tolist(), [None if e == NO_LINE else e for e in holds],
                      clock=clock)
    for rows in requests(rng, n_experts, 400):
        fills = model.resolve(rows)
        line_resolve(tables, rows)
        assert int(cache["n_fills"][0]) == len(fills)
        for fill, row in zip(fills, tables["fills"], strict=False):
            to = int(cache["lines"][0]) + fill.line * int(cache["line_bytes"][0])
            home = tables["homes"][fill.expert]
            assert (row["to"], row["from"], row["bytes"]) == (to, home["address"], home["bytes"])
        check_tables(tables, first, model, n_lines)
    assert {name: int(cache[name][0]) - int(first["cache"][name][0]) for name in COUNTERS} == model.counters


def check_tables(tables: Tables, first: Tables, model: LineCache, n_lines: int) -> None:
    lines, homes, uses, cache = (tables[name] for name in ("lines", "homes", "uses", "cache"))
    assert (cache["clock"][0], uses["used"][:n_lines].tolist()) == (model.clock, model.used)
    assert uses["expert"][:n_lines].tolist() == [NO_LINE if e is None else e for e in model.holds]
    assert (uses[n_lines:] == first["uses"][n_lines:]).all() and lines[-1] == first["lines"][-1]
    for expert in range(len(homes)):
        line = model.line_of(expert)
        assert homes["line"][expert] == (NO_LINE if line is None else line)
        base = int(homes["address"][expert])
        if line is not None:
            base = int(cache["lines"][0]) + line * int(cache["line_bytes"][0])
        assert lines["source"][expert] == (1 if line is None else 0)
        words = lines[expert : expert + 1].view("<u8")[[0, 1, 2, 4, 5, 6, 8, 9, 10]]
        assert [int(word) - base for word in words] == [16 * i for i in range(9)]
        for part in ("gate", "up", "down"):
            assert (lines[part]["format"] == first["lines"][part]["format"]).all()
        assert (lines["width"] == first["lines"]["width"]).all()
