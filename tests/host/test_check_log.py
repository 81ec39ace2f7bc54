"""The counting of a check's log, twice: by the package and by the audit, which shares no code with it."""

from __future__ import annotations

import ast
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashnext_drv.check import log
from flashnext_drv.errors import BuildError
from flashnext_drv.kernels import catalog, planting
from flashnext_drv.kernels.spec import CONTROL_KINDS, STAGES, Control, Edit

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("audit_check", ROOT / "tools" / "audit_check.py")
assert _spec is not None and _spec.loader is not None
audit_check: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(audit_check)


def stage(kernel: str, name: str, ok: bool = True) -> dict[str, Any]:
    return {
        "kind": "stage",
        "kernel": kernel,
        "case": "one",
        "stage": name,
        "ok": ok,
        "text": "why",
        "exempt": False,
    }


def control(kernel: str, name: str, red: bool, stage: str = "fp64") -> dict[str, Any]:
    return {
        "kind": "control",
        "kernel": kernel,
        "control": name,
        "red": red,
        "stage": stage if red else "",
        "case": "",
        "text": "",
    }


def good() -> list[dict[str, Any]]:
    records = [log.begin("here", "d", ["a", "b"], [("a", "x"), ("a", "w"), ("b", "y"), ("b", "z")])]
    records += [{**control("a", "w", False), "stage": "hopper"}]
    records += [stage(kernel, name) for kernel in ("a", "b") for name in STAGES]
    records += [control("a", "x", True), control("b", "y", True)]
    return [*records, {**control("b", "z", False), "stage": "racecheck"}]


def both(records: list[dict[str, Any]]) -> tuple[log.Counts, list[str], tuple[int, ...]]:
    counts = log.count(records)
    whole = [*records, {"kind": "end", "summary": log.summary_line(counts)}]
    complaints, counted = audit_check.audit([json.dumps(record) for record in whole])
    return counts, complaints, counted


def test_a_good_log() -> None:
    counts, complaints, counted = both(good())
    assert counts.good and complaints == [] and counted == (2, 2, 0, 2, 2, 0)
    assert counts.racecheck == ["b/z"] and counts.hopper == ["a/w"]
    assert log.summary_line(counts) == (
        "SUMMARY 2 kernels: 2 pass, 0 fail, 0 known; 2 controls: 2 red, 0 missed"
    )


@pytest.mark.parametrize(
    ("spoil", "counted"),
    [
        (lambda r: r.append(stage("a", "fp64", ok=False)), (2, 1, 1, 2, 2, 0)),
        (lambda r: r.remove(stage("b", "mates")), (2, 1, 1, 2, 2, 0)),
        (
            lambda r: r.append(
                {"kind": "accumulate", "kernel": "a", "how": "", "factor": 0.5, "ok": False, "text": ""}
            ),
            (2, 1, 1, 2, 2, 0),
        ),
        (lambda r: r.remove(control("b", "y", True)), (2, 2, 0, 2, 1, 1)),
        (lambda r: r.__setitem__(-2, control("b", "y", False)), (2, 2, 0, 2, 1, 1)),
    ],
)
def test_what_fails_or_lacks_is_counted_by_both(spoil: Any, counted: tuple[int, ...]) -> None:
    records = good()
    spoil(records)
    counts, complaints, found = both(records)
    assert not counts.good and complaints == [] and found == counted


def test_the_audit_refuses_another_summary_and_a_log_without_end() -> None:
    lines = [json.dumps(record) for record in good()]
    complaints, _ = audit_check.audit(lines)
    assert complaints == ["the log has no end: no result"]
    false = "SUMMARY 2 kernels: 2 pass, 0 fail, 0 known; 3 controls: 3 red, 0 missed"
    complaints, _ = audit_check.audit([*lines, json.dumps({"kind": "end", "summary": false})])
    assert len(complaints) == 1 and "the lines say" in complaints[0]


def test_everything_that_is_launched_is_declared() -> None:
    """Names in `Step(...)` and `.launch(...)` of the package; "*" stands for the widths 8 and 16."""
    declared, seen = {spec.name for spec in catalog.specs()}, set()
    for path in (ROOT / "flashnext_drv").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
                continue
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("Step", "launch") and isinstance(node.args[0].value, str):
                seen |= {node.args[0].value.replace("*", width) for width in ("8", "16")}
    assert len(seen) > 15
    assert seen <= declared


def test_a_control_that_does_not_fit_its_source_is_refused() -> None:
    spec = catalog.spec("stream_add")
    for old, text in (("no such text", "stands 0 times"), ("fn_fma", "stands 4 times")):
        wrong = Control("wrong", "tail", (Edit(spec.source, old, ""),))
        with pytest.raises(BuildError, match=text):
            planting.control_digest(spec, wrong)
    with pytest.raises(BuildError, match="does not include it"):
        planting.control_digest(spec, Control("wrong", "tail", (Edit("glue/none.cu", "a", "b"),)))


def test_declaration_that_lacks_something_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = catalog.specs()
    for change, text in (
        ({"reference": ""}, "no reference"),
        ({"bound": ""}, "no bound"),
        ({"cases": ()}, "no cases"),
        ({"controls": ()}, "no controls"),
        ({"limits": {}}, "no limits of sm_80"),
        ({"order": "nothing_v9"}, "not in ARITHMETIC.md"),
        ({"exempt": {"fp32": "why"}}, "exempts 'fp32'"),
        ({"exempt": {"mates": ""}}, "exempts 'mates'"),
        ({"replaces": "ghost"}, "replaces ghost"),
    ):
        spoilt = replace(whole[0], **change)  # type: ignore[arg-type]
        monkeypatch.setattr(catalog, "specs", lambda spoilt=spoilt: (spoilt, *whole[1:]))
        with pytest.raises(BuildError, match=text):
            catalog.require_whole()
    monkeypatch.setattr(catalog, "specs", lambda: whole[1:])
    with pytest.raises(BuildError, match=r"glue/site_norm\.cu: no kernel is declared"):
        catalog.require_whole()


def test_declarations_are_whole() -> None:
    catalog.require_whole()


def test_controls_fit_their_sources_and_are_of_every_kind() -> None:
    kinds = set()
    for spec, one in planting.controls():
        kinds.add(one.kind)
        assert len(planting.control_digest(spec, one)) == 64
        known = {case.name for case in spec.cases}
        assert set(one.cases) <= known, f"{spec.name}/{one.name} names a case that does not exist"
    for spec in catalog.specs():
        names = [one.name for one in spec.controls]
        assert len(set(names)) == len(names) and (names or spec.broken), spec.name
    assert kinds == set(CONTROL_KINDS)
