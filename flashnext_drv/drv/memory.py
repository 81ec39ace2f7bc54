"""Device and pinned memory: arenas that own one allocation each, spans that point into them, copies.

Made by `engine/rank.py`, `state/` and the contract runner.  What must stay true: every byte of device and
pinned memory comes from an arena and stands in the ledger; a span never reaches past its arena; nobody frees
a span.

    arena   [ span a      |pad| span b          |pad|      free      ]
    guarded [ span a      |pad| guard | span b          |pad| guard | ]   poison 0xff everywhere at first
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..errors import CapacityError, ContractError, OutOfMemory, UsageError, bytes_text
from ..host_memory import host_memory
from ..lifetime import Undo
from . import api, faults
from .context import Context, DriverOwner, here

if TYPE_CHECKING:
    from .stream import Stream

__all__ = ["GUARD_BYTES", "POISON", "Arena", "DeviceArena", "PinnedArena", "Span", "copy_async",
           "copy_to_device",
           "copy_to_host", "fill_bytes"]

GUARD_BYTES: Final = 256
POISON: Final = 0xFF                # a NaN in every float format we use
_PORTABLE_MAPPED: Final = 3
_BLOCK_BYTES: Final = 2 << 20       # measured: by free memory, H200, driver 580


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of an arena.  address: the device's address of its first byte; the arena owns the memory."""

    address: int
    size_bytes: int
    name: str
    arena: Arena

    def sub(self, offset_bytes: int, size_bytes: int, name: str = "") -> Span:
        """A piece of this piece.  Raises UsageError when it would reach outside."""
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > self.size_bytes:
            raise UsageError(f"a piece of span {self.name} would reach outside it", offset_bytes=offset_bytes,
                             size_bytes=size_bytes, span_bytes=self.size_bytes)
        return Span(self.address + offset_bytes, size_bytes, name or self.name, self.arena)

    def __index__(self) -> int:
        return self.address


class Arena(DriverOwner):
    """One allocation, handed out as spans in rising addresses; spans are not given back one by one."""

    def __init__(self, ctx: Context, name: str, size_bytes: int, guard_bytes: int = 0) -> None:
        if size_bytes <= 0:
            raise UsageError(f"arena {name} needs a size", size_bytes=size_bytes)
        super().__init__(name, holds=(ctx,))
        self.ctx = ctx
        self.size_bytes = size_bytes
        self.address = 0
        self.spans: list[Span] = []
        self._guard_bytes = guard_bytes
        self._used_bytes = 0
        self._undo = Undo()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def span(self, name: str, size_bytes: int, align: int = 256) -> Span:
        """The next `size_bytes` bytes, aligned.  Raises CapacityError when the arena is full."""
        self.require_open()
        start = (self._used_bytes + align - 1) // align * align
        end = start + size_bytes
        if self._guard_bytes:       # the guard ends on a multiple of its size, so it covers the padding too
            end = (end + 2 * self._guard_bytes - 1) // self._guard_bytes * self._guard_bytes
        if size_bytes < 0 or end > self.size_bytes:
            largest = sorted(self.spans, key=lambda s: -s.size_bytes)[:3]
            held = ", ".join(f"{s.name} {bytes_text(s.size_bytes)}" for s in largest)
            raise CapacityError(f"arena {self.name} has no room for {name}", size_bytes=size_bytes,
                                free_bytes=self.size_bytes - self._used_bytes,
                                because=f"held by {held}" if held else "", do="make the arena larger")
        self._used_bytes = end
        self.spans.append(Span(self.address + start, size_bytes, name, self))
        return self.spans[-1]

    def _release(self) -> None:
        self._undo.close()


class DeviceArena(Arena):
    """Owns one device allocation.

    guard: fill it with poison at first and keep a guard zone behind every span, for `check_guards`.
    Granted bytes in the ledger are what the driver's free memory lost by the allocation, when that is
    plausible (another process may allocate at the same moment), else the size rounded up to the driver's 2
    MiB blocks.
    Raises OutOfMemory naming the largest holders.
    """

    def __init__(self, ctx: Context, name: str, size_bytes: int, *, guard: bool = False) -> None:
        super().__init__(ctx, name, size_bytes, GUARD_BYTES if guard else 0)
        with Undo() as undo:
            with ctx.active():
                free_before = api.cuMemGetInfo()[0]
                try:
                    self.address = api.cuMemAlloc(size_bytes)
                except OutOfMemory as error:
                    raise _out_of_memory(ctx, error, "device", f"free {bytes_text(free_before)}") from error
                entry = ctx.ledger.add(name, "device", size_bytes)
                undo.callback(ctx.free, api.cuMemFree, self.address, entry)
                taken = free_before - api.cuMemGetInfo()[0]
                plausible = 0 <= taken <= size_bytes + 2 * _BLOCK_BYTES
                entry.measured(taken if plausible else -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES)
                if guard:
                    api.cuMemsetD8Async(self.address, POISON, size_bytes, ctx.service_stream)
                    api.cuStreamSynchronize(ctx.service_stream)
            self._undo = undo.pop_all()

    def check_guards(self) -> None:
        """Raises ContractError naming the span behind which a byte changed.  Waits for nothing but its own
        copy."""
        if not self._guard_bytes:
            raise UsageError(f"arena {self.name} has no guards", do="open it with guard=True")
        found = np.empty(self.size_bytes, np.uint8)
        with self.ctx.active():
            api.cuMemcpyDtoHAsync(found.ctypes.data, self.address, found.nbytes, self.ctx.service_stream)
            api.cuStreamSynchronize(self.ctx.service_stream)
        ends = [s.address - self.address for s in self.spans[1:]] + [self.size_bytes]
        for span, end in zip(self.spans, ends, strict=True):
            start = span.address - self.address + span.size_bytes
            changed = np.flatnonzero(found[start:end] != POISON)
            if changed.size:
                raise ContractError(f"bytes behind span {span.name} were written", arena=self.name,
                                    first_byte_behind=int(changed[0]), n_changed_bytes=int(changed.size))


