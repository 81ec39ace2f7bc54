"""A receipt: a result with everything that says what produced it.

Written by the tools that measure or compare on a device; kept under tests/receipts/.  What must stay true: a
receipt is made by the run it describes, from the sources and images that run used, and is never edited or
moved to newer code.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ..drv import api
from ..drv.context import DeviceFacts
from ..kernels import catalog

__all__ = ["package_digest", "receipt", "write_receipt"]


def package_digest() -> str:
    """SHA-256, hex, over every Python file of the package, by path."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(
            path.relative_to(root).as_posix().encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest()
        )
    return digest.hexdigest()


def receipt(facts: DeviceFacts, results: dict[str, Any]) -> dict[str, Any]:
    """`results` with command, sources, images, device, driver and date."""
    kernels: dict[str, Any] = {"source_digest": catalog.source_digest()}
    if not facts.is_simulator:
        built = catalog.manifest()
        arch = catalog.pick_arch(facts.cc, built.archs())
        kernels |= {
            "arch": arch,
            "option_digest": built.option_digest,
            "tool": built.tool,
            "cubins": {i.family: i.sha256 for i in built.images if i.arch == arch},
        }
    return {
        # absolute paths by name: where things lay on that machine says nothing
        "command": shlex.join([Path(word).name if word.startswith("/") else word for word in sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": vars(facts),
        "kernels": kernels,
        "package_digest": package_digest(),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "cuda-bindings": api.binding_version(),
        },
        "results": results,
    }


def write_receipt(path: str | Path, facts: DeviceFacts, results: dict[str, Any]) -> None:
    """Write `receipt(...)` as JSON."""
    Path(path).write_text(
        json.dumps(receipt(facts, results), indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )
