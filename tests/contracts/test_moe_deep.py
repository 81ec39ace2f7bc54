"""The experts' prompt kernels against their contract: every case, the scheduler's order, rows in other
company, the plan's kernels one after another, and planted faults that the expectations must report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashnext_drv.check import contract
from flashnext_drv.check.contract import CheckDevice, Operands
from flashnext_drv.check.operands import from_tiles, same_bits, untouched
from flashnext_drv.kernels import moe_deep
from flashnext_drv.kernels.spec import Case
from flashnext_drv.ref.moe_deep import plan

Give = Callable[[str], CheckDevice]
ALL = [(spec.name, case) for spec in moe_deep.KERNELS for case in spec.cases]


@pytest.fixture(scope="module")
def device(check_device: Give) -> CheckDevice:
    return check_device("moe_deep")


def find(kernel: str, name: str, **dims: Any) -> Case:
    base = next(case for known, case in ALL if known == kernel and case.name == name)
    return Case(name, {**base.dims, **dims})


@pytest.mark.parametrize(("kernel", "case"), ALL, ids=[f"{k}-{c.name}" for k, c in ALL])
def test_case_meets_its_expectation(device: CheckDevice, kernel: str, case: Case, case_seed: int) -> None:
    contract.run_case(device, kernel, case, case_seed)


@pytest.mark.parametrize("kernel", [spec.name for spec in moe_deep.KERNELS])
def test_order_of_lanes_warps_and_blocks_does_not_matter(
    device: CheckDevice, kernel: str, in_any_order: Callable[..., None]
) -> None:
    cases = [case for known, case in ALL if known == kernel and case.name in ("edges", "mixed", "by_turns")]
    assert cases
    for case in cases:
        in_any_order(4, lambda case=case: contract.run_case(device, kernel, case).sha256)


def test_the_plan_of_each_kernel_is_what_the_next_one_reads(device: CheckDevice) -> None:
    count = contract.run_case(device, "moe_plan_count", find("moe_plan_count", "edges")).outputs
    scan = contract.build_operands("moe_plan_scan", find("moe_plan_scan", "edges"))
    scan.arrays["counts"] = count["counts"]
    scanned = contract.run_case(device, "moe_plan_scan", find("moe_plan_scan", "edges"), 0, scan).outputs
    place = contract.build_operands("moe_plan_place", find("moe_plan_place", "edges"))
    place.arrays["starts"] = scanned["starts"]
    contract.run_case(device, "moe_plan_place", find("moe_plan_place", "edges"), 0, place)


@pytest.mark.parametrize(("rows", "n_slots", "n_experts"), [(128, 2, 1), (256, 11, 512), (128, 4, 7)])
def test_no_plan_is_larger_than_what_deep_pairs_says(rows: int, n_slots: int, n_experts: int) -> None:
    """Every expert with one row more than whole tiles, as far as there are rows."""
    pairs, tiles = moe_deep.deep_pairs(rows, n_slots, n_experts)
    experts = np.full((rows, n_slots), n_experts)
    for row in range(rows):
        experts[row, :-1] = np.sort((row * (n_slots - 1) + np.arange(n_slots - 1)) % n_experts)
    for n in (1, rows // 2 + 1, rows):
        made = plan(experts[:n], n_experts)
        assert len(made.tiles) <= tiles and max(made.pair_of) < pairs and pairs % 128 == 0


@pytest.mark.parametrize(
    ("kernel", "output", "name"),
    [
        ("moe_deep_input", "x", "edges"),
        ("moe_deep_gu", "h", "whole_and_one"),
        ("moe_deep_gu", "h", "wide"),
        ("moe_deep_down", "v", "whole_and_one"),
        ("moe_deep_down", "v", "wide"),
    ],
)
def test_a_row_keeps_its_bytes_in_any_company(
    device: CheckDevice, kernel: str, output: str, name: str
) -> None:
    """All tiles, and up to 13 rows from the middle of one as a tile of their own: equal, and nothing else."""
    case = find(kernel, name)
    whole = by_position(contract.run_case(device, kernel, case).outputs[output])
    part = contract.build_operands(kernel, case)
    tiles = part.arrays["tiles"]
    long = next(tile for tile in tiles if tile["n_rows"] > 64)
    first, n = int(long["first"]) + 64, min(13, int(long["n_rows"]) - 64)
    part.arrays["tiles"] = np.array([(long["expert"], first, n, 0)], tiles.dtype)
    part.arrays["n_tiles"], part.expect = np.array([1], np.uint32), lambda _: None
    found = by_position(contract.run_case(device, kernel, case, 0, part).outputs[output])
    same_bits("rows", found[..., first : first + n, :], whole[..., first : first + n, :])
    untouched("before", found[..., :first, :])
    untouched("behind", found[..., first + n :, :])


def by_position(x: np.ndarray) -> np.ndarray:
    """Tile images as rows by sorted position; anything else lies so."""
    if x.ndim == 5:
        return np.stack([from_tiles(image) for image in x])
    return from_tiles(x) if x.ndim == 4 else x


@pytest.mark.parametrize(
    ("kernel", "output"),
    [("moe_plan_count", "counts"), ("moe_plan_scan", "starts"), ("moe_plan_scan", "tiles"),
     ("moe_plan_place", "pair_at"), ("moe_plan_place", "pair_of"), ("moe_deep_input", "x"),
     ("moe_deep_gu", "h"), ("moe_deep_down", "v"),
     ("moe_deep_sum", "y")],
)  # fmt: skip
@pytest.mark.parametrize("fault", ["bit", "padding"])
def test_planted_fault_is_reported(device: CheckDevice, kernel: str, output: str, fault: str) -> None:
    case = find(kernel, "mixed" if output in ("h", "v") else "edges")
    made: Operands = contract.build_operands(kernel, case)
    found = dict(contract.run_case(device, kernel, case).outputs)
    made.expect(found)
    spoiled = found[output] = found[output].copy()
    words = spoiled.reshape(-1).view(np.uint8)
    words[0 if fault == "bit" else -1] ^= 2 if output == "h" else 1  # f16 of a value within half an ulp
    with pytest.raises(AssertionError):
        made.expect(found)
