"""`flashnext-drv check`: the last line, the exit code, the log, and what an early end leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
SUMMARY = "SUMMARY 2 kernels: 2 pass, 0 fail, 0 known; 0 controls: 0 red, 0 missed"


def command(device: str, *more: str, controls: str = "--no-controls") -> list[str]:
    return [
        sys.executable,
        "-m",
        "flashnext_drv",
        "check",
        "--device",
        device,
        "--processes",
        "1",
        controls,
        *more,
    ]


def checked(device: str, *more: str, controls: str = "--no-controls") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(device, *more, controls=controls), capture_output=True, text=True, env=ENV,
                          check=False, timeout=300)


@pytest.fixture
def chosen(request: pytest.FixtureRequest) -> str:
    device: str = request.config.getoption("--device")
    return device


def children(pid: int) -> list[int]:
    """Processes that `pid` started and that run still."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:  # it ended
            continue
        if int(words[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def audit(log: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "audit_check.py"), str(log)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_kernel_without_text_for_one_architecture_has_no_controls_for_it(chosen: str) -> None:
    done = checked(chosen, "--kernel", "stream_add", controls="--hopper-controls")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == SUMMARY.replace("2 kernels: 2 pass", "1 kernels: 1 pass")


def test_the_simulator_is_not_built_anew_for_controls_that_it_leaves_out() -> None:
    done = checked("sim", "--kernel", "deep_site_up", controls="--hopper-controls")
    assert done.returncode == 0 and "building the simulator" not in done.stderr, done.stderr
    assert "deep_site_up/resident_images" in done.stdout and "0 controls: 0 red, 0 missed" in done.stdout


def test_ends_with_the_summary_that_the_log_and_the_audit_give(chosen: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = checked(chosen, "--kernel", "stream_add", "--kernel", "embed_rows", "--log", str(log))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == SUMMARY
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert records[0]["kind"] == "begin" and records[-1]["summary"] == SUMMARY
    said = audit(log)
    assert said.returncode == 0, said.stdout
    assert said.stdout.splitlines()[-1] == "audit: 2 kernels: 2 pass, 0 fail; 0 controls: 0 red, 0 missed"


def test_json_is_one_object(chosen: str) -> None:
    done = checked(chosen, "--kernel", "stream_add", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["good"] and found["kernels"] == 1
    assert found["summary"] == done.stderr.splitlines()[-1]


@pytest.mark.parametrize("whom", ["command", "worker"])
def test_an_early_end_is_no_result(chosen: str, tmp_path: Path, whom: str) -> None:
    log = tmp_path / "log"
    with subprocess.Popen(
        command(chosen, "--kernel", "linear_gemv_n16", "--log", str(log)),
        env=ENV,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        end = time.monotonic() + 120
        while not (log.exists() and log.read_text(encoding="utf-8")) and time.monotonic() < end:
            time.sleep(0.05)
        if whom == "command":
            process.send_signal(signal.SIGTERM)
        else:
            os.kill(children(process.pid)[0], signal.SIGKILL)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out.splitlines()[-1] == "no result"
    said = audit(log)
    assert said.returncode == 1 and "no result" in said.stdout


def test_unknown_kernel_is_a_usage_error(chosen: str) -> None:
    done = subprocess.run(
        command(chosen, "--kernel", "nothing"),
        capture_output=True,
        text=True,
        env=ENV,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2 and "no kernel is called" in done.stderr
