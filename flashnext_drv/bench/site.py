"""A server under measurement: where it is, what it says about itself, what may be switched on it.

Made by cli/bench.py, for a running server's address or for one it started itself; used by the measurements of
this folder.  What must stay true: what the server does not tell stays None; a switch that is not there is an
error, never passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from ..errors import RemoteError, UsageError
from .client import Ask, Reply, Target, get_json
from .evidence import (
    Verdict,
    count,
    ids_hash,
    overlap,
    present,
    problems,
    row,
    same_hash,
    unmeasured,
    verdict,
)

__all__ = ["Control", "Notes", "Say", "Site", "find_site"]

Say = Callable[[str], None]
_COUNTS: Final = ("queued", "prompting", "decoding", "free_slots", "free_pages", "draining")


class Control(Protocol):
    """What only whoever started the server can do; each returns when it is done."""

    def graphs(self, on: bool) -> None:
        """Decode and chunks by replaying graphs, or eagerly."""

    def drain(self) -> None:
        """Take no more requests, finish those that are here; returns at once."""

    def again(self) -> Target:
        """After a drain has ended: serve anew on the same engine."""


@dataclass
class Site:
    """target: address.  vocab: of the model.  control: None for a server that somebody else started.
    mode: "graph" or "eager", as it was switched or told."""

    target: Target
    vocab: int
    max_streams: int
    control: Control | None = None
    mode: str = "graph"
    say: Say = print
    told: Mapping[str, Any] = field(default_factory=dict)

    def json(self, path: str) -> Any:
        """The parsed body of a GET that has to succeed.  Raises RemoteError."""
        status, body = get_json(self.target, path)
        if status != 200 or not isinstance(body, dict):
            raise RemoteError(f"GET {path} failed", status=status, because=str(body)[:200])
        return body

    def memory(self) -> Any:
        """The engine's ledger and graphs, as /v1/memory tells them."""
        return self.json("/v1/memory")

    def status(self) -> Any:
        """Queue, slots and totals, as /status tells them."""
        return self.json("/status")

    def counts(self) -> dict[str, int]:
        """queued, prompting, decoding requests, free_slots and free_pages, and whether it is draining (0 or
        1), by /status.  Raises RemoteError when they are not told."""
        told = self.status()
        found = {name: told.get(name) for name in _COUNTS}
        if not all(type(n) in (int, bool) for n in found.values()):
            raise RemoteError("/status does not tell where requests are", because=str(found))
        return {name: int(n) for name, n in found.items() if n is not None}

    def switch(self, mode: str) -> None:
        """mode: "graph" or "eager".  Raises UsageError on a server that cannot be switched."""
        if mode == self.mode:
            return
        if self.control is None:
            raise UsageError("a server that was started elsewhere cannot be switched", mode=mode,
                             do="give --pack, or the address of one in that mode")
        self.control.graphs(mode == "graph")
        self.mode = mode

    def renew(self) -> None:
        """After a drain: serve anew, in the same mode.  Raises UsageError on a server started elsewhere."""
        if self.control is None:
            raise UsageError("a server that was started elsewhere cannot be started again")
        self.target = self.control.again()
        self.control.graphs(self.mode == "graph")


class Notes:
    """Rows of replies, and what speaks against them.

    checks: counts of replies, of them failed (something speaks against them) and unmeasured (whole, but they
    came in one piece and have no decode rate); of comparisons with an earlier one, and equal ones; of waves.
    """

    def __init__(self, site: Site, *, cold: bool = True) -> None:
        self.site, self.cold = site, cold
        self.rows: list[dict[str, Any]] = []
        self.reasons: list[str] = []
        self.checks = dict.fromkeys(
            ("replies", "failed", "unmeasured", "compared", "equal", "overlaps"), 0)
        self._known: dict[Ask, tuple[str, str | None]] = {}

    def take(self, name: str, reply: Reply, *, replays: bool | None = None) -> dict[str, Any]:
        """Judge one reply and hold it to every earlier one of the same request."""
        found = problems(reply, cold=self.cold, replays=replays)
        self.reasons += [f"{name}: {each}" for each in found]
        made = {"name": name, **row(reply), "problems": found}
        self.rows.append(made)
        self.checks["replies"] += 1
        self.checks["failed"] += bool(found)
        self.checks["unmeasured"] += unmeasured(made)
        mine = ids_hash(reply.tokens) if len(reply.tokens) == reply.ask.new_tokens else None
        if reply.ask in self._known:
            first, wanted = self._known[reply.ask]
            self.checks["compared"] += 1
            if same_hash(mine, wanted) and same_hash(made["new_sha256"], wanted):
                self.checks["equal"] += 1
            else:
                self.reasons.append(f"{name}: its tokens are not those of {first}, or a hash is missing")
        else:
            self._known[reply.ask] = (name, mine)
        return made

    def wave(
        self, name: str, replies: Sequence[Reply], *, replays: bool | None = None, decoding: bool = True
    ) -> dict[str, Any]:
        """Judge replies that were asked for at once; proof that they decoded at once is part of it, or,
        without `decoding`, that all were with the server at once."""
        made = [self.take(f"{name}/{i}", reply, replays=replays) for i, reply in enumerate(replies)]
        out: dict[str, Any] = {"name": name, "streams": len(replies), "aggregate": _aggregate(replies)}
        if len(replies) > 1:
            proof = overlap(replies)
            self.checks["overlaps"] += 1
            against = proof.problems if decoding else present(replies)
            self.reasons += [f"{name}: {each}" for each in against]
            out["overlap"] = {"seconds": round(proof.seconds, 6), "fewest_tokens": proof.tokens,
                              "problems": list(proof.problems)}
        return out | {"rows": [each["name"] for each in made]}

    def verdict(self) -> Verdict:
        if not self.rows:
            self.reasons.append("nothing was measured")
        return verdict(self.reasons)

    def result(self, kind: str, **more: Any) -> dict[str, Any]:
        """The measurement as it goes into a file."""
        return {"kind": kind, "verdict": self.verdict().as_dict(), "checks": dict(self.checks), **more,
                "replies": self.rows}


def find_site(target: Target, *, vocab: int = 0, control: Control | None = None, say: Say = print) -> Site:
    """Ask a server what it is.  vocab: used when the server does not tell it.  Raises RemoteError,
    UsageError."""
    site = Site(target, vocab, 1, control, say=say)
    told = site.status()
    site.told = told
    model = told.get("model") if isinstance(told.get("model"), dict) else {}
    site.vocab = count(model, "vocab") or vocab
    site.max_streams = count(told, "max_streams") or 1
    if told.get("graphs") is False:
        site.mode = "eager"
    if not site.vocab:
        raise UsageError("the server does not tell the size of its vocabulary", do="give --vocab")
    return site


def _aggregate(replies: Sequence[Reply]) -> dict[str, float | None]:
    """Of a wave, by the client's clock: tokens of all streams between the first token of any and the last."""
    at = [stamp for reply in replies for stamp in reply.token_at]
    if not at or any(not reply.token_at for reply in replies):
        return {"decode_tokens_per_s": None, "wall_s": None}
    span = max(at) - min(at)
    return {
        "decode_tokens_per_s": round((len(at) - len(replies)) / span, 3) if span > 0 else None,
        "wall_s": round(max(reply.done_at for reply in replies) - min(r.sent_at for r in replies), 6),
    }
