"""The same tensors stored in other legal forms give the same bytes of logits; plain n-gram rows their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext_drv.engine.engine import Engine, Limits
from flashnext_drv.model.pack import Pack
from flashnext_drv.ref.choices import median_error
from flashnext_drv.ref.files import FolderWeights
from flashnext_drv.ref.model import Dims, Model
from flashnext_drv.ref.rounding import CONTRACT_FP32

pytestmark = pytest.mark.sim
NGRAM = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
IDS = [3, 7, 250, 12, 12, 400, 9, 77]
Stored = tuple[str, list[int], bytes]


@pytest.fixture(scope="module")
def tensors(micro: Path) -> dict[str, Stored]:
    """Every tensor of the golden micro pack: dtype, shape, bytes."""
    pack = Pack.open(micro)
    return {name: (t.dtype, list(t.shape), pack.read(name).tobytes()) for name, t in pack.tensors.items()}


@pytest.fixture
def logits(tmp_path: Path, micro: Path, device: str) -> Callable[..., np.ndarray]:
    """logits(tensors, pad): of IDS, from a pack of one file whose data starts `pad` bytes later."""

    def run(tensors: dict[str, Stored], pad: int = 0) -> np.ndarray:
        write(tmp_path / "pack", micro, tensors, pad)
        with Engine.open(tmp_path / "pack", Limits(context_tokens=64, graph=False), device=device) as engine:
            return engine.logits(IDS)

    return run


def write(folder: Path, micro: Path, tensors: dict[str, Stored], pad: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((micro / "config.json").read_bytes())
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + pad)
    data = b"".join(stored[2] for stored in tensors.values())
    (folder / "all.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def signs(words: np.ndarray) -> bytes:
    """Sign words of 16 inputs each as f16 scales of -1 and +1."""
    bits = words.view(np.uint16)[:, None] >> np.arange(16, dtype=np.uint16) & 1
    return np.where(bits.reshape(-1) == 1, -1, 1).astype(np.float16).tobytes()


def test_one_file_at_odd_offsets(
    tensors: dict[str, Stored], logits: Callable[..., np.ndarray], open_micro: Callable[..., Engine]
) -> None:
    with open_micro(graph=False) as engine:
        published = engine.logits(IDS)
    assert logits(tensors, pad=5).tobytes() == published.tobytes()


def test_ngram_table_whole_or_in_shards(
    tensors: dict[str, Stored], logits: Callable[..., np.ndarray]
) -> None:
    sharded = logits(tensors).tobytes()
    parts = [f"{NGRAM}.shard_{i}.trellis" for i in range(2)]
    shape = [sum(tensors[name][1][0] for name in parts), tensors[parts[0]][1][1]]
    whole = {name: stored for name, stored in tensors.items() if name not in parts}
    whole[f"{NGRAM}.trellis"] = ("I16", shape, b"".join(tensors[name][2] for name in parts))
    assert logits(whole).tobytes() == sharded


def test_legacy_sign_words(tensors: dict[str, Stored], logits: Callable[..., np.ndarray]) -> None:
    """Of a dense linear and of an expert's projection."""
    new, old = dict(tensors), dict(tensors)
    layers = "model.language_model.layers"
    for stem in (f"{layers}.3.self_attn.q_proj", f"{layers}.0.mlp.experts.5.up_proj"):
        for part in ("su", "sv"):
            (size,) = tensors[f"{stem}.{part}h"][1]
            words = np.random.default_rng(size).integers(-32768, 32768, size // 16, np.int16)
            new[f"{stem}.{part}h"] = ("F16", [size], signs(words))
            del old[f"{stem}.{part}h"]
            old[f"{stem}.{part}"] = ("I16", [size // 16], words.tobytes())
    changed = logits(new).tobytes()
    assert logits(old).tobytes() == changed != logits(tensors).tobytes()


def test_plain_matrices_where_packs_have_exl3(
    tensors: dict[str, Stored], logits: Callable[..., np.ndarray], micro: Path, tmp_path: Path
) -> None:
    """Every other kind of linear as f16 or bf16, against the reference on the same pack."""
    plain, pack, bf16 = dict(tensors), Pack.open(micro), False
    layers = "model.language_model.layers"
    parts = ("0.linear_attn.in_proj_qkv", "0.linear_attn.in_proj_z", "0.linear_attn.out_proj",
             "3.self_attn.q_proj", "3.self_attn.k_proj", "3.self_attn.v_proj", "3.self_attn.o_proj",
             "3.self_attn.indexer.index_qk_proj")  # fmt: skip
    for stem in (*(f"{layers}.{part}" for part in parts), "lm_head"):
        info = pack.linear(stem)
        for name in (*info.parts.values(), f"{stem}.{info.codebook}"):
            del plain[name]
        values = np.random.default_rng(info.n).standard_normal((info.n, info.k)) / np.sqrt(info.k)
        words = (values.astype("<f4").view("<u4") >> 16).astype("<u2") if bf16 else values.astype("<f2")
        plain[f"{stem}.weight"] = ("BF16" if bf16 else "F16", [info.n, info.k], words.tobytes())
        bf16 = not bf16
    got = logits(plain)
    weights = FolderWeights(tmp_path / "pack")
    model = Model(Dims.from_config(weights.config()), weights, CONTRACT_FP32)
    want = model.step(IDS, model.new_state()).logits
    assert median_error(got, want) < 0.001 * np.abs(want).max()


def test_plain_bf16_ngram_table(
    tensors: dict[str, Stored], logits: Callable[..., np.ndarray], micro: Path, tmp_path: Path
) -> None:
    """Rows without bias, against the reference on the same pack."""
    plain = {name: stored for name, stored in tensors.items() if not name.startswith(f"{NGRAM}.shard_")}
    del plain[f"{NGRAM}.head_bias"]
    values = np.random.default_rng(4).standard_normal((896, 160), np.float32)
    plain[f"{NGRAM}.weight"] = ("BF16", [896, 160], (values.view(np.uint32) >> 16).astype("<u2").tobytes())
    got = logits(plain)
    weights = FolderWeights(tmp_path / "pack")
    model = Model(Dims.from_config(weights.config()), weights, CONTRACT_FP32)
    want = model.step(IDS, model.new_state()).logits
    assert median_error(got, want) < 0.00075 < median_error(got, logits(tensors))
