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


def one_special(bf16: bool, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tiles with one infinity or NaN each: in a row, a column or an accumulator.  Some columns are zeros."""
    a, b, c = mma_model.operands("normal", bf16, n, 1)
    b[:, ::3] = 0
    specials = (0x7F80, 0xFF80, 0x7FC0, 0xFFC1) if bf16 else (0x7C00, 0xFC00, 0x7E00, 0xFE01)
    for i in range(n):
        row, col, k, special = 5 * i % 16, 3 * i % 8, 7 * i % 16, specials[i // 3 % 4]
        if i % 3 == 0:
            a[i, row, k] = special
        elif i % 3 == 1:
            b[i, col, k] = special
        else:
            c[i, row, col] = (np.inf, -np.inf, np.nan, -np.nan)[i // 3 % 4]
    return a, b, c


@pytest.mark.parametrize("kernel", [spec.name for spec in SPECS])
def test_what_is_no_number_spoils_its_own_row_or_column(
    check_device: Give, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    case = next(c for k, c in ALL if k == kernel and c.name == "nans")
    a, b, c = one_special(kernel.endswith("bf16"), 24)
    monkeypatch.setattr(mma_model, "operands", lambda *_: (a, b, c))
    d = contract.run_case(check_device("probe"), kernel, case).outputs["d"]
    bad = (~np.isfinite(d)).sum((1, 2))
    assert set(bad[0::3]) == {8} and set(bad[1::3]) == {16} and set(bad[2::3]) == {1}


@pytest.mark.parametrize("kernel", [spec.name for spec in SPECS])
@pytest.mark.parametrize("generation", ["sm_90", "sm_80"])
def test_columns_that_repeat_the_first_one(
    check_device: Give, monkeypatch: pytest.MonkeyPatch, kernel: str, generation: str
) -> None:
    """Alike in both operands, or but for one element, one accumulator or the sign of a zero."""
    if not control.attached():
        pytest.skip("a real device has one generation")
    case = next(c for k, c in ALL if k == kernel and c.name == "normal")
    bf16, n = kernel.endswith("bf16"), case.int("n")
    a, b, c = mma_model.operands("normal", bf16, n, 1)
    b[:], c[:] = b[:, :1], c[:, :, :1]
    for i in range(n):
        b[i, 1, 5 * i % 16] ^= 1 << i % 16
        c.view(np.uint32)[i, 7 * i % 16, 2] ^= 1 << i % 32
        b[i, 3, i % 16] = b[i, 0, i % 16] if i % 2 else 0
    b[::4, :, 3], b[::4, 4, 3] = 0, 0x8000
    c[1::4, :, :], c[1::4, 4, 5] = 0, -0.0
    b[2::4, :5] = 0
    monkeypatch.setattr(mma_model, "operands", lambda *_: (a, b, c))
    try:
        control.set_generation(generation)
        found = contract.run_case(check_device("probe"), kernel, case).outputs["d"].view(np.uint32)
    finally:
        control.set_generation("sm_90")
    model = mma_model.SM90 if generation == "sm_90" else mma_model.SM80
    assert (found == mma_model.mma(a, b, c, bf16, model).view(np.uint32)).all()
    alike = (found == found[:, :, :1]).all(1)[np.arange(n) % 4 != 2]
    assert alike[:, 6:].all() and (~alike[:, 1:3]).sum(0).min() > n // 4


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
