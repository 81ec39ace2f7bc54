"""Which kernels are compared with which: every pair names kernels that exist, every replaced one is met."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flashnext_drv.check import pairs
from flashnext_drv.check.contract import Operands, Ran
from flashnext_drv.check.pairing import Pair, Then, as_it_is, few_rows, follow
from flashnext_drv.errors import ContractError
from flashnext_drv.kernels import catalog
from flashnext_drv.kernels.tables import ROUND

NAMES = {spec.name for spec in catalog.specs()}


def operands(rows: int) -> Operands:
    arrays = {"round": np.array([(rows, rows, 64, 1)], ROUND), "table": np.zeros(2, np.uint64),
              "x": np.arange(3, dtype=np.float32)}
    return Operands(arrays, {"n": 3}, (1, 1, 1), [("table", 8, "x", 0)], ("x",), lambda _: None)


@pytest.mark.parametrize("pair", pairs.PAIRS, ids=lambda pair: f"{pair.kernel}-{pair}")
def test_a_pair_is_of_kernels_that_exist(pair: Pair) -> None:
    sides = [[first, *(one.kernel for one in rest)]
             for first, rest in ((pair.kernel, pair.more), (pair.other, pair.then))]
    for side in sides:
        assert set(side) <= NAMES and len(set(side)) == len(side)
    assert sides[0] != sides[1] and pair.other not in sides[0]


@pytest.mark.parametrize("name", sorted(spec.name for spec in catalog.specs() if spec.replaces))
def test_what_replaces_a_kernel_is_compared_with_it(name: str) -> None:
    spec = catalog.spec(name)
    assert spec.replaces in NAMES and spec.replaces != name
    assert spec.replaces in {pair.last for pair in pairs.pairs_of(spec)}


def test_a_replaced_kernel_with_other_operands_needs_a_pair() -> None:
    lonely = replace(catalog.spec("synth_fill"), replaces="stream_add")
    with pytest.raises(ContractError, match=r"synth_fill is compared.*stream_add takes other operands"):
        pairs.pairs_of(lonely)
    same = replace(catalog.spec("linear_gemv_n16"), name="linear_gemv_other", replaces="linear_gemv_n16")
    assert [(pair.last, pair.turn) for pair in pairs.pairs_of(same)] == [("linear_gemv_n16", as_it_is)]


def test_a_chain_is_told_whole_and_ends_with_its_last_kernel() -> None:
    def no(given: Operands, ran: Ran) -> Operands:
        return given

    pair = Pair("a", "b", as_it_is, more=(Then("c", no),), then=(Then("d", no), Then("e", no)))
    assert str(pair) == "b + d + e" and pair.last == "e"
    assert Pair("a", "b", as_it_is).last == "b"


def test_what_follows_finds_values_as_they_were_left_and_addresses_anew() -> None:
    given = operands(3)
    left = {name: array + array.dtype.type(1) if array.dtype.names is None else array
            for name, array in given.arrays.items()}
    after = follow(given, Ran(given.arrays, left, ("x",)), (5, 1, 1), {"m": 2})
    assert after.arrays["x"].tolist() == [1, 2, 3] and after.arrays["table"].tolist() == [0, 0]
    assert (after.grid, after.scalars, after.relocations) == ((5, 1, 1), {"m": 2}, given.relocations)


@pytest.mark.parametrize(("rows", "picked"), [(0, []), (1, [0]), (3, [0, 1, 2]), (9, [0, 2, 5, 8])])
def test_few_rows_reach_from_the_first_to_the_last(rows: int, picked: list[int]) -> None:
    assert few_rows(operands(rows), 4).tolist() == picked
