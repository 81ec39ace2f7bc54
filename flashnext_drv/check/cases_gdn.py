"""Contract cases of the gdn family: convolution, recurrence and output gate, against FP64 from the operands
as the kernels rounded them.

Called by check/contract.py.  Runs, slots and state: gdn_runs.py.  The prompt's kernels: cases_gdn_deep.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.spec import Case
from ..kernels.tables import FORMAT_F16, LINEAR, exl3_format
from . import cases_gdn_deep
from .cases_exl3 import Dot, Linears, finished, parse_linear
from .contract import Operands
from .gdn_runs import HEAD, OFFSET, Runs, run_lengths
from .operands import (
    F32_ULP,
    field_at,
    from_fragment,
    from_tiles,
    linear_table,
    midpoints,
    near,
    poisoned_rows,
    rotated,
    round_table,
    row_order,
    rows_of,
    same_bits,
    sigmoid64,
    signed,
    to_tiles,
    untouched,
    within_f16,
)

__all__ = ["OFFSET", "build", "run_lengths"]

Arrays = dict[str, NDArray[Any]]
F64Array = NDArray[np.float64]
N_ROWS: Final = 16
EPS: Final = 1e-6


def build(name: str, case: Case, seed: int) -> Operands:
    """Operands of one case of a gdn kernel.  Raises KeyError for a kernel of another family."""
    return _BUILDERS[name](case, seed)


def _gdn_conv(case: Case, seed: int) -> Operands:
    """Runs over the linears of a launch; the first one's outputs are the inputs of the convolution."""
    special = case.dims.get("special")
    channels = parse_linear(str(case["linears"]).split(";")[0]).n
    runs = Runs(case, seed, (3, channels), np.float16)
    launch = Linears(Case(case.name, {**case.dims, "rows": runs.n_rows}), seed)
    w = signed(seed, "w", (channels, 4), 1.0)
    tails = [signed(seed, f"tail{q}", (3, channels), 4.0).astype(np.float16) for q in runs.sequences]
    for i, tail in enumerate(tails):
        runs.fill(i, tail)

    def sums(sequence: int, j: int, dot: Dot) -> NDArray[Any]:
        name, shape = f"part{j}.{sequence}", (N_ROWS, dot.units, dot.n)
        part = midpoints(seed, name, shape) if special == "midpoints" else signed(seed, name, shape, 4.0)
        if special == "nonfinite" and sequence == 0 and j == 0:
            part[1, 0, 3], part[2, -1, 4], part[0, 0, 5] = np.nan, np.float32(1e6), -np.inf
        return part

    parts: list[NDArray[Any]] = []
    svh: dict[int, NDArray[np.float16]] = {}
    bias: dict[int, NDArray[np.float16]] = {}
    for j, dot in enumerate(launch.dots):
        parts.append(np.ascontiguousarray(runs.rows(partial(sums, j=j, dot=dot)).swapaxes(0, 1)))
        launch.point(j, f"part{j}", parts[j], "part")
        if dot.dtype == "exl3":
            svh[j] = launch.vector(j, "svh", dot.n, "w", "svh")
        if dot.bias:
            bias[j] = launch.vector(j, "bias", dot.n, "bias")
        launch.point(j, f"out{j}", poisoned_rows(runs.cap, dot.n), "out")

    def expect(got: Arrays) -> None:
        x = np.zeros((0, channels), np.float32)
        for j, dot in enumerate(launch.dots):
            want, full, size = finished(parts[j][:, : runs.n_rows], dot, svh.get(j), bias.get(j))
            if not (special == "nonfinite" and j == 0):
                near(f"linear {j} (FP64)", want, full, size)
            if j:
                same_bits(f"linear {j}: output", got[f"out{j}"][: runs.n_rows], want)
                untouched(f"linear {j}: output", got[f"out{j}"][runs.n_rows :])
            else:
                x = want
                untouched("output of the first linear", got["out0"])
        for i, span in enumerate(runs.spans()):
            with np.errstate(over="ignore", invalid="ignore"):
                f = np.concatenate([tails[i], x[span].astype(np.float16)])
                n = runs.lengths[i]
                terms = np.stack(
                    [w[:, j].astype(np.float64) * f[j : j + n].astype(np.float64) for j in range(4)]
                )
                v = terms.sum(axis=0)
                want = v * sigmoid64(v)
                size = np.nan_to_num(np.abs(terms).sum(axis=0), nan=0.0, posinf=0.0)
                near(
                    "out",
                    got["out"][span],
                    want,
                    size * 4.4 * F32_ULP + np.nan_to_num(np.abs(want)) * 8 * F32_ULP,
                )
            near("tail", runs.read(got["state"], i), f[n:], 0.0)
        untouched("out", got["out"][runs.n_rows :])

    return Operands(
        arrays={
            **launch.arrays,
            **runs.arrays(),
            "linears": launch.table,
            "w": w,
            "out": poisoned_rows(runs.cap, channels),
        },
        scalars={"tail_offset": OFFSET, "channels": channels},
        grid=(-(-max(dot.n for dot in launch.dots) // 512), len(launch.dots), runs.cap),
        relocations=[*launch.relocations, *runs.relocations()],
        outputs=("out", *(f"out{j}" for j in range(len(launch.dots))), "state"),
        expect=expect,
    )


def _gdn_step(case: Case, seed: int) -> Operands:
    n_k, n_v = case.int("n_k"), case.int("n_v")
    special = case.dims.get("special")
    runs = Runs(case, seed, (n_v, HEAD, HEAD), np.float32)
    a_log, dt_bias = signed(seed, "a_log", (n_v,), 1.0), signed(seed, "dt_bias", (n_v,), 2.0)
    states = [
        signed(seed, f"state{q}", (n_v, HEAD, HEAD), 0.0 if special == "zero" else 0.5)
        for q in runs.sequences
    ]
    if special == "nonfinite_state":
        states[0][0, 7, 3], states[0][1, 5, 100] = np.nan, np.inf
    for i, state in enumerate(states):
        runs.fill(i, state)

    def inputs(sequence: int) -> NDArray[Any]:
        x = signed(seed, f"qkv{sequence}", (N_ROWS, (2 * n_k + n_v) * HEAD), 2.0)
        if special == "nonfinite" and sequence == 0:
            x[1, (2 * n_k + 1) * HEAD + 5] = np.nan
        return x

    def gates(sequence: int) -> NDArray[Any]:
        ab = signed(seed, f"ab{sequence}", (N_ROWS, 2, n_v), 4.0)
        if special == "nonfinite" and sequence == 0:
            ab[1, 0, 2], ab[0, 1, 0] = np.nan, np.inf
        return ab

    qkv, ab = runs.rows(inputs), runs.rows(gates)
    a, b = np.ascontiguousarray(ab[:, 0]), np.ascontiguousarray(ab[:, 1])

    def expect(got: Arrays) -> None:
        for i, span in enumerate(runs.spans()):
            want, bound, state, state_bound = _recurrence(
                qkv[span], a[span], b[span], a_log, dt_bias, states[i], n_k
            )
            near("o", got["o"][span].reshape(-1, n_v, HEAD), want, bound)
            near("state", runs.read(got["state"], i), state, state_bound)
        untouched("o", got["o"][runs.n_rows :])

    return Operands(
        arrays={
            **runs.arrays(),
            "qkv": qkv,
            "a": a,
            "b": b,
            "a_log": a_log,
            "dt_bias": dt_bias,
            "o": poisoned_rows(runs.cap, n_v * HEAD),
        },
        scalars={"state_offset": OFFSET, "n_k": n_k, "n_v": n_v},
        grid=(4 * n_v, runs.cap, 1),
        relocations=runs.relocations(),
        outputs=("o", "state"),
        expect=expect,
    )


def _recurrence(
    qkv: NDArray[Any],
    a: NDArray[Any],
    b: NDArray[Any],
    a_log: NDArray[Any],
    dt_bias: NDArray[Any],
    state: NDArray[Any],
    n_k: int,
) -> tuple[F64Array, F64Array, F64Array, F64Array]:
    """FP64 recurrence over the rows of one run, and a running bound of the fp32 error of every element.

    state (n_v, 128 columns, 128 key rows). u = one rounding.  A sum of 128 products: 32 per lane and 2
    across, 34 u of the magnitudes.  A unit vector: half of the 34 u of its sum of squares, and five
    roundings: 22 u (q: 23 u). decay: exp passes the error of its argument on: 8 u |argument| + 4 u. beta: 6
    u.  Second-order terms: the factor 1.05.
    """
    u, n_v = F32_ULP, len(a_log)
    repeat = n_v // n_k
    wide = qkv.astype(np.float64).reshape(len(qkv), -1, HEAD)
    outs, bounds = [], []
    M, E = state.astype(np.float64), np.zeros(state.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        for r in range(len(qkv)):
            q, k = (
                x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6)
                for x in (wide[r, :n_k], wide[r, n_k : 2 * n_k])
            )
            q, k = (
                np.repeat(q / np.sqrt(128.0), repeat, axis=0)[:, None],
                np.repeat(k, repeat, axis=0)[:, None],
            )
            v = wide[r, 2 * n_k :]
            pre = a[r].astype(np.float64) + dt_bias
            argument = np.exp(a_log.astype(np.float64)) * (
                np.maximum(pre, 0.0) + np.log1p(np.exp(-np.abs(pre)))
            )
            decay = np.exp(-argument)[:, None, None]
            beta = sigmoid64(b[r])[:, None]
            M = decay * M
            E = decay * E + np.abs(M) * (8 * u * argument + 5 * u)[:, None, None]
            read = (M * k).sum(axis=-1)
            E_read = (np.abs(k) * E).sum(axis=-1) + (np.abs(M) * np.abs(k)).sum(axis=-1) * 56 * u
            delta = beta * (v - read)
            E_delta = beta * (E_read + u * np.abs(v - read)) + np.abs(delta) * 7 * u
            M = M + k * delta[..., None]
            E = E + np.abs(k) * E_delta[..., None] + np.abs(k * delta[..., None]) * 22 * u + np.abs(M) * u
            outs.append((M * q).sum(axis=-1))
            bounds.append((np.abs(q) * E).sum(axis=-1) + (np.abs(M) * np.abs(q)).sum(axis=-1) * 57 * u)
    return np.stack(outs), np.stack(bounds) * 1.05, M, E * 1.05


def _gdn_gate_input(case: Case, seed: int) -> Operands:
    n_v, gate, order, cap = case.int("n_v"), case.int("gate"), row_order(case), case.int("rows_cap")
    n, width, exl3 = len(order), n_v * HEAD, case["dtype"] == "exl3"
    o, z = signed(seed, "o", (N_ROWS, width), 0.125), signed(seed, "z", (N_ROWS, width), 8.0)
    if case.dims.get("special") == "nonfinite":
        o[1, 130], z[2, 7], o[0, 300] = np.nan, np.inf, np.inf
    norm_w = signed(seed, "norm_w", (HEAD,), 1.0)
    suh = signed(seed, "suh", (width,), 2.0).astype(np.float16)
    linear = linear_table(1)
    linear["k"], linear["n"], linear["x_stride"], linear["leaves"], linear["segments"] = (
        width,
        128,
        width,
        1,
        1,
    )
    linear["w"]["format"] = exl3_format(4, "mul1") if exl3 else FORMAT_F16
    tiled = linear["tiled"] = int(case.dims.get("tiled", 0))
    x = poisoned_rows(cap, width, dtype=np.float16)
    o_in, z_in = rows_of(o, order, cap), rows_of(z, order, cap)

    def expect(got: Arrays) -> None:
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            wide, zw = (x[:n].astype(np.float64).reshape(n, n_v, HEAD) for x in (o_in, z_in))
            scale = 1.0 / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + np.float64(np.float32(EPS)))
            value = wide * scale * norm_w.astype(np.float64) * sigmoid64(zw) * (zw if gate else 1.0)
            value = value.reshape(n, width)
            if exl3:
                want, before = rotated(value * suh.astype(np.float64), 21 * F32_ULP)
            else:
                want, before = value, np.nan_to_num(np.abs(value), posinf=0.0) * 20 * F32_ULP
        rows = from_tiles(got["x"]) if tiled else from_fragment(got["x"])
        within_f16("x", rows[:n], want, before)
        untouched("x", rows[n:])

    return Operands(
        arrays={
            "round": round_table(n, cap),
            "o": o_in,
            "z": z_in,
            "norm_w": norm_w,
            "linear": linear,
            "x": to_tiles(x) if tiled else x,
            "suh": suh,
        },
        scalars={"gate": gate, "n_v": n_v, "eps": EPS},
        grid=(-(-n_v // 4), int(case.dims.get("at_once", cap)), 1),
        relocations=[
            ("linear", field_at(LINEAR, "x"), "x", 0),
            ("linear", field_at(LINEAR, "w", "suh"), "suh", 0),
        ],
        outputs=("x",),
        expect=expect,
    )


_BUILDERS: Final[dict[str, Callable[[Case, int], Operands]]] = {
    "gdn_conv": _gdn_conv,
    "gdn_step": _gdn_step,
    "gdn_gate_input": _gdn_gate_input,
    **cases_gdn_deep.BUILDERS,
}
