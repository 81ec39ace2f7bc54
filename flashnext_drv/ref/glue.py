"""FP64 references of the glue family: norms, activations, RoPE, plain linears, gated-residual sites.

Called by the other reference families and by checks of single kernels.  What must stay true: row vectors, W
stored (N, K), no biases; every norm weight but DeltaNet's output norm is applied as 1 + w.  Rounding happens
only through the `Rounding` argument.  Source: model notes, sections 2, 3 and 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .exl3 import Linear
from .rounding import EXACT, Array, Rounding

__all__ = ["Matmul", "Plain", "Site", "Weights", "apply_rope", "falling_order", "load_linear", "rms_norm",
           "rope_table", "sigmoid",  "silu", "softplus", "vector"]

Weights = Mapping[str, NDArray[Any]]
Matmul = Callable[[NDArray[Any], Rounding], Array]


def sigmoid(x: NDArray[Any]) -> Array:
    """1 / (1 + exp(-x)) without overflow, elementwise fp64."""
    e = np.exp(-np.abs(np.asarray(x, np.float64)))
    return np.where(np.asarray(x) >= 0, 1.0, e) / (1.0 + e)


def silu(x: NDArray[Any]) -> Array:
    """x * sigmoid(x), elementwise fp64."""
    return np.asarray(x, np.float64) * sigmoid(x)


def softplus(x: NDArray[Any]) -> Array:
    """log(1 + exp(x)), elementwise fp64."""
    return np.logaddexp(0.0, np.asarray(x, np.float64))


def falling_order(x: NDArray[Any]) -> NDArray[np.int64]:
    """Indices of the last axis by falling value, NaN above all, equal values by rising index."""
    value = np.asarray(x, np.float64)
    nan = np.isnan(value)
    return np.asarray(np.lexsort((-np.where(nan, 0.0, value), ~nan), axis=-1), np.int64)


def rms_norm(x: NDArray[Any], w: NDArray[Any], group: int, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * (1 + w) over consecutive groups of `group` channels of the last axis;
    fp64."""
    parts = np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, group)
    scaled: Array = parts / np.sqrt(np.mean(parts * parts, axis=-1, keepdims=True) + eps)
    return scaled.reshape(x.shape) * (1.0 + np.asarray(w, np.float64))


def rope_table(positions: NDArray[Any], dim: int, theta: float,
               rounding: Rounding = EXACT) -> tuple[Array, Array]:
    """cos and sin of position * theta^(-2i/dim), i < dim / 2: two (positions, dim / 2) fp64.

    With contract rounding the frequency, its product with the position, and cos and sin are fp32 values.
    """
    omega = theta ** (-2.0 * np.arange(dim // 2, dtype=np.float64) / dim)
    angle = np.asarray(positions, np.float64)[:, None] * omega
    if not rounding.fp16:
        return np.cos(angle), np.sin(angle)
    product = np.asarray(positions).astype(np.float32)[:, None] * omega.astype(np.float32)
    cos, sin = (f(product.astype(np.float64)).astype(np.float32) for f in (np.cos, np.sin))
    return cos.astype(np.float64), sin.astype(np.float64)


def apply_rope(x: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any]) -> Array:
    """Half-split rotation of the first 2 * cos.shape[-1] channels of x (..., d); cos and sin broadcast over
    x's heads."""
    half = cos.shape[-1]
    low, high = x[..., :half], x[..., half:2 * half]
    return np.concatenate((low * cos - high * sin, high * cos + low * sin, x[..., 2 * half:]), axis=-1)


@dataclass(frozen=True, eq=False)
class Plain:
    """A linear with stored fp16 or bf16 weights: w (N, K), exact values in any float dtype."""

    w: Array

    def __call__(self, x: NDArray[Any], rounding: Rounding = EXACT) -> Array:
        """x (..., K), rounded once to fp16 by the contract, times w transposed: (..., N) fp64."""
        return rounding.single(rounding.half(x) @ self.w.T)


def load_linear(weights: Weights, name: str) -> Matmul:
    """The linear `name`: its EXL3 group if there is one, else `name`.weight.  Raises KeyError when neither
    is there."""
    if f"{name}.trellis" in weights:
        parts = ("trellis", "suh", "svh", "su", "sv", "mcg", "mul1", "bias")
        return Linear.from_parts({part: weights[f"{name}.{part}"] for part in parts
                                  if f"{name}.{part}" in weights})
    return Plain(np.asarray(weights[f"{name}.weight"], np.float64))


def vector(weights: Weights, name: str) -> Array:
    """A small tensor as fp64, its own shape."""
    return np.asarray(weights[name], np.float64)


class Site:
    """One gated-residual site: streams (T, S, H) -> mixed row (T, H) and injection factors (T, S).

    n = rms per stream; u = silu(down n / S); g = sigmoid(up u); m = mean over streams of g * n, n unrounded
    there; p = 2 sigmoid(inject n / S).  The final mixer has no injection: p is empty, (T, 0).
    """

    def __init__(self, weights: Weights, prefix: str, n_streams: int, eps: float):
        self._norm = vector(weights, f"{prefix}.hc_norm.weight")
        self._down = load_linear(weights, f"{prefix}.input_mix_weight_down")
        self._up = load_linear(weights, f"{prefix}.input_mix_weight_up")
        inject = f"{prefix}.block_inject_weight"
        has_inject = f"{inject}.weight" in weights or f"{inject}.trellis" in weights
        self._inject = load_linear(weights, inject) if has_inject else None
        self._n_streams, self._eps = n_streams, eps

    def __call__(self, streams: Array, rounding: Rounding = EXACT) -> tuple[Array, Array]:
        t, s, hidden = streams.shape
        n = rms_norm(streams.reshape(t, s * hidden), self._norm, hidden, self._eps)
        u = silu(self._down(n, rounding) / s)
        gated = sigmoid(self._up(u, rounding)) * n
        mixed = rounding.single(gated.reshape(t, s, hidden).mean(axis=1))
        if self._inject is None:
            return mixed, np.empty((t, 0))
        return mixed, rounding.single(2.0 * sigmoid(self._inject(n, rounding) / s))
