"""The moe kernels around the expert products against their contract: every case, rows alone and among others,
the scheduler's order, and planted faults that the expectations must report.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashnext_drv.check import contract
from flashnext_drv.kernels import moe
from flashnext_drv.kernels.spec import Case

pytestmark = pytest.mark.sim
ALL = [(spec.name, case) for spec in moe.KERNELS for case in spec.cases]


@pytest.fixture(scope="module")
def device(check_device: Callable[[str], contract.CheckDevice]) -> contract.CheckDevice:
    return check_device("moe")


def find(kernel: str, name: str, **dims: Any) -> Case:
    base = next(case for known, case in ALL if known == kernel and case.name == name)
    return Case(name, {**base.dims, **dims})


def run(device: contract.CheckDevice, kernel: str, case: Case) -> dict[str, np.ndarray]:
    return contract.run_case(device, kernel, case).outputs


def raw(x: np.ndarray) -> bytes:
    return contract.canonical_bytes(x["weight"]) + x["expert"].tobytes() if x.dtype.names else (
        contract.canonical_bytes(x))


@pytest.mark.parametrize(("kernel", "case"), ALL, ids=[f"{k}-{c.name}" for k, c in ALL])
def test_case_meets_its_expectation(
    device: contract.CheckDevice, kernel: str, case: Case, case_seed: int
) -> None:
    contract.run_case(device, kernel, case, case_seed)


@pytest.mark.parametrize(
    ("kernel", "name"),
    [("router_pick", "all_rows_real"), ("router_pick", "nonfinite"), ("moe_input", "seven_rows"),
     ("moe_act", "mixed_widths"), ("moe_act", "nonfinite"), ("moe_sum", "mixed_widths"),
     ("moe_sum", "nonfinite")],
)  # fmt: skip
def test_row_alone_gives_the_bytes_it_gives_among_others(
    device: contract.CheckDevice, kernel: str, name: str
) -> None:
    ((output, together),) = run(device, kernel, find(kernel, name)).items()
    n = find(kernel, name).int("rows")
    turned = run(device, kernel, find(kernel, name, order=",".join(str(n - 1 - i) for i in range(n))))[output]
    for row in range(0, n, 3):
        alone = run(device, kernel, find(kernel, name, order=str(row)))[output]
        assert raw(alone[:1]) == raw(together[row : row + 1]), f"row {row} alone"
        assert raw(turned[n - 1 - row : n - row]) == raw(together[row : row + 1]), f"row {row} turned"


@pytest.mark.parametrize(
    ("kernel", "name"),
    [("router_pick", "ties"), ("router_pick", "equal"), ("router_pick", "nonfinite"),
     ("moe_input", "hidden128"), ("moe_act", "mixed_widths"), ("moe_sum", "mixed_widths")],
)  # fmt: skip
def test_order_of_lanes_warps_and_blocks_does_not_matter(
    device: contract.CheckDevice, kernel: str, name: str, in_any_order: Callable[..., None]
) -> None:
    in_any_order(6, lambda: contract.run_case(device, kernel, find(kernel, name)).sha256)


@pytest.mark.parametrize(
    ("kernel", "name", "fault"),
    [("router_pick", "small", "expert"), ("router_pick", "small", "weight"), ("router_pick", "ties", "order"),
     ("router_pick", "small", "padding"), ("moe_input", "hidden128", "ulp"),
     ("moe_input", "hidden128", "padding"),
     ("moe_act", "mixed_widths", "two_ulps"), ("moe_act", "mixed_widths", "slots"),
     ("moe_act", "mixed_widths", "padding"), ("moe_sum", "mixed_widths", "ulp"),
     ("moe_sum", "all_rows", "ulp"), ("moe_sum", "mixed_widths", "padding")],
)  # fmt: skip
def test_planted_fault_is_reported(device: contract.CheckDevice, kernel: str, name: str, fault: str) -> None:
    case = find(kernel, name)
    ((output, array),) = run(device, kernel, case).items()
    operands = contract.build_operands(kernel, case)
    found = array.copy()
    operands.expect({output: found})
    plant(found, fault)
    with pytest.raises(AssertionError):
        operands.expect({output: found})


@pytest.mark.parametrize("wrong", ["weights in another order", "one leaf further"])
def test_wrong_sum_misses_the_oracle(device: contract.CheckDevice, wrong: str) -> None:
    """The sum's order is part of the contract: the same terms in another order must not pass."""
    case = find("moe_sum", "all_rows")
    honest, bent = contract.build_operands("moe_sum", case), contract.build_operands("moe_sum", case)
    if wrong == "one leaf further":
        bent.scalars["n_experts"] = 2 * case.int("n_experts")   # half as many leaves
    else:
        weights = bent.arrays["routes"]["weight"]
        weights[:, :2] = weights[:, 1::-1].copy()
    bent.expect = honest.expect
    with pytest.raises(contract.ContractError):
        contract.run_case(device, "moe_sum", case, 0, bent)


def plant(x: np.ndarray, fault: str) -> None:
    """Change `x` in place: an element by one or two ulps, a route, two slots of a row, or a padded row."""
    if fault == "expert":
        x["expert"][0, 0] ^= 1
    elif fault == "weight":
        x["weight"][0, 0] *= np.float32(1 + 2.0**-18)
    elif fault in ("order", "slots"):
        x[0, :2] = x[0, 1::-1].copy()
    elif fault == "padding":
        x.reshape(-1).view(np.uint8)[-1] = 0
    else:
        x.reshape(-1).view(f"u{x.dtype.itemsize}")[0] ^= 1 if fault == "ulp" else 2


@pytest.mark.parametrize("hidden", [640, 1152, 2176, 4224])
def test_segments_follow_the_rule_where_halving_stops_early(
    device: contract.CheckDevice, hidden: int
) -> None:
    """hidden / 128 is odd, so segments end where another halving would leave whole k16 steps."""
    contract.run_case(device, "moe_act", find("moe_act", "one_row", hidden=hidden))
