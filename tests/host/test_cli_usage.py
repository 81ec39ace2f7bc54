"""The command line without device and compiler: usage errors, exit codes, ids and row texts, environment
defaults.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashnext_drv import errors
from flashnext_drv.__main__ import main, make_parser
from flashnext_drv.cli import COMMANDS, report
from flashnext_drv.cli.ids import parse_ids, parse_rows
from flashnext_drv.cli.limits import memory_limits

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHNEXT_DRV_PACK", raising=False)
    monkeypatch.delenv("FLASHNEXT_DRV_DEVICE", raising=False)


def bare(*argv: str, path: str = "/nonexistent") -> subprocess.CompletedProcess[str]:
    """The command in a process that finds no program on PATH and no library but the interpreter's."""
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "PATH": path, "HOME": "/nonexistent"}
    command = [sys.executable, "-m", "flashnext_drv", *argv]
    return subprocess.run(command, capture_output=True, text=True, env=env,
                          timeout=120, check=False)


@pytest.mark.parametrize("argv", [
    [], ["nonsense"], ["generate"], ["generate", "p", "--max-new", "1"], ["generate", "p", "--ids", "1"],
    ["generate", "p", "--ids", "1", "--ids-file", "f", "--max-new", "1"],
    ["generate", "p", "--ids", "1", "--max-new", "x"], ["logits", "p", "--out", "o.npz"],
    ["logits", "p", "--ids-file", "f"], ["doctor", "--device", "tpu"],
    ["plan", "p", "--expert-lines", "some"], ["plan", "p", "--ngram", "disk"],
    ["plan", "p", "--device-bytes", "much"], ["plan", "p", "--ring-depth", "x"]])
def test_bad_arguments_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == report.USAGE
    assert "usage: flashnext-drv" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "message"), [
    (["generate", "--ids", "1", "--max-new", "1"], "no pack was named"),
    (["generate", "p", "--ids", "1,x", "--max-new", "1"], "something else than integers"),
    (["generate", "p", "--ids", " , ", "--max-new", "1"], "holds no token id"),
    (["generate", "p", "--ids", "[1, 2.5]", "--max-new", "1"], "flat JSON list of integers"),
    (["generate", "p", "--ids", "[1, true]", "--max-new", "1"], "flat JSON list of integers"),
    (["generate", "p", "--ids-file", "no/such/file", "--max-new", "1"], "cannot be read"),
    (["generate", "p", "--ids", "1", "--max-new", "-1"], "--max-new is 0 or more"),
    (["generate", "p", "--ids", "1", "--max-new", "1", "--stop-id", "3", "--no-stop"], "exclude each other"),
    (["generate", "p", "--ids", "1", "--max-new", "1", "--top-p", "1.5"], "top_p is outside its range"),
    (["generate", "p", "--ids", "1", "--max-new", "1", "--temperature", "nan"], "temperature is outside"),
    (["generate", "p", "--ids", "1", "--max-new", "1", "--seed", "-1"], "seed is outside its range"),
    (["generate", "p", "--ids", "1", "--max-new", "1", "--prompt-rows", "17"], "outside its range"),
    (["generate", "p", "--ids", "1", "--max-new", "1", "--chunk", "0"], "outside its range (value=0"),
    (["generate", "p", "--ids", "1", "--max-new", "1", "--chunk", "16385"], "range=1..16384"),
    (["generate", "p", "--ids", "1", "--max-new", "1", "--deep-rows", "0"], "deep_rows is outside"),
    (["generate", "p", "--ids", "1", "--max-new", "1", "--expert-lines", "-1"], "expert_lines is outside"),
    (["generate", "p", "--ids", "1", "--max-new", "1", "--expert-lines-most", "3"], "needs expert_lines"),
    (["generate", "p", "--ids", "1", "--max-new", "1", "--ring-depth", "0"], "ring_depth is outside"),
    (["plan", "p", "--ring-lines", "0"], "ring_lines is outside"),
    (["plan", "p", "--graph-after", "3"], "graph_after is outside"),
    (["plan", "p", "--graphs", "-1"], "graphs is outside"),
    (["plan", "p", "--steps-ahead", "65"], "steps_ahead is outside")])
