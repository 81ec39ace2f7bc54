"""EXL3 in numpy, from the formulas of the format: codebooks, tiles, linears, row codecs.

Owns: state -> value of the three codebooks, the tile's bit ring for every width, the dense and the rotated
form of a linear, legacy signs, and the row codecs of the n-gram table and of a quantized token embedding.
Called by ref/model.py and by kernel and pack checks.  What must stay true: decoding works on single bits (no
windows, no shifts of words), so it shares no trick with a kernel or with the pack reader; W_q is bit exact.
Shapes: K inputs, N outputs, W stored (K, N).  Source: EXL3 format notes, sections 3-7 and 9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from .orders import hadamard128
from .rounding import EXACT, Array, Rounding

__all__ = ["CODEBOOKS", "MARKERS", "PAIRS", "Linear", "codebook", "decode_linear", "embed_rows", "encode_row",
           "encode_tile", "hadamard_matrix", "ngram_rows", "rotate", "rotated_input_fp16", "row_states",
           "row_width", "tile_positions", "tile_states", "tile_values", "unpack_signs", "window_ends"]

F16 = NDArray[np.float16]
U16 = NDArray[np.uint16]

CODEBOOKS: Final = ("3inst", "mcg", "mul1")
MARKERS: Final = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
PAIRS: Final = tuple((name, float(bits)) for name in CODEBOOKS for bits in range(1, 9)) + tuple(
    ("mul1", bits) for bits in (1.5, 2.5, 3.5))


# W_q up to this many elements is kept in fp64 too, larger ones are widened in column strips at each use
_WIDE_SIZE: Final = 1 << 20


@cache
def codebook(name: str) -> F16:
    """The 65,536 values of a codebook, indexed by state: (65536,) f16, read-only.  Raises KeyError on another
    name."""
    state = np.arange(65536, dtype=np.uint64)
    if name == "mul1":
        x = (state * np.uint64(MARKERS["mul1"])) & np.uint64(0xFFFFFFFF)
        byte_sum = sum(((x >> np.uint64(8 * i)) & np.uint64(255)).astype(np.int64) for i in range(4))
        # fp16 fma(1024 + S, 0x1EEE, 0xC931) as an exact fraction: one rounding remains
        value = (1774 * (1024 + np.asarray(byte_sum)) - 2721792) / 2.0**18
    else:
        mixed = {"3inst": state * np.uint64(89226354) + np.uint64(64248484),
                 "mcg": state * np.uint64(MARKERS["mcg"])}[name] & np.uint64(0xFFFFFFFF)
        halves = ((mixed & np.uint64(0x8FFF8FFF)) ^ np.uint64(0x3B603B60)).astype("<u4").view("<f2")
        value = halves.astype(np.float64).reshape(-1, 2).sum(axis=1)
    out = value.astype(np.float16)
    out.flags.writeable = False
    return out


def window_ends(bits: float) -> NDArray[np.int64]:
    """E(p): number of stream bits up to and with position p, (256,) int64; E(255) = 256 * bits."""
    doubled = int(2 * bits)
    if doubled != 2 * bits or not 2 <= doubled <= 16 or (doubled % 2 and doubled > 7):
        raise ValueError(f"EXL3 has no width of {bits} bits")
    return (np.arange(256, dtype=np.int64) + 1) * doubled // 2


def tile_positions() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(row, column) in the 16x16 tile of stream position p, two (256,) int64; row = input, column =
    output."""
    p = np.arange(256)
    lane, j = p >> 3, p & 7
    return 2 * (lane & 3) + (j & 1) + 8 * (j >> 1 & 1), (lane >> 2) + 8 * (j >> 2)


def tile_states(words: NDArray[Any]) -> U16:
    """States in stream order of tiles stored as int16 words (..., 16 * bits): (..., 256) uint16."""
    ends = window_ends(words.shape[-1] / 16)
    ring = _tile_bits(words)
    states = np.zeros((*words.shape[:-1], 256), np.uint16)
    for back in range(16, 0, -1):                   # first bit of the window is the state's highest
        states <<= np.uint16(1)
        states |= ring[..., (ends - back) % ring.shape[-1]]
    return states


def tile_values(words: NDArray[Any], name: str) -> F16:
    """Tiles (..., 16 * bits) int16 -> (..., 16, 16) f16 in the rotated domain, [input, output]."""
    row, column = tile_positions()
    values = np.empty((*words.shape[:-1], 16, 16), np.float16)
    values[..., row, column] = codebook(name)[tile_states(words)]
    return values


