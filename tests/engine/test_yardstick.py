"""The yardstick of exactness runs to its end in the simulator, and refuses what computes something else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "yardstick.py"

pytestmark = pytest.mark.sim


def run(out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: its simulator has the inexact kernels beside the real ones.  140 tokens: the
    shared expert's tile is finished in two parts."""
    return subprocess.run(
        [sys.executable, str(TOOL), "--device", "sim", "--pack", "synth:micro", "--tokens", "140",
         "--repeats", "1", "--out", str(out), *more],
        capture_output=True, text=True, timeout=600, check=False,
    )


def test_inexact_kernels_compute_the_same_but_for_rounding(tmp_path: Path) -> None:
    done = run(tmp_path / "out.json")
    assert done.returncode == 0 and "PASS" in done.stdout, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert set(found["usable"]) == {"chain", "atomic", "fast"}
    # other roundings, so other kernels ran; fast functions are a GPU's
    assert 0 < found["errors"]["chain"] < found["most"] and 0 < found["errors"]["atomic"] < found["most"]
    assert found["errors"]["chain"] != found["errors"]["atomic"]
    groups = {"experts", "qsa_deep", "deep_linear gdn_in", "deep_site_up attn_site"}
    assert found["choice"].keys() >= groups
    assert set(found["choice"].values()) <= {"exact", "chain", "atomic", "fast"}
    kernels = found["kernels"]
    assert kernels["moe_deep_gu"]["floor_ms"] > 0 and kernels["gdn_scan"]["option"] == "exact"
    rest = [k for name, k in kernels.items() if name != "gdn_scan"]
    exact, inexact = (sum(k[ms] for k in rest) for ms in ("exact_ms", "inexact_ms"))
    assert found["ratio"] == pytest.approx(inexact / exact)


def test_kernels_that_are_too_far_off_are_no_yardstick(tmp_path: Path) -> None:
    done = run(tmp_path / "out.json", "--options", "chain", "--most", "1e-12")
    assert done.returncode == 1 and "NOT USED" in done.stdout, done.stdout + done.stderr
