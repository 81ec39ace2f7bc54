"""What goes into a Scheduler and comes out of it: requests, tickets, events, replies, stats.

Made and read by engine/scheduler.py, the server and embedding programs.  What must stay true: a request and
a reply are plain values that hold no engine; times are seconds of `time.perf_counter`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from ..errors import CapacityError, UsageError
from ..model.layout import Layout
from .sequence import Edits, Sampling, checked_ids

__all__ = ["MOST_LOGPROBS", "Event", "Finish", "Reply", "Request", "SchedulerStats", "Ticket", "Token",
           "checked_request", "tokens_held"]

MOST_LOGPROBS: Final = 20
_State = Literal["queued", "prompt", "decode", "done"]
Finish = Literal["length", "stop", "cancelled", "error"]


@dataclass(frozen=True)
class Request:
    """One text to go on with.

    ids: the prompt.  max_new_tokens: 1 or more.  stop_ids: ids that end the text, which then holds that id;
    empty: none does.  logprobs: None, or how many likeliest alternatives are told beside each token, 0..20;
    such a request makes rounds one token a visit.
    min_new_tokens: drawn before one of stop_ids may be.  edits: of the logits that are drawn from; its own
    min_new_tokens and stop_ids give way to the request's.  Logprobs are those of the raw logits.
    request_id: for people and logs.
    """

    ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    min_new_tokens: int = 0
    logprobs: int | None = None
    edits: Edits | None = None
    request_id: str = ""


@dataclass(frozen=True)
class Token:
    """One new token.

    logprob: log-softmax of the row's raw logits at the id, float64 on the host; None unless asked for.
    top: the likeliest (id, logprob), falling, of equal ones the smaller id first.
    at: when the host saw it, the end of its visit.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    at: float = 0.0

    @classmethod
    def of(cls, token: int, logits: npt.NDArray[np.float32] | None, n_top: int, at: float) -> Token:
        """logits: (V,) float32 that it was drawn from, host, without NaN; None: no logprobs are wanted."""
        if logits is None:
            return cls(token, at=at)
        row = logits.astype(np.float64)
        row -= row.max()
        row -= np.log(np.exp(row).sum())
        n_top = min(n_top, len(row))
        top: list[int] = []
        if n_top:
            least = np.partition(row, len(row) - n_top)[len(row) - n_top]
            likely = np.flatnonzero(row >= least)  # rising ids, so a stable sort leaves the smaller first
            top = likely[np.argsort(-row[likely], kind="stable")[:n_top]].tolist()
        return cls(token, float(row[token]), tuple((i, float(row[i])) for i in top), at)


@dataclass(frozen=True)
class Reply:
    """How a request ended.

    tokens: new ids, a stop id included.  sha256: over prompt and new ids; new_sha256: over the new ids alone
    (`engine.token_sha256`).  finish: "length", "stop", "cancelled" or "error"; error: what ended it then.
    counters: prompt_tokens, new_tokens, cached_tokens (0); prefilled: rows of its prompt that were run;
    decoded: tokens drawn in decode visits, all but the first; prompt_chunks and decode_visits that it took
    part in; and what was counted during those visits, by the names of Generation.counters.  A visit is
    shared: its replays, rounds and expert hits stand in the counters of everybody in it.  When they could
    not be read because of a driver error those names are missing.
    stamps: "submitted", "admitted", "first_chunk" (its start), "first_token", "done", as far as it came.
    token_at: when the host saw each token.  live_min, live_max: fewest and most sequences that decoded in its
    decode visits, 0 without one.
    """

    tokens: tuple[int, ...]
    sha256: str
    new_sha256: str
    finish: Finish
    error: BaseException | None
    counters: Mapping[str, int]
    stamps: Mapping[str, float]
    token_at: tuple[float, ...]
    live_min: int = 0
    live_max: int = 0


