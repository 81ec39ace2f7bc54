"""Modules, functions, and launches whose arguments are packed once.

Modules are made by `kernels/bind.py`; launches by it and by tests of the driver layer.  What must stay true:
the packed bytes outlive every run of their launch; a launch keeps open what its arguments point into only
through the graph that captured it, so eager code must not run a launch whose arena is closed (`run` does not
look).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..errors import UsageError
from ..lifetime import Owner, Undo
from . import api
from .context import Context, DriverOwner, here
from .stream import Stream

__all__ = ["Attributes", "Function", "Launch", "Module", "Packed", "pack"]

_ATTRIBUTES: Final = {"max_threads": 0, "shared_bytes": 1, "const_bytes": 2, "local_bytes": 3, "regs": 4}
_MOST_DYNAMIC_SHARED: Final = 8


@dataclass(frozen=True)
class Attributes:
    """What the driver says of a function.  regs: 32-bit registers a thread; local_bytes a thread; shared a
    block, what launches ask for not counted."""

    max_threads: int
    shared_bytes: int
    const_bytes: int
    local_bytes: int
    regs: int


class Module(DriverOwner):
    """Owns one loaded image.  digest: what it was built from, for reports.

    The device memory the driver takes for it is measured and stands in the ledger.
    """

    def __init__(self, ctx: Context, name: str, image: bytes, digest: str = "") -> None:
        super().__init__(name, holds=(ctx,))
        self.ctx = ctx
        self.digest = digest
        self._functions: dict[str, Function] = {}
        with Undo() as undo:
            with ctx.active():
                self._free_before_bytes = api.cuMemGetInfo()[0]
                self.handle = api.cuModuleLoadData(image)
                self._entry = ctx.ledger.add(name, "module")
                undo.callback(ctx.free, api.cuModuleUnload, self.handle, self._entry)
                self._entry.measured(max(0, self._free_before_bytes - api.cuMemGetInfo()[0]))
            self._undo = undo.pop_all()

    def function(self, name: str) -> Function:
        """The kernel called `name`; the same object each time.  Raises DriverError when the image lacks
        it."""
        found = self._functions.get(name)
        if found is None:
            self.require_open()
            with self.ctx.active():
                found = Function(self, name, api.cuModuleGetFunction(self.handle, name))
            self._functions[name] = found
            self.ctx.function_names[int(found.handle)] = name
        return found

    def _release(self) -> None:
        for function in self._functions.values():
            self.ctx.function_names.pop(int(function.handle), None)
        self._functions.clear()
        self._undo.close()


class Function:
    """A kernel of a module; lives as long as it."""

    def __init__(self, module: Module, name: str, handle: api.Handle) -> None:
        self.module = module
        self.name = name
        self.handle = handle
        self._allowed_bytes = 0

    def allow_shared(self, size_bytes: int) -> None:
        """Let launches have up to `size_bytes` of dynamic shared memory a block; the driver is asked once.

        Needed above 48 KiB.  Raises DriverError when the device has less.
        """
        if size_bytes > self._allowed_bytes:
            self.module.require_open()
            with self.module.ctx.active():
                api.cuFuncSetAttribute(_MOST_DYNAMIC_SHARED, size_bytes, self.handle)
            self._allowed_bytes = size_bytes

    def attributes(self) -> Attributes:
        """Asks the driver; five calls, for checks and reports."""
        self.module.require_open()
        with self.module.ctx.active():
            return Attributes(**{name: api.cuFuncGetAttribute(number, self.handle)
                                 for name, number in _ATTRIBUTES.items()})


@dataclass(frozen=True, slots=True)
class Packed:
    """The arguments of one launch: their bytes, and the `void**` that points at each.  Both arrays stay
    alive."""

    data: np.ndarray[Any, np.dtype[np.uint8]]
    pointers: np.ndarray[Any, np.dtype[np.uint64]]

    @property
    def address(self) -> int:
        return self.pointers.ctypes.data


def pack(offsets: Sequence[tuple[int, int]], values: Sequence[np.generic]) -> Packed:
    """Lay arguments out.  offsets: (offset, size) in bytes of each, values: numpy scalars of those sizes."""
    end = offsets[-1][0] + offsets[-1][1] if offsets else 0
    data = np.zeros((max(end, 1) + 7) // 8 * 8, np.uint8)
    for (offset, size), value in zip(offsets, values, strict=True):
        raw = np.frombuffer(value.tobytes(), np.uint8)
        if raw.size != size:
            raise UsageError("an argument has the wrong size", size_bytes=raw.size, parameter_bytes=size)
        data[offset:offset + size] = raw
    base = data.ctypes.data
    return Packed(data, np.array([base + offset for offset, _ in offsets], np.uint64))


class Launch:
    """One launch site: function, grid, block and arguments, ready to run again and again on any stream.

    shared_bytes: dynamic, a block; above 48 KiB `Function.allow_shared` comes first.
    holds: the owners its arguments point into; a graph that captures the launch keeps them open.
    names: of the arguments, in order, for `word`.
    programmatic: the launch may start ahead of the end of the kernel before it on its stream; only for
    kernels that call fn_wait_prior before they read what others write.  May be changed between runs; a graph
    keeps what it was captured with.
    """

    __slots__ = ("_args", "_config", "_head", "_names", "_stream", "_tail", "block", "function", "grid",
                 "holds", "name", "shared_bytes")

    def __init__(self, function: Function, grid: tuple[int, int, int], block: int | tuple[int, int, int],
                 shared_bytes: int, args: Packed, *, holds: tuple[Owner, ...] = (),
                 names: tuple[str, ...] = (), programmatic: bool = False) -> None:
        self.function = function
        self.name = function.name
        self.grid = grid
        self.block = (block, 1, 1) if isinstance(block, int) else block
        if min(*grid, *self.block) < 1:
            raise UsageError(f"launch of {self.name} has an empty grid or block", grid=grid, block=self.block)
        self.shared_bytes = shared_bytes
        self.holds = holds
        self._args = args
        self._names = names
        self._head = (function.handle, *grid, *self.block, shared_bytes)
        self._tail = (args.address, 0)
        self._config: api.Handle = None
        self._stream: api.Handle = None     # the stream that the config names
        self.programmatic = programmatic

    @property
    def programmatic(self) -> bool:
        return self._config is not None

    @programmatic.setter
    def programmatic(self, wanted: bool) -> None:
        if wanted != self.programmatic:
            self._config = api.launch_config(self.grid, self.block, self.shared_bytes) if wanted else None
            self._stream = None

    def run(self, stream: Stream) -> None:
        """Give the launch to the stream.  Cheapest inside `ctx.active()`; elsewhere it makes the context
        current."""
        if here.top is stream.ctx and here.capture is None:
            if self._config is None:
                api.cuLaunchKernel(*self._head, stream.handle, *self._tail)
            else:
                self._give_early(stream.handle)
            return
        self.function.module.require_open()
        if here.capture is not None:
            here.capture.note((self.function.module, *self.holds))
        with stream.ctx.active():
            if self._config is None:
                api.cuLaunchKernel(*self._head, stream.handle, *self._tail)
            else:
                self._give_early(stream.handle)

    def _give_early(self, stream: api.Handle) -> None:
        if stream is not self._stream:
            self._config.hStream = stream
            self._stream = stream
        api.cuLaunchKernelEx(self._config, self.function.handle, *self._tail)

    def run_grid(self, stream: Stream, grid: tuple[int, int, int]) -> None:
        """As `run` with another grid, eagerly and never ahead of others: not while a stream of this thread is
        being captured."""
        if here.capture is not None:
            raise UsageError(f"launch of {self.name} with a grid of its own cannot be captured",
                             do="bind a launch for that grid")
        with stream.ctx.active():
            api.cuLaunchKernel(self.function.handle, *grid, *self.block, self.shared_bytes, stream.handle,
                               *self._tail)

    def content(self) -> bytes:
        """What a graph that captures the launch keeps: function, grid, block, shared bytes, whether it is
        programmatic, arguments."""
        head = (self.name, int(self.function.handle), self.grid, self.block, self.shared_bytes,
                self.programmatic)
        return repr(head).encode() + self._args.data.tobytes()

    def word(self, name: str) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """(1,) uint64, host: a pointer argument's own bytes.  What is written there counts from the next run
        on; a run given to a stream keeps what it was given.  Raises UsageError on an unknown name."""
        if name not in self._names:
            raise UsageError(f"launch of {self.name} has no argument called {name!r}")
        at = int(self._args.pointers[self._names.index(name)]) - self._args.data.ctypes.data
        return self._args.data[at:at + 8].view(np.uint64)

    def __repr__(self) -> str:
        return f"<Launch {self.name} grid {self.grid} block {self.block}>"
