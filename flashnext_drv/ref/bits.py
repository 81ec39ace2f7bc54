"""Bit oracles of whole linears and of the experts' sum: the exact bytes a kernel of these orders must give.

Owns exl3_dot_v1, plain_dot_v1, part_sum_v1 and moe_sum_v1 on the numpy side, built from ref/orders.py alone.
Called by checks that compare bytes on small shapes.  What must stay true: input rounding, k chain, units,
leaves and output rotation are restated from the contract, not read from a kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .exl3 import Linear
from .orders import F32Array, canonical, fma32, hadamard128, mma_chain, tree

__all__ = ["bf16_parts", "dot_segments", "exl3_linear_bits", "linear_input_bits", "moe_sum_bits",
           "plain_linear_bits", "sum_units"]


def dot_segments(k: int, n: int, leaves: int = 1, least: int = 256) -> int:
    """Segments of one leaf of a (k, n) linear: doubled from 1 while all of these hold after doubling: at most
    32 segments, segments * n <= 49152, whole k16 steps, at least `least` inputs a segment."""
    leaf, segments = k // leaves, 1
    most = min(16, 24576 // n, leaf // (2 * least))  # that may still be doubled
    while segments <= most and leaf % (32 * segments) == 0:
        segments *= 2
    return segments


def sum_units(units: NDArray[Any], leaves: int) -> F32Array:
    """part_sum_v1: units (leaves * segments, ...) fp32 -> (...): segments of a leaf in rising order, leaves
    by the tree."""
    parts = np.asarray(units, np.float32).reshape(leaves, -1, *units.shape[1:])
    with np.errstate(all="ignore"):
        total = parts[:, 0]
        for segment in range(1, parts.shape[1]):
            total = total + parts[:, segment]
    return tree(total)


def linear_input_bits(x: NDArray[Any], suh: NDArray[np.float16] | None) -> NDArray[np.float16]:
    """What meets the weights: x (rows, K) fp32 -> f16.  suh (K,): fp32 product, fp32 Hadamard, one rounding;
    None: one rounding."""
    row = np.asarray(x, np.float32)
    with np.errstate(over="ignore"):
        if suh is None:
            return row.astype(np.float16)
        product = row * suh.astype(np.float32)
        return hadamard128(product.reshape(len(row), -1, 128)).reshape(row.shape).astype(np.float16)


def exl3_linear_bits(linear: Linear, x: NDArray[Any], *, leaves: int = 1, segments: int | None = None,
                     generation: str = "sm_90") -> F32Array:
    """exl3_dot_v1: x (rows, K) fp32 -> (rows, N) fp32.  segments: of a leaf; None takes the contract's
    table."""
    k, n = linear.w_q.shape
    n_segments = dot_segments(k, n, leaves) if segments is None else segments
    operand = linear_input_bits(x, linear.suh)
    weights = np.ascontiguousarray(linear.w_q.T)
    units = _units(operand, weights, leaves * n_segments, generation, bf16=False)
    rotated = hadamard128(sum_units(units, leaves).reshape(len(operand), -1, 128)).reshape(len(operand), n)
    with np.errstate(all="ignore"):
        out = rotated * linear.svh.astype(np.float32)
        return canonical(out if linear.bias is None else out + linear.bias.astype(np.float32))


def plain_linear_bits(weights: NDArray[Any], x: NDArray[Any], *, leaves: int = 1, segments: int | None = None,
                      generation: str = "sm_90") -> F32Array:
    """plain_dot_v1: weights (N, K) float16, or uint16 bits of bf16; x (rows, K) fp32 -> (rows, N) fp32.

    bf16: the f16 operand is split into bf16 hi + lo, two mma a k16 step, hi first.
    """
    n, k = weights.shape
    n_segments = dot_segments(k, n, leaves) if segments is None else segments
    operand: NDArray[Any] = linear_input_bits(x, None)
    bf16 = weights.dtype == np.uint16
    if bf16:
        operand = _interleave(*bf16_parts(operand))
        weights = _interleave(weights, weights)
    return sum_units(_units(operand, weights, leaves * n_segments, generation, bf16=bf16), leaves)


def bf16_parts(x: NDArray[np.float16]) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """f16 -> bits of bf16 hi = RN(x) and lo = x - hi, exact; lo is +0 where hi is not finite."""
    wide = x.astype(np.float32)
    bits = wide.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    hi = np.where(np.isnan(wide), np.uint32(0x7FFF), rounded).astype(np.uint16)
    with np.errstate(invalid="ignore"):
        rest = wide - (hi.astype(np.uint32) << 16).view(np.float32)
    lo = np.where(np.isfinite(wide), rest, np.float32(0)).astype(np.float32).view(np.uint32) >> np.uint32(16)
    return hi, lo.astype(np.uint16)


def moe_sum_bits(values: NDArray[Any], experts: NDArray[Any], weights: NDArray[Any], n_experts: int,
                 shared: NDArray[Any], shared_weight: NDArray[Any] | float) -> F32Array:
    """moe_sum_v1 of one row: values (k, H) of the chosen experts in rising id, weights (k,), shared (H,) ->
    (H,).

    Leaf floor(8 e / E) collects its experts by fma from +0, the tree joins the 8 leaves, the shared one comes
    last.
    """
    leaves = np.zeros((8, values.shape[1]), np.float32)
    for value, expert, weight in zip(values, experts, weights, strict=True):
        leaf = 8 * int(expert) // n_experts
        leaves[leaf] = fma32(weight, value, leaves[leaf])
    return fma32(shared_weight, shared, tree(leaves))


def _units(operand: NDArray[Any], weights: NDArray[Any], units: int, generation: str, *,
           bf16: bool) -> F32Array:
    """Chains over equal ranges of K: operand (rows, K), weights (N, K) -> (units, rows, N)."""
    length = operand.shape[1] // units
    cuts = [slice(unit * length, (unit + 1) * length) for unit in range(units)]
    return np.stack([mma_chain(operand[:, cut], weights[:, cut], generation, bf16=bf16) for cut in cuts])


def _interleave(first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
    """Columns in k16 steps: step 0 of first, step 0 of second, step 1 of first, ...: (rows, 2 K)."""
    steps = [part.reshape(len(part), -1, 1, 16) for part in (first, second)]
    return np.concatenate(steps, axis=2).reshape(len(first), -1)
