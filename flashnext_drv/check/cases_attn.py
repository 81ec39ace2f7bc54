"""Contract cases of the attn family: inputs, FP64 expectations from the operands as the kernels rounded
them, and bit oracles of the orders that need neither mma nor an elementary function.

Called by check/contract.py.  Pages, rows and slots come from attn_pages.py, the cases of the kernels that
attend from cases_attn_qsa.py.  Bounds are derived from the rounding points that the declarations name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.attn import SCORE_ROWS
from ..kernels.spec import Case
from ..ref.attn import block_scores, choose_blocks
from ..ref.orders import fma32, fma_chain, warp_sum
from .attn_pages import BLOCK, HEAD, INDEX_HEAD, Pages, blocks_seen, parse_rows
from .cases_attn_qsa import BUILDERS, F64Array, mma_bound, own
from .contract import Operands
from .operands import (
    F32_ULP,
    midpoints,
    near,
    poisoned_rows,
    same_bits,
    signed,
    untouched,
    within_f16,
)

__all__ = ["build", "chosen_blocks", "window_of"]

Arrays = dict[str, NDArray[Any]]
EPS: Final = 1e-6


def build(name: str, case: Case, seed: int) -> Operands:
    """Operands of one case of an attention kernel.  Raises KeyError for a kernel of another family."""
    return _BUILDERS[name](case, seed)


# ---- qsa_prep

def _norm_rope(x: NDArray[np.float32], w: NDArray[np.float32], cs: NDArray[np.float32]) -> tuple[F64Array,
                                                                                                 F64Array]:
    """x (..., N) f32 -> norm and rotation in FP64, and the bound before the rounding to f16.  cs (32, 2)."""
    with np.errstate(invalid="ignore", over="ignore"):
        v = x.astype(np.float64)
        r = 1.0 / np.sqrt((v * v).mean(axis=-1, keepdims=True) + float(np.float32(EPS)))
        n = v * r * (1.0 + w.astype(np.float64))
        out, size = n.copy(), np.abs(n)
        c, s = cs[:, 0].astype(np.float64), cs[:, 1].astype(np.float64)
        a, b = n[..., :32], n[..., 32:64]
        out[..., :32], out[..., 32:64] = a * c - b * s, b * c + a * s
        size[..., :32] = np.abs(a * c) + np.abs(b * s)
        size[..., 32:64] = np.abs(b * c) + np.abs(a * s)
        return out, 12 * F32_ULP * size


def _norm_rope_bits(x: NDArray[np.float32], w: NDArray[np.float32],
                    cs: NDArray[np.float32]) -> NDArray[np.float16]:
    """The same in the kernel's order: x (N,) f32, lane l holding elements l, l + 32, ..."""
    with np.errstate(invalid="ignore", over="ignore"):
        lanes = x.reshape(-1, 32)
        total = warp_sum(fma_chain(lanes.T, lanes.T))
        r = np.float32(1) / np.sqrt(total * np.float32(1 / len(x)) + np.float32(EPS))
        n = (x * r) * (np.float32(1) + w)
        a, b, c, s = n[:32], n[32:64], cs[:, 0], cs[:, 1]
        n[:32], n[32:64] = fma32(a, c, -(b * s)), fma32(b, c, a * s)
        return np.asarray(n.astype(np.float16))


def _check_head(name: str, got: NDArray[Any], x: NDArray[Any], w: NDArray[Any], cs: NDArray[Any],
                extra: float = 0.0) -> None:
    want, bound = _norm_rope(x, w, cs)
    within_f16(name, got, want, bound * (1 + extra))
    same_bits(name, got, _norm_rope_bits(x.astype(np.float32), w, cs))


