"""References of the move family, one element at a time in Python integers.

Callers: check/ and the tests.  Written from the rules in words, not from model/fill.py, which must agree
with it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

__all__ = ["synth_fill"]

_M64 = (1 << 64) - 1


def synth_fill(first: int, count: int, arguments: Mapping[str, int]) -> npt.NDArray[np.uint16]:
    """Elements first .. first + count - 1, (count,) u16, host.  arguments: the kernel's, by name, dst left
    out."""
    return np.array([_element(first + i, arguments) for i in range(count)], dtype=np.uint16)


def _hash(key: int, j: int) -> int:
    """Output j of splitmix64 started at `key`."""
    z = (key + (j + 1) * 0x9E3779B97F4A7C15) & _M64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _M64
    return z ^ (z >> 31)


def _draw(key: int, i: int) -> bytes:
    return _hash(key, i // 2).to_bytes(8, "little")[4 * (i % 2) :][:4]


def _bell(draw: bytes) -> int:
    return (sum(draw) - 510) // 4


def _element(i: int, a: Mapping[str, int]) -> int:
    kind, p0, p1, p2 = a["kind"], a["p0"], a["p1"], a["p2"]
    if kind <= 2:
        raw = int.from_bytes(_hash(a["key"], i // 4).to_bytes(8, "little")[2 * (i % 4) :][:2], "little")
        if kind == 1 and i % p0 == 0:
            return p1 + (raw & p2)
        if kind == 2:
            return (raw & 0x8000) + p0 + (raw % 0x8000) * p1 // 0x8000
        return raw
    draw = _draw(a["key"], i)
    if kind == 4:
        n = draw[0] * p2 // 256
    else:
        n = _bell(draw)
        if a["cols"]:
            row, col = divmod(i, a["cols"])
            other = _bell(_draw(a["key2"], row // a["group_rows"] * a["cols"] + col))
            n = ((p2 % 65536) * n + (p2 // 65536) * other) // 128
        n //= 2 ** (p0 >> 16)
    n += p1 - (p1 >> 31 << 32)
    value = np.float32(n) * np.float32(2.0) ** -np.float32(p0 & 0xFF)
    if p0 >> 8 & 1:
        bits = int(value.view(np.uint32))
        if bits & 0xFFFF:
            raise AssertionError(f"{n} * 2^-{p0 & 0xFF} is no bf16")
        return bits >> 16
    half = np.float16(value)
    if np.float32(half) != value:
        raise AssertionError(f"{n} * 2^-{p0 & 0xFF} is no f16")
    return int(half.view(np.uint16))
