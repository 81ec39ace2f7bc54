"""Memory and ownership: what the ledger says is what the driver lost, and nothing is left after close."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flashnext_drv.drv import api
from flashnext_drv.drv.context import Context
from flashnext_drv.engine.engine import Engine
from flashnext_drv.engine.plan import plan
from flashnext_drv.ledger import Ledger

pytestmark = pytest.mark.sim
BLOCK = 2 << 20


def test_ledger_explains_the_drivers_free_memory(open_micro: Callable[..., Engine]) -> None:
    with open_micro(rows=16, prompt_rows=16) as engine:
        engine.generate([1, 2, 3], max_new_tokens=4, stop_ids=())
        report = engine.memory()
        n_arenas = sum(row.n_live for row in report.rows if row.tier == "device")
        assert n_arenas >= 7
        assert abs(report.unexplained_bytes) <= BLOCK * n_arenas, report.table()
        assert {"experts", "weights", "kv", "work", "tables", "ngram"} <= {row.owner for row in report.rows}
        assert "unexplained" in report.table() and report.as_dict()["graphs"]


def test_plan_equals_the_ledger(open_micro: Callable[..., Engine]) -> None:
    with open_micro() as engine:
        guard = engine.facts.is_simulator
        planned = plan(engine.rank.layout, engine.pack, guard)
        live = engine.ledger.live("device")
        assert {owner: live[owner] for owner in planned.device} == dict(planned.device)
        assert engine.ledger.live("pinned")["ngram"] == planned.pinned["ngram"]


def test_close_gives_everything_back(open_micro: Callable[..., Engine]) -> None:
    engine = open_micro()
    ctx_free = engine.rank.ctx.free_at_start_bytes
    ledger = engine.ledger
    engine.generate([1, 2, 3], max_new_tokens=2, stop_ids=())
    engine.close()
    ledger.require_empty()
    again = open_micro()
    assert again.rank.ctx.free_at_start_bytes >= ctx_free - BLOCK
    again.close()


def test_guards_hold_after_a_run(open_micro: Callable[..., Engine]) -> None:
    """Every arena the kernels write has guard zones in the simulator; none was touched."""
    with open_micro(rows=16, prompt_rows=16) as engine:
        if not engine.facts.is_simulator:
            pytest.skip("guard zones are the simulator's")
        engine.logits([(i * 7) % 512 for i in range(40)])
        for arena in engine.rank.guarded_arenas():
            arena.check_guards()


@pytest.mark.parametrize("primary", [False, True])
def test_embedded_in_a_process_with_its_own_context(
    open_micro: Callable[..., Engine], device_name: str, primary: bool
) -> None:
    """The caller's current context stays current through open, work and close, and ours is gone
    afterwards."""
    ledger = Ledger()
    with Context(0, ledger=ledger, primary=primary) as theirs, theirs.active():
        before = int(api.cuCtxGetCurrent())
        with open_micro(primary_context=primary) as engine:
            assert int(api.cuCtxGetCurrent()) == before
            engine.generate([1, 2], max_new_tokens=2, stop_ids=())
            assert int(api.cuCtxGetCurrent()) == before
        assert int(api.cuCtxGetCurrent()) == before
    ledger.require_empty()
