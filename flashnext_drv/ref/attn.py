"""FP64 reference of sparse (QSA) attention: norms and RoPE, pooled index keys, block choice, attention in
parts.

Called by ref/model.py and by checks of the attn kernels.  What must stay true: blocks are chosen by (score,
lower block index), whole blocks plus the tail are attended in position order, and a block's pooled key is
computed once from its raw keys when it completes.  Source: model notes, section 5; arithmetic contract, rule
7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .glue import Weights, apply_rope, falling_order, load_linear, rms_norm, rope_table, sigmoid, vector
from .rounding import EXACT, Array, Rounding

__all__ = ["PART_ENTRIES", "BlockChoice", "QsaShape", "Rows", "SparseAttention", "attend",
           "attended_positions", "block_scores", "choose_blocks"]

PART_ENTRIES: Final = 64


@dataclass(frozen=True)
class QsaShape:
    """Heads, widths and selection of one layer; budget in blocks of `ratio` tokens."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_dim: int
    theta: float
    index_heads: int
    index_dim: int
    ratio: int
    budget: int


@dataclass(frozen=True, eq=False)
class BlockChoice:
    """blocks: chosen ids, ascending.  margin: last chosen minus best rejected score, inf if none is
    rejected."""

    blocks: NDArray[np.int64]
    margin: float


class Rows:
    """Growing rows of one shape over an unchanging base that is never copied; stored in the dtype they are
    given in."""

    def __init__(self, base: NDArray[Any]):
        self._base, self._more = base, np.empty((16, *base.shape[1:]), base.dtype)
        self._n = len(base)

    def __len__(self) -> int:
        return self._n

    def append(self, rows: NDArray[Any]) -> None:
        used = self._n - len(self._base)
        if used + len(rows) > len(self._more):
            grown = np.empty((2 * (used + len(rows)), *self._base.shape[1:]), self._base.dtype)
            grown[:used] = self._more[:used]
            self._more = grown
        self._more[used:used + len(rows)] = rows
        self._n += len(rows)

    def take(self, index: NDArray[np.int64]) -> Array:
        """The rows `index` (n,) as fp64, (n, ...)."""
        out = np.empty((len(index), *self._base.shape[1:]))
        old = index < len(self._base)
        out[old], out[~old] = self._base[index[old]], self._more[index[~old] - len(self._base)]
        return out

    def stored(self) -> NDArray[Any]:
        """All rows in their stored dtype; a copy."""
        return np.concatenate((self._base, self._more[:self._n - len(self._base)]))


def block_scores(query: NDArray[Any], pooled: NDArray[Any]) -> Array:
    """query (heads, d), pooled (blocks, d) -> (blocks,) fp64: sum over heads of relu(q . k), over sqrt(d)."""
    dots = np.asarray(pooled, np.float64) @ np.asarray(query, np.float64).T
    scores: Array = np.maximum(dots, 0.0).sum(axis=1) / np.sqrt(float(query.shape[1]))
    return scores


def choose_blocks(scores: NDArray[Any], budget: int) -> BlockChoice:
    """The `budget` best of scores (blocks,), by higher score (NaN above all), then lower index."""
    if len(scores) <= budget:
        return BlockChoice(np.arange(len(scores)), np.inf)
    order = falling_order(scores)
    return BlockChoice(np.sort(order[:budget]), float(scores[order[budget - 1]] - scores[order[budget]]))


