"""The tools that time prompts and compare them run to their end and tell right from wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import bench_prefill
import prompt_equality
import prompt_suite

from flashnext_drv.engine.engine import Engine

pytestmark = pytest.mark.sim


def test_bench_prefill_runs_to_its_end(
    micro: Path, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, svg = tmp_path / "out.json", tmp_path / "curve.svg"
    monkeypatch.setattr(bench_prefill, "SLOWER", float("inf"))  # no clock decides here
    monkeypatch.setattr(bench_prefill, "SHORT_PROMPT", 18)
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


def equality(monkeypatch: pytest.MonkeyPatch, micro: Path, device: str, out: Path, *more: str) -> int:
    monkeypatch.setattr(sys, "argv", [
        "prompt_equality.py", "--pack", str(micro), "--device", device, "--tokens", "37", "--chunks", "16,64",
        "--rows", "12", "--deep-rows", "2", "--new-tokens", "5", "--out", str(out), *more])
    return prompt_equality.main()


def test_prompt_equality_passes_and_says_what_it_compared(
    micro: Path, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out.json"
    assert equality(monkeypatch, micro, device, out, "--cuts", "1", "--serial-rows", "4", "--serial-check",
                    "9") == 0
    assert "PASS 4 cases, 0 differ" in capsys.readouterr().out
    run = json.loads(out.read_text())["results"]["runs"][0]
    assert len(run["serial"]["tokens"]) == 5 and run["serial"]["n_rows"] == 12
    assert [case["rows_compared"] for case in run["cases"]] == [9, 12, 12, 12]
    assert [case["deep_rows"] for case in run["cases"][:3]] == [0, 37, 37]


def test_prompt_equality_fails_when_a_launch_is_missing(
    micro: Path, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The launch that keeps the n-gram mixer's tail is missing: the state differs, and the rows after it."""
    compare = prompt_equality.compare

    def planted(engine: Engine, *args: object) -> object:
        deep = engine.rank.deep
        assert deep is not None
        engine.rank.use_graphs = False  # a graph would hold the whole walk
        launches = deep.launches(128)
        del launches[max(i for i, launch in enumerate(launches) if launch.name == "ple_tail")]
        return compare(engine, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(prompt_equality, "compare", planted)
    assert equality(monkeypatch, micro, device, tmp_path / "out.json", "--cuts", "0") == 1
    said = capsys.readouterr().out
    assert "FAIL 2 cases, 2 differ" in said and "1 state arrays, first L1.ple_conv" in said


def test_rows_spread_over_a_prompt() -> None:
    rows = prompt_equality.spread_rows(4099, 600)
    assert 600 <= len(rows) <= 640 and {0, 63, 64, 127, 128, 4095, 4096, 4098} <= rows
    assert max(b - a for a, b in zip(sorted(rows), sorted(rows)[1:], strict=False)) <= 7
    assert prompt_equality.spread_rows(4099, 1) == {4098}


def test_left_overs_differ_in_every_part() -> None:
    left = prompt_equality.Left({3: "a", 4: "b"}, {"L0.k": "c", "L0.v": "d"}, [1, 2])
    assert left.differs(prompt_equality.Left({4: "b", 9: "x"}, {"L0.k": "c", "L0.v": "d"}, [1, 2])) == []
    other = prompt_equality.Left({4: "z"}, {"L0.k": "c"}, [1, 3])
    assert left.differs(other) == ["1 rows of logits, first 4", "1 state arrays, first L0.v", "tokens"]


def test_prompt_suite_runs_its_parts_on_one_engine(
    micro: Path, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [
        "prompt_suite.py", "--pack", str(micro), "--device", device, "--out", str(tmp_path), "--repeats", "1",
        "--parts", "speed,equality,curve,long"])
    assert prompt_suite.main() == 0
    assert "FAIL" not in capsys.readouterr().out
    found = {name: json.loads((tmp_path / f"prompt-{name}.json").read_text())["results"]
             for name in ("speed", "equality", "curve", "long")}
    assert all(part["ok"] for part in found.values())
    assert [len(run["cases"]) for run in found["equality"]["runs"]] == [3, 4]
    assert found["long"]["tokens"] == found["long"]["limits"]["context_tokens"] == 128
    assert (tmp_path / "prompt-curve.svg").exists()
