"""`doctor`: what this machine has, what would run, what is missing and how to get it.

Works without driver, compiler, kernel images and optional packages; builds nothing and writes nothing.
Exit 0 when the device asked for can run, else 3.  What must stay true: each thing that is missing is named
with what to do about it.
"""

from __future__ import annotations

import argparse
import platform
from dataclasses import asdict
from importlib import metadata
from typing import Any, Final

from .. import __version__
from ..errors import DriverError, FlashNextError, bytes_text
from ..host_memory import host_memory
from .report import GOOD, MISSING, print_json

__all__ = ["add_parser", "examine", "run"]

_PACKAGES: Final = ("cuda-bindings", "numpy", "safetensors", "ziglang")
_SERVER: Final = ("starlette", "uvicorn", "tokenizers", "jinja2", "prometheus-client")  # the extra
_OPTIONAL: Final = frozenset(("ziglang", *_SERVER))
_HOST_NUMA_ID: Final = 134  # CUdevice_attribute: the host's memory node nearest to the device


def add_parser(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = sub.add_parser(
        "doctor", help="what this machine can run and what is missing", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--device", choices=("auto", "cuda", "sim"), help="default: FLASHNEXT_DRV_DEVICE, else auto"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the findings."""
    found = examine(args.device)
    if args.json:
        print_json(found)
    else:
        _print(found)
    return GOOD if found["runs_on"] else MISSING


def examine(device: str = "auto") -> dict[str, Any]:
    """All findings as plain data.  device: what is asked for; "auto" takes a GPU, else the simulator."""
    missing: list[dict[str, str]] = []
    packages = {name: _version(name) for name in (*_PACKAGES, *_SERVER)}
    for name, version in packages.items():
        if version is None and name not in _OPTIONAL:
            missing.append({"what": f"the Python package {name}", "do": "pip install flashnext_drv"})
    absent = [name for name in _SERVER if packages[name] is None]
    if absent:
        missing.append(
            {
                "what": f"what `serve` needs ({', '.join(absent)})",
                "do": "pip install 'flashnext_drv[server]'; all other commands run without",
            }
        )
    host = host_memory()
    images = _images(missing)
    gpu: dict[str, Any] = {"usable": False, "devices": []}
    if device != "sim":
        gpu = _gpu(images["archs"], missing, wanted=device, nodes=host.nodes)
    simulator = _simulator(missing, needed=device == "sim" or (device == "auto" and not gpu["usable"]))
    runs_on = "cuda" if gpu["usable"] else "sim" if simulator["usable"] and device != "cuda" else ""
    return {
        "version": __version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "packages": packages,
        "host": asdict(host) | {"text": str(host)},
        "images": images,
        "gpu": gpu,
        "simulator": simulator,
        "asked": device,
        "runs_on": runs_on,
        "device": _device_text(runs_on, gpu),
        "missing": missing,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _images(missing: list[dict[str, str]]) -> dict[str, Any]:
    """Kernel images by architecture; stale: families whose sources changed since."""
    from ..kernels import catalog

    try:
        manifest = catalog.manifest()
        stale = sorted(
            {i.family for i in manifest.images if i.source_digest != catalog.image_digest(i.family)}
        )
    except FlashNextError as error:
        missing.append({"what": f"kernel images for GPUs ({error.because or error.what})", "do": error.do})
        return {"archs": {}, "stale": [], "tool": {}}
    if stale:
        missing.append(
            {
                "what": f"current kernel images of {', '.join(stale)} (sources changed)",
                "do": "run python build_kernels.py",
            }
        )
    archs = {arch: [i.family for i in manifest.images if i.arch == arch] for arch in manifest.archs()}
    return {"archs": archs, "stale": stale, "tool": dict(manifest.tool)}


def _gpu(
    archs: dict[str, list[str]], missing: list[dict[str, str]], *, wanted: str, nodes: tuple[int, ...]
) -> dict[str, Any]:
    """Driver and devices, by loading the real driver into this process.  nodes: as HostMemory's."""
    from ..drv import api
    from ..drv.context import devices
    from ..kernels import catalog

    found: dict[str, Any] = {"usable": False, "devices": []}
    try:
        api.ensure("cuda")
        found["driver_version"] = api.cuDriverGetVersion()
        facts = devices()
    except (FlashNextError, ImportError) as error:
        missing.append(
            {
                "what": f"a GPU with its driver ({error})",
                "do": "install NVIDIA driver 580 or newer"
                + ("" if wanted == "cuda" else "; without one the simulator runs"),
            }
        )
        return found
    for one in facts:
        entry = {
            "ordinal": one.ordinal,
            "name": one.name,
            "compute": f"{one.cc[0]}.{one.cc[1]}",
            "sms": one.n_sms,
            "total_bytes": one.total_bytes,
            "text": str(one),
        }
        found["devices"].append(entry)
        entry["host_node"] = node = _host_node(one.ordinal)
        if node is not None and nodes and node not in nodes:
            missing.append(
                {
                    "what": f"host memory near GPU {one.ordinal}: that is node {node}, and this process may "
                    f"allocate on {', '.join(map(str, nodes))} alone",
                    "do": f"start it with numactl --cpunodebind={node} --membind={node}, or in a cpuset "
                    f"with node {node}",
                }
            )
        try:
            entry["image"] = catalog.pick_arch(one.cc, tuple(archs), gpu=one.name)
            entry["receipt"] = entry["image"] in catalog.QUALIFIED
        except FlashNextError as error:
            missing.append({"what": f"kernel images for GPU {one.ordinal} ({error.because})", "do": error.do})
    found["usable"] = any("image" in entry for entry in found["devices"])
    return found


def _host_node(ordinal: int) -> int | None:
    """None where the driver does not tell, or the machine has no nodes."""
    from ..drv import api

    try:
        node = api.cuDeviceGetAttribute(_HOST_NUMA_ID, api.cuDeviceGet(ordinal))
    except DriverError:
        return None
    return node if node >= 0 else None


def _simulator(missing: list[dict[str, str]], *, needed: bool) -> dict[str, Any]:
    """The compiler that would build the simulator; nothing is built here."""
    from ..sim import build

    try:
        compiler = build.find_compiler()
    except FlashNextError as error:
        if needed:
            missing.append({"what": f"a C++ compiler for the simulator ({error.because})", "do": error.do})
        return {"usable": False}
    return {
        "usable": True,
        "compiler": " ".join(compiler.command),
        "version": compiler.version,
        "cache": str(build.cache_root()),
    }


def _device_text(runs_on: str, gpu: dict[str, Any]) -> str:
    if runs_on == "cuda":
        return str(next(d["text"] for d in gpu["devices"] if "image" in d))
    return "simulator (built at first use)" if runs_on else "none"


def _print(found: dict[str, Any]) -> None:
    print(f"device     {found['device']}")
    print(f"version    flashnext_drv {found['version']}, Python {found['python']}, {found['machine']}")
    print(
        "packages   "
        + ", ".join(f"{n} {v or 'missing'}" for n, v in found["packages"].items() if v or n not in _OPTIONAL)
    )
    print(f"host       {found['host']['text']}")
    gpu, simulator, images = found["gpu"], found["simulator"], found["images"]
    if "driver_version" in gpu:
        version = gpu["driver_version"]
        print(f"driver     CUDA {version // 1000}.{version % 1000 // 10}")
    for one in gpu["devices"]:
        image = one.get("image", "none")
        receipt = "" if one.get("receipt", True) else ", not yet checked on this GPU generation"
        size, node = bytes_text(one["total_bytes"]), one["host_node"]
        near = "" if node is None else f", host memory node {node}"
        print(f"GPU        {one['text']}, {size}{near}, kernel image {image}{receipt}")
    print(
        "images     "
        + ("; ".join(f"{arch}: {len(f)} families" for arch, f in images["archs"].items()) or "none")
        + (f"; stale: {', '.join(images['stale'])}" if images["stale"] else "")
    )
    print(
        "simulator  "
        + (f"{simulator['compiler']}: {simulator['version']}" if simulator["usable"] else "no compiler")
    )
    for one in found["missing"]:
        print(f"missing    {one['what']}\n           -> {one['do']}")