def attended_positions(blocks: NDArray[np.int64], position: int, ratio: int) -> NDArray[np.int64]:
    """Tokens that the query at `position` attends, ascending: those of `blocks`, then the tail of the open
    block."""
    chosen = (blocks[:, None] * ratio + np.arange(ratio)).reshape(-1)
    return np.concatenate((chosen, np.arange((position + 1) // ratio * ratio, position + 1)))


def attend(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], rounding: Rounding = EXACT) -> Array:
    """Softmax attention of one query row.  q (n_q, d); k, v (entries, n_kv, d); returns (n_q, d) fp64.

    The entries are cut by list index into parts of 64, each with its own maximum; the contract rounds the
    weights of PV to fp16 below that maximum, while sums use the unrounded ones.  Without rounding this is
    the plain softmax.
    """
    n_q, d = q.shape
    entries, n_kv = k.shape[:2]
    parts = -(-entries // PART_ENTRIES)
    scores = np.full((n_q, parts * PART_ENTRIES), -np.inf)
    groups = np.matmul(np.asarray(q, np.float64).reshape(n_kv, n_q // n_kv, d), k.transpose(1, 2, 0))
    scores[:, :entries] = rounding.single(groups.reshape(n_q, entries) / np.sqrt(float(d)))
    scores = scores.reshape(n_q, parts, PART_ENTRIES)
    part_max = scores.max(axis=2, keepdims=True)
    weight = np.exp(scores - part_max)
    merge = np.exp(part_max - part_max.max(axis=1, keepdims=True))
    total = (weight * merge).sum(axis=(1, 2))
    rounded = (rounding.half(weight) * merge).reshape(n_q, -1)[:, :entries]
    out = np.matmul(rounded.reshape(n_kv, n_q // n_kv, entries), v.transpose(1, 0, 2)).reshape(n_q, d)
    return rounding.single(out / total[:, None])


class SparseAttention:
    """One self_attn layer; its state is {"k", "v": Rows (t, n_kv, d), "raw": Rows (t, d_i), "pooled": Rows
    (t/ratio, d_i)}."""

    def __init__(self, weights: Weights, prefix: str, shape: QsaShape, eps: float):
        self._shape, self._eps = shape, eps
        self._q = load_linear(weights, f"{prefix}.q_proj")
        self._k = load_linear(weights, f"{prefix}.k_proj")
        self._v = load_linear(weights, f"{prefix}.v_proj")
        self._o = load_linear(weights, f"{prefix}.o_proj")
        self._index = load_linear(weights, f"{prefix}.indexer.index_qk_proj")
        self._q_norm = vector(weights, f"{prefix}.q_norm.weight")
        self._k_norm = vector(weights, f"{prefix}.k_norm.weight")
        self._iq_norm = vector(weights, f"{prefix}.indexer.q_layernorm.weight")
        self._ik_norm = vector(weights, f"{prefix}.indexer.k_layernorm.weight")

    def empty_state(self, dtype: type[np.floating[Any]]) -> dict[str, Rows]:
        s = self._shape
        kv, index = np.empty((0, s.n_kv_heads, s.head_dim), dtype), np.empty((0, s.index_dim), dtype)
        return {"k": Rows(kv), "v": Rows(kv), "raw": Rows(index), "pooled": Rows(index)}

    def __call__(self, m: Array, state: dict[str, Rows], rounding: Rounding = EXACT
                 ) -> tuple[Array, list[BlockChoice]]:
        """m (T, H) at the positions after the state's -> (T, H) and the block choice of each row."""
        s, t, first = self._shape, len(m), len(state["k"])
        cos, sin = rope_table(np.arange(first, first + t), s.rope_dim, s.theta, rounding)
        cos, sin = cos[:, None], sin[:, None]
        query = self._q(m, rounding).reshape(t, s.n_heads, 2 * s.head_dim)
        gate = sigmoid(query[..., s.head_dim:])
        q = rms_norm(query[..., :s.head_dim], self._q_norm, s.head_dim, self._eps)
        q = rounding.half(apply_rope(q, cos, sin))
        k = self._k(m, rounding).reshape(t, s.n_kv_heads, s.head_dim)
        k = rms_norm(k, self._k_norm, s.head_dim, self._eps)
        state["k"].append(rounding.half(apply_rope(k, cos, sin)))
        state["v"].append(rounding.half(self._v(m, rounding).reshape(t, s.n_kv_heads, s.head_dim)))
        index = self._index(m, rounding).reshape(t, s.index_heads + 1, s.index_dim)
        index_q = rms_norm(index[:, :-1], self._iq_norm, s.index_dim, self._eps)
        index_q = rounding.half(apply_rope(index_q, cos, sin))
        state["raw"].append(rounding.half(index[:, -1]))
        self._pool(state, rounding)
        pooled = state["pooled"].stored()
        choices, out = [], np.empty((t, s.n_heads, s.head_dim))
        for i in range(t):
            n_blocks = (first + i + 1) // s.ratio
            if n_blocks > s.budget:
                choice = choose_blocks(rounding.single(block_scores(index_q[i], pooled[:n_blocks])), s.budget)
            else:
                choice = choose_blocks(np.zeros(n_blocks), s.budget)
            seen = attended_positions(choice.blocks, first + i, s.ratio)
            out[i] = attend(q[i], state["k"].take(seen), state["v"].take(seen), rounding)
            choices.append(choice)
        return self._o((out * gate).reshape(t, -1), rounding), choices

    def _pool(self, state: dict[str, Rows], rounding: Rounding) -> None:
        """Pooled keys of the blocks that became complete: rms of the mean raw key, RoPE at the block's first
        token."""
        s = self._shape
        done, complete = len(state["pooled"]), len(state["raw"]) // s.ratio
        if done == complete:
            return
        raw = state["raw"].take(np.arange(done * s.ratio, complete * s.ratio))
        raw = raw.reshape(-1, s.ratio, s.index_dim)
        cos, sin = rope_table(np.arange(done, complete) * s.ratio, s.rope_dim, s.theta, rounding)
        key = rms_norm(raw.mean(axis=1), self._ik_norm, s.index_dim, self._eps)
        state["pooled"].append(rounding.half(apply_rope(key, cos, sin)))