def encode_tile(states: NDArray[Any], bits: float) -> NDArray[np.int16]:
    """Tile words whose position p adds the low d(p) bits of states[..., p]: (..., 256) -> (..., 16 * bits)
    int16.

    Decoding gives `states` back exactly when they are consistent, that is when each continues its
    predecessors.
    """
    ends = window_ends(bits)
    ring = np.zeros((*states.shape[:-1], int(256 * bits)), np.uint8)
    added = np.diff(ends, prepend=0)
    for back in range(int(added.max())):
        p = np.flatnonzero(added > back)
        ring[..., ends[p] - 1 - back] = states[..., p] >> back & 1
    packed = np.packbits(ring, axis=-1).reshape(*states.shape[:-1], -1, 4)
    return cast(NDArray[np.int16], np.ascontiguousarray(packed[..., ::-1]).view("<i2").reshape(
        *states.shape[:-1], int(16 * bits)))


def decode_linear(trellis: NDArray[Any], name: str) -> F16:
    """trellis (K/16, N/16, 16 * bits) int16 -> W_q (K, N) f16, rotated domain, bit exact."""
    n_k, n_n = trellis.shape[:2]
    w_q = np.empty((n_k, 16, n_n, 16), np.float16)
    for i in range(n_k):                            # tile row by tile row keeps the states small
        w_q[i] = tile_values(trellis[i], name).transpose(1, 0, 2)
    return w_q.reshape(16 * n_k, 16 * n_n)


def unpack_signs(packed: NDArray[Any]) -> F16:
    """Legacy su / sv: (n,) int16 -> (16 n,) f16 of +1 and -1; bit b of word w set means element 16 w + b is
    -1."""
    bits = np.unpackbits(np.ascontiguousarray(packed, "<i2").view(np.uint8), bitorder="little")
    return np.where(bits == 1, np.float16(-1), np.float16(1)).astype(np.float16)


@cache
def hadamard_matrix(n: int) -> Array:
    """Sylvester matrix (n, n) fp64 of +-1, n a power of two: H[i, j] = (-1)^popcount(i & j)."""
    h: Array = np.ones((1, 1))
    while h.shape[0] < n:
        h = np.concatenate((np.concatenate((h, h), 1), np.concatenate((h, -h), 1)))
    if h.shape[0] != n:
        raise ValueError(f"{n} is no power of two")
    return h


def rotate(x: NDArray[Any]) -> Array:
    """Each aligned block of 128 on the last axis times H / sqrt(128), fp64."""
    blocks = np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, 128)
    mixed: Array = blocks @ hadamard_matrix(128) / np.sqrt(128.0)
    return mixed.reshape(x.shape)


def rotated_input_fp16(x: F16, suh: F16) -> F16:
    """The rotation with exllamav3's points: fp16(x * suh), fp32 butterflies, fp16.  (..., K) f16; bit
    exact."""
    product = (x.astype(np.float32) * suh.astype(np.float32)).astype(np.float16).astype(np.float32)
    return hadamard128(product.reshape(*x.shape[:-1], -1, 128)).reshape(x.shape).astype(np.float16)


