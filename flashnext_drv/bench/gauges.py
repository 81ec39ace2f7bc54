"""What the system says about memory, beside the ledger: a process's resident bytes, a GPU's used bytes.

Called by `flashnext-drv bench` around its measurements.  What must stay true: a figure that the system does
not give is "unmeasured", never 0; these figures are samples of whole processes and whole GPUs, so they are
kept apart from the ledger, which counts every allocation.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Any, Final

__all__ = ["UNMEASURED", "Sampler", "gpu_used_bytes", "process_memory"]

UNMEASURED: Final = "unmeasured"
Bytes = int | str
_FIELDS: Final = {"rss_bytes": "VmRSS", "rss_peak_bytes": "VmHWM", "swapped_bytes": "VmSwap"}


def process_memory(pid: int | None = None) -> dict[str, Bytes]:
    """rss_bytes, rss_peak_bytes (since the process began) and swapped_bytes of a process, by default ours; of
    pid 0, which is no process's, nothing."""
    try:
        text = Path(f"/proc/{os.getpid() if pid is None else pid}/status").read_text(encoding="utf-8")
    except OSError:
        return dict.fromkeys(_FIELDS, UNMEASURED)
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name: _kibibytes(lines.get(field)) for name, field in _FIELDS.items()}


def gpu_used_bytes(ordinal: int = 0) -> Bytes:
    """Bytes in use on a GPU by everybody, as NVML says.  The ordinal is NVML's."""
    nvml = _Nvml.load()
    return UNMEASURED if nvml is None else nvml.used(ordinal)


class Sampler:
    """A context manager that looks at a GPU and a process from a thread of its own; `found` says the most it
    saw.  ordinal: of the GPU, None for none.  pid: of the process, None for ours."""

    def __init__(self, ordinal: int | None, pid: int | None = None, every_s: float = 0.2) -> None:
        self._ordinal, self._pid, self._every_s = ordinal, pid, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gauges", daemon=True)
        self._most: dict[str, Bytes] = {}
        self._samples = 0

    def __enter__(self) -> Sampler:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def found(self) -> dict[str, Any]:
        """The largest of each figure over all samples; "unmeasured" where no sample had one."""
        return {"samples": self._samples, "every_s": self._every_s,
                "process": {name: self._most.get(name, UNMEASURED) for name in _FIELDS},
                "gpu": {"used_bytes_most": self._most.get("gpu", UNMEASURED)}}

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        now = process_memory(self._pid)
        if self._ordinal is not None:
            now["gpu"] = gpu_used_bytes(self._ordinal)
        for name, value in now.items():
            before = self._most.get(name)
            if isinstance(value, int) and not (isinstance(before, int) and before >= value):
                self._most[name] = value
        self._samples += 1


class _Nvml:
    """The two calls that are needed.  Source: nvml.h, nvmlMemory_t (total, free, used; u64 each)."""

    _made: _Nvml | None = None
    _tried = False

    class Memory(ctypes.Structure):
        _fields_ = [("total", ctypes.c_uint64), ("free", ctypes.c_uint64), ("used", ctypes.c_uint64)]

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @classmethod
    def load(cls) -> _Nvml | None:
        if not cls._tried:
            cls._tried = True
            try:
                library = ctypes.CDLL("libnvidia-ml.so.1")
                if library.nvmlInit_v2() == 0:
                    cls._made = cls(library)
            except (OSError, AttributeError):  # not installed, or too old to have the call
                cls._made = None
        return cls._made

    def used(self, ordinal: int) -> Bytes:
        handle, memory = ctypes.c_void_p(), self.Memory()
        if self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(ordinal), ctypes.byref(handle)) \
                or self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            return UNMEASURED
        return int(memory.used)


def _kibibytes(text: str | None) -> Bytes:
    words = (text or "").split()
    return int(words[0]) * 1024 if len(words) == 2 and words[0].isdigit() and words[1] == "kB" else UNMEASURED
