"""Every driver call we use, under the driver's own name: checked, counted, logged, failing only in our error
tree.

The only importer of `cuda.bindings` and the place where the library is chosen: the real libcuda or the
simulator's, loaded before the binding looks for one.  The binding is untyped, so its handles are `Any` here
and nowhere is a cast needed above this file.  The binding fails in two ways, a result code and an exception
(no library, no entry point); both end here.  Called by the other modules of drv/ and, for what they do not
wrap, by whoever knows what it does.

What must stay true: no call names the default stream; a context must be current (drv/context.py sees to
that).

Over 500 lines: one short function for each driver call.
"""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import ContextLost, DriverError, DriverMissing, OutOfMemory, UsageError
from . import faults
from .faults import counters, ring

__all__ = ["Handle", "binding_version", "counters", "ensure", "launch_config", "loaded", "resolve", "ring",
           "route"]
__all__ += ["cuCtxCreate", "cuCtxDestroy", "cuCtxDisablePeerAccess", "cuCtxEnablePeerAccess",
            "cuCtxGetCurrent", "cuCtxPopCurrent", "cuCtxPushCurrent", "cuCtxSynchronize",
            "cuDeviceCanAccessPeer", "cuDeviceGet", "cuDeviceGetAttribute", "cuDeviceGetCount",
            "cuDeviceGetName", "cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRetain", "cuDeviceTotalMem",
            "cuDriverGetVersion", "cuEventCreate", "cuEventDestroy", "cuEventElapsedTime", "cuEventQuery",
            "cuEventRecord", "cuEventSynchronize", "cuFuncGetAttribute", "cuFuncSetAttribute",
            "cuGraphDestroy", "cuGraphExecDestroy", "cuGraphExecUpdate", "cuGraphGetEdges", "cuGraphGetNodes",
            "cuGraphInstantiate", "cuGraphKernelNodeGetParams", "cuGraphLaunch", "cuGraphNodeGetType",
            "cuGraphUpload", "cuLaunchKernel", "cuLaunchKernelEx", "cuMemAlloc", "cuMemFree",
            "cuMemFreeHost", "cuMemGetInfo", "cuMemHostAlloc", "cuMemHostGetDevicePointer", "cuMemcpyAsync",
            "cuMemcpyDtoHAsync",
            "cuMemcpyHtoDAsync", "cuMemcpyPeerAsync", "cuMemsetD8Async", "cuModuleGetFunction",
            "cuModuleLoadData", "cuModuleUnload", "cuStreamBeginCapture", "cuStreamCreate", "cuStreamDestroy",
            "cuStreamEndCapture", "cuStreamIsCapturing", "cuStreamQuery", "cuStreamSynchronize",
            "cuStreamWaitEvent"]

Handle = Any
_NOT_READY: Final = 600
_UPDATE_FAILED: Final = 910
_PROGRAMMATIC_SERIALIZATION: Final = 6      # a CUlaunchAttributeID
_EDGE_DATA_VERSION: Final = 12030           # of the first driver whose cuGraphGetEdges tells edge data
_PROGRAMMATIC_EDGE: Final = 1               # a CUgraphDependencyType
# Codes after which nothing on the context works: ECC, NVLink, contained, illegal address, timeout, assert,
# launch failures, context destroyed.  Source: the comments at CUresult in cuda.h ("the process must be
# terminated").
_STICKY: Final = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 720, 999})
_PROBE: Final = ("import ctypes,sys\n"
                 "try: c=ctypes.CDLL('libcuda.so.1')\n"
                 "except OSError: sys.exit(2)\n"
                 "n=ctypes.c_int(0)\n"
                 "ok=c.cuInit(0)==0 and c.cuDeviceGetCount(ctypes.byref(n))==0 and n.value>0\n"
                 "sys.exit(0 if ok else 3)\n")

_driver: Any = None
_loaded: str = ""
_launch_kernel: Any = None
_launch_kernel_ex: Any = None
_n_findings = 0


