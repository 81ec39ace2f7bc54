"""The workload: exactly 16,384 tokens in and 1,024 out, nothing cached, one stream and eight at once.

Called by cli/bench.py.  What must stay true: only a run of exactly these sizes and all modes is called
"workload"; any other is "scaled", one that leaves a mode out a "-part", whatever it was asked to be called.
Every stream is held to its solo run, graphs to eager; that eight streams decoded at once is shown by the
server's stamps, that graphs were replayed by each request's own counters.

    graph   c=1: each of the eight inputs alone (the first is timed again)     c=8: all eight at once
    eager   c=1: the first input                                               c=8: all eight at once
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .client import Ask, Reply, ask, each_alone, together
from .evidence import joined_replies, server_stamps, verdict
from .inputs import asks
from .site import Notes, Site
from .timing import gaps_us, middle, stamps_of, times

__all__ = ["MODES", "NAME", "PART", "WORKLOAD", "Sizes", "is_workload", "join_workload",
           "row_names", "run_workload"]

NAME: Final = "workload"
MODES: Final = ("graph", "eager")
PART: Final = "-part"  # behind the name of a run that leaves a mode out
_LEAST_SHARE: Final = 0.9  # of decode rounds by replay: the others ran while an executable was being made


@dataclass(frozen=True)
class Sizes:
    """Tokens in and out of each stream, and how many streams."""

    prompt_tokens: int = 16_384
    new_tokens: int = 1_024
    streams: int = 8


WORKLOAD: Final = Sizes()


def is_workload(sizes: Sizes) -> bool:
    """Whether a run of these sizes may bear the name."""
    return sizes == WORKLOAD


def run_workload(
    site: Site, sizes: Sizes = WORKLOAD, *, modes: Sequence[str] = MODES, salt: int = 1000
) -> dict[str, Any]:
    """All legs on one server.  The result's name follows from its sizes alone."""
    notes, legs = Notes(site), []
    inputs = asks([sizes.prompt_tokens] * sizes.streams, site.vocab, sizes.new_tokens, salt=salt)
    name = NAME if is_workload(sizes) else "scaled"
    if site.max_streams < sizes.streams:
        notes.reasons.append(f"the server takes {site.max_streams} streams, {sizes.streams} are needed")
    before = site.mode
    for mode in (mode for mode in MODES if mode in modes):
        site.switch(mode)
        legs += _legs(site, notes, mode, inputs)
    site.switch(before)
    for made in notes.rows:
        notes.reasons += _length_reasons(made, sizes)
    name += "" if set(MODES) <= set(modes) else PART
    return notes.result(name, sizes=vars(sizes), legs=legs, inputs="distinct ids of an integer hash",
                        first_salt=salt)


