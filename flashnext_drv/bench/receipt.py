"""A receipt: a result with everything that says what produced it.

Written by the tools that measure or compare on a device and by `flashnext-drv bench --out`; sealed with its
commit by tools/receipt.py; kept under tests/receipts/.  What must stay true: a receipt is made by the run it
describes, from the sources and images that run used, and is never edited or moved to newer code.

    source_digest  the package's Python files, cuda_src/, build_kernels.py, pyproject.toml: what runs
    client_digest  bench/, cli/bench.py and the program in tools/ that was started: what measured
    kernels        declarations and kernel sources, and the images of this GPU
    tree           the commit whose sources have that source_digest, and that client_digest; a result has none
                   before it is sealed

Form 1 (no "form") is older: package_digest and kernels alone say which sources ran.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..drv import api
from ..drv.context import DeviceFacts
from ..kernels import catalog

__all__ = ["FORM", "client_digest", "client_name", "digest_of", "is_source", "package_digest", "receipt",
           "schema_problems", "source_digest", "write_receipt"]

FORM: Final = 2
_PACKAGE: Final = Path(__file__).resolve().parents[1]
_TOP_SOURCES: Final = ("build_kernels.py", "pyproject.toml")
_MADE: Final = ("_cuda_src", "_cubin", "__pycache__")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00")


def package_digest() -> str:
    """SHA-256, hex, over every Python file of the package, by path."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(
            path.relative_to(_PACKAGE).as_posix().encode()
            + b"\0"
            + hashlib.sha256(path.read_bytes()).digest()
        )
    return digest.hexdigest()


def is_source(path: str) -> bool:
    """Whether a file of the repository, by its path in it, decides what runs: source_digest covers it."""
    parts = path.split("/")
    if parts[0] == "flashnext_drv":
        return path.endswith((".py", "/py.typed")) and not set(_MADE) & set(parts)
    return parts[0] == "cuda_src" or path in _TOP_SOURCES


def digest_of(files: Iterable[tuple[str, bytes]]) -> str:
    """SHA-256, hex, over (path, content), in any order."""
    digest = hashlib.sha256()
    for path, content in sorted(files):
        digest.update(path.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


def source_digest() -> str | None:
    """Of this checkout's sources; None for an installed package, whose checkout is not there to be read."""
    root = _PACKAGE.parent
    if not (root / "cuda_src").is_dir():
        return None
    tops = (_PACKAGE, root / "cuda_src", *(root / name for name in _TOP_SOURCES))
    found = [path for top in tops for path in ([top] if top.is_file() else top.rglob("*")) if path.is_file()]
    named = [(path.relative_to(root).as_posix(), path) for path in found]
    return digest_of((name, path.read_bytes()) for name, path in named if is_source(name))


def client_digest() -> str:
    """Of what measures and judges: bench/, cli/bench.py, and the program in tools/ that was started."""
    files = [*(_PACKAGE / "bench").glob("*.py"), *(_PACKAGE / "cli").glob("bench.py")]
    started = Path(sys.argv[0]).resolve()
    if started.parent.name == "tools" and started.is_file():
        files.append(started)
    return digest_of((f"{path.parent.name}/{path.name}", path.read_bytes()) for path in files)


def client_name(path: str, program: str) -> str | None:
    """What client_digest calls a file of the repository, by its path in it; None of one that measures
    nothing.  program: the name of what was started."""
    parts = path.split("/")
    measures = len(parts) == 3 and parts[:2] == ["flashnext_drv", "bench"] and path.endswith(".py")
    if measures or path in ("flashnext_drv/cli/bench.py", f"tools/{program}"):
        return "/".join(parts[-2:])
    return None


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
        "form": FORM,
        # absolute paths by name: where things lay on that machine says nothing
        "command": shlex.join([Path(word).name if word.startswith("/") else word for word in sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": vars(facts),
        "kernels": kernels,
        "package_digest": package_digest(),
        "source_digest": source_digest(),
        "client_digest": client_digest(),
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


def schema_problems(found: object, *, sealed: bool = False) -> list[str]:
    """What is wrong with the form of a receipt, in words; empty when nothing is.  sealed: it must have its
    commit too."""
    if not isinstance(found, dict):
        return ["it is no JSON object"]
    form = found.get("form", 1)
    if form not in (1, FORM):
        return [f"form {form!r} is unknown"]
    wanted: dict[str, Callable[[Any], bool]] = {
        "command": _text, "date": _is(_DATE), "device": _device, "kernels": _kernels,
        "package_digest": _is(_HASH), "versions": _versions,
        "results": lambda it: isinstance(it, dict) and bool(it),
    }
    if form == FORM:
        wanted |= {"form": lambda it: it == FORM, "source_digest": _is(_HASH), "client_digest": _is(_HASH)}
        if sealed or "tree" in found:
            wanted["tree"] = lambda it: (isinstance(it, dict) and set(it) == {"commit", "sealed"}
                                         and _is(_COMMIT)(it["commit"]) and _is(_DATE)(it["sealed"]))
    out = [f"{name} is {'malformed' if name in found else 'missing'}" for name, good in wanted.items()
           if name not in found or not good(found[name])]
    if not out and not found["device"]["is_simulator"] and "arch" not in found["kernels"]:
        out.append("kernels lacks the images that ran")
    return out + [f"{name!r} is no field of a receipt" for name in found if name not in wanted]


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def _device(value: object) -> bool:
    """Of every device: name, kind, driver and its bytes."""
    if not isinstance(value, Mapping):
        return False
    numbers = ("driver_version", "total_bytes", "n_sms")
    return _text(value.get("name")) and isinstance(value.get("is_simulator"), bool) and all(
        type(value.get(name)) is int for name in numbers)


def _kernels(value: object) -> bool:
    """The sources' digest, and on a GPU its images, each by a whole hash."""
    if not isinstance(value, Mapping) or not _is(_HASH)(value.get("source_digest")):
        return False
    if "arch" not in value:
        return set(value) == {"source_digest"}
    cubins, tool = value.get("cubins"), value.get("tool")
    named = isinstance(tool, Mapping) and bool(tool) and all(map(_text, [value["arch"], *tool.values()]))
    named = named and _is(_HASH)(value.get("option_digest"))
    return named and isinstance(cubins, Mapping) and bool(cubins) and all(map(_is(_HASH), cubins.values()))


def _versions(value: object) -> bool:
    return isinstance(value, Mapping) and {"python", "numpy", "cuda-bindings"} <= set(value) and all(
        map(_text, value.values()))
