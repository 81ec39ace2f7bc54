"""The measurements of experts in host memory: their arithmetic, and the tool from end to end with a small
pack."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import bench_experts
import expert_memory

from flashnext_drv.bench import experts as bench
from flashnext_drv.engine.engine import Engine
from flashnext_drv.errors import UsageError
from flashnext_drv.kernels import tables as t
from flashnext_drv.ledger import Ledger
from flashnext_drv.model.plan import Plan

pytestmark = pytest.mark.sim


def counts(**given: int) -> bench.Tally:
    return bench.Tally(dict.fromkeys(t.COUNTERS, 0) | given)


def test_ids_repeat_and_come_from_the_working_set() -> None:
    ids = bench.forced_ids(1000, 8, 0.0, 400, 5)
    assert ids == bench.forced_ids(1000, 8, 0.0, 400, 5) != bench.forced_ids(1000, 8, 0.0, 400, 6)
    assert len(set(ids)) == 8 and set(ids) < set(bench.forced_ids(1000, 64, 0.0, 4000, 5))
    mixed = bench.forced_ids(1000, 8, 0.25, 4000, 5)
    outside = sum(i not in set(ids) for i in mixed)
    assert 800 < outside < 1200 and min(mixed) >= 0 and max(mixed) < 1000
    for wrong in ((0, 0.0), (1001, 0.0), (1, 1.5)):
        with pytest.raises(UsageError):
            bench.forced_ids(1000, *wrong, 4, 5)


def falling(setting: bench.Setting) -> float:
    """A hit rate as routers have it: 0.97 for one token, 0.85 for two, then down to 0.1 beyond 1,024."""
    sets = {1: 0.97, 2: 0.85}
    base = sets.get(setting.n_working, max(0.4 - 0.03 * np.log2(setting.n_working), 0.1))
    return float(base * (1 - setting.fresh) + 0.1 * setting.fresh) + 0.002 * (setting.lines - 72)


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.42), (0.55, 0.75), (0.78, 0.9), (0.92, 0.99)])
def test_a_setting_is_found_by_tokens_or_by_mixing_fresh_ones_in(low: float, high: float) -> None:
    found = bench.find_setting(falling, bench.Band(low, high, fixed=True), [72, 16], 5000)
    assert found is not None
    setting, rate = found
    assert low <= rate <= high and rate == falling(setting) and setting.lines == 72
    assert (setting.fresh > 0) == (low == 0.55)  # no set of tokens lies in that band


def test_other_lines_are_tried_unless_the_band_forbids_it() -> None:
    def rate(setting: bench.Setting) -> float:
        return 0.9 if setting.lines > 100 else 0.5

    found = bench.find_setting(rate, bench.Band(0.8, 1.0), [72, 16, 144], 64)
    assert found is not None and found[0].lines == 144
    assert bench.find_setting(rate, bench.Band(0.8, 1.0, fixed=True), [72, 16, 144], 64) is None


def test_a_token_is_held_to_resident_time_and_its_missed_bytes() -> None:
    rounds = [
        bench.Round(0.004, counts(hits=3, misses=1, filled_bytes=100, read_bytes=50)),
        bench.Round(0.006, counts(hits=1, misses=3, filled_bytes=300, read_bytes=0)),
    ]
    made = bench.token_bound(rounds, [0.001, 0.001, 0.001], 1e5)
    assert made["hit_rate"] == 0.5 and made["missed_bytes_a_token"] == 225
    assert made["bound_ms"] == pytest.approx((2.5 + 4.0) / 2)
    assert made["ratio_by_round"] == pytest.approx((4 / 2.5 + 6 / 4) / 2)
    assert made["ratio_by_mean"] == pytest.approx(5 / (1 + 2.25)) and made["ratio"] == made["ratio_by_round"]
    assert made["counters"]["filled_bytes"] == 400


def test_a_prompt_is_held_to_the_slower_of_link_and_resident() -> None:
    made = bench.prompt_bound(1.0, 0.6, 800, 1000.0)
    assert made["bound_by"] == "link" and made["ratio"] == pytest.approx(0.8)
    assert made["overlap"] == pytest.approx((0.6 + 0.8 - 1.0) / 0.6)
    made = bench.prompt_bound(2.0, 1.0, 500, 1000.0)
    assert made["bound_by"] == "resident" and made["ratio"] == 0.5 and made["overlap"] == 0.0
    assert bench.prompt_bound(1.0, 1.0, 0, 1000.0)["overlap"] == 1.0


def test_plan_and_ledger_are_compared_owner_by_owner() -> None:
    ledger = Ledger()
    ledger.add("kv", "device", 100)
    ledger.add("store", "pinned", 60)
    ledger.add("store", "pinned", 40)
    ledger.add("compute", "stream")
    rows = bench.plan_rows(Plan({"kv": 100, "work": 7}, {"store": 90}), ledger.table())
    assert [(r["owner"], r["planned"], r["live"], r["equal"]) for r in rows] == [
        ("kv", 100, 100, True), ("work", 7, 0, False), ("store", 90, 100, False)]


def test_files_are_read_whole(tmp_path: Path) -> None:
    sizes = (0, 5, bench.READ_BYTES + 3)
    files = [tmp_path / str(size) for size in sizes]
    for path, size in zip(files, sizes, strict=True):
        path.write_bytes(bytes(size))
    found = bench.read_cold(files, 2)
    assert found["bytes"] == sum(sizes) and found["bytes_s"] > 0


@pytest.fixture
def tool(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(*more: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", [
            "bench_experts.py", "--device", device, "--out", str(tmp_path / "out"), "--repeats", "1",
            "--folder", str(tmp_path / "pack"), *more])
        code = bench_experts.main()
        return code, {path.stem.partition("-experts-")[2]: json.loads(path.read_text())["results"]
                      for path in sorted((tmp_path / "out").iterdir())}

    return run


def test_the_tool_runs_every_part_to_its_end(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = tool()
    said = capsys.readouterr().out
    assert code == 0 and "FAIL" not in said, said
    assert set(found) == set(bench_experts.PARTS) and all(part["ok"] for part in found.values())
    tokens = found["tokens"]["runs"]
    assert len(tokens) == 8 and len({run["sha256"] for run in tokens}) == 1
    assert tokens[0]["counters"]["fills"] > 0 and tokens[-1]["counters"]["misses"] == 0
    points = [point for point in found["decode"]["points"] if point["found"]]
    assert points and all(point["equal"] and point["rounds"] == 4 for point in points)
    assert found["resident"]["counters"]["misses"] == 0 < found["resident"]["counters"]["hits"]
    prompt = found["prefill"]["prompts"]["24"]
    assert prompt["copied_bytes"] == prompt["ring"]["copied_bytes"] > 0 and prompt["events"]["copy_ms"] > 0
    card = found["card"]
    assert card["equal"] and card["least_free_bytes"] >= card["reserves_bytes"] > 0 and card["samples"] > 30
    assert {row["tier"] for row in card["rows"]} == {"device", "pinned", "host"}
    opened = found["open"]
    assert opened["memory"]["progress"]["calls"] > 1 < opened["from_disk"]["progress"]["calls"]
    assert opened["from_disk"]["disk"]["bytes"] > 0


def test_other_tokens_with_few_lines_fail(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted: what is drawn depends on the lines in use."""
    def greedy(suite: bench_experts.Suite, engine: Engine) -> dict[str, Any]:
        few = 0 < suite.in_use < 3
        engine.rank.graphs.counters.replays += engine.rank.use_graphs
        return {"sha256": f"few {few}", "state_sha256": "", "tokens": []}

    monkeypatch.setattr(bench_experts.Suite, "greedy", greedy)
    code, found = tool("--parts", "tokens", "--set", "ring_depth=2,ring_prefetch=0")
    assert code == 1 and "FAIL tokens" in capsys.readouterr().out
    assert [run["equal"] for run in found["tokens"]["runs"]] == [False, False] + [True] * 6
    assert found["tokens"]["limits"]["ring_depth"] == 2 and not found["tokens"]["limits"]["ring_prefetch"]


def test_a_part_that_raises_fails_and_the_next_one_runs(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raising(suite: bench_experts.Suite) -> bench_experts.Found:
        raise UsageError("planted", part="link")

    monkeypatch.setattr(bench_experts.Suite, "link", raising)
    monkeypatch.setattr(bench_experts, "small_card", lambda *_: ({"planted": True}, True))
    code, found = tool("--parts", "link,card")
    assert code == 1 and "planted" in found["link"]["raised"] and found["card"]["ok"]
    said = capsys.readouterr().out
    assert "FAIL link" in said and "PASS card" in said


def test_host_memory_is_used_once_and_given_back(capsys: pytest.CaptureFixture[str]) -> None:
    expert_memory.touch_host(3 << 20)
    assert "after it was used" in capsys.readouterr().out
