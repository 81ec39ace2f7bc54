"""What a reply proves: whether it is whole, cold, replayed, at the same time as others, equal to another.

Called by the measurements of this folder.  What must stay true: a reply is qualified only by what was said
and could be checked: a figure that is missing or odd is unverified and never counts as zero, a hash that is
missing, short or malformed never counts as equal.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .client import Reply
from .timing import times

__all__ = ["Overlap", "Verdict", "cached_tokens", "count", "full_hash", "ids_hash", "joined_replies",
           "overlap", "phases", "present", "problems", "rounds_problems", "row", "same_hash",
           "server_stamps", "unmeasured", "verdict"]

_HASH: Final = re.compile(r"[0-9a-f]{64}")
REPLAYS, EAGER = "graph_replays", "eager_rounds"


@dataclass(frozen=True)
class Verdict:
    """qualified: nothing speaks against it.  reasons: what does, in words."""

    qualified: bool
    reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"qualified": self.qualified, "reasons": list(self.reasons)}

    def __str__(self) -> str:
        return "qualified" if self.qualified else "not qualified: " + "; ".join(self.reasons)


def verdict(reasons: Sequence[str]) -> Verdict:
    """Qualified exactly when there is no reason against it."""
    return Verdict(not reasons, tuple(reasons))


def full_hash(value: object) -> str | None:
    """A whole SHA-256 in lower-case hex, else None."""
    return value if isinstance(value, str) and _HASH.fullmatch(value) else None


def same_hash(one: object, other: object) -> bool:
    """Both whole, and the same."""
    whole = full_hash(one)
    return whole is not None and whole == full_hash(other)


def ids_hash(ids: Sequence[int]) -> str | None:
    """SHA-256, hex, over ids as little-endian u32, as the engine's; None of ids that are none."""
    if not all(0 <= i < 1 << 32 for i in ids):
        return None
    return hashlib.sha256(np.asarray(ids, "<u4").tobytes()).hexdigest()


def count(told: Mapping[str, Any] | None, name: str) -> int | None:
    """A count that was told: an integer, 0 or more; None when it is absent or anything else."""
    value = told.get(name) if told is not None else None
    return value if type(value) is int and value >= 0 else None


def cached_tokens(reply: Reply) -> int | None:
    """Prompt tokens that were not computed, where usage and runtime block both say so and agree."""
    details = (reply.usage or {}).get("prompt_tokens_details")
    said = count(details if isinstance(details, dict) else None, "cached_tokens")
    return said if said is not None and said == count(reply.runtime, "cached_tokens") else None


def server_stamps(reply: Reply) -> tuple[float | None, list[float]]:
    """(when the server was given the request, when each token was drawn), by the server's clock.

    None and [] where they are not told in full: one finite stamp a token, not falling.
    """
    told, stamps = ((reply.runtime or {}).get(name) for name in ("token_at", "stamps"))
    begun: Any = stamps.get("submitted") if isinstance(stamps, dict) else None
    if not _finite(begun) or not isinstance(told, list) or not all(map(_finite, told)):
        return None, []
    rising = all(a <= b for a, b in zip([begun, *told], told, strict=False))
    whole = len(told) == len(reply.tokens)
    return (float(begun), [float(at) for at in told]) if rising and whole else (None, [])


def phases(reply: Reply) -> dict[str, float | None]:
    """What the time to the first token went into, seconds by the server's clock: the queue, the wait behind
    chunks and visits of others, the prompt.  None where a stamp is not told or they fall."""
    told = (reply.runtime or {}).get("stamps")
    told = told if isinstance(told, dict) else {}
    at: list[Any] = [told.get(name) for name in ("submitted", "admitted", "first_chunk", "first_token")]
    return {name: round(end - start, 6) if _finite(start) and _finite(end) and end >= start else None
            for name, start, end in zip(("queue", "wait", "prompt"), at, at[1:], strict=False)}


