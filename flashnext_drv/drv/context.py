"""Device facts, and the context: what is current on which thread, and what happens after a sticky error.

Made by `engine/rank.py` and the contract runner; held by every other driver object.  What must stay true:
`active` leaves the thread's context stack as it found it, whatever happened inside; after a sticky error no
driver call is made on the context but the one that drops it; and no ledger entry disappears unless the driver
freed it or the context that held it is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

from ..errors import ContextLost, DriverError, UsageError
from ..ledger import Entry, Ledger
from ..lifetime import Owner, Undo
from . import api, faults

__all__ = ["Context", "DeviceFacts", "DriverOwner", "devices", "here"]

_SMS: Final = 16
_L2_BYTES: Final = 38
_SHARED_PER_BLOCK: Final = 8
_SHARED_OPTIN: Final = 97
_CC_MAJOR: Final = 75
_CC_MINOR: Final = 76
_MAPS_HOST: Final = 19


@dataclass(frozen=True)
class DeviceFacts:
    """What one device is.  cc: compute capability.  Sizes in bytes; driver_version e.g. 13000."""

    ordinal: int
    name: str
    cc: tuple[int, int]
    n_sms: int
    total_bytes: int
    l2_bytes: int
    shared_per_block_bytes: int
    shared_optin_bytes: int
    maps_host: bool
    driver_version: int
    is_simulator: bool

    def __str__(self) -> str:
        kind = "simulator" if self.is_simulator else "GPU"
        return f"{kind} {self.ordinal} {self.name} (compute {self.cc[0]}.{self.cc[1]}, {self.n_sms} SMs)"


def devices() -> list[DeviceFacts]:
    """All devices of the driver chosen with `api.ensure`; makes no context."""
    return [_facts(i) for i in range(api.cuDeviceGetCount())]


class _Here(threading.local):
    """top: the context that `active` made current on this thread.  capture: the capture this thread is in."""

    top: Context | None = None
    capture: Any = None


here = _Here()


class DriverOwner(Owner):
    """An owner of driver objects: cannot be closed on a thread that captures, where no free is possible."""

    def _check_close(self) -> None:
        if faults.capturing():
            raise UsageError(f"{type(self).__name__} {self.name} cannot be closed",
                             because="a stream of this thread is being captured", do="close it afterwards")
        super()._check_close()


class Context(DriverOwner):
    """Owns one driver context, or one reference to a device's primary context.

    ordinal: device number.  ledger: where everything made on this context is entered.  primary: retain the
    context that the runtime API shares, instead of making our own; it is released, never reset.
    The constructor leaves the thread's current context as it was.
    """

    def __init__(self, ordinal: int = 0, *, ledger: Ledger, primary: bool = False,
                 name: str = "context") -> None:
        super().__init__(name)
        self.ledger = ledger
        self.primary = primary
        self.function_names: dict[int, str] = {}
        self.stream_names: dict[int, str] = {}
        self.graph_names: dict[int, str] = {}  # of executables
        self._broken = ""
        count = api.cuDeviceGetCount()
        if not 0 <= ordinal < count:
            raise UsageError(f"device {ordinal} does not exist", because=f"the driver lists {count}")
        device = api.cuDeviceGet(ordinal)
        self.facts = _facts(ordinal)
        with Undo() as undo:
            undo.callback(ledger.add(name, "context").remove)
            if primary:
                self.handle = api.cuDevicePrimaryCtxRetain(device)
                undo.callback(self._drop, api.cuDevicePrimaryCtxRelease, device)
            else:
                self.handle = api.cuCtxCreate(0, device)
                undo.callback(self._drop, api.cuCtxDestroy, self.handle)
                api.cuCtxPopCurrent()
            with self.active():
                self._service = api.cuStreamCreate(1)
                undo.callback(self.free, api.cuStreamDestroy, self._service,
                              ledger.add(f"{name}.service", "stream"))
                self.free_at_start_bytes = api.cuMemGetInfo()[0]
            self._undo = undo.pop_all()

    @property
    def broken(self) -> str:
        """Why nothing on this context works any more; "" while it is sound."""
        return self._broken

    @property
    def service_stream(self) -> api.Handle:
        """A stream of the context's own for set-up work (poison, first fills, uploads of graphs)."""
        return self._service

    def active(self) -> _Active:
        """Context manager: this context is current inside.  Nests; leaves the thread as it was."""
        return _Active(self)

    def free_bytes(self) -> int:
        """Free device memory as the driver reports it, all processes counted."""
        with self.active():
            return api.cuMemGetInfo()[0]

    def mark_broken(self, why: str) -> None:
        """From here on closing anything of this context is host work, and its ledger entries count as
        lost."""
        self._broken = self._broken or why

    def free(self, call: Callable[..., None], handle: Any, entry: Entry, *, outlives: bool = False) -> None:
        """Free one driver object and forget its entry; the last step of every owner on this context.

        outlives: the object is the process's and would survive the context (graphs), so it is freed on a
        broken one too.
        A free that fails is tried once more, and its error raised all the same.  If it fails again the object
        can go only with the context: the context is marked broken and the entry lost.
        """
        first: DriverError | None = None
        done, was_broken = False, bool(self._broken)
        for _ in range(2):
            if done or (self._broken and not outlives):
                break
            try:
                with nullcontext() if self._broken else self.active():
                    call(handle)
                    done = True
            except DriverError as error:
                first = first or error
        if done:
            entry.remove()
        else:
            self.mark_broken(str(first))
            self.ledger.lose((entry,))
        if first is not None and not was_broken:
            raise first

    def _drop(self, call: Callable[..., None], handle: Any) -> None:
        """Give the context back.  Of a broken one the driver's answer says nothing new."""
        try:
            call(handle)
        except DriverError:
            if not self._broken:
                raise

    def _release(self) -> None:
        if here.top is self:
            raise UsageError(f"context {self.name} is closed inside its own active()")
        self._undo.close()


