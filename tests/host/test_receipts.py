"""Receipts: every committed one is in order, and tools/receipt.py seals and quotes only what it may."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashnext_drv.bench import receipt as forms
from flashnext_drv.bench.gauges import UNMEASURED, Sampler, gpu_used_bytes, process_memory
from flashnext_drv.bench.recheck import recheck
from flashnext_drv.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import receipt as tool  # noqa: E402

NO_CLIENT = forms.digest_of([])  # of a repository without bench/ and tools/
COMMITTED = sorted((ROOT / "tests" / "receipts").glob("*.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_receipt_is_in_order(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert forms.schema_problems(found) == []
    assert recheck(found["results"]) == []
    if found.get("form", 1) == forms.FORM and "kind" in found["results"]:
        assert "tree" in found, "a measurement of the server is committed sealed"


def a_result(source: str) -> dict[str, Any]:
    return {
        "form": 2, "command": "flashnext-drv bench decode", "date": "2026-01-02T03:04:05+00:00",
        "device": {"name": "X", "is_simulator": True, "driver_version": 1, "total_bytes": 2, "n_sms": 3},
        "kernels": {"source_digest": "a" * 64}, "package_digest": "b" * 64, "source_digest": source,
        "client_digest": NO_CLIENT, "versions": {"python": "3", "numpy": "1", "cuda-bindings": "none"},
        "results": {"figure": 1},
    }


def test_a_missing_malformed_or_unknown_field_is_named() -> None:
    good = a_result("d" * 64)
    assert forms.schema_problems(good) == []
    for name in good.keys() - {"form"}:
        assert forms.schema_problems({k: v for k, v in good.items() if k != name}) == [f"{name} is missing"]
    bad: dict[str, Any] = {
        "command": "", "date": "yesterday", "device": {"name": "X"}, "package_digest": "abc", "results": {},
        "source_digest": None, "client_digest": "C" * 64, "versions": {"python": "3"},
        "kernels": {"source_digest": "a" * 64, "arch": "sm_90a", "cubins": {"moe": "short"},
                    "tool": {"n": "1"}},
        "tree": {"commit": "HEAD", "sealed": good["date"]},
    }
    for name, value in bad.items():
        assert forms.schema_problems(good | {name: value}) == [f"{name} is malformed"]
    assert forms.schema_problems(good | {"note": 1}) == ["'note' is no field of a receipt"]
    assert forms.schema_problems(good | {"form": 3}) == ["form 3 is unknown"]
    images = {"source_digest": "a" * 64, "arch": "sm_90a", "cubins": {"moe": "e" * 64}, "tool": {"n": "1"},
              "option_digest": "f" * 64}
    device = good["device"] | {"is_simulator": False}
    assert forms.schema_problems(good | {"device": device, "kernels": images}) == []
    assert forms.schema_problems(good | {"device": device}) == ["kernels lacks the images that ran"]
    del images["option_digest"]
    assert forms.schema_problems(good | {"device": device, "kernels": images}) == ["kernels is malformed"]
    assert forms.schema_problems([]) and forms.schema_problems(good, sealed=True) == ["tree is missing"]


def test_what_runs_is_covered_and_nothing_else() -> None:
    for path in ("flashnext_drv/engine/engine.py", "flashnext_drv/py.typed", "cuda_src/glue/embed.cu",
                 "cuda_src/ARITHMETIC.md", "build_kernels.py", "pyproject.toml"):
        assert forms.is_source(path), path
    for path in ("flashnext_drv/COVERAGE.md", "flashnext_drv/_cubin/manifest.json", "tests/conftest.py",
                 "flashnext_drv/_cuda_src/a.py", "README.md", "tools/receipt.py", "setup/pyproject.toml"):
        assert not forms.is_source(path), path
    assert forms.digest_of([("a", b"1"), ("b", b"2")]) == forms.digest_of([("b", b"2"), ("a", b"1")])
    assert forms.digest_of([("a", b"1")]) != forms.digest_of([("b", b"1")])


@pytest.fixture
def repository(tmp_path: Path) -> Callable[..., str]:
    """repository(path=content, ...) writes and commits; gives the commit."""
    def git(*words: str) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t@t")
        done = subprocess.run(["git", "-C", str(tmp_path), *who, *words], capture_output=True, text=True,
                              check=True)
        return done.stdout.strip()

    git("init", "-q")

    def commit(**files: str) -> str:
        for name, content in files.items():
            path = tmp_path / name.replace("__", "/").replace("_py", ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        git("add", ".")
        git("commit", "-q", "-m", "x")
        return git("rev-parse", "HEAD")

    return commit


def test_only_the_sources_that_ran_get_a_receipt(tmp_path: Path, repository: Callable[..., str]) -> None:
    first = repository(flashnext_drv__a_py="a = 1\n", README="x\n")
    ran = forms.digest_of([("flashnext_drv/a.py", b"a = 1\n")])
    assert tool.commit_digest(first, tmp_path) == ran
    made = tool.seal(a_result(ran), None, tmp_path)
    assert made["tree"]["commit"] == first and forms.schema_problems(made, sealed=True) == []
    for words, result in (("receipt already", made), ("other sources ran", a_result("d" * 64)),
                          ("form 1", {k: v for k, v in a_result(ran).items() if k != "form"}),
                          ("not in order", a_result(ran) | {"results": {}})):
        with pytest.raises(UsageError, match=words):
            tool.seal(result, None, tmp_path)
    repository(README="other text\n")
    assert tool.seal(a_result(ran), None, tmp_path)["source_digest"] == ran, "text is no source"
    (tmp_path / "note").write_text("not known to git")
    with pytest.raises(UsageError, match="dirty"):
        tool.seal(a_result(ran), None, tmp_path)
    (tmp_path / "note").unlink()
    repository(flashnext_drv__a_py="a = 2\n")
    with pytest.raises(UsageError, match="other sources ran"):
        tool.seal(a_result(ran), None, tmp_path)
    assert tool.seal(a_result(ran), first, tmp_path)["tree"]["commit"] == first
    with pytest.raises(UsageError, match="git rev-parse failed"):
        tool.seal(a_result(ran), "nothing", tmp_path)


def test_only_the_client_that_measured_gets_a_receipt(tmp_path: Path,
                                                      repository: Callable[..., str]) -> None:
    own = {"flashnext_drv__bench__b_py": "b = 1\n", "tools__one_py": "t = 1\n"}
    first = repository(flashnext_drv__cli__bench_py="c = 1\n", tools__two_py="x\n", **own)
    client = forms.digest_of([("bench/b.py", b"b = 1\n"), ("cli/bench.py", b"c = 1\n"),
                              ("tools/one.py", b"t = 1\n")])
    result = a_result(tool.commit_digest(first, tmp_path)) | {"command": "tools/one.py --n 1",
                                                              "client_digest": client}
    made = tool.seal(result, None, tmp_path)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(made))
    assert tool.examine(path, tmp_path)["problems"] == []
    repository(tools__one_py="t = 2  # measures something else\n")
    for change in ({}, {"command": "tools/two.py"}, {"command": "flashnext-drv bench"}, {"command": "'"}):
        with pytest.raises(UsageError, match="another client|names no program"):
            tool.seal(result | change, None if not change else first, tmp_path)
    path.write_text(json.dumps(made | {"client_digest": "c" * 64}))
    assert "has another client" in "".join(tool.examine(path, tmp_path)["problems"])


def test_this_trees_client_is_named_as_a_commits_is() -> None:
    paths = [path for path in ROOT.rglob("flashnext_drv/*/*.py") if "__pycache__" not in path.parts]
    named = [(forms.client_name(path.relative_to(ROOT).as_posix(), "pytest"), path) for path in paths]
    assert forms.digest_of((name, path.read_bytes()) for name, path in named if name) == forms.client_digest()
    assert forms.client_name("tools/receipt.py", "receipt.py") == "tools/receipt.py"
    assert forms.client_name("tools/gates.py", "receipt.py") is None


def test_what_is_no_result_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    for text in ("[]", "5", '"kind"', "{"):
        path.write_text(text)
        assert tool.main(["make", str(path), "--out", str(tmp_path / "o.json")]) == 1, text
        assert tool.main(["verify", str(path)]) == 1
    assert "receipt: " in capsys.readouterr().err and not (tmp_path / "o.json").exists()


def test_a_receipt_is_examined_against_its_own_commit(tmp_path: Path,
                                                      repository: Callable[..., str]) -> None:
    first = repository(flashnext_drv__a_py="a = 1\n")
    good = tool.seal(a_result(tool.commit_digest(first, tmp_path)), None, tmp_path)
    path = tmp_path / "r.json"

    def problems(change: dict[str, Any]) -> str:
        path.write_text(json.dumps(good | change))
        return "; ".join(tool.examine(path, tmp_path)["problems"])

    assert problems({}) == ""
    other = repository(flashnext_drv__a_py="a = 2\n")
    assert "has other sources" in problems({"tree": good["tree"] | {"commit": other}})
    assert "cannot be read" in problems({"tree": good["tree"] | {"commit": "0" * 40}})
    assert "malformed" in problems({"date": 7})
    path.write_text("{")
    assert "unreadable" in tool.examine(path, tmp_path)["problems"][0]


def test_other_sources_are_not_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = forms.source_digest()
    assert mine is not None
    path = tmp_path / "r.json"
    path.write_text(json.dumps(a_result(mine)))
    assert tool.main(["quote", str(path)]) == 0
    assert "tests/receipts/r.json" in capsys.readouterr().out
    bad = {"kind": "decode", "verdict": {"qualified": False, "reasons": ["why"]}, "replies": []}
    for change, words in (({"source_digest": "d" * 64}, "other sources"),
                          ({"results": bad}, "not qualified")):
        path.write_text(json.dumps(a_result(mine) | change))
        assert tool.main(["quote", str(path)]) == 1
        assert words in capsys.readouterr().err
    path.write_text(json.dumps(a_result("d" * 64)))
    assert tool.main(["verify", str(path)]) == 0 and tool.main(["verify", "--here", str(path)]) == 1


def test_a_figure_that_its_stamps_do_not_give_is_quoted_as_a_dash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one_token = {"client": [[250_000]]}
    path = tmp_path / "r.json"
    path.write_text(json.dumps(a_result(forms.source_digest() or "") | {"results": {
        "kind": "scaled", "sizes": {"prompt_tokens": 3},
        "legs": [{"mode": "graph", "streams": 1, "stamps_us": one_token}]}}))
    monkeypatch.setattr(tool, "recheck", lambda _: [])
    assert tool.main(["quote", str(path)]) == 0
    assert "TTFT 0.250 s, prefill 12 tokens/s, decode - tokens/s, ITL - ms (p50 -, p95 -)" \
        in capsys.readouterr().out


def test_memory_that_nobody_tells_is_unmeasured() -> None:
    mine = process_memory()
    assert isinstance(mine["rss_bytes"], int) and mine["rss_bytes"] > 1 << 20
    assert set(process_memory(1 << 30).values()) == {UNMEASURED}
    used = gpu_used_bytes(1 << 20)  # no such GPU, or no NVML
    assert used == UNMEASURED
    with Sampler(1 << 20, every_s=0.01) as sampler:
        pass
    found = sampler.found()
    assert found["gpu"] == {"used_bytes_most": UNMEASURED} and found["samples"] >= 2
    assert found["process"]["rss_bytes"] >= mine["rss_bytes"] // 2
