"""Launch records: the formula for blocks per SM, what counts as stale, missing or over its limits, and the
command's exit codes; and the committed record itself, which is held to the images where these are built.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flashnext_drv.__main__ import main
from flashnext_drv.check import resources
from flashnext_drv.check.resources import KernelEntry, Record, Resources
from flashnext_drv.cli.records import RECORD_PATH
from flashnext_drv.errors import BuildError, UsageError
from flashnext_drv.kernels import catalog
from flashnext_drv.kernels.spec import Limit
from tools import fill_limits

NAME = "site_norm"
TOOL = {"nvrtc": "13.0"}


def made(regs: int = 64, text: str = "aa" * 32, spill: int = 0) -> Resources:
    return Resources(regs, 32, 0, spill, spill, 4, text)


def record(**changes: object) -> Record:
    """A record with every declared kernel on every architecture.  changes: fields of NAME's entry."""
    kernels = {}
    for family in catalog.families():
        for spec in catalog.specs(family):
            kernels[spec.name] = KernelEntry(family, catalog.kernel_digest(spec.name), spec.block,
                                             spec.offsets(), {arch: made() for arch in catalog.ARCHS})
    kernels[NAME] = replace(kernels[NAME], **changes)
    return Record(TOOL, "options", kernels)


def kinds(found: object) -> list[tuple[str, str, str]]:
    return [(one.kind, one.kernel, one.arch) for one in found]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("arch", "regs", "shared", "threads", "blocks"), [
    ("sm_90a", 32, 0, 128, 16),         # 64 warps by threads and by registers
    ("sm_90a", 33, 0, 128, 12),         # 40 registers a thread: 51 warps, 48 in fours
    ("sm_90a", 168, 0, 128, 3),
    ("sm_90a", 255, 0, 1024, 0),        # 8 warps' worth of registers, 32 wanted
    ("sm_90a", 16, 0, 32, 32),          # the SM's blocks
    ("sm_86", 16, 0, 32, 16),
    ("sm_89", 16, 0, 32, 24),
    ("sm_86", 32, 0, 1024, 1),          # 1536 threads
    ("sm_90a", 32, 44328, 1024, 2),
    ("sm_86", 32, 44328, 256, 2),       # 102,400 bytes // 45,440
    ("sm_120", 32, 49152, 128, 2),
    ("sm_80", 32, 41104, 512, 3)])
def test_blocks_per_sm(arch: str, regs: int, shared: int, threads: int, blocks: int) -> None:
    assert resources.blocks_per_sm(arch, regs, shared, threads) == blocks


def test_limits_of_an_sm_are_known_for_every_architecture_we_build() -> None:
    assert set(resources.SM_LIMITS) == set(catalog.ARCHS)


def test_a_record_equal_to_what_was_measured_is_silent() -> None:
    assert kinds(resources.compare(record(), record())) == []
    assert kinds(resources.stale_sources(record())) == []


def test_no_record_and_unknown_kernels_are_missing() -> None:
    assert kinds(resources.compare(record(), None)) == [("missing", "", "")]
    less = record()
    less.kernels.pop(NAME)  # type: ignore[attr-defined]
    assert kinds(resources.compare(record(), less)) == [("missing", NAME, "")]
    assert kinds(resources.stale_sources(less)) == [("missing", NAME, "")]
    assert kinds(resources.compare(less, record())) == [("gone", NAME, "")]


def test_a_changed_source_makes_the_record_stale() -> None:
    old = record(source_sha256="0" * 64)
    assert kinds(resources.compare(record(), old)) == [("stale", NAME, "")]
    assert kinds(resources.stale_sources(old)) == [("stale", NAME, "")]


@pytest.mark.parametrize("different", [made(regs=63), made(text="bb" * 32), made(spill=4)])
def test_other_figures_or_instructions_make_it_stale(different: Resources) -> None:
    archs = {arch: different if arch == "sm_89" else made() for arch in catalog.ARCHS}
    found = list(resources.compare(record(archs=archs), record()))
    assert kinds(found) == [("stale", NAME, "sm_89")]
    assert "built" in found[0].text or "instructions" in found[0].text


