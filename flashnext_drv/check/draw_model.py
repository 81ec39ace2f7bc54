"""The draw order draw_v1 in numpy: integers for every sum, fp32 with one rounding a step for the rest.

Called by check/cases_token.py and tests.  Independent of the kernel's text but for the constants of exp and
log, which define the order.  What must stay true: no value comes from libm or from NumPy's own exp and log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..ref.orders import fma32

__all__ = ["Sampling", "draw", "exp32", "gumbel", "log32", "nucleus", "splitmix64", "weights"]

F32Array = NDArray[np.float32]

_EXP: Final = tuple(float.fromhex(x) for x in (
    "0x1.6d7566p-10", "0x1.120b8cp-7", "0x1.5554b8p-5", "0x1.5554dcp-3", "0x1p-1"))
_LOG: Final = tuple(float.fromhex(x) for x in (
    "0x1.1b4d66p-4", "-0x1.e2fbc0p-4", "0x1.e65572p-4", "-0x1.fb40a0p-4", "0x1.23324cp-3", "-0x1.5562f0p-3",
    "0x1.99a54cp-3", "-0x1.ffffeep-3", "0x1.555546p-2"))
_LN2_HIGH: Final = float.fromhex("0x1.62e430p-1")
_LN2_LOW: Final = float.fromhex("-0x1.05c610p-29")      # ln 2 - _LN2_HIGH
_LOG2_E: Final = np.float32(float.fromhex("0x1.715476p+0"))


@dataclass(frozen=True)
class Sampling:
    """How one slot draws; the values as fp32."""

    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def draw(logits: F32Array, sampling: Sampling, position: int) -> tuple[int, int]:
    """(token, status) of one row of logits (vocab,) fp32 by draw_v1."""
    if np.isnan(logits).any():
        return 0xFFFFFFFF, 1
    if np.float32(sampling.temperature) == 0:
        return int(np.argmax(logits)), 0
    with np.errstate(all="ignore"):
        z = logits / np.float32(sampling.temperature) + np.float32(0)
    order = np.lexsort((np.arange(len(z)), -z.astype(np.float64)))
    if 0 < sampling.top_k < len(z):
        order = order[:sampling.top_k]
    z_max = z[order[0]]
    if np.float32(sampling.top_p) < 1:
        q = weights(z[order], z_max)
        order = order[:nucleus(q, np.float32(sampling.top_p))]
    e = _relative(z[order], z_max)
    stay = e >= np.float32(sampling.min_p)
    stay[0] = True
    order = np.sort(order[stay])
    with np.errstate(all="ignore"):
        score = z[order] + gumbel(sampling.seed, position, order)
    return int(order[np.argmax(score)]), 0


def weights(z: F32Array, z_max: np.float32) -> list[int]:
    """rint(exp(z - z_max) * 2^40) of each z, as Python integers."""
    return [int(q) for q in np.rint(_relative(z, z_max).astype(np.float64) * 2.0**40)]


def nucleus(q: list[int], top_p: np.float32) -> int:
    """How many of the falling weights q make the shortest prefix with sum >= top_p * total; at least 1."""
    share = int(float(top_p) * 2.0**32) if top_p > 0 else 0
    total, upto = sum(q), 0
    for n, weight in enumerate(q, 1):
        upto += weight
        if upto << 32 >= share * total:
            return n
    raise AssertionError("a prefix of all tokens has the whole weight")


def gumbel(seed: int, position: int, ids: NDArray[Any]) -> F32Array:
    """The noise of each token id at `position`: -log(-log u), u = (n + 0.5) 2^-23, n 23 bits of the hash."""
    row = splitmix64(splitmix64(np.array([seed], np.uint64)) ^ np.uint64(position))
    n = splitmix64(row ^ ids.astype(np.uint64)) >> np.uint64(41)
    u = (n.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    return -log32(-log32(u))


def splitmix64(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 after adding its constant; wrapping 64-bit integers."""
    with np.errstate(over="ignore"):
        z = z + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return z ^ z >> np.uint64(31)


def exp32(x: F32Array) -> F32Array:
    """fn_exp of finite or infinite x, bit for bit."""
    x = np.clip(np.asarray(x, np.float32), np.float32(-104), np.float32(89))
    k = np.rint((x * _LOG2_E).astype(np.float64)).astype(np.float32)
    r = fma32(k, _LN2_LOW * -1.0, fma32(k, -_LN2_HIGH, x))
    p = np.full_like(x, _EXP[0])
    for c in _EXP[1:]:
        p = fma32(p, r, c)
    p = fma32(r * r, p, r) + np.float32(1)
    n = k.astype(np.int64)
    low = n >> 1
    with np.errstate(all="ignore"):
        return p * _power(low) * _power(n - low)


def log32(x: F32Array) -> F32Array:
    """fn_log of positive normal x, bit for bit."""
    u = np.asarray(x, np.float32).view(np.uint32).astype(np.int64)
    e = u - 0x3F3504F3 >> 23
    f = (u - (e << 23)).astype(np.uint32).view(np.float32) - np.float32(1)
    p = np.full_like(f, _LOG[0])
    for c in _LOG[1:]:
        p = fma32(p, f, c)
    z, scale = f * f, e.astype(np.float32)
    p = fma32(z * f, p, fma32(scale, _LN2_LOW, 0.0))
    p = fma32(z, -0.5, p) + f
    return fma32(scale, _LN2_HIGH, p)


def _relative(z: F32Array, z_max: np.float32) -> F32Array:
    with np.errstate(all="ignore"):
        return np.where(z == z_max, np.float32(1), exp32(z - z_max))


def _power(n: NDArray[np.int64]) -> F32Array:
    return ((n + 127) << 23).astype(np.uint32).view(np.float32)
