"""tools/gates.py: how a gate ends, and that a commit is run as it is, not as the working tree is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import gates  # noqa: E402
from gates import FAILED, NOT_RUN, PASSED, Gate  # noqa: E402


def run(tree: Path, *wanted: Gate, **more: object) -> dict[str, tuple[str, str]]:
    made = gates.run_gates(wanted, tree, tree, **more)  # type: ignore[arg-type]
    return {one.name: (one.state, one.reason) for one in made}


def test_a_gate_passes_only_when_it_says_so(tmp_path: Path) -> None:
    says = r"(?P<n>\d+) good, 0 bad"
    found = run(
        tmp_path,
        Gate("good", ("-c", "print('7 good, 0 bad')"), "", says=says),
        Gate("silent", ("-c", "pass"), "", says=says),
        Gate("bad", ("-c", "print('7 good, 1 bad')"), "", says=says),
        Gate("code", ("-c", "raise SystemExit('it broke')"), ""),
        Gate("slow", ("-c", "import time; time.sleep(60)"), "", limit_s=0.3),
        Gate("behind good", ("-c", "pass"), "", after=("good",)),
        Gate("behind code", ("-c", "pass"), "", after=("good", "code")),
        Gate("behind that", ("-c", "pass"), "", after=("behind code",)),
        Gate("gpu", ("-c", "pass"), "", gpu=True),
        Gate("long", ("-c", "pass"), "", long=True),
        Gate("absent", ("-c", "pass"), "", needs="tools/none.py"),
        Gate("program", ("-c", "pass"), "", program="no-program-is-called-so"),
    )
    assert found["good"] == found["behind good"] == (PASSED, "")
    for name in ("silent", "bad"):
        assert found[name][0] == FAILED and "never said so" in found[name][1]
    assert found["code"] == (FAILED, "exit code 1: it broke")
    assert found["slow"][0] == FAILED and "took longer" in found["slow"][1]
    assert found["behind code"] == (NOT_RUN, "code failed")
    assert found["behind that"] == (NOT_RUN, "behind code was not run")
    assert [found[name][0] for name in ("gpu", "long", "absent", "program")] == [NOT_RUN] * 4
    assert run(tmp_path, Gate("a", ("-c", "pass"), ""), only=("b",)) == {"a": (NOT_RUN, "left out by --only")}


def test_a_gate_that_is_asked_for_brings_what_it_builds_on(tmp_path: Path) -> None:
    wanted = (Gate("a", ("-c", "pass"), ""), Gate("b", ("-c", "pass"), "", after=("a",)),
              Gate("c", ("-c", "pass"), "", after=("b",)), Gate("d", ("-c", "pass"), ""))
    states = {name: state for name, (state, _) in run(tmp_path, *wanted, only=("c",)).items()}
    assert states == {"a": PASSED, "b": PASSED, "c": PASSED, "d": NOT_RUN}


@pytest.mark.parametrize(("name", "line", "good"), [
    ("receipts", "30 receipts, 0 wrong", True), ("receipts", "0 receipts, 0 wrong", False),
    ("tests", "COUNTS device=sim passed=7 failed=0 error=0 skipped=0", True),
    ("tests", "COUNTS device=sim passed=0 failed=0 error=0 skipped=9", False),
    ("contract", "SUMMARY 2 kernels: 2 pass, 0 fail, 0 known; 9 controls: 9 red, 0 missed", True),
    ("contract", "SUMMARY 0 kernels: 0 pass, 0 fail, 0 known; 0 controls: 0 red, 0 missed", False),
    ("hashes", "compared 810, 0 differ, 14 only in the file, 0 not in the file", True),
    ("hashes", "compared 0, 0 differ, 824 only in the file, 0 not in the file", False)])
def test_nothing_done_is_no_gate_passed(name: str, line: str, good: bool) -> None:
    says = next(gate.says for gate in gates.GATES if gate.name == name)
    assert (re.search(says, line) is not None) is good


def test_a_gate_sees_the_worktree_and_no_settings_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHNEXT_ARCHS", "sm_90a")
    (tmp_path / "here.py").write_text("x = 1")
    code = "import os, here; assert 'FLASHNEXT_ARCHS' not in os.environ; print(os.getcwd())"
    made = next(gates.run_gates([Gate("a", ("-c", code), "")], tmp_path, tmp_path))
    assert made.state == PASSED and made.tail.strip() == str(tmp_path)


def test_a_commit_is_run_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    repo = tmp_path / "repo"
    repo.mkdir()

    def git(*words: str) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t@t")
        done = subprocess.run(["git", "-C", str(repo), *who, *words], capture_output=True, text=True,
                              check=True)
        return done.stdout.strip()

    git("init", "-q")
    for content in ("old", "new"):
        (repo / "note").write_text(content)
        git("add", ".")
        git("commit", "-q", "-m", content)
    (repo / "note").write_text("dirty")
    with gates.worktree("HEAD~1", repo) as (tree, name):
        assert (tree / "note").read_text() == "old" and name == git("rev-parse", "HEAD~1")
    assert not tree.exists() and len(git("worktree", "list").splitlines()) == 1
    with pytest.raises(SystemExit), gates.worktree("nothing", repo):
        pass

    monkeypatch.setattr(gates, "ROOT", repo)
    read = "import sys; text = open('note').read(); print(text); sys.exit(text != 'new')"
    wanted = (Gate("read", ("-c", read), ""), Gate("gpu", ("-c", ""), "", gpu=True))
    monkeypatch.setattr(gates, "GATES", wanted)
    out = tmp_path / "out.json"
    assert gates.main(["--out", str(out)]) == 0
    assert gates.main(["--out", str(out), "--strict"]) == 1
    assert gates.main(["HEAD~1", "--out", str(out)]) == 1
    told = json.loads(out.read_text())
    assert told["commit"] == git("rev-parse", "HEAD~1")
    assert told["counts"] == {PASSED: 0, FAILED: 1, NOT_RUN: 1}
    assert "0 passed, 1 failed, 1 not run" in capsys.readouterr().out


def test_every_gate_of_ours_is_there() -> None:
    names = [gate.name for gate in gates.GATES]
    assert len(set(names)) == len(names)
    for i, gate in enumerate(gates.GATES):
        assert set(gate.after) <= set(names[:i]), "a gate comes behind what it builds on"
        assert not gate.needs or (ROOT / gate.needs).exists()
        program = gate.command[0]
        assert program == "-m" or (ROOT / program).exists()
    for words in (["--only", "nothing"], ["--out", str(ROOT)], ["--out", str(ROOT / "none" / "out.json")]):
        with pytest.raises(SystemExit) as stopped:
            gates.main(words)
        assert stopped.value.code == 2