def test_other_parameters_block_and_tool_make_it_stale() -> None:
    assert kinds(resources.compare(record(params=((0, 8),)), record())) == [("stale", NAME, "")]
    assert kinds(resources.compare(record(block=32), record())) == [("stale", NAME, "")]
    other = replace(record(), tool={"nvrtc": "13.1"})
    assert kinds(resources.compare(other, record())) == [("stale", "", "")]


def test_an_architecture_that_was_not_built_or_recorded_is_missing() -> None:
    five = {arch: made() for arch in catalog.ARCHS if arch != "sm_121"}
    assert kinds(resources.compare(record(archs=five), record())) == [("missing", NAME, "sm_121")]
    assert kinds(resources.compare(record(), record(archs=five))) == [("missing", NAME, "sm_121")]
    assert kinds(resources.stale_sources(record(archs=five))) == [("missing", NAME, "sm_121")]


def test_kernels_over_their_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(catalog.spec(NAME), limits={"sm_80": Limit(64, 0, 4), "sm_86": Limit(63, 0, 4),
                                               "sm_89": Limit(64, 0, 5), "sm_90a": Limit(64, 4, 4)})
    monkeypatch.setattr(catalog, "spec", lambda name: spec)
    archs = {"sm_80": made(), "sm_86": made(), "sm_89": made(), "sm_90a": made(spill=8), "sm_120": made()}
    one = Record(TOOL, "options", {NAME: record(archs=archs).kernels[NAME]})
    found = {f.arch: f.text for f in resources.over_limits(one)}
    assert set(found) == {"sm_86", "sm_89", "sm_90a", "sm_120"}
    assert "64 registers, limit 63" in found["sm_86"] and "4 blocks per SM, at least 5" in found["sm_89"]
    assert "8 spill bytes, limit 4" in found["sm_90a"] and "no limit" in found["sm_120"]


def test_untouched_kernels_must_keep_their_instructions() -> None:
    other = {arch: made(text="cc" * 32) for arch in catalog.ARCHS}
    assert kinds(resources.changed_encodings(record(), record())) == []
    assert kinds(resources.changed_encodings(record(archs=other), record())) \
        == [("encoding", NAME, arch) for arch in catalog.ARCHS]
    touched = record(archs=other, source_sha256="1" * 64)
    assert kinds(resources.changed_encodings(touched, record())) == []


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert resources.load(path) is None
    path.write_text(resources.dump(record()))
    again = resources.load(path)
    assert again is not None and kinds(resources.compare(record(), again)) == []
    assert resources.dump(again) == resources.dump(record()) and json.loads(path.read_text())["format"] == 1


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 2}', '{"format": 1, "tool": {}}',
                                  '{"format": 1, "tool": {}, "option_digest": "", "kernels": {"a": 3}}',
                                  '{"format": 1, "tool": {}, "option_digest": "", "kernels": []}'])
def test_a_broken_record_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(BuildError, match="launch record cannot be used"):
        resources.load(path)


def test_the_driver_must_agree_with_the_cubin() -> None:
    class Fake:
        arch = "sm_90a"
        said = {"regs": 64, "shared_bytes": 32, "local_bytes": 0, "max_threads": catalog.spec(NAME).block}

        def names(self) -> tuple[str, ...]:
            return (NAME,)

        def module(self, family: str) -> Fake:
            assert family == "glue"
            return self

        def function(self, name: str) -> Fake:
            return self

        def attributes(self) -> object:
            return type("Attributes", (), self.said)

    fake = Fake()
    assert kinds(resources.device_differences(fake, record())) == []  # type: ignore[arg-type]
    for what in tuple(fake.said):
        fake.said = {**Fake.said, what: 1}
        found = list(resources.device_differences(fake, record()))  # type: ignore[arg-type]
        assert kinds(found) == [("driver", NAME, "sm_90a")] and "the driver says 1" in found[0].text


