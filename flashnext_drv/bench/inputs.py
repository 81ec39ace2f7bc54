"""Prompts for measurements: token ids from an integer hash, so that every run and machine has the same.

Called by the measurements of this folder.  What must stay true: two salts give prompts that differ in their
first ids already, so that nothing of one can be reused for the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UsageError
from .client import Ask

__all__ = ["asks", "prompt_ids"]

_MASK = (1 << 64) - 1


def prompt_ids(count: int, vocab: int, salt: int = 0) -> tuple[int, ...]:
    """`count` ids below `vocab`; any two salts of one count differ within the first four ids of a vocabulary
    of 256 or more.  Raises UsageError."""
    if count < 1 or vocab < 2 or salt < 0:
        raise UsageError("a prompt has at least one id of a vocabulary of two", count=count, vocab=vocab,
                         salt=salt)
    digits = [salt // vocab**place % vocab for place in range(4)]
    body = (_mixed((salt << 32) + i) % vocab for i in range(max(count - 4, 0)))
    return (*digits, *body)[:count]


def asks(
    lengths: Sequence[int], vocab: int, new_tokens: int, *, salt: int = 0, temperature: float = 0.0
) -> list[Ask]:
    """One request a length, each with a prompt of its own (salts from `salt` on)."""
    return [Ask(prompt_ids(n, vocab, salt + i), new_tokens, temperature, seed=salt + i)
            for i, n in enumerate(lengths)]


def _mixed(value: int) -> int:
    """SplitMix64's output function."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
