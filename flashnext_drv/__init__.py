"""flashnext_drv: exact inference for Flash-Next EXL3 packs on the CUDA driver API, or in its CPU simulator.

The public names are resolved at first use; importing the package loads no driver and reads no file.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Engine": ".engine.engine",
    "BuildError": ".errors", "CapacityError": ".errors", "CheckpointError": ".errors",
           "ContextLost": ".errors",
    "ContractError": ".errors", "DriverError": ".errors", "DriverMissing": ".errors",
           "FlashNextError": ".errors",
    "LeakError": ".errors", "OutOfMemory": ".errors", "SimError": ".errors", "UsageError": ".errors",
}

__all__ = ["BuildError", "CapacityError", "CheckpointError", "ContextLost", "ContractError", "DriverError",
           "DriverMissing", "Engine", "FlashNextError", "LeakError", "OutOfMemory", "SimError", "UsageError",
           "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
