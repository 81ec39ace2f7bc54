"""Builds the kernel images: a command, and the PEP 517 backend that runs it before setuptools.

    python build_kernels.py [--force] [--jobs N] [--archs sm_90a,sm_120] [--families glue] [--strict]
    python build_kernels.py --controls      # the planted controls of the check, for sm_90a; never shipped
    python build_kernels.py --controls hopper       # only those in text that sm_90a alone has

Declarations -> one NVRTC unit per family and architecture -> flashnext_drv/_cubin/*.cubin and manifest.json.
Needs neither GPU nor driver, and NVRTC only here: the package never imports it.  FLASHNEXT_ARCHS (read here
alone) narrows the architectures.  What must stay true: the same sources, options and wheels give the same
bytes; an image is reused only when every byte that could change it is the same (its key); a kernel whose
parameters, shared memory or block differ from its declaration stops the build.

Images are also kept in the user's cache folder, so a fresh clone or pip's isolated environment does not
compile again.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from flashnext_drv.errors import BuildError  # noqa: E402
from flashnext_drv.kernels import catalog, planting  # noqa: E402
from flashnext_drv.kernels.cubin import CubinKernel, read_cubin, spills  # noqa: E402
from flashnext_drv.kernels.spec import KernelSpec  # noqa: E402

__all__ = ["build", "build_controls", "build_editable", "build_sdist", "build_wheel", "main", "unit_text"]

NVRTC_WHEEL = ("nvidia-cuda-nvrtc", "13.0.88")
HEADER_WHEEL = ("nvidia-cuda-runtime", "13.0.96")
OPTIONS = ("--std=c++17", "--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false",
           "--ptxas-options=-v", "--ptxas-options=-warn-spills")
# measured: 8-16 s a unit, the others below 1.5 s, NVRTC 13.0.88, one x86-64 core; begun first, they end
# together
SLOW_FAMILIES = ("exl3", "moe_gemv")
OUT = HERE / "flashnext_drv" / "_cubin"
PACKED_SOURCES = HERE / "flashnext_drv" / "_cuda_src"


@dataclass(frozen=True)
class Unit:
    """One image to be: key is the digest of all that decides its bytes.  sources: "" for those that lie
    here."""

    family: str
    arch: str
    text: str
    key: str
    sources: str = ""

    @property
    def file(self) -> str:
        return f"{self.family}-{self.arch}-{self.key[:16]}.cubin"


def main(argv: list[str]) -> int:
    """The command.  Exit 0; 1 when --strict and a kernel is over its limits; 3 when something is missing."""
    parser = argparse.ArgumentParser(prog="build_kernels.py", description="Build the kernel images.")
    parser.add_argument("--force", action="store_true", help="compile again what is cached")
    parser.add_argument("--jobs", type=int, default=0, help="processes (default: one a core)")
    parser.add_argument("--archs", default="",
                        help="e.g. sm_90a,sm_120 (default: FLASHNEXT_ARCHS, else all)")
    parser.add_argument("--families", default="", help="families, e.g. glue,exl3 (default: all)")
    parser.add_argument("--strict", action="store_true",
                        help="fail when a kernel is over its declared limits")
    parser.add_argument("--controls", nargs="?", const="all", choices=("all", "hopper"),
                        help="the planted controls of the check, and only these; hopper: of them those in "
                             "text that sm_90a alone has")
    given = parser.parse_args(argv)
    try:
        if given.controls:
            build_controls((archs(given.archs) if given.archs else ("sm_90a",))[0], jobs=given.jobs,
                           hopper_alone=given.controls == "hopper")
            return 0
        families = tuple(given.families.replace(",", " ").split())
        over = build(archs(given.archs or None), families, force=given.force, jobs=given.jobs)
    except BuildError as error:
        print(f"build_kernels: {error}", file=sys.stderr)
        return 3
    return 1 if over and given.strict else 0


def archs(text: str | None = None) -> tuple[str, ...]:
    """The architectures to build: `text`, else FLASHNEXT_ARCHS, else all; "none" builds nothing (the
    simulator needs no images).  Raises BuildError on an unknown one."""
    wanted = text if text is not None else os.environ.get("FLASHNEXT_ARCHS", "")
    if wanted.strip() == "none":
        return ()
    names = tuple(dict.fromkeys(wanted.replace(",", " ").split())) or catalog.ARCHS
    for name in names:
        if name not in catalog.ARCHS:
            raise BuildError(f"architecture {name!r} is not one we build",
                             do=f"use some of {' '.join(catalog.ARCHS)}")
    return tuple(a for a in catalog.ARCHS if a in names)


def unit_text(family: str, arch: str) -> str:
    """The source of one family on `arch`: for each kernel its macros, its file, and the macros undone."""
    lines = [f"// unit of family {family}, made from its declarations"]
    for spec in catalog.specs(family):
        lines += [f"#define {name} {value}".rstrip() for name, value in spec.macros(arch)]
        lines.append(f'#include "{spec.source}"')
        lines += [f"#undef {name}" for name, _ in spec.macros(arch)]
    return "\n".join(lines) + "\n"


def build(wanted: tuple[str, ...], families: tuple[str, ...] = (), *, force: bool = False,
          jobs: int = 0) -> list[str]:
    """Make every image of `wanted` and the manifest.  Returns one text per kernel that is over its limits.

    families: by default all; fewer are for work on one of them.
    """
    start = time.monotonic()
    with _locked():
        tool = _tool()
        units = [_unit(family, arch, tool) for family in families or catalog.families() for arch in wanted]
        cache, before = _cache_folder(), _last_manifest()
        found: dict[str, dict[str, Any]] = {}
        for unit in units:
            entry = None if force else _cached(unit, before, cache)
            if entry is not None:
                found[unit.key] = entry
        todo = [unit for unit in units if unit.key not in found]
        if todo:
            _require_nvrtc()
            found.update(_compile_all(todo, jobs, cache))
        images = [_image(unit, found[unit.key]) for unit in units]
        manifest = {"format": 1, "tool": tool, "options": list(OPTIONS), "option_digest": _digest(OPTIONS),
                    "source_digest": catalog.source_digest(), "images": images}
        _write(OUT / "manifest.json", (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode())
        keep = {unit.file for unit in units}
        for path in OUT.glob("*.cubin"):
            if path.name not in keep:
                path.unlink()
    over = _over_limits(images)
    for text in over:
        print(f"build_kernels: over its limit: {text}", file=sys.stderr)
    print(f"build_kernels: {len(todo)} images compiled, {len(units) - len(todo)} cached, "
          f"{sum(len(i['kernels']) for i in images)} kernels, {time.monotonic() - start:.1f} s",
          file=sys.stderr)
    return over


def build_controls(arch: str, *, jobs: int = 0, hopper_alone: bool = False) -> None:
    """Make the image of every planted control for `arch`, or of those for sm_90a alone, in a folder of their
    own that no wheel packs."""
    start, folder = time.monotonic(), planting.control_root()
    option_digest = _digest([arch, OPTIONS, _tool()])
    try:
        before = json.loads((folder / "manifest.json").read_bytes())
    except (OSError, ValueError):
        before = {}
    entries: dict[str, dict[str, str]] = dict(before) if hopper_alone else {}
    with tempfile.TemporaryDirectory(prefix="flashnext-controls-") as scratch:
        units = []
        for spec, control in planting.controls():
            if hopper_alone and not control.hopper:
                continue
            name, digest = planting.control_image(spec, control), planting.control_digest(spec, control)
            entries[name] = {"file": f"{name}.cubin", "digest": digest, "options": option_digest}
            if before.get(name) == entries[name] and (folder / f"{name}.cubin").is_file():
                continue
            planting.plant(spec, control, Path(scratch) / name)
            text = planting.planted_unit(spec, control, arch)
            units.append(Unit(name, arch, text, digest, str(Path(scratch) / name)))
        if units:
            _require_nvrtc()
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(max_workers=jobs or os.cpu_count() or 1, mp_context=fork) as pool:
            for unit, (data, _) in zip(units, pool.map(_compile, units), strict=True):
                _write(folder / f"{unit.family}.cubin", data)
    for path in folder.glob("*.cubin"):
        if path.stem not in entries:
            path.unlink()
    _write(folder / "manifest.json", (json.dumps(entries, indent=0, sort_keys=True) + "\n").encode())
    print(f"build_kernels: {len(units)} planted controls compiled, {len(entries) - len(units)} cached, "
          f"{time.monotonic() - start:.1f} s", file=sys.stderr)


# ---- PEP 517 and 660 hooks.  Everything they need stands in build-system.requires.

def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return []


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    return []


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return []


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    name: str = _setuptools().prepare_metadata_for_build_wheel(metadata_directory, config_settings)
    return name


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Any = None) -> str:
    name: str = _setuptools().prepare_metadata_for_build_editable(metadata_directory, config_settings)
    return name


def build_wheel(wheel_directory: str, config_settings: Any = None,
                metadata_directory: str | None = None) -> str:
    """A wheel with cubins and kernel sources; the same bytes from the same tree."""
    build(archs())
    os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")
    with _packed_sources():
        name: str = _setuptools().build_wheel(wheel_directory, config_settings, metadata_directory)
    return name


def build_editable(wheel_directory: str, config_settings: Any = None,
                   metadata_directory: str | None = None) -> str:
    """The tree in place, with its cubins."""
    build(archs())
    name: str = _setuptools().build_editable(wheel_directory, config_settings, metadata_directory)
    return name


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """Sources alone; images are made where the sdist is installed."""
    name: str = _setuptools().build_sdist(sdist_directory, config_settings)
    return name


def _setuptools() -> Any:
    return importlib.import_module("setuptools.build_meta")


@contextmanager
def _packed_sources() -> Iterator[None]:
    """The kernel sources beside the package for the time of the packing; a checkout keeps one copy."""
    shutil.rmtree(PACKED_SOURCES, ignore_errors=True)
    shutil.copytree(HERE / "cuda_src", PACKED_SOURCES,
                    ignore=shutil.ignore_patterns("retired", "__pycache__", "*.o"))
    try:
        yield
    finally:
        shutil.rmtree(PACKED_SOURCES, ignore_errors=True)


# ---- units, cache, manifest

def _unit(family: str, arch: str, tool: dict[str, str]) -> Unit:
    text = unit_text(family, arch)
    return Unit(family, arch, text, _digest([text, catalog.source_digest(family), arch, OPTIONS, tool]))


def _image(unit: Unit, entry: dict[str, Any]) -> dict[str, Any]:
    _fits_declaration(unit, entry["kernels"])
    return {"family": unit.family, "arch": unit.arch, "file": unit.file, "sha256": entry["sha256"],
            "size_bytes": entry["size_bytes"], "key": unit.key,
            "source_digest": catalog.source_digest(unit.family),
            "kernels": entry["kernels"]}


def _cached(unit: Unit, before: dict[str, Any], cache: Path | None) -> dict[str, Any] | None:
    """The entry of an image made before, with its file in OUT; None when there is none that is whole.

    before: entries of the last manifest by key; the user's cache comes second.
    """
    try:
        entry: dict[str, Any] = before[unit.key]
        if entry["sha256"] == hashlib.sha256((OUT / unit.file).read_bytes()).hexdigest():
            return entry
    except (KeyError, OSError):
        pass
    if cache is None:
        return None
    try:
        entry = json.loads((cache / f"{unit.key}.json").read_bytes())
        data = (cache / f"{unit.key}.cubin").read_bytes()
    except (OSError, ValueError):
        return None
    if entry.get("sha256") != hashlib.sha256(data).hexdigest():
        return None
    _write(OUT / unit.file, data)
    return entry


def _last_manifest() -> dict[str, Any]:
    """Entries of the last build by key; empty when there was none."""
    try:
        images = json.loads((OUT / "manifest.json").read_bytes())["images"]
        return {image["key"]: {k: image[k] for k in ("sha256", "size_bytes", "kernels")} for image in images}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _store(unit: Unit, data: bytes, entry: dict[str, Any], cache: Path | None) -> None:
    _write(OUT / unit.file, data)
    if cache is not None:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            _write(cache / f"{unit.key}.cubin", data)
            _write(cache / f"{unit.key}.json", json.dumps(entry, sort_keys=True).encode())
        except OSError as error:
            print(f"build_kernels: no cache in {cache}: {error}", file=sys.stderr)


def _cache_folder() -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "flashnext_drv" / "cubin" if os.path.isabs(base) else None


def _fits_declaration(unit: Unit, kernels: dict[str, Any]) -> None:
    for spec in catalog.specs(unit.family):
        made = kernels.get(spec.name)
        if made is None:
            raise BuildError(f"the unit of {unit.family} for {unit.arch} has no kernel {spec.name}",
                             do=f"define it with FN_KERNEL in {spec.source}")
        declared = {"params": [list(p) for p in spec.offsets()], "shared_bytes": spec.static_on(unit.arch),
                    "max_threads": spec.block}
        for what, value in declared.items():
            if made[what] != value:
                raise BuildError(f"kernel {spec.name} on {unit.arch} differs from its declaration",
                                 because=f"{what}: built {made[what]}, declared {value}")


def _over_limits(images: list[dict[str, Any]]) -> list[str]:
    over = []
    for image in images:
        for spec in catalog.specs(image["family"]):
            over += [f"{spec.name} on {image['arch']}: {text}" for text in _excess(spec, image)]
    return over


def _excess(spec: KernelSpec, image: dict[str, Any]) -> list[str]:
    limit, made = spec.limits.get(image["arch"]), image["kernels"][spec.name]
    if limit is None:
        return []
    spilled = max(made["spill_store_bytes"], made["spill_load_bytes"])
    out = [f"{made['regs']} registers, limit {limit.regs}"] if made["regs"] > limit.regs else []
    if spilled > limit.spill_bytes:
        out.append(f"{spilled} spill bytes, limit {limit.spill_bytes}")
    return out


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(data)
    os.replace(part, path)


@contextmanager
def _locked() -> Iterator[None]:
    """One build at a time in this tree."""
    OUT.mkdir(parents=True, exist_ok=True)
    with open(OUT / ".lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---- the compiler

def _tool() -> dict[str, str]:
    """Versions that decide bytes; the pinned ones, whether or not they are needed this time."""
    for name, pinned in (NVRTC_WHEEL, HEADER_WHEEL):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue        # enough when every image is cached; _require_nvrtc says so when not
        if version != pinned:
            raise BuildError(f"{name} {version} is installed, the kernels are built with {pinned}",
                             do=f"pip install {name}=={pinned}")
    return {"nvrtc": "13.0", NVRTC_WHEEL[0]: NVRTC_WHEEL[1], HEADER_WHEEL[0]: HEADER_WHEEL[1]}


def _cuda_root() -> Path | None:
    """nvidia/cu13 along sys.path: in pip's isolated environment the wheels lie in no site folder."""
    for entry in sys.path:
        root = Path(entry or ".").resolve() / "nvidia" / "cu13"
        if (root / "lib" / "libnvrtc.so.13").is_file() and (root / "include" / "cuda.h").is_file():
            return root
    return None


