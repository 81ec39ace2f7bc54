"""What it takes to say that two kernels agree in bytes, or one kernel with several that run in turn.

Used by pairs.py, which runs them, and by pairs_<family>.py, which say how the operands of one kernel become
those of others.  What must stay true: nothing here is of one kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels.spec import Case, KernelSpec
from .contract import Operands, Ran

__all__ = ["Expected", "Pair", "Then", "Turned", "as_it_is", "few_rows", "follow", "same_operands"]

Expected = list[tuple[str, NDArray[Any], NDArray[Any]]]  # name, by the first kernel, by the others
# operands of the other kernel, and what to compare after its side's last run; None where it does not accept
# the case
Turned = tuple[Operands, Callable[[Ran], Expected]] | None


@dataclass(frozen=True)
class Then:
    """One more kernel of a side, run after those before it.  operands: from those of the side's first kernel
    and from how the launch before ended; `follow` makes the usual ones."""

    kernel: str
    operands: Callable[[Operands, Ran], Operands]


@dataclass(frozen=True)
class Pair:
    """`kernel` gives the bytes of `other`; either side may be several kernels, one after the other.

    turn: from the case and operands of `kernel`, and from this side's last run, the operands of `other` and
    what to compare after the other side's last run.  more: what follows `kernel`.  then: what follows
    `other`.
    """

    kernel: str
    other: str
    turn: Callable[[Case, Operands, Ran], Turned]
    more: tuple[Then, ...] = ()
    then: tuple[Then, ...] = ()

    @property
    def last(self) -> str:
        """The other side's last kernel: what `replaces` names."""
        return self.then[-1].kernel if self.then else self.other

    def __str__(self) -> str:
        return " + ".join((self.other, *(one.kernel for one in self.then)))


def follow(
    given: Operands, ran: Ran, grid: tuple[int, int, int], scalars: dict[str, int | float] | None = None
) -> Operands:
    """Operands of a kernel that goes on where a launch ended: its arrays as that launch left them.

    Arrays with addresses in them keep their first bytes: the addresses were of that launch.
    """
    tables = {table for table, *_ in given.relocations}
    arrays = {name: array if name in tables else ran.found[name] for name, array in given.arrays.items()}
    return replace(given, arrays=arrays, grid=grid, scalars=scalars or {})


def as_it_is(case: Case, given: Operands, ran: Ran) -> Turned:
    """The other kernel takes the same operands."""
    return given, lambda other: [(name, ran.found[name], other.found[name]) for name in ran.names]


def same_operands(spec: KernelSpec, other: KernelSpec) -> bool:
    """Whether both take arguments of the same names and kinds."""
    return [(a.name, a.kind) for a in spec.args] == [(a.name, a.kind) for a in other.args]


def few_rows(given: Operands, most: int) -> NDArray[np.int64]:
    """Up to `most` of the live rows, spread from the first to the last; empty where none is live."""
    n = int(given.arrays["round"]["n_rows"][0])
    return np.unique(np.arange(min(n, most)) * (n - 1) // max(min(n, most) - 1, 1))