class _Active:
    __slots__ = ("_before", "_context", "_pushed")

    def __init__(self, context: Context) -> None:
        self._context = context
        self._pushed = False

    def __enter__(self) -> Context:
        context = self._context
        if here.top is not context:
            if context.closed:
                context.require_open()
            if context._broken:
                raise ContextLost("cuCtxPushCurrent", because=f"{context.name} is broken: {context._broken}",
                                  do="close it and open anew")
            self._before = here.top
            api.cuCtxPushCurrent(context.handle)
            here.top = context
            self._pushed = True
        return context

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if isinstance(error, ContextLost):
            self._context.mark_broken(str(error))
        if not self._pushed:
            return
        here.top = self._before
        try:
            api.cuCtxPopCurrent()
        except DriverError as second:
            if error is None:
                raise
            error.add_note(f"leaving {self._context.name} failed too: {second}")


def _facts(ordinal: int) -> DeviceFacts:
    device = api.cuDeviceGet(ordinal)
    name = api.cuDeviceGetName(device)
    with faults.silent():       # one call of many: a sweep need not visit each attribute
        def attribute(number: int) -> int:
            return api.cuDeviceGetAttribute(number, device)
        return DeviceFacts(
            ordinal=ordinal, name=name, cc=(attribute(_CC_MAJOR), attribute(_CC_MINOR)),
                           n_sms=attribute(_SMS),
            total_bytes=api.cuDeviceTotalMem(device), l2_bytes=attribute(_L2_BYTES),
            shared_per_block_bytes=attribute(_SHARED_PER_BLOCK), shared_optin_bytes=attribute(_SHARED_OPTIN),
            maps_host=bool(attribute(_MAPS_HOST)), driver_version=api.cuDriverGetVersion(),
            is_simulator=api.loaded() == "sim")
