"""Lists of logit edits: what the device must know of a sequence before it draws from edited logits.

    host     ids of prompt and output ------> head and list of the slot, before the sequence's first draw
    device   row at position p: p is counted as output, logits edited, drawn from, raw ones put back

Called by round.py, chunk.py and decode.py around their launches.  What must stay true: a list says what the
sequence's ids up to the drawing row say, whoever made it; it is sent anew only where the tokens since the
last draw were not the row's one.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ..kernels.tables import EDIT, EDITS, SEEN_ONE, SEEN_PROMPT, SEEN_STOP
from .rank import Rank
from .sequence import Sequence

__all__ = ["edit_list", "place_edits"]


def place_edits(rank: Rank, drawing: Iterable[tuple[Sequence, int]]) -> bool:
    """Whether one of the sequences edits; then its list is on the device, in front of what is launched next.

    drawing: each sequence that draws, and how many of its ids stand at or before the row it draws from.
    """
    edits = False
    for sequence, end in drawing:
        if not sequence.edits.active:
            continue
        edits = True
        if not sequence.lists(end - 1):  # the kernel counts the row's own token
            head, entries = edit_list(sequence, end)
            sequence.listed = None  # unknown if the copy fails
            with rank.ctx.active():
                rank.tables.put_edits(rank.stream, sequence.i_slot, head, entries)
            sequence.listed = (sequence.edits, end)
    return edits


def edit_list(sequence: Sequence, end: int) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
    """((1,) EDITS, (n,) EDIT by rising id) of a sequence whose first `end` ids are in its list."""
    edits = sequence.edits
    n_prompt = end if sequence.n_prompt is None else sequence.n_prompt
    ids = np.array(sequence.ids[:end], np.int64)
    prompt = np.unique(ids[:n_prompt]) if edits.repetition != 1.0 else ids[:0]
    output, counts = np.unique(ids[n_prompt:], return_counts=True)
    stops = np.array(edits.stop_ids if edits.min_new_tokens else (), np.int64)
    biased = np.array([token for token, _ in edits.bias], np.int64)
    every = np.unique(np.concatenate([prompt, output, stops, biased]))
    entries = np.zeros(len(every), EDIT)
    entries["id"] = every
    entries["seen"][np.searchsorted(every, prompt)] |= SEEN_PROMPT
    entries["seen"][np.searchsorted(every, stops)] |= SEEN_STOP
    entries["seen"][np.searchsorted(every, output)] += (SEEN_ONE * counts).astype(np.uint32)
    entries["bias"][np.searchsorted(every, biased)] = [bias for _, bias in edits.bias]
    head = np.zeros(1, EDITS)
    last_of_prompt = sequence.first_position + n_prompt - 1
    head["n_entries"], head["counted"] = len(every), sequence.first_position + end
    head["stops_from"] = last_of_prompt + edits.min_new_tokens
    for name in ("repetition", "presence", "frequency"):
        head[name] = getattr(edits, name)
    return head, entries
