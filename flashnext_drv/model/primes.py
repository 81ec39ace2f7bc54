"""Primes: the sizes of an n-gram table's heads.

Called by config.  What must stay true: exact for every number below 3.3e24, and quick for all of them, since
config.json says where to begin.

Source: Miller and Rabin; the bases by Sorenson and Webster, "Strong pseudoprimes to twelve prime bases".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

__all__ = ["is_prime", "primes_from"]

_BASES: Final = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def is_prime(value: int) -> bool:
    """Whether `value`, below 3.3e24, is a prime."""
    if value < 2:
        return False
    for prime in _BASES:
        if value % prime == 0:
            return value == prime
    odd, twos = value - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(value, base, odd, twos) for base in _BASES)


def primes_from(value: int) -> Iterator[int]:
    """Every prime from `value` on, rising."""
    while True:
        if is_prime(value):
            yield value
        value += 1


def _passes(value: int, base: int, odd: int, twos: int) -> bool:
    """Miller's test of value = odd * 2**twos + 1 to one base."""
    power = pow(base, odd, value)
    if power in (1, value - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % value
        if power == value - 1:
            return True
    return False
