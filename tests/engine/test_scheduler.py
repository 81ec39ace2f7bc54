"""Several requests over one engine: each stream's tokens, logprobs and hashes are those it has alone,
whatever joins, leaves or is cancelled beside it; admission is first come, first served; nothing is left."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flashnext_drv.engine import scheduler as scheduler_module
from flashnext_drv.engine.engine import Engine, Limits, token_sha256
from flashnext_drv.engine.requests import Reply, Request, Ticket, Token
from flashnext_drv.engine.sequence import Edits
from flashnext_drv.errors import CapacityError, Draining, QueueFull, UsageError

from .scheduling import FIELDS, GIVEN, SHORT, check_part, check_whole, reply_of, run, scheduler_on

pytestmark = pytest.mark.sim
ONE = GIVEN[4]  # a prompt of one token


@pytest.fixture(scope="module")
def engine(micro: Path, device: str) -> Iterator[Engine]:
    with Engine.open(micro, Limits(**FIELDS), device=device) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[tuple[int, ...]]:
    """Tokens of each of GIVEN by Engine.generate."""
    return [tuple(engine.generate(r.ids, max_new_tokens=r.max_new_tokens, sampling=r.sampling,
                                  stop_ids=()).tokens) for r in GIVEN]


def test_streams_that_join_and_leave_have_the_tokens_they_have_alone(
    engine: Engine, alone: list[tuple[int, ...]]
) -> None:
    """One joins a visit, so rounds have 1, 2, ... 8 rows, then fewer again."""
    with scheduler_on(engine) as (scheduler, log):
        tickets: list[Ticket] = []
        widths = set()
        for request in GIVEN:
            tickets.append(scheduler.submit(request, tag=request))
            scheduler.step()
            widths.add(scheduler.stats().decoding)
        run(scheduler)
        replies = [check_whole(t, wanted) for t, wanted in zip(tickets, alone, strict=True)]
        assert widths == set(range(1, 9)) and replies[0].live_min == 1
        assert [r.live_max for r in replies] == [8] * 8
        for ticket, reply, request in zip(tickets, replies, GIVEN, strict=True):
            assert ticket.tag is request
            log.check(ticket, reply)
            check_reply(request, reply)
        stats = scheduler.stats()
        assert (stats.queued, stats.prompting, stats.decoding) == (0, 0, 0)
        assert stats.finished == {"length": 8} and stats.submitted == 8
        assert stats.prompt_tokens == sum(len(r.ids) for r in GIVEN)
        assert stats.new_tokens == sum(r.max_new_tokens for r in GIVEN)
        rounds = stats.counters["graph_replays"] + stats.counters["eager_rounds"]
        prompts = stats.counters["rank0.head.replays"] + stats.counters["rank0.head.eager_rounds"]
        assert stats.counters["rank0.next.replays"] == stats.decode_rounds, "what the scheduler counted"
        assert rounds >= stats.decode_rounds and prompts == stats.prompt_chunks


def check_reply(request: Request, reply: Reply) -> None:
    n_new, counters, stamps = len(reply.tokens), reply.counters, reply.stamps
    assert reply.sha256 == token_sha256([*request.ids, *reply.tokens])
    assert reply.new_sha256 == token_sha256(reply.tokens)
    assert counters["prompt_tokens"] == counters["prefilled"] == len(request.ids)
    assert (counters["new_tokens"], counters["decoded"], counters["cached_tokens"]) == (n_new, n_new - 1, 0)
    assert counters["rank0.next.replays"] >= n_new - 1, "each of its tokens came from a replay"
    assert counters["rank0.next.device_replays"] == counters["rank0.next.replays"]
    order = [stamps[name] for name in ("submitted", "admitted", "first_chunk", "first_token", "done")]
    assert order == sorted(order) and reply.token_at[0] == stamps["first_token"]
    assert list(reply.token_at) == sorted(reply.token_at) and reply.token_at[-1] <= stamps["done"]
    assert 1 <= reply.live_min <= reply.live_max <= 8


def test_counters_of_a_request_alone_are_those_of_generate(engine: Engine) -> None:
    request = replace(GIVEN[3], max_new_tokens=4)
    made = engine.generate(request.ids, max_new_tokens=4, sampling=request.sampling, stop_ids=())
    with scheduler_on(engine) as (scheduler, _):
        ticket = scheduler.submit(request)
        run(scheduler)
        reply = reply_of(ticket)
    names = ("graph_replays", "head_replays", "eager_rounds", "rank0.body.device_rows", "deep_chunks",
             "deep_rows", "batched_rows", "rank0.next.replays")
    assert {name: reply.counters[name] for name in names} == {name: made.counters[name] for name in names}
    assert (reply.live_min, reply.live_max) == (1, 1) and made.sha256 == reply.sha256


@pytest.mark.parametrize("seed", [2])
def test_any_mix_of_joins_and_cancels(engine: Engine, alone: list[tuple[int, ...]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    with scheduler_on(engine, max_streams=3, chunk=int(rng.integers(1, 12))) as (scheduler, log):
        waiting = list(rng.permutation(SHORT))
        tickets: dict[int, Ticket] = {}
        cancelled = set()
        while waiting or not scheduler.idle:
            if waiting and rng.random() < 0.7:
                i = int(waiting.pop())
                tickets[i] = scheduler.submit(GIVEN[i])
            if tickets and rng.random() < 0.2:
                i = int(rng.choice(list(tickets)))
                scheduler.cancel(tickets[i])
                cancelled |= {i} if tickets[i].state != "done" else set()
            scheduler.step()
            assert scheduler.stats().prompting + scheduler.stats().decoding <= 3
        for i, ticket in tickets.items():
            log.check(ticket, reply_of(ticket))
            if i in cancelled:
                check_part(ticket, alone[i])
            else:
                check_whole(ticket, alone[i])
        assert 0 < len(cancelled) < len(SHORT), f"seed {seed} shows nothing: choose another"


def test_interrupted_streams_and_exact_recoveries(engine: Engine) -> None:
    """24 cancelled: in the queue, in the prompt, while decoding; then 24 whole ones."""
    again = [Request((7, 300, 12)[:n], 2) for n in (1, 2, 3)]
    wanted = [tuple(engine.generate(one.ids, max_new_tokens=2, stop_ids=()).tokens) for one in again]
    phases = {"queued": 0, "prompt": 1, "decode": 2}
    found = dict.fromkeys(phases, 0)
    with scheduler_on(engine, max_queue=30, chunk=3) as (scheduler, log):
        runner = scheduler.submit(Request(ONE.ids, 100))
        run(scheduler, lambda: runner.state == "decode")
        for n_steps in (1, 2):
            tickets = [scheduler.submit(Request(tuple(range(n)), 9)) for n in (1, 2, 4, *[1] * 9)]
            for _ in range(n_steps):  # the first two decode; then the third has 3 of 4 rows; 7 of 12 are live
                scheduler.step()
            assert log.of(tickets[2])[-1].prompt_done == 3 * (n_steps - 1)
            before = {ticket.id: ticket.state for ticket in tickets}
            for ticket in tickets:
                scheduler.cancel(ticket)
            scheduler.step()
            for ticket in tickets:
                phase, reply = before[ticket.id], reply_of(ticket)
                found[phase] += 1
                assert reply.finish == "cancelled"
                assert len([n for n in ("submitted", "admitted", "first_token") if n in reply.stamps]) == (
                    1 + phases[phase])
                log.check(ticket, reply)
            assert scheduler.stats().free_slots == 7 and scheduler.stats().queued == 0
        assert found == {"queued": 10, "prompt": 10, "decode": 4}
        scheduler.cancel(runner)
        recovered = [scheduler.submit(again[i % 3]) for i in range(24)]
        run(scheduler)
        for i, ticket in enumerate(recovered):
            check_whole(ticket, wanted[i % 3])
        assert reply_of(runner).finish == "cancelled"
        assert scheduler.stats().finished == {"cancelled": 25, "length": 24}


def test_a_long_prompt_goes_in_chunks_while_others_decode(
    engine: Engine, alone: list[tuple[int, ...]]
) -> None:
    with scheduler_on(engine, chunk=6) as (scheduler, log):
        first = scheduler.submit(GIVEN[1])
        run(scheduler, lambda: first.state == "decode")
        second = scheduler.submit(GIVEN[5])
        run(scheduler)
        check_whole(first, alone[1])
        reply = check_whole(second, alone[5])
        done = [event.prompt_done for event in log.of(second) if event.kind == "prompt"]
        assert done == [0, 6, 12, 13] and reply.counters["prompt_chunks"] == 3
        assert reply.counters["batched_rows"] == 13
        kinds = [(ticket.id, event.kind) for ticket, event in log.events]
        at = [i for i, kind in enumerate(kinds) if kind == (second.id, "prompt")]
        assert all((first.id, "tokens") in kinds[a:b] for a, b in zip(at[1:], at[2:], strict=False))


def test_prompts_outside_the_deep_pass_take_so_many_rounds_a_step(
    engine: Engine, alone: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "_ROUNDS_ALONE", 1)
    with scheduler_on(engine) as (scheduler, log):
        tickets = [scheduler.submit(GIVEN[i]) for i in (5, 6)]
        for _ in range(3):
            scheduler.step()
        done = [event.prompt_done for event in log.of(tickets[0]) if event.kind == "prompt"]
        assert done == [0, 8, 13] and [ticket.state for ticket in tickets] == ["decode", "decode"]
        run(scheduler)
    for ticket, i in zip(tickets, (5, 6), strict=True):
        check_whole(ticket, alone[i])


def test_prompts_that_fit_share_a_chunk(engine: Engine, alone: list[tuple[int, ...]]) -> None:
    order = (3, 7, 1)
    with scheduler_on(engine) as (scheduler, _):
        tickets = [scheduler.submit(replace(GIVEN[i], max_new_tokens=2)) for i in order]
        run(scheduler)
        replies = [check_whole(t, alone[i][:2]) for t, i in zip(tickets, order, strict=True)]
    for reply in replies:
        assert (reply.counters["deep_chunks"], reply.counters["deep_rows"]) == (1, 17)
        assert reply.stamps["first_token"] == replies[0].stamps["first_token"]


def test_stop_ids_end_alone(engine: Engine, alone: list[tuple[int, ...]]) -> None:
    wanted = alone[7]
    ends = [i for i in range(len(wanted)) if wanted[i] not in wanted[:i]][:3]
    many = frozenset(i for i in range(40) if i not in wanted)  # more than the device's tables hold
    with scheduler_on(engine) as (scheduler, _):
        tickets = [scheduler.submit(replace(GIVEN[7], stop_ids=frozenset([wanted[i]]))) for i in ends]
        tickets.append(scheduler.submit(replace(GIVEN[7], stop_ids=many, max_new_tokens=3)))
        run(scheduler)
    for ticket, i in zip(tickets, ends, strict=False):
        check_whole(ticket, wanted[: i + 1], "stop")
    check_whole(tickets[-1], wanted[:3])


def test_logprobs_are_those_of_the_raw_logits(engine: Engine, alone: list[tuple[int, ...]]) -> None:
    """Beside one that wants none; first tokens come from a deep chunk, and from batched rows."""
    asked = ((7, 3), (3, 20), (1, 0), (6, None), (4, 1))
    with scheduler_on(engine) as (scheduler, log):
        requests = [replace(GIVEN[i], logprobs=n, max_new_tokens=3) for i, n in asked]
        tickets = [scheduler.submit(request) for request in requests[:-1]]
        scheduler.step()
        tickets.append(scheduler.submit(requests[-1]))
        run(scheduler)
    assert reply_of(tickets[0]).counters["deep_chunks"] == 1
    assert reply_of(tickets[-1]).counters["batched_rows"] == 1
    for ticket, (i, n_top) in zip(tickets, asked, strict=True):
        check_whole(ticket, alone[i][:3])
        told = [token for event in log.of(ticket) for token in event.tokens]
        if n_top is None:
            assert all(token.logprob is None and token.top == () for token in told)
            continue
        ids = [*GIVEN[i].ids, *alone[i][:2]]
        for token, row in zip(told, engine.logits(ids, (len(ids) - 3, len(ids))), strict=True):
            logits = [float(x) for x in row]
            most = max(logits)
            total = most + math.log(math.fsum(math.exp(x - most) for x in logits))
            order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:n_top]
            assert [top for top, _ in token.top] == order
            assert [token.logprob, *(value for _, value in token.top)] == pytest.approx(
                [logits[i] - total for i in (token.id, *order)], abs=1e-12)


def test_equal_logprobs_are_told_by_id() -> None:
    token = Token.of(3, np.array([0.5, 2.0, 2.0, 0.5, 2.0, -np.inf], np.float32), 4, 1.5)
    assert [i for i, _ in token.top] == [1, 2, 4, 0] and token.at == 1.5
    assert token.logprob == token.top[3][1]
    assert sum(math.exp(value) for _, value in token.top) == pytest.approx(1 - math.exp(token.logprob or 0))
    assert len(Token.of(0, np.zeros(3, np.float32), 20, 0.0).top) == 3


def test_first_come_first_served(engine: Engine, alone: list[tuple[int, ...]]) -> None:
    """A request that needs more pages than are free waits at the head, and those behind it wait too."""
    pages = engine.rank.pages
    with scheduler_on(engine, max_streams=4) as (scheduler, log):
        held = [pages._free.pop() for _ in range(pages.free_pages - 2)]
        try:
            order = (7, 1, 4, 6)
            requests = [replace(GIVEN[i], max_new_tokens=3) for i in order]
            requests[1] = replace(GIVEN[1], max_new_tokens=80, stop_ids=frozenset([alone[1][2]]))  # 2 pages
            tickets = [scheduler.submit(request) for request in requests]
            scheduler.step()
            assert [t.state for t in tickets] == ["decode", "queued", "queued", "queued"]
            assert scheduler.stats().free_pages == 1 and scheduler.stats().queued == 3
            run(scheduler)
        finally:
            pages._free.extend(reversed(held))
        assert alone[1][2] not in alone[1][:2], "choose another seed"
        for ticket, i in zip(tickets, order, strict=True):
            check_whole(ticket, alone[i][:3], "stop" if i == 1 else "length")
        admitted = [t for t, event in log.events if event.kind == "prompt" and not event.prompt_done]
        assert admitted == tickets
        assert scheduler.stats().queue_seconds > 0


def test_a_full_queue_and_a_drain(engine: Engine, alone: list[tuple[int, ...]]) -> None:
    request, wanted = replace(ONE, max_new_tokens=2), alone[4][:2]
    with scheduler_on(engine, max_streams=1, max_queue=1) as (scheduler, _):
        tickets = [scheduler.submit(request) for _ in range(2)]
        with pytest.raises(QueueFull) as full:
            scheduler.submit(request)
        assert full.value.retry_after_seconds >= 1 and isinstance(full.value, CapacityError)
        run(scheduler, lambda: tickets[0].state == "done")
        tickets.append(scheduler.submit(request))
        scheduler.drain()
        with pytest.raises(Draining):
            scheduler.submit(request)
        run(scheduler)
        for ticket in tickets:
            check_whole(ticket, wanted)
        stats = scheduler.stats()
        assert (stats.refused, stats.submitted, stats.draining) == (1, 3, True)
        assert not scheduler.step()


@pytest.mark.parametrize("how", ["abort", "close"])
def test_ending_early_tells_everybody(engine: Engine, alone: list[tuple[int, ...]], how: str) -> None:
    with scheduler_on(engine, max_streams=2, chunk=2) as (scheduler, log):
        tickets = [scheduler.submit(GIVEN[i]) for i in (1, 7, 4)]
        scheduler.step()
        with pytest.raises(UsageError):
            engine.close()
        if how == "abort":
            scheduler.abort()
            with pytest.raises(Draining):
                scheduler.submit(ONE)
            run(scheduler)
    for ticket, i in zip(tickets, (1, 7, 4), strict=True):
        check_part(ticket, alone[i])
        log.check(ticket, reply_of(ticket))
    with pytest.raises(UsageError):
        scheduler.submit(ONE)
    with pytest.raises(UsageError):
        scheduler.step()


def test_other_threads_submit_cancel_and_look(engine: Engine, alone: list[tuple[int, ...]]) -> None:
    request, wanted = replace(ONE, max_new_tokens=2), alone[4][:2]
    tickets: list[Ticket] = []
    with scheduler_on(engine, max_streams=4) as (scheduler, log):

        def client(i_client: int) -> None:
            for i in range(3):
                tickets.append(ticket := scheduler.submit(request))
                assert scheduler.stats().submitted >= 1
                if (i + i_client) % 3 == 0:
                    scheduler.cancel(ticket)

        clients = [threading.Thread(target=client, args=(i,)) for i in range(4)]
        for each in clients:
            each.start()
        while any(each.is_alive() for each in clients) or not scheduler.idle:
            scheduler.step()
        for each in clients:
            each.join()
        assert len(tickets) == 12 and len({ticket.id for ticket in tickets}) == 12
        for ticket in tickets:
            reply = reply_of(ticket)
            assert reply.tokens == (wanted if reply.finish == "length" else wanted[: len(reply.tokens)])
            log.check(ticket, reply)
        assert sum(scheduler.stats().finished.values()) == 12


def test_what_a_scheduler_refuses(engine: Engine) -> None:
    good = Request((1, 2), 3)
    bad: tuple[Request, ...] = (
        replace(good, ids=()), replace(good, ids=(1, 512)), replace(good, ids=(1, -1)),
        replace(good, max_new_tokens=0), replace(good, max_new_tokens=True), replace(good, logprobs=21),
        replace(good, logprobs=-1), replace(good, stop_ids=frozenset([512])),
        replace(good, min_new_tokens=-1),
        replace(good, edits=object()), replace(good, sampling=None),  # type: ignore[arg-type]
        replace(good, stop_ids=7), {"ids": (1,)})  # type: ignore[arg-type,assignment]
    with scheduler_on(engine) as (scheduler, _):
        for request in bad:
            with pytest.raises(UsageError):
                scheduler.submit(request)
        with pytest.raises(CapacityError) as large:
            scheduler.submit(replace(good, max_new_tokens=128))
        assert not isinstance(large.value, QueueFull)
        assert (large.value.needed_tokens, large.value.context_tokens) == (129, 128)
        assert scheduler.idle and scheduler.stats().submitted == 0
        whole = scheduler.submit(replace(good, ids=[np.int64(5)], max_new_tokens=1))  # type: ignore[arg-type]
        assert whole.request.ids == (5,)
        run(scheduler)
        assert (reply_of(whole).live_min, reply_of(whole).counters["decoded"]) == (0, 0)
    for settings in ({"max_streams": 9}, {"max_streams": 0}, {"max_queue": -1}, {"chunk": 0}, {"chunk": 81},
                     {"max_queue": 1.5}):
        with pytest.raises(UsageError), scheduler_on(engine, **settings):
            raise AssertionError(f"{settings} was taken")


def test_edits_and_least_new_tokens_are_those_of_generate(engine: Engine) -> None:
    """Beside one that edits nothing: penalties and bias, and a stop id that cannot come first."""
    edits = Edits(repetition=1.3, presence=0.5, frequency=0.25, bias=((7, 3.0), (9, -100.0)))
    plain, edited = (replace(GIVEN[i], max_new_tokens=6) for i in (7, 4))
    edited = replace(edited, edits=edits)
    first = engine.generate(plain.ids, max_new_tokens=1, stop_ids=(), sampling=plain.sampling).tokens[0]
    late = replace(plain, stop_ids=frozenset([first]), min_new_tokens=3)
    with scheduler_on(engine) as (scheduler, _):
        tickets = [scheduler.submit(request) for request in (plain, edited, late)]
        run(scheduler)
    late_edits = Edits(min_new_tokens=3, stop_ids=(first,))
    for ticket, given in zip(tickets, (Edits(), edits, late_edits), strict=True):
        request = ticket.request
        wanted = engine.generate(request.ids, max_new_tokens=request.max_new_tokens, edits=given,
                                 sampling=request.sampling, stop_ids=request.stop_ids)
        assert reply_of(ticket).tokens == tuple(wanted.tokens)
    assert first not in reply_of(tickets[2]).tokens[:3] and reply_of(tickets[0]).tokens[0] == first