def ensure(device: str = "auto") -> str:
    """Load the driver once per process and initialise it.  device: "cuda", "sim" or "auto".

    "auto" takes the real driver when this process has it loaded already or when a probe in a child process
    finds a device, else the simulator.  Returns "cuda" or "sim".  Raises DriverMissing when the wanted one is
    not there, UsageError on another choice than the one this process runs on, BuildError when the simulator
    cannot be built.
    """
    global _driver, _loaded, _launch_kernel, _launch_kernel_ex
    if device not in ("auto", "cuda", "sim"):
        raise UsageError(f"device {device!r} is unknown", do="use auto, cuda or sim")
    if _loaded:
        if device not in ("auto", _loaded):
            raise UsageError(f"this process runs on device {_loaded!r}",
                             do=f"start another process for {device!r}")
        return _loaded
    chosen = device
    if chosen == "auto":
        chosen = "cuda" if _real_in_process() or _real_has_device() else "sim"
    if chosen == "sim":
        if _real_in_process():
            raise UsageError("the simulator cannot stand beside a real driver in one process",
                             because="libcuda.so.1 is loaded already",
                             do="start the simulator in its own process")
        importlib.import_module("flashnext_drv.sim.load").load()
    try:
        _driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DriverMissing("the Python package cuda-python", because=str(error),
                            do="pip install 'cuda-python>=13.0,<14'") from error
    _loaded = chosen
    try:
        _call("cuInit", 0)
        if cuDeviceGetCount() < 1:
            raise DriverMissing("a CUDA device", because="the driver is loaded but lists none",
                                do="use device sim, or check the driver with nvidia-smi")
    except BaseException:
        _driver, _loaded = None, ""
        raise
    _launch_kernel, _launch_kernel_ex = _driver.cuLaunchKernel, _driver.cuLaunchKernelEx
    return chosen


def resolve(device: str) -> str:
    """"cuda" or "sim": what `ensure(device)` would take; loads nothing into this process."""
    if device not in ("auto", "cuda", "sim"):
        raise UsageError(f"device {device!r} is unknown", do="use auto, cuda or sim")
    if device != "auto":
        return device
    return _loaded or ("cuda" if _real_in_process() or _real_has_device() else "sim")


def loaded() -> str:
    """"cuda", "sim", or "" before `ensure`."""
    return _loaded


def route(make: Callable[[Any], Any]) -> Any:
    """Make every call from here on through make(what they go through), something with the binding's
    functions; returns what they went through.  For drv/watch.py alone.  Raises UsageError before `ensure`."""
    global _driver, _launch_kernel, _launch_kernel_ex
    if _driver is None:
        raise UsageError("no driver was chosen", do="call drv.api.ensure(device) first")
    before, _driver = _driver, make(_driver)
    _launch_kernel, _launch_kernel_ex = _driver.cuLaunchKernel, _driver.cuLaunchKernelEx
    return before


def binding_version() -> str:
    """Version of the installed binding, e.g. "13.0.3"."""
    version: str = importlib.import_module("cuda.bindings").__version__
    return version


def cuDriverGetVersion() -> int:
    """E.g. 13000."""
    return int(_call("cuDriverGetVersion"))


def cuDeviceGetCount() -> int:
    return int(_call("cuDeviceGetCount"))


def cuDeviceGet(ordinal: int) -> Handle:
    return _call("cuDeviceGet", ordinal, ordinal=ordinal)


def cuDeviceGetName(device: Handle) -> str:
    name: bytes = _call("cuDeviceGetName", 128, device)
    return name.split(b"\0")[0].decode(errors="replace").strip()


def cuDeviceTotalMem(device: Handle) -> int:
    """Bytes."""
    return int(_call("cuDeviceTotalMem", device))


def cuDeviceGetAttribute(attribute: int, device: Handle) -> int:
    """attribute: the number of a CUdevice_attribute."""
    return int(_call("cuDeviceGetAttribute", _enum("CUdevice_attribute", attribute), device,
                     attribute=attribute))


def cuDeviceCanAccessPeer(device: Handle, peer: Handle) -> bool:
    return bool(_call("cuDeviceCanAccessPeer", device, peer))


def cuCtxCreate(flags: int, device: Handle) -> Handle:
    """A new context, current on this thread afterwards."""
    return _call("cuCtxCreate", None, flags, device)


def cuCtxDestroy(context: Handle) -> None:
    _call("cuCtxDestroy", context)


def cuDevicePrimaryCtxRetain(device: Handle) -> Handle:
    return _call("cuDevicePrimaryCtxRetain", device)


def cuDevicePrimaryCtxRelease(device: Handle) -> None:
    _call("cuDevicePrimaryCtxRelease", device)


def cuCtxPushCurrent(context: Handle) -> None:
    _call("cuCtxPushCurrent", context)


def cuCtxPopCurrent() -> Handle:
    return _call("cuCtxPopCurrent")


def cuCtxGetCurrent() -> Handle:
    """The thread's current context; int() of it is 0 when there is none."""
    return _call("cuCtxGetCurrent")


def cuCtxSynchronize() -> None:
    _call("cuCtxSynchronize")