class PinnedArena(Arena):
    """Owns page-locked host memory, mapped into every context.

    A span's `address` is the device's; `host` gives the host's view of it.  The bytes are uninitialised.
    Raises OutOfMemory naming the largest holders and the limits of host memory.
    """

    def __init__(self, ctx: Context, name: str, size_bytes: int) -> None:
        super().__init__(ctx, name, size_bytes)
        with Undo() as undo:
            with ctx.active():
                try:
                    self.host_address = api.cuMemHostAlloc(size_bytes, _PORTABLE_MAPPED)
                except OutOfMemory as error:
                    raise _out_of_memory(ctx, error, "pinned", str(host_memory())) from error
                entry = ctx.ledger.add(name, "pinned", size_bytes, -(-size_bytes // 4096) * 4096)
                undo.callback(ctx.free, api.cuMemFreeHost, self.host_address, entry)
                self.address = api.cuMemHostGetDevicePointer(self.host_address)
            self._undo = undo.pop_all()

    def host(self, span: Span | None = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """(size_bytes,) uint8, host, writable: the bytes of `span`, or all.  Not to be touched after
        close."""
        self.require_open()
        start = self.host_address if span is None else self.host_address + span.address - self.address
        size_bytes = self.size_bytes if span is None else span.size_bytes
        if not self.host_address <= start <= start + size_bytes <= self.host_address + self.size_bytes:
            raise UsageError(f"span {span.name if span else ''} is not of arena {self.name}")
        return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(start))


def copy_to_device(stream: Stream, dst: Span | int, src: np.ndarray[Any, Any]) -> None:
    """Copy a host array in stream order; `src` may be reused on return.

    For pageable arrays: the driver stages them before it returns.  Of a view of pinned memory the bytes are
    read when the copy runs, so use `copy_async` with its address and an event.
    """
    if faults.capturing():
        raise UsageError("a copy from a host array cannot be captured", do="copy from a pinned span")
    packed = np.ascontiguousarray(src)
    if packed.nbytes:
        _fits(dst, packed.nbytes)
        with stream.ctx.active():
            api.cuMemcpyHtoDAsync(int(dst.__index__()), packed.ctypes.data, packed.nbytes, stream.handle)


def copy_to_host(stream: Stream, dst: np.ndarray[Any, Any], src: Span | int) -> None:
    """Fill the contiguous array `dst` from the device after all earlier work of the stream; waits for it."""
    if not (dst.flags.c_contiguous and dst.flags.writeable):
        raise UsageError("the array to copy into must be contiguous and writable")
    if dst.nbytes:
        _fits(src, dst.nbytes)
        with stream.ctx.active():
            api.cuMemcpyDtoHAsync(dst.ctypes.data, int(src.__index__()), dst.nbytes, stream.handle)
            api.cuStreamSynchronize(stream.handle)


def copy_async(stream: Stream, dst_address: Span | int, src_address: Span | int, size_bytes: int) -> None:
    """Copy between device and pinned memory in stream order; returns at once.  Both are device addresses."""
    if size_bytes:
        _fits(dst_address, size_bytes)
        _fits(src_address, size_bytes)
        with stream.ctx.active():
            _note(dst_address, src_address)
            api.cuMemcpyAsync(dst_address.__index__(), src_address.__index__(), size_bytes, stream.handle)


def fill_bytes(stream: Stream, span: Span, value: int) -> None:
    """Set every byte of the span, in stream order."""
    if span.size_bytes:
        with stream.ctx.active():
            _note(span)
            api.cuMemsetD8Async(span.address, value, span.size_bytes, stream.handle)


def _fits(place: Span | int, size_bytes: int) -> None:
    if isinstance(place, Span):
        place.arena.require_open()
        if size_bytes > place.size_bytes:
            raise UsageError(f"a copy would reach outside span {place.name}", size_bytes=size_bytes,
                             span_bytes=place.size_bytes)


def _note(*places: Span | int) -> None:
    if here.capture is not None:
        here.capture.note(tuple(p.arena for p in places if isinstance(p, Span)))


def _out_of_memory(ctx: Context, error: OutOfMemory, tier: str, room: str) -> OutOfMemory:
    """The error with what there was (`room`), who holds most, and what to do."""
    do = "lower the limits of what holds most"
    if tier == "pinned":
        do += ", or raise the limit that binds (of the control group; of mlock: docker --ulimit memlock=-1)"
    return OutOfMemory(error.call, error.code, error.code_name, because=f"{room}, {ctx.ledger.largest(tier)}",
                       do=do, **error.facts)
