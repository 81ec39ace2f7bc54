"""Builds the simulator: kernel sources and cuda_src/sim through a C++ compiler into a libcuda.so.1.

Called by sim/load.py at first use and by tests.  One object per kernel, keyed by everything that goes into
it, so a changed kernel costs its own compilation and a link.  The result lies in the user's cache folder
under the digest of the whole, written by rename; lock files keep two processes from making the same one.
What must stay true: the same sources, declarations, flags and compiler give the same path; nothing is written
anywhere but in the cache folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ..errors import BuildError
from ..kernels import catalog
from ..kernels.spec import F32, I32, PTR, U32, U64, KernelSpec

__all__ = ["Compiler", "Variant", "build", "cache_root", "find_compiler", "unit_text"]

_KINDS: Final = {PTR: "p", U32: "u", I32: "i", U64: "q", F32: "f"}
_RIGHTS: Final = {"": "-", "r": "r", "w": "w", "rw": "b"}
_FLAGS: Final = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-pthread",
    "-DFN_SIM",
    "-Wall",
    "-Wno-psabi",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-Wno-unused-variable",
    "-Wno-unused-const-variable",
)
# a fiber's stack has 64 KiB and no guard behind it: nothing else would notice a kernel that needs more
_GCC_FRAMES: Final = ("-Werror=frame-larger-than=32768",)
_CLANG_FRAMES: Final = ("-Wframe-larger-than=32768", "-Werror=frame-larger-than=")
_V3_FEATURES: Final = {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"}
_INCLUDE: Final = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_WORDS_BYTES: Final = 600
_KEPT_LIBRARIES: Final = 16
_KEPT_OBJECTS_S: Final = 14 * 24 * 3600.0


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.  command: how to call it.  version: its first words.  target: flags for it and
    this machine's CPU."""

    command: tuple[str, ...]
    version: str
    target: tuple[str, ...]


@dataclass(frozen=True)
class Variant:
    """One kernel from other text, linked beside the real ones: what the check plants.

    family: what its image names; no other's.  folder: a whole copy of the sources, with the edits made;
    needed while it is built, never in the result.  digest: of those edits and texts.
    """

    family: str
    spec: KernelSpec
    folder: Path
    digest: str


@dataclass(frozen=True)
class _Unit:
    """One object to compile.  folder: where its includes are looked up first, then in root.  family: "" for
    the runtime."""

    name: str
    text: str
    family: str
    folder: Path
    flags: tuple[str, ...]
    key: str
    root: Path


@dataclass(frozen=True)
class _Included:
    """A file of the sources.  path: below the root.  digest: of its bytes.  names: what it includes."""

    path: str
    folder: Path
    digest: bytes
    names: list[str]

    @classmethod
    def read(cls, path: Path, root: Path) -> _Included:
        data = path.read_bytes()
        names = _INCLUDE.findall(data.decode("utf-8", "replace"))
        below = os.path.relpath(path.resolve(), root.resolve())
        return cls(below, path.parent, hashlib.sha256(data).digest(), names)


# (folder, name of an include in it): the file, None: of the system
_Read = dict[tuple[Path, str], _Included | None]


