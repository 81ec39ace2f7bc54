"""COVERAGE.md says what the registry says."""

from __future__ import annotations

from flashnext_drv.kernels import catalog
from tools import coverage_table


def test_coverage_is_current() -> None:
    assert coverage_table.PATH.read_text(encoding="utf-8") == coverage_table.text(), \
        f"COVERAGE.md is not what the declarations say: run {coverage_table.COMMAND}"


def test_every_kernel_and_case_is_listed() -> None:
    said = coverage_table.text()
    for spec in catalog.specs():
        row = next(line for line in said.splitlines() if line.startswith(f"| {spec.name} | "))
        assert all(case.name in row for case in spec.cases)
    for arch in catalog.ARCHS:
        assert f"| {arch} | {len(catalog.specs())} |" in said


def test_a_generation_is_called_compared_only_with_a_receipt() -> None:
    for arch in catalog.ARCHS:
        qualified = coverage_table._generation(arch) in catalog.QUALIFIED
        row = next(line for line in coverage_table.text().splitlines() if line.startswith(f"| {arch} |"))
        assert row.endswith("| yes |" if qualified else "| no |")
    assert coverage_table._generation("sm_90a") == "9.0" and coverage_table._generation("sm_121") == "12.1"
