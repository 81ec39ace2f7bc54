"""flashnext_drv: exact inference for Flash-Next EXL3 packs on the CUDA driver API, or in its CPU simulator.

The public names are resolved at first use; importing the package loads no driver and reads no file.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_ENGINE = ("Edits", "Engine", "Generation", "Limits", "MemoryReport", "Prefill", "Sampling")
_ERRORS = ("BuildError", "Cancelled", "CapacityError", "CheckpointError", "ContextLost", "ContractError",
           "Draining", "DriverError", "DriverMissing", "FlashNextError", "LeakError", "OutOfMemory",
           "QueueFull", "SimError", "UsageError")
_PUBLIC = {**dict.fromkeys(_ENGINE, ".engine.engine"), **dict.fromkeys(_ERRORS, ".errors"),
           "Request": ".engine.requests", "Scheduler": ".engine.scheduler"}

__all__ = ["BuildError", "Cancelled", "CapacityError", "CheckpointError", "ContextLost", "ContractError",
           "Draining", "DriverError", "DriverMissing", "Edits", "Engine", "FlashNextError", "Generation",
           "LeakError", "Limits", "MemoryReport", "OutOfMemory", "Prefill", "QueueFull", "Request",
           "Sampling", "Scheduler", "SimError", "UsageError", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
