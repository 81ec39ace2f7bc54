"""An operand as rows in fragment order and as a tile image: the same bytes, in two places."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from flashnext_drv.check import contract
from flashnext_drv.check.operands import from_fragment, from_tiles, is_tiles, to_tiles
from flashnext_drv.kernels import catalog
from flashnext_drv.kernels.spec import Case

pytestmark = pytest.mark.sim
FORMS = [(spec.name, case) for spec in catalog.specs() for case in spec.cases
         if case.dims.get("tiled") and spec.name in
         ("site_norm", "site_mid", "ngram_rows", "gdn_gate_input")]


@pytest.fixture(scope="module")
def device(check_device: Callable[[str], contract.CheckDevice]) -> Iterator[Callable[[str], object]]:
    yield check_device


@pytest.mark.parametrize(("kernel", "case"), FORMS, ids=[f"{k}-{c.name}" for k, c in FORMS])
def test_tile_image_holds_the_bytes_of_the_rows(
    device: Callable[[str], contract.CheckDevice], kernel: str, case: Case
) -> None:
    opened = device(contract.family_of(kernel))
    image = contract.run_case(opened, kernel, case).outputs
    rows = contract.run_case(opened, kernel, Case(case.name, {**case.dims, "tiled": 0})).outputs
    n = int(contract.build_operands(kernel, case).arrays["round"]["n_rows"][0])
    compared = 0
    for name, array in image.items():
        if not is_tiles(array):
            assert array.tobytes() == rows[name].tobytes(), name
            continue
        want = from_fragment(rows[name])[:n]
        got = from_tiles(array)[:n, : want.shape[1]]
        # rows may be padded: what follows the inputs is poison, which is NaN
        k = int(np.isnan(want[0]).argmax()) if np.isnan(want[0]).any() else want.shape[1]
        assert k and got[:, :k].tobytes() == want[:, :k].tobytes(), name
        compared += 1
    assert compared


@pytest.mark.parametrize(("rows", "k"), [(1, 16), (64, 64), (65, 80), (130, 128)])
def test_tile_image_and_back(rows: int, k: int) -> None:
    values = np.arange(rows * k, dtype=np.uint16).reshape(rows, k)
    image = to_tiles(values)
    assert image.shape == (-(-rows // 64), -(-k // 64), 64, 64) and is_tiles(image)
    assert (from_tiles(image)[:rows, :k] == values).all()
    row, inner = rows - 1, k - 1          # the place that fn_tile_at gives
    at = ((row >> 6) * image.shape[1] + (inner >> 6)) * 4096 + (row & 63) * 64
    at += (((inner >> 3 & 7) ^ (row & 7)) << 3) + (inner & 7)
    assert image.reshape(-1)[at] == values[row, inner]
