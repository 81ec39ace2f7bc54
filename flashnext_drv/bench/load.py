"""Many short requests, a part of them given up on the way; then what that left behind.

Called by cli/bench.py.  What must stay true: which requests are sent and where each is given up follows from
the seed; every reply is held to the solo run of its kind, a given-up one as far as it came; nothing may be
left in the engine's ledger, its slots or its queue.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from ..ledger import MEMORY
from .client import Ask, Cut, Reply, arriving, each_alone, together
from .evidence import ids_hash
from .inputs import prompt_ids
from .site import Notes, Site
from .timing import percentile, times

__all__ = ["Load", "drift", "held", "run_load", "settled"]

_SETTLE_S: Final = 60.0


@dataclass(frozen=True)
class Load:
    """requests at `streams` at a time, of `kinds` distinct ones; prompts and replies of up to so many tokens;
    cancels: share of them that is given up.  rate: requests a second instead, sent at random times (Poisson)
    whether others have ended or not; 0: the next one when one ends."""

    requests: int = 2_000
    streams: int = 8
    kinds: int = 64
    prompt_tokens: int = 48
    new_tokens: int = 24
    cancels: float = 0.1
    rate: float = 0.0
    seed: int = 1


def run_load(
    site: Site, load: Load, *, ways: Sequence[str] = ("disconnect", "cancel"), salt: int = 5000
) -> dict[str, Any]:
    """ways: how requests are given up, drawn for each."""
    chance, notes = random.Random(load.seed), Notes(site)
    least_in, least_out = min(4, load.prompt_tokens), min(3, load.new_tokens)
    kinds = [Ask(prompt_ids(chance.randint(least_in, load.prompt_tokens), site.vocab, salt + i),
                 chance.randint(least_out, load.new_tokens), chance.choice((0.0, 0.9)), seed=i)
             for i in range(load.kinds)]
    solo = each_alone(site.target, kinds)
    for i, reply in enumerate(solo):
        notes.take(f"solo {i}", reply)
    together(site.target, kinds[:load.streams])  # executables of every width are made before what is compared
    before = settled(site)
    picked = [chance.randrange(load.kinds) for _ in range(load.requests)]
    cuts = [_cut(chance, kinds[k], ways) if chance.random() < load.cancels else None for k in picked]
    asked, late = [kinds[k] for k in picked], None
    began = time.perf_counter()
    if load.rate:
        gaps = random.Random(f"arrivals {load.seed}")
        after_s = list(accumulate(gaps.expovariate(load.rate) for _ in asked))
        replies, late = arriving(site.target, asked, after_s, cuts)
    else:
        replies = together(site.target, asked, load.streams, cuts)
    seconds = time.perf_counter() - began
    after = settled(site, before["counts"])
    whole = [r for r, cut in zip(replies, cuts, strict=True) if cut is None]
    given_up = [r for r, cut in zip(replies, cuts, strict=True) if cut is not None]
    n_wrong = 0
    for i, (k, reply, cut) in enumerate(zip(picked, replies, cuts, strict=True)):
        if cut is None or not reply.cut:  # what nobody gave up has to be whole, whatever was planned
            _take_quietly(notes, f"request {i}", reply)
        elif not held(reply, solo[k]):
            n_wrong += 1
            notes.reasons.append(f"request {i}, given up: {reply.error or 'tokens differ from the solo run'}")
    if not whole:
        notes.reasons.append("every request was to be given up: none was held to its whole solo run")
    changed = drift(before["memory"], after["memory"])
    notes.reasons += [f"ledger: {each}" for each in changed]
    if after["left"]:
        notes.reasons.append(f"left in the server: {after['left']}")
    stopped = sum(bool(r.cut) and r.finish != "length" for r in given_up)
    return notes.result(
        "load", load=vars(load), ways=list(ways), seconds=round(seconds, 3),
        requests_per_s=round(load.requests / seconds, 3),
        late_s=None if late is None else round(late, 6), latency=_latency(whole),
        given_up={"asked": len(given_up), "stopped": stopped, "wrong": n_wrong},
        ledger_drift=changed, after=after["counts"]) | {"replies": []}


def held(reply: Reply, solo: Reply) -> bool:
    """Whether a reply that was given up begins as its solo run does, as far as both go, and nothing else went
    wrong."""
    n = min(len(reply.tokens), len(solo.tokens))
    return not reply.error and reply.tokens[:n] == solo.tokens[:n]


def drift(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What memory of the ledger changed, by owner and tier, in words.  Handles of the driver are not memory:
    executables come and go."""
    def live(told: dict[str, Any]) -> dict[tuple[str, str], tuple[int, int]]:
        return {(row["owner"], row["tier"]): (row["n_live"], row["live_bytes"]) for row in told["rows"]
                if row["tier"] in MEMORY and row["n_live"]}

    old, new = live(before), live(after)
    return [f"{owner} {tier}: {old.get((owner, tier), (0, 0))} pieces and bytes before, "
            f"{new.get((owner, tier), (0, 0))} after"
            for owner, tier in sorted(old.keys() | new.keys())
            if old.get((owner, tier)) != new.get((owner, tier))]


def settled(site: Site, before: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Memory and counts once nothing runs, and slots and pages are free as they were `before`; left: what
    still is not so after a minute."""
    until = time.monotonic() + _SETTLE_S
    while True:
        counts = site.counts()
        busy = {name: n for name, n in counts.items() if name in ("queued", "prompting", "decoding") and n}
        busy |= {name: counts[name] for name in ("free_slots", "free_pages")
                 if before is not None and counts[name] != before[name]}
        if not busy or time.monotonic() >= until:
            return {"memory": site.memory(), "counts": counts, "left": busy}
        time.sleep(0.02)


def _cut(chance: random.Random, request: Ask, ways: Sequence[str]) -> Cut:
    """Anywhere: before a token, or behind any but the last."""
    how, tokens = chance.choice(list(ways)), chance.randrange(request.new_tokens)
    return Cut(after_tokens=tokens, how=how) if tokens else Cut(after_s=chance.random() * 0.05, how=how)


def _take_quietly(notes: Notes, name: str, reply: Reply) -> None:
    """Judge one of very many: the first of the same fault speaks for all."""
    n_before = len(notes.reasons)
    notes.take(name, reply)
    notes.rows.pop()
    if len(notes.reasons) > 200:
        del notes.reasons[max(n_before, 200):]


def _latency(replies: Sequence[Reply]) -> dict[str, Any]:
    """Seconds, percentiles over whole replies, by the client's clock."""
    found = [times(r.sent_at, r.token_at, len(r.ask.ids)) for r in replies]
    out: dict[str, Any] = {"replies": len(replies),
                           "distinct_hashes": len({ids_hash(r.tokens) for r in replies})}
    for name in ("ttft_s", "total_s", "itl_mean_ms"):
        values = [v for v in (getattr(one, name) for one in found) if v is not None]
        out[name] = {f"p{share}": None if not values else round(percentile(values, share) or 0.0, 6)
                     for share in (50, 90, 95, 99, 100)}
    return out
