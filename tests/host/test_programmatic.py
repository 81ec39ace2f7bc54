"""Kernels that may start ahead of the launches before them: what they may do before they wait.

By text, so it sees what a kernel's body says and not what its helpers do; the simulator runs blocks ahead of
time by seed and sees bytes that are read too early.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashnext_drv.kernels import catalog
from flashnext_drv.kernels.spec import PTR, U64, Arg, KernelSpec
from flashnext_drv.model.layout import Layout, Limits
from flashnext_drv.model.pack import Pack
from flashnext_drv.model.steps import Step, ahead_steps, body_steps, draw_steps, edit_steps, head_steps

from .test_house import SOURCES, code_of

MICRO = Path(__file__).parents[1] / "data" / "exl3_micro" / "pack"
STEPS = Path(__file__).parents[2] / "flashnext_drv" / "model" / "steps.py"
SPECS = [spec for family in catalog.families() for spec in catalog.specs(family) if not spec.broken]
PROGRAMMATIC = [spec for spec in SPECS if spec.programmatic]
BY_NAME = {spec.name: spec for spec in SPECS}


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


# Their wait stands in a helper, behind the loads of the first weights: kernel -> (the helper's file, "" for
# its own, and how the last statement of the body begins, which hands over what is read behind the wait).
IN_HELPER = {"linear_gemv": ("", "LinearDot dot{"), "moe_gemv": ("moe/gemv_slot.cuh", "fn_slot_dot(")}
LEAVES = r"\{\s*fn_wait_prior\(\);\s*return;\s*\}"


def parts(spec: KernelSpec, text: str, helper: str = "") -> tuple[int, str, str]:
    """(waits of a thread that does not leave, what stands before them, what behind).  helper: instead of the
    text of the file that IN_HELPER names."""
    name = next((name for name in IN_HELPER if spec.name.startswith(name)), "")
    if not name:
        before, *behind = re.split(r"\bfn_wait_prior\(\)", body(text))
        return len(behind), before, behind[-1] if behind else ""
    file, handed_over = IN_HELPER[name]
    if file:
        text += helper or (SOURCES / file).read_text(encoding="utf-8")
    n_waits = len(re.findall(r"\bfn_wait_prior\(\)", re.sub(LEAVES, ";", code_of(text))))
    return n_waits, re.sub(LEAVES, ";", body(text)).partition(handed_over)[0], ""


def complaints(spec: KernelSpec, text: str, helper: str = "") -> list[str]:
    """What a programmatic kernel's source does wrong."""
    said = []
    n_waits, before, behind = parts(spec, text, helper)
    for given in arguments("fn_prefetch_l2", before):  # reads nothing: brings to L2 what is current there
        before = before.replace(f"fn_prefetch_l2({given})", "")
    if n_waits != 1:
        return [f"fn_wait_prior is called at {n_waits} places, not at one"]
    setup = r"\s*(using namespace FN_NAMESPACE;\s*|using namespace fn_unit;\s*|FN_SHARED\([^;]*\);\s*"
    setup += r"|static_assert\([^;]*\);\s*)*"
    if spec.fence:
        if "fn_let_next" in before or not re.match(r";\s*fn_let_next\(\);", behind):
            said.append("it is a fence, and fn_let_next() does not follow its wait")
    elif not re.match(setup + r"fn_let_next\(\);", before):
        said.append("fn_let_next() is not its first statement")
    if re.search(r"\breturn\b", before):
        said.append("it may return without waiting")
    if "fn_ldg(" in before:
        said.append("fn_ldg before the wait may be moved behind it, to the value's first use")
    for arg in spec.args:
        if arg.kind != PTR or arg.name in (*spec.constants, *spec.settled):
            continue
        if re.search(rf"(?<!\.)\b{arg.name}\b", before):
            said.append(f"{arg.name}, no constant, is used before the wait")
        if any(re.search(rf"(?<!\.)\b{arg.name}\b", given) for given in arguments("fn_ldg", behind)):
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


def spec_of(step: Step) -> KernelSpec:
    return BY_NAME[step.kernel.replace("*", "8")]


