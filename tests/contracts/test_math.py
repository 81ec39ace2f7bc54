"""Elementary functions, warp collectives and barriers: every probe case, any order, and plants that must be
seen."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from flashnext_drv.check import contract
from flashnext_drv.check.cases_probe import ULPS, ulp_errors
from flashnext_drv.kernels import probe
from flashnext_drv.kernels.spec import Case

pytestmark = pytest.mark.sim
SPECS = (probe.MATH_SWEEP, probe.MATH_F64, probe.WARP_OPS, probe.BARRIER_TURNS, probe.SHARED_WIDE)
ALL = [(spec.name, case) for spec in SPECS for case in spec.cases]
Give = Callable[[str], contract.CheckDevice]


@pytest.mark.parametrize(("kernel", "case"), ALL, ids=[f"{k}-{c.name}" for k, c in ALL])
def test_case_meets_its_reference(check_device: Give, kernel: str, case: Case, case_seed: int) -> None:
    contract.run_case(check_device("probe"), kernel, case, case_seed)


def test_every_function_of_the_list_has_a_sweep() -> None:
    swept = {str(case["function"]) for case in probe.MATH_SWEEP.cases}
    assert swept == set(probe.MATH_FUNCTIONS)
    assert set(ULPS) == set(probe.MATH_FUNCTIONS[:12])


@pytest.mark.parametrize(
    ("kernel", "case"),
    [(k, c) for k, c in ALL if k in ("warp_ops", "barrier_turns", "shared_wide")],
    ids=lambda v: v.name if isinstance(v, Case) else v,
)
def test_order_of_lanes_and_blocks_does_not_matter(
    check_device: Give, kernel: str, case: Case, in_any_order: Callable[..., None]
) -> None:
    in_any_order(8, lambda: contract.run_case(check_device("probe"), kernel, case).sha256)


@pytest.mark.parametrize("function", sorted(ULPS))
def test_error_of_two_units_more_than_the_bound_is_seen(check_device: Give, function: str) -> None:
    case = next(c for c in probe.MATH_SWEEP.cases if c["function"] == function and "edges" not in c.name)
    outputs = contract.run_case(check_device("probe"), "math_sweep", case).outputs
    operands = contract.build_operands("math_sweep", case)
    operands.expect(outputs)
    words = outputs["y"].view(np.uint32)
    words[len(words) // 3] += np.uint32(np.ceil(2 * ULPS[function]) + 1)
    with pytest.raises(AssertionError, match="ulp, bound"):
        operands.expect(outputs)


@pytest.mark.parametrize(
    ("kernel", "name", "output"),
    [
        ("math_f64", "angles", "y"),
        ("math_f64", "exponents", "y"),
        ("warp_ops", "plain", "f"),
        ("warp_ops", "plain", "u"),
        ("barrier_turns", "one_block", "y"),
        ("shared_wide", "one_block", "y"),
    ],
)
def test_planted_bit_is_seen(check_device: Give, kernel: str, name: str, output: str) -> None:
    case = next(c for k, c in ALL if k == kernel and c.name == name)
    outputs = contract.run_case(check_device("probe"), kernel, case).outputs
    operands = contract.build_operands(kernel, case)
    operands.expect(outputs)
    flat = outputs[output].reshape(-1)
    word = flat.view(f"u{flat.dtype.itemsize}")
    word[word.size // 2 + (2 if name == "exponents" else 0)] ^= np.array(
        1 << (8 if kernel == "math_f64" else 0)
    ).astype(word.dtype)
    with pytest.raises(AssertionError):
        operands.expect(outputs)


def test_ulp_errors_count_units_in_the_last_place() -> None:
    exact = np.array([1.0, 1.0, 3.0, 2.0**-149, 1e39, np.nan])
    found = np.array([1.0, 1 + 2.0**-23, 3 - 2.0**-22, 2.0**-148, np.inf, 0.0], np.float32)
    assert ulp_errors(found, exact).tolist() == [0, 1, 1, 1, 0, 0]
