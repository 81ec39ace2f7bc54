"""The simulator's build: what is compiled when, what is said when it cannot be, and its fallbacks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashnext_drv.errors import BuildError
from flashnext_drv.kernels import catalog, probe
from flashnext_drv.kernels.spec import KernelSpec
from flashnext_drv.sim import build

pytestmark = pytest.mark.sim
REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = (probe.FAULT, probe.BARRIER_TURNS)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own that starts with the objects of the user's, so that only changes are compiled."""
    build.build(("probe",))
    objects = build.cache_root() / "objects"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = build.cache_root() / "objects"
    store.mkdir(parents=True)
    for path in objects.glob("*.o"):
        os.link(path, store / path.name) if path.stat().st_dev == store.stat().st_dev else shutil.copy(
            path, store
        )
    return build.cache_root()


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the kernel sources that the build takes instead, with two small kernels declared."""
    root = tmp_path / "cuda_src"
    shutil.copytree(catalog.source_root(), root)
    monkeypatch.setattr(catalog, "source_root", lambda: root)
    declare(monkeypatch, SMALL)
    yield root


def declare(monkeypatch: pytest.MonkeyPatch, specs: Sequence[KernelSpec]) -> None:
    monkeypatch.setattr(catalog, "specs", lambda family=None: tuple(specs))
    monkeypatch.setattr(catalog, "image_digest", lambda family: "0" * 64)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each call of the compiler was for, in order."""
    seen: list[str] = []
    run = build._run

    def noted(command: Sequence[str], what: str) -> None:
        seen.append(what)
        run(command, what)

    monkeypatch.setattr(build, "_run", noted)
    return seen


def test_second_build_compiles_nothing(cache: Path, sources: Path, commands: list[str]) -> None:
    first = build.build(("probe",))
    assert first.parent.parent == cache and commands[-1] == "library"
    n_calls = len(commands)
    assert build.build(("probe",)) == first
    assert len(commands) == n_calls


def test_changed_kernel_costs_its_own_object(cache: Path, sources: Path, commands: list[str]) -> None:
    first = build.build(("probe",))
    commands.clear()
    kernel = sources / "probe" / "fault.cu"
    kernel.write_text(kernel.read_text() + "\n// changed\n")
    second = build.build(("probe",))
    assert second != first and first.is_file()
    assert commands == ["probe/fault.cu", "library"]


def test_changed_header_reaches_only_what_includes_it(
    cache: Path, sources: Path, commands: list[str]
) -> None:
    build.build(("probe",))
    commands.clear()
    header = sources / "warp.cuh"
    header.write_text(header.read_text() + "\n// changed\n")
    build.build(("probe",))
    assert commands == ["probe/fault.cu", "library"]


