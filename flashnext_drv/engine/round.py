"""One forward over live windows: fills the row tables, launches, and reads back draws.

Called by engine/engine.py with a Rank.  A window is the next n pending tokens of one sequence; a round holds
windows of different sequences, at most `rows` rows together.  What must stay true: a row's bytes do not
depend on the other rows of its round, nor on how a sequence's tokens were cut into windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field

import numpy as np

from ..errors import ContractError, DriverError, UsageError
from ..model.layout import bucket_of
from .edits import place_edits
from .rank import BODY, TOKEN, TOKEN_EDITS, Rank
from .sequence import LEAST_TEMPERATURE, Sequence, checked_edits

__all__ = ["EMIT_DRAW", "EMIT_EDITS", "EMIT_LOGITS", "RoundResult", "Window", "check_windows",
           "emit_of_draw", "fill_round", "nan_logit", "run_round", "set_sampling"]

EMIT_LOGITS = 1
EMIT_DRAW = 2
EMIT_EDITS = 4  # the draw is from edited logits


@dataclass(frozen=True)
class Window:
    """The next n_rows pending tokens of a sequence.  draw: draw a token after its last row.  logits: keep the
    logits of its rows, but of the first `skip`."""

    sequence: Sequence
    n_rows: int = 1
    draw: bool = False
    logits: bool = False
    skip: int = 0


@dataclass(frozen=True)
class RoundResult:
    """tokens: one drawn id per window (-1 where none was asked or could be drawn).  logits: (rows, V) float32
    of windows that asked, in order, raw also where a sequence edits what it draws from, or None.  errors: of
    windows that drew from a NaN, by place in the round."""

    tokens: list[int]
    logits: np.ndarray | None
    errors: Mapping[int, ContractError] = field(default_factory=dict)

    def checked(self, apart: bool) -> RoundResult:
        """This; unless `apart`, raises the first of the errors."""
        for error in () if apart else self.errors.values():
            raise error
        return self


def run_round(rank: Rank, windows: List[Window], *, apart: bool = False) -> RoundResult:
    """Advance every window's sequence by its rows.

    apart: windows that draw from a NaN are told in the result, so that the others have their tokens.
    Raises UsageError (nothing changed) when windows overlap, hold more rows than the limits or more than is
    pending, or an id outside the vocabulary; CapacityError when pages run out; ContractError when a logit of
    a row that draws is NaN (the sequences have advanced); CheckpointError when the files of a mapped n-gram
    table lost rows (nothing changed); DriverError, after which the sequences' states on
    the device are unknown: they take part in no further round and can only be closed.  So it is after
    anything else that stops the launches half-way, KeyboardInterrupt too.
    """
    n_rows = sum(window.n_rows for window in windows)
    limit = rank.layout.limits.rows
    if not windows or n_rows > limit:
        raise UsageError("a round holds 1 row to Limits.rows rows", rows=n_rows, limit=limit)
    check_windows(windows, rank.layout.config.vocab)
    for window in windows:
        sequence = window.sequence
        rank.pages.reserve(sequence.i_slot, sequence.position + window.n_rows)
    bucket = bucket_of(n_rows)
    fill_round(rank, windows, bucket)
    if rank.ngram is not None:
        with rank.ctx.active():
            rank.ngram.gather(rank.tables.rows[:n_rows])
    head = any(window.draw or window.logits for window in windows)
    try:
        if rank.ngram is not None:
            with rank.ctx.active():
                rank.ngram.publish(rank.stream)
        pattern = tuple(window.n_rows for window in windows)
        longest = max(window.sequence.position + window.n_rows for window in windows)
        edits = place_edits(rank, [(window.sequence, window.sequence.n_done + window.n_rows)
                                   for window in windows if window.draw])
        rank.forward((TOKEN_EDITS if edits else TOKEN) if head else BODY, bucket, pattern, longest)
        for window in windows:
            window.sequence.n_done += window.n_rows
            if window.draw:
                window.sequence.drew(window.sequence.n_done)
    except BaseException as error:  # some launches may have run: no state is where n_done says
        for window in windows:
            window.sequence.fail(error)
        raise
    try:
        result = _read(rank, windows) if head else RoundResult([-1] * len(windows), None)
    except DriverError as error:
        for window in windows:
            window.sequence.fail(error)
        raise
    return result.checked(apart)


def check_windows(windows: List[Window], vocab: int) -> None:
    """Raises UsageError on a window that cannot run: overlapping, closed, failed, of rows that are not
    pending, of ids outside the vocabulary, or with edits of such."""
    if len({id(window.sequence) for window in windows}) != len(windows):
        raise UsageError("a sequence stands in two windows of one round", windows=len(windows))
    for window in windows:
        sequence = window.sequence
        if sequence.closed:
            raise UsageError("a closed sequence stands in a round", slot=sequence.i_slot)
        if sequence.failed:
            raise UsageError("a sequence's state is unknown after a failed round", slot=sequence.i_slot,
                             because=sequence.failed, do="close it and start again from its tokens")
        if sequence.listed is None or sequence.listed[0] is not sequence.edits:
            checked_edits(sequence.edits, vocab)  # a kernel would write outside the row's logits
        if not 1 <= window.n_rows <= sequence.n_pending:
            raise UsageError(
                "a window holds 1 row to all pending rows", rows=window.n_rows, pending=sequence.n_pending
            )
        if not 0 <= window.skip < window.n_rows:
            raise UsageError(
                "a window skips 0 rows to all but one", skip=window.skip, rows=window.n_rows
            )
        ids = sequence.next_tokens(window.n_rows, 0)[2:]
        wrong = np.flatnonzero((ids < 0) | (ids >= vocab))
        if wrong.size:  # a kernel would read outside the embedding
            i_id = sequence.n_done + int(wrong[0])
            raise UsageError(
                "a token id is outside the vocabulary", index=i_id, id=sequence.ids[i_id], vocab=vocab
            )


def set_sampling(rank: Rank, sequence: Sequence) -> None:
    """Tell the device's slot how its sequence draws; seen after the next publish."""
    slot = rank.tables.slots[sequence.i_slot]
    for name in ("seed", "temperature", "top_p", "min_p", "top_k"):
        slot[name] = getattr(sequence.sampling, name)
    if sequence.sampling.temperature < LEAST_TEMPERATURE:  # else logits over it are all infinite, hence equal
        slot["temperature"] = 0.0


