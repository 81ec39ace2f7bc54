"""The glue kernels against their contract: every case, rows alone and among others, the forms that must agree
in bytes, the scheduler's order, and planted faults that the expectations must report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from flashnext_drv.check import contract
from flashnext_drv.kernels import glue
from flashnext_drv.kernels.spec import Case

pytestmark = pytest.mark.sim
FAMILY = "glue"
ALL = [(spec.name, case) for spec in glue.KERNELS for case in spec.cases]


@pytest.fixture(scope="module")
def device(check_device: Callable[[str], contract.CheckDevice]) -> Iterator[contract.CheckDevice]:
    yield check_device(FAMILY)


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
    [
        ("site_norm", "seven_rows_128"),
        ("site_mid", "all_rows"),
        ("site_up_n8", "rows7"),
        ("site_up_n16", "rows16"),
        ("site_up_n16", "bf16"),
        ("stream_add", "all_rows"),
        ("site_norm", "nonfinite"),
        ("site_up_n8", "nonfinite"),
    ],
)
def test_row_alone_gives_the_bytes_it_gives_among_others(
    device: contract.CheckDevice, kernel: str, name: str
) -> None:
    together = run(device, kernel, find(kernel, name))
    n = find(kernel, name).int("rows")
    turned = run(device, kernel, find(kernel, name, order=",".join(str(n - 1 - i) for i in range(n))))
    for row in {0, n // 2, n - 1}:
        alone = run(device, kernel, find(kernel, name, order=str(row)))
        for output, array in together.items():
            assert raw(alone[output][0]) == raw(array[row]), f"{output} of row {row} alone"
            assert raw(turned[output][n - 1 - row]) == raw(array[row]), (
                f"{output} of row {row} in reverse order"
            )


@pytest.mark.parametrize(
    "dims",
    [
        {"hidden": 128, "rank": 16, "rows": 1},
        {"hidden": 256, "rank": 64, "rows": 7},
        {"hidden": 128, "rank": 512, "rows": 3},
        {"hidden": 128, "rank": 320, "rows": 8, "dtype": "bf16"},
    ],
)
def test_both_widths_of_site_up_agree(device: contract.CheckDevice, dims: dict[str, Any]) -> None:
    narrow = run(device, "site_up_n8", find("site_up_n8", "rows1", **dims))["m"]
    wide = run(device, "site_up_n16", find("site_up_n16", "rows1", **dims))["m"]
    assert raw(narrow) == raw(wide[:8])


def test_stream_add_and_site_norm_update_the_streams_alike(device: contract.CheckDevice) -> None:
    for name in ("all_rows", "nonfinite"):
        case = find("stream_add", name)
        added = run(device, "stream_add", case)["streams"]
        assert raw(run(device, "site_norm", Case(name, {**case.dims, "add": 1}))["streams"]) == raw(added)


def test_site_norm_after_stream_add_gives_the_bytes_of_the_fused_form(device: contract.CheckDevice) -> None:
    fused = run(device, "site_norm", find("site_norm", "all_rows_256"))
    operands = contract.build_operands("site_norm", find("site_norm", "all_rows_256", add=0))
    operands.arrays["streams"] = run(device, "stream_add", find("stream_add", "all_rows"))["streams"]
    operands.expect = lambda got: None
    apart = contract.run_case(device, "site_norm", find("site_norm", "all_rows_256"), 0, operands).outputs
    assert contract.hash_outputs(apart) == contract.hash_outputs(fused)


@pytest.mark.parametrize("kernel", [spec.name for spec in glue.KERNELS])
def test_order_of_lanes_warps_and_blocks_does_not_matter(
    device: contract.CheckDevice, kernel: str, in_any_order: Callable[..., None]
) -> None:
    case = next(case for known, case in ALL if known == kernel and case.int("rows") == 3)
    in_any_order(4, lambda: contract.run_case(device, kernel, case).sha256)


@pytest.mark.parametrize(
    ("kernel", "name", "output", "fault"),
    [
        ("site_norm", "all_rows_256", "rinv", "ulp"),
        ("site_norm", "all_rows_256", "streams", "ulp"),
        ("site_norm", "all_rows_256", "n16", "two_ulps"),
        ("site_norm", "no_add_256", "n16", "swap"),
        ("site_norm", "seven_rows_128", "rinv", "padding"),
        ("site_mid", "real_sizes", "u", "two_ulps"),
        ("site_mid", "real_sizes", "u", "swap"),
        ("site_mid", "real_sizes", "inject", "small"),
        ("site_mid", "wide_rank", "inject", "padding"),
        ("site_up_n8", "rows7", "m", "small"),
        ("site_up_n16", "rows16", "m", "swap"),
        ("site_up_n8", "rows3", "m", "padding"),
        ("stream_add", "all_rows", "streams", "ulp"),
        ("site_up_n16", "bf16", "m", "small"),
    ],
)
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


def plant(x: np.ndarray, fault: str) -> None:
    """Change `x` in place: its first element by ulps or 2^-10, two neighbours, or a padded row."""
    flat = x.reshape(-1)
    if fault in ("ulp", "two_ulps"):
        flat.view(f"u{x.dtype.itemsize}")[0] ^= 1 if fault == "ulp" else 2
    elif fault == "small":
        flat[0] *= np.float32(1 + 2.0**-10)
    elif fault == "swap":
        flat[:2] = flat[1::-1].copy()
    else:
        flat[-1] = 0