@dataclass(eq=False)
class Ticket:
    """A request that was taken.

    tag: the caller's own.  reply: once state is "done".  stopped, cancelled: by Scheduler.stop and cancel.
    """

    id: int
    request: Request
    tag: object = None
    state: _State = "queued"
    reply: Reply | None = None
    stopped: bool = False
    cancelled: bool = False


@dataclass(frozen=True)
class Event:
    """Something happened to a ticket.

    "queued": it was taken.  "prompt": prompt_done of prompt_total rows are in the state; the first such event
    has 0 done and says that it was admitted.  "tokens": new ones, in order, none told twice.  "done": reply
    and, when it failed, error; the last event of a ticket.
    """

    kind: Literal["queued", "prompt", "tokens", "done"]
    tokens: tuple[Token, ...] = ()
    prompt_done: int = 0
    prompt_total: int = 0
    reply: Reply | None = None
    error: BaseException | None = None


@dataclass(frozen=True)
class SchedulerStats:
    """Where a scheduler stands.

    queued, prompting, decoding: tickets.  free_slots, free_pages: of the engine.  Since it was opened:
    submitted; refused (queue full); finished by reason; prompt_tokens: rows of prompts run; new_tokens;
    prompt_chunks; decode_visits; decode_rounds: tokens drawn for the sequence that went furthest in each
    visit; queue_seconds: of all admitted together.
    counters: by the names of Generation.counters, exact when idle, else up to a second old.
    broken: why nothing can run any more; "" while all is well.
    """

    max_streams: int
    max_queue: int
    queued: int
    prompting: int
    decoding: int
    free_slots: int
    free_pages: int
    submitted: int
    refused: int
    finished: Mapping[str, int]
    prompt_tokens: int
    new_tokens: int
    prompt_chunks: int
    decode_visits: int
    decode_rounds: int
    queue_seconds: float
    counters: Mapping[str, int]
    draining: bool
    broken: str


def tokens_held(request: Request) -> int:
    """Tokens of cache that it may come to hold: the last token drawn is never put there."""
    return len(request.ids) + request.max_new_tokens - 1


def checked_request(request: Request, layout: Layout) -> Request:
    """The request with its ids as plain ints.

    Raises UsageError on a value outside its range, CapacityError when it fits no sequence of this layout.
    """
    if not isinstance(request, Request):
        raise UsageError("a request is a Request", value=request)
    vocab, limits = layout.config.vocab, layout.limits
    ids = tuple(checked_ids(request.ids, vocab))
    _check_integer("max_new_tokens", request.max_new_tokens, 1, 1 << 20)
    if request.logprobs is not None:
        _check_integer("logprobs", request.logprobs, 0, MOST_LOGPROBS)
    if not isinstance(request.sampling, Sampling):
        raise UsageError("sampling is a Sampling", value=request.sampling)
    _check_integer("min_new_tokens", request.min_new_tokens, 0, request.max_new_tokens)
    if request.edits is not None and not isinstance(request.edits, Edits):
        raise UsageError("edits is an Edits", value=request.edits)
    try:
        stops = list(request.stop_ids)
    except TypeError as error:
        raise UsageError("stop_ids is a collection of token ids", value=request.stop_ids) from error
    stop_ids = frozenset(checked_ids(stops, vocab) if stops else ())
    request = replace(request, ids=ids, stop_ids=stop_ids)
    needed = tokens_held(request)
    if needed > limits.context_tokens:
        raise CapacityError(
            "prompt and new tokens do not fit the cache",
            needed_tokens=needed, prompt_tokens=len(ids), max_new_tokens=request.max_new_tokens,
            context_tokens=limits.context_tokens,
            do="shorten the prompt, lower max_new_tokens or raise Limits.context_tokens",
        )
    return request


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not integer or not low <= value <= high:  # type: ignore[operator]
        raise UsageError(f"{name} is an integer in its range", value=value, range=f"{low}..{high}")