def _require_nvrtc() -> None:
    if _cuda_root() is None:
        pins = " ".join(f"{name}=={version}" for name, version in (NVRTC_WHEEL, HEADER_WHEEL))
        raise BuildError("NVRTC or the CUDA headers are missing", do=f"pip install {pins}")


def _compile_all(units: list[Unit], jobs: int, cache: Path | None) -> dict[str, dict[str, Any]]:
    workers = max(1, min(len(units), jobs or os.cpu_count() or 1))
    done: dict[str, dict[str, Any]] = {}
    failed: list[BuildError] = []
    # Safe: no thread runs yet, and only the children load NVRTC.
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(max_workers=workers, mp_context=fork) as pool:
        slow_first = sorted(units, key=lambda unit: unit.family not in SLOW_FAMILIES)
        jobs_given = [(unit, pool.submit(_compile, unit)) for unit in slow_first]
        for unit, job in jobs_given:
            try:
                data, log = job.result()
            except BuildError as error:
                failed.append(error)
                continue
            entry = _entry(data, log)
            _store(unit, data, entry, cache)
            done[unit.key] = entry
            if sys.stderr.isatty():
                print(f"\rbuild_kernels: {len(done)} of {len(units)} ", end="", file=sys.stderr, flush=True)
    if failed:          # after the rest was compiled and kept, so that mending one family costs one family
        raise failed[0]
    return done


