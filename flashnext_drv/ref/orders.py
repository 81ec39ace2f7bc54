"""Bit oracles of the arithmetic orders, in numpy, independent of the kernels' code.

Owns: correctly rounded fp32 fma, fma chains, the warp and leaf trees, the fp32 Hadamard stages, and the
integer behaviour of mma.sync m16n8k16 (f16 or bf16 operands, f32 accumulator) of two GPU generations.
Called by kernel checks, which compare bytes.  What must stay true: every function rounds exactly where the
order says, also for subnormals, infinities and cancellation; NaN results are 0x7fffffff.

How fma is rounded once although numpy has none: the product of two fp32 is exact in fp64; the fp64 sum is
turned into its round-to-odd value with the exact error of the addition (two-sum); 53 >= 24 + 2 bits, so the
conversion to fp32 then rounds like the exact sum.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

__all__ = ["GENERATIONS", "HADAMARD_SCALE", "F32Array", "MmaModel", "canonical", "fma32", "fma_chain",
           "hadamard128", "mma_chain", "mma_step", "tree", "warp_sum", "warp_sum4"]

F32Array = NDArray[np.float32]
F64Array = NDArray[np.float64]
I64Array = NDArray[np.int64]

HADAMARD_SCALE: Final = np.float32(0.088388347648)


class MmaModel(NamedTuple):
    """How one generation adds the products of a k16 step.

    fraction_bits: terms are cut toward zero to this many bits below the largest exponent.
    step: products added together (8 = two chained halves).  least_exponent: floor of the largest exponent.
    """

    fraction_bits: int
    step: int
    least_exponent: int


# measured: sm_90 on an H200, 4.1 M adversarial outputs, none wrong; sm_80 from published models only
GENERATIONS: Final = {"sm_90": MmaModel(25, 16, -133), "sm_80": MmaModel(24, 8, -132)}


def canonical(x: NDArray[Any]) -> F32Array:
    """fp32 copy of `x` (any shape) in which every NaN has the bits 0x7fffffff."""
    out = np.array(x, dtype=np.float32, copy=True)
    out.view(np.uint32)[np.isnan(out)] = 0x7FFFFFFF
    return out


def fma32(a: NDArray[Any] | float, b: NDArray[Any] | float, c: NDArray[Any] | float) -> F32Array:
    """a * b + c rounded once to fp32 (RN), subnormals kept.  a, b, c: fp32, broadcastable.  Returns fp32."""
    with np.errstate(all="ignore"):
        x = np.asarray(a, dtype=np.float32).astype(np.float64)
        y = np.asarray(b, dtype=np.float32).astype(np.float64)
        z = np.asarray(c, dtype=np.float32).astype(np.float64)
        p = x * y
        s = p + z
        from_p = s - z
        error = (p - from_p) + (z - (s - from_p))
        bits = np.array(s, dtype=np.float64, ndmin=1).view(np.int64)
        error = np.atleast_1d(error)
        inexact = (error != 0) & np.isfinite(error) & (bits & 1 == 0)
        away = (error > 0) == (np.atleast_1d(s) > 0)
        bits = np.where(inexact, np.where(away, bits + 1, bits - 1), bits)
        return canonical(bits.view(np.float64).reshape(np.shape(s)).astype(np.float32))


def fma_chain(a: NDArray[Any], b: NDArray[Any], start: NDArray[Any] | float = 0.0) -> F32Array:
    """acc = fma(a[..., k], b[..., k], acc) with k rising over the last axis, from `start`.  Returns (...)
    fp32."""
    x, y = np.broadcast_arrays(np.asarray(a, np.float32), np.asarray(b, np.float32))
    acc = canonical(np.broadcast_to(np.asarray(start, np.float32), x.shape[:-1]))
    for k in range(x.shape[-1]):
        acc = fma32(x[..., k], y[..., k], acc)
    return acc


def warp_sum(x: NDArray[Any]) -> F32Array:
    """Sum of the 32 lanes x (..., 32) by the xor tree 16, 8, 4, 2, 1, which gives every lane the same bits;
    (...) fp32."""
    return _halving(x, 32)


def warp_sum4(x: NDArray[Any]) -> F32Array:
    """Sum of 4 lanes x (..., 4) by xor 1, then 2: (x0 + x1) + (x2 + x3); (...) fp32."""
    v = np.asarray(x, dtype=np.float32)
    if v.shape[-1] != 4:
        raise ValueError(f"warp_sum4 takes 4 lanes on the last axis, not {v.shape[-1]}")
    with np.errstate(all="ignore"):
        return canonical((v[..., 0] + v[..., 1]) + (v[..., 2] + v[..., 3]))


def tree(leaves: NDArray[Any]) -> F32Array:
    """The canonical tree ((0+1)+(2+3))+((4+5)+(6+7)) over axis 0, which has 1, 2, 4 or 8 leaves; fp32."""
    v = np.asarray(leaves, dtype=np.float32)
    if v.shape[0] not in (1, 2, 4, 8):
        raise ValueError(f"the tree has 1, 2, 4 or 8 leaves, not {v.shape[0]}")
    with np.errstate(all="ignore"):
        while v.shape[0] > 1:
            v = v[0::2] + v[1::2]
    return canonical(v[0])


def hadamard128(x: NDArray[Any]) -> F32Array:
    """Sylvester-Hadamard of x (..., 128) fp32 in stage order bit 0..6, then times 0.088388347648f; (..., 128)
    fp32.

    Each stage: lower index a + b, upper index a - b.
    """
    v = np.asarray(x, dtype=np.float32)
    if v.shape[-1] != 128:
        raise ValueError(f"hadamard128 takes 128 elements on the last axis, not {v.shape[-1]}")
    with np.errstate(all="ignore"):
        for bit in range(7):
            pairs = v.reshape(*v.shape[:-1], 64 >> bit, 2, 1 << bit)
            low, high = pairs[..., 0, :], pairs[..., 1, :]
            v = np.stack((low + high, low - high), axis=-2).reshape(v.shape)
        return canonical(v * HADAMARD_SCALE)


def mma_chain(a: NDArray[Any], b: NDArray[Any], generation: str = "sm_90", *, bf16: bool = False,
              start: NDArray[Any] | None = None) -> F32Array:
    """Chain of k16 mma steps, k rising: a (M, K) times b (N, K) transposed -> (M, N) fp32.

    a, b: float16, or uint16 bit patterns (of bf16 when `bf16`).  K a multiple of 16; M and N any: elements
    are independent of each other.  start: (M, N) fp32 accumulator, zeros if None.  Segments and leaves are
    the caller's. Raises ValueError on another K, KeyError on an unknown generation.
    """
    left, right = _operand(a, bf16), _operand(b, bf16)
    if left.value.shape[-1] != right.value.shape[-1] or left.value.shape[-1] % 16:
        raise ValueError(f"K differs or is no multiple of 16: {left.value.shape} and {right.value.shape}")
    shape = (left.value.shape[0], right.value.shape[0])
    acc = np.zeros(shape, np.float32) if start is None else canonical(np.broadcast_to(start, shape))
    model = GENERATIONS[generation]
    for k in range(0, left.value.shape[-1], model.step):
        cut = slice(k, k + model.step)
        acc = _accumulate(left.pick(np.s_[:, None, cut]), right.pick(np.s_[None, :, cut]), acc, model)
    return acc


def mma_step(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any], generation: str = "sm_90", *,
             bf16: bool = False) -> F32Array:
    """One batched k16 step: a (B, M, 16), b (B, N, 16), c (B, M, N) fp32 -> (B, M, N) fp32."""
    left, right = _operand(a, bf16), _operand(b, bf16)
    acc, model = canonical(c), GENERATIONS[generation]
    for k in range(0, 16, model.step):
        cut = slice(k, k + model.step)
        acc = _accumulate(left.pick(np.s_[:, :, None, cut]), right.pick(np.s_[:, None, :, cut]), acc, model)
    return acc


class _Operand(NamedTuple):
    """A 16-bit operand: exact value, and the exponent of its significand (least exponent for subnormals)."""

    value: F64Array
    exponent: I64Array

    def pick(self, index: Any) -> _Operand:
        return _Operand(self.value[index], self.exponent[index])


def _operand(x: NDArray[Any], bf16: bool) -> _Operand:
    raw = np.ascontiguousarray(x)
    if raw.dtype == np.float16 and not bf16:
        bits = raw.view(np.uint16)
    elif raw.dtype == np.uint16:
        bits = raw
    else:
        raise ValueError(f"an mma operand is float16 or uint16 bits (bf16: uint16 bits), not {raw.dtype}")
    if bf16:
        value = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        exponent = np.maximum((bits >> 7 & 255).astype(np.int64), 1) - 127
    else:
        value = bits.view(np.float16).astype(np.float64)
        exponent = np.maximum((bits >> 10 & 31).astype(np.int64), 1) - 15
    return _Operand(value, exponent)


def _accumulate(a: _Operand, b: _Operand, acc: F32Array, model: MmaModel) -> F32Array:
    """One block of products on the last axis, plus acc; fp64 holds every intermediate exactly (see the
    bounds).

    The exponent of a product is the sum of its operands' exponents, not renormalised.  Cut terms are integers
    below 2^(F+3), 17 of them; the scale 2^(F-emax) is a power of two within 2^-240..2^158, products lie in
    2^-266..2^256.
    """
    none = -100_000
    with np.errstate(all="ignore"):
        product = a.value * b.value
        exponent = np.where(product != 0, a.exponent + b.exponent, none).max(axis=-1)
        acc_exponent = np.maximum((acc.view(np.uint32) >> 23 & 255).astype(np.int64), 1) - 127
        largest = np.maximum(exponent, np.where(acc != 0, acc_exponent, none))
        largest = np.maximum(np.where(largest == none, 0, largest), model.least_exponent)
        shift = (model.fraction_bits - largest).astype(np.int32)
        scale = np.ldexp(1.0, shift)
        total = np.trunc(product * scale[..., None]).sum(axis=-1) + np.trunc(acc.astype(np.float64) * scale)
        out = _toward_zero(np.ldexp(total + 0.0, -shift))
        plain = product.sum(axis=-1) + acc.astype(np.float64)    # decides which infinity or NaN comes out
        return canonical(np.where(np.isfinite(plain), out, plain.astype(np.float32)))


def _toward_zero(x: F64Array) -> F32Array:
    """fp64 -> fp32 toward zero, subnormals kept; 2^128 and above becomes infinity."""
    normal = (x.view(np.int64) & ~np.int64((1 << 29) - 1)).view(np.float64)
    small = np.trunc(x * 2.0**149) * 2.0**-149
    return cast(F32Array, np.where(np.abs(x) >= 2.0**-126, normal, small).astype(np.float32))


def _halving(x: NDArray[Any], lanes: int) -> F32Array:
    v = np.asarray(x, dtype=np.float32)
    if v.shape[-1] != lanes:
        raise ValueError(f"the warp tree takes {lanes} lanes on the last axis, not {v.shape[-1]}")
    with np.errstate(all="ignore"):
        while v.shape[-1] > 1:
            half = v.shape[-1] // 2
            v = v[..., :half] + v[..., half:]
    return canonical(v[..., 0])
