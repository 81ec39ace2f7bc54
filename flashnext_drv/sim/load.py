"""Loads the simulator into this process, before cuda.bindings looks for a driver.

Called by drv/api.py (device "sim" or "auto") and by tests.  What must stay true: it is loaded at most once
a process, with global symbols, and never beside a real libcuda, because the binding would use whichever
came first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import UsageError
from . import build, control

__all__ = ["library", "load"]

_loaded: tuple[Path, ctypes.CDLL] | None = None


def load(
    settings: Mapping[str, int] | None = None,
    *,
    families: Sequence[str] | None = None,
    built: Path | None = None,
) -> Path:
    """Build if needed, load, apply `settings` (names of control.SETTINGS).  Returns the library's path.

    families: only these kernels (None: all).  built: a library that build.build made.  A second call applies
    its settings and changes nothing else.
    Raises BuildError when it cannot be built, UsageError when a real libcuda is in this process.
    """
    global _loaded
    if _loaded is None:
        if (found := _mapped_driver()) is not None:
            raise UsageError(
                "the simulator cannot be loaded",
                because=f"a real driver is in this process: {found}",
                do="use device cuda, or start the simulator in its own process",
            )
        path = built or build.build(families)
        _loaded = (path, ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL))
        control.attach(_loaded[1])
    for name, value in (settings or {}).items():
        control.set_value(name, value)
    return _loaded[0]


def library() -> Path | None:
    """The loaded library's path, None before `load`."""
    return None if _loaded is None else _loaded[0]


def _mapped_driver() -> str | None:
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        path = line.split(maxsplit=5)[-1] if "/" in line else ""
        if Path(path).name.startswith("libcuda.so"):
            return path
    return None
