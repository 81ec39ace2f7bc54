"""Arguments and grids at the edges of what a launch can take, without a device."""

from __future__ import annotations

import numpy as np
import pytest

from flashnext_drv.errors import ContractError
from flashnext_drv.kernels import bind, catalog
from flashnext_drv.kernels.spec import F32, I32, PTR, U32, U64, Arg

pytestmark = pytest.mark.host
SPEC = catalog.spec("stream_add")
EDGES = [(PTR, 0, 2**64 - 1, np.uint64), (U64, 0, 2**64 - 1, np.uint64), (U32, 0, 2**32 - 1, np.uint32),
         (I32, -(2**31), 2**31 - 1, np.int32)]


@pytest.mark.parametrize(("kind", "low", "high", "dtype"), EDGES)
def test_integers_are_taken_to_their_edges(kind: str, low: int, high: int, dtype: type) -> None:
    arg = Arg("v", kind, "", "r" if kind == PTR else "")
    for value in (low, high):
        packed = bind._value(SPEC, arg, value)
        assert type(packed) is dtype and int(packed) == value
    for value in (low - 1, high + 1):
        with pytest.raises(ContractError, match=f"argument v of kernel stream_add is outside {kind}"):
            bind._value(SPEC, arg, value)
    assert int(bind._value(SPEC, arg, np.uint8(7))) == 7


def test_floats_are_rounded_once() -> None:
    arg = Arg("v", F32, "")
    assert bind._value(SPEC, arg, 0.1) == np.float32(0.1) and bind._value(SPEC, arg, 3) == np.float32(3)
    for wrong in (True, "1"):
        with pytest.raises(ContractError, match="is no number"):
            bind._value(SPEC, arg, wrong)  # type: ignore[arg-type]


def test_floats_stop_where_f32_does_and_infinity_is_one() -> None:
    arg = Arg("v", F32, "")
    largest = float(np.finfo(np.float32).max)
    for value in (largest, -largest, float("inf"), -float("inf")):
        assert float(bind._value(SPEC, arg, value)) == value  # type: ignore[arg-type]
    assert np.isnan(bind._value(SPEC, arg, float("nan")))
    for value in (bind._F32_LIMIT, -bind._F32_LIMIT, 1e39, 10**400):
        with pytest.raises(ContractError, match="outside f32"):
            bind._value(SPEC, arg, value)


@pytest.mark.parametrize("grid", [1, (1,), (2, 3), (2**31 - 1, 65535, 65535)])
def test_grids_are_filled_up_with_ones(grid: int | tuple[int, ...]) -> None:
    given = (grid,) if isinstance(grid, int) else grid
    assert bind._grid(SPEC, grid) == (*given, 1, 1)[:3]


@pytest.mark.parametrize("grid", [0, -1, 2**31, (1, 0), (1, 65536), (1, 1, 65536), (1, 1, 0), (1, 1, 1, 1)])
def test_impossible_grids_are_refused(grid: int | tuple[int, ...]) -> None:
    with pytest.raises(ContractError, match="grid of kernel stream_add is not possible"):
        bind._grid(SPEC, grid)
