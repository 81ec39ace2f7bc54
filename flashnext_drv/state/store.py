"""All routed experts in page-locked host memory, where kernels and the copy engine read them.

Owned by experts.py when a rank offloads.  One pinned arena a layer, all under the owner "experts.store", so
that a layer is pinned while the readers still fill the layers before it.  What must stay true: an expert lies
in the form of lines.py at its id times line_bytes; after `fill` and the stream's work every byte is in place
and never changes; no reader runs once `fill` has returned or raised.

    main thread   | pin L0 | pin L1 | pin L2 | ...          | wait for the rest
    readers                | read the experts of L0, L1, L2 ...        |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from ..drv.context import Context
from ..drv.memory import PinnedArena
from ..lifetime import Owner, Undo
from ..model.pack import PackBase
from .lines import LayerLines, Part, expert_parts
from .upload import Uploader

__all__ = ["OWNER", "PinnedExperts"]

OWNER = "experts.store"
READERS = 8


class PinnedExperts(Owner):
    """Owns the pinned arenas.  layers: the forms of all layers' lines."""

    def __init__(self, ctx: Context, pack: PackBase, layers: Sequence[LayerLines]) -> None:
        super().__init__(OWNER, holds=(ctx,))
        self._ctx, self._pack, self._layers = ctx, pack, layers
        self._arenas: list[PinnedArena] = []
        self._undo = Undo()

    def address(self, i_layer: int, i_expert: int = 0) -> int:
        """The device's address of an expert."""
        return self._arenas[i_layer].address + i_expert * self._layers[i_layer].line_bytes

    def host_address(self, i_layer: int, i_expert: int = 0) -> int:
        """The host's address of an expert."""
        return self._arenas[i_layer].host_address + i_expert * self._layers[i_layer].line_bytes

    def view(self, i_layer: int, i_expert: int) -> npt.NDArray[np.uint8]:
        """(bytes of the expert,) uint8, host.  Not to be touched after close."""
        start = i_expert * self._layers[i_layer].line_bytes
        size = int(self._layers[i_layer].sizes[i_expert])
        view: npt.NDArray[np.uint8] = self._arenas[i_layer].host()[start : start + size]
        return view

    def fill(self, uploader: Uploader) -> None:
        """Pin every layer and place all experts; once.

        Bytes that a kernel makes are in place in the order of the uploader's stream.  Raises CheckpointError
        from the pack and OutOfMemory when memory cannot be pinned; what is pinned by then is given back by
        `close`.
        """
        pool = ThreadPoolExecutor(READERS, "flashnext-experts")
        waiting: deque[Future[int]] = deque()
        try:
            for i_layer, layer in enumerate(self._layers):
                arena = PinnedArena(self._ctx, OWNER, layer.line_bytes * layer.n_experts)
                self._undo.callback(arena.close)
                self._arenas.append(arena)
                host = arena.host()
                for i_expert, linears in enumerate(self._pack.experts(i_layer)):
                    start = i_expert * layer.line_bytes
                    at, line = arena.address + start, host[start : start + layer.line_bytes]
                    to_read = [
                        part
                        for part in expert_parts(self._pack, linears)
                        if not part.tensor or not uploader.made(at + part.offset, part.tensor)
                    ]
                    if to_read:
                        waiting.append(pool.submit(self._read, to_read, line))
                while waiting and waiting[0].done():
                    uploader.told(waiting.popleft().result())
            while waiting:
                uploader.told(waiting.popleft().result())
        finally:  # the readers write into pinned memory: none may outlive it
            pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, parts: list[Part], line: npt.NDArray[np.uint8]) -> int:
        """Place some parts of an expert; returns their bytes.  On a reader's thread: no driver calls."""
        places = [(part, line[part.offset : part.offset + part.size]) for part in parts]
        self._pack.read_parts([(part.tensor, place) for part, place in places if part.tensor])
        for part, place in places:
            if not part.tensor:
                place[:] = self._pack.scale(part.info, part.part).view(np.uint8)
        return sum(part.size for part in parts)

    def _release(self) -> None:
        self._undo.close()
