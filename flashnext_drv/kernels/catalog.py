"""All kernel declarations, where their sources lie, and what the build made of them.

Read by build_kernels.py (in an isolated environment: stdlib only), kernels/bind.py, sim/build.py, check/ and
tools. What must stay true: a kernel name occurs once, every declaration has its source, and nothing here
compiles anything.

In a checkout the sources are the top-level `cuda_src`, in an installed package the copy `_cuda_src` beside
this package; the images and `manifest.json` lie in `_cubin` in both.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import posixpath
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from ..errors import BuildError
from .spec import ARCHS, STAGES, KernelSpec

__all__ = ["ARCHS", "FAMILIES", "QUALIFIED", "Image", "KernelRecord", "Manifest", "cubin_root", "families",
           "image_digest", "kernel_digest", "manifest", "pick_arch", "reached", "read_manifest",
           "require_whole", "source_digest", "source_files", "source_root", "spec", "specs"]

FAMILIES: Final = ("glue", "exl3", "attn", "gdn", "moe", "moe_gemv", "deep", "moe_deep", "token", "move",
                   "probe")
# GPU generations for which tests/receipts holds a run of every kernel case; all others open with a warning.
QUALIFIED: Final[frozenset[str]] = frozenset({"9.0"})
_PACKAGE: Final = Path(__file__).resolve().parents[1]
_MANIFEST_FORMAT: Final = 1
_INCLUDE: Final = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class KernelRecord:
    """What one kernel became on one architecture.  Bytes a thread: stack, spills; bytes a block: shared.

    params: (offset, size) in bytes of every parameter, from the image.  max_threads: the most a block may
    have.
    """

    regs: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    max_threads: int
    barriers: int
    params: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Image:
    """One cubin: a family on an architecture.  sha256: of its bytes.  source_digest: of what it was built
    from."""

    family: str
    arch: str
    file: str
    sha256: str
    size_bytes: int
    source_digest: str
    kernels: dict[str, KernelRecord]

    def read(self, root: Path | None = None) -> bytes:
        """The cubin's bytes.  Raises BuildError when the file is gone or is not the one the manifest tells
        of."""
        path = (root or cubin_root()) / self.file
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BuildError(f"kernel image {self.file} cannot be read", because=str(error.strerror),
                             do="run python build_kernels.py") from error
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise BuildError(f"kernel image {self.file} is not the one in manifest.json",
                             do="run python build_kernels.py --force")
        return data


@dataclass(frozen=True)
class Manifest:
    """Everything the build wrote down.  option_digest: of the compiler's options; tool: NVRTC and wheel
    versions."""

    tool: dict[str, str]
    options: tuple[str, ...]
    option_digest: str
    source_digest: str
    images: tuple[Image, ...]

    def archs(self) -> tuple[str, ...]:
        """The architectures that were built, in the order of ARCHS."""
        built = {image.arch for image in self.images}
        return tuple(a for a in ARCHS if a in built) + tuple(sorted(built - set(ARCHS)))

    def image(self, family: str, arch: str) -> Image:
        """Raises BuildError when that pair was not built."""
        for image in self.images:
            if image.family == family and image.arch == arch:
                return image
        raise BuildError(f"no kernel image of family {family} for {arch}", do="run python build_kernels.py")


def source_root() -> Path:
    """The folder with the kernel sources.  Raises BuildError when there is none."""
    checkout = _PACKAGE.parent / "cuda_src"
    for root in (checkout, _PACKAGE / "_cuda_src"):
        if (root / "tables.cuh").is_file():
            return root
    raise BuildError("the kernel sources are missing", because=f"neither {checkout} nor a packed copy exists",
                     do="reinstall the package")


def cubin_root() -> Path:
    """The folder of cubins and manifest.json; it may not exist yet."""
    return _PACKAGE / "_cubin"


@lru_cache(maxsize=1)
def families() -> tuple[str, ...]:
    """Families that declare kernels, in the order of FAMILIES."""
    return tuple(f for f in FAMILIES if importlib.util.find_spec(f"{__package__}.{f}") is not None)


@cache
def specs(family: str | None = None) -> tuple[KernelSpec, ...]:
    """The declarations of one family, or of all, in declared order.

    Raises BuildError on a name declared twice or a declaration without source.
    """
    if family is None:
        every = tuple(spec for name in families() for spec in specs(name))
        _refuse_twins(every)
        return every
    if family not in families():
        raise BuildError(f"there is no kernel family {family!r}", do=f"use one of {', '.join(families())}")
    module = importlib.import_module(f"{__package__}.{family}")
    declared: tuple[KernelSpec, ...] = tuple(module.KERNELS)
    _refuse_twins(declared)
    root = source_root()
    for one in declared:
        if not (root / one.source).is_file():
            raise BuildError(f"kernel {one.name} is declared without source",
                             because=f"no {one.source} in {root}",
                             do="add the file or drop the declaration")
    return declared


def require_whole() -> None:
    """Raise BuildError when a declaration lacks something, or a kernel source has no declaration.

    Each kernel that is not broken on purpose names a known order (or none), reference, bound, cases, limits
    of every architecture, and planted controls; what it replaces is declared; what it exempts is a stage.
    """
    known = (source_root() / "ARITHMETIC.md").read_text(encoding="utf-8")
    names = {one.name for one in specs()}
    wrong = [f"{one.name}: {text}" for one in specs() if not one.broken for text in _lacks(one, known, names)]
    declared = {one.source for one in specs()}
    found = {path.relative_to(source_root()).as_posix() for path in source_root().rglob("*.cu")}
    wrong += [f"{path}: no kernel is declared" for path in sorted(found - declared)
              if not path.startswith("retired/")]
    if wrong:
        raise BuildError("the kernel declarations are not whole", because="; ".join(wrong[:8]),
                         do="declare what is missing")


def _lacks(one: KernelSpec, known: str, names: set[str]) -> list[str]:
    out = [f"order {order} is not in ARITHMETIC.md" for order in one.order.split(", ") if order not in known]
    out += [f"no {what}" for what in ("reference", "bound", "cases", "controls") if not getattr(one, what)]
    out += [f"no limits of {arch}" for arch in ARCHS if arch not in one.limits]
    out += [f"exempts {stage!r} without a reason" for stage, why in one.exempt.items()
            if stage not in STAGES or not why]
    if one.replaces and one.replaces not in names:
        out.append(f"replaces {one.replaces}, which is not declared")
    return out


def spec(name: str) -> KernelSpec:
    """The declaration called `name`.  Raises BuildError when there is none."""
    for one in specs():
        if one.name == name:
            return one
    raise BuildError(f"no kernel is called {name!r}")


def source_files(family: str | None = None) -> tuple[str, ...]:
    """Paths below source_root of the declared sources (of one family) and of all they include, sorted.

    What only the simulator includes (sim/) is left out.
    """
    return _included([one.source for one in specs(family)])


def reached(source: str) -> tuple[str, ...]:
    """Paths below source_root of one source and of all that it includes, sorted; sim/ left out."""
    return _included([source])


def _included(todo: list[str]) -> tuple[str, ...]:
    """`todo` and all that is included from there, sorted; paths below source_root."""
    root = source_root()
    found: set[str] = set()
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        for name in _INCLUDE.findall((root / path).read_text(encoding="utf-8")):
            beside = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
            included = beside if (root / beside).is_file() else name
            if (root / included).is_file() and not included.startswith("sim/"):
                todo.append(included)
    return tuple(sorted(found))


@cache
def source_digest(family: str | None = None) -> str:
    """SHA-256, hex, over the declared kernels (macros and parameters), their sources and what these include.

    Read once per process: a process keeps the sources it started with.
    """
    return _sources_digest(source_files(family), specs(family))


def kernel_digest(name: str) -> str:
    """SHA-256, hex, of what one kernel is built from: as `source_digest`, for its own source alone."""
    one = spec(name)
    return _sources_digest(_included([one.source]), (one,))


def _sources_digest(paths: tuple[str, ...], declared: tuple[KernelSpec, ...]) -> str:
    digest = hashlib.sha256()
    root = source_root()
    for path in paths:
        digest.update(path.encode() + b"\0" + hashlib.sha256((root / path).read_bytes()).digest())
    for one in declared:
        kinds = [a.kind for a in one.args]
        digest.update(json.dumps([one.name, one.source, one.all_macros(), kinds]).encode())
    return digest.hexdigest()


def image_digest(family: str) -> str:
    """The digest that stands in the image text given to the simulator and in a cubin's manifest entry."""
    return source_digest(family)