def cuCtxEnablePeerAccess(peer: Handle) -> None:
    _call("cuCtxEnablePeerAccess", peer, 0)


def cuCtxDisablePeerAccess(peer: Handle) -> None:
    _call("cuCtxDisablePeerAccess", peer)


def cuMemGetInfo() -> tuple[int, int]:
    """(free, total) bytes of the current context's device."""
    free, total = _call("cuMemGetInfo")
    return int(free), int(total)


def cuMemAlloc(size_bytes: int) -> int:
    """Device address.  Raises OutOfMemory."""
    return int(_call("cuMemAlloc", size_bytes, size_bytes=size_bytes))


def cuMemFree(address: int) -> None:
    _call("cuMemFree", address, address=hex(address))


def cuMemHostAlloc(size_bytes: int, flags: int) -> int:
    """Host address of page-locked memory.  flags: 1 portable, 2 mapped, 4 write combined.  Raises
    OutOfMemory."""
    return int(_call("cuMemHostAlloc", size_bytes, flags, size_bytes=size_bytes))


def cuMemFreeHost(address: int) -> None:
    _call("cuMemFreeHost", address, address=hex(address))


def cuMemHostGetDevicePointer(address: int) -> int:
    return int(_call("cuMemHostGetDevicePointer", address, 0, address=hex(address)))


def cuMemcpyHtoDAsync(dst: int, src: int, size_bytes: int, stream: Handle) -> None:
    _call("cuMemcpyHtoDAsync", dst, src, size_bytes, stream, dst=hex(dst), size_bytes=size_bytes)


def cuMemcpyDtoHAsync(dst: int, src: int, size_bytes: int, stream: Handle) -> None:
    _call("cuMemcpyDtoHAsync", dst, src, size_bytes, stream, src=hex(src), size_bytes=size_bytes)


def cuMemcpyAsync(dst: int, src: int, size_bytes: int, stream: Handle) -> None:
    """Both addresses in the unified space: device memory or the device address of mapped pinned memory."""
    _call("cuMemcpyAsync", dst, src, size_bytes, stream, dst=hex(dst), src=hex(src), size_bytes=size_bytes)


def cuMemcpyPeerAsync(dst: int, dst_context: Handle, src: int, src_context: Handle, size_bytes: int,
                      stream: Handle) -> None:
    _call("cuMemcpyPeerAsync", dst, dst_context, src, src_context, size_bytes, stream, size_bytes=size_bytes)


def cuMemsetD8Async(dst: int, value: int, size_bytes: int, stream: Handle) -> None:
    _call("cuMemsetD8Async", dst, value, size_bytes, stream, dst=hex(dst), size_bytes=size_bytes)


def cuStreamCreate(flags: int) -> Handle:
    """flags: 1 = does not wait for the default stream."""
    return _call("cuStreamCreate", flags)


def cuStreamDestroy(stream: Handle) -> None:
    _call("cuStreamDestroy", stream)


def cuStreamSynchronize(stream: Handle) -> None:
    _call("cuStreamSynchronize", stream)


def cuStreamQuery(stream: Handle) -> bool:
    """Whether all work on the stream is done."""
    return _ready("cuStreamQuery", stream)


def cuStreamWaitEvent(stream: Handle, event: Handle) -> None:
    _call("cuStreamWaitEvent", stream, event, 0)


def cuEventCreate(flags: int) -> Handle:
    """flags: 2 = no timing."""
    return _call("cuEventCreate", flags)


def cuEventDestroy(event: Handle) -> None:
    _call("cuEventDestroy", event)


def cuEventRecord(event: Handle, stream: Handle) -> None:
    _call("cuEventRecord", event, stream)


def cuEventQuery(event: Handle) -> bool:
    """Whether the event's last record is done."""
    return _ready("cuEventQuery", event)


def cuEventSynchronize(event: Handle) -> None:
    _call("cuEventSynchronize", event)


def cuEventElapsedTime(start: Handle, end: Handle) -> float:
    """Milliseconds."""
    return float(_call("cuEventElapsedTime", start, end))


def cuModuleLoadData(image: bytes) -> Handle:
    return _call("cuModuleLoadData", np.frombuffer(image, np.uint8).ctypes.data, image_bytes=len(image))


def cuModuleUnload(module: Handle) -> None:
    _call("cuModuleUnload", module)


def cuModuleGetFunction(module: Handle, name: str) -> Handle:
    return _call("cuModuleGetFunction", module, name.encode(), function=name)


