"""What `doctor` finds on machines that this one is not."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from flashnext_drv.cli import doctor
from flashnext_drv.drv import api, context
from flashnext_drv.errors import DriverError
from flashnext_drv.host_memory import HostMemory

pytestmark = pytest.mark.host
ROOT = Path(__file__).resolve().parents[2]


def what(found: dict[str, Any]) -> str:
    return "\n".join(f"{one['what']} -> {one['do']}" for one in found["missing"])


def test_packages_of_the_server_are_the_extras() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["server"]
    assert tuple(one.partition(">")[0] for one in extra) == doctor._SERVER


def test_a_machine_that_cannot_serve_says_so_and_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    there = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "uvicorn" else there(name))
    found = doctor.examine("sim")
    assert "what `serve` needs (uvicorn) -> pip install 'flashnext_drv[server]'" in what(found)
    monkeypatch.setattr(doctor, "_version", lambda name: "1.0")
    assert "serve" not in what(doctor.examine("sim"))


def test_host_memory_is_told_with_what_binds_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = HostMemory(8 << 30, 6 << 30, 2 << 30, "cgroup /app with a limit of 4.0 GiB", 65536)
    monkeypatch.setattr(doctor, "host_memory", lambda: host)
    found = doctor.examine("sim")
    assert found["host"]["available_bytes"] == 2 << 30 and found["host"]["memlock_bytes"] == 65536
    doctor._print(found)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("host "))
    assert "2.0 GiB available by cgroup /app" in line and "mlock limit 64.0 KiB" in line


GPU = context.DeviceFacts(0, "Test", (9, 0), 132, 8 << 30, 1, 1, 1, True, 13000, False)


@pytest.mark.parametrize(("node", "nodes", "far"), [(1, (0,), True), (1, (0, 1), False), (-1, (0,), False),
                                                    (None, (0,), False), (1, (), False)])
def test_a_gpu_on_a_node_that_cannot_be_allocated_on_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], node: int | None,
    nodes: tuple[int, ...], far: bool,
) -> None:
    def attribute(number: int, device: object) -> int:
        if node is None:
            raise DriverError("cuDeviceGetAttribute", 1, "CUDA_ERROR_INVALID_VALUE")
        assert (number, device) == (134, "device 0")
        return node

    for name, value in (("ensure", lambda _: "cuda"), ("cuDriverGetVersion", lambda: 13000),
                        ("cuDeviceGet", lambda i: f"device {i}"), ("cuDeviceGetAttribute", attribute)):
        monkeypatch.setattr(api, name, value)
    monkeypatch.setattr(context, "devices", lambda: [GPU])
    monkeypatch.setattr(doctor, "host_memory",
                        lambda: HostMemory(None, None, None, "", None, nodes))
    found = doctor.examine("cuda")
    assert ("numactl --cpunodebind=1 --membind=1" in what(found)) is far
    assert found["gpu"]["devices"][0]["host_node"] == (1 if node == 1 else None)
    doctor._print(found)
    assert ("host memory node 1" in capsys.readouterr().out) is (node == 1)
