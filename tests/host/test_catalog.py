"""Declarations, the choice of an image for a GPU, and the mirrored device tables."""

from __future__ import annotations

import hashlib
import importlib
import re
from pathlib import Path

import numpy as np
import pytest

from flashnext_drv.errors import BuildError
from flashnext_drv.kernels import catalog, tables
from flashnext_drv.kernels.spec import F32, PTR, U32, U64, Arg, KernelSpec

ROOT = Path(__file__).resolve().parents[2]
STRUCTS = {"FnRound": tables.ROUND, "FnRow": tables.ROW, "FnRun": tables.RUN, "FnSlot": tables.SLOT,
           "FnPage": tables.PAGE, "FnWeight": tables.WEIGHT, "FnLinear": tables.LINEAR, "FnLine": tables.LINE,
           "FnRoute": tables.ROUTE, "FnTile": tables.TILE, "FnHome": tables.HOME, "FnUse": tables.USE,
           "FnCache": tables.CACHE, "FnFill": tables.FILL, "FnAhead": tables.AHEAD, "FnDrawn": tables.DRAWN,
           "FnEdits": tables.EDITS, "FnEdit": tables.EDIT}
C_TYPES = {"u32": "<u4", "u64": "<u8", "float": "<f4", "FnWeight": tables.WEIGHT}


@pytest.mark.parametrize(("cc", "built", "arch"), [
    ((9, 0), catalog.ARCHS, "sm_90a"), ((8, 0), catalog.ARCHS, "sm_80"), ((8, 6), catalog.ARCHS, "sm_86"),
    ((8, 7), catalog.ARCHS, "sm_86"), ((8, 9), ("sm_80",), "sm_80"), ((12, 0), catalog.ARCHS, "sm_120"),
    ((12, 1), ("sm_120",), "sm_120"), ((12, 1), catalog.ARCHS, "sm_121")])
def test_the_image_for_a_gpu(cc: tuple[int, int], built: tuple[str, ...], arch: str) -> None:
    assert catalog.pick_arch(cc, built) == arch


@pytest.mark.parametrize(("cc", "built"),
                         [((7, 5), catalog.ARCHS), ((10, 0), catalog.ARCHS), ((9, 0), ("sm_80",)),
                                           ((8, 0), ("sm_86", "sm_89")), ((12, 0), ("sm_121",)),
                          ((9, 0), ())])
def test_a_gpu_without_image_is_named_with_what_to_build(cc: tuple[int, int], built: tuple[str, ...]) -> None:
    with pytest.raises(BuildError) as caught:
        catalog.pick_arch(cc, built, gpu="GPU 0 Example")
    text = str(caught.value)
    assert "GPU 0 Example" in text and f"{cc[0]}.{cc[1]}" in text
    assert f"FLASHNEXT_ARCHS=sm_{cc[0]}{cc[1]}{'a' if cc == (9, 0) else ''}" in text


def test_every_declaration_is_whole() -> None:
    names = [spec.name for spec in catalog.specs()]
    assert len(set(names)) == len(names) > 10
    for spec in catalog.specs():
        assert (catalog.source_root() / spec.source).is_file()
        assert set(spec.limits) <= set(catalog.ARCHS)
        assert catalog.spec(spec.name) is spec
        if spec in catalog.specs("probe"):      # planted faults have neither case nor reference
            continue
        assert spec.cases, f"{spec.name} has no case"
        assert len({case.name for case in spec.cases}) == len(spec.cases), f"{spec.name} names a case twice"
        assert spec.reference and spec.bound, f"{spec.name} names no reference or no bound"


def test_every_kernel_file_is_declared() -> None:
    root = catalog.source_root()
    declared = {spec.source for spec in catalog.specs()}
    there = {path.relative_to(root).as_posix() for path in root.rglob("*.cu")}
    there = {path for path in there if not path.startswith(("sim/", "retired/"))}
    assert there == declared


def test_a_name_declared_twice_and_a_missing_source_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashnext_drv.kernels import glue
    spec = glue.KERNELS[0]
    bare = KernelSpec(name="ghost", source="glue/ghost.cu", order="", args=spec.args, grid="", block=64)
    for declared, text in (((spec, spec), "declared twice"), ((bare,), "declared without source")):
        monkeypatch.setattr(glue, "KERNELS", declared)
        catalog.specs.cache_clear()
        try:
            with pytest.raises(BuildError, match=text):
                catalog.specs("glue")
        finally:
            monkeypatch.undo()
            catalog.specs.cache_clear()
    with pytest.raises(BuildError, match="no kernel family 'nothing'"):
        catalog.specs("nothing")