def problems(reply: Reply, *, cold: bool = False, replays: bool | None = None) -> list[str]:
    """What speaks against a reply, in words; empty when nothing does.

    cold: no prompt token may come from a cache.  replays: True wants every decode round a graph replay but
    those before its executable was made, False wants none; None does not ask.
    """
    found = [f"error: {reply.error}"] if reply.error else []
    if reply.cut:
        found.append(f"given up: {reply.cut}")
    if reply.status != 200:
        return [*found, f"HTTP status {reply.status}"]
    if not reply.finished:
        found.append("the stream's end was not announced")
    if reply.finish != "length":
        found.append(f"finish is {reply.finish!r}, not 'length'")
    n_prompt, n_new = len(reply.ask.ids), reply.ask.new_tokens
    if len(reply.tokens) != n_new:
        found.append(f"{len(reply.tokens)} tokens came, {n_new} were asked for")
    found += _usage_problems(reply, n_prompt, n_new, cold)
    if reply.runtime is None:
        return [*found, "runtime block unverified: missing"]
    for name, ids in (("token_sha256", [*reply.ask.ids, *reply.tokens]), ("new_sha256", reply.tokens)):
        said = reply.runtime.get(name)
        if full_hash(said) is None:
            found.append(f"{name} unverified: missing or not a whole SHA-256")
        elif not same_hash(said, ids_hash(ids)):
            found.append(f"{name} is not that of the ids that came")
    if not server_stamps(reply)[1]:
        found.append("server stamps unverified: not one finite rising stamp a token")
    found += _path_problems(reply, n_prompt, n_new, replays)
    return found


@dataclass(frozen=True)
class Overlap:
    """How streams decoded at the same time, by the server's clock.

    seconds: from the last first token to the first last token.  tokens: the fewest that one stream drew
    within.  problems: why this is no proof, in words.
    """

    seconds: float
    tokens: int
    problems: tuple[str, ...]


def overlap(replies: Sequence[Reply]) -> Overlap:
    """Proof that all streams decoded at once: their decode phases share a span in which each drew tokens, and
    the server counted as many sequences in one round for every one of them."""
    found, n = [], len(replies)
    stamps = [server_stamps(reply)[1] for reply in replies]
    if n < 2:
        found.append("one stream cannot overlap")
    if not stamps or not all(stamps):
        return Overlap(0.0, 0, (*found, "a stream has no server stamps"))
    begin, end = max(at[0] for at in stamps), min(at[-1] for at in stamps)
    within = min(sum(begin < at < end for at in one) for one in stamps)
    if end <= begin:
        found.append("no time at which all streams were decoding")
    elif within < 1:
        found.append("a stream drew no token while all were decoding")
    live = [count(reply.runtime, "live_max") for reply in replies]
    if any(most is None or most < n for most in live):
        found.append(f"most sequences in one round as the server counted: {live}, {n} wanted")
    if len({reply.ask.ids for reply in replies}) < n:
        found.append("the inputs are not distinct")
    return Overlap(max(end - begin, 0.0), within, tuple(found))


def present(replies: Sequence[Reply]) -> list[str]:
    """Why it is not shown that all requests were with the server at one time, in words: the last came before
    the first had its last token.  Weaker than `overlap`: long prompts with short replies decode one after the
    other."""
    found = [server_stamps(reply) for reply in replies]
    begun = [at for at, stamps in found if at is not None and stamps]
    if not begun or len(begun) < len(replies):
        return ["a stream has no server stamps"]
    late = max(begun) >= min(stamps[-1] for _, stamps in found)
    return ["a stream had ended before another came"] if late else []


def row(reply: Reply) -> dict[str, Any]:
    """One reply as it goes into results: lengths, both clocks' times, hashes, counters; no ids."""
    begun, stamps = server_stamps(reply)
    runtime = reply.runtime or {}
    n_prompt = len(reply.ask.ids)
    return {
        "prompt_tokens": n_prompt,
        "new_tokens": len(reply.tokens),
        "asked_tokens": reply.ask.new_tokens,
        "prompt_sha256": ids_hash(reply.ask.ids),
        "cached_tokens": cached_tokens(reply),
        "client": times(reply.sent_at, reply.token_at, n_prompt).as_dict(),
        "server": times(begun, stamps, n_prompt).as_dict(),
        "phases_s": phases(reply),
        "token_sha256": full_hash(runtime.get("token_sha256")),
        "new_sha256": full_hash(runtime.get("new_sha256")),
        "client_new_sha256": ids_hash(reply.tokens) if reply.tokens else None,
        "finish": reply.finish,
        "counters": _told_counters(runtime.get("counters")),
        "live": [count(runtime, "live_min"), count(runtime, "live_max")],
        "error": reply.error,
    }