def read_manifest(path: Path) -> Manifest:
    """Parse one manifest.json.  Raises BuildError when it is missing or of another format."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if data.get("format") != _MANIFEST_FORMAT:
            raise BuildError(f"{path.name} has format {data.get('format')}, not {_MANIFEST_FORMAT}",
                             do="run python build_kernels.py")
        images = tuple(Image(i["family"], i["arch"], i["file"], i["sha256"], i["size_bytes"],
                             i["source_digest"],
                             {name: _record(k) for name, k in i["kernels"].items()}) for i in data["images"])
        return Manifest(data["tool"], tuple(data["options"]), data["option_digest"], data["source_digest"],
                        images)
    except FileNotFoundError as error:
        raise BuildError("no kernel images were built", because=f"{path} does not exist",
                         do="run python build_kernels.py (needs the extra [build])") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BuildError(f"{path} cannot be used", because=f"{type(error).__name__}: {error}",
                         do="run python build_kernels.py --force") from error


@lru_cache(maxsize=1)
def manifest() -> Manifest:
    """The manifest of this package's images, read once per process."""
    return read_manifest(cubin_root() / "manifest.json")


def pick_arch(cc: tuple[int, int], built: tuple[str, ...], *, gpu: str = "this GPU") -> str:
    """The architecture whose image runs on compute capability `cc`: 9.0 takes sm_90a, others the same or a
    lower minor.

    Raises BuildError naming the GPU and what to build when there is none.
    """
    major, minor = cc
    fitting = []
    for arch in built:
        digits = arch.removeprefix("sm_")
        exact = digits.endswith(("a", "f"))     # such an image runs on its own minor alone
        number = int(digits.rstrip("af"))
        if number // 10 == major and (number % 10 == minor or (number % 10 < minor and not exact)):
            fitting.append((number % 10, exact, arch))
    if fitting:
        return max(fitting)[2]
    known = ", ".join(built) or "nothing"
    raise BuildError(f"no kernel image runs on {gpu}",
                     because=f"compute capability {major}.{minor}, built: {known}",
                     do=f"build with FLASHNEXT_ARCHS={'sm_90a' if cc == (9, 0) else f'sm_{major}{minor}'}")


def _record(data: dict[str, Any]) -> KernelRecord:
    params = tuple((int(offset), int(size)) for offset, size in data["params"])
    return KernelRecord(**{**data, "params": params})


def _refuse_twins(declared: tuple[KernelSpec, ...]) -> None:
    seen: set[str] = set()
    for one in declared:
        if one.name in seen:
            raise BuildError(f"kernel {one.name} is declared twice")
        seen.add(one.name)
