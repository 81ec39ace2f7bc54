"""Sequence state of the reference: export and import as plain arrays, and synthetic states at any position.

The array form is what a kernel test loads as bytes, so its types are the contract's storage types.  Keys,
with {l} the layer index, T the position (tokens already run):
    L{l}.k, L{l}.v     (T, n_kv, head_dim) f16      sparse layers: keys after norm and RoPE, values
    L{l}.raw           (T, d_i) f16                 raw index keys
    L{l}.pooled        (T // 4, d_i) f16            pooled index keys of the complete blocks
    L{l}.recurrent     (n_v, d_k, d_v) f32          DeltaNet layers
    L{l}.conv          (taps - 1, channels) f16     DeltaNet convolution inputs, oldest first
    L{l}.ple_conv      ((taps - 1) * N, S * H) f16  PLE layers: convolution inputs, oldest first
    ids                (N - 1,) i64                 the last token ids, oldest first
Called by tests of long contexts.  What must stay true: `synthetic_state` is made by integer hashing alone,
so every machine gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from .attn import Rows

if TYPE_CHECKING:
    from .model import Dims

__all__ = ["State", "synthetic_state"]

_SPARSE: Final = ("k", "v", "raw", "pooled")
_DELTA: Final = ("recurrent", "conv")
_TYPES: Final = {"k": np.float16, "v": np.float16, "raw": np.float16, "pooled": np.float16,
                 "conv": np.float16, "recurrent": np.float32}
_CHUNK: Final = 1 << 22


class State:
    """What a sequence carries between steps.  position: tokens run; layers: per layer the mixer's own state;
    ple: layer index -> PLE state."""

    def __init__(self, position: int, layers: list[dict[str, Any]], ple: dict[int, dict[str, NDArray[Any]]]):
        self.position, self.layers, self.ple = position, layers, ple

    def export(self) -> dict[str, NDArray[Any]]:
        """The array form of the module's docstring; exact only for states of a contract run."""
        out: dict[str, NDArray[Any]] = {}
        for i, layer in enumerate(self.layers):
            for name, value in layer.items():
                stored = value.stored() if isinstance(value, Rows) else value
                out[f"L{i}.{name}"] = np.asarray(stored).astype(_TYPES[name])
        for i, ple in self.ple.items():
            out[f"L{i}.ple_conv"] = ple["conv"].astype(np.float16)
            out["ids"] = ple["ids"].astype(np.int64)
        return out

    @classmethod
    def restore(cls, arrays: Mapping[str, NDArray[Any]], position: int, n_layers: int, *,
                fp16: bool) -> State:
        """A state from its array form.  fp16: rows added later are stored in fp16 (a contract run).  KV is
        not copied.

        Raises KeyError on a missing array, ValueError when a length does not fit `position`.
        """
        layers: list[dict[str, Any]] = []
        ple: dict[int, dict[str, NDArray[Any]]] = {}
        for i in range(n_layers):
            if f"L{i}.k" in arrays:
                rows = {name: arrays[f"L{i}.{name}"] for name in _SPARSE}
                for name, value in rows.items():
                    if name != "pooled" and len(value) != position:
                        raise ValueError(f"L{i}.{name} holds {len(value)} tokens, not {position}")
                layers.append({name: Rows(value if fp16 else value.astype(np.float64))
                               for name, value in rows.items()})
            else:
                layers.append({name: arrays[f"L{i}.{name}"].astype(np.float64) for name in _DELTA})
            if f"L{i}.ple_conv" in arrays:
                ple[i] = {"conv": arrays[f"L{i}.ple_conv"].astype(np.float64), "ids": arrays["ids"].copy()}
        return cls(position, layers, ple)


def synthetic_state(config: Dims, position: int, seed: int) -> dict[str, NDArray[Any]]:
    """A state at `position` that no prompt made: arrays as documented above, by integer hash of (seed, name,
    index).

    fp16 values have magnitude 2^-3 to 2 (so keys look normed), the recurrent state 2^-7 to 2^-3.  A pooled
    key is not the mean of its raw keys: readers must take it as stored.  Cost: about 3 s and 0.6 GB a sparse
    layer of 2 kv heads of 256 at 262,000.
    """
    c = config
    out: dict[str, NDArray[Any]] = {}
    for i in range(c.n_layers):
        if i in c.sparse_layers:
            for name in ("k", "v"):
                shape: tuple[int, ...] = (position, c.qsa.n_kv_heads, c.qsa.head_dim)
                out[f"L{i}.{name}"] = _half(seed, f"L{i}.{name}", shape)
            out[f"L{i}.raw"] = _half(seed, f"L{i}.raw", (position, c.qsa.index_dim))
            out[f"L{i}.pooled"] = _half(seed, f"L{i}.pooled", (position // c.qsa.ratio, c.qsa.index_dim))
        else:
            shape = (c.gdn.n_value_heads, c.gdn.key_dim, c.gdn.value_dim)
            recurrent = _half(seed, f"L{i}.recurrent", shape).astype(np.float32)
            out[f"L{i}.recurrent"] = recurrent * np.float32(2.0**-4)
            out[f"L{i}.conv"] = _half(seed, f"L{i}.conv", (c.gdn.taps - 1, c.gdn.channels))
        if i in c.ple_layers:
            reach = (c.ple_taps - 1) * c.ngram_size
            out[f"L{i}.ple_conv"] = _half(seed, f"L{i}.ple_conv", (reach, c.n_streams * c.hidden))
    out["ids"] = _hash(seed, "ids", 0, c.ngram_size - 1).astype(np.int64) % c.vocab
    return out


def _half(seed: int, name: str, shape: tuple[int, ...]) -> NDArray[np.float16]:
    """fp16 of random sign, exponent 2^-3 .. 2^0 and mantissa: 16 hash bits a value."""
    n = int(np.prod(shape))
    bits = np.empty(n + n % 2, np.uint16)
    for at in range(0, len(bits), _CHUNK):
        end = min(at + _CHUNK, len(bits))
        words = _hash(seed, name, at // 2, (end - at) // 2)
        bits[at:end] = words.astype("<u4").view("<u2")
    bits &= 0x8FFF
    bits += 0x3000
    return bits[:n].view(np.float16).reshape(shape)


def _hash(seed: int, name: str, first: int, count: int) -> NDArray[np.uint32]:
    """32-bit hash of (seed, name, index): FNV-1a of the name, then two murmur3 finishers over the index."""
    start = 0x811C9DC5 ^ seed & 0xFFFFFFFF
    for byte in name.encode():
        start = (start ^ byte) * 0x01000193 & 0xFFFFFFFF
    with np.errstate(over="ignore"):
        x = np.arange(first, first + count, dtype=np.uint32) * np.uint32(0x9E3779B1) ^ np.uint32(start)
        for _ in range(2):
            x ^= x >> np.uint32(16)
            x *= np.uint32(0x85EBCA6B)
            x ^= x >> np.uint32(13)
            x *= np.uint32(0xC2B2AE35)
            x ^= x >> np.uint32(16)
    return x
