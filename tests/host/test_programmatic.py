"""Kernels that may start ahead of the launches before them: what they may do before they wait.

By text, so it sees what a kernel's body says and not what its helpers do; the simulator runs blocks ahead of
time by seed and sees bytes that are read too early.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashnext_drv.kernels import catalog
from flashnext_drv.kernels.spec import PTR, Arg, KernelSpec

from .test_house import SOURCES, code_of

STEPS = Path(__file__).parents[2] / "flashnext_drv" / "model" / "steps.py"
SPECS = [spec for family in catalog.families() for spec in catalog.specs(family) if not spec.broken]
PROGRAMMATIC = [spec for spec in SPECS if spec.programmatic]


def body(text: str) -> str:
    """Of the kernel in a source: behind its parameters."""
    _, found, rest = code_of(text).partition("FN_KERNEL((")
    assert found
    return rest.partition("{")[2]


def arguments(function: str, text: str) -> list[str]:
    """What stands between the parentheses of each call of `function`."""
    out = []
    for found in re.finditer(rf"\b{function}\(", text):
        depth, end = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        out.append(text[found.end():end - 1])
    return out


# Large launches: their successors' blocks, allowed too early, would take places among theirs.
LATE = ("linear_gemv", "moe_gemv")


def complaints(spec: KernelSpec, text: str) -> list[str]:
    """What a programmatic kernel's source does wrong."""
    said = []
    before, *behind = re.split(r"\bfn_wait_prior\(\)", body(text))
    if len(behind) != 1:
        return [f"fn_wait_prior is called at {len(behind)} places, not at one"]
    setup = r"\s*(using namespace FN_NAMESPACE;\s*|using namespace fn_unit;\s*|FN_SHARED\([^;]*\);\s*)*"
    late = spec.name.startswith(LATE)
    if late == bool(re.match(setup + r"fn_let_next\(\);", before)):
        said.append(f"fn_let_next() is {'' if late else 'not '}its first statement")
    if re.search(r"\breturn\b", before):
        said.append("it may return without waiting")
    if "fn_ldg(" in before:
        said.append("fn_ldg before the wait may be moved behind it, to the value's first use")
    for arg in spec.args:
        if arg.kind != PTR or arg.name in spec.constants:
            continue
        if re.search(rf"(?<!\.)\b{arg.name}\b", before):
            said.append(f"{arg.name}, no constant, is used before the wait")
        if any(re.search(rf"(?<!\.)\b{arg.name}\b", given) for given in arguments("fn_ldg", behind[0])):
            said.append(f"{arg.name}, no constant, is read by fn_ldg, which may be moved before the wait")
    return said


@pytest.mark.parametrize("spec", PROGRAMMATIC, ids=lambda spec: spec.name)
def test_nothing_is_read_before_the_wait(spec: KernelSpec) -> None:
    assert not complaints(spec, (SOURCES / spec.source).read_text(encoding="utf-8"))


def test_the_decode_walk_is_programmatic() -> None:
    steps = set(re.findall(r'Step\(\s*"(\w+)\*?"', STEPS.read_text(encoding="utf-8")))
    assert len(steps) > 20
    known = {spec.name for spec in PROGRAMMATIC}
    for name in steps:
        assert known >= ({f"{name}8", f"{name}16"} if name.endswith("_n") else {name}), name


def test_who_waits_is_declared() -> None:
    for spec in SPECS:
        waits = "fn_wait_prior()" in code_of((SOURCES / spec.source).read_text(encoding="utf-8"))
        assert waits == spec.programmatic, spec.name


GOOD = ("FN_KERNEL((const u32* x, const u32* w, u32* y)) { fn_let_next(); u32 a = fn_ld(w); fn_wait_prior(); "
        "y[0] = a + fn_ld(x); }")


@pytest.mark.parametrize(("old", "new", "words"), [
    ("fn_let_next(); ", "", "first statement"),
    ("fn_wait_prior(); ", "", "at 0 places"),
    ("fn_wait_prior();", "fn_wait_prior(); fn_wait_prior();", "at 2 places"),
    ("fn_wait_prior();", "if (a) return; fn_wait_prior();", "return without waiting"),
    ("fn_ld(w)", "fn_ldg(w)", "moved behind"),
    ("fn_ld(w)", "fn_ld(x)", "x, no constant, is used"),
    ("fn_ld(x)", "fn_ldg(reinterpret_cast<const u32*>(x))", "x, no constant, is read by fn_ldg"),
    ("fn_wait_prior()", "y[0] = 1; fn_wait_prior()", "y, no constant, is used"),
])
def test_the_rule_sees(old: str, new: str, words: str) -> None:
    spec = KernelSpec(name="k", source="k.cu", order="", grid="1", block=32, programmatic=True,
                      constants=("w",),
                      args=(Arg("x", PTR, "", "r"), Arg("w", PTR, "", "r"), Arg("y", PTR, "", "w")))
    assert not complaints(spec, GOOD)
    assert old in GOOD
    said = complaints(spec, GOOD.replace(old, new, 1))
    assert any(words in one for one in said), said


def test_constants_are_pointers_that_are_only_read() -> None:
    args = (Arg("x", PTR, "", "r"), Arg("y", PTR, "", "w"))
    with pytest.raises(ValueError, match="only reads"):
        KernelSpec(name="k", source="", order="", grid="1", block=32, programmatic=True, constants=("y",),
                   args=args)
    with pytest.raises(ValueError, match="only reads"):
        KernelSpec(name="k", source="", order="", grid="1", block=32, constants=("x",), args=args)
