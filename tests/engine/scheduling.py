"""What the tests of the scheduler share: requests, a run that is written down, and what must be left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flashnext_drv.engine.engine import Engine, Sampling
from flashnext_drv.engine.requests import Event, Reply, Request, Ticket
from flashnext_drv.engine.scheduler import Scheduler

FIELDS: dict[str, Any] = {"context_tokens": 128, "rows": 8, "prompt_rows": 8, "sequences": 8, "deep_rows": 16,
                          "chunk": 80, "steps_ahead": 1}


def _request(n_prompt: int, n_new: int, seed: int) -> Request:
    how = Sampling(seed=seed, temperature=1.0, top_p=0.98) if seed % 2 else Sampling()
    return Request(tuple((37 * i + 11 * seed + 5) % 512 for i in range(n_prompt)), n_new, how)


# Later ones are shorter, so that eight that join one a visit all decode together.  The third crosses a page's
# border in its prompt.
GIVEN = tuple(_request(n, 10 - i, i) for i, n in enumerate((10, 3, 66, 9, 1, 13, 2, 5)))
SHORT = (1, 3, 4, 6, 7)  # of GIVEN


@dataclass
class Log:
    """Events as they came."""

    events: list[tuple[Ticket, Event]] = field(default_factory=list)

    def __call__(self, ticket: Ticket, event: Event) -> None:
        self.events.append((ticket, event))

    def of(self, ticket: Ticket) -> list[Event]:
        return [event for each, event in self.events if each is ticket]

    def check(self, ticket: Ticket, reply: Reply) -> None:
        """The events of a ticket that is done tell what its reply says, in order."""
        kinds = [event.kind for event in self.of(ticket)]
        order = {"queued": 0, "prompt": 1, "tokens": 2, "done": 3}
        assert kinds[0] == "queued" and kinds[-1] == "done" and kinds.count("done") == 1
        assert sorted(kinds, key=order.__getitem__) == kinds
        told = [token for event in self.of(ticket) for token in event.tokens]
        assert tuple(token.id for token in told) == reply.tokens
        assert tuple(token.at for token in told) == reply.token_at
        done = [event.prompt_done for event in self.of(ticket) if event.kind == "prompt"]
        assert done == sorted(done) and max(done, default=0) <= reply.counters["prefilled"]
        assert reply.error is not None or done[-1:] in ([], [reply.counters["prefilled"]])
        assert self.of(ticket)[-1].reply is reply and self.of(ticket)[-1].error is reply.error


@contextmanager
def scheduler_on(engine: Engine, **settings: Any) -> Iterator[tuple[Scheduler, Log]]:
    """A scheduler with its log; afterwards all slots and pages are back and the arenas' guards are whole."""
    rank, log = engine.rank, Log()
    before = (rank.slots.free_slots, rank.pages.free_pages, sorted(engine.ledger.live("device").items()))
    with Scheduler(engine, on_event=log, **settings) as scheduler:
        yield scheduler, log
    after = (rank.slots.free_slots, rank.pages.free_pages, sorted(engine.ledger.live("device").items()))
    assert after == before
    for arena in rank.guarded_arenas():
        arena.check_guards()


def run(scheduler: Scheduler, until: Callable[[], bool] | None = None) -> None:
    """Step until `until`, by default until it is idle."""
    for _ in range(2000):
        if scheduler.idle if until is None else until():
            return
        assert scheduler.step(), "nothing to do and not at the end"
    raise AssertionError("no end")


def reply_of(ticket: Ticket) -> Reply:
    assert ticket.state == "done" and ticket.reply is not None
    return ticket.reply


def check_whole(ticket: Ticket, wanted: tuple[int, ...], finish: str = "length") -> Reply:
    reply = reply_of(ticket)
    assert (reply.finish, reply.error) == (finish, None)
    assert reply.tokens == wanted
    return reply


def check_part(ticket: Ticket, wanted: tuple[int, ...]) -> None:
    """A cancelled one has a true beginning."""
    reply = reply_of(ticket)
    assert reply.finish == "cancelled" and reply.error is None
    assert reply.tokens == wanted[: len(reply.tokens)]
