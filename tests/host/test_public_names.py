"""Public names are what `__all__` says, and exist; the package's own list is pinned here."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import flashnext_drv

PACKAGE = Path(flashnext_drv.__file__).resolve().parent
PINNED = ["BuildError", "Cancelled", "CapacityError", "CheckpointError", "ContextLost", "ContractError",
          "Draining", "DriverError", "DriverMissing", "Edits", "Engine", "FlashNextError", "Generation",
          "LeakError", "Limits", "MemoryReport", "OutOfMemory", "Prefill", "QueueFull", "Request", "Sampling",
          "Scheduler", "SimError", "UsageError", "__version__"]


def modules() -> list[str]:
    paths = [p for p in sorted(PACKAGE.rglob("*.py")) if p.name not in ("__init__.py", "__main__.py")]
    return [".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts) for p in paths]


def defined(name: str) -> set[str]:
    """Names a module defines at its top, imports left out."""
    path = PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py")
    out: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            out.add(node.name)
        elif isinstance(node, ast.Assign):
            out.update(t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            out.add(node.target.id)
    return out


def test_the_package_offers_the_pinned_names() -> None:
    assert sorted(flashnext_drv.__all__) == sorted(PINNED)
    for name in PINNED:
        assert getattr(flashnext_drv, name) is not None
    with pytest.raises(AttributeError):
        flashnext_drv.nothing  # noqa: B018


@pytest.mark.parametrize("name", modules())
def test_every_module_lists_names_that_exist(name: str) -> None:
    module = importlib.import_module(name)
    assert hasattr(module, "__all__"), f"{name} has no __all__"
    assert len(set(module.__all__)) == len(module.__all__), f"{name} lists a name twice"
    for public in module.__all__:
        assert hasattr(module, public), f"{name}.__all__ has {public}, the module has not"


@pytest.mark.parametrize("name", modules())
def test_functions_and_classes_without_underscore_are_listed(name: str) -> None:
    module = importlib.import_module(name)
    made = {n for n in defined(name) if not n.startswith("_")}
    hidden = {n for n in made - set(module.__all__)
              if getattr(getattr(module, n), "__module__", "") == name and callable(getattr(module, n))}
    assert not hidden, f"{name}: {sorted(hidden)} are neither private nor in __all__"


def test_no_star_imports() -> None:
    for name in modules():
        path = PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert all(alias.name != "*" for alias in node.names), name
