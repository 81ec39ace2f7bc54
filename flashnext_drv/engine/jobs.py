"""A request's way through a scheduler: what it holds, what was counted for it, and its reply.

Made and changed by engine/scheduler.py on the thread that drives it.  What must stay true: whoever ends a
job closes `leave`, which gives its slot and pages back; the reply is made from the job alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..kernels.tables import PAGE_TOKENS
from .engine import token_sha256
from .prefill import Prompt
from .requests import Finish, Reply, Request, Ticket, Token, tokens_held
from .sequence import Sequence

__all__ = ["Job", "Totals"]


@dataclass(eq=False)
class Job:
    """One ticket.

    sequence: once admitted.  prompt: while it runs.  logits: (V,) float32 of the row last drawn from, where
    wanted.  counted: by the names of Generation.counters; None when they were lost.  decoded: tokens drawn
    in decode visits.  live_min, live_max: sequences in those.  ends: why, and with which error, once its last
    token was drawn.
    """

    ticket: Ticket
    sequence: Sequence | None = None
    prompt: Prompt | None = None
    leave: ExitStack = field(default_factory=ExitStack)
    tokens: list[Token] = field(default_factory=list)
    logits: npt.NDArray[np.float32] | None = None
    stamps: dict[str, float] = field(default_factory=dict)
    counted: dict[str, int] | None = field(default_factory=dict)
    prompt_chunks: int = 0
    decode_visits: int = 0
    decoded: int = 0
    live_min: int = 0
    live_max: int = 0
    ends: tuple[Finish, BaseException | None] | None = None

    @property
    def request(self) -> Request:
        return self.ticket.request

    @property
    def pages(self) -> int:
        """Of all the tokens that it may come to hold."""
        return -(-tokens_held(self.request) // PAGE_TOKENS)

    def keep(self, i_id: int, block: npt.NDArray[np.float32]) -> None:
        """Prompt.keep of a job that wants logprobs: the last row is what the first token is drawn from."""
        self.logits = block[-1]

    @property
    def interrupted(self) -> str:
        """Of a live one between two steps: why it cannot go on; "" when it can."""
        if self.sequence is None or self.ticket.state == "queued":
            return "it was stopped while it was admitted"
        return self.sequence.failed

    def fail(self, error: BaseException) -> None:
        """Its state is unknown from now on."""
        if self.sequence is not None:
            self.sequence.fail(error)

    def visited(self, n_live: int) -> None:
        """It takes part in a decode visit of so many sequences."""
        self.decode_visits += 1
        self.live_min = min(self.live_min or n_live, n_live)
        self.live_max = max(self.live_max, n_live)

    def count(self, added: Mapping[str, int] | None) -> None:
        """Add what was counted in its visits; None: it could not be read."""
        if added is None or self.counted is None:
            self.counted = None
            return
        for name, n in added.items():
            self.counted[name] = self.counted.get(name, 0) + n

    def reply(self, finish: Finish, error: BaseException | None) -> Reply:
        request, tokens = self.request, tuple(token.id for token in self.tokens)
        done = 0 if self.sequence is None else min(self.sequence.n_done, len(request.ids))
        return Reply(
            tokens,
            token_sha256([*request.ids, *tokens]),
            token_sha256(tokens),
            finish,
            error,
            {
                "prompt_tokens": len(request.ids),
                "new_tokens": len(tokens),
                "cached_tokens": 0,
                "prefilled": done,
                "decoded": self.decoded,
                "prompt_chunks": self.prompt_chunks,
                "decode_visits": self.decode_visits,
                **(self.counted or {}),
            },
            dict(self.stamps),
            tuple(token.at for token in self.tokens),
            self.live_min,
            self.live_max,
        )


@dataclass
class Totals:
    """Since a scheduler was opened; names as in SchedulerStats."""

    submitted: int = 0
    refused: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    new_tokens: int = 0
    prompt_chunks: int = 0
    decode_visits: int = 0
    decode_rounds: int = 0
    queue_seconds: float = 0.0