def test_bad_values_exit_with_2_and_one_line(argv: list[str], message: str,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == report.USAGE
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_logits_refuses_its_arguments_before_it_opens_anything(tmp_path: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    ids = tmp_path / "ids"
    ids.write_text("1 2 3\n")
    good = str(tmp_path / "o.npz")
    for rows, out in (("2:2", good), ("0:4", good), ("a", good), ("0:1", str(tmp_path / "o.txt")),
                      ("0:1", str(tmp_path / "none" / "o.npz"))):
        argv = ["logits", "no-pack", "--ids-file", str(ids), "--out", out, "--rows", rows]
        assert main(argv) == report.USAGE
    assert "no-pack" not in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [ids]


def test_environment_gives_the_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FLASHNEXT_DRV_PACK", str(tmp_path / "from-environment"))
    monkeypatch.setenv("FLASHNEXT_DRV_DEVICE", "sim")
    assert main(["generate", "--ids", "1", "--max-new", "1"]) == report.MISSING
    assert "from-environment" in capsys.readouterr().err
    assert main(["inspect", "--no-digest"]) == report.MISSING
    assert "from-environment" in capsys.readouterr().err
    monkeypatch.setenv("FLASHNEXT_DRV_DEVICE", "gpu")
    assert main(["generate", "--ids", "1", "--max-new", "1"]) == report.USAGE
    assert "FLASHNEXT_DRV_DEVICE" in capsys.readouterr().err


def test_exit_code_follows_the_type_of_the_error() -> None:
    made = {errors.UsageError("u"): 2, errors.CheckpointError("c"): 3, errors.BuildError("b"): 3,
            errors.DriverMissing("d"): 3, errors.CapacityError("c"): 4,
            errors.OutOfMemory("cuMemAlloc", 2): 4, errors.ContractError("c"): 1,
            errors.DriverError("d", 1): 1, errors.SimError("s"): 1, errors.LeakError("l", entries=("x",)): 1,
            KeyboardInterrupt(): 130}
    for error, code in made.items():
        assert report.exit_code(error) == code, error
    group = ExceptionGroup("close", [errors.LeakError("l", entries=()), errors.CapacityError("c")])
    assert report.exit_code(group) == report.CAPACITY


def test_ids_as_people_write_them() -> None:
    for text in ("1,2,30", "1 2 30", " 1,\n2\t30 \n", "[1, 2, 30]", "\n[1,2,\n30]\n", "1, 2, 30,"):
        assert parse_ids(text, "text") == [1, 2, 30]
    assert parse_ids("-1", "text") == [-1]          # the engine names the vocabulary it is outside of
    for text in ("1.5", "1-2", "0x10", "{}", "[[1]]", "[1", ""):
        with pytest.raises(errors.UsageError):
            parse_ids(text, "text")


def test_rows_as_people_write_them() -> None:
    assert parse_rows(None, 5) == [(0, 5)]
    assert parse_rows("3, 0:2,4:5", 5) == [(3, 4), (0, 2), (4, 5)]
    for text in ("", "1:", ":2", "-1:2", "2:1", "5", "1:2:3", "1;2"):
        with pytest.raises(errors.UsageError):
            parse_rows(text, 5)


@pytest.mark.parametrize("argv", [["generate", "p", "--ids", "1", "--max-new", "1"], ["serve", "p"]])
def test_graphs_are_switched_where_a_command_runs_either_way(argv: list[str]) -> None:
    parser, _ = make_parser()
    for more, wanted in (([], True), (["--graph"], True), (["--no-graph"], False)):
        assert memory_limits(parser.parse_args([*argv, *more]))["graph"] is wanted
    assert "graph" not in memory_limits(parser.parse_args(["plan", "p"]))
    for command in ("plan", "trace"):
        with pytest.raises(SystemExit):
            parser.parse_args([command, "p", "--no-graph"])


def test_every_command_has_help() -> None:
    parser, modules = make_parser()
    assert tuple(modules) == COMMANDS
    for name in COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            parser.parse_args([name, "--help"])
        assert stopped.value.code == 0


def test_doctor_works_without_driver_and_compiler() -> None:
    """On a machine with a GPU the driver is found whatever PATH says; then the GPU may run."""
    done = bare("doctor", "--json")
    found = json.loads(done.stdout)
    assert done.stderr == ""
    assert found["simulator"] == {"usable": "ziglang" in found["simulator"].get("compiler", "")} or (
        found["simulator"]["usable"] and "ziglang" in found["simulator"]["compiler"])
    assert done.returncode == (report.GOOD if found["runs_on"] else report.MISSING)
    if not found["runs_on"]:
        said = " ".join(one["what"] + " " + one["do"] for one in found["missing"])
        assert "driver" in said and "compiler" in said and "g++" in said
    text = bare("doctor")
    assert text.returncode == done.returncode and text.stdout.startswith("device ")


def test_version_and_no_imports_of_the_driver() -> None:
    code = ("import sys; from flashnext_drv.__main__ import make_parser; make_parser(); "
            "sys.exit(any(m.startswith('cuda') for m in sys.modules))")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=60, check=False).returncode == 0
    assert bare("--version").stdout.startswith("flashnext_drv ")
