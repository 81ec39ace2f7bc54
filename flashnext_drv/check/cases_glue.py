"""Contract cases of the glue family: inputs, FP64 expectations from the operands as the kernels rounded them,
and bit oracles of the orders that need no elementary function.

Called by check/contract.py. operands.row_order says which of the 16 generated rows stand in a launch, so that
a test can ask for a row alone and among others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.exl3 import dot_segments
from ..kernels.spec import Case
from ..kernels.tables import FORMAT_BF16, FORMAT_F16, LINEAR
from ..ref.orders import canonical, fma32, tree, warp_sum
from .contract import Operands
from .operands import (
    F32_ULP,
    field_at,
    from_fragment,
    from_tiles,
    is_tiles,
    linear_table,
    near,
    plain_tiles,
    poisoned_rows,
    round_table,
    row_order,
    rows_of,
    same_bits,
    sigmoid64,
    signed,
    to_fragment,
    to_tiles,
    untouched,
    within_f16,
)

__all__ = ["build", "deep_site_up", "rms_row_v1"]

Arrays = dict[str, NDArray[Any]]
N_ROWS: Final = 16
EPS: Final = 1e-6


def build(name: str, case: Case, seed: int) -> Operands:
    """Operands of one case of a glue kernel.  Raises KeyError for a kernel of another family."""
    return _BUILDERS[name](case, seed)


def _site_norm(case: Case, seed: int) -> Operands:
    hidden, add, order = case.int("hidden"), case.int("add"), row_order(case)
    n, cap = len(order), case.int("rows_cap")
    streams = signed(seed, "streams", (N_ROWS, 4 * hidden), 4.0)
    y, inject = signed(seed, "y", (N_ROWS, hidden), 2.0), signed(seed, "inject", (N_ROWS, 4), 2.0)
    if case.dims.get("special") == "nonfinite":
        streams[1, hidden + 5], y[2, 3] = np.nan, np.inf
    w = signed(seed, "w", (4 * hidden,), 0.5)
    s_in, y_in, p_in = rows_of(streams, order, cap), rows_of(y, order, cap), rows_of(inject, order, cap)

    def expect(got: Arrays) -> None:
        s = got["streams"].reshape(cap, 4, hidden)
        before = s_in[:n].reshape(n, 4, hidden)
        added = fma32(p_in[:n, :, None], y_in[:n, None, :], before) if add else before
        same_bits("streams", s[:n], np.ascontiguousarray(added))
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            wide = np.asarray(added, np.float64)
            rinv = 1.0 / np.sqrt((wide**2).mean(axis=-1) + np.float64(np.float32(EPS)))
            scaled = wide * rinv[..., None] * (1.0 + w.reshape(4, hidden).astype(np.float64))
        near("rinv", got["rinv"][:n], rinv, np.abs(rinv) * 2.0**-20)
        same_bits("rinv", got["rinv"][:n], rms_row_v1(added, EPS))
        n16 = _live(got["n16"], n, 4 * hidden).reshape(n, 4, hidden)
        within_f16("n16", n16, scaled, np.abs(scaled) * (2.0**-20 + 4 * F32_ULP))
        for key in ("streams", "rinv"):
            untouched(key, got[key][n:])
        _rest_untouched("n16", got["n16"], n, 4 * hidden)

    return Operands(
        arrays={
            "round": round_table(n, cap),
            "streams": s_in,
            "y": y_in,
            "inject": p_in,
            "w": w,
            "n16": _operand(case, cap, 4 * hidden),
            "rinv": poisoned_rows(cap, 4),
        },
        scalars={"add": add, "hidden": hidden, "eps": EPS, "tiled": int(case.dims.get("tiled", 0))},
        grid=(4, cap, 1),
        relocations=[],
        outputs=("streams", "n16", "rinv"),
        expect=expect,
    )


def _operand(case: Case, cap: int, k: int) -> NDArray[Any]:
    """Poison where a kernel puts f16 operand rows: (cap, k), or the tile image of as many rows."""
    empty = poisoned_rows(cap, k, dtype=np.float16)
    return to_tiles(empty) if case.dims.get("tiled") else empty


def _live(x: NDArray[Any], n: int, k: int) -> NDArray[Any]:
    """(n, k) in natural order of rows in fragment order or of a tile image."""
    return from_tiles(x)[:n, :k] if is_tiles(x) else from_fragment(x[:n])


def _rest_untouched(name: str, x: NDArray[Any], n: int, k: int) -> None:
    """Rows >= n, and in a tile image inputs >= k, are poison."""
    rows = from_tiles(x) if is_tiles(x) else x
    untouched(name, rows[n:])
    untouched(name, rows[:, k:])


def rms_row_v1(x: NDArray[Any], eps: float) -> NDArray[np.float32]:
    """Bit oracle of order rms_row_v1 over the last axis: 1/rms, fp32."""
    dim = x.shape[-1]
    padded = np.zeros((*x.shape[:-1], -(-dim // 1024) * 1024), np.float32)
    padded[..., :dim] = x
    # (..., chunk, thread, element): a thread adds chunk by chunk, element by element; zeros add nothing
    parts = padded.reshape(*x.shape[:-1], -1, 256, 4)
    acc = np.zeros((*x.shape[:-1], 256), np.float32)
    for chunk in range(parts.shape[-3]):
        for i in range(4):
            acc = fma32(parts[..., chunk, :, i], parts[..., chunk, :, i], acc)
    total = tree(np.moveaxis(warp_sum(acc.reshape(*x.shape[:-1], 8, 32)), -1, 0))
    with np.errstate(all="ignore"):
        mean = total / np.float32(dim) + np.float32(eps)
        return canonical(np.float32(1.0) / np.sqrt(mean))


def _stream_add(case: Case, seed: int) -> Operands:
    hidden, order, cap = case.int("hidden"), row_order(case), case.int("rows_cap")
    n = len(order)
    streams = signed(seed, "streams", (N_ROWS, 4 * hidden), 4.0)
    y, inject = signed(seed, "y", (N_ROWS, hidden), 2.0), signed(seed, "inject", (N_ROWS, 4), 2.0)
    if case.dims.get("special") == "nonfinite":
        streams[1, hidden + 5], y[2, 3] = np.nan, np.inf
    if case.dims.get("special") == "integers":
        streams, y, inject = np.round(streams), np.round(y * 8), np.round(inject * 8)
    s_in, y_in, p_in = rows_of(streams, order, cap), rows_of(y, order, cap), rows_of(inject, order, cap)

    def expect(got: Arrays) -> None:
        if case.dims.get("special") == "integers":
            exact = p_in[:n, :, None] * y_in[:n, None, :] + s_in[:n].reshape(n, 4, hidden)
            assert (got["streams"][:n] == exact.reshape(n, -1)).all(), "streams: not the exact integers"
        want = fma32(p_in[:n, :, None], y_in[:n, None, :], s_in[:n].reshape(n, 4, hidden))
        same_bits("streams", got["streams"][:n].reshape(n, 4, hidden), want)
        untouched("streams", got["streams"][n:])

    return Operands(
        arrays={"round": round_table(n, cap), "streams": s_in, "y": y_in, "inject": p_in},
        scalars={"hidden": hidden},
        grid=(-(-hidden // 256), cap, 1),
        relocations=[],
        outputs=("streams",),
        expect=expect,
    )


def _site_mid(case: Case, seed: int) -> Operands:
    rank, width, order = case.int("rank"), 4 * case.int("hidden"), row_order(case)
    n, cap, has_inject = len(order), case.int("rows_cap"), case.int("has_inject")
    linears, finished = linear_table(2), bool(case.dims.get("out"))
    parts: Arrays = {}
    for i, (key, outputs) in enumerate((("part_down", rank), ("part_inject", 4))):
        segments = dot_segments(width, outputs, 1)
        values = signed(seed, key, (N_ROWS, segments, outputs), 4.0)
        if case.dims.get("special") == "nonfinite":
            values[1, -1, 1], values[2, 0, 0], values[2, 0, 2] = np.nan, np.inf, -np.inf
        if finished:        # a launch that leaves sums, not units: the number of segments says nothing here
            values = values[:, -1:]
        parts[key] = np.ascontiguousarray(rows_of(values, order, cap).transpose(1, 0, 2))
        linears[i]["k"], linears[i]["n"] = width, outputs
        linears[i]["leaves"], linears[i]["segments"] = 1, segments
        linears[i]["w"]["format"] = FORMAT_F16
    if not has_inject:
        del parts["part_inject"]
        linears = linears[:1]
    relocations = [
        ("linears", field_at(LINEAR, "out" if finished else "part") + i * LINEAR.itemsize, key, 0)
        for i, key in enumerate(parts)
    ]

    def expect(got: Arrays) -> None:
        u = _live(got["u"], n, rank)
        _check_mid("u", u, parts["part_down"][:, :n], silu=True)
        if has_inject:
            _check_mid("inject", got["inject"][:n], parts["part_inject"][:, :n], silu=False)
        untouched("inject", got["inject"][n if has_inject else 0 :])
        _rest_untouched("u", got["u"], n, rank)

    return Operands(
        arrays={
            "round": round_table(n, cap),
            "linears": linears,
            "u": _operand(case, cap, rank),
            "inject": poisoned_rows(cap, 4),
            **parts,
        },
        scalars={"has_inject": has_inject, "tiled": int(case.dims.get("tiled", 0))},
        grid=(cap, 1, 1),
        relocations=relocations,
        outputs=("u", "inject"),
        expect=expect,
    )


def _check_mid(name: str, got: NDArray[Any], part: NDArray[Any], *, silu: bool) -> None:
    """part: (units, rows, n) f32.  The order adds unit by unit; the first unit is taken as it is."""
    with np.errstate(invalid="ignore"):
        total = part[0].astype(np.float64)
        for unit in part[1:]:
            total = total + unit
        x = total * 0.25
        slack = np.where(np.isfinite(x), np.abs(part.astype(np.float64)).sum(axis=0) * 0.25, 0.0)
        slack *= max(len(part) - 1, 0) * F32_ULP
        gate = sigmoid64(x)
        want = x * gate if silu else 2.0 * gate
        # silu(-inf) is NaN in the kernels' silu, as x times sigmoid
        before = slack * (1.1 if silu else 0.5) + np.abs(np.where(np.isfinite(want), want, 0.0)) * 8 * F32_ULP
    if silu:
        within_f16(name, got, want, before)
    else:
        near(name, got, want, before)


def _site_up(case: Case, seed: int, deep: bool = False) -> Operands:
    """deep: operands as tile images, for deep_site_up."""
    hidden, rank, order = case.int("hidden"), case.int("rank"), row_order(case)
    n, cap, bf16 = len(order), case.int("rows_cap"), case["dtype"] == "bf16"
    operand = bool(case.dims.get("operand"))
    n_made = max(N_ROWS, n)
    streams = signed(seed, "streams", (n_made, 4 * hidden), 4.0)
    rinv = np.abs(signed(seed, "rinv", (n_made, 4), 1.0)) + np.float32(0.25)
    w = signed(seed, "w", (4 * hidden,), 0.5)
    u = signed(seed, "u", (n_made, rank), 2.0).astype(np.float16)
    up = signed(seed, "up", (4 * hidden, rank), 0.25)
    up16 = (up.view(np.uint32) >> 16).astype(np.uint16) if bf16 else up.astype(np.float16).view(np.uint16)
    up64 = ((up16.astype(np.uint32) << 16).view(np.float32) if bf16 else up16.view(np.float16)).astype(
        np.float64
    )
    if case.dims.get("special") == "nonfinite":
        u[1, 7], streams[2, 5], rinv[0, 3] = np.float16(np.nan), np.inf, np.float32(0.0)
    ins = {"streams": rows_of(streams, order, cap), "rinv": rows_of(rinv, order, cap)}
    u_in = rows_of(u, order, cap)
    linear = linear_table(1)
    linear["k"], linear["n"], linear["x_stride"] = rank, 4 * hidden, rank
    linear["leaves"], linear["segments"] = 1, dot_segments(rank, 4 * hidden, 1)
    linear["tiled"] = int(deep)
    linear["w"]["format"] = FORMAT_BF16 if bf16 else FORMAT_F16

    def expect(got: Arrays) -> None:
        u64 = u_in[:n].astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            dot = u64 @ up64.T
            steps = rank / 16 * (2 if bf16 else 1) + int(linear["segments"][0])
            # a step truncates at 2^-23 of its largest term, which is at most the sum of all magnitudes
            error = steps * 2.0**-23 * np.nan_to_num(np.abs(u64) @ np.abs(up64).T).reshape(n, 4, hidden)
            gate = sigmoid64(dot).reshape(n, 4, hidden)
            s64 = ins["streams"][:n].astype(np.float64).reshape(n, 4, hidden)
            normed = (
                s64
                * ins["rinv"][:n].astype(np.float64)[..., None]
                * (1.0 + w.astype(np.float64).reshape(4, hidden))
            )
            want = (gate * normed).sum(axis=1) * 0.25
            size = np.nan_to_num(np.abs(normed), nan=0.0, posinf=0.0)
            bound = (size * (error / 4 + 16 * F32_ULP)).sum(axis=1) * 0.25
        near("m", got["m"][:n], want, bound)
        untouched("m", got["m"][n:])
        if operand:
            with np.errstate(over="ignore"):
                same_bits("m16", from_fragment(got["m16"][:n]), got["m"][:n].astype(np.float16))
            untouched("m16", got["m16"][n:])

    return Operands(
        arrays={
            "round": round_table(n, cap),
            "linear": linear,
            **ins,
            "w": w,
            "m": poisoned_rows(cap, hidden),
            **({"m16": poisoned_rows(cap, hidden, dtype=np.float16)} if operand else {}),
            "weights": plain_tiles(up16),
            "u": to_tiles(u_in) if deep else to_fragment(u_in),
        },
        scalars={"hidden": hidden, **({} if deep or operand else {"m16": 0})},
        grid=(2, 1, 1) if deep else (-(-hidden // 16), 1, 1),
        relocations=[
            ("linear", field_at(LINEAR, "w", "data"), "weights", 0),
            ("linear", field_at(LINEAR, "x"), "u", 0),
        ],
        outputs=("m", "m16") if operand else ("m",),
        expect=expect,
    )


def deep_site_up(case: Case, seed: int) -> Operands:
    """The operands of site_up as deep_site_up takes them."""
    return _site_up(case, seed, deep=True)


_BUILDERS: Final[dict[str, Callable[[Case, int], Operands]]] = {
    "site_norm": _site_norm,
    "site_mid": _site_mid,
    "site_up_n8": _site_up,
    "site_up_n16": _site_up,
    "stream_add": _stream_add,
}
