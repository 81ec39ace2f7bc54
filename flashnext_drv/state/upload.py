"""Bytes of a pack into device or pinned memory: read, staged and copied, or made in place by the fill kernel.

Used by weights.py, experts.py and store.py while a rank opens.  What must stay true: a staging half is
written again only after the event of its last copy; after `finish` every byte is in place.  A synthetic
pack's large tensors are never made on the host: the kernel `synth_fill` writes the same bytes straight into
the destination.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..drv.context import Context
from ..drv.memory import PinnedArena, copy_async
from ..drv.stream import Event, Stream
from ..kernels.bind import Kernels
from ..lifetime import Owner, Undo
from ..model.fill import FillRule
from ..model.pack import PackBase

__all__ = ["Uploader"]

HALF_BYTES = 32 << 20
FILL_ELEMENTS = 1 << 36  # of one fill launch
SMALL_BYTES = 1 << 10  # below this a fill kernel's launch costs more than making the bytes on the host


class Uploader(Owner):
    """Owns two pinned staging halves.  progress: called with the bytes placed since the last call."""

    def __init__(
        self,
        ctx: Context,
        stream: Stream,
        kernels: Kernels,
        pack: PackBase,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__("upload", holds=(ctx, stream, kernels))
        self._stream, self._kernels, self._pack, self._progress = stream, kernels, pack, progress
        with Undo() as undo:
            self._arena = PinnedArena(ctx, "upload.staging", 2 * HALF_BYTES)
            undo.callback(self._arena.close)
            spans = [self._arena.span(f"half{i}", HALF_BYTES) for i in range(2)]
            self._halves = [(span.address, self._arena.host(span)) for span in spans]
            self._events: list[Event] = []
            for i in range(2):
                event = Event(ctx, f"upload.half{i}")
                undo.callback(event.close)
                self._events.append(event)
            self._undo = undo.pop_all()
        self._used = [False, False]
        self._i_half, self._at = 0, 0

    def tensor(self, address: int, name: str) -> None:
        """Place all bytes of tensor `name` at a device-visible address."""
        if self.made(address, name):
            return
        size = self._pack.tensor(name).size
        for first in range(0, size, HALF_BYTES):
            part = min(HALF_BYTES, size - first)
            self._pack.read_into(name, self._stage(part), first)
            self._send(address + first, part)
        self.told(size)

    def made(self, address: int, name: str) -> bool:
        """Whether kernel synth_fill makes the bytes of tensor `name` at a device-visible address; else they
        must be read."""
        size = self._pack.tensor(name).size
        rule = self._pack.fill_plan(name)
        if rule is None or size < SMALL_BYTES:
            return False
        self._fill(address, size, rule)
        self.told(size)
        return True

    def array(self, address: int, values: npt.NDArray[np.generic]) -> None:
        """Place an array's bytes at a device-visible address."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        for first in range(0, data.size, HALF_BYTES):
            part = data[first : first + HALF_BYTES]
            self._stage(part.size)[:] = part
            self._send(address + first, part.size)
        self.told(data.size)

    def finish(self) -> None:
        """Wait until everything placed so far is there."""
        self._stream.synchronize()
        self._used = [False, False]

    def _stage(self, size: int) -> npt.NDArray[np.uint8]:
        """The next `size` free bytes of staging, a multiple of 256 apart."""
        if self._at + size > HALF_BYTES:
            self._stream.record(self._events[self._i_half])
            self._used[self._i_half] = True
            self._i_half ^= 1
            self._at = 0
            if self._used[self._i_half]:
                self._events[self._i_half].synchronize()
        return self._halves[self._i_half][1][self._at : self._at + size]

    def _send(self, address: int, size: int) -> None:
        copy_async(self._stream, address, self._halves[self._i_half][0] + self._at, size)
        self._at += -(-size // 256) * 256

    def _fill(self, address: int, size: int, rule: FillRule) -> None:
        count = size // 2
        for first in range(0, count, FILL_ELEMENTS):
            part = min(FILL_ELEMENTS, count - first)
            self._kernels.launch(
                "synth_fill", -(-(part + 7) // 2048), dst=address + 2 * first, **rule.arguments(first, part)
            ).run(self._stream)

    def told(self, size: int) -> None:
        """Tell the caller of the engine that `size` more bytes are placed."""
        if self._progress is not None:
            self._progress(size)

    def _release(self) -> None:
        self._undo.close()
