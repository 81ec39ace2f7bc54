"""An engine with graphs is opened and closed again and again: ledger, driver and threads return to the
start each time."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from . import sweep

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("n", [24, pytest.param(1000, marks=pytest.mark.slow)])
def test_open_and_close(device_name: str, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Every second life makes its executables on a thread and may close while it makes one; every twelfth
    computes."""
    if device_name != "sim":
        pytest.skip("the counters are the simulator's")
    bench = sweep.Bench(monkeypatch)
    plain, threads = bench.limits, set(threading.enumerate())
    for i in range(n):
        bench.limits = replace(plain, graph_async=bool(i % 2), graphs=2 + i % 3, graph_after=1 + i % 5 // 4)
        compute = i % 12 == 11
        life = bench.live(compute)
        assert life.error is None and life.graph_failures == 0
        assert life.tokens == (bench.tokens if compute else [0] * sweep.N_NEW)
        life.ledger.require_empty()
        assert sweep.held() == bench.before, i
        assert set(threading.enumerate()) <= threads, "a thread of an engine outlived it"