class _Builder:
    """Compiler, flags and sources of one build."""

    def __init__(self, compiler: Compiler, flags: tuple[str, ...], root: Path) -> None:
        self.compiler = compiler
        self.flags = flags
        self.root = root
        self._read: _Read = {}

    def unit(self, name: str, text: str, family: str, folder: Path, extra: tuple[str, ...] = ()) -> _Unit:
        flags = (*self.flags, *extra)
        key = _unit_key(self.compiler, flags, self.root, folder, text, self._read)
        return _Unit(name, text, family, folder, flags, key, self.root)

    def runtime(self, ucontext: bool) -> list[_Unit]:
        """The simulator's own sources; only the executor knows how fibers are switched."""
        out = []
        for path in sorted((self.root / "sim").glob("*.cpp")):
            extra = ("-DFN_SIM_UCONTEXT=1",) if ucontext and path.name == "executor.cpp" else ()
            text = path.read_text(encoding="utf-8")
            out.append(self.unit(f"sim/{path.name}", text, "", path.parent, extra))
        return out

    def kernels(self, family: str) -> list[_Unit]:
        """One unit per kernel: variants of one source take longest, so they are compiled side by side."""
        return [
            self.unit(spec.source, unit_text(family, spec), family, self.root)
            for spec in catalog.specs(family)
        ]

    def compile(self, units: Sequence[_Unit], broken: dict[str, str] | None) -> dict[str, Path]:
        """Objects of `units` by key.  A failing kernel is noted in `broken` if that is given, else raised."""
        store = cache_root() / "objects"
        store.mkdir(parents=True, exist_ok=True)
        wanted = {u.key: store / f"{u.key}.o" for u in units}

        def one(unit: _Unit) -> None:
            try:
                self._compile_one(unit, wanted[unit.key])
            except BuildError as error:
                if broken is None or not unit.family:
                    raise
                broken.setdefault(unit.family, str(error))

        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            list(pool.map(one, [u for u in units if not wanted[u.key].is_file()]))
        return wanted

    def link(self, objects: Sequence[Path], library: Path) -> None:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            out = Path(scratch) / library.name
            how = ("-shared", "-pthread", f"-Wl,-soname,{library.name}", "-o", str(out))
            _run((*self.compiler.command, *how, *(str(o) for o in objects)), "library")
            os.replace(out, library)

    def _compile_one(self, unit: _Unit, target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            source, out = Path(scratch) / "unit.cpp", Path(scratch) / "unit.o"
            source.write_text(unit.text, encoding="utf-8")
            where = (f"-I{unit.root}", f"-I{unit.root / 'sim'}", "-c", str(source), "-o", str(out))
            _run((*self.compiler.command, *unit.flags, *where), unit.name)
            if _unit_key(self.compiler, unit.flags, unit.root, unit.folder, unit.text, {}) != unit.key:
                raise BuildError(f"{unit.name} changed while it was compiled", do="run it again")
            os.replace(out, target)


def cache_root() -> Path:
    """The user's cache folder for built simulators; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "flashnext_drv"


@lru_cache(maxsize=1)
def find_compiler() -> Compiler:
    """g++, else clang++, else the compiler of the `ziglang` wheel.

    Raises BuildError, saying what to install, when there is none.
    """
    for name in ("g++", "clang++"):
        path = shutil.which(name)
        if path is None:
            continue
        version = _version((path, "--version"))
        if version is not None:
            frames = _GCC_FRAMES if name == "g++" else _CLANG_FRAMES
            return Compiler((path,), version, (*frames, *(("-march=x86-64-v3",) if _has_v3() else ())))
    if find_spec("ziglang") is not None:
        command = (sys.executable, "-m", "ziglang", "c++")
        version = _version((sys.executable, "-m", "ziglang", "version"))
        if version is not None:
            cpu = ("-mcpu=x86_64_v3",) if _has_v3() else ()
            return Compiler(command, f"zig {version}", (*_CLANG_FRAMES, *cpu))
    raise BuildError(
        "the simulator cannot be built",
        because="no C++ compiler was found (g++, clang++, ziglang)",
        do="install g++ (apt install g++), or pip install 'flashnext_drv[sim]' for the ziglang wheel",
    )


def build(
    families: Sequence[str] | None = None,
    *,
    portable: bool = False,
    ucontext: bool = False,
    partial: bool = False,
    variants: Sequence[Variant] = (),
) -> Path:
    """Path of the library with the kernels of `families` (None: all), built now if the cache lacks it.

    portable: without CPU extensions.  ucontext: fibers by swapcontext (what machines other than x86-64 use).
    partial: a family that does not compile is left out (its modules are refused with the compiler's words)
    instead of failing the build; for work on kernels.  variants: more kernels, each a family of its own.
    Raises BuildError with the compiler's first complaint.
    """
    compiler = find_compiler()
    flags = _FLAGS + (("-DFN_SIM_PORTABLE",) if portable else compiler.target)
    builder = _Builder(compiler, flags, catalog.source_root())
    chosen = tuple(families) if families is not None else catalog.families()
    units = builder.runtime(ucontext)
    broken: dict[str, str] = {}
    for family in chosen:
        try:
            units += builder.kernels(family)
        except Exception as error:  # a family's declarations may be half written, in any way
            if not partial:
                raise
            broken[family] = f"{type(error).__name__}: {error}"
    made = []
    for one in variants:
        text = unit_text(one.family, one.spec)
        made.append(_Builder(compiler, flags, one.folder).unit(one.family, text, one.family, one.folder))
    digests = {family: "" if family in broken else catalog.image_digest(family) for family in chosen}
    digests |= {one.family: one.digest for one in variants}
    mark = hashlib.sha256()
    for unit in (*units, *made):
        mark.update(f"{unit.family}\0{unit.name}\0{unit.key}\0".encode())
    for family, digest in digests.items():
        mark.update(f"{family}\0{broken.get(family) or digest}\0".encode())
    library = cache_root() / f"sim-{mark.hexdigest()[:32]}" / "libcuda.so.1"
    if library.is_file():
        os.utime(library)
        return library
    with _lock(cache_root() / f"{mark.hexdigest()[:2]}.lock"):
        if library.is_file():
            return library
        objects = builder.compile([*units, *made], broken if partial else None)
        record = builder.unit("sim/built", _table(digests, broken), "", builder.root / "sim")
        objects |= builder.compile([record], None)
        good = [u for u in (*units, *made, record) if u.family not in broken]
        if broken:  # never taken for the whole one later
            library = cache_root() / f"sim-partial-{mark.hexdigest()[:24]}" / library.name
        builder.link([objects[u.key] for u in good], library)
        _prune()
    return library


def unit_text(family: str, spec: KernelSpec) -> str:
    """The text that compiles one kernel: its source under the macros of its declaration."""
    macros = (
        *spec.macros(),
        ("FN_SIM_FAMILY", f'"{family}"'),
        ("FN_SIM_KINDS", '"' + "".join(_KINDS[a.kind] for a in spec.args) + '"'),
        ("FN_SIM_RIGHTS", '"' + "".join(_RIGHTS[a.rights] for a in spec.args) + '"'),
        ("FN_SIM_FENCE", str(int(spec.fence))),
    )
    lines = [f"#define {name} {value}" for name, value in macros]
    return "\n".join([*lines, '#include "prelude.cuh"', f'#include "{spec.source}"']) + "\n"


def _unit_key(
    compiler: Compiler, flags: Sequence[str], root: Path, folder: Path, text: str, read: _Read
) -> str:
    """Of everything that goes into an object.  read: what is known of its includes, and gets known."""
    digest = hashlib.sha256("\0".join((compiler.version, *flags, text)).encode())
    for file in sorted(_included(root, folder, text, read), key=lambda file: file.path):
        digest.update(file.path.encode() + b"\0" + file.digest)
    return digest.hexdigest()[:40]


def _included(root: Path, folder: Path, text: str, read: _Read) -> list[_Included]:
    """Every file that `text` (standing in `folder`) includes by quotes, directly or not, once."""
    found: dict[str, _Included] = {}
    todo = [(folder, _INCLUDE.findall(text))]
    while todo:
        here, names = todo.pop()
        for name in names:
            if (here, name) not in read:
                path = next((p for p in (here / name, root / name) if p.is_file()), None)
                read[here, name] = None if path is None else _Included.read(path, root)
            file = read[here, name]
            if file is not None and file.path not in found:
                found[file.path] = file
                todo.append((file.folder, file.names))
    return list(found.values())


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        first = next(
            (line for line in said if "error" in line), said[0] if said else f"exit {done.returncode}"
        )
        raise BuildError(
            f"the simulator's {what} does not compile",
            because=first[:_WORDS_BYTES],
            do="see the compiler's output: " + " | ".join(said[:8])[:_WORDS_BYTES],
        )


def _table(digests: dict[str, str], broken: dict[str, str]) -> str:
    """C++ text of the list that module.cpp compares images with."""
    rows = []
    for family, known in digests.items():
        words = (
            broken.get(family, "")
            .encode("ascii", "replace")
            .decode()
            .replace("\\", "\\\\")
            .replace('"', '\\"')
        )
        digest = "" if family in broken else known
        rows.append(f'    {{"{family}", "{digest}", "{" ".join(words.split())[:_WORDS_BYTES]}"}},')
    return (
        "namespace fnsim {\nstruct Built { const char *family, *digest, *words; };\n"
        "extern const Built built[];\nconst Built built[] = {\n"
        + "\n".join(rows)
        + "\n    {nullptr, nullptr, nullptr},\n};\n}\n"
    )


def _version(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = done.stdout.strip().splitlines()
    return said[0] if done.returncode == 0 and said else None


def _has_v3() -> bool:
    if platform.machine() != "x86_64":
        return False
    try:
        words = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    flags = re.search(r"^flags\s*:(.*)$", words, re.MULTILINE)
    return flags is not None and set(flags.group(1).split()) >= _V3_FEATURES


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _prune() -> None:
    """Drop what has not been used for a while: all but the newest libraries, and old objects."""
    libraries = sorted(cache_root().glob("sim-*/libcuda.so.1"), key=_used, reverse=True)
    for old in libraries[_KEPT_LIBRARIES:]:
        shutil.rmtree(old.parent, ignore_errors=True)
    for path in (cache_root() / "objects").glob("*.o"):
        if time.time() - _used(path) > _KEPT_OBJECTS_S:
            path.unlink(missing_ok=True)


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
