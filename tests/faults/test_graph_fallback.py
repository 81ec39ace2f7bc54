"""A graph that cannot be made or launched: eager rounds with the same tokens, counted, the stream usable."""

from __future__ import annotations

import pytest

from flashnext_drv.drv import faults
from flashnext_drv.engine.engine import Engine, Generation, Limits
from flashnext_drv.errors import ContextLost, DriverError

from .sweep import N_NEW, PACK, PROMPT

CALLS = ("cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphUpload", "cuGraphLaunch")

N_ROUNDS = len(PROMPT) + N_NEW - 1


def opened(device_name: str) -> Engine:
    return Engine.open(PACK, Limits(context_tokens=64), device=device_name)


@pytest.fixture(scope="module")
def wanted(device_name: str) -> Generation:
    with opened(device_name) as engine:
        made = engine.generate(PROMPT, max_new_tokens=N_NEW, stop_ids=())
    assert made.counters["eager_rounds"] == 0
    return made


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("code", [1, 2, 901])
def test_failed_graph_call_ends_in_eager_rounds_with_the_same_tokens(
    device_name: str, wanted: Generation, call: str, code: int
) -> None:
    with opened(device_name) as engine:
        with faults.fail_nth(1, code, only=call) as plan:
            made = engine.generate(PROMPT, max_new_tokens=N_NEW, stop_ids=())
        assert plan.fired == 1 and made.tokens == wanted.tokens
        counters = made.counters
        found = [counters[name] for name in ("graph_failures", "eager_rounds", "graph_replays",
                                             "head_replays", "eager_heads")]
        assert found == [1, N_ROUNDS, 0, N_NEW, 0]
        (identity, why), = engine.rank.graphs.off.items()
        assert (identity.path, identity.rows) == ("body", 1) and call in why
        again = engine.generate(PROMPT, max_new_tokens=N_NEW, stop_ids=())
        assert again.tokens == wanted.tokens and again.counters["graph_failures"] == 0
        assert again.counters["eager_rounds"] == N_ROUNDS, "an identity that is off stays off"


@pytest.mark.parametrize("call", ["cuStreamBeginCapture", "cuGraphInstantiate", "cuGraphUpload",
                                  "cuGraphLaunch"])
def test_graphs_that_always_fail_leave_all_rounds_eager(
    device_name: str, wanted: Generation, call: str
) -> None:
    with opened(device_name) as engine, faults.fail_nth(1, 2, only=call, forever=True):
        made = engine.generate(PROMPT, max_new_tokens=N_NEW, stop_ids=())
        assert made.tokens == wanted.tokens
        assert (made.counters["graph_failures"], made.counters["graph_replays"]) == (3, 0)  # body, head, next
        assert made.counters["eager_rounds"] == N_ROUNDS and made.counters["eager_heads"] == N_NEW


def test_a_capture_that_cannot_be_ended_breaks_the_context(device_name: str) -> None:
    engine = opened(device_name)
    with faults.fail_nth(1, 1, only="cuStreamEndCapture", forever=True), pytest.raises(DriverError) as found:
        engine.generate(PROMPT, max_new_tokens=N_NEW, stop_ids=())
    assert found.value.call == "cuStreamEndCapture"
    assert "cannot be ended" in engine.rank.ctx.broken
    with pytest.raises(ContextLost, match="cannot be ended"):
        engine.generate(PROMPT, max_new_tokens=N_NEW, stop_ids=())
    engine.close()
    assert len(engine.ledger.entries()) == 0


def test_a_launch_lost_inside_a_capture_is_not_replayed_around(device_name: str) -> None:
    engine = opened(device_name)
    with faults.fail_nth(1, 719, only="cuGraphInstantiate"), pytest.raises(ContextLost):
        engine.generate(PROMPT, max_new_tokens=N_NEW, stop_ids=())
    assert engine.rank.ctx.broken and not engine.rank.graphs.off
    engine.close()
    assert len(engine.ledger.entries()) == 0
