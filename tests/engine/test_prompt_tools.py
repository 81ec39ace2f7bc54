"""The tools that time prompts and compare them run to their end and tell right from wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import bench_prefill  # noqa: E402

pytestmark = pytest.mark.sim


def test_bench_prefill_runs_to_its_end(
    micro: Path, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, svg = tmp_path / "out.json", tmp_path / "curve.svg"
    monkeypatch.setattr(bench_prefill, "SLOWER", float("inf"))  # no clock decides here
    monkeypatch.setattr(sys, "argv", [
        "bench_prefill.py", "--pack", str(micro), "--device", device, "--tokens", "45", "--chunk", "32",
        "--deep-rows", "2", "--repeats", "1", "--profile", "--curve", "8,40", "--svg", str(svg),
        "--check-decode", "--decode-tokens", "2", "--long", "80", "--out", str(out)])
    assert bench_prefill.main() == 0
    said = capsys.readouterr().out
    assert "PASS" in said and "exllamav3" in said and "gdn_scan" in said
    found = json.loads(out.read_text())["results"]
    profile = found["profiles"]["45"]
    assert profile["rows"] == 45 and profile["kernels"]["gdn_scan"]["calls"] == 3 * 2  # layers, chunks
    assert profile["ms"] == pytest.approx(sum(profile["classes_ms"].values()))
    assert found["buffers"]["planned"] == found["buffers"]["live"] > 0 and found["ok"]
    assert [point["tokens"] for point in found["curve"]] == [8, 40]
    assert found["decode"]["open"]["deep"] and not found["decode"]["off"]["deep"]
    assert found["long"]["prompts"]["deep_rows"] == 80
    assert len(list(ElementTree.parse(svg).getroot().iter("{http://www.w3.org/2000/svg}polyline"))) == 5