def cuFuncGetAttribute(attribute: int, function: Handle) -> int:
    """attribute: the number of a CUfunction_attribute."""
    return int(_call("cuFuncGetAttribute", _enum("CUfunction_attribute", attribute), function))


def cuFuncSetAttribute(attribute: int, value: int, function: Handle) -> None:
    """attribute: the number of a CUfunction_attribute."""
    _call("cuFuncSetAttribute", function, _enum("CUfunction_attribute", attribute), value,
          attribute=attribute, value=value)


def cuLaunchKernel(*launch: Any) -> None:
    """function, grid x y z, block x y z, shared bytes, stream, address of the void**, 0.

    The hot call: the arguments come as one prebuilt tuple, and nothing is made here.
    """
    code = faults.enter("cuLaunchKernel")
    if not code:
        try:
            code = _launch_kernel(*launch)[0]
        except (RuntimeError, AttributeError, TypeError) as error:
            raise _missing("cuLaunchKernel", error) from error
    if code:
        raise _error("cuLaunchKernel", int(code), {"grid": launch[1:4], "block": launch[4]})


def launch_config(grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int) -> Handle:
    """A CUlaunchConfig for `cuLaunchKernelEx` that lets the launch start ahead of the kernel before it on its
    stream (programmatic stream serialization).  Its hStream is set by whoever launches."""
    config, attribute = _driver.CUlaunchConfig(), _driver.CUlaunchAttribute()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = shared_bytes
    attribute.id = _enum("CUlaunchAttributeID", _PROGRAMMATIC_SERIALIZATION)
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [attribute], 1
    return config


def cuLaunchKernelEx(config: Handle, *launch: Any) -> None:
    """A `launch_config`, then function, address of the void**, 0.  Hot like `cuLaunchKernel`."""
    code = faults.enter("cuLaunchKernelEx")
    if not code:
        try:
            code = _launch_kernel_ex(config, *launch)[0]
        except (RuntimeError, AttributeError, TypeError) as error:
            raise _missing("cuLaunchKernelEx", error) from error
    if code:
        grid = (int(config.gridDimX), int(config.gridDimY), int(config.gridDimZ))
        raise _error("cuLaunchKernelEx", int(code), {"grid": grid, "block": int(config.blockDimX)})


def cuStreamBeginCapture(stream: Handle) -> None:
    """Thread-local mode: only this thread's unsafe calls break the capture."""
    _call("cuStreamBeginCapture", stream, _enum("CUstreamCaptureMode", 1))


def cuStreamEndCapture(stream: Handle) -> Handle:
    """The captured graph.  int() of it is 0 when the capture was invalidated."""
    return _call("cuStreamEndCapture", stream)


def cuStreamIsCapturing(stream: Handle) -> bool:
    """Whether the stream is in a capture, invalidated ones included."""
    return int(_call("cuStreamIsCapturing", stream)) != 0


def cuGraphInstantiate(graph: Handle) -> Handle:
    return _call("cuGraphInstantiate", graph, 0)


def cuGraphUpload(executable: Handle, stream: Handle) -> None:
    _call("cuGraphUpload", executable, stream)


def cuGraphLaunch(executable: Handle, stream: Handle) -> None:
    _call("cuGraphLaunch", executable, stream)


def cuGraphExecUpdate(executable: Handle, graph: Handle) -> bool:
    """False when the graphs differ in more than parameters: instantiate instead."""
    code, _ = _raw("cuGraphExecUpdate", executable, graph)
    if code and code != _UPDATE_FAILED:
        raise _error("cuGraphExecUpdate", code, {})
    return code == 0


def cuGraphGetNodes(graph: Handle) -> list[Handle]:
    _, n_nodes = _call("cuGraphGetNodes", graph, 0)
    return list(_call("cuGraphGetNodes", graph, int(n_nodes))[0]) if n_nodes else []


def cuGraphGetEdges(graph: Handle) -> list[tuple[Handle, Handle, bool]]:
    """(from, to, programmatic): node handles, and whether `to` may start ahead of `from`'s end."""
    n_edges = int(_call("cuGraphGetEdges", graph, 0)[-1])
    if not n_edges:
        return []
    ends = _call("cuGraphGetEdges", graph, n_edges)
    # Once more past the binding (13.0): the edge data that it returns lies in memory that it has freed.
    point, _ = _call("cuGetProcAddress", b"cuGraphGetEdges", _EDGE_DATA_VERSION, 0)
    data, n = np.zeros((n_edges, 8), np.uint8), ctypes.c_size_t(n_edges)    # CUgraphEdgeData: byte 2 is type
    spare = np.zeros((2, n_edges), np.uint64)
    code = int(ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 5)(int(point))(
        int(graph), spare[0].ctypes.data, spare[1].ctypes.data, data.ctypes.data, ctypes.addressof(n)))
    if code:
        raise _error("cuGraphGetEdges", code, {})
    kinds = {(int(a), int(b)): int(d[2]) == _PROGRAMMATIC_EDGE for a, b, d in zip(*spare, data, strict=True)}
    return [(a, b, kinds[int(a), int(b)]) for a, b in zip(ends[0], ends[1], strict=True)]


