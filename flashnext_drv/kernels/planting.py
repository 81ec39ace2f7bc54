"""Planted controls as text: the sources with a control's edits made.

Read by build_kernels.py (stdlib only), which compiles them to cubins, and by check/controls.py, which has
them linked into the simulator and runs them.  What must stay true: a control is the text that lies here now,
changed by its edits alone; its digest covers everything that decides its bytes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from ..errors import BuildError
from . import catalog
from .spec import Control, Edit, KernelSpec

__all__ = ["control_digest", "control_image", "control_root", "controls", "plant", "planted", "planted_unit"]

_HELPER: Final = "delay.cuh"
# A missing barrier must not find in shared memory what the launch before left there.
_POISON: Final = tuple(
    Edit("prelude.cuh", f"    {line}\n", f"    {line}; fn_poison_shared(&name, sizeof(Type))\n")
    for line in (
        "__shared__ __align__(16) Type name",
        "Type& name = *reinterpret_cast<Type*>(fn_dynamic_shared)",
    )
)


def controls() -> Iterator[tuple[KernelSpec, Control]]:
    """Every declared control with its kernel."""
    for spec in catalog.specs():
        for control in spec.controls:
            yield spec, control


def control_image(spec: KernelSpec, control: Control) -> str:
    """What the image of a control is called: a family of its own."""
    return f"control.{spec.name}.{control.name}"


def control_root() -> Path:
    """The folder of the controls' cubins and their manifest.json; it may not exist yet, and is never
    shipped."""
    return catalog.cubin_root() / "controls"


def planted(spec: KernelSpec, control: Control) -> KernelSpec:
    """The declaration of a control's kernel: the kernel's, under a name of its own."""
    return replace(spec, name=f"{spec.name}__{control.name}")


def control_digest(spec: KernelSpec, control: Control) -> str:
    """SHA-256, hex, over the edited sources that the kernel reaches, its macros and its parameters.

    Raises BuildError when an edit's old text does not stand exactly once in its file.
    """
    root = catalog.source_root()
    texts = _edited(spec, control)
    digest = hashlib.sha256(
        json.dumps(
            [control_image(spec, control), spec.all_macros(), [arg.kind for arg in spec.args]]
        ).encode()
    )
    for path in (*catalog.reached(spec.source), _HELPER):
        text = texts[path] if path in texts else (root / path).read_text(encoding="utf-8")
        digest.update(f"{path}\0{hashlib.sha256(text.encode()).hexdigest()}\0".encode())
    return digest.hexdigest()


def plant(spec: KernelSpec, control: Control, folder: Path) -> None:
    """Write a whole copy of the sources into `folder`, the control's edits made.

    Raises BuildError as `control_digest`.
    """
    texts = _edited(spec, control)
    shutil.copytree(catalog.source_root(), folder, ignore=shutil.ignore_patterns("__pycache__", "retired"))
    for path, text in texts.items():
        (folder / path).write_text(text, encoding="utf-8")


def planted_unit(spec: KernelSpec, control: Control, arch: str) -> str:
    """The unit that compiles a control alone for a GPU: its macros and its file."""
    lines = [f"#define {name} {value}".rstrip() for name, value in planted(spec, control).macros(arch)]
    return "\n".join([*lines, f'#include "{spec.source}"']) + "\n"


def _edited(spec: KernelSpec, control: Control) -> dict[str, str]:
    """path -> text of every file that differs from what lies in the source folder."""
    root = catalog.source_root()
    reached = catalog.reached(spec.source)
    texts = {spec.source: (root / spec.source).read_text(encoding="utf-8")}
    for edit in (*control.edits, *(_POISON if control.kind == "barrier" else ())):
        if edit.file not in reached:
            raise BuildError(
                f"control {control.name} of kernel {spec.name} edits {edit.file}",
                because="the kernel does not include it",
            )
        if edit.file not in texts:
            texts[edit.file] = (root / edit.file).read_text(encoding="utf-8")
        found = texts[edit.file].count(edit.old)
        if found != 1:
            raise BuildError(
                f"control {control.name} of kernel {spec.name} does not fit its source",
                because=f"its text stands {found} times in {edit.file}: {edit.old!r}",
                do="change the edit with the kernel",
            )
        texts[edit.file] = texts[edit.file].replace(edit.old, edit.new)
    texts[spec.source] = f'#include "{_HELPER}"\n' + texts[spec.source]
    return texts
