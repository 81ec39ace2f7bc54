"""Inputs and comparisons that the kernel cases of several families share.

Owns: seeded values in fp32 and fp16, the fragment order, plain weights in fragment order, round and run
tables, and comparison with a bound per element.  Called by cases_*.py.  What must stay true: no value comes
from NumPy's random generators or from a function whose last bits differ between hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.spec import Case
from ..kernels.tables import LINEAR, ROUND, RUN
from .contract import bits, poison, poison_byte

__all__ = [
    "F16_ULP",
    "F32_ULP",
    "FRAGMENT",
    "bytes_of",
    "field_at",
    "from_fragment",
    "from_tiles",
    "is_tiles",
    "linear_table",
    "midpoints",
    "near",
    "plain_tiles",
    "poisoned_rows",
    "rotate64",
    "rotated",
    "round_table",
    "row_order",
    "rows_of",
    "run_table",
    "same_bits",
    "sigmoid64",
    "signed",
    "to_fragment",
    "to_tiles",
    "untouched",
    "within_f16",
]

F32Array = NDArray[np.float32]
F64Array = NDArray[np.float64]

F32_ULP: Final = 2.0**-24  # half an ulp of fp32, relative: one rounding
F16_ULP: Final = 2.0**-11  # the same of fp16
# position i of a group of 16 holds k = FRAGMENT[i]: a lane's two words of an mma operand lie together
FRAGMENT: Final = np.array([2 * (i >> 2) + (i & 1) + 8 * ((i >> 1) & 1) for i in range(16)])


def signed(seed: int, name: str, shape: tuple[int, ...], scale: float = 1.0) -> F32Array:
    """fp32 values in [-scale, scale), 23 bits of a hash of (seed, name, index) each. scale: a power of two
    keeps them exact.
    """
    raw = np.asarray(bits(seed, name, shape)).astype(np.uint64) & np.uint64(0xFFFFFF)
    return ((raw.astype(np.float64) * 2.0**-23 - 1.0) * scale).astype(np.float32).reshape(shape)


def midpoints(seed: int, name: str, shape: tuple[int, ...], scale: float = 4.0) -> F32Array:
    """fp32 values halfway between two neighbours of fp16: what rounds to even there."""
    low = signed(seed, name, shape, scale).astype(np.float16)
    low = np.where(np.abs(low) < 2.0**-14, np.float16(1.0), low).astype(np.float16)
    high = (low.view(np.uint16) + np.uint16(1)).view(np.float16)     # one further from zero
    return ((low.astype(np.float64) + high.astype(np.float64)) / 2).astype(np.float32)


def to_fragment(x: NDArray[Any]) -> NDArray[Any]:
    """(..., K) in natural order -> (..., K) in fragment order.  K a multiple of 16."""
    groups = x.reshape(*x.shape[:-1], -1, 16)
    return np.ascontiguousarray(groups[..., FRAGMENT].reshape(x.shape))


def from_fragment(x: NDArray[Any]) -> NDArray[Any]:
    """The inverse of to_fragment."""
    return np.ascontiguousarray(x.reshape(*x.shape[:-1], -1, 16)[..., np.argsort(FRAGMENT)].reshape(x.shape))


def to_tiles(x: NDArray[Any]) -> NDArray[Any]:
    """(rows, K) 16-bit values in natural order -> the tile image (ceil(rows/64), ceil(K/64), 64, 64); what
    fills it up is poison."""
    rows, k = x.shape
    full = poison((-(-rows // 64) * 64, -(-k // 64) * 64), x.dtype)
    full[:rows, :k] = x
    chunks = full.reshape(-1, 64, full.shape[1] // 64, 8, 8)
    return np.ascontiguousarray(_swizzled(chunks).transpose(0, 2, 1, 3, 4).reshape(len(chunks), -1, 64, 64))


def from_tiles(image: NDArray[Any]) -> NDArray[Any]:
    """The inverse of to_tiles: (images, k blocks, 64, 64) -> (64 images, 64 k blocks)."""
    n, k_blocks = image.shape[:2]
    chunks = image.reshape(n, k_blocks, 64, 8, 8).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(_swizzled(chunks).reshape(64 * n, 64 * k_blocks))


def is_tiles(x: NDArray[Any]) -> bool:
    """Whether an array has the shape of a tile image."""
    return x.ndim == 4 and x.shape[2:] == (64, 64) and x.dtype.itemsize == 2


def _swizzled(chunks: NDArray[Any]) -> NDArray[Any]:
    """(images, 64 rows, k blocks, 8 chunks, 8): chunk j of row r exchanged with chunk j ^ (r & 7)."""
    row, j = np.arange(64)[:, None], np.arange(8)[None, :]
    index = np.broadcast_to((j ^ row & 7)[None, :, None, :, None], chunks.shape)
    return np.take_along_axis(chunks, index, axis=3)


def plain_tiles(w: NDArray[Any]) -> NDArray[Any]:
    """(N, K) 16-bit weights -> (ceil(N/16), K/16, 32 lanes, 8) in fragment order; missing outputs zero."""
    n, k = w.shape
    full = np.zeros((-(-n // 16) * 16, k), w.dtype)
    full[:n] = w
    tiles = full.reshape(-1, 16, k // 16, 16).transpose(0, 2, 1, 3)
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    parts = [tiles[:, :, g + 8 * (i & 1), 2 * t + 8 * (i >> 1) + j] for i in range(4) for j in range(2)]
    return np.ascontiguousarray(np.stack(parts, axis=-1))


def row_order(case: Case) -> list[int]:
    """Which generated rows stand in the launch, in order: dims["order"] ("4,0,2"), else 0 .. rows-1."""
    if "order" in case.dims:
        return [int(i) for i in str(case["order"]).split(",")]
    return list(range(case.int("rows")))


def rows_of(values: NDArray[Any], order: Sequence[int], rows_cap: int) -> NDArray[Any]:
    """(rows_cap, ...) array whose row i is values[order[i]], the rest poison, which none may read."""
    out = poison((rows_cap, *values.shape[1:]), values.dtype)
    out[: len(order)] = values[list(order)]
    return out


def poisoned_rows(rows_cap: int, *shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    """(rows_cap, *shape) of poison."""
    return poison((rows_cap, *shape), np.dtype(dtype))


def round_table(n_rows: int, rows_cap: int, n_runs: int | None = None) -> NDArray[Any]:
    """One FnRound."""
    return np.array([(n_rows, n_rows if n_runs is None else n_runs, rows_cap, 1)], ROUND)


def run_table(lengths: Sequence[int], slots: Sequence[int], rows_cap: int) -> NDArray[Any]:
    """FnRun[rows_cap] of consecutive runs; the unused ones are poison."""
    out = poison((rows_cap,), RUN)
    first = 0
    for i, (n, slot) in enumerate(zip(lengths, slots, strict=True)):
        out[i] = (slot, first, n, 100 + first)
        first += n
    return out


def linear_table(n: int) -> NDArray[Any]:
    """FnLinear[n] of zeros, to be filled by the caller and by relocations."""
    return np.zeros(n, LINEAR)


def field_at(dtype: np.dtype[Any], *path: str) -> int:
    """Byte offset of a field, or of a field of a field."""
    at = 0
    for name in path:
        assert dtype.fields is not None
        dtype, offset = dtype.fields[name][:2]
        at += offset
    return at


def sigmoid64(x: NDArray[Any]) -> F64Array:
    """1 / (1 + exp(-x)) in FP64."""
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-np.asarray(x, np.float64)))


def rotate64(x: NDArray[Any]) -> F64Array:
    """Sylvester-Hadamard over aligned blocks of 128 of the last axis, times 1/sqrt(128), FP64."""
    v = np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, 128)
    with np.errstate(invalid="ignore"):
        for bit in range(7):
            pairs = v.reshape(*v.shape[:-1], 64 >> bit, 2, 1 << bit)
            low, high = pairs[..., 0, :], pairs[..., 1, :]
            v = np.stack((low + high, low - high), axis=-2).reshape(v.shape)
    out: F64Array = (v / np.sqrt(128.0)).reshape(x.shape)
    return out


def rotated(x: F64Array, relative: float) -> tuple[F64Array, F64Array]:
    """The rotation of a value known within `relative`, and what its fp32 form may err by.

    Seven stages and the scale round once each, on sums that are at most the block's sum of magnitudes.
    """
    size = np.abs(x).reshape(*x.shape[:-1], -1, 128).sum(axis=-1, keepdims=True) / np.sqrt(128.0)
    bound = np.broadcast_to(size * (relative + 8 * F32_ULP), (*size.shape[:-1], 128)).reshape(x.shape)
    return rotate64(x), np.nan_to_num(bound, nan=0.0, posinf=0.0)


def bytes_of(x: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(x).view(np.uint8)


def untouched(name: str, x: NDArray[Any]) -> None:
    """Every byte of `x` is still poison."""
    assert (bytes_of(x) == poison_byte()).all(), f"{name}: rows that do not take part were written"


def near(name: str, got: NDArray[Any], want: NDArray[Any], bound: NDArray[Any] | float) -> None:
    """|got - want| <= bound element by element; NaN only where wanted, infinities equal."""
    g, w = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert g.shape == w.shape, f"{name}: shape {g.shape}, wanted {w.shape}"
    limit = np.broadcast_to(np.asarray(bound, np.float64), w.shape)
    nan = np.isnan(w)
    assert (np.isnan(g) == nan).all(), (
        f"{name}: NaN at {_first(np.isnan(g) != nan)} differs from the reference"
    )
    finite = np.isfinite(w)
    wrong = ~nan & ~finite & (g != w)
    assert not wrong.any(), f"{name}: infinity at {_first(wrong)} differs from the reference"
    error = np.abs(np.where(finite, g, 0.0) - np.where(finite, w, 0.0))
    over = finite & ~(error <= limit)
    if over.any():
        at = np.unravel_index(int(np.argmax(np.where(over, error - limit, -1.0))), w.shape)
        raise AssertionError(
            f"{name}: {int(over.sum())} of {w.size} beyond the bound; worst at {tuple(map(int, at))}: got "
            f"{g[at]!r}, wanted {w[at]!r}, error {error[at]:.3e}, bound {limit[at]:.3e}"
        )


def within_f16(name: str, got: NDArray[Any], want: F64Array, before: NDArray[Any] | float) -> None:
    """`got` is fp16 of a value within `before` of `want`: one rounding to fp16 more (half of 2^-24 below its
    normals)."""
    with np.errstate(over="ignore", invalid="ignore"):
        large = np.abs(want) > 65504.0
        limit = np.asarray(before) + F16_ULP * (np.abs(want) + before) + 2.0**-25
        target = np.where(large, np.asarray(want, np.float64).astype(np.float16).astype(np.float64), want)
    near(name, got, target, limit)


def same_bits(name: str, got: NDArray[Any], want: NDArray[Any]) -> None:
    """Equal bytes, all NaNs counting as one value."""
    g, w = np.asarray(got), np.asarray(want)
    assert g.dtype == w.dtype and g.shape == w.shape, f"{name}: {g.dtype}{g.shape}, wanted {w.dtype}{w.shape}"
    unsigned = np.dtype(f"u{g.dtype.itemsize}")
    differ = (g.view(unsigned) != w.view(unsigned)) & ~(np.isnan(g) & np.isnan(w))
    assert not differ.any(), (
        f"{name}: {int(differ.sum())} of {g.size} differ in bits from the order's oracle, first at "
        f"{_first(differ)}: got {g[differ][0]!r}, wanted {w[differ][0]!r}"
    )


def _first(mask: NDArray[Any]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(mask)[0])
