"""24 streams given up in every phase, then the same 24 requests in full, exactly as before.

Called by cli/bench.py.  Phases: waiting in the queue, in the prompt, while decoding, while the server drains.
What must stay true: a phase is what the server said about itself at that time, not what was intended; what
came before the interruption is the beginning of the solo run; afterwards nothing runs and nothing is held.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from ..errors import FlashNextError, UsageError
from .client import Ask, Cut, Reply, ask, each_alone, together
from .inputs import asks, prompt_ids
from .load import drift, held, settled
from .site import Notes, Site

__all__ = ["FEWEST", "PHASES", "Interrupts", "run_interrupts"]

PHASES: Final = ("queue", "prompt", "decode", "drain")
FEWEST: Final = 24  # interruptions, and exact recoveries, of a result that qualifies
_PATIENCE_S: Final = 120.0


@dataclass(frozen=True)
class Interrupts:
    """each: of every phase and way.  prompt_tokens: of requests interrupted in the prompt; short_tokens: of
    the others; new_tokens: of all, while they are interrupted at least `least_tokens`."""

    each: int = 3
    prompt_tokens: int = 16_384
    short_tokens: int = 64
    new_tokens: int = 256
    least_tokens: int = 256
    phases: tuple[str, ...] = PHASES
    ways: tuple[str, ...] = ("disconnect", "cancel")

    def longer(self, request: Ask) -> Ask:
        """The request as it is interrupted."""
        return replace(request, new_tokens=max(self.new_tokens, self.least_tokens))


def run_interrupts(site: Site, sizes: Interrupts, *, salt: int = 7000) -> dict[str, Any]:
    """Solo runs, interruptions, recoveries."""
    notes, made = Notes(site), []
    cells = [(phase, way) for phase in sizes.phases for way in sizes.ways for _ in range(sizes.each)]
    requests = asks([sizes.prompt_tokens if phase == "prompt" else sizes.short_tokens for phase, _ in cells],
                    site.vocab, sizes.new_tokens, salt=salt)
    solo = each_alone(site.target, requests)
    for i, reply in enumerate(solo):
        notes.take(f"solo {i}", reply)
    before = settled(site)
    drained = [i for i, (phase, _) in enumerate(cells) if phase == "drain"]
    for i, ((phase, way), request) in enumerate(zip(cells, requests, strict=True)):
        if phase != "drain":
            seen = _Seen(site, phase)
            reply = _one(site, phase, way, sizes.longer(request), seen, salt)
            made.append(_judged(site, notes, i, phase, way, reply, solo[i], seen.held))
            left = settled(site, before["counts"])["left"]
            notes.reasons += [f"{phase} by {way} {i}: running or held afterwards: {left}"] if left else []
    changed = drift(before["memory"], settled(site)["memory"])
    notes.reasons += [f"ledger: {each}" for each in changed]
    if drained and site.control is None:
        notes.reasons.append("drain: the server was started elsewhere and cannot be drained")
    elif drained and site.control is not None:
        longer = [sizes.longer(requests[i]) for i in drained]
        ways = [cells[i][1] for i in drained]
        for i, (reply, held_) in zip(drained, _while_draining(site, longer, ways), strict=True):
            made.append(_judged(site, notes, i, "drain", cells[i][1], reply, solo[i], held_))
        site.renew()
    compared = notes.checks["equal"]
    for i, request in enumerate(requests):
        notes.take(f"recovery {i}", ask(site.target, request))
    exact = notes.checks["equal"] - compared
    if len(made) < FEWEST or exact < FEWEST:
        notes.reasons.append(f"{len(made)} interruptions and {exact} exact recoveries, {FEWEST} of each are "
                             "wanted")
    return notes.result("interrupt", sizes=vars(sizes), interrupted=made, recoveries_exact=exact,
                        restarts=int(bool(drained) and site.control is not None), ledger_drift=changed)


class _Seen:
    """Says when the server is in the phase, by its own counts; asked again and again by a Cut."""

    def __init__(self, site: Site, phase: str) -> None:
        self.site, self.phase, self.held = site, phase, False

    def count(self) -> int:
        """Requests in the phase, by the server's word now."""
        try:
            counts = self.site.counts()
        except FlashNextError:  # it has no time for us; the next look will tell
            return 0
        if self.phase == "drain":
            return counts["decoding"] if counts["draining"] else 0
        return counts[{"queue": "queued", "prompt": "prompting", "decode": "decoding"}[self.phase]]

    def __call__(self) -> bool:
        self.held = self.held or self.count() > 0
        return self.held


