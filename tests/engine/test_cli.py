"""The commands end to end on the micro model: what they print, write and promise about equal runs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext_drv.cli import report

pytestmark = pytest.mark.sim

ROOT = Path(__file__).resolve().parents[2]
PACK = "synth:micro?seed=5"


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--device"))


def command(device: str, *argv: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FLASHNEXT_DRV_DEVICE": device}
    return subprocess.run([sys.executable, "-m", "flashnext_drv", *argv], env=env, capture_output=True,
                          text=True, timeout=600, check=False)


def generate(device: str, *argv: str) -> dict[str, Any]:
    done = command(device, "generate", PACK, "--json", *argv)
    assert done.returncode == report.GOOD, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_generate_says_what_ran_and_hashes_all_ids(device: str) -> None:
    found = generate(device, "--ids", "1,2,3", "--max-new", "6", "--no-stop")
    assert len(found["tokens"]) == 6 and found["prompt_tokens"] == 3 and found["finish"] == "length"
    every = np.array([1, 2, 3, *found["tokens"]], "<u4").tobytes()
    assert found["sha256"] == hashlib.sha256(every).hexdigest()
    assert ("simulator" in found["device"]) == (device == "sim")
    assert set(found["times_s"]) >= {"open", "prompt", "decode"}
    owners = {row["owner"] for row in found["memory"]["rows"]}
    assert {"weights", "kv", "recurrent"} <= owners


def test_text_output_has_the_same_tokens(device: str) -> None:
    done = command(device, "generate", PACK, "--ids", "1,2,3", "--max-new", "6", "--no-stop")
    assert done.returncode == report.GOOD and done.stderr == ""     # no progress where stderr is no terminal
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines()[:7])
    found = generate(device, "--ids", "1,2,3", "--max-new", "6", "--no-stop", "--no-graph", "--prompt-rows",
                     "3")
    assert lines["tokens"].split() == [str(t) for t in found["tokens"]]
    assert lines["sha256"].split()[0] == found["sha256"]
    assert "weights" in done.stdout and "unexplained" in done.stdout


def test_ways_of_running_a_prompt_print_the_same_tokens(device: str) -> None:
    ids = ("--ids", ",".join(str(37 * i % 512) for i in range(20)), "--max-new", "2", "--no-stop")
    ways = {
        ("--serial",): (0, 0, 20), ("--no-deep", "--chunk", "9"): (0, 20, 0),
        ("--deep-rows", "4"): (20, 0, 0), ("--deep-rows", "4", "--chunk", "9"): (18, 2, 0)}
    found = {way: generate(device, *ids, *way) for way in ways}
    for way, rows in ways.items():
        counters = found[way]["counters"]
        assert tuple(counters[f"{path}_rows"] for path in ("deep", "batched", "serial")) == rows, way
    assert len({each["sha256"] for each in found.values()}) == 1
    assert found[("--deep-rows", "4")]["memory"]["deep"]["rows"] == 128
    done = command(device, "generate", PACK, *ids, "--deep-rows", "4", "--chunk", "9")
    assert "paths    18 deep, 2 batched, 0 serial rows; 2 deep chunks of up to 9" in done.stdout
    assert "deep pass: 128 rows a chunk; largest spans" in done.stdout and "no deep" not in done.stdout
    done = command(device, "generate", PACK, *ids, "--no-deep")
    assert "no deep  Limits.deep is off" in done.stdout


def test_memory_settings_change_no_token_and_are_what_plan_prints(device: str) -> None:
    """Owners without guard zones, which only the simulator has, have the bytes that `plan` printed."""
    settings = ("--expert-lines", "3", "--expert-lines-most", "5", "--expert-reserve", "1MiB",
                "--ngram", "mapped", "--ring-depth", "2", "--ring-lines", "3", "--no-ring-prefetch",
                "--deep-rows", "4", "--server-reserve", "2MiB", "--host-reserve", "512MiB",
                "--host-bytes", "1GiB")
    ids = ("--ids", ",".join(str(37 * i % 512) for i in range(20)), "--max-new", "4", "--no-stop")
    found = generate(device, *ids, *settings)
    assert found["tokens"] == generate(device, *ids)["tokens"] and found["counters"]["deep_rows"] == 20
    done = command(device, "plan", PACK, "--json", "--context", "24", *settings, "--device-memory", "1GB")
    assert done.returncode == report.GOOD, done.stderr
    planned = json.loads(done.stdout)
    assert planned["lines"]["observed"] == 5 and planned["ring"] == {"banks": 2, "lines": 3}
    live: dict[str, dict[str, int]] = {"device": {}, "pinned": {}, "host": {}}
    for row in found["memory"]["rows"]:
        if row["tier"] in live and row["n_live"]:
            live[row["tier"]][row["owner"]] = row["live_bytes"]
    assert live["pinned"] == planned["bytes"]["pinned"] and live["host"] == planned["bytes"]["host"]
    assert set(live["device"]) == set(planned["bytes"]["device"])
    for owner in ("experts", "weights", "tables"):
        assert live["device"][owner] == planned["bytes"]["device"][owner]


def test_logits_do_not_depend_on_the_way(device: str, tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([37 * i % 512 for i in range(20)]))
    hashes = set()
    ways = (("--serial",), ("--no-deep", "--expert-lines", "2"), ("--deep-rows", "4", "--chunk", "15"))
    for i, way in enumerate(ways):
        done = command(device, "logits", PACK, "--ids-file", str(ids), "--out", str(tmp_path / f"{i}.npz"),
                       "--rows", "3:5,10:20", "--json", *way)
        assert done.returncode == report.GOOD, done.stderr
        found = json.loads(done.stdout)
        hashes.add(found["sha256"])
        assert sum(found["counters"][f"{path}_rows"] for path in ("deep", "batched", "serial")) == 20
        assert found["counters"]["deep_rows"] == (20 if i == 2 else 0) and found["tokens_per_s"] > 0
    assert len(hashes) == 1


def test_draws_repeat_by_seed_and_stop_where_told(device: str) -> None:
    draws = ("--ids", "9 8 7", "--max-new", "8", "--no-stop", "--temperature", "2", "--top-k", "100",
             "--top-p", "0.99", "--min-p", "0.001")
    first = generate(device, *draws, "--seed", "1")
    assert generate(device, *draws, "--seed", "1")["tokens"] == first["tokens"]
    assert generate(device, *draws, "--seed", "2")["tokens"] != first["tokens"]
    stop = first["tokens"][3]
    cut = [arg for arg in draws if arg != "--no-stop"]
    stopped = generate(device, *cut, "--seed", "1", "--stop-id", str(stop), "--stop-id", "0")
    assert stopped["finish"] == "stop"
    assert stopped["tokens"] == first["tokens"][:first["tokens"].index(stop) + 1]


def test_logits_file_holds_the_rows_asked_for(device: str, tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(list(range(40, 52))))
    whole, part = tmp_path / "whole.npz", tmp_path / "part.npz"
    done = command(device, "logits", PACK, "--ids-file", str(ids), "--out", str(whole), "--json")
    assert done.returncode == report.GOOD, done.stderr
    told = json.loads(done.stdout)
    every = np.load(whole)["logits"]
    assert every.dtype == np.float32 and list(every.shape) == told["shape"] and len(every) == 12
    assert told["sha256"] == hashlib.sha256(every.tobytes()).hexdigest()
    done = command(device, "logits", PACK, "--ids-file", str(ids), "--out", str(part), "--rows", "9,2:5",
                   "--prompt-rows", "4")
    assert done.returncode == report.GOOD, done.stderr
    some = np.load(part)
    assert some["rows"].tolist() == [9, 2, 3, 4]
    assert some["logits"].tobytes() == every[[9, 2, 3, 4]].tobytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ids.json", "part.npz", "whole.npz"]
    greedy = generate(device, "--ids-file", str(ids), "--max-new", "1", "--no-stop")
    assert greedy["tokens"] == [int(every[-1].argmax())]


@pytest.mark.parametrize(("argv", "code", "message"), [
    (("generate", PACK, "--ids", "1,512", "--max-new", "1"), report.USAGE, "outside the vocabulary"),
    (("generate", PACK, "--ids", "-1", "--max-new", "1"), report.USAGE, "outside the vocabulary"),
    (("generate", PACK, "--ids", "1,2,3", "--max-new", "9", "--context", "8"), report.CAPACITY, "do not fit"),
    (("generate", "synth:micro?sed=1", "--ids", "1", "--max-new", "1"), report.USAGE, "sed=1"),
    (("generate", PACK, "--ids", "1", "--max-new", "1", "--server-reserve", "900TiB"), report.CAPACITY,
     "the reserves exceed device memory"),
    (("generate", PACK, "--ids", "1", "--max-new", "1", "--host-bytes", "1MiB"), report.CAPACITY,
     "does not fit host memory"),
    (("generate", "/no/such/pack", "--ids", "1", "--max-new", "1"), report.MISSING, "/no/such/pack")])
def test_errors_are_one_line_with_their_exit_code(device: str, argv: tuple[str, ...], code: int,
                                                  message: str) -> None:
    done = command(device, *argv)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_doctor_reports_the_device_in_use(device: str) -> None:
    done = command(device, "doctor", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == report.GOOD and found["runs_on"] == device, found["missing"]
    assert found["images"]["archs"] or any("kernel images" in one["what"] for one in found["missing"])
    if device == "sim":
        assert found["simulator"]["compiler"] and found["gpu"]["devices"] == []
