"""Reference of the token family: n-gram hash and rows, per-layer embedding (PLE), greedy draw.

Called by ref/model.py and by checks of the token kernels.  What must stay true: an eos cuts what later
tokens see, not what it sees itself; all hash products stay below 2^63.  Source: model notes, section 7; EXL3
format notes, section 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .exl3 import ngram_rows
from .gdn import causal_conv
from .glue import Weights, load_linear, rms_norm, sigmoid, silu, vector
from .rounding import EXACT, Array, Rounding

__all__ = ["HashTables", "NgramTable", "Ple", "greedy", "hash_tables", "ngram_hash"]

_MASK: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15


@dataclass(frozen=True, eq=False)
class HashTables:
    """multipliers (N,), sizes and offsets (heads,): int64, heads of order 2 first."""

    multipliers: NDArray[np.int64]
    sizes: NDArray[np.int64]
    offsets: NDArray[np.int64]


def greedy(logits: NDArray[Any]) -> NDArray[np.int64]:
    """Highest logit of each row (T, V), ties to the lower id: (T,) int64."""
    return np.asarray(np.argmax(logits, axis=-1), np.int64)


def hash_tables(i_ple: int, *, ngram_size: int, heads_per_ngram: int, vocab_base: int, vocab_size: int,
                seed: int) -> HashTables:
    """Constants of the i_ple-th PLE layer from the formula: consecutive primes and splitmix64 multipliers."""
    n_heads = (ngram_size - 1) * heads_per_ngram
    primes: list[int] = []
    candidate = vocab_base
    while len(primes) < (i_ple + 1) * n_heads:
        if candidate > 1 and all(candidate % d for d in range(2, int(candidate**0.5) + 1)):
            primes.append(candidate)
        candidate += 1
    sizes = np.array(primes[i_ple * n_heads:], np.int64)
    half = max(1, ((1 << 63) - 1) // vocab_size // 2)
    base = seed + 10007 * i_ple
    multipliers = [2 * (_splitmix64(base + _GAMMA * (j + 1) & _MASK) % half) + 1 for j in range(ngram_size)]
    return HashTables(np.array(multipliers, np.int64), sizes, np.cumsum(sizes) - sizes)


def ngram_hash(ids: Sequence[int], history: Sequence[int], eos: int, tables: HashTables) -> NDArray[np.int64]:
    """Global table rows of each token: (T, heads) int64.

    history: the N - 1 ids before, oldest first, eos where the sequence has none.
    """
    n = len(tables.multipliers)
    per_order = len(tables.sizes) // (n - 1)
    row = np.empty((len(ids), len(tables.sizes)), np.int64)
    past = [*history, *ids]
    for t in range(len(ids)):
        here = t + n - 1
        mixed, cut = past[here] * int(tables.multipliers[0]), False
        for j in range(1, n):
            cut = cut or past[here - j] == eos
            mixed ^= (eos if cut else past[here - j]) * int(tables.multipliers[j])
            heads = slice((j - 1) * per_order, j * per_order)
            row[t, heads] = mixed % tables.sizes[heads] + tables.offsets[heads]
    return row


class NgramTable:
    """The n-gram rows: EXL3 ring rows, or plain rows; sharded or one tensor."""

    def __init__(self, weights: Weights, prefix: str, row_dim: int):
        """prefix: of `ngram_embedding`.  Raises KeyError when no layout of the table is found."""
        self._ring = f"{prefix}.shard_0.trellis" in weights or f"{prefix}.trellis" in weights
        part = "trellis" if self._ring else "weight"
        self._shards = [weights[f"{prefix}.{part}"]] if f"{prefix}.{part}" in weights else []
        whole = bool(self._shards)
        while not whole and f"{prefix}.shard_{len(self._shards)}.{part}" in weights:
            self._shards.append(weights[f"{prefix}.shard_{len(self._shards)}.{part}"])
        if not self._shards:
            raise KeyError(f"{prefix}: neither trellis nor weight, neither sharded nor whole")
        self._bias = weights[f"{prefix}.head_bias"] if self._ring else np.zeros((1, row_dim), np.float16)

    def rows(self, index: NDArray[np.int64], rounding: Rounding = EXACT) -> Array:
        """index (T, heads) -> concatenated rows (T, heads * row_dim) fp64.

        The ring codec's result is fp16 by definition; plain rows are rounded to fp16 by the contract only.
        """
        per_shard = len(self._shards[0])
        raw = np.stack([self._shards[i // per_shard][i % per_shard] for i in index.reshape(-1)])
        if not self._ring:
            return rounding.half(raw.astype(np.float64).reshape(len(index), -1))
        bias = np.tile(self._bias, (len(index), 1))
        return ngram_rows(raw, bias)[1].astype(np.float64).reshape(len(index), -1)


class Ple:
    """One per-layer embedding; its state is {"conv": ((taps - 1) * N, S * H), "ids": (N - 1,) int64}."""

    def __init__(self, weights: Weights, prefix: str, *, n_streams: int, hidden: int, eps: float, eos: int,
                 embed_dim: int, tables: HashTables):
        table = f"{prefix}.ple_embedding.ngram_embedding"
        self._table = NgramTable(weights, table, embed_dim // len(tables.sizes))
        self._key = load_linear(weights, f"{prefix}.key_proj")
        self._value = load_linear(weights, f"{prefix}.value_proj")
        names = ("key", "query", "conv")
        self._norms = {name: vector(weights, f"{prefix}.norm_{name}.weight") for name in names}
        self._conv = vector(weights, f"{prefix}.conv1d.weight").reshape(n_streams * hidden, -1)
        self._n_streams, self._hidden, self._eps = n_streams, hidden, eps
        self._eos, self._tables = eos, tables

    @property
    def tables(self) -> HashTables:
        return self._tables

    def empty_state(self) -> dict[str, NDArray[Any]]:
        n = len(self._tables.multipliers)
        reach = (self._conv.shape[1] - 1) * n
        return {"conv": np.zeros((reach, self._conv.shape[0])), "ids": np.full(n - 1, self._eos, np.int64)}

    def __call__(self, ids: Sequence[int], streams: Array, state: dict[str, NDArray[Any]],
                 rounding: Rounding = EXACT) -> Array:
        """What is added to streams (T, S, H) for tokens `ids`; `state` is advanced in place."""
        t, s, hidden = streams.shape
        rows = ngram_hash(ids, [int(i) for i in state["ids"]], self._eos, self._tables)
        emb = self._table.rows(rows, rounding)
        key = rms_norm(self._key(emb, rounding), self._norms["key"], hidden, self._eps).reshape(t, s, hidden)
        value = self._value(emb, rounding)
        query = rms_norm(streams.reshape(t, -1), self._norms["query"], hidden, self._eps)
        query = query.reshape(t, s, hidden)
        a = (key * query).sum(axis=-1) / np.sqrt(float(hidden))
        a = np.sign(a) * np.sqrt(np.maximum(np.abs(a), 1e-6))
        y = sigmoid(a)[..., None] * value[:, None]
        normed = rounding.half(rms_norm(y.reshape(t, -1), self._norms["conv"], hidden, self._eps))
        conv, state["conv"] = causal_conv(normed, state["conv"], self._conv, len(self._tables.multipliers))
        state["ids"] = np.concatenate((state["ids"], np.asarray(ids, np.int64)))[-len(state["ids"]):]
        return y + silu(conv).reshape(t, s, hidden)


def _splitmix64(z: int) -> int:
    z = z + _GAMMA & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31
