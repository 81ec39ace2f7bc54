"""The n-gram table of a pack: where its rows are, how they are coded, and its hash constants.

Called by pack (`ngram()`, `check()`).  What must stay true: rows are numbered over all shards by shard
number, and the constants that leave here equal both what the pack stores and the formula.

Source: exl3.md section 9 and model.md section 7 of the format notes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from .config import ModelConfig
from .header import Tensor

__all__ = ["BF16_ROWS", "NgramInfo", "Source", "ngram_info"]

BF16_ROWS: Final = "bf16"
_TABLE: Final = re.compile(r"(?:^|\.)ngram_embedding\.(?:shard_([0-9]{1,9})\.)?(trellis|weight)$")
_LAYER: Final = re.compile(r"\.layers\.([0-9]{1,9})\.ple\.")
# What the constants are called beside an EXL3 table, and beside a plain one.
_CONSTANTS: Final[Mapping[str, tuple[str, ...]]] = {
    "head_offsets": ("ngram_embedding.head_offsets", "ngram_heads_offsets"),
    "head_sizes": ("ngram_embedding.head_vocab_sizes", "ngram_heads_vocab_sizes"),
    "multipliers": ("ngram_embedding.layer_multipliers", "layer_multipliers"),
    "head_bias": ("ngram_embedding.head_bias",),
}


@dataclass(frozen=True)
class NgramInfo:
    """The table.  rows: over all sources.  row_bytes: of one stored row.

    codec: bits of the EXL3 row code, 1..8, or "bf16" for plain rows.  head_bias: tensor name, f16 (heads,
    row_dim), or None.  head_offsets, head_sizes (heads,) i64, multipliers (ngram_size,) i64, host.
    sources: (tensor name, first row, rows), rising, without gaps.
    """

    rows: int
    row_bytes: int
    row_dim: int
    codec: int | str
    head_bias: str | None
    head_offsets: npt.NDArray[np.int64]
    head_sizes: npt.NDArray[np.int64]
    multipliers: npt.NDArray[np.int64]
    sources: tuple[tuple[str, int, int], ...]

    @property
    def bits(self) -> int:
        """Bits a value in the EXL3 row code; 0 for plain rows, as the kernels count."""
        return self.codec if isinstance(self.codec, int) else 0

    def rows_of(
        self, token: npt.NDArray[Any], prev1: npt.NDArray[Any], prev2: npt.NDArray[Any], eos: int
    ) -> npt.NDArray[np.int64]:
        """Table rows that tokens name, (n, heads) i64: what kernel ngram_rows hashes.

        token, prev1, prev2: (n,) ids and the two before each, eos where the sequence has none.
        """
        n_heads = len(self.head_sizes)
        m0, m1, m2 = self.multipliers.astype(np.uint64)
        before = np.where(prev1 == eos, eos, prev2)
        second = token.astype(np.uint64) * m0 ^ prev1.astype(np.uint64) * m1
        third = second ^ before.astype(np.uint64) * m2
        mixed = np.empty((len(token), n_heads), np.int64)
        mixed[:, : n_heads // 2] = second.view(np.int64)[:, None]
        mixed[:, n_heads // 2 :] = third.view(np.int64)[:, None]
        found: npt.NDArray[np.int64] = mixed % self.head_sizes + self.head_offsets
        return found


class Source(Protocol):
    """What a pack offers here."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...
    @property
    def config(self) -> ModelConfig: ...
    def read(self, name: str) -> npt.NDArray[Any]: ...


def ngram_info(pack: Source, i_ple: int = 0) -> NgramInfo:
    """Find and check the table of the i_ple-th PLE layer.  Raises CheckpointError."""
    config = pack.config
    i_layer = config.ple_layers[i_ple]
    names = [
        n
        for n in pack.tensors
        if ("ngram_embedding." in n or ".ple_embedding." in n) and _of_layer(n, i_layer, i_ple)
    ]
    shards = _shards(pack, names, i_layer)
    first = shards[0]
    codec, row_bytes = _codec(first, config)
    sources: list[tuple[str, int, int]] = []
    at = 0
    for i, tensor in enumerate(shards):
        if (tensor.dtype, tensor.shape[1:]) != (first.dtype, first.shape[1:]):
            raise _wrong(
                tensor, f"the first shard has {first.dtype} {list(first.shape)}", "n-gram shards differ"
            )
        if tensor.shape[0] > first.shape[0] or (tensor.shape[0] < first.shape[0] and i + 1 < len(shards)):
            raise _wrong(
                tensor, f"every shard but the last must have {first.shape[0]} rows", "n-gram shards differ"
            )
        sources.append((tensor.name, at, tensor.shape[0]))
        at += tensor.shape[0]
    constants = _constants(pack, names, i_ple)
    needed = int(constants["head_offsets"][-1] + constants["head_sizes"][-1])
    if at < needed:
        raise CheckpointError(
            "n-gram table is too short",
            file=str(first.file),
            tensor=first.name,
            rows=at,
            because=f"its heads reach to row {needed}",
            do="fetch every shard of the table",
        )
    bias = _find(names, "head_bias")
    if (bias is None) != (codec == BF16_ROWS):
        raise CheckpointError(
            "n-gram table and head_bias do not belong together",
            file=str(first.file),
            tensor=first.name,
            head_bias=bias or "missing",
            because="trellis rows need a head_bias, plain rows have none",
            do="fetch ngram_embedding.safetensors again",
        )
    if bias is not None:
        tensor = pack.tensors[bias]
        if tensor.dtype != "F16" or tensor.shape != (config.n_ngram_heads, config.ngram_row_dim):
            raise _wrong(tensor, f"expected F16 [{config.n_ngram_heads}, {config.ngram_row_dim}]")
    return NgramInfo(
        at,
        row_bytes,
        config.ngram_row_dim,
        codec,
        bias,
        constants["head_offsets"],
        constants["head_sizes"],
        constants["multipliers"],
        tuple(sources),
    )