def join_workload(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result out of parts that ran other modes: every request has the same hash in all of them."""
    reasons = [f"part {i}: {reason}" for i, part in enumerate(parts) for reason in part["verdict"]["reasons"]]
    sizes = Sizes(**parts[0]["sizes"])
    reasons += [f"part {i} has other sizes" for i, part in enumerate(parts) if part["sizes"] != vars(sizes)]
    legs = [leg for part in parts for leg in part["legs"]]
    there = [(leg["mode"], leg["streams"]) for leg in legs]
    reasons += [f"{there.count((mode, n))} legs {mode} c={n}" for mode in MODES for n in (1, sizes.streams)
                if there.count((mode, n)) != 1]
    checks, differ = joined_replies(parts)
    return {"kind": NAME if is_workload(sizes) else "scaled", "sizes": vars(sizes), "legs": legs,
            "verdict": verdict([*reasons, *differ]).as_dict(), "checks": checks,
            "replies": [reply for part in parts for reply in part["replies"]]}


def row_names(mode: str, streams: int) -> list[str]:
    """Of the replies of a mode's legs; with graphs every input runs alone, and the first once more."""
    return [*(f"{mode} c=1 {i}" for i in range(streams + 1 if mode == "graph" else 1)),
            *(f"{mode} c={streams}/{i}" for i in range(streams))]


def _legs(site: Site, notes: Notes, mode: str, inputs: Sequence[Ask]) -> list[dict[str, Any]]:
    replays = mode == "graph"
    # executables of the first rounds are made here
    warm = ask(site.target, Ask(inputs[0].ids[:64], min(16, inputs[0].new_tokens)))
    if warm.error or warm.status != 200:
        notes.reasons.append(f"{mode} warm-up: {warm.error or warm.status}")
    solo = each_alone(site.target, inputs if replays else inputs[:1])
    if replays:
        solo = [ask(site.target, inputs[0]), *solo[1:], solo[0]]
    for i, reply in enumerate(solo):
        made = notes.take(f"{mode} c=1 {i}", reply, replays=replays)
        notes.reasons += _replay_reasons(made, replays)
    one = _leg(mode, 1, solo[:1])
    site.say(f"{mode:<5} c=1: {_line(one)}")
    replies = together(site.target, inputs)
    wave = notes.wave(f"{mode} c={len(inputs)}", replies, replays=replays)
    for made in notes.rows[-len(inputs):]:
        notes.reasons += _replay_reasons(made, replays)
    many = _leg(mode, len(inputs), replies) | {"wave": wave}
    site.say(f"{mode:<5} c={len(inputs)}: {_line(many)}; together "
             f"{wave['aggregate']['decode_tokens_per_s']} tok/s, overlap {wave.get('overlap')}")
    return [one, many]


def _leg(mode: str, streams: int, replies: Sequence[Reply]) -> dict[str, Any]:
    """Medians over the streams by both clocks, and each stream's stamps in whole microseconds: the first
    since its request, each other since the one before."""
    stamps = [server_stamps(reply) for reply in replies]
    # Figures are made from the stamps that are kept, so whoever has the result can make them again.
    kept = {
        "client": [gaps_us(r.token_at, r.sent_at) for r in replies],
        "server": [gaps_us(at, since) if since is not None else [] for since, at in stamps],
    }
    client, server = ([times(0.0, stamps_of(at), len(r.ask.ids)) for at, r in zip(side, replies, strict=True)]
                      for side in kept.values())
    begun = [at for at, _ in stamps if at is not None]
    base = min(begun, default=0.0)
    return {
        "mode": mode, "streams": streams, "client": middle(client), "server": middle(server),
        "each_client": [one.as_dict() for one in client],
        "stamps_us": {
            **kept,
            "server_begun": [None if since is None else round((since - base) * 1e6) for since, _ in stamps],
        },
    }


def _length_reasons(made: dict[str, Any], sizes: Sizes) -> list[str]:
    if (made["prompt_tokens"], made["new_tokens"]) == (sizes.prompt_tokens, sizes.new_tokens):
        return []
    return [f"{made['name']}: {made['prompt_tokens']} tokens in, {made['new_tokens']} out"]


def _replay_reasons(made: dict[str, Any], replays: bool) -> list[str]:
    """Beyond that a graph was replayed at all: nearly every round of a long reply was."""
    counters = made["counters"] if isinstance(made["counters"], dict) else {}
    replayed, eager = counters.get("graph_replays"), counters.get("eager_rounds")
    if not replays or made["asked_tokens"] < 64 or type(replayed) is not int or type(eager) is not int:
        return []
    share = replayed / max(replayed + eager, 1)
    return [] if share >= _LEAST_SHARE else [f"{made['name']}: {share:.3f} of its rounds were replays"]


def _line(leg: dict[str, Any]) -> str:
    client = leg["client"]
    return ", ".join(f"{name} {client[name]}" for name in
                     ("ttft_s", "prefill_tokens_per_s", "decode_tokens_per_s", "itl_mean_ms", "itl_p50_ms",
                      "itl_p95_ms"))