def test_the_command_ends_with_1_and_a_table_when_the_record_is_stale(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "records" / "r.json"
    monkeypatch.setattr(resources, "measure", record)
    monkeypatch.setattr(resources, "over_limits", lambda measured: iter(()))
    base = ["records", "--device", "sim", "--record", str(path)]
    assert main(base) == 1 and "there is no record" in capsys.readouterr().out
    assert main([*base, "--update"]) == 0 and path.is_file()
    assert main(base) == 0 and "RECORDS PASS" in capsys.readouterr().out
    monkeypatch.setattr(resources, "measure", lambda: record(source_sha256="2" * 64))
    assert main(base) == 1
    said = capsys.readouterr().out
    assert NAME in said and "stale" in said and "records --update" in said
    assert main([*base, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["good"] and told["findings"][0]["kernel"] == NAME and len(told["kernels"]) > 20
    other = {arch: made(text="cc" * 32) for arch in catalog.ARCHS}
    monkeypatch.setattr(resources, "measure", lambda: record(archs=other))
    assert main([*base, "--update"]) == 0
    release = tmp_path / "release.json"
    release.write_text(resources.dump(record()))
    assert main([*base, "--against", str(release)]) == 1 and "encoding" in capsys.readouterr().out
    assert main([*base, "--against", str(tmp_path / "none.json")]) == 2


def test_update_refuses_to_write_half_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    five = {arch: made() for arch in catalog.ARCHS if arch != "sm_121"}
    monkeypatch.setattr(resources, "measure", lambda: record(archs=five))
    path = tmp_path / "r.json"
    assert main(["records", "--device", "sim", "--record", str(path), "--update"]) == 3 and not path.exists()


# Limits, and the record that is committed.

REFRESH = "to refresh: python build_kernels.py && flashnext-drv records --update"
needs_images = pytest.mark.skipif(not (catalog.cubin_root() / "manifest.json").is_file(),
                                  reason="no kernel images built: run python build_kernels.py")


def test_limits_leave_little_room() -> None:
    assert fill_limits.limit_of(made(regs=61)) == (64, 0, 4)
    assert fill_limits.limit_of(made(regs=64)) == (72, 0, 4)
    assert fill_limits.limit_of(made(regs=255)) == (255, 0, 4)
    assert fill_limits.limit_of(made(regs=72, spill=36)) == (80, 64, 4)


def test_limits_of_one_kernel_are_changed_alone() -> None:
    before = fill_limits.PATH.read_text(encoding="utf-8")
    grown = {arch: made(regs=200) for arch in catalog.ARCHS}
    after = fill_limits.text(before, record(archs=grown), (NAME,))
    changed = [line for line in after.splitlines() if line not in before.splitlines()]
    assert len(changed) == 1 and changed[0].startswith(f'    "{NAME}": ((208, 0, 4), ')
    assert len(after.splitlines()) == len(before.splitlines())
    scope: dict[str, object] = {"__name__": "limits", "__package__": "flashnext_drv.kernels"}
    exec(compile(after, "limits.py", "exec"), scope)
    assert scope["limits_of"](NAME)["sm_121"] == Limit(208, 0, 4)  # type: ignore[operator]
    with pytest.raises(UsageError, match="every architecture"):
        fill_limits.text(before, record(archs={"sm_80": made()}), (NAME,))


def test_every_kernel_declares_limits_on_every_architecture() -> None:
    lacking = [spec.name for spec in catalog.specs() if set(spec.limits) != set(catalog.ARCHS)]
    assert not lacking, "run python build_kernels.py && python tools/fill_limits.py"


def test_the_committed_record_is_of_these_sources() -> None:
    committed = resources.load(RECORD_PATH)
    assert committed is not None, f"no record is committed; {REFRESH}"
    found = [str(one) for one in resources.stale_sources(committed)]
    assert not found, "\n".join([REFRESH, *found])


@needs_images
def test_images_are_those_of_the_committed_record_and_within_limits() -> None:
    measured = resources.measure()
    committed = resources.load(RECORD_PATH)
    built = {arch for entry in measured.kernels.values() for arch in entry.archs}
    found = [*resources.over_limits(measured), *resources.compare(measured, committed)]
    wrong = [str(one) for one in found if not one.arch or one.arch in built]
    assert not wrong, "\n".join([REFRESH, *wrong])
