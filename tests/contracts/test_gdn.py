"""The gdn kernels against their contract: every case, a run against launches of one row, sequences alone and
among others, the scheduler's order, and planted faults that the expectations must report.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashnext_drv.check import cases_gdn, contract
from flashnext_drv.kernels import gdn
from flashnext_drv.kernels.spec import Case

pytestmark = pytest.mark.sim
ALL = [(spec.name, case) for spec in gdn.KERNELS for case in spec.cases]
ROWS = {"gdn_conv": "out", "gdn_step": "o"}     # the output that has rows; the other one is the state


@pytest.fixture(scope="module")
def device(check_device: Callable[[str], contract.CheckDevice]) -> contract.CheckDevice:
    return check_device("gdn")


def find(kernel: str, name: str, **dims: Any) -> Case:
    base = next(case for known, case in ALL if known == kernel and case.name == name)
    return Case(name, {**base.dims, **dims})


def run(device: contract.CheckDevice, kernel: str, case: Case) -> dict[str, np.ndarray]:
    return contract.run_case(device, kernel, case).outputs


def raw(x: np.ndarray) -> bytes:
    return contract.canonical_bytes(x)


@pytest.mark.parametrize(("kernel", "case"), ALL, ids=[f"{k}-{c.name}" for k, c in ALL])
def test_case_meets_its_expectation(
    device: contract.CheckDevice, kernel: str, case: Case, case_seed: int
) -> None:
    contract.run_case(device, kernel, case, case_seed)


@pytest.mark.parametrize(
    ("kernel", "name"),
    [("gdn_conv", "window"), ("gdn_conv", "sixteen"), ("gdn_step", "window"), ("gdn_step", "sixteen")],
)
def test_run_gives_the_bytes_of_launches_of_one_row(
    device: contract.CheckDevice, kernel: str, name: str
) -> None:
    whole = run(device, kernel, find(kernel, name))
    (n,) = cases_gdn.run_lengths(find(kernel, name))
    state = None
    for row in range(n):
        case = find(kernel, name, runs="1", first=row)
        operands = contract.build_operands(kernel, case)
        if state is not None:
            operands.arrays["state"] = state
            operands.expect = lambda got: None      # it would start from the first state
        step = contract.run_case(device, kernel, case, 0, operands).outputs
        assert raw(step[ROWS[kernel]][0]) == raw(whole[ROWS[kernel]][row]), f"row {row}"
        state = step["state"]
    assert state is not None
    assert raw(state) == raw(whole["state"])


@pytest.mark.parametrize(
    ("kernel", "name"),
    [("gdn_conv", "mixed_runs"), ("gdn_conv", "decode_seven"), ("gdn_conv", "nonfinite"),
     ("gdn_step", "mixed_runs"), ("gdn_step", "decode_three"), ("gdn_step", "nonfinite")],
)  # fmt: skip
def test_sequence_alone_gives_the_bytes_it_gives_among_others(
    device: contract.CheckDevice, kernel: str, name: str
) -> None:
    lengths = cases_gdn.run_lengths(find(kernel, name))
    together = run(device, kernel, find(kernel, name))
    first = 0
    for sequence, n in enumerate(lengths):
        alone = run(device, kernel, find(kernel, name, runs=str(n), sequences=str(sequence)))
        rows = ROWS[kernel]
        assert raw(alone[rows][:n]) == raw(together[rows][first : first + n]), f"sequence {sequence}"
        mine, theirs = alone["state"][1], together["state"][len(lengths) - sequence]
        assert raw(mine) == raw(theirs), f"state of {sequence}"
        first += n


@pytest.mark.parametrize("name", ["seven", "all_rows", "nonfinite"])
def test_gate_row_alone_gives_the_bytes_it_gives_among_others(
    device: contract.CheckDevice, name: str
) -> None:
    together = run(device, "gdn_gate_input", find("gdn_gate_input", name))["x"]
    for row in range(0, find("gdn_gate_input", name).int("rows"), 2):
        alone = run(device, "gdn_gate_input", find("gdn_gate_input", name, order=str(row)))["x"]
        assert raw(alone[0]) == raw(together[row]), f"row {row}"


@pytest.mark.parametrize(
    ("kernel", "name"),
    [("gdn_conv", "mixed_runs"), ("gdn_step", "mixed_runs"), ("gdn_gate_input", "silu"),
     ("gdn_deep_input", "mixed_runs"), ("gdn_scan", "ring")],
)
def test_order_of_lanes_warps_and_blocks_does_not_matter(
    device: contract.CheckDevice, kernel: str, name: str, in_any_order: Callable[..., None]
) -> None:
    in_any_order(4, lambda: contract.run_case(device, kernel, find(kernel, name)).sha256)


@pytest.mark.parametrize(
    ("kernel", "name", "output", "fault"),
    [("gdn_conv", "window", "out", "small"), ("gdn_conv", "window", "out", "swap"),
     ("gdn_conv", "window", "out", "padding"), ("gdn_conv", "window", "state", "before"),
     ("gdn_conv", "window", "state", "inside"), ("gdn_step", "window", "o", "small"),
     ("gdn_step", "window", "o", "swap"), ("gdn_step", "mixed_runs", "o", "padding"),
     ("gdn_step", "window", "state", "before"), ("gdn_step", "window", "state", "inside"),
     ("gdn_step", "window", "state", "no slot"), ("gdn_gate_input", "silu", "x", "two_ulps"),
     ("gdn_gate_input", "plain_f16", "x", "swap"), ("gdn_gate_input", "seven", "x", "padding")],
)  # fmt: skip
def test_planted_fault_is_reported(
    device: contract.CheckDevice, kernel: str, name: str, output: str, fault: str
) -> None:
    case = find(kernel, name)
    outputs = {key: array.copy() for key, array in run(device, kernel, case).items()}
    operands = contract.build_operands(kernel, case)
    operands.expect(outputs)
    plant(outputs[output], fault)
    with pytest.raises(AssertionError):
        operands.expect(outputs)


@pytest.mark.parametrize("wrong", ["decay of the next row", "heads in another order", "taps reversed"])
def test_wrong_recurrence_misses_the_bound(device: contract.CheckDevice, wrong: str) -> None:
    """The bounds are tight enough to tell the formula from its usual mistakes, made in the operands."""
    kernel, name = ("gdn_conv", "window") if wrong == "taps reversed" else ("gdn_step", "mixed_runs")
    case = find(kernel, name)
    honest, bent = contract.build_operands(kernel, case), contract.build_operands(kernel, case)
    if wrong == "decay of the next row":
        bent.arrays["a"][:3] = bent.arrays["a"][[1, 2, 2]]
    elif wrong == "heads in another order":
        width = case.int("n_k") * 128
        q = bent.arrays["qkv"][:, :width].reshape(16, -1, 128)
        bent.arrays["qkv"][:, :width] = q[:, ::-1].reshape(16, -1)
    else:
        bent.arrays["w"] = np.ascontiguousarray(bent.arrays["w"][:, ::-1])
    bent.expect = honest.expect
    with pytest.raises(contract.ContractError):
        contract.run_case(device, kernel, case, 0, bent)


def plant(x: np.ndarray, fault: str) -> None:
    """Change `x` in place: an element by 2 ulps or 2^-10, two neighbours, a padded row, or a state byte."""
    flat = x.reshape(-1)
    if fault == "two_ulps":
        flat.view(np.uint16)[0] ^= 2
    elif fault == "small":
        at = int(np.argmax(np.abs(np.nan_to_num(flat[: flat.size // 16]))))
        flat[at] *= np.float32(1 + 2.0**-10)
    elif fault == "swap":
        flat[:2] = flat[1::-1].copy()
    elif fault == "padding":
        flat[-1] = 0
    elif fault == "before":
        x[1, cases_gdn.OFFSET // x.itemsize - 1] = 0
    elif fault == "inside":
        x[1, cases_gdn.OFFSET // x.itemsize + 1] *= 1.01
    else:
        x[0, 200] = 0
