"""Contract cases of the exl3 family: operands, bit oracles and FP64 bounds of the linear kernels.

Called by check/contract.py; weights, dots and the comparison of a dot are shared with cases_moe_gemv.py.
What must stay true: weights are decoded by ref/exl3.py alone; a dot is compared in bytes with the mma chain
of a known GPU generation and, from the same f16 operand, with FP64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels.deep import deep_input_grid
from ..kernels.exl3 import dot_segments, fragment_order_rows, fragment_order_weights
from ..kernels.spec import Case
from ..kernels.tables import FORMAT_BF16, FORMAT_F16, LINEAR, exl3_format
from ..ref.exl3 import decode_linear
from ..ref.orders import GENERATIONS, canonical, hadamard128, mma_chain, tree
from .contract import Operands, bits, poison
from .operands import (
    F32_ULP,
    field_at,
    from_tiles,
    midpoints,
    near,
    rotate64,
    round_table,
    same_bits,
    signed,
    to_tiles,
    untouched,
    within_f16,
)

__all__ = [
    "Dot",
    "Linears",
    "Weights",
    "build",
    "check_unit",
    "finished",
    "inputs",
    "make_weights",
    "operand_rows",
    "parse_linear",
    "step_bound",
    "unit_chain",
    "unit_ranges",
]

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Dot:
    """One linear of a case: dtype "exl3", "f16" or "bf16", and its form.  split: segments of a leaf, 0: by
    the rule."""

    dtype: str
    codebook: str
    bits: float
    k: int
    n: int
    leaves: int = 1
    bias: bool = False
    split: int = 0

    @property
    def segments(self) -> int:
        return self.split or dot_segments(self.k, self.n, self.leaves)

    @property
    def units(self) -> int:
        return self.leaves * self.segments

    @property
    def format(self) -> int:
        if self.dtype == "exl3":
            return exl3_format(self.bits, self.codebook)
        return {"f16": FORMAT_F16, "bf16": FORMAT_BF16}[self.dtype]


@dataclass(frozen=True)
class Weights:
    """data: as on the device (trellis int16, or 16-bit elements in fragment order).  value: (N, K) as the mma
    meets them: f16, or uint16 bits of bf16."""

    data: NDArray[Any]
    value: NDArray[Any]
    bf16: bool = False

    def exact(self) -> NDArray[np.float64]:
        """(N, K) fp64."""
        if self.bf16:
            return (self.value.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        return self.value.astype(np.float64)


def parse_linear(text: str) -> Dot:
    """ "mul1_2.5 512x128/2:1+bias" and the like (kernels/exl3.py says how)."""
    form, shape = text.split()
    bias = shape.endswith("+bias")
    shape, _, split = shape.removesuffix("+bias").partition(":")
    shape, _, leaves = shape.partition("/")
    k, n = (int(v) for v in shape.split("x"))
    if form in ("f16", "bf16"):
        return Dot(form, "", 0.0, k, n, int(leaves or 1), bias, int(split or 0))
    codebook, width = form.split("_")
    return Dot("exl3", codebook, float(width), k, n, int(leaves or 1), bias, int(split or 0))


def make_weights(seed: int, name: str, dot: Dot, data: str = "") -> Weights:
    """Random words for EXL3 (any are valid); f16 and bf16 in [-1, 1), or small integers if `data` says so."""
    if dot.dtype == "exl3":
        words = bits(seed, name, (dot.k // 16, dot.n // 16, int(8 * dot.bits))).astype("<u4").view("<i2")
        return Weights(words, np.ascontiguousarray(decode_linear(words, dot.codebook).T))
    if data == "integers":
        w = (bits(seed, name, (dot.n, dot.k)) % np.uint32(17)).astype(np.float32) - np.float32(8)
    else:
        w = signed(seed, name, (dot.n, dot.k))
    if dot.dtype == "f16":
        half = w.astype(np.float16)
        return Weights(fragment_order_weights(half), half)
    top = ((w.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    return Weights(fragment_order_weights(top), top, bf16=True)


def operand_rows(seed: int, name: str, rows: int, k: int, data: str = "") -> NDArray[np.float16]:
    """(rows, K) f16 by `data`: random in [-2, 2); "onehot" (row i: 37 i + 3 mod K); "integers";
    "nonfinite": random with an infinity in row 0 and a NaN in row 1."""
    if data == "onehot":
        x = np.zeros((rows, k), np.float16)
        x[np.arange(rows), (37 * np.arange(rows) + 3) % k] = 1
        return x
    if data == "integers":
        return ((bits(seed, name, (rows, k)) % np.uint32(9)).astype(np.float32) - np.float32(4)).astype(
            np.float16
        )
    x = signed(seed, name, (rows, k), 2.0).astype(np.float16)
    if data == "nonfinite":
        x[0, 7 % k] = np.inf
        x[min(1, rows - 1), k // 2] = np.nan
    return x


def unit_ranges(k: int, units: int) -> list[slice]:
    """The k range of each unit."""
    return [slice(u * (k // units), (u + 1) * (k // units)) for u in range(units)]


def check_unit(name: str, got: NDArray[Any], x: NDArray[np.float16], w: Weights, unit: slice) -> None:
    """Partial sums `got` (rows, N) fp32 of operand x (rows, K) and w over inputs `unit`.

    Bytes: the mma chain of one of the known generations.  FP64: a k16 step aligns 17 terms to the largest, of
    magnitude at most M, and cuts each at 2^-25 of its power of two (sm_80: twice, 9 terms, 2^-24), then cuts
    the sum of magnitude A toward zero to fp32: 2^-23 (9 M + 2 A) covers both; bf16 has two such steps.
    """
    part_w = Weights(w.data, w.value[:, unit], w.bf16)
    part_x = np.ascontiguousarray(x[:, unit])
    chains = [unit_chain(part_x, part_w, generation) for generation in GENERATIONS]
    if not any((canonical(got).view(np.uint32) == chain.view(np.uint32)).all() for chain in chains):
        same_bits(f"{name} (mma chain)", canonical(got), chains[0])
    x64, w64 = part_x.astype(np.float64), part_w.exact()
    exact, bound = np.zeros(got.shape), np.zeros(got.shape)
    with np.errstate(invalid="ignore"):
        for k in range(0, x64.shape[1], 16):
            terms = x64[:, None, k : k + 16] * w64[None, :, k : k + 16]
            largest = np.maximum(np.abs(terms).max(axis=-1), np.abs(exact))
            exact = exact + terms.sum(axis=-1)
            bound += step_bound(largest, exact) * (2 if w.bf16 else 1)
    near(f"{name} (FP64)", got, exact, np.nan_to_num(bound, nan=0.0, posinf=0.0))


def step_bound(largest: NDArray[Any], after: NDArray[Any]) -> NDArray[Any]:
    """What a k16 step may err by.  largest: magnitude of its largest term, the sum before with them; after:
    the exact sum."""
    return np.asarray(2.0**-23 * 1.01 * (9 * largest + 2 * np.maximum(np.abs(after), largest)))


def unit_chain(x: NDArray[np.float16], w: Weights, generation: str) -> NDArray[np.float32]:
    """(rows, N) fp32: the mma chain of all of x (rows, K) and w on one generation."""
    if not w.bf16:
        return mma_chain(x, w.value, generation)
    high, low = _bf16_split(x)
    acc = np.zeros((x.shape[0], w.value.shape[0]), np.float32)
    for k in range(0, x.shape[1], 16):
        cut = slice(k, k + 16)
        for part in (high, low):
            acc = mma_chain(part[:, cut], w.value[:, cut], generation, bf16=True, start=acc)
    return acc


def _bf16_split(x: NDArray[np.float16]) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """x = hi + lo exactly, hi = bf16(x) to nearest even; lo is 0 where hi is not finite."""
    full = x.astype(np.float32)
    raw = full.view(np.uint32)
    high = ((raw + np.uint32(0x7FFF) + (raw >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(
        np.uint16
    )
    high[np.isnan(full)] = 0x7FFF
    value = (high.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(invalid="ignore"):
        rest = np.where(np.isfinite(value), full - value, np.float32(0)).astype(np.float32)
    return high, (rest.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def finished(
    part: NDArray[Any], dot: Dot, svh: NDArray[np.float16] | None, bias: NDArray[np.float16] | None
) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.float64]]:
    """Outputs (rows, N) from partial sums (units, rows, N): by the orders in fp32, by FP64, and by how much
    the two may differ: units + 9 roundings of the block's sum of magnitudes (plain: units + 1 of the
    output's own) and one of the bias."""
    rows, wide = part.shape[1], part.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        split = part.reshape(dot.leaves, dot.segments, rows, dot.n)
        sums = split[:, 0].copy()
        for s in range(1, dot.segments):
            sums = sums + split[:, s]
        want, full = tree(sums), wide.sum(axis=0)
        size = np.abs(wide).sum(axis=0) * (dot.units + 1) * F32_ULP
        if svh is not None:
            scale = svh.astype(np.float64)
            want = hadamard128(want.reshape(rows, -1, 128)).reshape(rows, dot.n) * svh.astype(np.float32)
            full = rotate64(full) * scale
            magnitude = np.abs(wide).sum(axis=0).reshape(rows, -1, 128).sum(axis=-1) / np.sqrt(128.0)
            size = np.repeat(magnitude, 128, axis=-1) * (dot.units + 9) * F32_ULP * np.abs(scale)
        if bias is not None:
            want = want + bias.astype(np.float32)
            full = full + bias.astype(np.float64)
            size = size + F32_ULP * (np.abs(full) + size)
        return canonical(want), full, size