def _one(site: Site, phase: str, way: str, request: Ask, seen: _Seen, salt: int) -> Reply:
    if phase == "queue":
        return _behind_others(site, way, request, seen, salt)
    if phase == "prompt":
        return ask(site.target, request, Cut(when=seen, how=way))
    if phase == "decode":
        return ask(site.target, request, Cut(when=_all(seen, _Some(site)), how=way))
    raise UsageError("an interruption has no such phase", phase=phase, do=f"use one of {', '.join(PHASES)}")


def _judged(
    site: Site, notes: Notes, i: int, phase: str, way: str, reply: Reply, solo: Reply, seen: bool
) -> dict[str, Any]:
    """One interruption as results hold it; what speaks against it goes into `notes`."""
    name, exact = f"{phase} by {way} {i}", held(reply, solo)
    if not reply.cut or len(reply.tokens) >= reply.ask.new_tokens:
        notes.reasons.append(f"{name}: not interrupted")
    if not exact:
        notes.reasons.append(f"{name}: {reply.error or 'tokens differ from the solo run'}")
    if not seen:
        notes.reasons.append(f"{name}: the server was never seen in this phase")
    site.say(f"{name}: {reply.cut}, {len(reply.tokens)} tokens, {'exact' if exact else 'WRONG'}")
    return {"phase": phase, "way": way, "tokens": len(reply.tokens), "cut": reply.cut, "exact_so_far": exact,
            "seen": seen}


def _while_draining(site: Site, requests: list[Ask], ways: list[str]) -> list[tuple[Reply, bool]]:
    """All at once; the server is told to drain when all of them decode, then each is given up.  Each with
    whether the server was seen draining while it decoded."""
    assert site.control is not None
    n = len(requests)
    drain = _Once(site.control.drain, lambda: _Seen(site, "decode").count() >= n)
    seen = [_Seen(site, "drain") for _ in requests]
    cuts = [Cut(when=_all(drain, one), how=way) for one, way in zip(seen, ways, strict=True)]
    replies = together(site.target, requests, cuts=cuts)
    return [(reply, one.held) for reply, one in zip(replies, seen, strict=True)]


class _Some(threading.Event):
    """Holds a moment after it was first asked: a few tokens have come by then."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self._until: float | None = None

    def __call__(self) -> bool:
        now = time.perf_counter()
        self._until = self._until or now + 0.01
        return now >= self._until


class _Once:
    """Does something once, as soon as a condition holds; holds from then on.  For several threads."""

    def __init__(self, do: Callable[[], None], when: Callable[[], bool]) -> None:
        self._do, self._when, self._done = do, when, False
        self._lock = threading.Lock()

    def __call__(self) -> bool:
        with self._lock:
            if not self._done and self._when():
                self._do()
                self._done = True
            return self._done


def _all(*conditions: Callable[[], bool]) -> Callable[[], bool]:
    """All hold, asked in their order: a later one only once those before it hold."""
    return lambda: all(condition() for condition in conditions)


def _behind_others(site: Site, way: str, request: Ask, seen: _Seen, salt: int) -> Reply:
    """With every slot taken by others, so that the request has to wait."""
    over = threading.Event()
    others = [Ask(prompt_ids(8, site.vocab, salt + 900 + i), request.new_tokens)
              for i in range(site.max_streams)]
    threads = [threading.Thread(target=ask, args=(site.target, other, Cut(when=over.is_set)), daemon=True)
               for other in others]
    for thread in threads:
        thread.start()
    try:
        until = time.monotonic() + _PATIENCE_S
        while sum(site.counts()[name] for name in ("prompting", "decoding")) < site.max_streams:
            if time.monotonic() >= until:
                break
            time.sleep(0.005)
        return ask(site.target, request, Cut(when=seen, how=way))
    finally:
        over.set()
        for thread in threads:
            thread.join()
