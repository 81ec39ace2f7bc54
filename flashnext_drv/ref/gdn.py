"""FP64 reference of the Gated DeltaNet layer: convolution, recurrence token by token, gated output norm.

Called by ref/model.py and by checks of the gdn kernels.  What must stay true: decay, then read, then write,
then output; only q carries 1 / sqrt(d_k); value head j uses key head j // (n_v / n_k); the output norm's
weight is plain. Source: model notes, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .glue import Weights, load_linear, sigmoid, silu, softplus, vector
from .rounding import EXACT, Array, Rounding

__all__ = ["DeltaNet", "DeltaShape", "causal_conv", "delta_rule"]


@dataclass(frozen=True)
class DeltaShape:
    """Heads and head widths of one layer; taps of its convolution; output gate "sigmoid" or "silu"."""

    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    gate: str

    @property
    def channels(self) -> int:
        return 2 * self.n_key_heads * self.key_dim + self.n_value_heads * self.value_dim


def causal_conv(x: NDArray[Any], tail: NDArray[Any], w: NDArray[Any],
                dilation: int = 1) -> tuple[Array, Array]:
    """Depthwise causal convolution, last tap on the current token.

    x (T, C); tail ((taps - 1) * dilation, C) the rows before, oldest first; w (C, taps).
    Returns y (T, C), no activation, and the new tail.
    """
    taps = w.shape[1]
    reach = (taps - 1) * dilation
    rows = np.concatenate((tail, x))
    y = np.zeros(x.shape)
    for j in range(taps):
        y += w[:, j] * rows[j * dilation:j * dilation + len(x)]
    return y, rows[len(rows) - reach:]


def delta_rule(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], beta: NDArray[Any], decay: NDArray[Any],
               state: NDArray[Any], rounding: Rounding = EXACT) -> tuple[Array, Array]:
    """The recurrence over T tokens.  q, k (T, n_v, d_k) normalised; v (T, n_v, d_v); beta, decay (T, n_v).

    state (n_v, d_k, d_v).  Returns o (T, n_v, d_v) and the new state; the input state is not changed.
    """
    m = np.array(state, dtype=np.float64)
    o = np.empty(v.shape)
    for t in range(len(v)):
        m *= decay[t][:, None, None]
        read = np.matmul(k[t][:, None, :], m)[:, 0]
        delta = beta[t][:, None] * (v[t] - read)
        m = rounding.single(m + k[t][:, :, None] * delta[:, None, :])
        o[t] = np.matmul(q[t][:, None, :], m)[:, 0]
    return rounding.single(o), m


class DeltaNet:
    """One linear_attn layer; its state is {"recurrent": (n_v, d_k, d_v), "conv": (taps - 1, channels)}."""

    def __init__(self, weights: Weights, prefix: str, shape: DeltaShape, eps: float):
        self._shape, self._eps = shape, eps
        self._qkv = load_linear(weights, f"{prefix}.in_proj_qkv")
        self._z = load_linear(weights, f"{prefix}.in_proj_z")
        self._b = load_linear(weights, f"{prefix}.in_proj_b")
        self._a = load_linear(weights, f"{prefix}.in_proj_a")
        self._out = load_linear(weights, f"{prefix}.out_proj")
        self._conv = vector(weights, f"{prefix}.conv1d.weight").reshape(shape.channels, shape.taps)
        self._a_log = vector(weights, f"{prefix}.A_log")
        self._dt_bias = vector(weights, f"{prefix}.dt_bias")
        self._norm = vector(weights, f"{prefix}.norm.weight")

    def empty_state(self) -> dict[str, Array]:
        s = self._shape
        return {"recurrent": np.zeros((s.n_value_heads, s.key_dim, s.value_dim)),
                "conv": np.zeros((s.taps - 1, s.channels))}

    def __call__(self, m: Array, state: dict[str, Array], rounding: Rounding = EXACT) -> Array:
        """m (T, H) -> (T, H); `state` is advanced in place by T tokens."""
        s, t = self._shape, len(m)
        mixed, state["conv"] = causal_conv(rounding.half(self._qkv(m, rounding)), state["conv"], self._conv)
        mixed = rounding.single(silu(mixed))
        n_key = s.n_key_heads * s.key_dim
        q = mixed[:, :n_key].reshape(t, s.n_key_heads, s.key_dim)
        k = mixed[:, n_key:2 * n_key].reshape(t, s.n_key_heads, s.key_dim)
        v = mixed[:, 2 * n_key:].reshape(t, s.n_value_heads, s.value_dim)
        q = q / np.sqrt(np.sum(q * q, axis=-1, keepdims=True) + 1e-6) / np.sqrt(float(s.key_dim))
        k = k / np.sqrt(np.sum(k * k, axis=-1, keepdims=True) + 1e-6)
        repeat = s.n_value_heads // s.n_key_heads
        beta = rounding.single(sigmoid(self._b(m, rounding)))
        decay = rounding.single(np.exp(-np.exp(self._a_log) * softplus(self._a(m, rounding) + self._dt_bias)))
        o, state["recurrent"] = delta_rule(np.repeat(q, repeat, axis=1), np.repeat(k, repeat, axis=1), v,
                                           beta, decay, state["recurrent"], rounding)
        o = o / np.sqrt(np.mean(o * o, axis=-1, keepdims=True) + self._eps) * self._norm
        z = self._z(m, rounding).reshape(o.shape)
        o = o * {"sigmoid": sigmoid, "silu": silu}[s.gate](z)
        return self._out(o.reshape(t, -1), rounding)
