"""A request's sequence: its tokens, its place in the pools, and how its tokens are drawn.

Made by engine/rank.py; holds ids into pools and no driver object.  What must stay true: tokens 0 .. n_done -
1 are in the state, later ones are pending; pages and slot are given back exactly once.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import CapacityError, UsageError
from ..model.layout import MOST_EDITS

__all__ = ["LEAST_TEMPERATURE", "Edits", "Sampling", "Sequence", "checked_edits", "checked_ids"]

LEAST_TEMPERATURE: Final = 1e-30  # logits up to 1e8 divided by it are still finite in f32


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.  temperature 0, or below LEAST_TEMPERATURE: greedy.  top_k 0, top_p 1, min_p 0:
    off.  seed: any u64.

    The draw depends on the logits, on (seed, absolute position, token id), and on nothing else.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (("temperature", 0.0, 100.0), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0)):
            _check_number(name, getattr(self, name), low, high)
        if self.top_p == 0.0:
            raise UsageError(
                "top_p must be above 0", value=self.top_p, do="use top_k=1 for the likeliest token"
            )
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise UsageError(f"{name} is no integer", value=value)
        if not 0 <= self.top_k < 1 << 32:
            raise UsageError("top_k is outside its range", value=self.top_k, range="0..2^32-1")
        if not 0 <= self.seed < 1 << 64:
            raise UsageError("seed is outside its range", value=self.seed, range="0..2^64-1")


@dataclass(frozen=True)
class Edits:
    """What is done to a sequence's logits before its tokens are drawn.  The ones that callers read stay raw.

    repetition: divides positive logits of ids in prompt or output, multiplies others; 0.01..100, 1 is off.
    presence, frequency: taken off the logits of ids in the output, once and times how often; -100..100.
    bias: pairs (id, what is added), -1000..1000, or -inf: the id is never drawn.  min_new_tokens: tokens
    drawn before one of stop_ids may be; without stop_ids those of the request.
    The output begins behind the token that gave the sequence's first draw: what was appended later counts,
    drawn or not.  The steps and their order: edit_v1 in cuda_src/ARITHMETIC.md.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_number("repetition", self.repetition, 0.01, 100.0)
        _check_number("presence", self.presence, -100.0, 100.0)
        _check_number("frequency", self.frequency, -100.0, 100.0)
        n = self.min_new_tokens
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or not 0 <= n < 1 << 31:
            raise UsageError("min_new_tokens is an integer, 0 to 2^31-1", value=n)
        try:
            pairs = [(operator.index(token), value) for token, value in self.bias]
            stops = [operator.index(token) for token in self.stop_ids]
        except (TypeError, ValueError) as error:
            raise UsageError("bias is pairs of an id and a number, stop_ids a list of ids",
                             because=str(error)) from error
        for token, value in pairs:
            if not (isinstance(value, float | np.floating) and value == -math.inf):
                _check_number(f"bias of id {token}", value, -1000.0, 1000.0)
        if len({token for token, _ in pairs}) != len(pairs):
            raise UsageError("an id is biased twice", ids=len(pairs))
        if len(pairs) + len(set(stops)) > MOST_EDITS:
            raise UsageError("bias and stop_ids name too many ids", ids=len(pairs) + len(set(stops)),
                             limit=MOST_EDITS)
        object.__setattr__(self, "bias", tuple((token, float(value)) for token, value in sorted(pairs)))
        object.__setattr__(self, "stop_ids", tuple(sorted(set(stops))))

    @property
    def active(self) -> bool:
        """Whether any logit can change."""
        penalties = self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0
        return penalties or bool(self.bias) or bool(self.min_new_tokens and self.stop_ids)


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        raise UsageError(f"{name} is no number", value=value, range=f"{low}..{high}")
    if not low <= value <= high:  # neither NaN nor an infinity is
        raise UsageError(f"{name} is outside its range", value=value, range=f"{low}..{high}")


