"""The bits of mma.sync m16n8k16 in numpy integers, and operands that try them.

f16 or bf16 operands, f32 accumulator.  Called by check/cases_probe.py and tests; independent of the
simulator's own model (cuda_src/sim/mma.cpp).  Per output and per block of `products` products in k order,
with the running accumulator as one more term:
  - a product is exact; its exponent is the sum of its factors' and is not renormalised; subnormal factors
    keep the format's least exponent;
  - every non-zero term is cut toward zero to a multiple of 2^(top - fraction), top the largest exponent, at
    least `floor`;
  - the cut terms are added exactly; the sum is cut toward zero to f32 (subnormals kept).
A NaN is 0x7fffffff; a sum with one infinity is that infinity.  Source: arXiv 2511.10909 and 2512.07004;
compared with an H200 on 4.1 million outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .contract import bits

__all__ = ["SM80", "SM90", "MmaModel", "mma", "operands"]

U16 = NDArray[np.uint16]
F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
_NONE: Final = -100000  # exponent of a term that is zero


@dataclass(frozen=True)
class MmaModel:
    """fraction: bits kept below the largest exponent.  products: summed at once.  floor: least such
    exponent."""

    fraction: int
    products: int
    floor: int


SM80: Final = MmaModel(24, 8, -132)
SM90: Final = MmaModel(25, 16, -133)


def mma(a: U16, b: U16, c: F32, bf16: bool, model: MmaModel) -> F32:
    """a (n, 16, 16), b (n, 8, 16) output-major, c (n, 16, 8) -> c + a b, (n, 16, 8) f32."""
    (sa, ea), (sb, eb) = _split(a, bf16), _split(b, bf16)
    fa, fb = _value(a, bf16).astype(np.float64), _value(b, bf16).astype(np.float64)
    bits_below = 14 if bf16 else 20  # fraction bits of an exact product
    acc = c.astype(np.float32)
    for k0 in range(0, 16, model.products):
        k = slice(k0, k0 + model.products)
        product = sa[:, :, None, k] * sb[:, None, :, k]
        exponent = ea[:, :, None, k] + eb[:, None, :, k]
        word = acc.view(np.uint32).astype(np.int64)
        field = word >> 23 & 255
        own = np.where(field > 0, (word & 0x7FFFFF) | 0x800000, word & 0x7FFFFF)
        own = np.where(word >> 31 & 1, -own, own)
        own_exponent = np.maximum(field, 1) - 127
        top = np.where(product != 0, exponent, _NONE).max(-1)
        top = np.maximum(top, np.where(own != 0, own_exponent, _NONE))
        top = np.where(top == _NONE, 0, np.maximum(top, model.floor))
        total = _cut(product, top[..., None] - exponent, model.fraction - bits_below).sum(-1)
        total = total + _cut(own, top - own_exponent, model.fraction - 23)
        with np.errstate(over="ignore", invalid="ignore"):
            out = _toward_zero(total, top - model.fraction).astype(np.float32)
            check = (fa[:, :, None, k] * fb[:, None, :, k]).sum(-1) + acc.astype(np.float64)
            out = np.where(np.isfinite(check), out, check.astype(np.float32))
        words = out.astype(np.float32).view(np.uint32).copy()
        words[np.isnan(out)] = 0x7FFFFFFF
        acc = words.view(np.float32)
    return acc


def operands(family: str, bf16: bool, n: int, seed: int) -> tuple[U16, U16, F32]:
    """a (n, 16, 16), b (n, 8, 16), c (n, 16, 8) of one family; bytes depend on the arguments alone.

    Families aim at the cut, at cancellation, at what dominates, at subnormals, overflow, infinities and NaNs.
    """

    def pick(name: str, shape: tuple[int, ...]) -> I64:
        return np.asarray(bits(seed, f"mma.{family}.{int(bf16)}.{name}", shape)).astype(np.int64)

    def power(name: str, low: int, high: int, shape: tuple[int, ...]) -> F32:
        """+-(1 + fraction) * 2^e, e in low..high."""
        raw = pick(name, shape)
        e = low + (raw >> 24) % (high - low + 1)
        value = np.ldexp(1.0 + (raw & 0x7FFF) / 32768.0, e.astype(np.int32))
        return np.where(raw >> 15 & 1, -value, value).astype(np.float32)

    def even(name: str, shape: tuple[int, ...]) -> F32:
        """Sum of four uniforms: near to normal, no library function."""
        parts = [pick(f"{name}.{i}", shape) / 2.0**32 - 0.5 for i in range(4)]
        return (parts[0] + parts[1] + parts[2] + parts[3]).astype(np.float32)

    sa, sb, sc = (n, 16, 16), (n, 8, 16), (n, 16, 8)
    low, high = (-60, 60) if bf16 else (-14, 15)
    a, b, c = even("a", sa), even("b", sb), even("c", sc)
    if family == "normal":
        c[: n // 3] = 0
        c[n // 3 : n // 2] *= 4096
    elif family == "wide":
        a, b, c = (
            power("a", low, high - 1, sa),
            power("b", low, high - 1, sb),
            power("c", 2 * low, 2 * high, sc),
        )
    elif family == "cancel":
        ea, eb = _encode(a, bf16), _encode(b, bf16)
        exact = (
            _value(ea, bf16).astype(np.float64)[:, :, None] * _value(eb, bf16).astype(np.float64)[:, None]
        ).sum(-1)
        return ea, eb, (-exact).astype(np.float32)
    elif family == "pair":
        a, b, c = power("a", -12, -1, sa), power("b", 0, 0, sb), power("c", -20, -8, sc)
        i = pick("i", (n,)) % 16
        j = (i + 1 + pick("j", (n,)) % 15) % 16
        for t in range(n):
            a[t, :, i[t]] = power("big", 10, 12, sa)[t, :, 0]
            a[t, :, j[t]] = -a[t, :, i[t]]
            b[t, :, j[t]] = b[t, :, i[t]]
    elif family == "dominated":
        a, b, c = power("a", -4, 4, sa), power("b", -4, 4, sb), power("c", 20, 28, sc)
    elif family == "one_product":
        b, c = power("b", -4, 4, sb), power("c", -30, 30, sc)
        a = np.where(np.arange(16) == 5, power("a", -4, 4, sa), np.float32(0)).astype(np.float32)
        a[n // 2 :, :, 12] = power("second", -7, 7, sa)[n // 2 :, :, 12]
        c[n // 2 :] = 0
    elif family == "cut":
        a, b = power("a", -12, -12, sa), np.abs(power("b", -12, -12, sb))
        a[:, :, 0], b[:, :, 0], c = np.float32(1), np.float32(1), np.zeros(sc, np.float32)
    elif family == "patterns":
        return _finite(pick("a", sa), bf16), _finite(pick("b", sb), bf16), power("c", -30, 30, sc)
    elif family == "tiny":
        c = power("c", -149, -120, sc) if bf16 else power("c", -50, -10, sc)
        c[: n // 2] = 0
        if bf16:
            a, b = power("a", -83, -60, sa), power("b", -83, -60, sb)
        else:
            return (
                (pick("a", sa) & 0x83FF).astype(np.uint16),
                np.where(pick("s", sb) & 1, pick("b", sb) & 0x83FF, _finite(pick("b", sb), bf16)).astype(
                    np.uint16
                ),
                c,
            )
    elif family == "huge":
        if bf16:
            a, b, c = np.abs(power("a", 60, 63, sa)), power("b", 60, 63, sb), power("c", 120, 127, sc)
        else:
            one = np.where(pick("a", sa) & 1, 0x7BFF, 0xFBFF).astype(np.uint16)
            two = np.where(pick("b", sb) & 1, 0x7BFF, 0xFBFF).astype(np.uint16)
            return one, two, power("c", 30, 127, sc)
    elif family == "zeros":
        a = np.where(pick("z", sa) & 1, np.float32(0), np.float32(-0.0)).astype(np.float32)
        a[n // 2 :, :, 7] = power("a", -10, -8, sa)[n // 2 :, :, 7]
        b = power("b", high - 1, high, sb)
        c = np.where(pick("y", sc) & 1, power("c", -40, -20, sc), np.float32(-0.0)).astype(np.float32)
    elif family in ("infinities", "nans"):
        c = np.where(pick("c.inf", sc) % 50 == 0, np.float32(np.inf), c).astype(np.float32)
        c = np.where(pick("c.minf", sc) % 50 == 0, np.float32(-np.inf), c).astype(np.float32)
        ea, eb = _encode(a, bf16), _encode(b, bf16)
        infinity, nan = (0x7F80, 0x7FC0) if bf16 else (0x7C00, 0x7E00)
        ea = np.where(pick("a.inf", sa) % 50 == 0, infinity | (pick("a.sign", sa) & 0x8000), ea).astype(
            np.uint16
        )
        eb = np.where(pick("b.inf", sb) % 100 == 0, infinity, eb).astype(np.uint16)
        eb = np.where(pick("b.zero", sb) % 100 == 0, 0, eb).astype(np.uint16)
        if family == "nans":
            ea = np.where(pick("a.nan", sa) % 50 == 0, nan, ea).astype(np.uint16)
        return ea, eb, c
    else:
        raise KeyError(family)
    return _encode(a, bf16), _encode(b, bf16), c


def _split(word: U16, bf16: bool) -> tuple[I64, I64]:
    """Signed integer significand and exponent, subnormals at the least exponent."""
    u = word.astype(np.int64)
    field, rest, hidden, bias = (
        (u >> 7 & 255, u & 127, 128, 127) if bf16 else (u >> 10 & 31, u & 1023, 1024, 15)
    )
    significand = np.where(field > 0, rest | hidden, rest)
    return np.where(u >> 15 & 1, -significand, significand), np.maximum(field, 1) - bias


def _cut(significand: I64, below: I64, shift: int) -> I64:
    size = np.abs(significand)
    size = size << shift if shift >= 0 else size >> -shift
    size = size >> np.clip(below, 0, 63)
    cut: I64 = np.where(significand < 0, -size, size)
    return cut


def _toward_zero(total: I64, exponent: I64) -> NDArray[Any]:
    """total * 2^exponent cut toward zero to f32, as f64."""
    size = np.abs(total)
    n_bits = np.frexp(size.astype(np.float64))[1].astype(np.int64)
    drop = np.maximum(n_bits - 24, np.where(exponent + n_bits - 1 < -126, -149 - exponent, -200))
    drop = np.clip(drop, 0, 63)
    value = np.ldexp(
        (size >> drop).astype(np.float64), np.clip(exponent + drop, -2000, 2000).astype(np.int32)
    )
    return np.where(total < 0, -value, value)


def _value(word: U16, bf16: bool) -> F32:
    return (
        (word.astype(np.uint32) << 16).view(np.float32) if bf16 else word.view(np.float16).astype(np.float32)
    )


def _encode(x: F32, bf16: bool) -> U16:
    if not bf16:
        with np.errstate(over="ignore"):
            return x.astype(np.float16).view(np.uint16)
    u = x.view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)


def _finite(raw: I64, bf16: bool) -> U16:
    word = raw & 0xFFFF
    top, clear = (0x7F80, 0xBFFF) if bf16 else (0x7C00, 0xBFFF)
    return np.where((word & top) == top, word & clear, word).astype(np.uint16)
