"""The smallest whole pack, as pieces that fuzzing can mangle: config, headers, and sparse files.

Used by tools/fuzz_targets.py.  What must stay true: unmangled, the pack opens and passes its check; files
hold holes instead of data, so that writing one costs no more than its header.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from flashnext_drv.model.config import ModelConfig
from flashnext_drv.model.header import DTYPE_BYTES
from flashnext_drv.model.inventory import text_needs
from flashnext_drv.model.synth_models import MODELS

__all__ = ["Entry", "base_config", "base_entries", "header_of", "ngram_entries", "write_file"]

# (dtype, shape, bytes at its start that are not zero)
Entry = tuple[str, list[int], bytes]
_TABLE = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"


def base_config() -> dict[str, Any]:
    """config.json of a model with one DeltaNet and one attention layer and two experts."""
    raw: dict[str, Any] = json.loads(json.dumps(MODELS["micro"].config_json(None)))
    raw["text_config"].update(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], num_experts=2,
        num_experts_per_tok=1, mtp_num_hidden_layers=0, vocab_size=128, ngram_vocab_size_base=31,
        linear_num_value_heads=1, num_attention_heads=2, num_key_value_heads=1)
    return raw


def base_entries(config: ModelConfig) -> dict[str, Entry]:
    """Every tensor but the n-gram table's: linears as 2-bit EXL3, some with the mul1 marker."""
    out: dict[str, Entry] = {}
    for i, need in enumerate(text_needs(config)):
        if not need.k:
            out[need.name] = ("F16", list(need.shape), b"")
        elif need.plain or need.n % 128 or need.k % 128:
            out[f"{need.name}.weight"] = ("F16", [need.n, need.k], b"")
        else:
            out[f"{need.name}.trellis"] = ("I16", [need.k // 16, need.n // 16, 32], b"")
            out[f"{need.name}.suh"] = ("F16", [need.k], b"")
            out[f"{need.name}.svh"] = ("F16", [need.n], b"")
            if i % 2:
                out[f"{need.name}.mul1"] = ("I32", [1], (0x83DCD12D).to_bytes(4, "little"))
    return out


def ngram_entries(config: ModelConfig, n_shards: int = 2) -> dict[str, Entry]:
    """The table in shards, its stored constants right, and a bias."""
    constants = config.ngram()
    rows, dim = constants.rows // n_shards, config.ngram_row_dim
    out: dict[str, Entry] = {f"{_TABLE}.shard_{i}.trellis": ("I16", [rows, 1 + 2 * (dim // 16)], b"")
                             for i in range(n_shards)}
    for name, values in (("head_offsets", constants.offsets), ("head_vocab_sizes", constants.sizes),
                         ("layer_multipliers", constants.multipliers)):
        out[f"{_TABLE}.{name}"] = ("I64", [len(values)], np.array(values, "<i8").tobytes())
    out[f"{_TABLE}.head_bias"] = ("F16", [config.n_ngram_heads, dim], b"")
    return out


def header_of(entries: dict[str, Entry]) -> tuple[dict[str, Any], dict[int, bytes], int]:
    """(safetensors header, bytes by offset in the data, data bytes) of `entries`, one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data: dict[int, bytes] = {}
    at = 0
    for name, (dtype, shape, first) in entries.items():
        size = prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        if first:
            data[at] = first
        at += size
    return header, data, at


def write_file(path: Path, header: bytes, data: dict[int, bytes], size: int,
               length: int | None = None) -> None:
    """A safetensors file.  length: what its first 8 bytes claim, by default the truth."""
    with open(path, "wb") as stream:
        claimed = len(header) if length is None else length & (1 << 64) - 1
        stream.write(claimed.to_bytes(8, "little") + header)
        for at, piece in data.items():
            stream.seek(8 + len(header) + at)
            stream.write(piece)
        stream.truncate(8 + len(header) + max(size, 0))
