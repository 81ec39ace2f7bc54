"""Images of planted controls: made apart, made again only when something changed, never packed in a wheel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.host.test_build import needs_nvrtc, run_build, small_tree

__all__ = ["small_tree"]  # a fixture of the build's tests

OLD = "    __syncthreads();\\n"
PLANTED = (
    "CONTROLS = (Control('no_barrier', 'barrier', (Edit('glue/twice.cu', '" + OLD + "', 'fn_delay();'),)),\n"
    "            Control('minus', 'scale', (Edit('glue/twice.cu', '+ FN_PLUS', '- FN_PLUS'),)))\n"
)


@pytest.fixture
def planted_tree(small_tree: Path) -> Path:
    """The small tree, two controls for each of its two kernels."""
    family = small_tree / "flashnext_drv" / "kernels" / "glue.py"
    text = family.read_text(encoding="utf-8")
    text = text.replace("import F32,", "import Control, Edit, F32,").replace(
        "KERNELS =", PLANTED + "KERNELS ="
    )
    family.write_text(text.replace("order='',", "order='', controls=CONTROLS,"), encoding="utf-8")
    return small_tree


def controls(tree: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(
        (tree / "flashnext_drv" / "_cubin" / "controls" / "manifest.json").read_bytes()
    )
    return found


@needs_nvrtc
def test_controls_get_images_of_their_own(planted_tree: Path) -> None:
    done = run_build(planted_tree, "--controls")
    assert done.returncode == 0 and "4 planted controls compiled, 0 cached" in done.stderr, done.stderr
    folder, made = planted_tree / "flashnext_drv" / "_cubin" / "controls", controls(planted_tree)
    assert sorted(made) == sorted(
        f"control.twice_{n}.{name}" for n in (64, 128) for name in ("no_barrier", "minus")
    )
    images = {name: (folder / entry["file"]).read_bytes() for name, entry in made.items()}
    assert len(set(images.values())) == 4
    assert all(f"{name[8:].replace('.', '__')}".encode() in image for name, image in images.items())
    source = planted_tree / "cuda_src" / "glue" / "twice.cu"
    assert "fn_delay" not in source.read_text(encoding="utf-8")

    assert "0 planted controls compiled, 4 cached" in run_build(planted_tree, "--controls").stderr
    source.write_text(source.read_text(encoding="utf-8") + "// changed\n", encoding="utf-8")
    assert "4 planted controls compiled, 0 cached" in run_build(planted_tree, "--controls").stderr


@needs_nvrtc
def test_those_for_one_architecture_leave_the_others_where_they_are(planted_tree: Path) -> None:
    family = planted_tree / "flashnext_drv" / "kernels" / "glue.py"
    text = family.read_text(encoding="utf-8")
    family.write_text(text.replace("'- FN_PLUS'),))", "'- FN_PLUS'),), hopper=True)"), encoding="utf-8")
    assert "4 planted controls compiled" in run_build(planted_tree, "--controls").stderr
    made = controls(planted_tree)
    done = run_build(planted_tree, "--controls", "hopper")
    assert done.returncode == 0 and "0 planted controls compiled, 4 cached" in done.stderr, done.stderr
    assert controls(planted_tree) == made
    folder = planted_tree / "flashnext_drv" / "_cubin" / "controls"
    there = sorted(path.name for path in folder.glob("*.cubin"))
    assert there == sorted(one["file"] for one in made.values())


@needs_nvrtc
def test_control_that_does_not_fit_stops_its_build(planted_tree: Path) -> None:
    source = planted_tree / "cuda_src" / "glue" / "twice.cu"
    source.write_text(source.read_text(encoding="utf-8").replace("+ FN_PLUS", "+  FN_PLUS"), encoding="utf-8")
    done = run_build(planted_tree, "--controls")
    assert done.returncode == 3 and "control minus of kernel twice_64 does not fit its source" in done.stderr


@needs_nvrtc
def test_a_wheel_holds_no_control(planted_tree: Path, tmp_path: Path) -> None:
    assert run_build(planted_tree, "--controls").returncode == 0
    code = "import build_kernels, sys; print(build_kernels.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=planted_tree,
        text=True,
        capture_output=True,
        check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "FLASHNEXT_ARCHS": "sm_90a"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    names = zipfile.ZipFile(tmp_path / done.stdout.split()[-1]).namelist()
    assert [n for n in names if n.endswith(".cubin")] and not [
        n for n in names if "control" in n and "_cubin" in n
    ]
