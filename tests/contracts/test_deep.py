"""The dense products of a prompt against their contract: every case, the scheduler's order, rows in other
company, and planted faults that the expectations must report."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from flashnext_drv.check import contract
from flashnext_drv.check.contract import CheckDevice
from flashnext_drv.check.operands import from_tiles, is_tiles, same_bits, untouched
from flashnext_drv.kernels import deep
from flashnext_drv.kernels.spec import Case

Give = Callable[[str], CheckDevice]
ALL = [(spec.name, case) for spec in deep.KERNELS for case in spec.cases]


@pytest.fixture(scope="module")
def device(check_device: Give) -> CheckDevice:
    return check_device("deep")


def find(kernel: str, name: str, rows: int | None = None) -> Case:
    base = next(case for known, case in ALL if known == kernel and case.name == name)
    return base if rows is None else Case(name, {**base.dims, "rows": rows})


@pytest.mark.parametrize(("kernel", "case"), ALL, ids=[f"{k}-{c.name}" for k, c in ALL])
def test_case_meets_its_expectation(device: CheckDevice, kernel: str, case: Case, case_seed: int) -> None:
    contract.run_case(device, kernel, case, case_seed)


@pytest.mark.parametrize(
    ("kernel", "name"), [("deep_linear", "mixed"), ("deep_site_up", "rows3"), ("deep_input", "rows65")]
)
def test_order_of_lanes_warps_and_blocks_does_not_matter(
    device: CheckDevice, kernel: str, name: str, in_any_order: Callable[..., None]
) -> None:
    in_any_order(4, lambda: contract.run_case(device, kernel, find(kernel, name)).sha256)


@pytest.mark.parametrize(
    ("kernel", "name", "output"),
    [("deep_linear", "rows130", "out0"), ("deep_linear", "wide_leaves", "out3"),
     ("deep_site_up", "rows70", "m"), ("deep_site_up", "rows200", "m"),
     ("deep_input", "rows129", "x0"), ("deep_input", "rows129", "x1"), ("deep_input", "rows65", "x2")],
)  # fmt: skip
@pytest.mark.parametrize("fewer", [1, 9, 63])
def test_a_row_keeps_its_bytes_when_rows_behind_it_are_gone(
    device: CheckDevice, kernel: str, name: str, output: str, fewer: int
) -> None:
    """Also where the last row tile, image or block of 128 rows is no longer there."""
    whole = contract.run_case(device, kernel, find(kernel, name)).outputs[output]
    case = find(kernel, name)
    rows = int(case.dims["rows"])
    given = contract.build_operands(kernel, case)
    given.arrays["round"]["n_rows"] = rows - fewer
    given.expect = lambda _: None
    part = contract.run_case(device, kernel, case, 0, given).outputs[output]
    whole, part = (from_tiles(x) if is_tiles(x) else x for x in (whole, part))
    same_bits("rows", part[: rows - fewer], whole[: rows - fewer])
    untouched("behind", part[rows - fewer :])


@pytest.mark.parametrize(("kernel", "name", "output"),
                         [("deep_linear", "bias", "out0"), ("deep_site_up", "rows3", "m"),
                          ("deep_input", "rows63", "x0"), ("deep_input", "rows63", "x1")])  # fmt: skip
@pytest.mark.parametrize("fault", ["bit", "padding"])
def test_planted_fault_is_reported(
    device: CheckDevice, kernel: str, name: str, output: str, fault: str
) -> None:
    made = contract.build_operands(kernel, find(kernel, name))
    found = dict(contract.run_case(device, kernel, find(kernel, name)).outputs)
    made.expect(found)
    spoiled = found[output] = found[output].copy()
    # a bit that counts: the sums of deep_site_up pass a sigmoid and are held to FP64 alone
    words = spoiled.reshape(-1).view(np.uint32)
    at = 0 if fault == "bit" else words.size - spoiled.shape[-1] * spoiled.itemsize // 4
    words[at] ^= 1 << 16 if kernel == "deep_site_up" else 1
    with pytest.raises(AssertionError):
        made.expect(found)
