"""The EXL3 reference against the format's test vectors, bit for bit, and its refusals."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext_drv.ref import exl3

VECTORS = Path(__file__).resolve().parents[1] / "data" / "exl3_vectors"
PAIR_NAMES = [f"{name}_{bits:g}" for name, bits in exl3.PAIRS]


@pytest.fixture(scope="module")
def info() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((VECTORS / "info.json").read_text())
    return loaded


def arrays(name: str) -> Any:
    return np.load(VECTORS / f"{name}.npz", allow_pickle=False)


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("name", exl3.CODEBOOKS)
def test_every_state_of_the_codebook(name: str, info: dict[str, Any]) -> None:
    table = exl3.codebook(name).astype("<f2")
    assert hashlib.sha256(table.tobytes()).hexdigest() == info["codebook_sha256"][name]
    samples = arrays("codebook_samples")
    assert same_bytes(exl3.codebook(name)[samples["states"]], samples[name])


def test_mul1_is_not_two_fp16_roundings() -> None:
    state = np.arange(65536, dtype=np.uint64)
    x = state * np.uint64(0x83DCD12D)
    total = sum(x >> np.uint64(8 * i) & np.uint64(255) for i in range(4)).astype(np.float16)
    total = total + np.float16(1024)
    scale, shift = (np.array([bits], np.uint16).view(np.float16)[0] for bits in (0x1EEE, 0xC931))
    assert int((total * scale + shift != exl3.codebook("mul1")).sum()) == 60326


def test_tile_layout_is_a_bijection_and_as_recorded() -> None:
    tiles, (row, column) = arrays("tiles"), exl3.tile_positions()
    assert (row == tiles["row"]).all() and (column == tiles["col"]).all()
    assert len(set(zip(row.tolist(), column.tolist(), strict=True))) == 256


def test_there_are_27_pairs() -> None:
    assert len(set(exl3.PAIRS)) == 27


@pytest.mark.parametrize("pair", PAIR_NAMES)
def test_tile_states_and_values(pair: str) -> None:
    tiles = arrays("tiles")
    words, name = tiles[f"{pair}.words"], pair.split("_")[0]
    assert same_bytes(exl3.tile_states(words), tiles[f"{pair}.states"])
    assert same_bytes(exl3.tile_values(words, name), tiles[f"{pair}.values"])


@pytest.mark.parametrize("pair", PAIR_NAMES)
def test_encoding_is_the_inverse_of_decoding(pair: str) -> None:
    bits = float(pair.split("_")[1])
    words = np.random.default_rng(9).integers(-32768, 32768, (3, int(16 * bits)), dtype=np.int16)
    assert same_bytes(exl3.encode_tile(exl3.tile_states(words), bits), words)


@pytest.mark.parametrize("i", range(4))
def test_linear_weights_and_outputs(i: int) -> None:
    data = arrays("linears")
    parts = {key.split(".")[1]: data[key] for key in data.files if key.startswith(f"lin{i}.")}
    linear = exl3.Linear.from_parts(parts)
    assert same_bytes(linear.w_q, parts["W_q"])
    np.testing.assert_allclose(linear.dense(), parts["W"], rtol=0, atol=1e-12)
    x = parts["x"].astype(np.float64)
    y = linear(x)
    np.testing.assert_allclose(y, parts["y"], rtol=0, atol=1e-11)
    bias = 0 if linear.bias is None else linear.bias.astype(np.float64)
    np.testing.assert_allclose(x @ linear.dense() + bias, y, rtol=0, atol=1e-11)
    assert same_bytes(exl3.rotated_input_fp16(parts["x"], linear.suh), parts["x_rot_fp16"])


@pytest.mark.parametrize("bits", range(1, 9))
def test_ngram_rows(bits: int) -> None:
    data = arrays("ngram_rows")
    packed = data[f"K{bits}.packed"]
    assert exl3.row_width(packed.shape[1], 160) == bits
    states = exl3.row_states(packed, 160)
    assert same_bytes(states, data[f"K{bits}.states"])
    full, half = exl3.ngram_rows(packed, data["head_bias"][data[f"K{bits}.head"]])
    assert same_bytes(full, data[f"K{bits}.value_f32"]) and same_bytes(half, data[f"K{bits}.value_fp16"])
    symbols = states & ((1 << bits) - 1)
    assert same_bytes(exl3.encode_row(symbols, bits, packed[:, 0].view(np.float16)), packed)


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
def test_embedding_rows(bits: int) -> None:
    data = arrays("embed_rows")
    got = exl3.embed_rows(data[f"K{bits}.trellis"], data[f"K{bits}.signs"])[:, :640]
    assert same_bytes(np.ascontiguousarray(got), data[f"K{bits}.value_fp16"])


def test_broken_groups_are_refused() -> None:
    data = arrays("linears")
    good = {key.split(".")[1]: data[key] for key in data.files if key.startswith("lin0.")}
    with pytest.raises(ValueError, match="both codebook markers"):
        exl3.Linear.from_parts({**good, "mcg": np.int32(exl3.MARKERS["mcg"] - 2**32)})
    with pytest.raises(ValueError, match="marker mul1"):
        exl3.Linear.from_parts({**good, "mul1": np.int32(5)})
    with pytest.raises(ValueError, match=r"width 9\.0"):
        exl3.Linear.from_parts({**good, "trellis": np.zeros((16, 24, 144), np.int16)})
    half_width = {key: value for key, value in good.items() if key != "mul1"}
    with pytest.raises(ValueError, match="codebook 3inst"):
        exl3.Linear.from_parts({**half_width, "trellis": np.zeros((16, 24, 40), np.int16)})
    with pytest.raises(ValueError, match="do not fit"):
        exl3.Linear.from_parts({**good, "svh": good["suh"]})
    with pytest.raises(ValueError, match="no ring"):
        exl3.row_width(12, 160)