def emit_of_draw(sequence: Sequence) -> int:
    """Emit flags of the row that a sequence draws from."""
    return EMIT_DRAW | (EMIT_EDITS if sequence.edits.active else 0)


def nan_logit(sequence: Sequence, position: int) -> ContractError:
    """The error of a row that draws from a NaN."""
    return ContractError(
        "a logit is NaN",
        position=position,
        slot=sequence.i_slot,
        because="a weight, a scale or a state is not finite",
        do="verify the pack (inspect --verify) and run flashnext-drv doctor",
    )


def fill_round(rank: Rank, windows: List[Window], bucket: int) -> None:
    """Write the rows and runs of a round, padded to `bucket` rows; seen after the next publish."""
    n_rows = sum(window.n_rows for window in windows)
    tables, eos = rank.tables, rank.layout.config.eos_id
    tables.round[0]["n_rows"], tables.round[0]["n_runs"] = n_rows, len(windows)
    tables.round[0]["rows_cap"] = bucket
    i_row = 0
    for i_run, window in enumerate(windows):
        sequence = window.sequence
        tables.runs[i_run] = (sequence.i_slot, i_row, window.n_rows, sequence.position)
        set_sampling(rank, sequence)
        for i_id in range(sequence.n_done, sequence.n_done + window.n_rows):
            last = i_id == sequence.n_done + window.n_rows - 1
            kept = window.logits and i_id >= sequence.n_done + window.skip
            emit = (EMIT_LOGITS if kept else 0) | (emit_of_draw(sequence) if window.draw and last else 0)
            tables.rows[i_row] = (
                sequence.i_slot,
                i_run,
                sequence.ids[i_id],
                sequence.first_position + i_id,
                sequence.token_before(i_id, 1, eos),
                sequence.token_before(i_id, 2, eos),
                emit,
                i_row,
            )
            i_row += 1


def _read(rank: Rank, windows: List[Window]) -> RoundResult:
    drawn, status = rank.read_draws()
    tokens: list[int] = []
    kept: list[np.ndarray] = []
    errors: dict[int, ContractError] = {}
    i_row = 0
    for i_window, window in enumerate(windows):
        last = i_row + window.n_rows - 1
        if window.draw and status[last]:
            errors[i_window] = nan_logit(window.sequence, window.sequence.position - 1)
        tokens.append(int(drawn[last]) if window.draw and i_window not in errors else -1)
        if window.logits:
            kept.append(rank.read_logits(i_row + window.skip, window.n_rows - window.skip))
        i_row += window.n_rows
    return RoundResult(tokens, np.concatenate(kept) if kept else None, errors)
