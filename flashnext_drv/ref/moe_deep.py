"""Reference of the plan that sorts a prompt's (row, slot) pairs by expert.

Called by checks of the moe_deep kernels.  What must stay true: it is written pair by pair, with no part of
the kernels' way of doing it; an expert's rows stand in rising order and begin at a multiple of 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK_ROWS", "GROUP", "TILE_ROWS", "Plan", "plan"]

BLOCK_ROWS: Final = 128  # rows that are counted together
TILE_ROWS: Final = 256  # most rows of a tile
LARGE: Final = 128  # tiles with more rows come first
GROUP: Final = 64  # an expert begins at a multiple of this position


@dataclass(frozen=True, eq=False)
class Plan:
    """counts, starts (blocks, E + 1): rows of each block of BLOCK_ROWS that go to an expert, and the sorted
    position of the first of them, or of the next one where there is none.  tiles: (expert, first position,
    rows).  pair_at (rows, n_slots): sorted position.  pair_of: position -> row * n_slots + slot."""

    counts: NDArray[np.int64]
    starts: NDArray[np.int64]
    tiles: tuple[tuple[int, int, int], ...]
    pair_at: NDArray[np.int64]
    pair_of: dict[int, int]


def plan(experts: NDArray[Any], n_experts: int) -> Plan:
    """experts (rows, n_slots): ids up to n_experts (the shared one), each at most once a row."""
    rows, n_slots = experts.shape
    blocks = -(-rows // BLOCK_ROWS)
    counts = np.zeros((blocks, n_experts + 1), np.int64)
    starts = np.zeros_like(counts)
    pair_at = np.zeros((rows, n_slots), np.int64)
    pair_of: dict[int, int] = {}
    tiles: list[tuple[int, int, int]] = []
    position = 0
    for expert in range(n_experts + 1):
        first = position
        for block in range(blocks):
            starts[block, expert] = position
            for row in range(block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, rows)):
                for slot in np.flatnonzero(experts[row] == expert):
                    counts[block, expert] += 1
                    pair_at[row, slot] = position
                    pair_of[position] = row * n_slots + int(slot)
                    position += 1
        tiles += [(expert, at, min(position - at, TILE_ROWS)) for at in range(first, position, TILE_ROWS)]
        position = -(-position // GROUP) * GROUP
    tiles.sort(key=lambda tile: tile[2] <= LARGE)  # stable: experts rise among both
    return Plan(counts, starts, tuple(tiles), pair_at, pair_of)
