"""The driver calls of a deep pass with a ring, as check/happens.py wants them: what each launch and the host
read and write of staging, tables and lines."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from flashnext_drv.check.happens import Access, Recorder
from flashnext_drv.engine.engine import Engine
from flashnext_drv.kernels.tables import CACHE, FILL, TILE

Grid = tuple[int, int, int]


class _Reads:
    """What launches of the walk touch, told from their arguments and from what stands in the staging.

    The bytes that a launch wants are named by the layer that its moe_plan_scan began.
    """

    def __init__(self, engine: Engine) -> None:
        deep = engine.rank.deep
        assert deep is not None and deep.ring is not None
        self.ring, self.spans, self.store = deep.ring, deep.spans, engine.rank.experts
        self.n_layers, self.n_experts = engine.config.n_layers, engine.config.n_experts
        self.tile_bytes = self.spans["d_tiles"].size_bytes
        self.i_layer = -1
        self.image = next(s for s in self.ring._staging.spans if s.name == "image")
        banks = self.ring.arena.spans
        self.banks = (banks[0].address, banks[-1].address + banks[-1].size_bytes)
        self.batches = 0  # of launches that read a bank

    def plan(self, args: Mapping[str, int], _: Grid) -> list[Access]:
        self.i_layer = (self.i_layer + 1) % self.n_layers
        return [Access(args["tiles"], self.tile_bytes, True), Access(args["n_tiles"], 4, True)]

    def push(self, args: Mapping[str, int], _: Grid) -> list[Access]:
        cache = np.frombuffer(ctypes.string_at(args["cache"], CACHE.itemsize), CACHE)[0]
        fill = np.frombuffer(ctypes.string_at(args["fills"], FILL.itemsize), FILL)[0]
        assert cache["n_fills"] == 1
        moved = int(fill["bytes"])
        return [Access(args["cache"], CACHE.itemsize), Access(args["fills"], FILL.itemsize),
                Access(int(fill["from"]), moved), Access(int(fill["to"]), moved, True)]

    def batch(self, args: Mapping[str, int], _: Grid) -> list[Access]:
        i_batch = (args["n_tiles"] - self.spans["d_batch_n"].address) // 4
        first = (args["tiles"] - self.spans["d_batch_tiles"].address) // TILE.itemsize
        n = int(self.ring._batch_n[i_batch])
        found = [Access(args["n_tiles"], 4), Access(args["tiles"], n * TILE.itemsize)]
        experts = sorted(set(self.ring._tiles[first : first + n, 0].tolist()) - {self.n_experts})
        line_bytes = self.spans["d_lines"].size_bytes // (self.n_experts + 1)
        found += [Access(args["lines"] + e * line_bytes, line_bytes) for e in experts]
        for expert in experts:
            start, (home, _, size) = int(self.ring._lines[expert, 0]), self.store.home(self.i_layer, expert)
            in_bank = self.banks[0] <= start < self.banks[1]
            found.append(Access(start, size, holds=home if in_bank else None))
            self.batches += in_bank
        return found

    def host_plan(self) -> list[Access]:
        tiles, n_tiles = (self.spans[name].address for name in ("d_tiles", "d_n_tiles"))
        return [Access(tiles, self.tile_bytes), Access(n_tiles, 4)]

    def host_write(self) -> list[Access]:
        push = [self.spans[name] for name in ("push_cache", "push_fill")]
        return [Access(span.address, span.size_bytes, True) for span in (self.image, *push)]


@contextmanager
def recorded(engine: Engine) -> Iterator[tuple[Recorder, _Reads]]:
    """Record the driver calls made inside, on this thread."""
    reads = _Reads(engine)
    expand = {"moe_plan_scan": reads.plan, "line_fill": reads.push}
    expand |= {f"moe_deep_{name}": reads.batch for name in ("input", "gu", "down")}
    recorder = Recorder(engine.rank.ctx.function_names, expand)
    ring: Any = reads.ring

    def noted(name: str, text: str, accesses: Any) -> None:
        real = getattr(ring, name)

        def call(*args: Any) -> Any:
            recorder.host(text, *accesses())
            return real(*args)

        setattr(ring, name, call)

    noted("_read_plan", "read the plan", reads.host_plan)
    noted("_write", "write lines and tiles", reads.host_write)
    try:
        with recorder.on():
            yield recorder, reads
    finally:
        del ring._read_plan, ring._write
