"""Buffers of the deep pass that are refused, and requests that cannot run: the same bytes, or a typed error
and nothing changed."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flashnext_drv.drv import faults
from flashnext_drv.engine.engine import Engine, Limits, Prefill
from flashnext_drv.engine.plan import plan
from flashnext_drv.errors import CapacityError, ContextLost, DriverError, UsageError
from flashnext_drv.model import deep_layout

from .prompts import IDS, N_NEW, deep

pytestmark = pytest.mark.sim


@pytest.fixture
def engine(deep_engine: Engine) -> Engine:
    return deep_engine


@pytest.fixture
def oracle(serial_run: Any) -> Any:
    return serial_run


@pytest.fixture(scope="module")
def base_bytes(deep_engine: Engine) -> int:
    """Device bytes of the plan below without the deep pass."""
    guard = deep_engine.facts.is_simulator
    return sum(plan(deep_engine.rank.layout, deep_engine.pack, guard).device.values())


@pytest.mark.parametrize("mode", ["open", "request"])
def test_buffers_that_do_not_fit_change_time_only(
    micro: Path, device: str, engine: Engine, oracle: Any, base_bytes: int, mode: str
) -> None:
    limits = {**vars(engine.limits), "deep": mode, "device_bytes": base_bytes + 4096}
    with Engine.open(micro, Limits(**limits), device=device) as small:
        assert small.rank.deep is None and "plan leaves 4.0 KiB" in small.rank.deep_refused
        reply = small.generate(IDS, max_new_tokens=N_NEW, stop_ids=(), prefill=deep(chunk=40))
        assert reply.tokens == oracle.tokens
        assert (reply.counters["deep_refusals"], reply.counters["batched_rows"]) == (3, 83)
        assert "deep" not in small.ledger.live("device")
        assert "deep pass: none; the smallest deep buffers take" in small.memory().table()


def test_chunk_is_the_largest_that_fits(micro: Path, device: str, engine: Engine, base_bytes: int) -> None:
    layout = engine.rank.layout
    guard = engine.facts.is_simulator
    sizes = {rows: deep_layout.DeepLayout(layout, rows).size_bytes(guard) for rows in (128, 256)}
    for room, rows in ((sizes[256], 256), (sizes[256] - 1, 0)):
        limits = {**vars(engine.limits), "device_bytes": base_bytes + room}
        with Engine.open(micro, Limits(**limits), device=device) as opened:
            assert (opened.rank.deep.layout.rows if opened.rank.deep else 0) == rows
    limits = {**vars(engine.limits), "chunk": 100, "device_bytes": base_bytes + sizes[128]}
    with Engine.open(micro, Limits(**limits), device=device) as opened:
        assert opened.rank.deep is not None and opened.rank.chunk == 100
        assert opened.rank.deep.layout.rows == 128


@pytest.mark.parametrize("call", ["cuMemAlloc", "cuMemHostAlloc", "cuEventCreate", "cuMemcpyHtoDAsync",
                                  "cuLaunchKernel"])
def test_driver_refuses_the_buffers_at_open(
    micro: Path, device: str, engine: Engine, oracle: Any, call: str
) -> None:
    """The call that fails is the first of its name after everything else is there."""
    off = Limits(**{**vars(engine.limits), "deep": "off"})
    with faults.count_calls() as count, Engine.open(micro, off, device=device):
        n_calls = count.names.count(call)
    if call == "cuLaunchKernel":  # the empty rounds come after the deep pass
        n_calls -= sum(not launch.programmatic for bucket in (1, 16)
                       for launch in engine.rank.launches("token", bucket))
    code = 2 if call.endswith("Alloc") else 1
    with (
        faults.fail_nth(n_calls + 1, code, only=call) as planned,
        Engine.open(micro, engine.limits, device=device) as opened,
    ):
        assert planned.fired == 1
        assert opened.rank.deep is None and f"{call}(" in opened.rank.deep_refused
        assert "deep" not in opened.ledger.live("device")
        assert "deep.staging" not in opened.ledger.live("pinned")
        reply = opened.generate(IDS[:24], max_new_tokens=1, stop_ids=(), prefill=deep())
        assert reply.tokens == oracle.greedy(24) and reply.counters["deep_refusals"] == 1


def test_driver_refuses_the_buffers_at_a_request(
    micro: Path, device: str, engine: Engine, oracle: Any
) -> None:
    """That prompt goes by batches; the next one gets the buffers, and they stay."""
    limits = Limits(**{**vars(engine.limits), "deep": "request"})
    with Engine.open(micro, limits, device=device) as opened:
        assert opened.rank.deep is None and not opened.rank.deep_refused
        assert "no prompt has asked for it" in opened.memory().table()
        reply = opened.generate(IDS[:24], max_new_tokens=1, prefill=Prefill(deep=False))
        assert reply.counters["deep_rows"] == 0
        for call, code in (("cuMemAlloc", 2), ("cuMemHostAlloc", 2), ("cuEventCreate", 1)):
            with faults.fail_nth(1, code, only=call):  # a second try would succeed: there is none
                reply = opened.generate(IDS[:24], max_new_tokens=1, stop_ids=(), prefill=deep(chunk=11))
            assert reply.tokens == oracle.greedy(24)
            assert (reply.counters["deep_refusals"], reply.counters["batched_rows"]) == (3, 24)
            assert f"{call}(" in opened.rank.deep_refused and f"{call}(" in opened.memory().table()
            assert "deep" not in opened.ledger.live("device")
        reply = opened.generate(IDS, max_new_tokens=N_NEW, stop_ids=(), prefill=deep())
        assert reply.tokens == oracle.tokens and reply.counters["deep_rows"] == 83
        first = opened.rank.deep
        opened.generate(IDS, max_new_tokens=1, prefill=deep())
        assert opened.rank.deep is first and first is not None and not opened.rank.deep_refused
        ledger = opened.ledger
    ledger.require_empty()
    assert first.closed and first.arena.closed


def test_a_lost_context_is_no_refusal(micro: Path, device: str, engine: Engine) -> None:
    limits = Limits(**{**vars(engine.limits), "deep": "request"})
    opened = Engine.open(micro, limits, device=device)
    with faults.fail_nth(1, 700, only="cuMemAlloc"), pytest.raises(ContextLost):
        opened.generate(IDS, max_new_tokens=1, prefill=deep())
    ledger = opened.ledger
    with suppress(DriverError, ExceptionGroup):
        opened.close()
    ledger.require_empty()


@pytest.mark.parametrize(("fields", "reason"), [
    ({"deep": "off"}, "Limits.deep is off"),
    ({"deep_rows": 512}, "no segment of these limits reaches Limits.deep_rows=512 rows"),
    ({"chunk": 100, "deep_rows": 101}, "no segment of these limits")])
def test_nothing_is_reserved_where_no_segment_goes_deep(
    micro: Path, device: str, engine: Engine, fields: dict[str, Any], reason: str
) -> None:
    with Engine.open(micro, Limits(**{**vars(engine.limits), **fields}), device=device) as opened:
        assert opened.rank.deep is None and reason in opened.rank.deep_refused
        assert "deep" not in opened.ledger.live("device")


@pytest.mark.parametrize(("fields", "text"), [
    ({"chunk": 0}, "chunk is outside its range (value=0, range=1..16384)"),
    ({"chunk": 16385}, "chunk is outside its range (value=16385"),
    ({"chunk": True}, "chunk is outside its range"), ({"chunk": 1.5}, "chunk is outside its range"),
    ({"deep_rows": 0}, "deep_rows is outside its range (value=0"), ({"deep_rows": "1"}, "deep_rows"),
    ({"serial": 1}, "serial is True or False"), ({"deep": None}, "deep is True or False"),
    ({"cancel": 5}, "cancel is a threading.Event or a callable"),
    ({"progress": 5}, "progress is a callable")])
def test_prefill_outside_its_range(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        Prefill(**fields)


@pytest.mark.parametrize(("fields", "text"), [
    ({"chunk": -1}, "limit chunk"), ({"chunk": 16385}, "limit chunk"), ({"deep_rows": 0}, "limit deep_rows"),
    ({"deep": "maybe"}, "deep is not known (value=maybe); use one of open, request, off")])
def test_limits_of_prompts_outside_their_range(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        Limits(**fields)


def test_requests_that_cannot_run_change_nothing(engine: Engine, oracle: Any) -> None:
    text = "chunk is above the engine's plan (chunk=257, plan=256); raise Limits.chunk"
    with pytest.raises(UsageError, match=re.escape(text)):
        engine.generate(IDS, max_new_tokens=1, prefill=Prefill(chunk=257))
    with pytest.raises(UsageError, match="chunk is above"):
        engine.logits(IDS, prefill=Prefill(chunk=257))
    with pytest.raises(CapacityError, match="needed_tokens=193, context_tokens=192"):
        engine.generate([1] * 193, max_new_tokens=1, prefill=deep())
    with pytest.raises(CapacityError, match="tokens=193, capacity=192"):
        engine.logits([1] * 193, prefill=deep())
    with engine.sequence() as sequence, engine.sequence() as closed:
        sequence.extend([3, 512])
        for prefill in (deep(), Prefill(deep=False)):
            with pytest.raises(UsageError, match="index=1, id=512, vocab=512"):
                engine.prompt([sequence], prefill=prefill)
            if prefill.deep:
                assert sequence.n_done == 0 and not sequence.failed
        with pytest.raises(UsageError, match="a sequence is given twice"):
            engine.prompt([sequence, sequence], prefill=deep())
        closed.extend(IDS)
        engine.rank.close_sequence(closed)
        with pytest.raises(UsageError, match="closed sequence"):
            engine.prompt([closed], prefill=deep())
    assert engine.prompt([]) == []
    assert engine.generate(IDS, max_new_tokens=1, stop_ids=(), prefill=deep()).tokens == oracle.tokens[:1]
