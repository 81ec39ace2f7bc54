"""Several tokens a host visit: rounds of one row a sequence, launched one behind the other without waiting.

    host     pages, tables   BODY NEXT   BODY NEXT   BODY NEXT   event, ring
    device                   draw ---> rows of the next token ---> ...

Called by engine/engine.py with a Rank.  Kernel advance_rows ends each round: a drawn token becomes its row's
next one, a row that may draw no more leaves the tables, and rounds without rows leave all state alone.  What
must stay true: tokens, status and every byte of state are those of one token a visit, wherever a sequence
stops; what the kernel takes for a stop is what `_drawn` takes for one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np

from ..errors import CapacityError, ContractError, UsageError
from ..kernels.tables import MOST_STOPS
from ..model.layout import bucket_of
from .edits import place_edits
from .rank import STEP, STEP_EDITS, Rank
from .round import Window, check_windows, fill_round, nan_logit
from .sequence import Sequence

__all__ = ["Ahead", "Drawn", "decode", "run_ahead"]


@dataclass(frozen=True)
class Ahead:
    """A sequence with one pending token.  most: tokens it may draw, 1 or more.  stops: ids it ends after."""

    sequence: Sequence
    most: int
    stops: Collection[int] = ()


@dataclass(frozen=True)
class Drawn:
    """What a visit drew for one sequence: at least one token, or an error.

    tokens: all but the last are in its state, the last is for the caller to append; an id of `stops`, if
    any, is the last.  error: the NaN that ended the visit behind them; its row is in the state.
    """

    tokens: list[int]
    error: ContractError | None = None


def decode(rank: Rank, ahead: Ahead) -> Iterator[int]:
    """The ids that a sequence with one pending token draws, to the first of `stops` or as many as it may.

    The host looks at them after 1, 2, 4, ... up to Limits.steps_ahead tokens.  An abandoned iterator leaves
    the sequence at the end of a visit, its last token drawn not yet appended.  Raises as `run_ahead`, and
    ContractError behind the tokens before a NaN.
    """
    left, steps = ahead.most, 1
    while True:
        drawn = run_ahead(rank, [Ahead(ahead.sequence, left, ahead.stops)], steps)[0]
        yield from drawn.tokens
        if drawn.error is not None:
            raise drawn.error
        left -= len(drawn.tokens)
        if not left or drawn.tokens[-1] in ahead.stops:
            return
        ahead.sequence.extend(drawn.tokens[-1:])
        steps = min(2 * steps, rank.layout.limits.steps_ahead)


def run_ahead(rank: Rank, asked: List[Ahead], steps: int) -> list[Drawn]:
    """Draw up to `steps` tokens for every sequence; those that stop do so alone.

    A visit is shorter where pages or a sequence's cache end, and of one token with a mapped n-gram table,
    whose rows the host gathers, or with more stop ids than the tables hold.
    Raises UsageError (nothing changed) as run_round, for steps outside 1..Limits.steps_ahead, and for a
    sequence that has not one pending token or may draw none; CapacityError when no page is left for the
    next token; CheckpointError; DriverError as run_round.
    """
    limits = rank.layout.limits
    if not 1 <= steps <= limits.steps_ahead:
        raise UsageError("steps are 1 to Limits.steps_ahead", steps=steps, limit=limits.steps_ahead)
    if not 1 <= len(asked) <= limits.rows:
        raise UsageError("a round holds 1 row to Limits.rows rows", rows=len(asked), limit=limits.rows)
    windows = [Window(one.sequence, draw=True) for one in asked]
    check_windows(windows, rank.layout.config.vocab)
    for one in asked:
        if one.sequence.n_pending != 1 or one.most < 1:
            raise UsageError("decode goes on from one pending token", pending=one.sequence.n_pending,
                             most=one.most)
    if rank.ngram is not None or any(len(one.stops) > MOST_STOPS for one in asked):
        steps = 1
    allowed = _reserve(rank, asked, steps)
    bucket = bucket_of(len(asked))
    fill_round(rank, windows, bucket)
    for one, n in zip(asked, allowed, strict=True):
        _allow(rank, one, n)
    if rank.ngram is not None:
        with rank.ctx.active():
            rank.ngram.gather(rank.tables.rows[: len(asked)])
    longest = max(one.sequence.position + n for one, n in zip(asked, allowed, strict=True))
    try:
        if rank.ngram is not None:
            with rank.ctx.active():
                rank.ngram.publish(rank.stream)
        edits = place_edits(rank, [(one.sequence, one.sequence.n_done + 1) for one in asked])
        rank.forward(STEP_EDITS if edits else STEP, bucket, (1,) * len(asked), longest, times=max(allowed))
        ring = rank.read_ahead()
    except BaseException as error:  # some launches may have run: no state is where n_done says
        for one in asked:
            one.sequence.fail(error)
        raise
    return [_drawn(one, ring[one.sequence.i_slot, :n]) for one, n in zip(asked, allowed, strict=True)]


def _reserve(rank: Rank, asked: List[Ahead], steps: int) -> list[int]:
    """Pages for up to `steps` tokens a sequence; how many tokens each may draw.

    First those of one token each, so that no sequence goes without for another's later tokens.
    """
    for one in asked:
        rank.pages.reserve(one.sequence.i_slot, one.sequence.position + 1)
    while True:
        allowed = [min(steps, one.most, one.sequence.capacity - one.sequence.position) for one in asked]
        try:
            for one, n in zip(asked, allowed, strict=True):
                rank.pages.reserve(one.sequence.i_slot, one.sequence.position + n)
        except CapacityError:
            steps -= 1  # not below 1: those pages are there
            continue
        return allowed


def _allow(rank: Rank, one: Ahead, n_tokens: int) -> None:
    """Tell the device how far a sequence goes alone; seen after the next publish."""
    stops = sorted(one.stops) if n_tokens > 1 else []
    ahead = rank.tables.aheads[one.sequence.i_slot]
    ahead["left"], ahead["drawn"], ahead["n_stops"] = n_tokens, 0, len(stops)
    ahead["stops"][: len(stops)] = stops


def _drawn(one: Ahead, ring: np.ndarray) -> Drawn:
    """ring: (tokens allowed,) DRAWN of the sequence's slot.  Brings the sequence to where its state is."""
    sequence = one.sequence
    n_before = sequence.n_done + 1
    tokens: list[int] = []
    for token, status in ring.tolist():
        if status:
            sequence.n_done += len(tokens) + 1
            sequence.drew(n_before)
            sequence.extend(tokens)
            return Drawn(tokens, nan_logit(sequence, sequence.position - 1))
        tokens.append(token)
        if token in one.stops:
            break
    sequence.n_done += len(tokens)
    sequence.drew(n_before)
    sequence.extend(tokens[:-1])
    return Drawn(tokens)
