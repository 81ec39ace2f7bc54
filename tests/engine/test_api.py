"""The public object beyond `generate`: streams that are dropped, errors of callers, warnings, memory."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from flashnext_drv.drv import api, faults
from flashnext_drv.drv.context import Context
from flashnext_drv.drv.memory import DeviceArena
from flashnext_drv.engine.engine import Engine, Limits, token_sha256
from flashnext_drv.engine.rank import TOKEN
from flashnext_drv.engine.round import Window, run_round
from flashnext_drv.errors import CapacityError, DriverError, LeakError, OutOfMemory, UsageError
from flashnext_drv.kernels import bind
from flashnext_drv.ledger import Ledger

pytestmark = pytest.mark.sim
MIB = 1 << 20


def test_stream_gives_the_ids_of_generate(open_micro: Callable[..., Engine]) -> None:
    with open_micro() as engine:
        reply = engine.generate([1, 2, 3], max_new_tokens=5, stop_ids=())
        assert list(engine.stream([1, 2, 3], max_new_tokens=5, stop_ids=())) == reply.tokens
        assert reply.sha256 == token_sha256([1, 2, 3, *reply.tokens]) and reply.finish == "length"
        stopped = engine.generate([1, 2, 3], max_new_tokens=5, stop_ids=(reply.tokens[0],))
        assert (stopped.tokens, stopped.finish) == (reply.tokens[:1], "stop")
        nothing = engine.generate([1, 2, 3], max_new_tokens=0)
        assert nothing.tokens == [] and nothing.finish == "length"


def test_stream_checks_its_arguments_at_the_call(open_micro: Callable[..., Engine]) -> None:
    with open_micro(context_tokens=64) as engine:
        with pytest.raises(UsageError):
            engine.stream([], max_new_tokens=1)
        with pytest.raises(UsageError):
            engine.stream([1], max_new_tokens=-1)
        with pytest.raises(CapacityError):
            engine.stream([1], max_new_tokens=65)


def test_dropped_stream_gives_its_slot_back(open_micro: Callable[..., Engine]) -> None:
    with open_micro() as engine:
        for _ in engine.stream([1, 2], max_new_tokens=5, stop_ids=()):
            break
        gc.collect()
        assert engine.rank.slots.free_slots == 1
        assert engine.generate([1, 2], max_new_tokens=1).tokens


def test_engine_closes_under_a_live_stream(open_micro: Callable[..., Engine]) -> None:
    engine = open_micro()
    stream = engine.stream([1, 2], max_new_tokens=5, stop_ids=())
    next(stream)
    engine.close()
    engine.ledger.require_empty()
    with pytest.raises(UsageError, match="closed"):
        next(stream)


def test_failures_of_close_are_raised_together(
    open_micro: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_micro()
    release = engine.rank.close

    def failing() -> None:
        release()
        try:
            raise DriverError("cuMemFree", 1)
        finally:
            raise DriverError("cuStreamDestroy", 1)  # what an undo stack makes of two failures

    monkeypatch.setattr(engine.rank, "close", failing)
    stray = engine.ledger.add("stray", "host", 1)
    with pytest.raises(ExceptionGroup, match="closing the engine") as caught:
        engine.close()
    assert [type(e) for e in caught.value.exceptions] == [DriverError, DriverError, LeakError]
    assert [e.call for e in caught.value.exceptions[:2]] == ["cuMemFree", "cuStreamDestroy"]
    stray.remove()
    assert engine.closed


def test_error_of_a_callback_leaves_the_engine_usable(open_micro: Callable[..., Engine]) -> None:
    def fail(token: int) -> None:
        raise KeyError(token)

    with open_micro() as engine:
        with pytest.raises(KeyError):
            engine.generate([1, 2], max_new_tokens=3, stop_ids=(), on_token=fail)
        assert engine.generate([1, 2], max_new_tokens=1).tokens


def test_failed_request_costs_no_slot_page_or_byte(open_micro: Callable[..., Engine]) -> None:
    calls = ("cuMemsetD8Async", "cuMemcpyAsync", "cuEventRecord", "cuEventSynchronize", "cuCtxPushCurrent",
             "cuCtxPopCurrent")  # fmt: skip
    with open_micro(sequences=2) as engine:
        rank = engine.rank
        wanted = engine.generate([1, 2, 3], max_new_tokens=2, stop_ids=()).tokens
        for call in calls:
            for n in (1, 2):
                with faults.fail_nth(n, 1, only=call) as plan, suppress(DriverError):
                    engine.generate([1, 2, 3], max_new_tokens=2, stop_ids=())
                assert plan.fired == 1 or (call, n) == ("cuMemsetD8Async", 2)
                assert rank.slots.free_slots == 2 and rank.pages.free_pages == rank.layout.n_pages, call
                assert engine.generate([1, 2, 3], max_new_tokens=2, stop_ids=()).tokens == wanted


def test_no_kernel_is_looked_up_after_opening(open_micro: Callable[..., Engine]) -> None:
    """The driver may load a kernel at its first launch: not inside a capture, and not inside a request."""
    with open_micro(rows=16, prompt_rows=16) as engine, faults.count_calls() as count:
        engine.logits(list(range(20)))
        for limit in (1, 3):
            engine.generate(list(range(limit)), max_new_tokens=2, stop_ids=())
    names = set(count.names)
    assert names & {"cuLaunchKernel", "cuLaunchKernelEx"} and "cuModuleGetFunction" not in names


def test_warning_names_the_callers_line_and_as_an_error_leaves_nothing(
    open_micro: Callable[..., Engine], micro: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledgers: list[Ledger] = []
    original = Ledger.__init__

    def remember(self: Ledger) -> None:
        original(self)
        ledgers.append(self)

    monkeypatch.setattr(Ledger, "__init__", remember)
    monkeypatch.setattr(bind, "_warning", lambda ctx: "no receipt")
    with pytest.warns(RuntimeWarning, match="no receipt") as caught:
        Engine.open(micro, Limits(context_tokens=64), device=device).close()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            Engine.open(micro, Limits(context_tokens=64), device=device)
    assert len(ledgers) == 2
    ledgers[1].require_empty()


def test_device_memory_that_others_hold(
    open_micro: Callable[..., Engine], device: str, device_name: str
) -> None:
    """The plan is refused before anything is allocated; past the plan the driver's refusal names holders."""
    if device_name != "sim":
        pytest.skip("a GPU's memory is not ours to fill")
    ledger = Ledger()
    with Context(0, ledger=ledger) as ctx, ctx.active():
        total = ctx.facts.total_bytes
        with DeviceArena(ctx, "theirs", api.cuMemGetInfo()[0] - 12 * MIB):  # a context and half a plan
            message = "are free, of which 0 B stay in reserve; largest owner"
            with pytest.raises(CapacityError, match=message) as refused:
                open_micro(reserve_bytes=0)
            assert 0 <= refused.value.allowed_bytes < refused.value.needed_bytes
            with pytest.raises(OutOfMemory, match="largest holders?") as ran_out:
                open_micro(device_bytes=total)
            assert ran_out.value.call == "cuMemAlloc"
    ledger.require_empty()
    with open_micro() as engine:
        assert engine.generate([1], max_new_tokens=1).tokens


def test_a_sequence_in_a_failed_round_takes_part_in_no_other(open_micro: Callable[..., Engine]) -> None:
    """After a refused launch the state on the device is unknown: only closing is left, and others go on."""
    with open_micro(graph=False, sequences=2) as engine:
        with engine.sequence() as sequence:
            sequence.extend([1, 2])
            ahead = engine.rank.launches(TOKEN, 1)[0].programmatic
            call = "cuLaunchKernelEx" if ahead else "cuLaunchKernel"
            with faults.fail_nth(1, 1, only=call), pytest.raises(DriverError):
                run_round(engine.rank, [Window(sequence)])
            with pytest.raises(UsageError, match="unknown after a failed round"):
                run_round(engine.rank, [Window(sequence)])
            assert engine.generate([1, 2], max_new_tokens=2, stop_ids=()).tokens
        assert engine.rank.slots.free_slots == 2
