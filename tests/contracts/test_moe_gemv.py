"""The experts' products against their contract: every case, equality with linear_gemv, rows alone and among
others, and planted faults that must be reported."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from flashnext_drv.check import contract
from flashnext_drv.check.contract import CheckDevice, Operands
from flashnext_drv.check.operands import same_bits
from flashnext_drv.errors import ContractError
from flashnext_drv.kernels import moe_gemv
from flashnext_drv.kernels.exl3 import dot_segments, gu_segments
from flashnext_drv.kernels.spec import Case
from flashnext_drv.kernels.tables import LINE

Give = Callable[[str], CheckDevice]
ALL = [(spec.name, case) for spec in moe_gemv.KERNELS for case in spec.cases]
FORMS = ("mul1_3", "mul1_5", "mcg_4", "3inst_2", "mul1_2.5")


def run(
    check_device: Give, kernel: str, case: Case, seed: int = 0, operands: Operands | None = None
) -> np.ndarray:
    return contract.run_case(check_device("moe_gemv"), kernel, case, seed, operands).outputs["part"]


def find(kernel: str, name: str) -> Case:
    return next(case for known, case in ALL if known == kernel and case.name == name)


@pytest.mark.parametrize(("kernel", "case"), ALL, ids=[f"{k}-{c.name}" for k, c in ALL])
def test_case_meets_its_expectation(check_device: Give, case_seed: int, kernel: str, case: Case) -> None:
    run(check_device, kernel, case, case_seed)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernel", ["moe_gemv_gu", "moe_gemv_down"])
def test_bytes_are_those_of_linear_gemv(check_device: Give, kernel: str, form: str) -> None:
    hidden, width = 1024, 640  # two segments each
    case = Case(
        "test",
        {
            "lines": f"{width}:{form},{form},{form}; 128:mul1_3,mul1_3,mul1_3",
            "hidden": hidden,
            "rows": 1,
            "rows_cap": 1,
            "n_slots": 2,
        },
    )
    made = contract.build_operands(kernel, case)
    got = run(check_device, kernel, case, operands=made)
    k, n = (hidden, width) if kernel == "moe_gemv_gu" else (width, hidden)
    part = "gate" if kernel == "moe_gemv_gu" else "down"
    segments = gu_segments(k, n) if kernel == "moe_gemv_gu" else dot_segments(k, n)
    dense = Case("test", {"linears": f"{form} {k}x{n}:{segments}", "rows": 1, "rows_cap": 1})
    linear = contract.build_operands("linear_gemv_n8", dense)
    linear.arrays["w0"] = made.arrays[f"{part}0"]
    linear.arrays["x0"] = np.ascontiguousarray(made.arrays["x"][:, 0, 0, :k])
    linear.expect = lambda arrays: None
    want = contract.run_case(check_device("exl3"), "linear_gemv_n8", dense, 0, linear).outputs["part0"]
    same_bits(form, got[: want.shape[0], 0, 0, 0, :n].copy(), want[:, 0])


@pytest.mark.parametrize("kernel", ["moe_gemv_gu", "moe_gemv_down"])
def test_row_keeps_its_bytes_in_any_company(check_device: Give, kernel: str) -> None:
    case = find(kernel, "mixed_formats")
    together = run(check_device, kernel, case)
    for row in range(case.int("rows")):
        made = contract.build_operands(kernel, case)
        for name in ("routes", "x"):
            made.arrays[name][0] = made.arrays[name][row].copy()
        made.arrays["round"]["n_rows"] = 1
        made.expect = lambda arrays: None
        same_bits(f"row {row}", run(check_device, kernel, case, operands=made)[:, 0], together[:, row])


@pytest.mark.parametrize("kernel", ["moe_gemv_gu", "moe_gemv_down"])
def test_order_of_lanes_warps_and_blocks_does_not_matter(
    check_device: Give, kernel: str, in_any_order: Callable[..., None]
) -> None:
    case = find(kernel, "mixed_widths")
    in_any_order(4, lambda: contract.run_case(check_device("moe_gemv"), kernel, case).sha256)


def other_expert(made: Operands) -> None:
    routes = made.arrays["routes"] = made.arrays["routes"].copy()  # the expectation keeps the array itself
    routes["expert"][0, 0] ^= 1


def other_row(made: Operands) -> None:
    made.arrays["x"][[0, 1]] = made.arrays["x"][[1, 0]]


def other_format(made: Operands) -> None:
    for part in ("gate", "down"):
        made.arrays["lines"][part]["format"] ^= np.uint32(3 << 16)


def flip_one_code(made: Operands) -> None:
    name = next(n for n in ("up0", "down0") if n in made.arrays)
    made.arrays[name].reshape(-1).view(np.uint16)[5] ^= 0x100


def narrower_line(made: Operands) -> None:
    made.arrays["lines"]["width"] //= 2


@pytest.mark.parametrize(
    "spoil", [other_expert, other_row, other_format, flip_one_code, narrower_line], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("kernel", ["moe_gemv_gu", "moe_gemv_down"])
def test_planted_fault_is_reported(
    check_device: Give, kernel: str, spoil: Callable[[Operands], None]
) -> None:
    lines = "256:mul1_3,mul1_3,mul1_3; 256:mul1_3,mul1_3,mul1_3; 256:mul1_3,mul1_3,mul1_3"
    case = Case("test", {"lines": lines, "hidden": 256, "rows": 2, "rows_cap": 4, "n_slots": 3})
    made = contract.build_operands(kernel, case)
    spoil(made)
    with pytest.raises(ContractError):
        run(check_device, kernel, case, operands=made)


def test_a_line_without_format_gives_nan_and_no_guess(check_device: Give) -> None:
    case = find("moe_gemv_down", "one_row")
    made = contract.build_operands("moe_gemv_down", case)
    assert made.arrays["lines"].dtype == LINE
    made.arrays["lines"]["down"]["format"] = 1  # f16: experts are EXL3 only
    made.expect = lambda arrays: None
    assert np.isnan(run(check_device, "moe_gemv_down", case, operands=made)[:, 0]).all()
