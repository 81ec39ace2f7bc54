"""The commands that need files alone: what `synth` writes, what `inspect` reports, and how both fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flashnext_drv.__main__ import main
from flashnext_drv.cli import report

MICRO = Path(__file__).resolve().parents[1] / "data" / "exl3_micro" / "pack"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No digest cache but this test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHNEXT_DRV_PACK", raising=False)


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """A copy of the golden micro pack that may be changed."""
    shutil.copytree(MICRO, tmp_path / "pack", copy_function=shutil.copyfile)
    (tmp_path / "pack").chmod(0o755)
    return tmp_path / "pack"


def said(capsys: pytest.CaptureFixture[str], code: int, *argv: str | Path) -> str:
    """stdout of a command that ends with `code`; its stderr is one line when that is an error's."""
    got = main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    assert got == code, err
    assert err.count("\n") == (code in (report.USAGE, report.MISSING)), err
    return out or err


def test_inspect_reports_groups_widths_and_bytes(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = json.loads(said(capsys, report.GOOD, "inspect", pack, "--json"))
    assert found["model"] == {"layers": 4, "hidden": 128, "vocab": 512, "experts": 16, "experts_a_token": 4,
                              "mtp": True}
    assert sum(group["bytes"] for group in found["groups"].values()) < found["pack_bytes"]
    assert found["groups"]["experts"]["linears"] and found["ngram"]["codec"] == 4
    assert len(found["digest"]) == 64 and found["remarks"] == []
    text = said(capsys, report.GOOD, "inspect", pack)
    assert found["digest"] in text and "experts" in text and "mul1" in text


def test_inspect_lists_every_tensor_with_its_bits(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, report.GOOD, "inspect", pack, "--json", "--tensors", "--no-digest"))
    listed = {one["name"]: one for one in found["listing"]}
    assert len(listed) == len(found["listing"]) == found["tensors"]
    assert sum(one["bytes"] for one in listed.values()) == sum(g["bytes"] for g in found["groups"].values())
    stored = weights = 0
    for name, one in listed.items():
        assert (pack / one["file"]).is_file(), name
        if ".ngram_embedding.shard_" in name and name.endswith(".trellis"):
            assert one["bits"] == found["ngram"]["codec"] == 4, name
        elif name.endswith(".trellis"):  # tiles of 256 weights
            n_weights = one["shape"][0] * one["shape"][1] * 256
            assert one["codebook"] and one["bits"] * n_weights == 8 * one["bytes"], name
            stored, weights = stored + 8 * one["bytes"], weights + n_weights
        else:
            assert one["codebook"] == "" and one["bits"] in (None, 16.0, 32.0), name
    assert weights and found["bits"] == round(stored / weights, 4)
    assert any(one["bits"] is None for one in listed.values())
    text = said(capsys, report.GOOD, "inspect", pack, "--tensors", "--no-digest").splitlines()
    assert sum(line.endswith("  lm_head.trellis") and line.startswith("4 ") for line in text) == 1
    assert f"{found['bits']:.4g} bits a weight" in "\n".join(text)
    assert "listing" not in json.loads(said(capsys, report.GOOD, "inspect", pack, "--json", "--no-digest"))


def test_inspect_tells_of_a_missing_mtp_mixer(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (pack / "mtp_hyper_connection_mixer_patch.safetensors").unlink()
    text = said(capsys, report.GOOD, "inspect", pack, "--no-digest")
    assert "MTP head: False" in text and "remark: " in text and "drafting is not possible" in text


def test_verify_without_a_manifest_says_how_to_make_one(
    pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--save-manifest" in said(capsys, report.MISSING, "inspect", pack, "--verify")


@pytest.mark.parametrize("change", ["tampered", "added", "dropped", "renamed"])
def test_verify_fails_on_files_changed_after_the_manifest(
    pack: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    said(capsys, report.GOOD, "inspect", pack, "--save-manifest", pack / "manifest.json")
    assert "manifest: equal" in said(capsys, report.GOOD, "inspect", pack, "--verify")
    file = pack / "ngram_embedding.safetensors"
    if change == "tampered":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif change == "added":
        (pack / "extra.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    elif change == "dropped":
        file.unlink()
    else:
        file.rename(pack / "renamed.safetensors")
    text = said(capsys, report.FAILED, "inspect", pack, "--verify")
    word = {"tampered": "changed"}.get(change, change)
    name = "extra.safetensors" if change == "added" else file.name
    assert word in text and name in text and "differs from its manifest" in text
    as_json = json.loads(said(capsys, report.FAILED, "inspect", pack, "--verify", "--json"))
    assert name in as_json["manifest"]


def test_synth_writes_what_inspect_accepts_and_the_same_bytes_by_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        text = said(capsys, report.GOOD, "synth", tmp_path / name, "--model", "micro", "--seed", str(seed))
        assert str(tmp_path / name) in text and f"seed {seed}" in text
        report_ = json.loads(said(capsys, report.GOOD, "inspect", tmp_path / name, "--json"))
        digests.append(report_["digest"])
    assert digests[0] == digests[1] != digests[2]


def test_synth_leaves_a_folder_with_files_alone(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(p.name for p in pack.iterdir())
    said(capsys, report.USAGE, "synth", pack)
    assert sorted(p.name for p in pack.iterdir()) == before


@pytest.mark.parametrize(("bad", "message"), [
    (b"1234567", "truncated"),
    ((1 << 40).to_bytes(8, "little") + b"{}", "header does not fit"),
    ((2).to_bytes(8, "little") + b"{}tail", "overlong"),
    ((2).to_bytes(8, "little") + b"{]", "not JSON")])
def test_broken_files_end_with_one_line(pack: Path, capsys: pytest.CaptureFixture[str], bad: bytes,
                                        message: str) -> None:
    (pack / "bad.safetensors").write_bytes(bad)
    for command in (["inspect", pack, "--no-digest"], ["generate", pack, "--ids", "1", "--max-new", "1",
                                                       "--device", "sim"]):
        text = said(capsys, report.MISSING, *command)
        assert message in text and "bad.safetensors" in text
