"""Tensor-core tiles bit for bit against the integer model: every family of operands, both generations, any
order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from flashnext_drv.check import contract, mma_model
from flashnext_drv.kernels import probe
from flashnext_drv.kernels.spec import Case
from flashnext_drv.sim import control

pytestmark = pytest.mark.sim
SPECS = (probe.MMA_TILES_F16, probe.MMA_TILES_BF16)
ALL = [(spec.name, case) for spec in SPECS for case in spec.cases]
IDS = [f"{k}-{c.name}" for k, c in ALL]
Give = Callable[[str], contract.CheckDevice]


@pytest.mark.parametrize(("kernel", "case"), ALL, ids=IDS)
def test_case_meets_the_model(check_device: Give, kernel: str, case: Case, case_seed: int) -> None:
    contract.run_case(check_device("probe"), kernel, case, case_seed)


@pytest.mark.parametrize(("kernel", "case"), ALL, ids=IDS)
def test_simulator_follows_the_generation_it_is_told(check_device: Give, kernel: str, case: Case) -> None:
    if not control.attached():
        pytest.skip("a real device has one generation")
    bf16, device = kernel.endswith("bf16"), check_device("probe")
    a, b, c = mma_model.operands(str(case["family"]), bf16, case.int("n"), 1)
    try:
        for generation, model in (("sm_90", mma_model.SM90), ("sm_80", mma_model.SM80)):
            control.set_generation(generation)
            found = contract.run_case(device, kernel, case, 1).outputs["d"].view(np.uint32)
            assert (found == mma_model.mma(a, b, c, bf16, model).view(np.uint32)).all(), generation
    finally:
        control.set_generation("sm_90")


@pytest.mark.parametrize("kernel", [spec.name for spec in SPECS])
def test_order_of_lanes_does_not_matter(
    check_device: Give, kernel: str, in_any_order: Callable[..., None]
) -> None:
    case = next(c for k, c in ALL if k == kernel and c.name == "normal")
    in_any_order(4, lambda: contract.run_case(check_device("probe"), kernel, case).sha256)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("change", [{"fraction": 24}, {"fraction": 26}, {"products": 8}, {"products": 4}])
def test_another_model_would_be_seen(bf16: bool, change: dict[str, int]) -> None:
    a, b, c = mma_model.operands("normal", bf16, 24, 0)
    right, wrong = (
        mma_model.mma(a, b, c, bf16, m) for m in (mma_model.SM90, replace(mma_model.SM90, **change))
    )
    assert (right.view(np.uint32) != wrong.view(np.uint32)).mean() > 0.01


def test_model_is_exact_on_small_integers() -> None:
    a = (np.arange(256).reshape(1, 16, 16) % 7 - 3).astype(np.float16)
    b = (np.arange(128).reshape(1, 8, 16) % 5 - 2).astype(np.float16)
    c = np.arange(128, dtype=np.float32).reshape(1, 16, 8)
    found = mma_model.mma(a.view(np.uint16), b.view(np.uint16), c, False, mma_model.SM90)
    wanted = a[0].astype(np.float64) @ b[0].astype(np.float64).T + c[0]
    assert (found[0] == wanted).all()
