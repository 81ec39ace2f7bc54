"""`sim`: the simulator through the bare binding, for tests of the driver calls themselves (no Python layer
of ours)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from flashnext_drv.kernels import bind, catalog
from flashnext_drv.sim import control


class SimulatorBench:
    """Driver calls that must work (`ok`) or must fail with a code (`refused`), in a context of their own.

    Everything opened through it is closed by dropping the context; `module` holds the probe kernels.
    """

    def __init__(self, driver: ModuleType) -> None:
        self.d = driver
        self.context = self.ok("cuCtxCreate", None, 0, 0)
        self.stream = self.ok("cuStreamCreate", 1)
        self.module: Any = None
        self._functions: dict[str, Any] = {}
        self._keep: list[Any] = []

    def call(self, name: str, *args: Any) -> tuple[int, Any]:
        code, *rest = getattr(self.d, name)(*args)
        return int(code), rest[0] if len(rest) == 1 else tuple(rest) if rest else None

    def ok(self, name: str, *args: Any) -> Any:
        code, value = self.call(name, *args)
        assert code == 0, f"{name}: {code}: {control.last_finding()}"
        return value

    def refused(self, code: int, name: str, *args: Any) -> str:
        """The finding that came with the refusal ("" when the code says it all)."""
        before = control.finding_count()
        found, _ = self.call(name, *args)
        assert found == code, f"{name} returned {found}, not {code}: {control.last_finding()}"
        return control.last_finding() if control.finding_count() > before else ""

    def image(self, family: str = "probe", digest: str | None = None) -> Any:
        text = bind.simulator_image(family)
        if digest is not None:
            text = b"FLASHNEXT-SIM\0" + family.encode() + b"\0" + digest.encode() + b"\0"
        packed = np.frombuffer(text, np.uint8).copy()
        self._keep.append(packed)
        return packed.ctypes.data

    def function(self, name: str) -> Any:
        if self.module is None:
            self.module = self.ok("cuModuleLoadData", self.image())
        if name not in self._functions:
            self._functions[name] = self.ok("cuModuleGetFunction", self.module, name.encode())
        return self._functions[name]

    def params(self, kernel: str, **args: int) -> int:
        """Address of the `void**` for one launch."""
        spec = catalog.spec(kernel)
        words = [np.array([int(args[a.name])], np.uint64) for a in spec.args]
        table = np.array([w.ctypes.data for w in words], np.uint64)
        self._keep += [words, table]
        return int(table.ctypes.data)

    def launch(
        self, kernel: str, grid: int = 1, *, stream: Any = None, block: int | None = None, **args: int
    ) -> tuple[int, Any]:
        spec = catalog.spec(kernel)
        return self.call(
            "cuLaunchKernel",
            self.function(kernel),
            grid,
            1,
            1,
            block or spec.block,
            1,
            1,
            0,
            self.stream if stream is None else stream,
            self.params(kernel, **args),
            0,
        )

    def device(self, n_bytes: int) -> int:
        return int(self.ok("cuMemAlloc", n_bytes))

    def upload(self, array: np.ndarray) -> int:
        address = self.device(array.nbytes)
        self.ok("cuMemcpyHtoD", address, array.ctypes.data, array.nbytes)
        return address

    def download(self, address: int, n: int, dtype: Any = np.uint32) -> np.ndarray:
        out = np.zeros(n, dtype)
        self.ok("cuMemcpyDtoH", out.ctypes.data, address, out.nbytes)
        return out

    def sync(self, stream: Any = None) -> int:
        return self.call("cuStreamSynchronize", self.stream if stream is None else stream)[0]


@pytest.fixture
def sim(device_name: str) -> Iterator[SimulatorBench]:
    """A fresh context of the simulator; settings changed by a test are put back.  Skipped on a real
    device."""
    if device_name != "sim":
        pytest.skip("tests of the simulator itself")
    from cuda.bindings import driver

    before = {name: control.counter(name) for name in control.SETTINGS}
    contexts, used = control.counter("contexts"), control.counter("used_bytes")
    with ExitStack() as undo:
        for name, value in before.items():
            undo.callback(control.set_value, name, value)
        bench = SimulatorBench(driver)
        undo.callback(driver.cuCtxDestroy, bench.context)
        yield bench
    assert control.counter("contexts") == contexts
    assert control.counter("used_bytes") == used