def _of_layer(name: str, i_layer: int, i_ple: int) -> bool:
    found = _LAYER.search(name)
    return int(found.group(1)) == i_layer if found else i_ple == 0


def _shards(pack: Source, names: list[str], i_layer: int) -> list[Tensor]:
    """The table's tensors in the order of their shard number."""
    whole: list[Tensor] = []
    numbered: dict[int, Tensor] = {}
    for name in names:
        found = _TABLE.search(name)
        if found is None:
            continue
        tensor = pack.tensors[name]
        if found.group(1) is None:
            whole.append(tensor)
            continue
        i_shard = int(found.group(1))
        if i_shard in numbered:
            other = numbered[i_shard]
            raise CheckpointError(
                "n-gram shard is stored twice",
                tensor=name,
                other=other.name,
                file=str(tensor.file),
                second_file=str(other.file),
                do="keep one of the two",
            )
        numbered[i_shard] = tensor
    if len(whole) + bool(numbered) > 1:
        shown = [t.name for t in whole] + [numbered[i].name for i in sorted(numbered)[:1]]
        raise CheckpointError("n-gram table is stored twice", tensors=shown, do="keep one layout")
    out = whole or [numbered[i] for i in sorted(numbered)]
    if not out:
        raise CheckpointError(
            "n-gram table is missing",
            layer=i_layer,
            because="no tensor named ngram_embedding.*trellis or .*weight",
            do="fetch ngram_embedding.safetensors; it is not listed in the index",
        )
    n_missing = max(numbered, default=-1) + 1 - len(numbered)
    if n_missing:
        absent = (i for i in range(max(numbered)) if i not in numbered)
        raise CheckpointError(
            "n-gram shards are missing",
            layer=i_layer,
            shards=list(islice(absent, 8)),
            n_missing=n_missing,
            do="fetch ngram_embedding.safetensors again",
        )
    return out


def _codec(tensor: Tensor, config: ModelConfig) -> tuple[int | str, int]:
    """(codec, bytes a row)."""
    dim = config.ngram_row_dim
    if len(tensor.shape) != 2 or not tensor.shape[0]:
        raise _wrong(tensor, "expected rows and words")
    width = tensor.shape[1]
    if tensor.name.endswith(".weight"):
        if tensor.dtype.startswith("F8"):
            raise CheckpointError(
                "n-gram table is FP8",
                file=str(tensor.file),
                tensor=tensor.name,
                dtype=tensor.dtype,
                because="FP8 rows are not supported",
                do="use a pack with a BF16 or trellis table",
            )
        if tensor.dtype != "BF16" or width != dim:
            raise _wrong(tensor, f"expected BF16 [rows, {dim}]")
        return BF16_ROWS, 2 * dim
    if tensor.dtype != "I16" or dim % 16 or (width - 1) % (dim // 16):
        raise _wrong(tensor, f"expected I16 [rows, 1 + bits * {dim // 16}]")
    bits = (width - 1) // (dim // 16)
    if not 1 <= bits <= 8:
        raise CheckpointError(
            "n-gram table has an impossible width",
            file=str(tensor.file),
            tensor=tensor.name,
            bits=bits,
            because="rows have 1..8 bits a value",
            do="fetch the file again",
        )
    return bits, 2 * width


def _constants(pack: Source, names: list[str], i_ple: int) -> dict[str, npt.NDArray[np.int64]]:
    """Stored constants, checked against the formula; the formula's where the pack stores none."""
    formula = pack.config.ngram(i_ple)
    wanted = {
        "head_offsets": formula.offsets,
        "head_sizes": formula.sizes,
        "multipliers": formula.multipliers,
    }
    out: dict[str, npt.NDArray[np.int64]] = {}
    for key, values in wanted.items():
        expected = np.array(values, dtype=np.int64)
        name = _find(names, key)
        if name is None:
            out[key] = expected
            continue
        tensor = pack.tensors[name]
        if tensor.dtype != "I64" or tensor.shape != expected.shape:
            raise _wrong(tensor, f"expected I64 {list(expected.shape)}")
        stored = pack.read(name)
        if not np.array_equal(stored, expected):
            at = int(np.flatnonzero(stored != expected)[0])
            raise CheckpointError(
                "n-gram constant differs from the formula",
                file=str(tensor.file),
                tensor=name,
                index=at,
                stored=int(stored[at]),
                formula=int(expected[at]),
                because="config.json and the table belong to different models",
                do="take both from one pack",
            )
        out[key] = stored.astype(np.int64)
    return out


def _find(names: list[str], key: str) -> str | None:
    found = sorted({n for n in names for end in _CONSTANTS[key] if n == end or n.endswith("." + end)})
    if len(found) > 1:
        raise CheckpointError(
            "n-gram constant is stored twice", tensor=found[0], other=found[1], do="keep one of the two"
        )
    return found[0] if found else None


def _wrong(
    tensor: Tensor, because: str, what: str = "n-gram tensor has a wrong dtype or shape"
) -> CheckpointError:
    return CheckpointError(
        what,
        file=str(tensor.file),
        tensor=tensor.name,
        dtype=tensor.dtype,
        shape=list(tensor.shape),
        because=because,
        do="fetch the file again",
    )