# ---- cases -------------------------------------------------------------------------------------------------


def build(name: str, case: Case, seed: int) -> Operands:
    """Operands of one case of a kernel of the exl3 family.  Raises KeyError for another kernel."""
    return {
        "linear_input": inputs,
        "linear_gemv_n8": _gemv,
        "linear_gemv_n16": _gemv,
        "linear_finish": _finish,
    }[name](case, seed)


class Linears:
    """The linears of a case, and the arrays and addresses that their descriptors name."""

    def __init__(self, case: Case, seed: int) -> None:
        self.dots = [parse_linear(text) for text in str(case["linears"]).split(";")]
        self.rows, self.cap, self.seed = case.int("rows"), case.int("rows_cap"), seed
        self.data = str(case.dims.get("data", ""))
        self.table = np.zeros(len(self.dots), LINEAR)
        self.arrays: Arrays = {"round": round_table(self.rows, self.cap)}
        self.relocations: list[tuple[str, int, str, int]] = []
        first = 0
        for j, dot in enumerate(self.dots):
            one = self.table[j]
            one["k"], one["n"], one["leaves"], one["segments"] = dot.k, dot.n, dot.leaves, dot.segments
            one["w"]["format"], one["x_stride"] = dot.format, dot.k + 16 * (j % 2)
            at_once = min(int(case.dims.get("at_once", 1)), dot.units)
            one["first_warp"], one["n_warps"] = first, -(-dot.n // 32) * dot.units // at_once
            first += int(one["n_warps"])
        self.n_warps = first

    def point(self, j: int, array: str, values: NDArray[Any], *path: str) -> None:
        """Field `path` of descriptor j is to hold the address of a new array."""
        self.arrays[array] = values
        self.relocations.append(("linears", j * LINEAR.itemsize + field_at(LINEAR, *path), array, 0))

    def vector(self, j: int, name: str, size: int, *path: str) -> NDArray[np.float16]:
        """A random f16 vector (scales, bias) of descriptor j."""
        values = signed(self.seed, f"{name}{j}", (size,), 2.0).astype(np.float16)
        if self.data == "nonfinite_scales":
            values[5], values[-1] = np.nan, np.inf
        self.point(j, f"{name}{j}", values, *path)
        return values

    def finished(
        self,
        grid: tuple[int, int, int],
        outputs: list[str],
        expect: Any,
        scalars: dict[str, int | float] | None = None,
    ) -> Operands:
        self.arrays["linears"] = self.table
        return Operands(self.arrays, scalars or {}, grid, self.relocations, tuple(outputs), expect)


def inputs(case: Case, seed: int, tiled: bool = False) -> Operands:
    """Operands of linear_input, or of deep_input, which makes tile images."""
    launch = Linears(case, seed)
    rows, cap = launch.rows, launch.cap
    k_max = max(dot.k for dot in launch.dots)
    stride = k_max + 8
    x = poison((cap, stride), np.float32)
    x[:rows, :k_max] = signed(seed, "x", (rows, k_max), 4.0)
    if launch.data == "nonfinite":
        x[0, 5], x[1, 130], x[2, 9] = np.inf, np.nan, 3e38
    if launch.data == "midpoints":
        x[:rows, :k_max] = midpoints(seed, "x", (rows, k_max))
    launch.arrays["x"] = x
    suh = {
        j: launch.vector(j, "suh", dot.k, "w", "suh")
        for j, dot in enumerate(launch.dots)
        if dot.dtype == "exl3"
    }
    for j, dot in enumerate(launch.dots):
        launch.table[j]["tiled"] = int(tiled)
        empty = poison((cap, dot.k if tiled else int(launch.table[j]["x_stride"])), np.float16)
        launch.point(j, f"x{j}", to_tiles(empty) if tiled else empty, "x")

    def placed(values: NDArray[Any]) -> NDArray[Any]:
        return values if tiled else fragment_order_rows(values)

    def expect(arrays: Arrays) -> None:
        for j, dot in enumerate(launch.dots):
            got, name = arrays[f"x{j}"], f"linear {j}: operand"
            got = from_tiles(got) if tiled else got
            untouched(name, got[rows:])
            untouched(name, got[:, dot.k :])
            if not rows:
                continue
            values = x[:rows, : dot.k]
            with np.errstate(over="ignore", invalid="ignore"):
                if j in suh:
                    product = values * suh[j].astype(np.float32)
                    want = hadamard128(product.reshape(rows, -1, 128)).reshape(rows, dot.k).astype(np.float16)
                    full = rotate64(values.astype(np.float64) * suh[j].astype(np.float64))
                    size = (
                        np.abs(values.astype(np.float64) * suh[j].astype(np.float64))
                        .reshape(rows, -1, 128)
                        .sum(axis=-1)
                    )
                    before = np.repeat(size / np.sqrt(128.0) * 9 * F32_ULP, 128, axis=-1)
                else:
                    want, full = values.astype(np.float16), values.astype(np.float64)
                    before = np.zeros(full.shape)
            same_bits(name, got[:rows, : dot.k], placed(want))
            if not launch.data.startswith("nonfinite"):
                within_f16(name, got[:rows, : dot.k], placed(full), placed(before))

    n = len(launch.dots)
    scalars: dict[str, int | float] = {"x_stride": stride}
    if tiled:
        scalars["n_linears"] = n
    grid = (*deep_input_grid(cap, k_max), 1) if tiled else (-(-k_max // 512), n, cap)
    return launch.finished(grid, [f"x{j}" for j in range(n)], expect, scalars)


def _gemv(case: Case, seed: int) -> Operands:
    launch = Linears(case, seed)
    rows, cap = launch.rows, launch.cap
    weights, operands = [], []
    for j, dot in enumerate(launch.dots):
        weights.append(make_weights(seed, f"w{j}", dot, launch.data))
        launch.point(j, f"w{j}", weights[j].data, "w", "data")
        x = operand_rows(seed, f"x{j}", max(rows, 1), dot.k, launch.data)[:rows]
        operands.append(x)
        buffer = poison((cap, int(launch.table[j]["x_stride"])), np.float16)
        buffer[:rows, : dot.k] = fragment_order_rows(x)
        launch.point(j, f"x{j}", buffer, "x")
        launch.point(j, f"part{j}", poison((dot.units, cap, dot.n), np.float32), "part")

    def expect(arrays: Arrays) -> None:
        for j, dot in enumerate(launch.dots):
            part = arrays[f"part{j}"]
            untouched(f"linear {j}: partial sums", part[:, rows:])
            if not rows:
                continue
            for u, unit in enumerate(unit_ranges(dot.k, dot.units)):
                check_unit(f"linear {j} unit {u}", part[u, :rows], operands[j], weights[j], unit)
            if launch.data == "onehot":
                at = np.argmax(operands[j] != 0, axis=1)
                same_bits(
                    f"linear {j}: W_q",
                    part.sum(axis=0)[:rows].astype(np.float16),
                    weights[j].value[:, at].T.copy(),
                )
            elif launch.data == "integers":
                exact = operands[j].astype(np.float64) @ weights[j].exact().T
                same_bits(f"linear {j}: integers", part[:, :rows].astype(np.float64).sum(axis=0), exact)

    return launch.finished(
        (launch.n_warps, 1, 1),
        [f"part{j}" for j in range(len(launch.dots))],
        expect,
        {"n_linears": len(launch.dots)},
    )


def _finish(case: Case, seed: int) -> Operands:
    launch = Linears(case, seed)
    rows, cap = launch.rows, launch.cap
    svh: dict[int, NDArray[np.float16]] = {}
    bias: dict[int, NDArray[np.float16]] = {}
    for j, dot in enumerate(launch.dots):
        part = poison((dot.units, cap, dot.n), np.float32)
        part[:, :rows] = signed(seed, f"part{j}", (dot.units, rows, dot.n), 8.0)
        if launch.data == "nonfinite":
            part[0, 0, 3], part[-1, 1, dot.n - 1] = np.nan, -np.inf
        if launch.data == "integers":
            part[:, :rows] = np.round(part[:, :rows] * 1000)
        launch.point(j, f"part{j}", part, "part")
        if dot.dtype == "exl3":
            svh[j] = launch.vector(j, "svh", dot.n, "w", "svh")
        if dot.bias:
            bias[j] = launch.vector(j, "bias", dot.n, "bias")
        launch.point(j, f"out{j}", poison((cap, dot.n), np.float32), "out")

    def expect(arrays: Arrays) -> None:
        for j, dot in enumerate(launch.dots):
            got, name = arrays[f"out{j}"], f"linear {j}: output"
            untouched(name, got[rows:])
            part = arrays[f"part{j}"][:, :rows]
            want, full, size = finished(part, dot, svh.get(j), bias.get(j))
            same_bits(name, got[:rows], want)
            if launch.data == "integers":
                exact = part.astype(np.float64).sum(axis=0)
                assert (got[:rows] == exact).all(), f"{name}: not the exact integers"
            if not launch.data.startswith("nonfinite"):
                near(f"{name} (FP64)", got[:rows], full, size)

    grid = (-(-max(dot.n for dot in launch.dots) // 512), len(launch.dots), cap)
    return launch.finished(grid, [f"out{j}" for j in range(len(launch.dots))], expect)
