"""Values, texts and bytes that parsers tend to trip over, drawn from a seeded generator.

Used by tools/fuzz_targets.py.  What must stay true: the same generator state gives the same values on every
machine; nothing here takes more than a few hundred KiB or milliseconds to make.
"""

from __future__ import annotations

import json
import random
from typing import Any

__all__ = ["mangle_bytes", "mangle_json", "odd_int", "odd_text", "odd_value"]

_INTS = (0, 1, -1, 2, 3, 7, 15, 16, 17, 31, 32, 64, 127, 128, 129, 255, 256, 1000, 4095, 4096, 65535, 65536,
         (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, (1 << 53) + 1, (1 << 63) - 1, 1 << 63,
         (1 << 64) - 1, 1 << 64, -(1 << 31), -(1 << 63), 10**30, 10**400, -10**400, 10**4200)
_TEXTS = ("", " ", "\n", "0", "-1", "null", "true", "nan", "F16", "BF16", "I16", "I64", "F32", "F8_E4M3",
          "U8", "full_attention", "linear_attention", "indexed_attention", "sigmoid", "silu", "qwen4_exp",
          "__metadata__", "\x00", "\ud800", "\udcff", "é", "𝔉", "٣", "²", "../../x", "a" * 300, "%s%n{0}",
          "shard_99999999999", "\u202e", "1e400", "0x10", "mcg", "mul1", "forward", "shuffled:1",
          "shuffled:" + "9" * 5000)
_OTHERS = (None, True, False, 0.0, -0.0, 0.5, 1.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"))


def odd_int(rng: random.Random) -> int:
    """An integer near a power of two, near zero, or of hundreds of digits."""
    pick = rng.random()
    if pick < 0.5:
        return rng.choice(_INTS)
    if pick < 0.8:
        return rng.randrange(-4, 5000)
    return rng.choice((1, -1)) * ((1 << rng.randrange(72)) + rng.randrange(-2, 3))


def odd_text(rng: random.Random) -> str:
    """A short text with something odd in it."""
    pick = rng.random()
    if pick < 0.7:
        return rng.choice(_TEXTS)
    return "".join(chr(rng.choice((rng.randrange(32, 127), rng.randrange(0x2000))))
                   for _ in range(rng.randrange(12)))


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, most often a scalar."""
    pick = rng.random()
    if pick < 0.4:
        return odd_int(rng)
    if pick < 0.6:
        return odd_text(rng)
    if pick < 0.8 or depth > 2:
        return rng.choice(_OTHERS)
    if pick < 0.92:
        return [odd_value(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 3, 5, 40)))]
    return {odd_text(rng): odd_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def mangle_json(rng: random.Random, value: Any, n_edits: int = 1) -> Any:
    """A copy of a JSON value with n_edits places replaced, dropped, doubled, moved or renamed."""
    value = json.loads(json.dumps(value))
    for _ in range(n_edits):
        value = _edit(rng, value)
    return value


def mangle_bytes(rng: random.Random, data: bytes) -> bytes:
    """A copy of `data` with bits flipped, pieces cut, doubled, blanked or inserted."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(out) + 1)
        size = min(rng.choice((1, 1, 2, 4, 8, 40, 1000)), len(out) - at)
        kind = rng.randrange(7)
        if kind == 0 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del out[at:at + size]
        elif kind == 2:
            out[at:at] = out[at:at + size]
        elif kind == 3:
            out[at:at + size] = bytes(size)
        elif kind == 4:
            out[at:at] = rng.choice((b"\xff", b"[" * 3000, b"{", b'"', b"\x00" * 8, b"9" * 5000, b"1e999",
                                     b",", b"NaN", b"\xef\xbb\xbf", b'"\\ud800"', b" " * 5000, b"-"))
        elif kind == 5:
            del out[at:]
        elif out:
            out[at % len(out)] = rng.randrange(256)
    return bytes(out)


def _edit(rng: random.Random, value: Any) -> Any:
    """One edit, at a place reached by walking down at random."""
    if isinstance(value, dict) and value and rng.random() < 0.93:
        out = dict(value)
        key = rng.choice(list(out))
        kind = rng.random()
        if kind < 0.6:
            out[key] = _edit(rng, out[key])
        elif kind < 0.75:
            del out[key]
        elif kind < 0.85:
            out[odd_text(rng)] = out[key]
        elif kind < 0.95:
            out[rng.choice(list(out))] = out[key]
        else:
            out[key + rng.choice(("x", ".1", "_", "0"))] = out.pop(key)
        return out
    if isinstance(value, list) and value and rng.random() < 0.85:
        items = list(value)
        at = rng.randrange(len(items))
        kind = rng.random()
        if kind < 0.6:
            items[at] = _edit(rng, items[at])
        elif kind < 0.75:
            del items[at]
        elif kind < 0.9:
            items.insert(at, rng.choice(items))
        else:
            items *= rng.choice((0, 2, 50))
        return items
    if type(value) is int and rng.random() < 0.6:
        return value + rng.choice((-1, 1, value, -2 * value, 8, -8, 64, 128, value * 127))
    if isinstance(value, str) and value and rng.random() < 0.4:
        return value[:-1] if rng.random() < 0.5 else value + rng.choice(("x", "0", "\ud800"))
    return odd_value(rng)
