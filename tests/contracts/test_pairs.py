"""Kernels that replace others give their bytes, and a pair that does not agree is reported by its names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from flashnext_drv.check import pairs
from flashnext_drv.check.contract import CheckDevice, Operands, Ran, build_operands, launch_case
from flashnext_drv.kernels import catalog
from flashnext_drv.kernels.spec import Case, KernelSpec

pytestmark = pytest.mark.sim
REPLACING = [spec for spec in catalog.specs() if spec.replaces]


@pytest.fixture(scope="module")
def all_kernels(device_name: str) -> Iterator[CheckDevice]:
    """Every family: the kernels of a pair may be of several."""
    with CheckDevice(device_name) as device:
        yield device


def ran(device: CheckDevice, spec: KernelSpec, case: Case) -> tuple[Operands, Ran]:
    given = build_operands(spec.name, case)
    return given, launch_case(device, spec, given)


@pytest.mark.parametrize("spec", REPLACING, ids=lambda spec: spec.name)
def test_a_kernel_gives_the_bytes_of_what_it_replaces(all_kernels: CheckDevice, spec: KernelSpec) -> None:
    wanted = {str(pair) for pair in pairs.pairs_of(spec) if pair.last == spec.replaces}
    for case in spec.cases:
        given, found = ran(all_kernels, spec, case)
        said = pairs.check_pairs(all_kernels, spec, case, given, found)
        if any(name in said for name in wanted):
            return
    raise AssertionError(f"no case of {spec.name} reaches {' or '.join(sorted(wanted))}")


def test_a_chain_with_other_bytes_is_reported(all_kernels: CheckDevice) -> None:
    spec = catalog.spec("deep_linear")
    case = next(one for one in spec.cases if one.name == "bias")
    given, found = ran(all_kernels, spec, case)
    said = pairs.check_pairs(all_kernels, spec, case, given, found)
    assert said == "bytes of linear_gemv_n16 + linear_finish"
    wrong = {name: array.copy() for name, array in found.found.items()}
    wrong["out0"].view(np.uint32)[0, 5] ^= 1
    named = r"out0: 1 of \d+ elements differ from those of linear_gemv_n16 \+ linear_finish, first at \(0"
    with pytest.raises(AssertionError, match=named):
        pairs.check_pairs(all_kernels, spec, case, given, replace(found, found=wrong))
