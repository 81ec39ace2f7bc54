"""Which image a GPU gets, and which images are refused: on made-up GPUs, before the driver sees anything."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest

from flashnext_drv.drv.context import Context
from flashnext_drv.errors import BuildError, ContractError
from flashnext_drv.kernels import bind, catalog
from flashnext_drv.kernels.bind import Kernels
from flashnext_drv.kernels.catalog import Image, KernelRecord, Manifest

IMAGE = b"\x7fELF not loaded by any test here"


def records() -> dict[str, KernelRecord]:
    return {spec.name: KernelRecord(32, spec.static_on("sm_80"), 0, 0, 0, spec.block, 0, spec.offsets())
            for spec in catalog.specs("glue")}


def use(monkeypatch: pytest.MonkeyPatch, ctx: Context, cc: tuple[int, int], root: Path,
        **change: object) -> None:
    """Make `ctx` look like a GPU of `cc` with images of glue for sm_80 and sm_90a; `change`: fields of the
    images."""
    (root / "glue.cubin").write_bytes(IMAGE)
    fields = {"sha256": hashlib.sha256(IMAGE).hexdigest(), "source_digest": catalog.image_digest("glue"),
              "kernels": records(), **change}
    images = tuple(Image(family="glue", arch=arch, file="glue.cubin", size_bytes=len(IMAGE), **fields)
                   for arch in ("sm_80", "sm_90a"))
    found = Manifest({}, (), "", "", images)
    monkeypatch.setattr(catalog, "manifest", lambda: found)
    monkeypatch.setattr(catalog, "cubin_root", lambda: root)
    monkeypatch.setattr(ctx, "facts",
                        dataclasses.replace(ctx.facts, is_simulator=False, cc=cc, name="Example GPU"))


def test_a_gpu_without_an_image_is_named_with_what_to_build(ctx: Context, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ctx, (12, 0), tmp_path)
    with pytest.raises(BuildError, match=r"Example GPU.*12\.0.*built: sm_80, sm_90a.*FLASHNEXT_ARCHS=sm_120"):
        Kernels(ctx, ("glue",))
    assert ctx.borrowers() == ()


@pytest.mark.parametrize(("cc", "arch"), [((9, 0), "sm_90a"), ((8, 6), "sm_80")])
def test_the_right_image_reaches_the_loader(ctx: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            cc: tuple[int, int], arch: str) -> None:
    use(monkeypatch, ctx, cc, tmp_path)
    assert bind._image(ctx, bind._arch(ctx), "glue") == (IMAGE, catalog.image_digest("glue"))
    assert bind._arch(ctx) == arch


@pytest.mark.parametrize(("change", "error", "text"), [
    ({"source_digest": "0" * 64}, BuildError, "is stale"),
    ({"sha256": "0" * 64}, BuildError, r"not the one in manifest\.json"),
    ({"kernels": {}}, ContractError, "is not in the image"),
    ({"kernels": {n: dataclasses.replace(r, params=r.params[:-1]) for n, r in records().items()}},
     ContractError,
     "takes other parameters"),
    ({"kernels": {n: dataclasses.replace(r, max_threads=32) for n, r in records().items()}}, ContractError,
     "built for another launch")])
def test_images_that_do_not_fit_are_refused(ctx: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            change: dict[str, object], error: type[Exception],
                                            text: str) -> None:
    use(monkeypatch, ctx, (9, 0), tmp_path, **change)
    with pytest.raises(error, match=text):
        Kernels(ctx, ("glue",))
    assert ctx.borrowers() == ()


def test_a_generation_without_a_receipt_says_so(ctx: Context, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    assert bind._warning(ctx) == "" or not ctx.facts.is_simulator
    use(monkeypatch, ctx, (12, 0), tmp_path)
    assert "Example GPU" in bind._warning(ctx) and "12.0" in bind._warning(ctx)
    monkeypatch.setattr(catalog, "QUALIFIED", frozenset({"12.0"}))
    assert bind._warning(ctx) == ""
