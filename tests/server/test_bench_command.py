"""`bench` against the fake server: what it refuses before it measures, what it writes, what it joins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashnext_drv.__main__ import main
from flashnext_drv.bench import workload
from flashnext_drv.bench.client import Target
from flashnext_drv.bench.site import find_site
from flashnext_drv.cli import bench as command

from . import fake as fakes

SIZES = workload.Sizes(6, 9, 2)
LEDGER = {"load": {}, "peak": {}, "idle": {}, "closed": {"entries": 0, "engines": 1}}


class Control:
    def __init__(self, fake: fakes.Fake) -> None:
        self.fake = fake

    def graphs(self, on: bool) -> None:
        self.fake.graphs = on

    def drain(self) -> None:
        raise AssertionError("nobody drains here")

    def again(self) -> Target:
        raise AssertionError("nobody starts anew here")


@pytest.fixture
def fake() -> Iterator[fakes.Fake]:
    with fakes.running() as made:
        yield made


def run(*words: object) -> int:
    return main(["bench", *map(str, words)])


def a_part(fake: fakes.Fake, mode: str) -> dict[str, Any]:
    """A result of one mode, as a server of our own would give it."""
    site = find_site(Target(fake.url, timeout_s=10), control=Control(fake), say=lambda _: None)
    found = workload.run_workload(site, SIZES, modes=(mode,))
    assert found["verdict"]["qualified"]
    return {
        "form": 2, "command": "flashnext-drv bench workload", "date": "2026-01-02T03:04:05+00:00",
        "device": {"name": "X", "is_simulator": True, "driver_version": 1, "total_bytes": 2, "n_sms": 3},
        "kernels": {"source_digest": "a" * 64}, "package_digest": "b" * 64, "source_digest": "d" * 64,
        "client_digest": "c" * 64, "versions": {"python": "3", "numpy": "1", "cuda-bindings": "none"},
        "results": found | {"ledger": LEDGER, "pack": "synth:micro", "max_streams": 2,
                            "limits": {"expert_lines": 4}},
    }


def test_what_cannot_be_written_or_drawn_is_refused_before_anything_is_asked(
    fake: fakes.Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (("decode", fake.url, "--plot", tmp_path / "a.svg"),
                  ("decode", fake.url, "--out", tmp_path / "none" / "a.json"),
                  ("decode", fake.url, "--out", tmp_path),
                  ("cold", fake.url, "--plot", tmp_path / "none" / "a.svg"),
                  ("cold", fake.url, "--lengths", "4,5,6,7"),
                  ("decode", "http://[::1"), ("decode", "http://a..b:80"), ("decode", "http://x:port")):
        assert run(*words) == 2, words
    assert run("decode,cold", "--out", tmp_path / "new") == 2 and not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    assert run("decode,cold", fake.url, "--out", tmp_path / "file") == 2
    for text in ("two\nlines", "k\u00e4y"):
        (tmp_path / "key").write_text(text, encoding="utf-8")
        assert run("decode", fake.url, "--key-file", tmp_path / "key") == 2
    for share in ("nan", "-0.1", "1.5", "all"):
        with pytest.raises(SystemExit):
            run("load", fake.url, "--cancels", share)
    assert not fake.bodies and "Traceback" not in capsys.readouterr().err


def test_a_part_is_drawn_and_written(fake: fakes.Fake, tmp_path: Path) -> None:
    out, drawn = tmp_path / "r.json", tmp_path / "r.svg"
    assert run("workload", fake.url, "--modes", "graph", "--prompt-tokens", 6, "--new-tokens", 9, "--streams",
               2, "--out", out, "--plot", drawn) == 0
    assert json.loads(out.read_text())["results"]["kind"] == "scaled-part"
    assert drawn.read_text().startswith("<svg")


def test_a_load_of_very_short_requests_runs(fake: fakes.Fake) -> None:
    assert run("load", fake.url, "--prompt-tokens", 2, "--new-tokens", 2, "--requests", 4, "--kinds", 2) == 0


def test_only_parts_of_one_server_are_joined(fake: fakes.Fake, tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    parts = [a_part(fake, mode) for mode in workload.MODES]

    def joined(first: dict[str, Any], second: dict[str, Any], *words: object) -> tuple[int, str]:
        paths = [tmp_path / "a.json", tmp_path / "b.json"]
        for path, part in zip(paths, (first, second), strict=True):
            path.write_text(json.dumps(part))
        code = run("workload", "--join", *paths, *words)
        said = capsys.readouterr()
        return code, said.out + said.err

    def other(**change: Any) -> dict[str, Any]:
        return parts[1] | {"results": parts[1]["results"] | change}

    out = tmp_path / "whole.json"
    sealed = {"tree": {"commit": "e" * 40, "sealed": parts[0]["date"]}}
    assert joined(parts[0] | sealed, parts[1], "--out", out)[0] == 0
    assert "tree" not in json.loads(out.read_text()), "it is not sealed by the seal of a part"
    for change in ({"pack": "synth:tiny"}, {"max_streams": 3}, {"limits": {"expert_lines": 5}}):
        code, said = joined(parts[0], other(**change))
        assert code == 2 and "other servers" in said
    code, said = joined(parts[0], other(verdict={"qualified": False, "reasons": []}))
    assert code == 1 and "verdict and its reasons disagree" in said
    code, said = joined(parts[0], other(ledger=LEDGER | {"closed": {"entries": 0, "engines": 0}}))
    assert code == 1 and "no engine's ledger" in said
    less = other()
    del less["results"]["legs"]
    assert joined(parts[0], less)[0] == 3
    figures = [{"client_digest": "c" * 64, "results": part["results"]} for part in parts]
    assert joined(*figures)[0] == 0
    assert joined(*figures, "--out", tmp_path / "figures.json")[0] == 2


def test_a_server_whose_end_nobody_saw_is_not_qualified() -> None:
    good = {"verdict": {"qualified": True, "reasons": []}, "ledger": {}}
    assert command._ended(good, [{"entries": 0}])["verdict"]["qualified"]
    for closed, servers in (([], 1), ([{"entries": 0}], 2), ([{"entries": 1}], 1)):
        assert not command._ended(good, closed, servers)["verdict"]["qualified"]
