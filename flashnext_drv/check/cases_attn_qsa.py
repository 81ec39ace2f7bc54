"""Contract cases of the kernels that attend: qsa_attn, qsa_merge and qsa_deep, and what they share with the
other cases of the family.

Called by cases_attn.py, and for `mma_bound`, the bound of a chain of mma steps for both known ways of
summing, by checks of other sums.  What must stay true: bounds follow the rounding points that the
declarations name, from the operands as the kernels rounded them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.spec import Case
from ..kernels.tables import FORMAT_BF16, FORMAT_F16, LINEAR, WEIGHT, exl3_format
from .attn_pages import HEAD, PART, Pages, attended, blocks_seen, parse_rows
from .contract import Operands, bits
from .operands import (
    F16_ULP,
    F32_ULP,
    from_fragment,
    from_tiles,
    is_tiles,
    linear_table,
    midpoints,
    near,
    poisoned_rows,
    round_table,
    same_bits,
    signed,
    to_tiles,
    untouched,
    within_f16,
)

__all__ = ["BUILDERS", "attention_bound", "check_part", "mma_bound", "own"]

Arrays = dict[str, NDArray[Any]]
F64Array = NDArray[np.float64]
_FORMATS: Final = {"f16": FORMAT_F16, "bf16": FORMAT_BF16, "exl3": exl3_format(3, "mul1")}


def mma_bound(products: F64Array) -> F64Array:
    """How far a chain of mma steps over the last axis (a multiple of 16) may be from the exact sum of
    `products`.

    A sum of 16 products and the accumulator cuts 17 terms below 2^-25 of the largest, and its result below
    2^-23; one of 8 cuts 9 terms below 2^-24, and its result likewise.  The larger of the two; 2% more
    because partial sums carry their own errors.
    """
    def chain(width: int, term: float) -> F64Array:
        steps = products.reshape(*products.shape[:-1], products.shape[-1] // width, width)
        after = np.abs(np.cumsum(steps.sum(axis=-1), axis=-1))
        before = np.concatenate((np.zeros_like(after[..., :1]), after[..., :-1]), axis=-1)[...,
                                                                                           :after.shape[-1]]
        largest = np.maximum(np.abs(steps).max(axis=-1), before)
        return np.asarray(1.02 * ((width + 1) * term * largest + 2.0**-23 * after).sum(axis=-1))

    with np.errstate(invalid="ignore", over="ignore"):
        return np.maximum(chain(16, 2.0**-25), chain(8, 2.0**-24))


def own(seed: int, name: str, rows: list[tuple[int, int]], cap: int, shape: tuple[int, ...],
         scale: float = 1.0) -> NDArray[np.float32]:
    """(cap, *shape): values of each row by its sequence and position; rows beyond are poison."""
    out: NDArray[np.float32] = poisoned_rows(cap, *shape)
    for i, (sequence, position) in enumerate(rows):
        out[i] = signed(seed, f"{name}/{sequence}/{position}", shape, scale)
    return out


# ---- qsa_attn

def _attended(case: Case, seed: int) -> tuple[Pages, list[NDArray[np.int64]], Arrays]:
    """Pages with keys and values, the tokens that each row attends to, and the arrays q16 and sel."""
    n_q, n_kv, budget = case.int("n_q"), case.int("n_kv"), case.int("budget")
    special = case.dims.get("special")
    pages = Pages(case, seed, n_kv)
    rows, cap = pages.rows, pages.rows_cap
    q16 = own(seed, "q", rows, cap, (n_q, HEAD), 256.0 if special == "large" else 4.0).astype(np.float16)
    sel = poisoned_rows(cap, budget, dtype=np.uint32)
    tokens = []
    for r, (sequence, position) in enumerate(rows):
        seen = blocks_seen(position)
        if seen > budget:
            by_hash = np.argsort(np.asarray(bits(seed, f"sel/{sequence}/{position}", (seen,))), kind="stable")
            sel[r] = np.sort(by_hash[:budget])
        tokens.append(attended(position, budget, sel[r]))
    for name, memory in (("k", pages.k), ("v", pages.v)):
        for sequence in pages.sequences:
            n_local = int(pages.local[sequence].max()) + 1
            content = signed(seed, f"{name}/{sequence}", (n_local, 64, n_kv, HEAD), 1.0).astype(np.float16)
            if special == "equal" and name == "k":
                content[:] = content[0, 0]
            for (s, _), p in zip(rows, tokens, strict=True):
                if s == sequence:
                    memory[pages.at[s][p // 64], p % 64] = content[pages.local[s][p // 64], p % 64]
    if special == "integers":       # all weights are 1, so every sum is one of integers
        q16[:len(rows)] = 0.0
        pages.v[...] = np.where(np.isnan(pages.v), pages.v, np.round(pages.v * 8))
    if special == "midpoints":      # two tokens: neighbouring values, and their mean between them
        q16[:len(rows)] = 0.0
        for s in pages.sequences:
            page, _ = pages.entry(s, 0)
            pages.v[page, 1] = np.nextafter(pages.v[page, 0], np.float16(2))
    if special == "nonfinite_last":     # absent entries have the last one's address; its value must not count
        page, at = pages.entry(rows[0][0], tokens[0][-1])
        pages.v[page, at, 0, 5] = -np.inf
    if special == "nonfinite":
        q16[1, 0, 9], q16[1, 1, 5] = np.nan, np.inf
        for (row, entry), memory, value in (((0, 3), pages.k, np.nan), ((2, 7), pages.v, np.inf), ((2, 9),
        pages.v, np.nan)):
            page, at = pages.entry(rows[row][0], tokens[row][entry])
            memory[page, at, 0, 11 + entry] = value
    return pages, tokens, {"q16": q16, "sel": sel}


def _qsa_attn(case: Case, seed: int) -> Operands:
    n_q, n_kv, budget = case.int("n_q"), case.int("n_kv"), case.int("budget")
    special, group = case.dims.get("special"), n_q // n_kv
    pages, tokens, chosen = _attended(case, seed)
    rows, cap, q16 = pages.rows, pages.rows_cap, chosen["q16"]
    max_parts = max(-(-len(p) // PART) for p in tokens) + 1
    arrays, moves = pages.tables()
    arrays |= chosen | {"part_m": poisoned_rows(cap, n_q, max_parts),
               "part_l": poisoned_rows(cap, n_q, max_parts), "part_o": poisoned_rows(cap, n_q, max_parts,
               HEAD)}

    def expect(got: Arrays) -> None:
        for r, (sequence, _) in enumerate(rows):
            page, entry = pages.entry(sequence, tokens[r])
            parts = -(-len(tokens[r]) // PART)
            for h in range(n_q):
                keys, vals = (x[page, entry, h // group].astype(np.float64) for x in (pages.k, pages.v))
                for p in range(parts):
                    cut = slice(PART * p, PART * (p + 1))
                    check_part(f"row {r} head {h} part {p}", q16[r, h].astype(np.float64), keys[cut],
                    vals[cut],
                                got["part_m"][r, h, p], got["part_l"][r, h, p], got["part_o"][r, h, p])
                    if special == "integers":
                        assert got["part_l"][r, h, p] == len(keys[cut]), f"l of row {r} head {h} part {p}"
                        assert (got["part_o"][r, h, p] == vals[cut].sum(axis=0)).all(), f"o of row {r}, {h}"
            for name in ("part_m", "part_l", "part_o"):
                untouched(f"{name} of row {r} beyond its parts", got[name][r, :, parts:])
        for name in ("part_m", "part_l", "part_o"):
            untouched(name, got[name][len(rows):])

    scalars: dict[str, int | float] = {"kv_offset": pages.kv_offset, "n_q": n_q, "n_kv": n_kv, "budget":
    budget,
                                       "max_parts": max_parts}
    return Operands(arrays, scalars, (max_parts, n_kv, cap), moves, ("part_m", "part_l", "part_o"), expect)


def check_part(name: str, q: F64Array, k: F64Array, v: F64Array, m: Any, length: Any, o: NDArray[Any]
                ) -> None:
    """One part in FP64.  k, v (entries, 256).  The bounds follow the declaration, term by term."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        products = k * q
        s = products.sum(axis=1) / 16.0
        ds = np.nan_to_num(mma_bound(products)) / 16.0 + 2.0**-149
        top = s.max()
        near(f"m of {name}", m, top, ds.max())
        e = np.exp(s - top)
        relative = 1.01 * (ds + ds.max() + F32_ULP * np.abs(np.nan_to_num(s - top)) + 2.0**-22)
        de = np.minimum(e * np.expm1(relative), 1.0) + 2.0**-149
        near(f"l of {name}", length, e.sum(), de.sum() + 6 * F32_ULP * e.sum())
        padded = np.zeros((-(-len(e) // 16) * 16, HEAD))
        padded[:len(e)] = e[:, None] * v
        dw = de + F16_ULP * e + 2.0**-25
        size = np.nan_to_num(np.abs(v), posinf=0.0)
        near(f"o of {name}", o, (e[:, None] * v).sum(axis=0),
             1.01 * (np.nan_to_num(dw)[:, None] * size).sum(axis=0) + np.nan_to_num(mma_bound(padded.T)))


# ---- qsa_merge

def _qsa_merge(case: Case, seed: int) -> Operands:
    n_q, budget, rows = case.int("n_q"), case.int("budget"), parse_rows(case)
    special, cap, n = case.dims.get("special"), len(rows) + 1, len(rows)
    parts = [-(-len(attended(p, budget, np.arange(budget))) // PART) for _, p in rows]
    max_parts, k = max(parts) + 1, HEAD * n_q
    q = own(seed, "q", rows, cap, (n_q, 2 * HEAD), 4.0)
    m = own(seed, "m", rows, cap, (max_parts, n_q), 64.0 if special == "spread" else 4.0)
    m = np.ascontiguousarray(m.swapaxes(1, 2))
    length = np.abs(own(seed, "l", rows, cap, (max_parts, n_q), 32.0).swapaxes(1, 2)) + np.float32(1)
    o = own(seed, "o", rows, cap, (max_parts, n_q, HEAD), 16.0).swapaxes(1, 2).copy()
    flag = poisoned_rows(cap, dtype=np.uint32)
    flag[:n] = 0
    if special == "flag":
        flag[1] = 1
    if special == "nonfinite":
        m[0, 0, 1], o[1, 1, 0, 5], o[1, 2, 1, 200], q[1, 3, HEAD + 9] = np.nan, np.inf, np.nan, np.nan
    if special in ("midpoints", "integers"):     # weights 1, an open gate: what is stored is the sum of o / l
        m[:n], length[:n], q[:n, :, HEAD:] = 0.0, 1.0, 128.0
        o[:n] = (midpoints(seed, "o", o[:n].shape) if special == "midpoints" else np.round(o[:n]) * 2 + 0.0)
    for r, used in enumerate(parts):
        for x in (m, length, o):
            x[r, :, used:] = np.nan
    linear, moves = _o_proj(case, seed, k)
    pages = Pages(Case(case.name, {**case.dims, "pages": "shared"}), seed, 1)      # for its tables alone
    rows_table = pages.tables()[0]["rows"]
    arrays: Arrays = {"round": round_table(n, cap), "rows": rows_table, "q": q, "part_m": m, "part_l": length,
                      "part_o": o, "flag": flag, **linear, "x": poisoned_rows(cap, k, dtype=np.float16)}

    def expect(got: Arrays) -> None:
        for r, used in enumerate(parts):
            with np.errstate(invalid="ignore", over="ignore", under="ignore"):
                pm, pl, po = (x[r, :, :used].astype(np.float64) for x in (m, length, o))
                w = np.exp(pm - pm.max(axis=1, keepdims=True))
                total = (w * pl).sum(axis=1)[:, None]
                gate = 1.0 / (1.0 + np.exp(-q[r, :, HEAD:].astype(np.float64)))
                want = (w[..., None] * po).sum(axis=1) / total * gate
                size = (w[..., None] * np.abs(po)).sum(axis=1) / total * gate
                spread = (pm.max(axis=1) - pm.min(axis=1))[:, None]
                bound = F32_ULP * ((10 * used + 4 * spread) * (size + np.abs(want)) + 8 * np.abs(want))
            if flag[r]:
                want[:] = np.nan
            x = from_fragment(got["x"][r])
            if special in ("midpoints", "integers"):
                same_bits(f"row {r}", x, want.reshape(-1).astype(np.float16))
            if str(case["dtype"]) == "exl3":
                _check_rotated(f"row {r}", x, want.reshape(-1), np.nan_to_num(bound).reshape(-1),
                               linear["suh"])
            else:
                within_f16(f"row {r}", x, want.reshape(-1), np.nan_to_num(bound).reshape(-1))
        untouched("x", got["x"][n:])

    scalars: dict[str, int | float] = {"n_q": n_q, "budget": budget, "max_parts": max_parts}
    return Operands(arrays, scalars, (n_q, cap, 1), moves, ("x",), expect)


def _o_proj(case: Case, seed: int, k: int) -> tuple[Arrays, list[tuple[str, int, str, int]]]:
    """Arrays linear and suh, and where addresses go in linear; x is the caller's."""
    table = linear_table(1)
    table["k"], table["n"], table["x_stride"], table["leaves"], table["segments"] = k, 128, k, 1, 1
    table["w"]["format"] = _FORMATS[str(case["dtype"])]
    table["tiled"] = int(case.dims.get("tiled", 0))
    suh = (signed(seed, "suh", (k,), 1.0) + np.float32(1.25)).astype(np.float16)
    moves = [("linear", _offset(LINEAR, "w") + _offset(WEIGHT, "suh"), "suh", 0),
             ("linear", _offset(LINEAR, "x"), "x", 0)]
    return {"linear": table, "suh": suh}, moves


# ---- qsa_deep

def _qsa_deep(case: Case, seed: int) -> Operands:
    n_q, n_kv, budget = case.int("n_q"), case.int("n_kv"), case.int("budget")
    special, group, k = case.dims.get("special"), n_q // n_kv, HEAD * n_q
    pages, tokens, chosen = _attended(case, seed)
    rows, cap, n, q16 = pages.rows, pages.rows_cap, len(pages.rows), chosen["q16"]
    q = own(seed, "gates", rows, cap, (n_q, 2 * HEAD), 4.0)
    if special in ("midpoints", "integers"):    # equal weights, an open gate: the mean of v
        q[:n, :, HEAD:] = 128.0
    flag = poisoned_rows(cap, dtype=np.uint32)
    flag[:n] = 0
    if special == "flag":
        flag[1] = 1
    linear, to_x = _o_proj(case, seed, k)
    x = poisoned_rows(cap, k, dtype=np.float16)
    arrays, moves = pages.tables()
    arrays |= chosen | linear | {"q": q, "flag": flag, "x": to_tiles(x) if case.dims.get("tiled") else x}

    def expect(got: Arrays) -> None:
        stored = from_tiles(got["x"]) if is_tiles(got["x"]) else from_fragment(got["x"])
        for r, (sequence, _) in enumerate(rows):
            page, entry = pages.entry(sequence, tokens[r])
            want, bound = np.empty((n_q, HEAD)), np.empty((n_q, HEAD))
            for h in range(n_q):
                keys, vals = (at[page, entry, h // group].astype(np.float64) for at in (pages.k, pages.v))
                want[h], bound[h] = attention_bound(q16[r, h].astype(np.float64), keys, vals,
                                                    q[r, h, HEAD:].astype(np.float64))
            want[:] = np.nan if flag[r] else want
            mine = stored[r]
            if special in ("midpoints", "integers"):
                same_bits(f"row {r}", mine, want.reshape(-1).astype(np.float16))
            if str(case["dtype"]) == "exl3":
                _check_rotated(f"row {r}", mine, want.reshape(-1), np.nan_to_num(bound).reshape(-1),
                               linear["suh"])
            else:
                within_f16(f"row {r}", mine, want.reshape(-1), np.nan_to_num(bound).reshape(-1))
        untouched("x", np.ascontiguousarray(stored[n:]))

    scalars: dict[str, int | float] = {"kv_offset": pages.kv_offset, "n_q": n_q, "n_kv": n_kv,
                                       "budget": budget}
    return Operands(arrays, scalars, (n_kv, cap, 1), moves + to_x, ("x",), expect)


def attention_bound(q: F64Array, k: F64Array, v: F64Array, gate: F64Array) -> tuple[F64Array, F64Array]:
    """Gated attention of one head in FP64, and the bound before the rounding to f16, as the declaration says.
    k, v (entries, 256)."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        products = k * q
        s = products.sum(axis=1) / 16.0
        ds = np.nan_to_num(mma_bound(products)) / 16.0 + 2.0**-149
        parts = -(-len(s) // PART)
        tops = np.array([s[PART * p:PART * (p + 1)].max() for p in range(parts)])
        of = np.repeat(tops, PART)[:len(s)]
        spread = float(np.nan_to_num(tops.max() - tops.min()))
        w, merge = np.exp(s - tops.max()), np.exp(of - tops.max())
        # of a weight: the score, its exponential and the part's; of all: additions and merges
        each = np.expm1(1.01 * (ds + F32_ULP * np.abs(np.nan_to_num(s - of)) + 2.0**-22))
        joins = F32_ULP * (10 * parts + 4 * spread)
        size = np.nan_to_num(np.abs(v), posinf=0.0)
        dw = np.nan_to_num(w * each)[:, None] * size
        rounded = np.nan_to_num(F16_ULP * w + 2.0**-25 * merge)[:, None] * size
        chains = np.zeros(HEAD)
        for p in range(parts):
            cut = slice(PART * p, PART * (p + 1))
            padded = np.zeros((-(-len(s[cut]) // 16) * 16, HEAD))
            padded[:len(s[cut])] = w[cut, None] * v[cut]
            chains += np.nan_to_num(mma_bound(padded.T))
        total, value = w.sum(), (w[:, None] * v).sum(axis=0)
        act = 1.0 / (1.0 + np.exp(-gate))
        want = value / total * act
        largest = np.nan_to_num((w[:, None] * size).sum(axis=0))
        numerator = (dw + rounded).sum(axis=0) + chains + joins * largest
        denominator = np.nan_to_num(w * each).sum() / total + joins + 6 * F32_ULP
        bound = act * numerator / total + np.abs(want) * (denominator + 8 * F32_ULP)
        return want, 1.02 * bound


def _offset(table: np.dtype[Any], field: str) -> int:
    assert table.fields is not None
    return int(table.fields[field][1])


def _check_rotated(name: str, got: NDArray[Any], want: F64Array, bound: F64Array, suh: NDArray[np.float16]
                   ) -> None:
    index = np.arange(128)
    signs = np.where(np.array([[(int(i) & int(j)).bit_count() & 1 for j in index] for i in index]), -1.0, 1.0)
    scale = float(np.float32(0.088388347648))
    with np.errstate(invalid="ignore"):
        x = (want * suh.astype(np.float64)).reshape(-1, 128)
        before = (bound * np.abs(suh.astype(np.float64))).reshape(-1, 128).sum(axis=1)
        before = (before + 9 * F32_ULP * np.nan_to_num(np.abs(x)).sum(axis=1)) * scale
        within_f16(f"{name}, rotated", got, (x @ signs * scale).reshape(-1), np.repeat(before, 128))


BUILDERS: Final[dict[str, Callable[[Case, int], Operands]]] = {
    "qsa_attn": _qsa_attn, "qsa_merge": _qsa_merge, "qsa_deep": _qsa_deep}