@dataclass(eq=False)
class Sequence:
    """One live sequence.

    ids: tokens from position first_position on.  n_done: how many of them are in the state.  capacity: most
    tokens.
    before: the two tokens in front of ids (newest first), for a state that did not start at position 0.
    failed: the error that stopped a round this sequence was in; its state is unknown from then on.
    edits: of its logits; another one may be set between rounds.  n_prompt: how many of ids were there when it
    first drew, None before.  listed: the edits whose list the device has, and how many of ids are in it.
    """

    i_slot: int
    capacity: int
    sampling: Sampling = field(default_factory=Sampling)
    ids: list[int] = field(default_factory=list)
    n_done: int = 0
    first_position: int = 0
    before: tuple[int, int] | None = None
    closed: bool = False
    failed: str = ""
    edits: Edits = field(default_factory=Edits)
    n_prompt: int | None = None
    listed: tuple[Edits, int] | None = None

    @property
    def position(self) -> int:
        """Absolute position of the next pending token."""
        return self.first_position + self.n_done

    @property
    def n_pending(self) -> int:
        return len(self.ids) - self.n_done

    def fail(self, error: BaseException) -> None:
        """Its state is unknown from now on, because of `error`."""
        self.failed = self.failed or str(error) or type(error).__name__

    def drew(self, n_before: int) -> None:
        """Rows that draw have run; all ids done are in the list, if there is one.  n_before: ids at or before
        the first of these rows."""
        if self.n_prompt is None:
            self.n_prompt = n_before
        if self.edits.active:
            self.listed = (self.edits, self.n_done)

    def lists(self, n_ids: int) -> bool:
        """Whether the device has a list of the edits as they are, with the first n_ids ids or one more."""
        return self.listed is not None and self.listed[0] is self.edits and self.listed[1] - n_ids in (0, 1)

    def extend(self, ids: Ids[int]) -> None:
        """Append pending tokens; whether the vocabulary has them is asked when they run.

        Raises, with nothing appended, CapacityError when they do not fit, UsageError on what is no list of
        integers and on a closed sequence.
        """
        if self.closed:
            raise UsageError("a closed sequence takes no tokens", slot=self.i_slot)
        try:
            ids = [operator.index(token) for token in ids]
        except TypeError as error:
            raise UsageError("token ids are integers in one flat list", because=str(error)) from error
        tokens = self.first_position + len(self.ids) + len(ids)
        if tokens > self.capacity:
            raise CapacityError(
                "the tokens do not fit the sequence's cache",
                tokens=tokens,
                capacity=self.capacity,
                do="raise Limits.context_tokens or shorten the prompt or max_new_tokens",
            )
        self.ids.extend(ids)

    def next_tokens(self, n_rows: int, eos: int) -> npt.NDArray[np.int64]:
        """(2 + n_rows,) int64: the next n_rows pending ids with the two tokens before them in front, oldest
        first."""
        first = self.n_done
        out = np.empty(2 + n_rows, np.int64)
        out[0], out[1] = self.token_before(first, 2, eos), self.token_before(first, 1, eos)
        try:
            out[2:] = np.fromiter(self.ids[first : first + n_rows], np.int64, n_rows)
        except OverflowError:  # beyond 64 bits: outside every vocabulary
            out[2:] = [min(max(i, -1), 1 << 62) for i in self.ids[first : first + n_rows]]
        return out

    def token_before(self, i_id: int, distance: int, eos: int) -> int:
        """The token `distance` (1, 2) in front of ids[i_id]; the end-of-sequence id where there is none."""
        at = i_id - distance
        if at >= 0:
            return self.ids[at]
        if self.before is not None and -at <= 2:
            return self.before[-at - 1]
        return eos


def checked_edits(edits: Edits | None, vocab: int) -> Edits:
    """`edits`, or those that edit nothing.  Raises UsageError on anything else, and on ids outside
    0..vocab-1."""
    if edits is None:
        return Edits()
    if not isinstance(edits, Edits):
        raise UsageError("edits is an Edits", value=edits)
    ids = [*(token for token, _ in edits.bias), *edits.stop_ids]
    if ids:
        checked_ids(ids, vocab)
    return edits


def checked_ids(ids: object, vocab: int) -> list[int]:
    """`ids` as a list of ints in 0..vocab-1.  Raises UsageError naming the first id that is not."""
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError, TypeError) as error:  # lists of unequal lengths
        raise UsageError("token ids are integers in one flat list", because=str(error)) from error
    if array.ndim != 1 or array.size == 0:
        raise UsageError(
            "a prompt is a non-empty list of token ids",
            shape=str(array.shape),
            do="give at least one token id",
        )
    if array.dtype.kind not in "iu":
        raise UsageError("token ids are integers", dtype=str(array.dtype))
    wrong = np.flatnonzero((array < 0) | (array >= vocab))
    if wrong.size:
        index = int(wrong[0])
        raise UsageError(
            "a token id is outside the vocabulary",
            index=index,
            id=int(array[index]),
            vocab=vocab,
            do=f"use ids 0..{vocab - 1}",
        )
    return [int(value) for value in array]
