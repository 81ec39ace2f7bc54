"""Settings, counters and findings of the loaded simulator.

Called by tests, check/ and the engine's fault sweeps.  What must stay true: nothing here works, or is
needed, on a real driver; a setting that what is open contradicts (less memory than is in use, fewer
devices) is refused.
"""

from __future__ import annotations

import ctypes
from typing import Final

from ..errors import UsageError

__all__ = [
    "SETTINGS",
    "attach",
    "attached",
    "call_counts",
    "counter",
    "finding_count",
    "has_kernel",
    "last_finding",
    "set_check_rights",
    "set_devices",
    "set_generation",
    "set_memory_bytes",
    "set_seed",
    "set_skip_kernels",
    "set_sms",
    "set_value",
    "set_workers",
]

SETTINGS: Final = ("seed", "workers", "check_rights", "memory_bytes", "sms", "devices", "generation",
                   "skip_kernels")
_GENERATIONS: Final = {"sm_80": 80, "sm_90": 90}
_library: ctypes.CDLL | None = None


def attach(library: ctypes.CDLL) -> None:
    """Called once by sim.load with the loaded library."""
    global _library
    library.fnsim_set.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
    library.fnsim_get.argtypes = [ctypes.c_char_p]
    library.fnsim_get.restype = ctypes.c_uint64
    library.fnsim_last_finding.restype = ctypes.c_char_p
    library.fnsim_finding_count.restype = ctypes.c_uint64
    library.fnsim_calls.argtypes = [
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_char_p),
        ctypes.POINTER(ctypes.c_uint64),
    ]
    library.fnsim_has_kernel.argtypes = [ctypes.c_char_p]
    _library = library


def attached() -> bool:
    """Whether the simulator is loaded in this process."""
    return _library is not None


def set_value(name: str, value: int) -> None:
    """One of SETTINGS.  Raises UsageError on an unknown name, a value out of range, or when what is open
    forbids it."""
    status = _need().fnsim_set(name.encode(), value)
    if status == 2:
        raise UsageError(f"simulator setting {name}={value} contradicts what is open", do="close that first")
    if status:
        raise UsageError(
            f"simulator setting {name}={value} is not possible", do=f"names: {', '.join(SETTINGS)}"
        )


def set_seed(seed: int) -> None:
    """Order of lanes, warps, blocks and streams: 0 natural, else shuffled; the same seed gives the same
    order."""
    set_value("seed", seed)


def set_workers(n_workers: int) -> None:
    """Host threads that share the blocks of a launch, 1..64; the bytes do not depend on it."""
    set_value("workers", n_workers)


def set_check_rights(on: bool) -> None:
    """Hash the bytes of "r" pointer arguments before and after each kernel; a change is a launch failure."""
    set_value("check_rights", int(on))


def set_skip_kernels(on: bool) -> None:
    """Launches are checked, ordered and counted, but kernels do nothing: outputs keep what was there."""
    set_value("skip_kernels", int(on))


def set_memory_bytes(size_bytes: int) -> None:
    """Memory of each device."""
    set_value("memory_bytes", size_bytes)


def set_sms(n_sms: int) -> None:
    """Multiprocessors that each device reports."""
    set_value("sms", n_sms)


def set_devices(n_devices: int) -> None:
    """Devices, 1..4."""
    set_value("devices", n_devices)


def set_generation(name: str) -> None:
    """Whose mma bits and compute capability: "sm_90" or "sm_80"."""
    if name not in _GENERATIONS:
        raise UsageError(f"simulator generation {name!r} is unknown", do="use sm_80 or sm_90")
    set_value("generation", _GENERATIONS[name])


def counter(name: str) -> int:
    """calls, launches, bytes_copied, bytes_filled, contexts, used_bytes, or the value of a setting.

    handles: live streams, events, modules, graphs, executables and captures together.
    """
    value: int = _need().fnsim_get(name.encode())
    if value == 2**64 - 1:
        raise UsageError(f"the simulator counts no {name!r}")
    return value


def call_counts() -> dict[str, int]:
    """Calls of every driver entry point since loading, zeros left out."""
    counts: dict[str, int] = {}
    name, calls = ctypes.c_char_p(), ctypes.c_uint64()
    library, i = _need(), 0
    while library.fnsim_calls(i, ctypes.byref(name), ctypes.byref(calls)):
        if name.value is not None and calls.value:
            counts[name.value.decode()] = counts.get(name.value.decode(), 0) + calls.value
        i += 1
    return counts


def last_finding() -> str:
    """The text of the latest refusal or failure; "" when there was none since `clear`."""
    said: bytes = _need().fnsim_last_finding()
    return said.decode("utf-8", "replace")


def finding_count() -> int:
    """Refusals and failures since loading."""
    n: int = _need().fnsim_finding_count()
    return n


def has_kernel(name: str) -> bool:
    """Whether the loaded build holds that kernel."""
    return bool(_need().fnsim_has_kernel(name.encode()))


def _need() -> ctypes.CDLL:
    if _library is None:
        raise UsageError(
            "the simulator is not loaded in this process", do="call flashnext_drv.sim.load.load() first"
        )
    return _library