def _qsa_prep(case: Case, seed: int) -> Operands:
    n_q, n_kv = case.int("n_q"), case.int("n_kv")
    pages = Pages(case, seed, n_kv)
    rows, cap = pages.rows, pages.rows_cap
    given = {"q": (n_q, 2 * HEAD), "k": (n_kv, HEAD), "v": (n_kv, HEAD), "idx": (5, INDEX_HEAD)}
    arrays = {name: own(seed, name, rows, cap, shape, 2.0) for name, shape in given.items()}
    arrays |= {name: own(seed, name, rows, cap, (32, 2)) for name in ("rope", "rope_block")}
    arrays |= {name: signed(seed, name, (HEAD if name in ("q_norm", "k_norm") else INDEX_HEAD,), 0.5)
               for name in ("q_norm", "k_norm", "iq_norm", "ik_norm")}
    for sequence, position in rows:      # raw keys that earlier rounds left in the block
        for p in range(position // BLOCK * BLOCK, position):
            page, entry = pages.entry(sequence, p)
            pages.raw[page, entry] = signed(seed, f"idx/{sequence}/{p}", (5, INDEX_HEAD),
                                            2.0)[4].astype(np.float16)
    if case.dims.get("special") == "zeros":
        for name in given:
            arrays[name][:len(rows)] = 0.0
    if case.dims.get("special") == "nonfinite":
        arrays["q"][0, 0, 3], arrays["q"][1, 1, 255], arrays["k"][2, 0, 40] = np.nan, np.inf, -np.inf
        arrays["k"][3, 1, 0], arrays["v"][1, 0, 7] = np.nan, np.nan
        arrays["v"][2, 1, 8], arrays["v"][3, 0, 9] = np.inf, 1e6
        arrays["idx"][0, 4, 100], arrays["idx"][5, 4, 2], arrays["idx"][4, 2, 0] = np.nan, -np.inf, np.nan
    if case.dims.get("special") == "midpoints":
        for name in ("v", "idx"):
            arrays[name][:len(rows)] = midpoints(seed, name, arrays[name][:len(rows)].shape)
    tables, moves = pages.tables()
    arrays |= tables | {"q16": poisoned_rows(cap, n_q, HEAD, dtype=np.float16),
                        "iq16": poisoned_rows(cap, 4, INDEX_HEAD, dtype=np.float16)}
    before, source = pages.like(pages.kv.copy(), pages.index.copy()), dict(arrays)

    def expect(got: Arrays) -> None:
        after = pages.like(got["kv"], got["index"])
        for r, (sequence, position) in enumerate(rows):
            page, entry = pages.entry(sequence, position)
            cs = source["rope"][r]
            for h in range(n_q):
                _check_head(f"q16 row {r} head {h}", got["q16"][r, h], source["q"][r, h, :HEAD],
                            source["q_norm"], cs)
            for h in range(4):
                _check_head(f"iq16 row {r} head {h}", got["iq16"][r, h], source["idx"][r, h],
                            source["iq_norm"], cs)
            for h in range(n_kv):
                _check_head(f"K row {r} head {h}", after.k[page, entry, h], source["k"][r, h],
                            source["k_norm"], cs)
            with np.errstate(over="ignore"):
                same_bits(f"V row {r}", after.v[page, entry], source["v"][r].astype(np.float16))
                same_bits(f"raw key of row {r}", after.raw[page, entry],
                          source["idx"][r, 4].astype(np.float16))
            before.k[page, entry], before.v[page, entry] = after.k[page, entry], after.v[page, entry]
            before.raw[page, entry] = after.raw[page, entry]
            if position % BLOCK == BLOCK - 1:
                raw = after.raw[page, entry - 3:entry + 1].astype(np.float32)
                with np.errstate(invalid="ignore"):
                    mean = ((raw[0] + raw[1]) + (raw[2] + raw[3])) * np.float32(0.25)
                exact = raw.astype(np.float64).mean(axis=0)
                near(f"mean key of row {r}", mean, exact,
                     3 * F32_ULP * np.abs(raw).astype(np.float64).sum(axis=0))
                _check_head(f"pooled key of row {r}", after.pooled[page, entry // BLOCK], mean,
                            source["ik_norm"],
                            source["rope_block"][r])
                before.pooled[page, entry // BLOCK] = after.pooled[page, entry // BLOCK]
        same_bits("KV pages elsewhere", after.kv, before.kv)
        same_bits("index pages elsewhere", after.index, before.index)
        untouched("q16", got["q16"][len(rows):])
        untouched("iq16", got["iq16"][len(rows):])

    scalars: dict[str, int | float] = {"kv_offset": pages.kv_offset, "index_offset": pages.index_offset,
                                       "n_q": n_q,
                                       "n_kv": n_kv, "rope_dim": 64, "eps": EPS}
    return Operands(arrays, scalars, (-(-(n_q + 2 * n_kv + 5) // 4), cap, 1), moves,
                    ("q16", "iq16", "kv", "index"), expect)


# ---- index_score

def _index_score(case: Case, seed: int, deep: bool = False) -> Operands:
    """index_score; with `deep` index_score_deep."""
    budget = case.int("budget")
    pages = Pages(case, seed, 1)
    rows, cap = pages.rows, pages.rows_cap
    window, first = window_of(case, cap)
    queries = own(seed, "iq", rows, cap, (4, INDEX_HEAD), 2.0).astype(np.float16)
    exact = case.dims.get("special") == "integers"
    if case.dims.get("special") == "zeros":
        queries[:len(rows)] = 0.0
    if exact:
        queries[:len(rows)] = np.round(queries[:len(rows)])
    max_blocks = max(blocks_seen(p) for _, p in rows) + 3
    used = [(s, np.arange(blocks_seen(p) if blocks_seen(p) > budget else 0)) for s, p in rows]
    for sequence in pages.sequences:
        n_local = int(pages.local[sequence].max()) + 1
        content = signed(seed, f"pooled/{sequence}", (n_local, 16, INDEX_HEAD), 1.0).astype(np.float16)
        content = np.round(content * 4) if exact else content
        for s, blocks in used:
            if s == sequence:
                page = blocks // 16
                pages.pooled[pages.at[s][page], blocks % 16] = content[pages.local[s][page], blocks % 16]
    if case.dims.get("special") == "nonfinite":
        for (sequence, _), block, value in zip([rows[0], rows[0], rows[-1]], (5, 6, 9),
                                               (np.nan, np.inf, -np.inf),
                                               strict=True):
            pages.pooled[pages.at[sequence][block // 16], block % 16, 17 + block] = value
        queries[1, 2, 3] = np.nan
    arrays, moves = pages.tables()
    arrays |= {"iq16": queries, "score": poisoned_rows(window, max_blocks)}

    def expect(got: Arrays) -> None:
        for r, (sequence, blocks) in list(enumerate(used))[first:first + window]:
            score = got["score"][r - first]
            keys = pages.pooled[pages.at[sequence][blocks // 16], blocks % 16].astype(np.float64)
            with np.errstate(invalid="ignore"):
                want = block_scores(queries[r].astype(np.float64), keys)
                products = keys[:, None, :] * queries[r].astype(np.float64)
            bound = mma_bound(products).sum(axis=1) / np.sqrt(INDEX_HEAD) + 4 * F32_ULP * np.abs(want)
            near(f"scores of row {r}", score[:len(blocks)], want, bound)
            if exact:       # the sum is an integer: one rounding, of the scale
                whole = np.maximum(products.sum(axis=-1), 0.0).sum(axis=1).astype(np.float32)
                same_bits(f"scores of row {r} of integers", score[:len(blocks)].copy(),
                          whole * np.float32(float.fromhex("0x1.6a09e6p-4")))
            untouched(f"score of row {r} beyond its blocks", score[len(blocks):])
        untouched("score", got["score"][max(len(rows) - first, 0):])

    scalars: dict[str, int | float] = {"index_offset": pages.index_offset, "max_blocks": max_blocks,
                                       "budget": budget, "first_row": first}
    grid = (int(case.dims.get("grid", 1)), -(-window // SCORE_ROWS) if deep else cap, 1)
    return Operands(arrays, scalars, grid, moves, ("score",), expect)


def _index_score_deep(case: Case, seed: int) -> Operands:
    return _index_score(case, seed, deep=True)


# ---- index_select

def chosen_blocks(score: NDArray[np.float32], budget: int) -> NDArray[np.int64]:
    """The `budget` best of scores (blocks,), rising: NaN above all, then the higher score, then the lower
    id."""
    value = np.where(np.isnan(score), np.inf, score)
    order = np.lexsort((np.arange(len(score)), -value, ~np.isnan(score)))
    return np.sort(order[:budget])


def _scores(case: Case, seed: int, name: str, n: int) -> NDArray[np.float32]:
    special = case.dims.get("special")
    x = signed(seed, name, (n,), 8.0)
    if special == "relu":               # about half are zero, more than fit beside the positive ones
        x = np.where(x > 4.0, x, np.float32(0))
    elif special == "equal":
        x[:] = 2.5
    elif special == "signed":
        x = np.where(np.abs(x) < 6.0, np.copysign(np.float32(0), x), x)
    elif special == "near":             # all differ in the last 12 bits alone
        x = (x.view(np.uint32) & np.uint32(0xFFF) | np.uint32(0x41200000)).view(np.float32)
    elif special == "nan":
        x[[1, n // 2, n - 1]] = np.nan
    elif special == "many_nan":
        x[::3] = np.nan
    elif special == "inf":
        x[[0, n // 3]], x[n - 2] = np.inf, -np.inf
    return x


def _index_select(case: Case, seed: int) -> Operands:
    budget, rows = case.int("budget"), parse_rows(case)
    pages = Pages(Case(case.name, {**case.dims, "pages": "shared"}), seed, 1)      # for its tables alone
    max_blocks = max(blocks_seen(p) for _, p in rows) + 3
    window, first = window_of(case, pages.rows_cap)
    score = poisoned_rows(window, max_blocks)
    for r, (sequence, position) in enumerate(rows):
        if blocks_seen(position) > budget and 0 <= r - first < window:
            score[r - first, :blocks_seen(position)] = _scores(case, seed, f"score/{sequence}/{position}",
                                                               blocks_seen(position))
    tables, _ = pages.tables()
    arrays = {"round": tables["round"], "rows": tables["rows"], "score": score,
              "sel": poisoned_rows(pages.rows_cap, budget, dtype=np.uint32),
              "flag": poisoned_rows(pages.rows_cap, dtype=np.uint32)}

    def expect(got: Arrays) -> None:
        for r, (_, position) in enumerate(rows):
            seen = blocks_seen(position)
            if not 0 <= r - first < window:
                untouched(f"sel of row {r}", got["sel"][r])
                untouched(f"flag of row {r}", got["flag"][r:r + 1])
                continue
            if seen <= budget:
                untouched(f"sel of row {r}", got["sel"][r])
                assert got["flag"][r] == 0, f"flag of row {r}: {got['flag'][r]}, wanted 0"
                continue
            seen_scores = score[r - first, :seen]
            want = chosen_blocks(seen_scores, budget)
            if not np.isnan(seen_scores).any():
                assert (want == choose_blocks(seen_scores.astype(np.float64), budget).blocks).all()
            wrong = np.flatnonzero(got["sel"][r] != want)
            assert not wrong.size, f"sel of row {r}: {got['sel'][r][wrong[:4]]}, wanted {want[wrong[:4]]}"
            nan = int(np.isnan(seen_scores).any())
            assert got["flag"][r] == nan, f"flag of row {r}: {got['flag'][r]}, wanted {nan}"
        untouched("sel", got["sel"][len(rows):])
        untouched("flag", got["flag"][len(rows):])

    scalars: dict[str, int | float] = {"max_blocks": max_blocks, "budget": budget, "first_row": first}
    return Operands(arrays, scalars, (window, 1, 1), [], ("sel", "flag"), expect)


def window_of(case: Case, rows_cap: int) -> tuple[int, int]:
    """Rows of score, and the row of the launch that the first of them belongs to: all rows, or a window."""
    return int(case.dims.get("window", rows_cap)), int(case.dims.get("first_row", 0))


_BUILDERS: Final[dict[str, Callable[[Case, int], Operands]]] = {
    "qsa_prep": _qsa_prep, "index_score": _index_score, "index_score_deep": _index_score_deep,
    "index_select": _index_select, **BUILDERS}