def unmeasured(made: Mapping[str, Any]) -> bool:
    """Whether a row is of a reply that nothing speaks against, of several tokens that came in one piece: the
    client's clock gives it no decode rate."""
    return not made["problems"] and made["new_tokens"] > 1 and made["client"]["decode_tokens_per_s"] is None


def joined_replies(parts: Sequence[Mapping[str, Any]]) -> tuple[dict[str, int], list[str]]:
    """(counts, what differs in words) of the replies of several results: one hash a request in all."""
    known: dict[tuple[Any, Any], Any] = {}
    counts, found = dict.fromkeys(("replies", "failed", "unmeasured", "compared", "equal"), 0), []
    for i, part in enumerate(parts):
        for reply in part["replies"]:
            counts["replies"] += 1
            counts["failed"] += bool(reply["problems"])
            counts["unmeasured"] += unmeasured(reply)
            key = (reply["prompt_sha256"], reply["asked_tokens"])
            if key in known:
                counts["compared"] += 1
                if same_hash(reply["new_sha256"], known[key]):
                    counts["equal"] += 1
                else:
                    found.append(f"part {i}, {reply['name']}: not the hash that another leg has")
            known.setdefault(key, reply["new_sha256"])
    return counts, found


def rounds_problems(counters: object, n_new: int, replays: bool) -> list[str]:
    """What the counters of a reply of `n_new` tokens do not show, in words: that every token behind the first
    had a round, and that rounds were replays, or none was.  A reply of one token needs none."""
    if n_new < 2:
        return []
    told = counters if isinstance(counters, dict) else None
    replayed, eager = count(told, REPLAYS), count(told, EAGER)
    if replayed is None or eager is None:
        return ["graph replays unverified: not told"]
    found = []
    if replayed + eager < n_new - 1:
        found.append(f"{replayed} graph replays and {eager} eager rounds are too few for {n_new} tokens")
    if replays and not replayed:
        found.append("no graph was replayed")
    elif replays and eager > replayed:
        found.append(f"{eager} rounds ran eagerly, {replayed} by replay")
    elif not replays and (replayed or not eager):
        found.append(f"{replayed} graph replays and {eager} eager rounds where all had to be eager")
    return found


def _usage_problems(reply: Reply, n_prompt: int, n_new: int, cold: bool) -> list[str]:
    if reply.usage is None:
        return ["usage unverified: missing"]
    found = []
    for name, wanted in (("prompt_tokens", n_prompt), ("completion_tokens", n_new),
                         ("total_tokens", n_prompt + n_new)):
        said = count(reply.usage, name)
        if said is None:
            found.append(f"usage.{name} unverified: missing or no count")
        elif said != wanted:
            found.append(f"usage.{name} is {said}, {wanted} were sent or asked for")
    cached = cached_tokens(reply)
    if cold and cached is None:
        found.append("cached tokens unverified: missing, or usage and runtime block differ")
    elif cold and cached:
        found.append(f"{cached} prompt tokens came from a cache")
    return found


def _path_problems(reply: Reply, n_prompt: int, n_new: int, replays: bool | None) -> list[str]:
    found = []
    cached = count(reply.runtime, "cached_tokens")
    prefilled = count(reply.runtime, "prefilled_tokens")
    decoded = count(reply.runtime, "decoded_tokens")
    if cached is None or prefilled is None or cached + prefilled != n_prompt:
        found.append(f"prompt unverified: {cached} cached and {prefilled} prefilled tokens of {n_prompt}")
    if decoded != n_new:
        found.append(f"{decoded} tokens decoded by the runtime block, {n_new} asked for")
    if replays is not None:
        found += rounds_problems((reply.runtime or {}).get("counters"), n_new, replays)
    return found


def _told_counters(counters: object) -> dict[str, Any] | None:
    """What counted something, and the two that the verdict is made of whatever they are."""
    if not isinstance(counters, dict):
        return None
    return {name: n for name, n in counters.items() if n or name in (REPLAYS, EAGER)}


def _finite(value: object) -> bool:
    if type(value) is int:
        return abs(value) < 1 << 53  # beyond it a float is not the number that was told
    return type(value) is float and math.isfinite(value)
