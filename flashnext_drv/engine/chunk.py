"""One chunk of prompt rows through the deep pass: windows of several sequences in one walk, then the head
for the rows that were asked for.

Called by engine/prefill.py with a Rank that has its deep pass.  What must stay true: every row's bytes, and
the states left behind, are those of serial decode; a driver error inside leaves the chunk's sequences fit for
closing only, and touches no other sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as List

import numpy as np
import numpy.typing as npt

from ..drv.memory import copy_async
from ..errors import ContractError, DriverError, UsageError
from ..model.layout import bucket_of
from ..state.deep import ChunkRun
from .deep import DeepPass
from .edits import place_edits
from .rank import HEAD, HEAD_EDITS, Rank
from .round import (
    EMIT_DRAW,
    EMIT_LOGITS,
    RoundResult,
    Window,
    check_windows,
    emit_of_draw,
    nan_logit,
    set_sampling,
)

__all__ = ["Sink", "run_chunk"]

# i_window, first row inside the window, (rows, V) float32
Sink = Callable[[int, int, npt.NDArray[np.float32]], None]
_Asked = tuple[int, int, int, int]  # i_window, row inside it, row of the chunk, emit flags


def run_chunk(
    rank: Rank, windows: List[Window], sink: Sink | None = None, *, apart: bool = False
) -> RoundResult:
    """Advance every window's sequence by its rows, all in one walk; windows and `apart` as in `run_round`.

    sink: takes logits block by block as they come; without it they are in the result.
    Raises as `run_round`, and UsageError when there is no deep pass or the rows are more than it holds.
    """
    deep = rank.deep
    n_rows = sum(window.n_rows for window in windows)
    if deep is None:
        raise UsageError("the deep pass is not there", because=rank.deep_refused, do="use run_round")
    if not windows or n_rows > deep.layout.rows:
        raise UsageError("a chunk holds 1 row to the rows of the deep buffers", rows=n_rows,
                         limit=deep.layout.rows, do="cut the prompt into more chunks")
    check_windows(windows, rank.layout.config.vocab)
    eos = rank.layout.config.eos_id
    runs = []
    for window in windows:
        sequence = window.sequence
        rank.pages.reserve(sequence.i_slot, sequence.position + window.n_rows)
        set_sampling(rank, sequence)
        tokens = sequence.next_tokens(window.n_rows, eos)
        runs.append(ChunkRun(sequence.i_slot, sequence.position, tokens))
    if deep.ngram is not None:
        with rank.ctx.active():
            deep.ngram.gather(runs)
    kept: list[npt.NDArray[np.float32]] = []
    taken = sink or (lambda i_window, first, block: kept.append(block))
    try:
        _walk(rank, deep, runs)
        for window in windows:
            window.sequence.n_done += window.n_rows
    except BaseException as error:  # some launches may have run: no state is where n_done says
        for window in windows:
            window.sequence.fail(error)
        raise
    try:
        tokens_drawn, errors = _emit(rank, deep, windows, runs, taken)
    except DriverError as error:
        for window in windows:
            window.sequence.fail(error)
        raise
    return RoundResult(tokens_drawn, np.concatenate(kept) if kept else None, errors).checked(apart)


def _walk(rank: Rank, deep: DeepPass, runs: List[ChunkRun]) -> None:
    """Slots and pages reach the device with decode's tables, whose rows are none now."""
    tables = rank.tables
    tables.round[0]["n_rows"] = tables.round[0]["n_runs"] = 0
    with rank.ctx.active():
        tables.publish(rank.stream)
        deep.forward(runs, rank.observer, rank.use_graphs)


def _emit(
    rank: Rank, deep: DeepPass, windows: List[Window], runs: List[ChunkRun], sink: Sink
) -> tuple[list[int], dict[int, ContractError]]:
    """Head and draws of the rows asked for, as many at a time as decode's scratch holds."""
    drawn = [-1] * len(windows)
    errors: dict[int, ContractError] = {}
    for block in _blocks(list(_asked(windows)), rank.layout.rows_cap):
        _place(rank, deep, block)
        _head_rows(rank, runs, block)
        drawing = [windows[i_window].sequence for i_window, _, _, emit in block if emit & EMIT_DRAW]
        edits = place_edits(rank, [(sequence, sequence.n_done) for sequence in drawing])
        rank.forward(HEAD_EDITS if edits else HEAD, bucket_of(len(block)))
        for sequence in drawing:
            sequence.drew(sequence.n_done)
        tokens, status = rank.read_draws()
        for i, (i_window, row, _, emit) in enumerate(block):
            if not emit & EMIT_DRAW:
                continue
            if status[i]:
                errors[i_window] = nan_logit(windows[i_window].sequence, runs[i_window].first_position + row)
            else:
                drawn[i_window] = int(tokens[i])
        for first, n in _together(block):
            if block[first][3] & EMIT_LOGITS:
                sink(block[first][0], block[first][1], rank.read_logits(first, n))
    return drawn, errors


def _asked(windows: List[Window]) -> Iterator[_Asked]:
    start = 0
    for i_window, window in enumerate(windows):
        last = window.n_rows - 1
        for row in range(window.skip if window.logits else last, window.n_rows):
            emit = EMIT_LOGITS if window.logits else 0
            if window.draw and row == last:
                emit |= emit_of_draw(window.sequence)
            if emit:
                yield i_window, row, start + row, emit
        start += window.n_rows


def _blocks(asked: list[_Asked], size: int) -> Iterator[list[_Asked]]:
    for first in range(0, len(asked), size):
        yield asked[first : first + size]


def _together(block: List[_Asked]) -> Iterator[tuple[int, int]]:
    """(first, count) of the block's pieces whose rows are neighbours of one window."""
    first = 0
    for i in range(1, len(block) + 1):
        if i == len(block) or block[i][0] != block[first][0] or block[i][2] != block[i - 1][2] + 1:
            yield first, i - first
            first = i


def _place(rank: Rank, deep: DeepPass, block: List[_Asked]) -> None:
    """Copy what the head reads of the block's rows into decode's scratch, row i to place i."""
    c = rank.layout.config
    widths = {
        "streams": c.n_streams * c.hidden * 4,
        "y": c.hidden * 4,
        "inject": c.n_streams * 4,
    }
    for first, n in _together(block):
        row = block[first][2]
        for name, width in widths.items():
            source = deep.spans[f"d_{name}"].sub(row * width, n * width)
            copy_async(rank.stream, rank.work[name].sub(first * width, n * width), source, n * width)


def _head_rows(rank: Rank, runs: List[ChunkRun], block: List[_Asked]) -> None:
    tables = rank.tables
    tables.round[0]["n_rows"], tables.round[0]["n_runs"] = len(block), 0
    tables.round[0]["rows_cap"] = bucket_of(len(block))
    for i, (i_window, row, _, emit) in enumerate(block):
        run = runs[i_window]
        prev2, prev1, token = (int(each) for each in run.tokens[row : row + 3])
        tables.rows[i] = (run.slot, 0, token, run.first_position + row, prev1, prev2, emit, i)
