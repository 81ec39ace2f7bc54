"""The ledger: nothing is forgotten, nothing counted twice, peaks are true."""

from __future__ import annotations

import random

import pytest

from flashnext_drv.errors import LeakError, UsageError
from flashnext_drv.ledger import Ledger


def test_live_and_peak_by_tier_and_owner() -> None:
    ledger = Ledger()
    a = ledger.add("kv", "device", 100, 2048)
    b = ledger.add("work", "device", 50, 1024)
    ledger.add("host", "pinned", 7)
    assert ledger.live() == {"device": 150, "pinned": 7}
    assert ledger.live("device") == {"kv": 100, "work": 50}
    a.remove()
    assert ledger.live("device") == {"work": 50}
    assert ledger.peak()["device"] == 3072 and ledger.peak("device") == {"kv": 2048, "work": 1024}
    c = ledger.add("kv", "device", 10, 512)
    assert ledger.peak()["device"] == 3072
    for entry in (b, c):
        entry.remove()
    assert ledger.live() == {"pinned": 7}
    row = next(r for r in ledger.table() if r.owner == "kv")
    assert (row.n_live, row.n_total, row.live_bytes, row.peak_bytes, row.peak_granted_bytes) == (0, 2, 0, 100,
                                                                                                 2048)


def test_removed_twice_is_refused() -> None:
    ledger = Ledger()
    entry = ledger.add("a", "device", 1)
    entry.remove()
    with pytest.raises(UsageError, match="removed twice"):
        entry.remove()


def test_leak_names_owner_and_line() -> None:
    ledger = Ledger()
    ledger.add("experts.cache", "device", 4096)
    with pytest.raises(LeakError) as caught:
        ledger.require_empty()
    assert len(caught.value.entries) == 1
    assert "experts.cache device 4.0 KiB" in str(caught.value) and "test_ledger.py:" in str(caught.value)


def test_handles_are_counted_not_summed() -> None:
    ledger = Ledger()
    first, second = ledger.add("s", "stream"), ledger.add("s", "stream")
    assert ledger.live() == {"stream": 2} and ledger.live("stream") == {"s": 2}
    first.remove()
    second.remove()
    ledger.require_empty()


@pytest.mark.parametrize("call", [("a", "disk", 1), ("a", "device", -1)])
def test_bad_entries_are_refused(call: tuple[str, str, int]) -> None:
    with pytest.raises(UsageError):
        Ledger().add(*call)


def test_lost_with_the_context_is_no_leak_but_stays_known() -> None:
    ledger = Ledger()
    kept, lost = ledger.add("a", "device", 5), ledger.add("b", "device", 6)
    ledger.lose((lost,))
    assert ledger.live() == {"device": 5} and [e.owner for e in ledger.lost()] == ["b"]
    lost.remove()                   # its owner closes later: nothing to do
    ledger.lose((lost, kept))
    ledger.require_empty()
    assert len(ledger.lost()) == 2


def test_reconcile_counts_what_handles_were_measured_to_take() -> None:
    ledger = Ledger()
    ledger.add("context", "context").measured(500)
    ledger.add("arena", "device", 1000, 2048)
    ledger.add("pinned", "pinned", 9999)
    found = ledger.reconcile(10_000, 10_000 - 2600)
    assert (found.taken_bytes, found.explained_bytes, found.unexplained_bytes, found.n_allocations) == (
        2600, 2548, 52, 1)
    ledger.add("arena", "device", 10)
    ledger.add("stream", "stream")
    ledger.add("event", "event")
    assert ledger.reconcile(10_000, 10_000).n_allocations == 2, "handles and pinned memory are none"


def test_largest_holders_for_messages() -> None:
    ledger = Ledger()
    assert ledger.largest("device") == "nothing of ours holds device memory"
    ledger.add("small", "device", 1 << 20)
    ledger.add("large", "device", 3 << 30)
    assert ledger.largest("device") == "largest holder large 3.0 GiB, small 1.0 MiB"


@pytest.mark.parametrize("seed", range(5))
def test_random_orders_keep_the_sums_true(seed: int) -> None:
    rng, ledger, live, peak = random.Random(seed), Ledger(), {}, 0
    for _ in range(300):
        if live and rng.random() < 0.45:
            live.pop(rng.choice(list(live))).remove()
        else:
            size = rng.randrange(1000)
            entry = ledger.add(rng.choice("abc"), "device", size)
            live[entry.id] = entry
        peak = max(peak, sum(e.size_bytes for e in live.values()))
        assert ledger.live().get("device", 0) == sum(e.size_bytes for e in live.values())
        assert len(ledger) == len(live)
    assert ledger.peak()["device"] == peak