def cuGraphNodeGetType(node: Handle) -> str:
    """"kernel", "memcpy", "memset", ...: the binding's name of the node type in lower case."""
    kind: str = _call("cuGraphNodeGetType", node).name
    return kind.removeprefix("CU_GRAPH_NODE_TYPE_").lower()


def cuGraphKernelNodeGetParams(node: Handle) -> tuple[int, tuple[int, int, int], tuple[int, int, int], int]:
    """(function handle as int, grid, block, address of the void** of its arguments) of a kernel node."""
    p = _call("cuGraphKernelNodeGetParams", node)
    return (int(p.func), (int(p.gridDimX), int(p.gridDimY), int(p.gridDimZ)),
            (int(p.blockDimX), int(p.blockDimY), int(p.blockDimZ)), int(p.kernelParams))


def cuGraphDestroy(graph: Handle) -> None:
    _call("cuGraphDestroy", graph)


def cuGraphExecDestroy(executable: Handle) -> None:
    _call("cuGraphExecDestroy", executable)


def _call(name: str, *args: Any, **shown: object) -> Any:
    """Make one call; its single value, or a tuple of several, or None.  `shown` goes into the error's
    message."""
    code, values = _raw(name, *args)
    if code:
        raise _error(name, code, shown)
    return values[0] if len(values) == 1 else (values or None)


def _raw(name: str, *args: Any) -> tuple[int, tuple[Any, ...]]:
    injected = faults.enter(name)
    if injected and name not in faults.RESTORING:
        return injected, ()
    if _driver is None:
        raise UsageError(f"{name} before the driver was chosen", do="call drv.api.ensure(device) first")
    try:
        code, *values = getattr(_driver, name)(*args)
    except (RuntimeError, AttributeError) as error:
        raise _missing(name, error) from error
    return injected or int(code), tuple(values)


def _ready(name: str, handle: Handle) -> bool:
    code, _ = _raw(name, handle)
    if code and code != _NOT_READY:
        raise _error(name, code, {})
    return code == 0


def _error(name: str, code: int, shown: dict[str, object]) -> DriverError:
    faults.failed(name, code)
    code_name = f"error {code}"
    if _driver is not None:
        try:
            code_name = _driver.CUresult(code).name
        except ValueError:
            code_name = f"error {code} (not known to the binding)"
    kind: type[DriverError] = DriverError
    if code == 2:
        kind = OutOfMemory
    elif code in _STICKY:
        kind = ContextLost
    because = _finding() or ("the context is lost" if kind is ContextLost else "")
    return kind(name, code, code_name, because=because,
                do="close and open anew" if kind is ContextLost else "",
                **shown)


def _finding() -> str:
    """What the simulator says about the call that just failed; "" on a GPU and for planned failures."""
    global _n_findings
    control: Any = sys.modules.get("flashnext_drv.sim.control") if _loaded == "sim" else None
    if control is None or not control.attached() or control.finding_count() == _n_findings:
        return ""
    _n_findings = control.finding_count()
    text: str = control.last_finding()
    return text


def _missing(name: str, error: Exception) -> DriverMissing:
    do = "install the NVIDIA driver, or use device sim" if _loaded == "cuda" else "rebuild the simulator"
    return DriverMissing(name, because=f"{type(error).__name__}: {error}", do=do)


def _enum(kind: str, value: int) -> Any:
    return getattr(_driver, kind)(value) if _driver is not None else value


def _real_in_process() -> bool:
    """Whether a libcuda that is not our simulator's is mapped into this process."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    simulator = sys.modules.get("flashnext_drv.sim.load")
    ours = simulator.library() if simulator is not None else None
    paths = {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if "libcuda.so" in line}
    return any(ours is None or path != ours.resolve() for path in paths)


def _real_has_device() -> bool:
    """Ask a child process: loading the library here would keep the simulator out for good."""
    try:
        probe = subprocess.run([sys.executable, "-S", "-E", "-c", _PROBE], stdin=subprocess.DEVNULL,
                               capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return probe.returncode == 0
