"""Contract cases of the prompt's gdn kernels, against FP64; and both in place of gdn_conv and gdn_step.

Called by cases_gdn.py and pairs.py.  A slot holds the state and, behind it, the convolution's tail, as both
kernels and the two they replace find them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.spec import Case
from ..kernels.tables import FORMAT_F16, LINEAR
from .contract import Operands, Ran
from .gdn_runs import HEAD, OFFSET, Arrays, Runs
from .operands import (
    F32_ULP,
    field_at,
    linear_table,
    midpoints,
    near,
    poisoned_rows,
    sigmoid64,
    signed,
    untouched,
)
from .pairing import Pair, Then, Turned

__all__ = ["BUILDERS", "PAIRS"]

F64Array = NDArray[np.float64]
U: Final = F32_ULP


class _Layer:
    """Runs of a case with the first state and tail of each, in one piece of each slot's memory."""

    def __init__(self, case: Case, seed: int) -> None:
        self.n_k, self.n_v = case.int("n_k"), case.int("n_v")
        self.special = case.dims.get("special")
        self.channels = (2 * self.n_k + self.n_v) * HEAD
        self.shape = (self.n_v, HEAD, HEAD)
        self.state_size = int(np.prod(self.shape))
        self.runs = Runs(case, seed, (self.state_size + 3 * self.channels // 2,), np.float32)
        self.longest = max(self.runs.lengths) + self.runs.first
        scale = 0.0 if self.special == "zero" else 1.0
        self.states = [signed(seed, f"state{q}", self.shape, 0.5 * scale) for q in self.runs.sequences]
        if self.special == "nonfinite_state":
            self.states[0][0, 7, 3], self.states[0][1, 5, 100] = np.nan, np.inf
        self.tails = [signed(seed, f"tail{q}", (3, self.channels), 4.0 * scale).astype(np.float16)
                      for q in self.runs.sequences]
        for i, (state, tail) in enumerate(zip(self.states, self.tails, strict=True)):
            self.runs.fill(i, np.concatenate([state.reshape(-1), tail.reshape(-1).view(np.float32)]))
        self.scalars: dict[str, int | float] = {
            "state_offset": OFFSET, "tail_offset": OFFSET + 4 * self.state_size, "n_k": self.n_k,
            "n_v": self.n_v, "channels": self.channels}

    def found(self, state: NDArray[Any], i_run: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """State and tail of a run out of the slots' memory after the launch."""
        flat = self.runs.read(state, i_run)
        return (flat[:self.state_size].reshape(self.shape),
                flat[self.state_size:].view(np.float16).reshape(3, self.channels))

    def window(self, x: NDArray[Any], i_run: int) -> NDArray[Any]:
        """The tail and behind it the run's inputs, f16 (3 + rows, C)."""
        with np.errstate(over="ignore"):
            return np.concatenate([self.tails[i_run], x[self.runs.spans()[i_run]].astype(np.float16)])


def _gdn_deep_input(case: Case, seed: int) -> Operands:
    layer = _Layer(case, seed)
    runs, n_v, channels = layer.runs, layer.n_v, layer.channels
    w = signed(seed, "w", (channels, 4), 1.0)
    a_log, dt_bias = signed(seed, "a_log", (n_v,), 1.0), signed(seed, "dt_bias", (n_v,), 2.0)

    def inputs(sequence: int) -> NDArray[Any]:
        x = signed(seed, f"x{sequence}", (layer.longest, channels), 0.0 if layer.special == "zero" else 4.0)
        if layer.special == "nonfinite" and sequence == 0:
            x[1, 3], x[2, 4], x[0, 130], x[3, 2 * layer.n_k * HEAD + 5] = np.nan, 1e6, -np.inf, np.inf
        if layer.special == "midpoints":
            x = midpoints(seed, f"x{sequence}", (layer.longest, channels))
        return x

    def gates(sequence: int) -> NDArray[Any]:
        ab = signed(seed, f"ab{sequence}", (layer.longest, 2, n_v), 4.0)
        if layer.special == "nonfinite" and sequence == 0:
            ab[1, 0, 0], ab[0, 1, 1] = np.nan, np.inf
        return ab

    x_in, ab = runs.rows(inputs), runs.rows(gates)
    a, b = np.ascontiguousarray(ab[:, 0]), np.ascontiguousarray(ab[:, 1])

    def expect(got: Arrays) -> None:
        for i, span in enumerate(runs.spans()):
            want, bound = _inputs(layer.window(x_in, i), w, layer.n_k)
            near("qkv", got["qkv"][span], want, bound)
            decay, beta, exponent = _gates(a[span], b[span], a_log, dt_bias)
            near("decay", got["gates"][span, :, 0], decay, np.nan_to_num(decay * (8 * exponent + 4)) * U)
            near("beta", got["gates"][span, :, 1], beta, beta * 6 * U)
        untouched("qkv", got["qkv"][runs.n_rows:])
        untouched("gates", got["gates"][runs.n_rows:])
        assert got["state"].tobytes() == runs.state.tobytes(), "the slots' memory was written"

    return Operands(
        arrays={
            **runs.arrays(), "rows": runs.row_table(), "x": x_in, "a": a, "b": b, "w": w, "a_log": a_log,
            "dt_bias": dt_bias, "qkv": poisoned_rows(runs.cap, channels),
            "gates": poisoned_rows(runs.cap, n_v, 2), "out": poisoned_rows(runs.cap, channels),
            "o": poisoned_rows(runs.cap, n_v * HEAD)},
        scalars=layer.scalars,
        grid=(2 * layer.n_k + n_v + 1, -(-runs.cap // 32), 1),
        relocations=runs.relocations(),
        outputs=("qkv", "gates"),
        expect=expect,
    )


def _inputs(f: NDArray[Any], w: NDArray[Any], n_k: int) -> tuple[F64Array, F64Array]:
    """qkv of one run from its window of f16 inputs, and what fp32 may err by.

    Convolution and silu as gdn_conv's bound. A unit vector y / s: y's own error over s; that of s, at most
    sum |y| error / s; and 22 roundings (q: 23), as gdn_step's bound has them.
    """
    n = len(f) - 3
    with np.errstate(invalid="ignore", over="ignore"):
        terms = np.stack([w[:, j].astype(np.float64) * f[j:j + n].astype(np.float64) for j in range(4)])
        v = terms.sum(axis=0)
        want = v * sigmoid64(v)
        size = np.nan_to_num(np.abs(terms).sum(axis=0), nan=0.0, posinf=0.0)
        error = size * 4.4 * U + np.nan_to_num(np.abs(want), posinf=0.0) * 8 * U
        y, e = (part[:, :2 * n_k * HEAD].reshape(n, 2 * n_k, HEAD) for part in (want, error))
        s = np.sqrt((y**2).sum(axis=-1, keepdims=True) + 1e-6)
        scale = np.where(np.arange(2 * n_k) < n_k, 1 / np.sqrt(128.0), 1.0)[:, None]
        unit = y / s * scale
        away = (np.abs(y) * e).sum(axis=-1, keepdims=True) / s
        bound = (e / s + np.abs(y) / s**2 * away) * scale + np.abs(unit) * 23 * U
    want[:, :2 * n_k * HEAD] = unit.reshape(n, -1)
    error[:, :2 * n_k * HEAD] = np.nan_to_num(bound * 1.05).reshape(n, -1)
    return want, error


def _gates(a: NDArray[Any], b: NDArray[Any], a_log: NDArray[Any],
           dt_bias: NDArray[Any]) -> tuple[F64Array, F64Array, F64Array]:
    """decay, beta, and the exponent whose error decay passes on."""
    pre = a.astype(np.float64) + dt_bias
    exponent = np.exp(a_log.astype(np.float64)) * (np.maximum(pre, 0.0) + np.log1p(np.exp(-np.abs(pre))))
    return np.exp(-exponent), sigmoid64(b.astype(np.float64)), exponent


def _gdn_scan(case: Case, seed: int) -> Operands:
    layer = _Layer(case, seed)
    runs, n_k, n_v, channels = layer.runs, layer.n_k, layer.n_v, layer.channels

    def inputs(sequence: int) -> NDArray[Any]:
        x = signed(seed, f"x{sequence}", (layer.longest, channels), 4.0)
        if layer.special == "nonfinite" and sequence == 0:
            x[1, 3], x[2, 4], x[0, 5] = np.nan, np.float32(1e6), -np.inf
        return x

    def vectors(sequence: int) -> NDArray[Any]:
        """Of about unit length, as gdn_deep_input makes them."""
        heads = signed(seed, f"qkv{sequence}", (layer.longest, 2 * n_k + n_v, HEAD), 2.0)
        heads[:, :n_k] *= np.float32(2.0**-8)
        heads[:, n_k:2 * n_k] *= np.float32(2.0**-4)
        if layer.special == "nonfinite" and sequence == 0:
            heads[1, 2 * n_k + 1, 5] = np.nan
        return heads.reshape(layer.longest, channels)

    def gates(sequence: int) -> NDArray[Any]:
        gate = (signed(seed, f"gates{sequence}", (layer.longest, n_v, 2), 0.5) + np.float32(0.5))
        if layer.special == "nonfinite" and sequence == 0:
            gate[1, 2, 0], gate[0, 0, 1] = np.nan, np.inf
        return gate

    x_in, qkv, gate_in = runs.rows(inputs), runs.rows(vectors), runs.rows(gates)

    def expect(got: Arrays) -> None:
        for i, span in enumerate(runs.spans()):
            want, bound, state, state_bound = _scan(qkv[span], gate_in[span], layer.states[i], n_k)
            near("o", got["o"][span].reshape(-1, n_v, HEAD), want, bound)
            found, tail = layer.found(got["state"], i)
            near("state", found, state, state_bound)
            near("tail", tail, layer.window(x_in, i)[-3:], 0.0)
        untouched("o", got["o"][runs.n_rows:])

    return Operands(
        arrays={**runs.arrays(), "x": x_in, "qkv": qkv, "gates": gate_in,
                "o": poisoned_rows(runs.cap, n_v * HEAD)},
        scalars=layer.scalars,
        grid=_scan_grid(n_k, n_v, runs.cap),
        relocations=runs.relocations(),
        outputs=("o", "state"),
        expect=expect,
    )


def _scan(qkv: NDArray[Any], gates: NDArray[Any], state: NDArray[Any],
          n_k: int) -> tuple[F64Array, F64Array, F64Array, F64Array]:
    """FP64 recurrence over one run and a running bound of the fp32 error of every element.

    u = one rounding.  A sum of 128 products: 32 in a lane and 2 across, 34 u of the magnitudes.  Inputs are
    exact.  Second-order terms: the factor 1.05.
    """
    n_v = len(state)
    wide = qkv.astype(np.float64).reshape(len(qkv), -1, HEAD)
    outs, bounds = [], []
    M, E = state.astype(np.float64), np.zeros(state.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        for row, gate in zip(wide, gates.astype(np.float64), strict=True):
            q, k = (np.repeat(part, n_v // n_k, axis=0)[:, None] for part in (row[:n_k], row[n_k:2 * n_k]))
            decay, beta = gate[:, 0, None, None], gate[:, 1, None]
            M, E = decay * M, np.abs(decay) * E + np.abs(decay * M) * U
            read = (M * k).sum(axis=-1)
            e_read = (np.abs(k) * E).sum(axis=-1) + (np.abs(M) * np.abs(k)).sum(axis=-1) * 34 * U
            gap = row[2 * n_k:] - read
            delta = beta * gap
            e_delta = np.abs(beta) * (e_read + U * np.abs(gap)) + np.abs(delta) * U
            M = M + k * delta[..., None]
            E = E + np.abs(k) * e_delta[..., None] + np.abs(M) * U
            outs.append((M * q).sum(axis=-1))
            bounds.append((np.abs(q) * E).sum(axis=-1) + (np.abs(M) * np.abs(q)).sum(axis=-1) * 34 * U)
    return np.stack(outs), np.stack(bounds) * 1.05, M, E * 1.05


def _scan_grid(n_k: int, n_v: int, cap: int) -> tuple[int, int, int]:
    return (n_k * -(-8 * n_v // (3 * n_k)), cap, 1)


def _then_scan(given: Operands, ran: Ran) -> Operands:
    """gdn_scan on what gdn_deep_input left."""
    grid = _scan_grid(int(given.scalars["n_k"]), int(given.scalars["n_v"]), len(given.arrays["x"]))
    return replace(given, arrays={**given.arrays, **ran.outputs}, grid=grid, outputs=("o", "state"))


def _as_conv(case: Case, given: Operands, ran: Ran) -> Turned:
    """gdn_conv on the case of gdn_deep_input: x is the one unit of a plain linear, so its output too; o and
    the slots' memory are compared after gdn_step."""
    table = linear_table(1)
    table["n"] = channels = int(given.scalars["channels"])
    table["k"], table["leaves"], table["segments"], table["w"]["format"] = 16, 1, 1, FORMAT_F16
    operands = replace(
        given, arrays={**given.arrays, "linears": table},
        relocations=[*given.relocations, ("linears", field_at(LINEAR, "part"), "x", 0)],
        grid=(-(-channels // 512), 1, len(given.arrays["x"])), outputs=("out", "state"))
    return operands, lambda step: [(name, ran.found[name], step.found[name]) for name in ("o", "state")]


def _then_step(given: Operands, ran: Ran) -> Operands:
    """gdn_step on what gdn_conv left."""
    arrays = {**given.arrays, "qkv": ran.found["out"], "state": ran.found["state"]}
    grid = (4 * int(given.scalars["n_v"]), len(given.arrays["x"]), 1)
    return replace(given, arrays=arrays, grid=grid, outputs=("o", "state"))


PAIRS: Final = (
    Pair("gdn_deep_input", "gdn_conv", _as_conv, more=(Then("gdn_scan", _then_scan),),
         then=(Then("gdn_step", _then_step),)),
)
BUILDERS: Final[dict[str, Callable[[Case, int], Operands]]] = {
    "gdn_deep_input": _gdn_deep_input,
    "gdn_scan": _gdn_scan,
}
