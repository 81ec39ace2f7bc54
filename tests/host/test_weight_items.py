"""What a linear places in memory, name by name and byte by byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashnext_drv.errors import CheckpointError
from flashnext_drv.model import ngram
from flashnext_drv.model.config import ModelConfig
from flashnext_drv.model.header import Tensor
from flashnext_drv.model.linears import Member
from flashnext_drv.model.pack import Pack
from flashnext_drv.state.lines import layer_line_bytes, part_bytes
from flashnext_drv.state.weights import linear_items

pytestmark = pytest.mark.host
MICRO = Path(__file__).parents[1] / "data" / "exl3_micro" / "pack"


@pytest.fixture(scope="module")
def pack() -> Pack:
    return Pack.open(MICRO)


def test_an_exl3_linear_places_trellis_and_scales(pack: Pack) -> None:
    info = pack.experts(0)[0][0]
    items = {item.name.removeprefix(f"{info.prefix}."): item for item in linear_items(pack, info)}
    assert {name: item.size_bytes for name, item in items.items()} == {
        "data": pack.tensor(info.parts["trellis"]).size, "suh": 2 * info.k, "svh": 2 * info.n}
    assert items["data"].tensor == info.parts["trellis"] and items["data"].make is None
    for part in ("suh", "svh"):
        make = items[part].make
        assert make is not None and (make() == pack.scale(info, part)).all()


def test_a_plain_linear_is_padded_to_whole_tiles(pack: Pack) -> None:
    name = next(n for n in pack.tensors if n.endswith(("hc_gate_down.weight", ".gate.weight")))
    info = pack.linear(name.removesuffix(".weight"))
    assert not info.is_exl3
    (item,) = linear_items(pack, info)
    assert item.size_bytes == -(-info.n // 16) * 16 * info.k * 2 and item.make is not None
    assert np.asarray(item.make()).nbytes == item.size_bytes


@pytest.mark.parametrize(("more_k", "more_n"), [(0, 0), (16, 0), (0, 16)])
def test_a_linear_of_another_shape_than_the_model_says(pack: Pack, more_k: int, more_n: int) -> None:
    info = pack.experts(0)[0][0]
    member = Member(info.prefix, info.k + more_k, info.n + more_n)
    if not more_k and not more_n:
        assert len(list(linear_items(pack, info, member))) == 3
        return
    with pytest.raises(AssertionError, match=f"{info.prefix} is {info.k} x {info.n}, the model says"):
        list(linear_items(pack, info, member))


def test_a_line_is_as_long_as_its_parts(pack: Pack) -> None:
    expert = pack.experts(0)[0]
    sizes = [part_bytes(pack, info, part) for info in expert for part in ("trellis", "suh", "svh")]
    gate = expert[0]
    assert sizes[:3] == [pack.tensor(gate.parts["trellis"]).size, 2 * gate.k, 2 * gate.n]
    assert layer_line_bytes(pack, 0) >= sum(-(-size // 256) * 256 for size in sizes)
    parts = ("trellis", "suh", "svh")
    longest = max(sum(-(-part_bytes(pack, info, part) // 256) * 256 for info in one for part in parts)
                  for one in pack.experts(0))
    assert layer_line_bytes(pack, 0) == longest


def test_a_tensor_the_pack_lacks_is_named(pack: Pack) -> None:
    with pytest.raises(CheckpointError, match="tensor is missing") as caught:
        pack.tensor("no.such.weight")
    assert caught.value.tensor == "no.such.weight" and "*.safetensors" in str(caught.value)


@pytest.mark.parametrize("bits", range(10))
def test_ngram_rows_have_one_to_eight_bits_a_value(bits: int) -> None:
    config = ModelConfig.load(MICRO)
    assert config.ngram_row_dim == 160
    tensor = Tensor("t.trellis", MICRO, "I16", (100, 1 + bits * 10), 0, 0)
    if 1 <= bits <= 8:
        assert ngram._codec(tensor, config) == (bits, 2 * (1 + bits * 10))
        return
    with pytest.raises(CheckpointError, match="impossible width") as caught:
        ngram._codec(tensor, config)
    assert caught.value.bits == bits
