"""What `doctor` finds on machines that this one is not."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from flashnext_drv.cli import doctor
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