def test_parameters_other_than_declared_do_not_compile(
    cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(monkeypatch, (replace(probe.FAULT, args=probe.FAULT.args[:-1]),))
    with pytest.raises(BuildError, match="kernel fault: parameters differ from the declaration"):
        build.build(("probe",))


def test_shared_bytes_other_than_declared_do_not_compile(
    cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(monkeypatch, (replace(probe.FAULT, shared_bytes=64),))
    with pytest.raises(BuildError, match="shared_bytes is not sizeof"):
        build.build(("probe",))


def test_kernel_with_locals_beyond_a_fibers_stack_does_not_compile(cache: Path, sources: Path) -> None:
    (sources / "probe" / "fault.cu").write_text(
        '#include "../prelude.cuh"\n'
        "FN_KERNEL((const u32* x, u32* y, u32 mode, u32 index)) {\n"
        "    volatile u32 local[10000];\n"
        "    for (u32 i = 0; i < 10000; i++) local[i] = x[i & 127];\n"
        "    y[threadIdx.x] = local[index];\n}\n"
    )
    with pytest.raises(BuildError, match="frame size of 400.. bytes|stack frame size"):
        build.build(("probe",))


def test_broken_kernel_fails_the_build_or_is_left_out(
    cache: Path, sources: Path, commands: list[str]
) -> None:
    (sources / "probe" / "fault.cu").write_text("FN_KERNEL((u32* x)) { not C++ }\n")
    with pytest.raises(BuildError, match=r"probe/fault\.cu does not compile: .*error"):
        build.build(("probe",))
    commands.clear()
    assert build.build(("probe",), partial=True).is_file()
    assert commands[-1] == "library"


def test_source_edited_during_its_compilation_is_not_kept(
    cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = sources / "probe" / "fault.cu"
    kernel.write_text(kernel.read_text() + "\n// one\n")
    run = build._run

    def edited(command: Sequence[str], what: str) -> None:
        run(command, what)
        if what == "probe/fault.cu":
            kernel.write_text(kernel.read_text() + "\n// two\n")

    monkeypatch.setattr(build, "_run", edited)
    with pytest.raises(BuildError, match="changed while it was compiled"):
        build.build(("probe",))


def test_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    build.find_compiler.cache_clear()
    try:
        with pytest.raises(
            BuildError, match=r"no C\+\+ compiler was found .*; install g\+\+ .*flashnext_drv\[sim\]"
        ):
            build.find_compiler()
    finally:
        build.find_compiler.cache_clear()


def test_ziglang_wheel_is_taken_when_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(build, "find_spec", lambda name: object())
    monkeypatch.setattr(build, "_version", lambda command: "0.15.1" if "ziglang" in command else None)
    build.find_compiler.cache_clear()
    try:
        found = build.find_compiler()
    finally:
        build.find_compiler.cache_clear()
    assert found.command == (sys.executable, "-m", "ziglang", "c++") and found.version == "zig 0.15.1"


def child(code: str, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", code],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.strip()


def test_two_processes_that_build_at_once_agree(cache: Path) -> None:
    code = "from flashnext_drv.sim import build; print(build.build(('probe',)))"
    both = [child(code) for _ in range(2)]
    paths = {finished(process) for process in both}
    assert len(paths) == 1 and Path(paths.pop()).is_file()
    assert not [p for p in cache.glob("sim-*/*") if p.name != "libcuda.so.1"], "scratch was left behind"


def test_real_driver_in_the_process_keeps_the_simulator_out(tmp_path: Path) -> None:
    source, fake = tmp_path / "fake.cpp", tmp_path / "libcuda.so.1"
    source.write_text("int nothing;\n")
    subprocess.run(
        [*build.find_compiler().command, "-shared", "-fPIC", "-o", str(fake), str(source)], check=True
    )
    code = (
        f"import ctypes; ctypes.CDLL({str(fake)!r})\n"
        "from flashnext_drv.sim import load\n"
        "from flashnext_drv.errors import UsageError\n"
        "try: load.load(families=('probe',))\n"
        "except UsageError as error: print(error)\n"
    )
    said = finished(child(code))
    assert "a real driver is in this process" in said and "device cuda" in said


HASHES = """
import hashlib
from flashnext_drv.sim import build, load
path = build.build(('probe',), {how})
build.build = lambda *args, **kwargs: path
load.load()
from flashnext_drv.check import contract
from flashnext_drv.kernels import catalog
from flashnext_drv.sim import control
out = []
with contract.CheckDevice('sim', families=('probe',)) as device:
    for seed in {seeds}:
        control.set_seed(seed)
        for spec in catalog.specs('probe'):
            out += [contract.run_case(device, spec.name, case).sha256 for case in spec.cases
                    if spec.name in {kernels}]
print(hashlib.sha256(''.join(out).encode()).hexdigest())
"""


def hashes(how: str, kernels: tuple[str, ...], seeds: tuple[int, ...] = (0,)) -> str:
    return finished(child(HASHES.format(how=how, kernels=kernels, seeds=seeds)))


def test_portable_fibers_give_the_same_bytes() -> None:
    kernels = ("warp_ops", "barrier_turns", "mma_tiles_f16")
    assert hashes("ucontext=True", kernels, (0, 3)) == hashes("", kernels, (0, 3))


@pytest.mark.slow
def test_build_without_cpu_extensions_gives_the_same_bytes() -> None:
    kernels = ("math_sweep", "math_f64", "warp_ops", "mma_tiles_f16", "mma_tiles_bf16")
    assert hashes("portable=True", kernels) == hashes("", kernels)


def test_unit_text_states_kinds_and_rights() -> None:
    text = build.unit_text("probe", probe.FAULT)
    assert '#define FN_SIM_KINDS "ppuu"' in text and '#define FN_SIM_RIGHTS "rw--"' in text
    assert text.index("#define FN_NAME fault") < text.index('#include "probe/fault.cu"')


def test_cache_follows_xdg_and_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_root() == tmp_path / "flashnext_drv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build.cache_root() == tmp_path / "home" / ".cache" / "flashnext_drv"


def test_old_libraries_are_dropped(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    for i in range(build._KEPT_LIBRARIES + 3):
        path = cache / f"sim-{i:032d}" / "libcuda.so.1"
        path.parent.mkdir()
        path.touch()
        os.utime(path, (1000 + i, 1000 + i))
        made.append(path)
    build._prune()
    assert [p.is_file() for p in made] == [False] * 3 + [True] * build._KEPT_LIBRARIES
