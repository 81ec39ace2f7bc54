"""Device memory of the deep prompt pass: its tables of a chunk's rows, its descriptors and its scratch.

Owned by engine/deep.py; geometry: model/deep_layout.py.  What must stay true: everything lies at fixed
addresses while this lives, so launches keep their arguments; a chunk sees exactly the rows of the last
publish before it on the same stream; a staging half is written again after the event of its last copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..drv.context import Context
from ..drv.memory import DeviceArena, PinnedArena, Span, copy_async, copy_to_device
from ..drv.stream import Event, Stream
from ..kernels import tables as t
from ..lifetime import Owner, Undo
from ..model.deep_layout import DeepLayout
from .tables import DeviceTables
from .weights import WeightStore

__all__ = ["ChunkRun", "DeepBuffers"]

_WORDS = t.ROW.itemsize // 4
_COLUMN = {name: i for i, name in enumerate(t.ROW.names or ())}


@dataclass(frozen=True)
class ChunkRun:
    """Consecutive tokens of one sequence.  tokens: (2 + n,) ids, the two before the first one in front."""

    slot: int
    first_position: int
    tokens: npt.NDArray[np.int64]

    @property
    def n_rows(self) -> int:
        return len(self.tokens) - 2


class DeepBuffers(Owner):
    """Owns the arena "deep" and the pinned arena "deep.staging".

    spans: by the names that model/deep_steps.py uses; "round", "rows" and "runs" are the chunk's own.
    """

    def __init__(
        self,
        ctx: Context,
        stream: Stream,
        deep: DeepLayout,
        tables: DeviceTables,
        weights: WeightStore,
        guard: bool = False,
    ) -> None:
        super().__init__("deep.buffers", holds=(ctx, tables, weights))
        self._deep, self._tables = deep, tables
        self.spans: dict[str, Span] = {}
        size = deep.sizes["tables"]
        with Undo() as undo:
            self._arena = DeviceArena(ctx, "deep", deep.size_bytes(guard), guard=guard)
            undo.callback(self._arena.close)
            for name, span_bytes in deep.sizes.items():
                self.spans[name] = self._arena.span(name, span_bytes)
            self._staging = PinnedArena(ctx, "deep.staging", 2 * size)
            undo.callback(self._staging.close)
            self._halves: list[tuple[Span, npt.NDArray[np.uint8], Event]] = []
            for i_half in range(2):
                span = self._staging.span(f"half{i_half}", size)
                event = Event(ctx, f"deep.half{i_half}")
                undo.callback(event.close)
                self._halves.append((span, self._staging.host(span), event))
            for outer, places in (("tables", deep.tables), ("shared", deep.shared), ("ring", deep.ring)):
                for name, (at, part) in places.items():
                    self.spans[name] = self.spans[outer].sub(at, part, f"deep.{name}")
            self._describe(stream, weights)
            self._undo = undo.pop_all()
        self._used = [False, False]
        self._i_half = 0

    @property
    def arena(self) -> DeviceArena:
        return self._arena

    def publish(self, stream: Stream, runs: Sequence[ChunkRun], bucket: int) -> int:
        """Make `runs` the chunk's rows, in this order, in one ordered copy; returns the bytes copied.

        bucket: rows of the launch grids.  The runs hold at most as many rows, each sequence once.
        """
        span, host, event = self._halves[self._i_half]
        if self._used[self._i_half]:
            event.synchronize()
        end = self._write(host, runs, bucket)
        copy_async(stream, self.spans["tables"].address, span.address, end)
        stream.record(event)
        self._used[self._i_half] = True
        self._i_half ^= 1
        return end

    def _write(self, host: npt.NDArray[np.uint8], runs: Sequence[ChunkRun], bucket: int) -> int:
        """Fill a staging half; returns the bytes of it that count."""
        n_rows = sum(run.n_rows for run in runs)
        version = int(self._tables.round[0]["version"])
        self._view(host, "round", t.ROUND)[0] = (n_rows, len(runs), bucket, version)
        table = self._view(host, "runs", t.RUN)
        words = host[self._deep.tables["rows"][0] :][: n_rows * t.ROW.itemsize].view("<u4")
        rows = words.reshape(n_rows, _WORDS)
        first = 0
        for i_run, run in enumerate(runs):
            end = first + run.n_rows
            table[i_run] = (run.slot, first, run.n_rows, run.first_position)
            part = rows[first:end]
            part[:, _COLUMN["slot"]] = run.slot
            part[:, _COLUMN["run"]] = i_run
            part[:, _COLUMN["token"]] = run.tokens[2:]
            part[:, _COLUMN["position"]] = np.arange(run.first_position, run.first_position + run.n_rows)
            part[:, _COLUMN["prev1"]] = run.tokens[1:-1]
            part[:, _COLUMN["prev2"]] = run.tokens[:-2]
            part[:, _COLUMN["emit"]] = 0
            part[:, _COLUMN["i_out"]] = np.arange(first, end)
            first = end
        return self._deep.tables["rows"][0] + n_rows * t.ROW.itemsize

    def _view(self, host: npt.NDArray[np.uint8], name: str, dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
        at, size = self._deep.tables[name]
        return host[at : at + size].view(dtype)

    def _describe(self, stream: Stream, weights: WeightStore) -> None:
        """Store every group's descriptors, each as span `<group>.deep`."""
        image = np.zeros(self._deep.sizes["linears"], np.uint8)
        for name, rows in weights.describe_deep(self._deep, self.spans).items():
            at, size = self._deep.linears[name]
            image[at : at + size] = rows.view(np.uint8).reshape(-1)
            self.spans[f"{name}.deep"] = self.spans["linears"].sub(at, size, f"{name}.deep")
        copy_to_device(stream, self.spans["linears"], image)

    def _release(self) -> None:
        self._undo.close()
