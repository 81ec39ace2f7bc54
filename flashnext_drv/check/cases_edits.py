"""Contract cases of edit_logits: lists of every kind beside rows that edit nothing.

Called by cases_token.py.  What must stay true: heads, entries and logits are compared whole, bit for bit,
with what ref/edits.py makes of the same ones; rows, slots and entries that take no part are poison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.spec import Case
from ..kernels.tables import EDIT, EDITS, ROW, SEEN_ONE, SEEN_PROMPT, SEEN_STOP
from ..ref import edits as ref
from .contract import Operands, bits, poison
from .operands import round_table, same_bits, signed

__all__ = ["BUILDERS"]

Arrays = dict[str, NDArray[Any]]
_EMIT: Final = {"n": 2, "e": 5}  # a draw from raw logits; edits, and no draw asked


def _edit(case: Case, seed: int) -> Operands:
    """dims["what"]: a letter a row.  c its token is counted and has an entry; a it is counted and has none;
    k, x it stands in the list already (x: as the position after); f as a, and the list is full; s, S, t, T
    stop ids before, long before, at and behind the first position that may stop; 0 no entry, 1 one; N NaN
    and infinities among the logits; i, I small integers; n no edits; e no draw.
    """
    what, cap, vocab, room = str(case["what"]), case.int("cap"), case.int("vocab"), case.int("room")
    restore, n_slots = case.int("restore"), cap + 2
    rows = poison((cap,), ROW)
    slots = np.argsort(bits(seed, "slots", n_slots), kind="stable")[: len(what)]
    logits = poison((cap, vocab), np.float32)
    heads, entries = poison((n_slots,), EDITS), poison((n_slots, room), EDIT)
    for r, letter in enumerate(what):
        ids = np.argsort(bits(seed, f"ids {r}", vocab), kind="stable")
        position = 10 + int(bits(seed, f"position {r}", 1)[0] % 1000)
        n = {"0": 0, "1": 1, "f": room}.get(letter, room - 1 - r % 3)
        absent = letter in "af"
        n_used = n - 1 if absent and letter == "a" else n
        token = ids[n_used] if absent or not n_used else ids[n_used - 1 - r % min(n_used, 3)]
        rows[r] = (slots[r], r, token, position, 1, 2, _EMIT.get(letter, 6 + r % 2), r)
        logits[r] = _logits(letter, seed, r, vocab)
        before = {"k": 1, "x": 2}.get(letter, 0)
        heads[slots[r]] = _head(letter, seed, r, n_used, position + before, position)
        entries[slots[r], :n_used] = _entries(letter, seed, r, ids[:n_used])
    tables: Arrays = {"round": round_table(len(what), cap), "rows": rows, "heads": heads, "entries": entries,
                      "logits": logits}
    if restore:  # what the first launch leaves
        ref.edit_logits(tables, room, restore=False)
    want = {name: array.copy() for name, array in tables.items()}
    ref.edit_logits(want, room, restore=bool(restore))

    def expect(got: Arrays) -> None:
        same_bits("edits", got["edits"], _joined(want["heads"], want["entries"]))
        same_bits("logits", got["logits"], want["logits"])

    arrays = {"round": tables["round"], "rows": rows, "edits": _joined(tables["heads"], tables["entries"]),
              "logits": tables["logits"]}
    scalars: dict[str, int | float] = {"vocab": vocab, "cap": room, "restore": restore}
    return Operands(arrays, scalars, (cap, 1, 1), [], ("edits", "logits"), expect)


def _logits(letter: str, seed: int, r: int, vocab: int) -> NDArray[np.float32]:
    values = signed(seed, f"logits {r}", (vocab,), 16.0)
    if letter in "iI":
        values = np.rint(values)
    if letter == "N":
        values[::3] = np.array([np.nan, np.inf, -np.inf], np.float32)[np.arange(len(values[::3])) % 3]
        values.view(np.uint32)[1::7] = 0x7FC00123
    values[4::11] = np.array([0.0, -0.0], np.float32)[r % 2]
    return values.astype(np.float32)


def _head(letter: str, seed: int, r: int, n: int, counted: int, position: int) -> tuple[Any, ...]:
    from_ = {"s": position + 1, "S": position + 1000, "t": position, "T": position - 1}.get(letter, 0)
    how = (2.0, 0.5, 2.0)
    if letter not in "iI":
        how = (1.1 + r % 5 * 0.17, -0.7 + 0.37 * (r % 4), 0.3 - 0.11 * (r % 7))
    return (n, counted, from_, *np.array(how, np.float32), 0, 0)


def _entries(letter: str, seed: int, r: int, ids: NDArray[Any]) -> NDArray[Any]:
    out = np.zeros(len(ids), EDIT)
    kinds, i = bits(seed, f"kinds {r}", len(ids)), np.arange(len(ids))
    out["id"] = ids
    out["seen"] = np.where(kinds % 3 == 0, 0, SEEN_ONE * (kinds >> 8 & 7)) + SEEN_PROMPT * (kinds >> 16 & 1)
    out["seen"][i % 97 == 5] += SEEN_ONE * (1 << 25)  # more than a float holds exactly
    if letter in "sStTN":
        out["seen"] += np.where(i % 4 == 1, SEEN_STOP, 0).astype(np.uint32)
    bias = signed(seed, f"bias {r}", (len(ids),), 4.0)
    out["bias"] = np.where(kinds >> 20 & 1, np.rint(bias) if letter in "iI" else bias, 0)
    out["bias"][i % 13 == 7] = -np.inf
    out["raw"] = poison((len(ids),), np.float32)
    return out


def _joined(heads: NDArray[Any], entries: NDArray[Any]) -> NDArray[np.uint32]:
    """(slots, words): each slot's head with its entries behind it, as the kernel sees them."""
    n = len(heads)
    return np.concatenate([np.ascontiguousarray(each).view(np.uint32).reshape(n, -1)
                           for each in (heads, entries)], axis=1)


BUILDERS: Final[dict[str, Callable[[Case, int], Operands]]] = {"edit_logits": _edit}