def _entry(data: bytes, log: str) -> dict[str, Any]:
    _, kernels = read_cubin(data)
    spilled = spills(log)
    return {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data),
            "kernels": {name: _record(kernel, spilled.get(name, (0, 0))) for name,
                        kernel in sorted(kernels.items())}}


def _record(kernel: CubinKernel, spilled: tuple[int, int]) -> dict[str, Any]:
    return {"regs": kernel.regs, "shared_bytes": kernel.shared_bytes, "stack_bytes": kernel.stack_bytes,
            "spill_store_bytes": spilled[0], "spill_load_bytes": spilled[1],
            "max_threads": kernel.max_threads,
            "barriers": kernel.barriers, "params": [list(p) for p in kernel.params]}


def _compile(unit: Unit) -> tuple[bytes, str]:
    """(cubin, log) of one unit, in a process of its own.  Raises BuildError with the compiler's words."""
    root = _cuda_root()
    assert root is not None
    for builtins in sorted((root / "lib").glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)     # NVRTC looks for it by name alone
    nvrtc = ctypes.CDLL(str(root / "lib" / "libnvrtc.so.13"), mode=ctypes.RTLD_GLOBAL)
    program = ctypes.c_void_p()
    _check(nvrtc,
           nvrtc.nvrtcCreateProgram(ctypes.byref(program), unit.text.encode(), f"{unit.family}.cu".encode(),
                                           0, None, None))
    options = [f"--gpu-architecture={unit.arch}", *OPTIONS, f"-I{unit.sources or catalog.source_root()}",
               f"-I{root / 'include'}"]
    packed = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    result = nvrtc.nvrtcCompileProgram(program, len(options), packed)
    log = _fetch(nvrtc, program, "nvrtcGetProgramLogSize",
                 "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace")
    if result:
        raise BuildError(f"family {unit.family} does not compile for {unit.arch}",
                         because=f"\n{log.strip()}\n")
    data = _fetch(nvrtc, program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")
    _check(nvrtc, nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))
    return data, log


def _fetch(nvrtc: Any, program: ctypes.c_void_p, size_call: str, call: str) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, size_call)(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, call)(program, buffer))
    return buffer.raw


def _check(nvrtc: Any, result: int) -> None:
    if result:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise BuildError(f"NVRTC failed: {nvrtc.nvrtcGetErrorString(result).decode()}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
