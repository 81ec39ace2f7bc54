"""Contract cases of the deep family: the dense products of a prompt chunk.

Called by check/contract.py; weights, operands and the comparison of a unit are cases_exl3's.  What must stay
true: from the same f16 operand the outputs are those of the units' mma chains, summed and finished by
ref/orders.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels.deep import deep_tiles
from ..kernels.spec import Case
from ..ref.orders import GENERATIONS, canonical, hadamard128, tree
from .cases_exl3 import (
    Dot,
    Linears,
    Weights,
    inputs,
    make_weights,
    operand_rows,
    step_bound,
    unit_chain,
    unit_ranges,
)
from .cases_glue import deep_site_up
from .contract import Operands, poison
from .operands import F32_ULP, near, rotate64, same_bits, to_tiles, untouched

__all__ = ["build"]

Arrays = dict[str, NDArray[Any]]


def build(name: str, case: Case, seed: int) -> Operands:
    """Operands of one case of a kernel of the deep family.  Raises KeyError for another kernel."""
    return {"deep_linear": _linear, "deep_site_up": deep_site_up, "deep_input": _input}[name](case, seed)


def _input(case: Case, seed: int) -> Operands:
    return inputs(case, seed, tiled=True)


def _linear(case: Case, seed: int) -> Operands:
    launch = Linears(case, seed)
    rows, cap = launch.rows, launch.cap
    weights, operands = [], []
    svh: dict[int, NDArray[np.float16]] = {}
    bias: dict[int, NDArray[np.float16]] = {}
    first = 0
    for j, dot in enumerate(launch.dots):
        one = launch.table[j]
        one["tiled"], one["x_stride"], one["first_warp"] = 1, 0, first
        one["n_warps"] = deep_tiles(dot.n)
        first += deep_tiles(dot.n)
        weights.append(make_weights(seed, f"w{j}", dot, launch.data))
        launch.point(j, f"w{j}", weights[j].data, "w", "data")
        x = operand_rows(seed, f"x{j}", max(rows, 1), dot.k, launch.data)[:rows]
        operands.append(x)
        padded = poison((cap, dot.k), np.float16)
        padded[:rows] = x
        launch.point(j, f"x{j}", to_tiles(padded), "x")
        if dot.dtype == "exl3":
            svh[j] = launch.vector(j, "svh", dot.n, "w", "svh")
        if dot.bias:
            bias[j] = launch.vector(j, "bias", dot.n, "bias")
        launch.point(j, f"out{j}", poison((cap, dot.n), np.float32), "out")

    def expect(arrays: Arrays) -> None:
        for j, dot in enumerate(launch.dots):
            got = arrays[f"out{j}"]
            untouched(f"linear {j}: outputs", got[rows:])
            if rows:
                _check_linear(
                    f"linear {j}", got[:rows], operands[j], weights[j], dot, svh.get(j), bias.get(j)
                )

    return launch.finished(
        (2, 1, 1),  # a block takes several tiles
        [f"out{j}" for j in range(len(launch.dots))],
        expect,
        {"n_linears": len(launch.dots)},
    )


def _check_linear(
    name: str,
    got: NDArray[Any],
    x: NDArray[np.float16],
    w: Weights,
    dot: Dot,
    svh: NDArray[np.float16] | None,
    bias: NDArray[np.float16] | None,
) -> None:
    """Finished outputs `got` (rows, N) of operand x (rows, K): in bytes and against FP64."""
    ranges = unit_ranges(dot.k, dot.units)
    with np.errstate(over="ignore", invalid="ignore"):
        wants = []
        for generation in GENERATIONS:
            units = [
                unit_chain(np.ascontiguousarray(x[:, u]), Weights(w.data, w.value[:, u], w.bf16), generation)
                for u in ranges
            ]
            wants.append(canonical(_finished(np.stack(units), dot, svh, bias)))
        if not any((canonical(got).view(np.uint32) == want.view(np.uint32)).all() for want in wants):
            same_bits(name, canonical(got), wants[0])
        finite = np.isfinite(x.astype(np.float64)).all() and (svh is None or np.isfinite(svh).all())
        if finite:
            near(f"{name} (FP64)", got, *_exact(x, w, dot, svh, bias))


def _finished(
    units: NDArray[np.float32], dot: Dot, svh: NDArray[np.float16] | None, bias: NDArray[np.float16] | None
) -> NDArray[np.float32]:
    """units (units, rows, N) -> (rows, N): segments rising, leaves by the tree, rotation, scales, bias."""
    rows = units.shape[1]
    split = units.reshape(dot.leaves, dot.segments, rows, dot.n)
    sums = split[:, 0].copy()
    for s in range(1, dot.segments):
        sums = sums + split[:, s]
    out: NDArray[np.float32] = tree(sums)
    if svh is not None:
        out = hadamard128(out.reshape(rows, -1, 128)).reshape(rows, dot.n) * svh.astype(np.float32)
    if bias is not None:
        out = out + bias.astype(np.float32)
    return out


def _exact(
    x: NDArray[np.float16],
    w: Weights,
    dot: Dot,
    svh: NDArray[np.float16] | None,
    bias: NDArray[np.float16] | None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The FP64 outputs and how far fp32 in this order may be from them."""
    x64, w64, rows = x.astype(np.float64), w.exact(), len(x)
    full, error = np.zeros((rows, dot.n)), np.zeros((rows, dot.n))
    magnitude = np.zeros((rows, dot.n))
    for unit in unit_ranges(dot.k, dot.units):
        exact = np.zeros((rows, dot.n))
        for k in range(unit.start, unit.stop, 16):
            terms = x64[:, None, k : k + 16] * w64[None, :, k : k + 16]
            largest = np.maximum(np.abs(terms).max(axis=-1), np.abs(exact))
            exact = exact + terms.sum(axis=-1)
            error += step_bound(largest, exact) * (2 if w.bf16 else 1)
        full, magnitude = full + exact, magnitude + np.abs(exact)
    bound = error + magnitude * (dot.units + 1) * F32_ULP
    if svh is not None:
        scale = svh.astype(np.float64)
        spread = (magnitude * (dot.units + 9) * F32_ULP + error).reshape(rows, -1, 128).sum(axis=-1)
        bound = np.repeat(spread / np.sqrt(128.0), 128, axis=-1) * np.abs(scale)
        full = rotate64(full) * scale
    if bias is not None:
        full = full + bias.astype(np.float64)
        bound = bound + F32_ULP * (np.abs(full) + bound)
    return full, bound
