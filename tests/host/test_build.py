"""The kernel build: units, keys, cubin reader, manifest, what the wheel holds.

Tests that compile need the extra [build]; without NVRTC they are skipped by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import build_kernels
from flashnext_drv.errors import BuildError
from flashnext_drv.kernels import catalog
from flashnext_drv.kernels.cubin import read_cubin, spills

ROOT = Path(build_kernels.__file__).resolve().parent
needs_nvrtc = pytest.mark.skipif(build_kernels._cuda_root() is None,
                                 reason="needs NVRTC: pip install .[build]")


@pytest.fixture
def small_tree(tmp_path: Path) -> Path:
    """A copy of the tree with one family of two kernels, cheap to compile."""
    tree = tmp_path / "tree"
    (tree / "flashnext_drv" / "kernels").mkdir(parents=True)
    for name in ("build_kernels.py", "pyproject.toml", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree / name)
    (tree / "README.md").write_text("# small\n")
    for name in ("__init__.py", "errors.py", "kernels/__init__.py", "kernels/spec.py", "kernels/catalog.py",
                 "kernels/cubin.py", "kernels/planting.py"):
        shutil.copy(ROOT / "flashnext_drv" / name, tree / "flashnext_drv" / name)
    shutil.copytree(ROOT / "cuda_src", tree / "cuda_src",
                    ignore=lambda folder,
                    names: [n for n in names if Path(folder, n).is_dir() and n != "sim"])
    (tree / "cuda_src" / "glue").mkdir()
    (tree / "cuda_src" / "glue" / "twice.cu").write_text(
        '#include "prelude.cuh"\n'
        "namespace FN_NAMESPACE { struct Shared { float v[FN_THREADS]; }; }\n"
        "FN_KERNEL((const float* x, u32 n, float scale, float* y)) {\n"
        "    FN_SHARED(FN_NAMESPACE::Shared, s);\n"
        "    const u32 i = blockIdx.x * FN_THREADS + threadIdx.x;\n"
        "    s.v[threadIdx.x] = i < n ? x[i] : 0.0f;\n"
        "    __syncthreads();\n"
        "    if (i < n) y[i] = fn_mul(s.v[FN_THREADS - 1 - threadIdx.x], scale) + FN_PLUS;\n"
        "}\n")
    (tree / "flashnext_drv" / "kernels" / "glue.py").write_text(
        "from .spec import F32, PTR, U32, Arg, KernelSpec, Limit\n"
        "ARGS = (Arg('x', PTR, '', 'r'), Arg('n', U32, ''), Arg('scale', F32, ''), Arg('y', PTR, '', 'w'))\n"
        "KERNELS = tuple(KernelSpec(name=f'twice_{n}', source='glue/twice.cu', order='', args=ARGS,\n"
        "                           grid='', block=n,\n"
        "                           shared_bytes=4 * n, defines=(('FN_PLUS', '1.0f'),),\n"
        "                           limits={'sm_90a': Limit(regs=40)}) for n in (64, 128))\n")
    return tree


def run_build(tree: Path, *args: str, cache: Path | None = None,
              **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "build_kernels.py", "--jobs", "1", *args], cwd=tree, text=True,
                          capture_output=True, check=False,
                          env={**os.environ, "XDG_CACHE_HOME": str(cache or tree / "cache"), **env})


def cubins(tree: Path) -> dict[str, str]:
    folder = tree / "flashnext_drv" / "_cubin"
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("*.cubin"))}


@needs_nvrtc
def test_two_builds_give_the_same_bytes(small_tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "another" / "deeper"
    shutil.copytree(small_tree, other)
    for tree in (small_tree, other):
        done = run_build(tree, "--archs", "sm_80,sm_90a", "--force")
        assert done.returncode == 0, done.stderr
    assert cubins(small_tree) == cubins(other) and len(cubins(small_tree)) == 2
    assert (small_tree / "flashnext_drv/_cubin/manifest.json").read_bytes() \
        == (other / "flashnext_drv/_cubin/manifest.json").read_bytes()


@needs_nvrtc
def test_manifest_holds_what_the_image_says(small_tree: Path) -> None:
    assert run_build(small_tree, "--archs", "sm_90a").returncode == 0
    found = catalog.read_manifest(small_tree / "flashnext_drv/_cubin/manifest.json")
    assert found.archs() == ("sm_90a",) and found.tool["nvidia-cuda-nvrtc"] == "13.0.88"
    assert "--fmad=false" in found.options
    image = found.image("glue", "sm_90a")
    assert image.read(small_tree / "flashnext_drv/_cubin")[:4] == b"\x7fELF"
    for n in (64, 128):
        kernel = image.kernels[f"twice_{n}"]
        assert (kernel.shared_bytes, kernel.max_threads, kernel.spill_store_bytes) == (4 * n, n, 0)
        assert kernel.params == ((0, 8), (8, 4), (12, 4), (16, 8)) and 0 < kernel.regs <= 40
        assert kernel.barriers == 1


@needs_nvrtc
def test_only_what_changed_is_compiled_again(small_tree: Path) -> None:
    assert "1 images compiled, 0 cached" in run_build(small_tree, "--archs", "sm_90a").stderr
    assert "0 images compiled, 1 cached" in run_build(small_tree, "--archs", "sm_90a").stderr
    before = cubins(small_tree)
    source = small_tree / "cuda_src/glue/twice.cu"
    source.write_text(source.read_text().replace("fn_mul(", "fn_add("))
    assert "1 images compiled" in run_build(small_tree, "--archs", "sm_90a").stderr
    assert cubins(small_tree).keys() != before.keys() and len(cubins(small_tree)) == 1
    header = small_tree / "cuda_src/prelude.cuh"
    header.write_text(header.read_text() + "// touched\n")
    assert "1 images compiled" in run_build(small_tree, "--archs", "sm_90a").stderr
    declared = small_tree / "flashnext_drv/kernels/glue.py"
    declared.write_text(declared.read_text().replace("1.0f", "2.0f"))
    assert "1 images compiled" in run_build(small_tree, "--archs", "sm_90a").stderr


@needs_nvrtc
def test_a_fresh_clone_takes_images_from_the_users_cache(small_tree: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert run_build(small_tree, "--archs", "sm_90a", cache=cache).returncode == 0
    made = cubins(small_tree)
    shutil.rmtree(small_tree / "flashnext_drv/_cubin")
    assert "0 images compiled, 1 cached" in run_build(small_tree, "--archs", "sm_90a", cache=cache).stderr
    assert cubins(small_tree) == made
    shutil.rmtree(small_tree / "flashnext_drv/_cubin")
    for path in cache.rglob("*.cubin"):         # a damaged cache entry is not used
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert "1 images compiled, 0 cached" in run_build(small_tree, "--archs", "sm_90a", cache=cache).stderr
    assert cubins(small_tree) == made


@needs_nvrtc
@pytest.mark.parametrize(("old", "new", "text"), [
    ("F32, PTR", "F32, PTR", ""),
    ("Arg('n', U32, '')", "Arg('n', PTR, '', 'r')", "params: built"),
    ("shared_bytes=4 * n", "shared_bytes=4 * n + 4", "shared_bytes is not sizeof"),
    ("name=f'twice_{n}'", "name=f'a b_{n}'", "does not compile")])
def test_a_kernel_that_differs_from_its_declaration_stops_the_build(small_tree: Path, old: str, new: str,
                                                                   text: str) -> None:
    declared = small_tree / "flashnext_drv/kernels/glue.py"
    assert old in declared.read_text()
    declared.write_text(declared.read_text().replace(old, new))
    done = run_build(small_tree, "--archs", "sm_90a")
    assert (done.returncode == 0) == (not text) and text in done.stderr


@needs_nvrtc
def test_strict_fails_on_registers_over_the_limit(small_tree: Path) -> None:
    declared = small_tree / "flashnext_drv/kernels/glue.py"
    declared.write_text(declared.read_text().replace("regs=40", "regs=2"))
    done = run_build(small_tree, "--archs", "sm_90a", "--strict")
    assert done.returncode == 1 and "twice_64 on sm_90a" in done.stderr and "limit 2" in done.stderr
    assert run_build(small_tree, "--archs", "sm_90a").returncode == 0


@needs_nvrtc
def test_the_variable_narrows_and_refuses_unknown_architectures(small_tree: Path) -> None:
    assert run_build(small_tree, FLASHNEXT_ARCHS="sm_86").returncode == 0
    assert {name.split("-")[1] for name in cubins(small_tree)} == {"sm_86"}
    done = run_build(small_tree, FLASHNEXT_ARCHS="sm_13")
    assert done.returncode == 3 and "sm_13" in done.stderr and "sm_90a" in done.stderr


@needs_nvrtc
def test_a_wheel_holds_images_and_sources_and_no_compiler(small_tree: Path, tmp_path: Path) -> None:
    code = "import build_kernels, sys; print(build_kernels.build_wheel(sys.argv[1]))"
    wheels = []
    for i in range(2):
        out = tmp_path / f"out{i}"
        done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=small_tree, text=True,
                              capture_output=True,
                              check=False, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"),
                                                "FLASHNEXT_ARCHS": "sm_90a"})
        assert done.returncode == 0, done.stderr[-2000:]
        wheels.append(out / done.stdout.split()[-1])
    names = zipfile.ZipFile(wheels[0]).namelist()
    cubin = [n for n in names if n.endswith(".cubin")]
    assert len(cubin) == 1 and cubin[0].startswith("flashnext_drv/_cubin/glue-sm_90a-")
    for wanted in ("flashnext_drv/_cubin/manifest.json", "flashnext_drv/_cuda_src/glue/twice.cu",
                   "flashnext_drv/_cuda_src/prelude.cuh", "flashnext_drv/_cuda_src/sim/shim.h",
                   "flashnext_drv/kernels/glue.py"):
        assert wanted in names, wanted
    for name in names:
        assert not name.endswith((".so", ".so.1", ".o", ".ptx",
                                  ".lock")) and "nvrtc" not in name and "/tests/" not in name
        assert name.startswith(("flashnext_drv/", "flashnext_drv-")), name
    meta = zipfile.ZipFile(wheels[0]).read(next(n for n in names if n.endswith("METADATA"))).decode()
    needs = [line for line in meta.splitlines() if line.startswith("Requires-Dist") and "extra" not in line]
    assert len(needs) == 3 and not any("nvrtc" in line for line in needs), needs
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    assert not (small_tree / "flashnext_drv/_cuda_src").exists()


def test_the_build_needs_nvrtc_only_for_what_is_not_cached(small_tree: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    code = ("import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
            "import build_kernels; sys.exit(build_kernels.main(['--archs', 'sm_90a']))")
    done = subprocess.run([sys.executable, "-c", code], cwd=small_tree, text=True, capture_output=True,
                          check=False,
                          env={**os.environ, "XDG_CACHE_HOME": str(small_tree / "cache"), "PYTHONPATH": ""})
    assert done.returncode == 3 and "pip install nvidia-cuda-nvrtc==13.0.88" in done.stderr


def test_units_carry_every_macro_and_undo_it() -> None:
    for family in catalog.families():
        for arch in ("sm_80", "sm_90a"):
            text = build_kernels.unit_text(family, arch)
            for spec in catalog.specs(family):
                assert f"#define FN_NAME {spec.name}\n" in text and f'#include "{spec.source}"\n' in text
                assert f"#define FN_SHARED_BYTES {spec.shared_on(arch)}\n" in text
            assert text.count("#define ") == text.count("#undef ")


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"MZ" + bytes(100), b"\x7fELF\x02\x01" + bytes(58)])
def test_what_is_no_cubin_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no cubin"):
        read_cubin(data)


@needs_nvrtc
def test_a_cubin_whose_instructions_end_behind_the_file_is_refused(small_tree: Path) -> None:
    assert run_build(small_tree, "--archs", "sm_90a").returncode == 0
    path = next((small_tree / "flashnext_drv/_cubin").glob("*.cubin"))
    data = bytearray(path.read_bytes())
    assert set(read_cubin(bytes(data))[1]) == {"twice_64", "twice_128"}
    table = struct.unpack_from("<Q", data, 40)[0]
    entry, count, names_index = struct.unpack_from("<HHH", data, 58)
    names = struct.unpack_from("<Q", data, table + names_index * entry + 24)[0]
    for at in range(table, table + count * entry, entry):
        name = names + struct.unpack_from("<I", data, at)[0]
        if data[name:].startswith(b".text."):
            offset = struct.unpack_from("<Q", data, at + 24)[0]
            struct.pack_into("<Q", data, at + 32, len(data) - offset)
            read_cubin(bytes(data))
            struct.pack_into("<Q", data, at + 32, len(data) - offset + 1)
            break
    with pytest.raises(ValueError, match="no cubin: the instructions of twice_.* end behind the file"):
        read_cubin(bytes(data))


def test_spills_come_from_the_log() -> None:
    log = ("ptxas info    : Compiling entry function 'a' for 'sm_90a'\n"
           "ptxas info    : Function properties for a\n"
           "    24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads\n"
           "ptxas info    : Compiling entry function 'b' for 'sm_90a'\n"
           "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n")
    assert spills(log) == {"a": (16, 20), "b": (0, 0)}


@pytest.mark.skipif(not (catalog.cubin_root() / "manifest.json").is_file(), reason="no images built")
def test_images_of_this_tree_are_those_of_the_manifest() -> None:
    found = catalog.read_manifest(catalog.cubin_root() / "manifest.json")
    for image in found.images:
        sm, kernels = read_cubin(image.read())
        assert f"sm_{sm}" == image.arch.rstrip("a")
        for name, record in image.kernels.items():
            assert (kernels[name].regs, kernels[name].shared_bytes, kernels[name].params) \
                == (record.regs, record.shared_bytes, record.params)


def test_a_broken_manifest_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    with pytest.raises(BuildError, match="no kernel images were built"):
        catalog.read_manifest(path)
    for text in ("", "{}", json.dumps({"format": 99}), '{"format": 1, "images": 3}'):
        path.write_text(text)
        with pytest.raises(BuildError, match=r"manifest\.json"):
            catalog.read_manifest(path)