@dataclass(frozen=True, eq=False)
class Linear:
    """One quantized linear.  w_q (K, N) f16; suh (K,), svh (N,) f16; bias (N,) f16 or None; bits per
    weight."""

    w_q: F16
    suh: F16
    svh: F16
    bias: F16 | None
    codebook: str
    bits: float

    @classmethod
    def from_parts(cls, parts: Mapping[str, NDArray[Any]]) -> Linear:
        """From a tensor group {trellis, suh|su, svh|sv[, mcg|mul1][, bias]}.  Raises ValueError where that is
        broken."""
        found = [name for name in MARKERS if name in parts]
        if len(found) > 1:
            raise ValueError("an EXL3 linear carries both codebook markers, mcg and mul1")
        name = found[0] if found else "3inst"
        if found and int(np.asarray(parts[name]).reshape(()).item()) & 0xFFFFFFFF != MARKERS[name]:
            raise ValueError(f"marker {name} is {parts[name]!r}, not {MARKERS[name]:#x}")
        trellis = parts["trellis"]
        bits = trellis.shape[2] / 16
        if (name, bits) not in PAIRS:
            raise ValueError(f"EXL3 width {bits} with codebook {name} does not exist")
        suh = parts["suh"] if "suh" in parts else unpack_signs(parts["su"])
        svh = parts["svh"] if "svh" in parts else unpack_signs(parts["sv"])
        if suh.shape != (16 * trellis.shape[0],) or svh.shape != (16 * trellis.shape[1],):
            raise ValueError(f"scales {suh.shape} and {svh.shape} do not fit a trellis {trellis.shape}")
        return cls(decode_linear(trellis, name), suh, svh, parts.get("bias"), name, bits)

    def dense(self) -> Array:
        """W (K, N) fp64 with both rotations and scales multiplied out, without bias."""
        inner = rotate(rotate(self.w_q.astype(np.float64)).T).T
        return self.suh.astype(np.float64)[:, None] * inner * self.svh.astype(np.float64)

    def operand(self, x: NDArray[Any], rounding: Rounding = EXACT) -> Array:
        """The rotated row that meets W_q: (x * suh) H, rounded once to fp16 by the contract.  (..., K)
        fp64."""
        return rounding.half(rotate(rounding.single(x) * self.suh.astype(np.float64)))

    def __call__(self, x: NDArray[Any], rounding: Rounding = EXACT) -> Array:
        """y = ((((x * suh) H) W_q) H) * svh + bias: (..., K) -> (..., N) fp64."""
        operand = self.operand(x, rounding)
        if self.w_q.size <= _WIDE_SIZE:
            inner = operand @ self._wide
        else:
            step = max(128, _WIDE_SIZE // self.w_q.shape[0])
            inner = np.concatenate([operand @ self.w_q[:, at:at + step].astype(np.float64)
                                    for at in range(0, self.w_q.shape[1], step)], axis=-1)
        y = rotate(inner) * self.svh.astype(np.float64)
        return rounding.single(y if self.bias is None else y + self.bias.astype(np.float64))

    @cached_property
    def _wide(self) -> Array:
        return self.w_q.astype(np.float64)


def row_width(n_words: int, dim: int) -> int:
    """Bits of a row codec from its words a row: 1 + dim * bits / 16.  Raises ValueError where that is no
    width 1..8."""
    bits, rest = divmod((n_words - 1) * 16, dim)
    if rest or not 1 <= bits <= 8:
        raise ValueError(f"rows of {n_words} words hold no ring of {dim} values of 1 to 8 bits")
    return bits


def row_states(packed: NDArray[Any], dim: int) -> U16:
    """Ring rows (..., words) int16 -> states (..., dim) uint16.  Word 0 (the scale) is skipped."""
    bits = row_width(packed.shape[-1], dim)
    words = np.ascontiguousarray(packed[..., 1:], dtype="<i2")
    stream = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    stream = stream.reshape(*packed.shape[:-1], dim, bits)
    states = np.zeros((*packed.shape[:-1], dim), np.uint16)
    for m in range(16):                             # bit m of a state: bit m % bits, m // bits symbols back
        states |= np.roll(stream[..., m % bits], m // bits, axis=-1).astype(np.uint16) << np.uint16(m)
    return states


def encode_row(symbols: NDArray[Any], bits: int, scale: NDArray[Any]) -> NDArray[np.int16]:
    """symbols (..., dim) of `bits` bits, scale (...) f16 -> ring rows (..., 1 + dim * bits / 16) int16."""
    stream = (symbols[..., None] >> np.arange(bits) & 1).astype(np.uint8)
    body = np.packbits(stream.reshape(*symbols.shape[:-1], -1), axis=-1, bitorder="little").view("<i2")
    head = np.ascontiguousarray(scale, dtype="<f2").view("<i2")[..., None]
    return cast(NDArray[np.int16], np.concatenate((head, body), axis=-1))


def ngram_rows(packed: NDArray[Any], bias: NDArray[Any]) -> tuple[NDArray[np.float32], F16]:
    """Rows of the n-gram table: packed (..., words) int16, bias (..., dim) f16 of each row's head -> (fp32,
    fp16).

    value * scale + bias in two fp32 roundings, then fp16.
    """
    value = _ring_values(packed, bias.shape[-1])
    full = value + np.asarray(bias, np.float16).astype(np.float32)
    return full, full.astype(np.float16)


def embed_rows(trellis: NDArray[Any], signs: NDArray[Any]) -> F16:
    """Quantized token embedding: trellis (rows, groups * words) int16, signs (groups, 256) f16 -> (rows,
    groups * 256) f16.

    Per group: ring values * scale, 256-point Sylvester in stage order bit 0..7, / 16, times the signs, all
    fp32.
    """
    groups = signs.shape[0]
    v = _ring_values(trellis.reshape(trellis.shape[0], groups, -1), 256)
    for bit in range(8):
        pairs = v.reshape(*v.shape[:-1], 128 >> bit, 2, 1 << bit)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        v = np.stack((low + high, low - high), axis=-2).reshape(v.shape)
    v = v * np.float32(0.0625) * signs.astype(np.float32)
    return v.astype(np.float16).reshape(trellis.shape[0], groups * 256)


def _ring_values(packed: NDArray[Any], dim: int) -> NDArray[np.float32]:
    scale = np.ascontiguousarray(packed[..., :1], dtype="<i2").view("<f2").astype(np.float32)
    return cast(NDArray[np.float32], codebook("mul1")[row_states(packed, dim)].astype(np.float32) * scale)


def _tile_bits(words: NDArray[Any]) -> NDArray[np.uint8]:
    """The ring: 32-bit words in order, each from its most significant bit; (..., 256 * bits) of 0 and 1."""
    as_bytes = np.ascontiguousarray(words, dtype="<i2").view(np.uint8).reshape(*words.shape[:-1], -1, 4)
    return np.unpackbits(as_bytes[..., ::-1].reshape(*words.shape[:-1], -1), axis=-1)
