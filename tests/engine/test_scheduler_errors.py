"""What goes wrong under a scheduler ends the requests it concerns, tells why, and leaves the others their
tokens and the engine its slots and pages.  With several tokens a visit, and experts in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext_drv.drv import faults
from flashnext_drv.drv.memory import copy_to_device, copy_to_host
from flashnext_drv.engine import scheduler as scheduler_module
from flashnext_drv.engine.engine import Engine, Limits
from flashnext_drv.engine.requests import Event, Request, Ticket
from flashnext_drv.engine.scheduler import Scheduler
from flashnext_drv.errors import CheckpointError, ContextLost, ContractError, DriverError, FlashNextError

from .scheduling import FIELDS, GIVEN, check_whole, reply_of, run, scheduler_on

pytestmark = pytest.mark.sim
ASKED = (7, 3, 4)  # of GIVEN; the first two fit one chunk of the deep pass when they are made longer
LIMITS = Limits(**{**FIELDS, "steps_ahead": 4, "graph": False, "deep_rows": 14, "sequences": 4})


@pytest.fixture(scope="module")
def engine(micro: Path, device: str) -> Iterator[Engine]:
    with Engine.open(micro, LIMITS, device=device) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[int, tuple[int, ...]]:
    return {i: tuple(engine.generate(GIVEN[i].ids, max_new_tokens=6, sampling=GIVEN[i].sampling,
                                     stop_ids=()).tokens) for i in ASKED}


def asked(i: int, **fields: Any) -> Request:
    return replace(GIVEN[i], **{"max_new_tokens": 6, **fields})


def fails_then_works(
    engine: Engine, alone: dict[int, tuple[int, ...]], scheduler: Scheduler, tickets: dict[int, Ticket]
) -> set[int]:
    """Run to the end; which failed.  The others are whole, and a new request is too."""
    run(scheduler)
    failed = set()
    for i, ticket in tickets.items():
        reply = reply_of(ticket)
        if reply.finish == "error":
            failed.add(i)
            assert isinstance(reply.error, DriverError) and reply.tokens == alone[i][: len(reply.tokens)]
        else:
            check_whole(ticket, alone[i])
    again = scheduler.submit(asked(4))
    run(scheduler)
    check_whole(again, alone[4])
    return failed


def test_visits_of_several_tokens_end_where_each_stream_ends(
    engine: Engine, alone: dict[int, tuple[int, ...]]
) -> None:
    stop = next(i for i in range(2, 6) if alone[7][i] not in alone[7][:i])
    with scheduler_on(engine) as (scheduler, log):
        tickets = [scheduler.submit(asked(7, stop_ids=frozenset([alone[7][stop]]))),
                   scheduler.submit(asked(3)), scheduler.submit(asked(4, max_new_tokens=3))]
        run(scheduler)
    check_whole(tickets[0], alone[7][: stop + 1], "stop")
    check_whole(tickets[1], alone[3])
    check_whole(tickets[2], alone[4][:3])
    pieces = [len(event.tokens) for event in log.of(tickets[1]) if event.kind == "tokens"]
    assert pieces == [1, 4, 1] and reply_of(tickets[1]).counters["decode_visits"] == 2
    assert reply_of(tickets[2]).live_min == 3


def test_a_driver_call_that_fails_in_a_visit_ends_those_in_it(
    engine: Engine, alone: dict[int, tuple[int, ...]]
) -> None:
    with scheduler_on(engine, max_streams=2) as (scheduler, _):
        tickets = {i: scheduler.submit(asked(i)) for i in (7, 4, 3)}
        scheduler._sweep()
        scheduler._admit()
        scheduler._prompt()
        assert [t.state for t in tickets.values()] == ["decode", "decode", "queued"]
        with faults.fail_nth(40, 1, only="cuLaunchKernelEx") as plan:
            scheduler._decode()
        assert plan.fired == 1
        assert fails_then_works(engine, alone, scheduler, tickets) == {7, 4}
        assert scheduler.stats().finished == {"error": 2, "length": 2} and not scheduler.broken


def test_a_driver_call_that_fails_in_a_prompt_leaves_the_others(
    engine: Engine, alone: dict[int, tuple[int, ...]]
) -> None:
    """A batched one, while another decodes; then a chunk that two share."""
    with scheduler_on(engine) as (scheduler, _):
        tickets = {7: scheduler.submit(asked(7))}
        run(scheduler, lambda: tickets[7].state == "decode")
        tickets |= {4: scheduler.submit(asked(4)), 3: scheduler.submit(asked(3))}
        n = len(engine.rank.launches("token", 1)) + len(engine.rank.launches("body", 8)) // 2
        with faults.fail_nth(n, 1, only="cuLaunchKernelEx"):
            scheduler.step()
        assert tickets[4].state != "done", "its round was before"
        assert fails_then_works(engine, alone, scheduler, tickets) == {3}
    with scheduler_on(engine) as (scheduler, _):
        tickets = {i: scheduler.submit(asked(i)) for i in (7, 3)}  # 14 rows
        with faults.fail_nth(20, 1, only="cuLaunchKernel"):
            scheduler.step()
        assert fails_then_works(engine, alone, scheduler, tickets) == {7, 3}
        assert reply_of(tickets[7]).counters["prefilled"] == 0


def test_any_driver_call_may_fail_once(engine: Engine, alone: dict[int, tuple[int, ...]]) -> None:
    """In a step that reads counters, admits one, runs its prompt and draws tokens for another."""
    fired = 0
    for n in (9, 300):
        with scheduler_on(engine) as (scheduler, _):
            tickets = {4: scheduler.submit(asked(4))}
            scheduler.step()
            tickets[7] = scheduler.submit(asked(7))
            with faults.fail_nth(n, 1) as plan:
                scheduler.step()
            fired += plan.fired
            fails_then_works(engine, alone, scheduler, tickets)
    assert fired == 2


def test_counters_that_cannot_be_read_are_missing_not_zero(
    engine: Engine, alone: dict[int, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with scheduler_on(engine) as (scheduler, _):
        first = scheduler.submit(asked(4))
        scheduler.step()

        def refuses() -> dict[str, int]:
            raise DriverError("cuMemcpyDtoHAsync", 1)

        monkeypatch.setattr(engine, "counters", refuses)
        run(scheduler)
        monkeypatch.undo()
        assert "graph_replays" not in check_whole(first, alone[4]).counters
        second = scheduler.submit(asked(4))
        run(scheduler)
        assert check_whole(second, alone[4]).counters["rank0.next.eager_rounds"] == 5


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_nan_ends_its_own_stream(
    engine: Engine, alone: dict[int, tuple[int, ...]], logprobs: int | None
) -> None:
    """The embedding of a token is NaN: one meets it in its prompt, in a chunk with another, one among its
    own tokens."""
    bad = next(t for t in alone[7][1:3] if t not in alone[3] + GIVEN[3].ids + GIVEN[7].ids + alone[7][:1])
    place = alone[7].index(bad)
    rank = engine.rank
    good = np.empty(2 * engine.config.hidden, np.uint8)
    at = rank.weights.spans["embed"].address + bad * good.nbytes
    copy_to_host(rank.stream, good, at)
    copy_to_device(rank.stream, at, np.full(good.nbytes, 0xFF, np.uint8))
    try:
        with scheduler_on(engine) as (scheduler, _):
            tickets = [scheduler.submit(asked(i, logprobs=logprobs, max_new_tokens=4)) for i in (7, 3)]
            tickets.append(scheduler.submit(Request((1, bad), 3, logprobs=logprobs)))
            run(scheduler)
    finally:
        copy_to_device(rank.stream, at, good)
    check_whole(tickets[1], alone[3][:4])
    assert reply_of(tickets[0]).tokens == alone[7][: place + 1]
    assert reply_of(tickets[2]).tokens == ()
    for ticket in (tickets[0], tickets[2]):
        assert reply_of(ticket).finish == "error" and isinstance(reply_of(ticket).error, ContractError)


def test_a_pack_that_went_away_ends_those_in_the_visit(
    engine: Engine, alone: dict[int, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with scheduler_on(engine) as (scheduler, _):
        ticket = scheduler.submit(asked(4))
        run(scheduler, lambda: ticket.state == "decode")

        def gone(*_: Any) -> None:
            raise CheckpointError("the file is gone")

        monkeypatch.setattr(scheduler_module, "run_ahead", gone)
        scheduler.step()
        monkeypatch.undo()
        assert isinstance(reply_of(ticket).error, CheckpointError)
        again = scheduler.submit(asked(4))
        run(scheduler)
        check_whole(again, alone[4])


@pytest.mark.parametrize("where", ["run_ahead", "wait", "extend"])
def test_an_interrupt_passes_through_and_ends_those_in_the_visit(
    engine: Engine, alone: dict[int, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with scheduler_on(engine) as (scheduler, log):
        ticket = scheduler.submit(asked(4))

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        target = {"run_ahead": scheduler_module, "wait": scheduler._prompts,
                  "extend": "flashnext_drv.engine.sequence.Sequence"}[where]
        if isinstance(target, str):
            monkeypatch.setattr(f"{target}.{where}", interrupted)
        else:
            monkeypatch.setattr(target, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(scheduler)
        monkeypatch.undo()
        again = scheduler.submit(asked(4))
        run(scheduler)
        check_whole(again, alone[4])
        reply = reply_of(ticket)
        assert reply.finish == "error" and isinstance(reply.error, FlashNextError)
        log.check(ticket, reply)


def test_a_listener_that_raises_loses_no_event(engine: Engine, alone: dict[int, tuple[int, ...]]) -> None:
    told: list[tuple[Ticket, Event]] = []

    def listener(ticket: Ticket, event: Event) -> None:
        told.append((ticket, event))
        if event.kind == "tokens":
            raise ValueError("a listener's own")

    with Scheduler(engine, on_event=listener) as scheduler:
        ticket = scheduler.submit(asked(4))
        raised = 0
        while not scheduler.idle:
            try:
                scheduler.step()
            except ValueError:
                raised += 1
        check_whole(ticket, alone[4])
    assert raised == 3 and told[-1][1].kind == "done"
    assert tuple(token.id for _, event in told for token in event.tokens) == alone[4]


@pytest.mark.parametrize("most", (3, 5, 6))
def test_a_listener_that_stops_ends_the_visit_with_stop(
    engine: Engine, alone: dict[int, tuple[int, ...]], most: int
) -> None:
    """Three are drawn behind the first at once: the visit would go on, is the last, or has one more."""
    with scheduler_on(engine) as (scheduler, log):
        before = scheduler.stats()

        def listener(ticket: Ticket, event: Event) -> None:
            log(ticket, event)
            if sum(len(each.tokens) for each in log.of(ticket)) > 1:
                scheduler.stop(ticket)
                scheduler.cancel(ticket)  # too late: it is complete

        scheduler._on_event = listener
        ticket = scheduler.submit(asked(4, max_new_tokens=most))
        run(scheduler)
        n = min(most, 5)
        log.check(ticket, check_whole(ticket, alone[4][:n], "stop"))
        after = scheduler.stats()
        assert after.finished == {"stop": 1}
        assert (after.free_slots, after.free_pages) == (before.free_slots, before.free_pages)


def test_a_lost_context_ends_all_and_refuses_what_comes(micro: Path, device: str) -> None:
    opened = Engine.open(micro, LIMITS, device=device)
    with Scheduler(opened, max_streams=2) as scheduler:
        tickets = [scheduler.submit(asked(i)) for i in (4, 4, 3)]
        run(scheduler, lambda: tickets[1].state == "decode")
        with faults.fail_nth(5, 700, only="cuLaunchKernelEx"):
            scheduler.step()
        assert scheduler.broken
        with pytest.raises(ContextLost):
            scheduler.submit(asked(4))
        run(scheduler)
        for ticket in tickets:
            assert reply_of(ticket).finish == "error" and isinstance(reply_of(ticket).error, DriverError)
        assert not scheduler.step()
    opened.close()


def test_experts_in_host_memory_are_counted_for_each(
    micro: Path, device: str, alone: dict[int, tuple[int, ...]]
) -> None:
    fields = {**FIELDS, "steps_ahead": 4, "graph": False, "deep": "off", "expert_lines": 6, "sequences": 2}
    with Engine.open(micro, Limits(**fields), device=device) as opened:
        before = opened.counters()
        with scheduler_on(opened) as (scheduler, _):
            tickets = {i: scheduler.submit(asked(i, max_new_tokens=3)) for i in (7, 4)}
            run(scheduler)
            stats = scheduler.stats()
        after = opened.counters()
    assert stats.counters == {name: n - before.get(name, 0) for name, n in after.items()}
    for i, ticket in tickets.items():
        counters = check_whole(ticket, alone[i][:3]).counters
        assert counters["expert_hits"] + counters["expert_misses"] > 0
        assert 0 < counters["expert_fills"] <= stats.counters["expert_fills"]
        assert counters["link_bytes"] > 0
