"""The smallest whole pack, as pieces that fuzzing can mangle: config, headers, sparse files; and a cubin.

Used by tools/fuzz_targets.py.  What must stay true: unmangled, the pack opens and passes its check; files
hold holes instead of data, so that writing one costs no more than its header.
"""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from flashnext_drv.model.config import ModelConfig
from flashnext_drv.model.header import DTYPE_BYTES
from flashnext_drv.model.inventory import text_needs
from flashnext_drv.model.synth_models import MODELS

__all__ = ["Entry", "base_config", "base_entries", "fresh", "header_of", "ngram_entries", "tiny_cubin",
           "write_file"]

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


def tiny_cubin() -> bytes:
    """A cubin of sm_90 with one kernel "k": 40 registers, 8 stack and 16 shared bytes, block 128, two
    parameters."""
    def sized(attribute: int, data: bytes) -> bytes:
        return struct.pack("<BBH", 4, attribute, len(data)) + data

    info = sized(0x2F, struct.pack("<II", 1, 40)) + sized(0x11, struct.pack("<II", 1, 8))
    own = (sized(0x05, struct.pack("<III", 128, 1, 1)) + struct.pack("<BBH", 2, 0x4C, 1)
           + sized(0x17, struct.pack("<IHHI", 0, 0, 0, 8 << 18))
           + sized(0x17, struct.pack("<IHHI", 0, 1, 8, 4 << 18)))
    names, strings = b"\0", b"\0k\0"
    symbols = bytes(24) + struct.pack("<IBBHQQ", 1, 0x12, 0, 5, 0, 0)
    body, rows = bytearray(bytes(64)), [bytes(64)]
    for name, data, size, link in (
            (".shstrtab", b"", 0, 0), (".strtab", strings, 0, 0), (".symtab", symbols, 0, 2),
            (".nv.info", info, 0, 3), (".text.k", bytes(range(64)), 0, 3), (".nv.info.k", own, 0, 3),
            (".nv.shared.k", b"", 1024 + 16, 0)):
        rows.append(struct.pack("<IIQQQQIIQQ", len(names), 1, 0, 0, len(body), size or len(data), link, 0, 1,
                                0))
        names += name.encode() + b"\0"
        body += data
    rows[1] = struct.pack("<IIQQQQIIQQ", 1, 3, 0, 0, len(body), len(names), 0, 0, 1, 0)
    body += names
    body[:64] = struct.pack("<4sBB10xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 2, 190, 1, 0, 0, len(body), 90 << 8,
                            64, 0, 0, 64, len(rows), 1)
    return bytes(body) + b"".join(rows)


def fresh(path: Path) -> Path:
    """The path with no file there: a file system may wait for the disk where an old one is cut to nothing."""
    path.unlink(missing_ok=True)
    return path


def write_file(path: Path, header: bytes, data: dict[int, bytes], size: int,
               length: int | None = None) -> None:
    """A safetensors file.  length: what its first 8 bytes claim, by default the truth."""
    with open(fresh(path), "wb") as stream:
        claimed = len(header) if length is None else length & (1 << 64) - 1
        stream.write(claimed.to_bytes(8, "little") + header)
        for at, piece in data.items():
            stream.seek(8 + len(header) + at)
            stream.write(piece)
        stream.truncate(8 + len(header) + max(size, 0))
