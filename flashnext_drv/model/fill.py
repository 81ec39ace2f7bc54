"""The bytes of synthetic tensors: 16-bit element i of a tensor is a function of (key, i), in integers only.

Called by synth (reading and writing) and, by its rules, by the engine's loader, which may launch the kernel
`synth_fill` instead of reading.  What must stay true: three places give the same bytes, because each
computes the same integers: `fill_words` here (numpy), cuda_src/move/synth_fill.cu, and ref/move.py (one
element at a time). No float is computed anywhere; f16 and bf16 values are put together from sign, exponent
and mantissa.

    hash(key, j)   splitmix64 output number j of the stream that starts at key
    raw(i)         bits 16 (i % 4) .. of hash(key, i / 4)
    draw(i)        bits 32 (i % 2) .. of hash(key, i / 2), a 32-bit word; bell = (sum of its 4 bytes - 510)
    >> 2
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import UsageError

__all__ = [
    "BELL",
    "ROWS",
    "SIGNED",
    "UNIFORM",
    "WORDS",
    "FillRule",
    "bell",
    "fill_into",
    "fill_words",
    "rows",
    "signed",
    "table_words",
    "tensor_key",
    "uniform",
    "words",
]

WORDS: Final = 0  # raw(i)
ROWS: Final = 1  # raw(i), but word 0 of every row of p0 words is p1 + (raw & p2)
SIGNED: Final = 2  # sign of raw(i), magnitude bits p0 + ((raw & 0x7fff) * p1 >> 15)
BELL: Final = 3  # number n * 2^-k, n from draw(i), optionally mixed with a stream shared by groups of rows
UNIFORM: Final = 4  # number n * 2^-k, n = (lowest byte of draw(i) * p2 >> 8) + p1

_GAMMA: Final = 0x9E3779B97F4A7C15
_M64: Final = (1 << 64) - 1
_MIX1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX2: Final = np.uint64(0x94D049BB133111EB)
_BLOCK: Final = 1 << 13  # hashes at a time: the temporaries stay in the core's cache
_STEPS: Final = np.arange(1, _BLOCK + 1, dtype=np.uint64) * np.uint64(_GAMMA)
_LOW_BYTES: Final = np.uint64(0x00FF00FF00FF00FF)


@dataclass(frozen=True, slots=True)
class FillRule:
    """How a tensor of 16-bit elements is made; the fields are the arguments of kernel synth_fill.

    kind: WORDS, ROWS, SIGNED, BELL or UNIFORM.  key, key2: streams.  p0, p1, p2: by kind; BELL and UNIFORM
    have p0 = k | bf16 << 8 | shift << 16 and p1 = the integer added to n (two's complement), BELL has
    p2 = own | shared << 16, in 1/128.  cols, group_rows: BELL's sharing; cols 0 means none.
    """

    kind: int
    key: int
    p0: int = 0
    p1: int = 0
    p2: int = 0
    key2: int = 0
    cols: int = 0
    group_rows: int = 1

    def arguments(self, first: int, count: int, at: int = 0) -> Mapping[str, int]:
        """Arguments of synth_fill but `dst`: elements first .. first + count - 1 go to dst[at] and on."""
        return {
            "at": at,
            "first": first,
            "count": count,
            "key": self.key,
            "key2": self.key2,
            "kind": self.kind,
            "p0": self.p0,
            "p1": self.p1,
            "p2": self.p2,
            "cols": self.cols,
            "group_rows": self.group_rows,
        }


def tensor_key(seed: int, name: str) -> int:
    """The 64-bit start of tensor `name`'s stream under `seed`."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def words(key: int) -> FillRule:
    """Uniform 16-bit words: trellis tiles, sign words."""
    return FillRule(WORDS, key)


def rows(key: int, n_words: int) -> FillRule:
    """n-gram rows of n_words words: an f16 scale in [2^-7, 2^-5), then uniform words."""
    return FillRule(ROWS, key, n_words, 0x2000, 0x7FF)


def signed(key: int, low_bits: int, high_bits: int) -> FillRule:
    """f16 of random sign, magnitude bits evenly in low_bits .. high_bits - 1 (f16 bit patterns)."""
    if not 0 < low_bits < high_bits <= 0x7C00:
        raise UsageError("magnitudes are no positive f16 range", low_bits=low_bits, high_bits=high_bits)
    return FillRule(SIGNED, key, low_bits, high_bits - low_bits)


def bell(
    key: int,
    k: int,
    *,
    bf16: bool,
    shift: int = 0,
    add: int = 0,
    own: int = 128,
    shared: int = 0,
    key2: int = 0,
    cols: int = 0,
    group_rows: int = 1,
) -> FillRule:
    """n * 2^-k with bell-shaped n: (own * bell(i) + shared * bell2(i)) >> 7, then >> shift, then + add.

    bell: -128..127, std 37.  bell2 comes from stream key2 at (row // group_rows) * cols + column, so rows of
    a group share it.  own, shared: 0..128, in 1/128.
    """
    _check_scale(k, bf16)
    return FillRule(
        BELL,
        key,
        k | bf16 << 8 | shift << 16,
        add & 0xFFFFFFFF,
        own | shared << 16,
        key2,
        cols if shared else 0,
        group_rows,
    )


def uniform(key: int, k: int, *, bf16: bool, first: int, count: int) -> FillRule:
    """n * 2^-k with n evenly in first .. first + count - 1; count <= 256."""
    _check_scale(k, bf16)
    return FillRule(UNIFORM, key, k | bf16 << 8, first & 0xFFFFFFFF, count)


def fill_words(rule: FillRule, first: int, count: int) -> npt.NDArray[np.uint16]:
    """Elements first .. first + count - 1, (count,) u16, host."""
    out = np.empty(count, dtype=np.uint16)
    _fill(rule, first, out)
    return out


def fill_into(rule: FillRule, dest: npt.NDArray[np.uint8], first_byte: int) -> None:
    """Bytes first_byte .. of the tensor into `dest` (contiguous u8, host); any alignment."""
    if first_byte % 2 == 0 and dest.size % 2 == 0 and dest.ctypes.data % 2 == 0:
        _fill(rule, first_byte // 2, dest.view(np.uint16))
        return
    first = first_byte // 2
    count = (first_byte + dest.size + 1) // 2 - first
    whole = fill_words(rule, first, count).view(np.uint8)
    dest[:] = whole[first_byte - 2 * first :][: dest.size]


def table_words(
    rule: FillRule, i_rows: npt.NDArray[np.int64], keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint16]:
    """Rows i_rows (n,) of tensors made by `rows`: (n, words) u16, host; any order, any repeats.

    keys: (n,) u64, the key of the tensor that each row is of; all else is the same in all of them: `rule`'s.
    """
    if rule.kind != ROWS:
        raise UsageError("the tensor is not made of rows", kind=rule.kind, do="use fill_words")
    n_words = rule.p0
    out = np.empty((len(i_rows), n_words), np.uint16)
    lanes, n_hashes = np.arange(n_words), (n_words + 6) // 4  # a row begins at any of a hash's four words
    block = max(_BLOCK // n_hashes, 1)
    scratch = np.empty((2, block * n_hashes), np.uint64)
    for at in range(0, len(i_rows), block):
        first = i_rows[at : at + block] * n_words
        x, t = scratch[:, : len(first) * n_hashes]
        np.multiply(first.astype(np.uint64) // np.uint64(4), np.uint64(_GAMMA), out=t[: len(first)])
        start = t[: len(first)] + keys[at : at + block]
        np.add(start[:, None], _STEPS[:n_hashes], out=x.reshape(len(first), n_hashes))
        made = _mixed(x, t).view(np.uint16).reshape(len(first), -1)
        out[at : at + block] = np.take_along_axis(made, first[:, None] % 4 + lanes, axis=1)
    out[:, 0] = np.uint16(rule.p1) + (out[:, 0] & np.uint16(rule.p2))
    return out


def _check_scale(k: int, bf16: bool) -> None:
    if not 0 <= k <= (100 if bf16 else 14):
        raise UsageError("scale 2^-k is out of range", k=k, do="use 0..14 for f16, 0..100 for bf16")


def _fill(rule: FillRule, first: int, out: npt.NDArray[np.uint16]) -> None:
    """In blocks: hash, then the rule."""
    per_hash = 2 if rule.kind in (BELL, UNIFORM) else 4
    scratch = np.empty((2, _BLOCK), dtype=np.uint64)
    at, end = first, first + out.size
    while at < end:
        j = at // per_hash
        stop = min(end, (j + _BLOCK) * per_hash)
        hashes = _hashes(rule.key, j, -(-stop // per_hash) - j, scratch)
        if per_hash == 4:
            block = hashes.view(np.uint16)[at - 4 * j :][: stop - at]
            if rule.kind == SIGNED:
                block = _signed(rule, block)
            out[at - first : stop - first] = block
            if rule.kind == ROWS:
                heads = out[at - first : stop - first][-at % rule.p0 :: rule.p0]
                heads[:] = np.uint16(rule.p1) + (heads & np.uint16(rule.p2))
        else:
            numbers = _numbers(rule, hashes, scratch[1])[at - 2 * j :][: stop - at]
            out[at - first : stop - first] = _finish(rule, numbers, at)
        at = stop


def _hashes(key: int, j: int, count: int, scratch: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """hash(key, j .. j + count - 1) in scratch[0]; scratch[1] is overwritten."""
    x, t = scratch[0, :count], scratch[1, :count]
    np.add(_STEPS[:count], np.uint64((key + j * _GAMMA) & _M64), out=x)
    return _mixed(x, t)


def _mixed(x: npt.NDArray[np.uint64], t: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's output function of x, in x; t of the same size is overwritten."""
    np.right_shift(x, np.uint64(30), out=t)
    np.bitwise_xor(x, t, out=x)
    np.multiply(x, _MIX1, out=x)
    np.right_shift(x, np.uint64(27), out=t)
    np.bitwise_xor(x, t, out=x)
    np.multiply(x, _MIX2, out=x)
    np.right_shift(x, np.uint64(31), out=t)
    np.bitwise_xor(x, t, out=x)
    return x


def _signed(rule: FillRule, raw: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    magnitude = (raw & np.uint16(0x7FFF)).astype(np.uint32) * np.uint32(rule.p1) >> np.uint32(15)
    return (raw & np.uint16(0x8000)) | (magnitude + np.uint32(rule.p0)).astype(np.uint16)


def _numbers(
    rule: FillRule, hashes: npt.NDArray[np.uint64], t: npt.NDArray[np.uint64]
) -> npt.NDArray[np.int16]:
    """The bell or uniform integer of each 32-bit draw."""
    if rule.kind == UNIFORM:
        low = (hashes.view(np.uint32) & np.uint32(0xFF)).astype(np.int16)
        return (low.astype(np.int32) * np.int32(rule.p2) >> 8).astype(np.int16)
    t = t[: hashes.size]
    np.right_shift(hashes, np.uint64(8), out=t)
    np.bitwise_and(t, _LOW_BYTES, out=t)
    np.bitwise_and(hashes, _LOW_BYTES, out=hashes)
    np.add(hashes, t, out=hashes)
    pairs = hashes.view(np.int16)
    return (pairs[0::2] + pairs[1::2] - np.int16(510)) >> np.int16(2)


def _finish(rule: FillRule, numbers: npt.NDArray[np.int16], at: int) -> npt.NDArray[np.uint16]:
    """Mix, shift, add and encode; `at` is the element index of numbers[0]."""
    add = rule.p1 - ((rule.p1 & 0x80000000) << 1)
    k, bf16, shift = rule.p0 & 0xFF, rule.p0 >> 8 & 1, rule.p0 >> 16
    if rule.kind == BELL:
        if rule.cols:
            own, shared = np.int32(rule.p2 & 0xFFFF), np.int32(rule.p2 >> 16)
            numbers = ((own * numbers + shared * _shared(rule, at, numbers.size)) >> np.int32(7)).astype(
                np.int16
            )
        numbers = numbers >> np.int16(shift)
    encoded: npt.NDArray[np.uint16] = _table(k, bool(bf16))[numbers + np.int16(add + 256)]
    return encoded


def _shared(rule: FillRule, at: int, count: int) -> npt.NDArray[np.int32]:
    """bell2 of elements at .. at + count - 1, run by run: within a row the shared stream is consecutive."""
    plain = FillRule(BELL, rule.key2)
    scratch = np.empty((2, _BLOCK), dtype=np.uint64)
    out = np.empty(count, dtype=np.int32)
    done, before = 0, (-1, 0, 0)
    while done < count:
        row, col = divmod(at + done, rule.cols)
        begin = row // rule.group_rows * rule.cols + col
        n = min(rule.cols - col, count - done, 2 * _BLOCK - 2)
        if before[:2] == (begin, n):
            out[done : done + n] = out[before[2] : before[2] + n]
        else:
            j = begin // 2
            hashes = _hashes(rule.key2, j, (begin + n + 1) // 2 - j, scratch)
            out[done : done + n] = _numbers(plain, hashes, scratch[1])[begin - 2 * j :][:n]
        before = (begin, n, done)
        done += n
    return out


_TABLES: dict[tuple[int, bool], npt.NDArray[np.uint16]] = {}


def _table(k: int, bf16: bool) -> npt.NDArray[np.uint16]:
    """Entry n + 256 is n * 2^-k as f16 or bf16 bits, n in -256..256."""
    table = _TABLES.get((k, bf16))
    if table is None:
        table = np.array([_encode(n, k, bf16) for n in range(-256, 257)], dtype=np.uint16)
        _TABLES[k, bf16] = table
    return table


def _encode(n: int, k: int, bf16: bool) -> int:
    size = abs(n)
    if not size:
        return 0
    e = size.bit_length() - 1
    mantissa_bits, bias = (7, 127) if bf16 else (10, 15)
    mantissa = (size << 16) >> (e + 16 - mantissa_bits) & ((1 << mantissa_bits) - 1)
    return (n < 0) << 15 | (e - k + bias) << mantissa_bits | mantissa
