"""FP64 reference of the mixture of experts: router, routed experts, shared expert.

Called by ref/model.py and by checks of the moe kernels.  What must stay true: the softmax runs over all
experts, the chosen weights are renormalised, ties go to the lower id.  Accepts experts fused or split.
Source: model notes, section 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .glue import Matmul, Plain, Weights, falling_order, load_linear, sigmoid, silu
from .rounding import EXACT, Array, Rounding

__all__ = ["KEPT_EXPERTS", "Experts", "Routes", "route", "swiglu"]


@dataclass(frozen=True, eq=False)
class Routes:
    """ids (T, k) by falling logit, weights (T, k) summing to 1, gap (T,) logit of the last chosen minus
    first rejected."""

    ids: NDArray[np.int64]
    weights: Array
    gap: Array


def route(logits: NDArray[Any], n_active: int) -> Routes:
    """logits (T, E) -> the n_active best of each row, NaN above all, ties to the lower id.

    The gap is inf when every expert is chosen.
    """
    order = falling_order(logits)
    ranked = np.take_along_axis(np.asarray(logits, np.float64), order, axis=1)
    chosen = np.exp(ranked[:, :n_active] - ranked[:, :1])
    gap = np.full(len(logits), np.inf)
    if logits.shape[1] > n_active:
        gap = ranked[:, n_active - 1] - ranked[:, n_active]
    return Routes(order[:, :n_active], chosen / chosen.sum(axis=1, keepdims=True), gap)


def swiglu(x: NDArray[Any], gate: Matmul, up: Matmul, down: Matmul, rounding: Rounding = EXACT) -> Array:
    """down(silu(gate x) * up x): (T, H) -> (T, H)."""
    return down(rounding.single(silu(gate(x, rounding)) * up(x, rounding)), rounding)


KEPT_EXPERTS: Final = 32


class Experts:
    """One mlp: router, experts and the shared one.  Experts are decoded at use; the last KEPT_EXPERTS are
    kept."""

    def __init__(self, weights: Weights, prefix: str, n_active: int):
        self._weights, self._prefix, self._n_active = weights, prefix, n_active
        self._router = load_linear(weights, f"{prefix}.gate")
        self._shared_gate = load_linear(weights, f"{prefix}.shared_expert_gate")
        self._shared = self._split(f"{prefix}.shared_expert")
        self._loaded: dict[int, tuple[Matmul, Matmul, Matmul]] = {}

    def __call__(self, m: Array, rounding: Rounding = EXACT) -> tuple[Array, Routes]:
        """m (T, H) -> (T, H) and the routes."""
        routes = route(self._router(m, rounding), self._n_active)
        weights = rounding.single(routes.weights)
        y = np.zeros(m.shape)
        for expert in np.unique(routes.ids):
            row, slot = np.nonzero(routes.ids == expert)
            y[row] += weights[row, slot, None] * swiglu(m[row], *self._expert(int(expert)), rounding)
        shared = swiglu(m, *self._shared, rounding)
        return rounding.single(y + sigmoid(self._shared_gate(m, rounding)) * shared), routes

    def _expert(self, expert: int) -> tuple[Matmul, Matmul, Matmul]:
        if expert not in self._loaded:
            if len(self._loaded) == KEPT_EXPERTS:
                del self._loaded[next(iter(self._loaded))]
            fused = f"{self._prefix}.experts.gate_up_proj"
            if fused in self._weights:
                both = np.asarray(self._weights[fused][expert], np.float64)
                down = np.asarray(self._weights[f"{self._prefix}.experts.down_proj"][expert], np.float64)
                half = len(both) // 2
                self._loaded[expert] = Plain(both[:half]), Plain(both[half:]), Plain(down)
            else:
                self._loaded[expert] = self._split(f"{self._prefix}.experts.{expert}")
        return self._loaded[expert]

    def _split(self, prefix: str) -> tuple[Matmul, Matmul, Matmul]:
        return (load_linear(self._weights, f"{prefix}.gate_proj"),
                load_linear(self._weights, f"{prefix}.up_proj"),
                load_linear(self._weights, f"{prefix}.down_proj"))
