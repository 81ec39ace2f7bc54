"""Imports go one way: the table of the architecture, read from the sources with `ast`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from flashnext_drv.kernels import catalog

PACKAGE = Path(__file__).resolve().parents[2] / "flashnext_drv"

# part of the package -> (parts it may import, third-party packages it may import)
RULES: dict[str, tuple[set[str], set[str]]] = {
    "root": ({"errors", "engine", "cli"}, set()),
    "errors": (set(), set()),
    "ledger": ({"errors"}, set()),
    "lifetime": ({"errors"}, set()),
    "host_memory": ({"errors"}, set()),
    "drv": ({"errors", "ledger", "lifetime", "host_memory", "drv", "sim"}, {"numpy", "cuda"}),
    "sim": ({"errors", "ledger", "lifetime", "sim", "kernels"}, {"numpy"}),
    "kernels": ({"errors", "ledger", "lifetime", "kernels", "drv"}, {"numpy"}),
    "ref": ({"errors", "ledger", "lifetime", "drv", "kernels", "ref"}, {"numpy"}),
    "check": ({"errors", "ledger", "lifetime", "drv", "sim", "kernels", "ref", "check"}, {"numpy"}),
    "model": ({"errors", "ledger", "lifetime", "kernels", "model"}, {"numpy", "safetensors"}),
    "state": ({"errors", "ledger", "lifetime", "drv", "kernels", "model", "state"}, {"numpy", "safetensors"}),
    "engine": ({"errors", "ledger", "lifetime", "host_memory", "drv", "kernels", "model", "state", "engine"},
               {"numpy"}),
    "bench": ({"errors", "ledger", "lifetime", "drv", "kernels", "model", "state", "engine", "bench"},
              {"numpy"}),
}
EVERYTHING = {"errors", "ledger", "lifetime", "host_memory", "drv", "sim", "kernels", "ref", "check", "model",
              "state", "engine", "bench", "root"}
RULES["server"] = (EVERYTHING | {"server"}, {"numpy", "starlette", "uvicorn", "tokenizers", "jinja2",
                                             "prometheus_client"})
RULES["cli"] = (EVERYTHING | {"server", "cli"}, {"numpy", "safetensors"})
RULES["__main__"] = (EVERYTHING | {"server", "cli"}, set())
# Kernel declarations and what the build reads are plain data.
PLAIN = tuple(f"kernels/{name}.py" for name in ("spec", "cubin", "catalog", *catalog.FAMILIES))


def modules() -> list[Path]:
    found = sorted(PACKAGE.rglob("*.py"))
    assert len(found) > 10
    return [p for p in found if "_cuda_src" not in p.parts]


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """Absolute names of everything a module imports, TYPE_CHECKING blocks left out."""
    names: set[str] = set()
    package = dotted(path).split(".") if path.name == "__init__.py" else dotted(path).split(".")[:-1]

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[:len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names.add(stem)
            names.update(f"{stem}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module" and node.args \
                and isinstance(node.args[0], ast.Constant):
            names.add(str(node.args[0].value))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return names


def part_of(name: str) -> str:
    pieces = name.split(".")
    if len(pieces) == 1:
        return "root"
    return pieces[1] if (PACKAGE / pieces[1]).is_dir() or (PACKAGE / f"{pieces[1]}.py").is_file() else "root"


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_no_import_against_the_layers(path: Path) -> None:
    part = part_of(dotted(path))
    assert part in RULES, f"{part} has no place in the layers: add it to the table"
    ours, third = RULES[part]
    relative = path.relative_to(PACKAGE).as_posix()
    if relative in PLAIN:
        ours, third = {"kernels",
                       "errors"}, {"numpy"}      # inside functions: a test below imports without it
    for name in imports(path):
        top = name.split(".")[0]
        if top == "flashnext_drv":
            if name == "flashnext_drv" or part_of(name) == "root":
                continue
            assert part_of(name) in ours, f"{dotted(path)} imports {name}: {part} may import {sorted(ours)}"
            if relative in PLAIN:
                assert not name.startswith(("flashnext_drv.kernels.bind",
                                            "flashnext_drv.kernels.tables")), name
        elif top not in sys.stdlib_module_names:
            assert top in third, f"{dotted(path)} imports {name}: {part} may import {sorted(third)}"


def test_only_one_module_imports_the_binding() -> None:
    assert [dotted(p) for p in modules() if any(n.split(".")[0] == "cuda" for n in imports(p))] \
        == ["flashnext_drv.drv.api"]


def test_nvrtc_is_nowhere_in_the_package() -> None:
    said = [dotted(p) for p in modules() if any("nvrtc" in name for name in imports(p))]
    loaded = [dotted(p) for p in modules() if "libnvrtc" in p.read_text(encoding="utf-8")]
    assert said == [] and loaded == []


def test_no_cycles() -> None:
    names = {dotted(p): p for p in modules()}
    graph = {name: {n for n in imports(path) if n in names and n != name} for name, path in names.items()}
    for node in graph:      # a package's own __init__ is no edge of its modules
        graph[node] = {n for n in graph[node] if names[n].name != "__init__.py"}
    done: set[str] = set()

    def walk(node: str, trail: tuple[str, ...]) -> None:
        assert node not in trail, "cycle: " + " -> ".join([*trail[trail.index(node):], node])
        if node not in done:
            for other in sorted(graph[node]):
                walk(other, (*trail, node))
            done.add(node)

    for node in sorted(graph):
        walk(node, ())


def test_every_module_imports_without_a_driver() -> None:
    names = [dotted(p) for p in modules() if p.name != "__main__.py"]
    code = ("import ctypes, importlib, sys\n"
            "real = ctypes.CDLL\n"
            "def cdll(name, *a, **k):\n"
            "    assert 'libcuda' not in str(name), name\n"
            "    return real(name, *a, **k)\n"
            "ctypes.CDLL = cdll\n"
            f"for name in {names!r}: importlib.import_module(name)\n"
            "assert 'libcuda' not in open('/proc/self/maps').read()\n"
            "assert 'cuda.bindings' not in sys.modules\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_build_reads_declarations_without_numpy() -> None:
    code = ("import sys\n"
            "for name in ('numpy', 'cuda', 'safetensors'): sys.modules[name] = None\n"
            "from flashnext_drv.kernels import catalog\n"
            "assert catalog.specs() and catalog.source_digest()\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_environment_is_read_in_two_files_alone() -> None:
    readers = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) \
                    and node.value.startswith("FLASHNEXT_") and node.value.isupper():
                readers.append(dotted(path))
    assert set(readers) <= {"flashnext_drv.__main__"}, readers