def test_the_digest_follows_sources_and_declarations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import shutil
    shutil.copytree(catalog.source_root(), tmp_path / "cuda_src")
    before = catalog.source_digest("glue")
    monkeypatch.setattr(catalog, "source_root", lambda: tmp_path / "cuda_src")
    digest = catalog.source_digest.__wrapped__
    assert digest("glue") == before
    source = tmp_path / "cuda_src" / catalog.specs("glue")[0].source
    source.write_text(source.read_text() + "\n")
    changed = digest("glue")
    assert changed != before and digest("moe") == catalog.source_digest("moe")
    (tmp_path / "cuda_src" / "prelude.cuh").write_text("// other")
    assert digest("glue") not in (before, changed) and digest("moe") != catalog.source_digest("moe")


def test_parameter_offsets_follow_natural_alignment() -> None:
    args = (Arg("a", U32, ""), Arg("p", PTR, "", "r"), Arg("f", F32, ""), Arg("q", U64, ""))
    spec = KernelSpec(name="k", source="k.cu", order="", args=args, grid="", block=32)
    assert spec.offsets() == ((0, 4), (8, 8), (16, 4), (24, 8))


@pytest.mark.parametrize("name", STRUCTS)
def test_device_tables_have_the_layout_of_the_structs(name: str) -> None:
    text = "".join((ROOT / "cuda_src" / path).read_text(encoding="utf-8")
                   for path in ("tables.cuh", "token/ahead.cuh", "token/edits.cuh"))
    text = re.sub(r"//[^\n]*", "", text)
    body = re.search(rf"struct {name} \{{(.*?)\}};", text, re.DOTALL)
    assert body is not None
    fields, at = {}, 0
    for line in filter(None, (part.strip() for part in body[1].split(";"))):
        kind, names = line.split(None, 1)
        dtype = np.dtype(C_TYPES[kind])
        parts = [dtype[i] for i in range(len(dtype))] if dtype.names else [dtype]
        align = max(part.itemsize for part in parts)
        for field, _, count in (n.strip().partition("[") for n in names.split(",")):
            at = (at + align - 1) // align * align
            whole = np.dtype((dtype, (int(count.rstrip("]")),))) if count else dtype
            fields[field] = (at, whole)
            at += whole.itemsize
    mirrored = {field: (entry[1], entry[0]) for field, entry in (STRUCTS[name].fields or {}).items()}
    assert mirrored == fields
    size = re.search(rf"sizeof\({name}\) == (\d+)", text)
    assert size is not None and int(size[1]) == STRUCTS[name].itemsize


def test_qualified_generations_have_a_receipt() -> None:
    receipts = {p.stem for p in (ROOT / "tests" / "receipts").glob("*.json")}
    for generation in catalog.QUALIFIED:
        assert any(generation in name for name in receipts), f"{generation} is qualified without a receipt"


def test_an_image_that_is_not_the_manifests_is_refused(tmp_path: Path) -> None:
    data = b"\x7fELF and so on"
    image = catalog.Image("glue", "sm_90a", "glue.cubin", hashlib.sha256(data).hexdigest(), len(data), "", {})
    with pytest.raises(BuildError, match=r"glue\.cubin cannot be read"):
        image.read(tmp_path)
    (tmp_path / "glue.cubin").write_bytes(data)
    assert image.read(tmp_path) == data
    (tmp_path / "glue.cubin").write_bytes(data[:-1] + b"!")
    with pytest.raises(BuildError, match=r"glue\.cubin is not the one in manifest\.json"):
        image.read(tmp_path)


@pytest.mark.parametrize(("kind", "rights", "text"), [
    ("u16", "", "unknown kind 'u16'"), (PTR, "", "do not fit"), (PTR, "x", "do not fit"),
    (U32, "r", "do not fit")])
def test_an_argument_of_no_kind_or_odd_rights_is_refused(kind: str, rights: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Arg("v", kind, "", rights)


@pytest.mark.parametrize("spec", [s for s in catalog.specs() if s.reference], ids=lambda s: s.name)
def test_reference_of_a_declaration_exists(spec: KernelSpec) -> None:
    """"<module>.<name>[.<name>]" below flashnext_drv.ref, or a module or name below flashnext_drv.check."""
    words = spec.reference.split(".")
    below, words = ("check", words[1:]) if words[0] == "check" else ("ref", words)
    found = importlib.import_module(f"flashnext_drv.{below}.{words[0]}")
    for word in words[1:]:
        found = getattr(found, word)
