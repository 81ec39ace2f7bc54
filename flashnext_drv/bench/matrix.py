"""The matrix: prompt lengths by first, repeated and concurrent, on every number of expert lines, eager and by
graph; widths; long prompts together.

Called by cli/bench.py, which starts a server for each number of lines.  What must stay true: one set of
requests goes through all legs, so every reply is held to its solo run, to the plain (eager) one and to every
other number of lines; a leg that was not run is a reason against the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from .client import Ask, ask, each_alone, together
from .evidence import joined_replies, verdict
from .inputs import asks, prompt_ids
from .site import Notes, Site

__all__ = ["MATRIX", "Cells", "Lines", "join_parts", "leg_names", "plain", "run_matrix"]

Lines = int | None  # expert lines a layer; None: all experts on the device
Serve = Callable[[Lines], AbstractContextManager[Site]]


@dataclass(frozen=True)
class Cells:
    """What is asked for in each leg.

    lengths, new_tokens: first, repeated and `together` concurrent ones of each length.  widths, width_length,
    width_tokens: so many streams at once.  repeats, repeat_tokens: short prompts, several times.  lines: of
    the legs.
    """

    lengths: tuple[int, ...] = (2_048, 8_192, 32_700)
    new_tokens: int = 64
    together: int = 3
    widths: tuple[int, ...] = (1, 2, 4, 8)
    width_length: int = 64
    width_tokens: int = 128
    repeats: int = 3
    repeat_length: int = 31
    repeat_tokens: int = 256
    lines: tuple[Lines, ...] = (16, 72, None)
    modes: tuple[str, ...] = ("graph", "eager")

    @property
    def context_tokens(self) -> int:
        """The longest sequence of any cell."""
        return max(max(self.lengths) + self.new_tokens, self.width_length + self.width_tokens,
                   self.repeat_length + self.repeat_tokens)

    @property
    def streams(self) -> int:
        return max(self.together, *self.widths)


MATRIX: Final = Cells()


def run_matrix(serve: Serve, cells: Cells = MATRIX, *, salt: int = 2000) -> dict[str, Any]:
    """All legs, one server after the other.  With fewer legs or other sizes than MATRIX it is a
    "matrix-part"; `join_parts` makes the whole of parts."""
    notes: Notes | None = None
    legs = []
    for lines in cells.lines:
        with serve(lines) as site:
            if notes is None:
                notes = Notes(site)
            notes.site = site
            for mode in cells.modes:
                site.switch(mode)
                leg = f"{_name(lines)} {mode}"
                found = _leg(site, notes, cells, leg, salt)
                legs.append({"lines": _name(lines), "mode": mode, "cells": found})
                site.say(f"lines {leg}: {notes.checks}")
    if notes is None:
        return {"kind": "matrix-part", "verdict": verdict(["no leg was run"]).as_dict(), "legs": []}
    return notes.result("matrix" if cells == MATRIX else "matrix-part", cells=plain(cells), legs=legs)


def join_parts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result of several: a "matrix" when every leg of MATRIX is there with its sizes; each request must
    have the same hash in all of them."""
    reasons = [f"part {i}: {reason}" for i, part in enumerate(parts) for reason in part["verdict"]["reasons"]]
    legs = [leg for part in parts for leg in part["legs"]]
    there = [(leg["lines"], leg["mode"]) for leg in legs]
    for leg in dict.fromkeys([*leg_names(MATRIX), *there]):
        n = there.count(leg)
        if leg not in leg_names(MATRIX) or n != 1:
            reasons.append(f"{n or 'no'} leg{'s' if n > 1 else ''} with lines {leg[0]}, {leg[1]}")
    own, wanted = {"lines", "modes"}, plain(MATRIX)
    reasons += [f"part {i} has {name} {part['cells'].get(name)}" for i, part in enumerate(parts)
                for name in wanted.keys() - own if part["cells"].get(name) != wanted[name]]
    checks, differ = joined_replies(parts)
    return {"kind": "matrix", "verdict": verdict([*reasons, *differ]).as_dict(), "legs": legs,
            "checks": checks, "cells": wanted, "replies": [r for part in parts for r in part["replies"]]}


def leg_names(cells: Cells) -> list[tuple[str, str]]:
    """(lines, mode) of every leg, as results have them."""
    return [(_name(lines), mode) for lines in cells.lines for mode in cells.modes]


def plain(cells: Cells) -> dict[str, Any]:
    """As JSON has it."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(cells).items()}


def _leg(site: Site, notes: Notes, cells: Cells, leg: str, salt: int) -> list[dict[str, Any]]:
    replays, out = site.mode == "graph", []
    for k, length in enumerate(cells.lengths):
        inputs = asks([length] * cells.together, site.vocab, cells.new_tokens, salt=salt + 100 * k)
        for state in ("first", "repeated"):
            made = notes.take(f"{leg} {length} {state}", ask(site.target, inputs[0]), replays=replays)
            out.append(_cell(length, state, made))
        for i, reply in enumerate(each_alone(site.target, inputs[1:])):
            notes.take(f"{leg} {length} solo {i + 1}", reply, replays=replays)
        wave = notes.wave(f"{leg} {length} x{cells.together}", together(site.target, inputs),
                          replays=replays, decoding=False)  # a long prompt outlasts another's short reply
        out.append({"length": length, "state": "concurrent", **wave})
    out += _widths(site, notes, cells, leg, salt + 50, replays)
    request = Ask(prompt_ids(cells.repeat_length, site.vocab, salt + 90), cells.repeat_tokens)
    for i in range(cells.repeats):
        made = notes.take(f"{leg} {cells.repeat_tokens} outputs {i}", ask(site.target, request),
                          replays=replays)
        out.append(_cell(cells.repeat_length, f"repeat {i}", made))
    return out


def _widths(
    site: Site, notes: Notes, cells: Cells, leg: str, salt: int, replays: bool
) -> list[dict[str, Any]]:
    inputs: Sequence[Ask] = asks([cells.width_length] * max(cells.widths), site.vocab, cells.width_tokens,
                                 salt=salt)
    for i, reply in enumerate(each_alone(site.target, inputs)):
        notes.take(f"{leg} width solo {i}", reply, replays=replays)
    return [{"width": width, **notes.wave(f"{leg} width {width}", together(site.target, inputs[:width]),
                                          replays=replays)} for width in cells.widths]


def _cell(length: int, state: str, made: dict[str, Any]) -> dict[str, Any]:
    return {"length": length, "state": state, "name": made["name"], **made["client"]}


def _name(lines: Lines) -> str:
    return "all" if lines is None else str(lines)