def in_state(arg: Arg) -> bool:
    """Whether an argument says where in a slot's state something lies."""
    return arg.kind == U64 and arg.doc.startswith("bytes from slot.recurrent")


def not_settled(walk: list[Step]) -> tuple[list[str], int]:
    """What kernels of a path read ahead of their wait that a launch may still be writing; how many read so.

    The path's first launch waits for all before it: it is a fence too, for what its own walk does not write.
    """
    said, read = [], 0
    for i, step in enumerate(walk):
        spec = spec_of(step)
        args = {"round": "round", **step.args}
        places = {(args[arg.name], arg.kind) for arg in spec.args if arg.name in spec.settled}
        assert all(in_state(arg) for arg in spec.args if arg.name in spec.settled and arg.kind != PTR)
        read += bool(places)
        since = max((j for j in range(i) if j == 0 or spec_of(walk[j]).fence), default=0)
        for j, other in enumerate(walk):
            args = {"round": "round", **other.args}
            written = {(args[arg.name], PTR) for arg in spec_of(other).args
                       if arg.kind == PTR and "w" in arg.rights}
            if since <= j < i and places & written:
                said.append(f"{spec.name} reads early what {other.kernel} of {other.scope} wrote")
            # Of the state of a slot: whoever is given the place may write it.
            states = {(args[arg.name], U64) for arg in spec_of(other).args if in_state(arg)}
            if j != i and places & states:
                said.append(f"{spec.name} reads a state early that {other.kernel} of {other.scope} has too")
    return said, read


@pytest.mark.parametrize("limits", [Limits(context_tokens=100), Limits(context_tokens=100, expert_lines=4)],
                         ids=["resident", "offloaded"])
def test_what_is_settled_was_written_before_a_fence(limits: Limits) -> None:
    """Between a launch that reads ahead of its wait what other launches write, and the last of those, stands
    a fence; of a slot's state no other launch of the path has the place."""
    layout = Layout(Pack.open(MICRO).config, limits)
    body = list(body_steps(layout, True, dict.fromkeys(layout.config.ple_layers, 8)))
    head, ahead = list(head_steps(layout)), list(ahead_steps(layout))
    plain = list(draw_steps(layout))
    edited = [*edit_steps(layout, restore=False), *plain, *edit_steps(layout, restore=True)]
    for draws in (plain, edited):
        for walk in (head + draws, head + draws + ahead):
            assert not not_settled(walk)[0]
    said, read = not_settled(body)
    assert not said and read >= 4
    # The rows of the next token are no part of a path that reads them: its first launch follows.
    assert any("what advance_rows" in one for one in not_settled(ahead + body)[0])
    last = max(i for i, step in enumerate(body) if step.kernel == "gdn_step")
    assert any("state early that gdn_step" in one for one in not_settled([*body, body[last]])[0])


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


@pytest.mark.parametrize("name", ["linear_gemv_n8", "moe_gemv_gu", "moe_gemv_down"])
def test_the_rule_sees_waits_of_helpers(name: str) -> None:
    spec, wait = BY_NAME[name], r"\bfn_wait_prior\(\);"
    kernel = (SOURCES / spec.source).read_text(encoding="utf-8")
    slots = (SOURCES / "moe/gemv_slot.cuh").read_text(encoding="utf-8")
    assert not complaints(spec, kernel, slots)
    without = [re.sub(wait, ";", text, count=1) for text in (kernel, slots)]  # the first one of each file
    if name == "linear_gemv_n8":
        assert "at 0 places" in complaints(spec, without[0])[0]
    else:
        assert "at 0 places" in complaints(spec, kernel, without[1])[0]
        assert any("return without" in one for one in complaints(spec, without[0], slots))


def test_constants_are_pointers_that_are_only_read() -> None:
    args = (Arg("x", PTR, "", "r"), Arg("y", PTR, "", "w"))
    with pytest.raises(ValueError, match="only reads"):
        KernelSpec(name="k", source="", order="", grid="1", block=32, programmatic=True, constants=("y",),
                   args=args)
    with pytest.raises(ValueError, match="only reads"):
        KernelSpec(name="k", source="", order="", grid="1", block=32, constants=("x",), args=args)
