"""The rows of a moe_deep case, their routes to experts, and the plan that sorts them.

Owns: which expert each slot of a row goes to, and the tables that the plan's kernels write.  Called by
cases_moe_deep.py and cases_moe_tiles.py.  What must stay true: the plan is that of ref/moe_deep.py, so a
kernel is given what the ones before it would have written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels.moe_deep import deep_pairs
from ..kernels.spec import Case
from ..kernels.tables import LINE, ROUTE, TILE, exl3_format
from ..ref.moe_deep import plan
from .contract import bits, poison
from .operands import field_at, round_table, signed

__all__ = ["Layer"]

Arrays = dict[str, NDArray[Any]]


class Layer:
    """Routes of a case's rows, their plan, and the tables of it that kernels read."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.seed = case, seed
        self.rows, self.cap = case.int("rows"), case.int("rows_cap")
        self.n_experts, self.n_slots = case.int("n_experts"), case.int("n_active") + 1
        self.special = str(case.dims.get("special", ""))
        self.pairs_cap, self.tiles_cap = deep_pairs(self.cap, self.n_slots, self.n_experts)
        self.routes = poison((self.cap, self.n_slots), ROUTE)
        live = self.routes[: self.rows]
        live["expert"] = self._experts()
        live["weight"] = np.abs(signed(seed, "weights", live.shape, 1.0))
        if self.special == "nonfinite":
            live["weight"][1, 2] = np.nan
        self.plan = plan(live["expert"], self.n_experts)
        self.round = round_table(self.rows, self.cap)

    def _experts(self) -> NDArray[np.uint32]:
        """(rows, n_slots) different experts of each row in rising id, the shared one last."""
        out = np.full((self.rows, self.n_slots), self.n_experts, np.uint32)
        if self.case["members"]:
            counts = [int(n) for n in str(self.case["members"]).split(",")]
            assert sum(counts) == self.rows * (self.n_slots - 1) and max(counts) <= self.rows
            order = np.argsort(bits(self.seed, "order", self.rows), kind="stable")
            # experts one after another on rows that follow each other round and round: once a row each
            turn = np.repeat(np.arange(len(counts)), counts).reshape(-1, self.rows)
            out[order, :-1] = np.sort(turn.T, axis=1)
            return out
        keys = bits(self.seed, "routes", (self.rows, self.n_experts))
        if self.special == "low_ids":  # all chosen experts in one leaf
            keys = keys // np.uint32(2)
            keys[:, self.n_experts // 8 :] += np.uint32(1 << 31)
        out[:, :-1] = np.sort(np.argsort(keys, axis=1, kind="stable")[:, : self.n_slots - 1], axis=1)
        return out

    def by_block(self, values: NDArray[np.int64]) -> NDArray[np.uint32]:
        """(rows_cap / 128, E + 1) words, poison in blocks without rows."""
        out = poison((self.cap // 128, self.n_experts + 1), np.uint32)
        out[: len(values)] = values
        return out

    def tables(self) -> Arrays:
        """round, tiles, n_tiles, pair_of as the plan's kernels leave them."""
        tiles = poison(self.tiles_cap, TILE)
        for i, (expert, first, n_rows) in enumerate(self.plan.tiles):
            tiles[i] = (expert, first, n_rows, 0)
        n_tiles = len(self.plan.tiles)
        if self.special == "stale_tiles":
            tiles[0], n_tiles = (0, 0, 5, 0), 1
        return {
            "round": self.round,
            "tiles": tiles,
            "n_tiles": np.array([n_tiles], np.uint32),
            "pair_of": self.pair_of(),
        }

    def pair_of(self) -> NDArray[np.uint32]:
        out = poison(self.pairs_cap, np.uint32)
        for position, pair in self.plan.pair_of.items():
            out[position] = pair
        return out

    def pair_at(self) -> NDArray[np.uint32]:
        out = poison((self.cap, self.n_slots), np.uint32)
        out[: self.rows] = self.plan.pair_at
        return out

    def pairs(self) -> list[tuple[int, int, int, int]]:
        """(position, row, slot, expert) of every pair, in sorted order."""
        return [
            (
                at,
                pair // self.n_slots,
                pair % self.n_slots,
                int(self.routes["expert"][pair // self.n_slots, pair % self.n_slots]),
            )
            for at, pair in self.plan.pair_of.items()
        ]

    def padding(self) -> list[int]:
        """Positions at which no pair stands."""
        return [at for at in range(self.pairs_cap) if at not in self.plan.pair_of]

    def scales(self, part: str, expert: int, size: int) -> NDArray[np.float16]:
        """suh or svh of one projection: "gate_suh" ... "down_svh"."""
        return signed(self.seed, f"{part}{expert}", (size,), 2.0).astype(np.float16)

    def line_table(self, *parts: str, size: int) -> tuple[Arrays, list[tuple[str, int, str, int]]]:
        """The line table (width 128, mul1 of 3 bits), the used experts' scales, and where these go."""
        lines = np.zeros(self.n_experts + 1, LINE)
        lines["width"] = 128
        for projection in ("gate", "up", "down"):
            lines[projection]["format"] = exl3_format(3, "mul1")
        used = sorted({expert for *_, expert in self.pairs()} or {0})
        arrays: Arrays = {"lines": lines}
        moves = []
        for part in parts:
            arrays[part] = np.stack([self.scales(part, e, size) for e in used])
            moves += [
                (
                    "lines",
                    e * LINE.itemsize + field_at(LINE, *part.split("_")),
                    part,
                    i * arrays[part].strides[0],
                )
                for i, e in enumerate(used)
            ]
        return arrays, moves
