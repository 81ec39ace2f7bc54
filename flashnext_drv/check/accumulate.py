"""What coarser sums would do: fp16 and bf16 accumulation, simulated, must miss the bound that fp32 sums keep.

Owns: for each kernel that claims sums in fp32 the roundings it is allowed, sums of its kind in several shapes
with the bound that its declaration derives, and by what factor the coarser ones miss it.  Called by
worker.py; runs on the host alone.  What must stay true: a factor of 1 or less means that the bound does not
tell fp32 from less, and fails the kernel; a kernel without such sums says why.

Each sum is made in three orders: one after the other, in pairs, and in 32 lanes that are then joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.exl3 import (
    GDN_IN_SEGMENT_INPUTS,
    GU_SEGMENT_INPUTS,
    OUT_SEGMENT_INPUTS,
    SEGMENT_INPUTS,
    dot_segments,
)
from .cases_attn_qsa import mma_bound
from .cases_exl3 import Dot, make_weights, operand_rows, step_bound
from .operands import F32_ULP, signed

__all__ = ["NO_SUMS", "ORDERS", "SUMS", "Factor", "Sum", "factors", "simulate"]

F64 = NDArray[np.float64]
Made = tuple[F64, F64]  # products (sums, K), bound (sums,)
ORDERS: Final = ("sequential", "pairwise", "32 lanes")
_TYPES: Final = ("fp16", "bf16")


@dataclass(frozen=True)
class Sum:
    """One kind of sum.  allowed: the roundings that the kernel may make.  shapes: of the sums; make: products
    and bound of one shape."""

    allowed: str
    shapes: tuple[tuple[int, ...], ...]
    make: Callable[[tuple[int, ...]], Made]


@dataclass(frozen=True)
class Factor:
    """The worst error of a simulated sum over its bound.  shape: in words."""

    kernel: str
    how: str
    shape: str
    factor: float
    allowed: str

    @property
    def ok(self) -> bool:
        return self.factor > 1.0

    @property
    def text(self) -> str:
        return f"{self.factor:.3g} times the bound, shape {self.shape}"


def factors(kernel: str) -> Iterator[Factor]:
    """The least factor of each type and order over the kernel's shapes.  Raises KeyError for a kernel that
    has neither sums nor a reason."""
    if kernel in NO_SUMS:
        return
    one = SUMS[kernel]
    made = [(shape, *one.make(shape)) for shape in one.shapes]
    for kind in _TYPES:
        for order in ORDERS:
            found = []
            for shape, products, bound in made:
                error = np.abs(simulate(products, kind, order) - products.sum(axis=-1))
                found.append((float((error / bound).max()), "x".join(map(str, shape))))
            factor, text = min(found)
            yield Factor(kernel, f"{kind} {order}", text, factor, one.allowed)


def simulate(products: F64, kind: str, order: str) -> F64:
    """The sum over the last axis with every addition rounded to `kind`, in `order`; products are exact."""
    x = products
    if order == "pairwise":
        while x.shape[-1] > 1:
            if x.shape[-1] % 2:
                x = np.concatenate((x, np.zeros_like(x[..., :1])), axis=-1)
            x = _rounded(x[..., 0::2] + x[..., 1::2], kind)
        return np.asarray(x[..., 0])
    lanes = 32 if order == "32 lanes" else 1
    short = -x.shape[-1] % lanes
    x = np.concatenate((x, np.zeros((*x.shape[:-1], short))), axis=-1).reshape(*x.shape[:-1], -1, lanes)
    total = np.zeros((*x.shape[:-2], lanes))
    for k in range(x.shape[-2]):
        total = _rounded(total + x[..., k, :], kind)
    return simulate(total, kind, "pairwise") if lanes > 1 else np.asarray(total[..., 0])


def _rounded(x: F64, kind: str) -> F64:
    with np.errstate(over="ignore"):
        if kind == "fp16":
            return x.astype(np.float16).astype(np.float64)
        words = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = words + np.uint64(0x7FFF) + (words >> np.uint64(16) & np.uint64(1)) & np.uint64(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


# ---- sums of the kernels ----


def _exl3_dot(shape: tuple[int, ...]) -> Made:
    """A unit of a product: K inputs, N outputs, fewest inputs of a unit.  4 rows, 32 outputs."""
    k, n = shape[0] // dot_segments(shape[0], shape[1], least=shape[2]), 128
    x = operand_rows(1, f"x{shape}", 4, k).astype(np.float64)
    w = make_weights(1, f"w{shape}", Dot("exl3", "mul1", 3.0, k, n)).exact()[:32]
    products = (x[:, None] * w[None]).reshape(-1, k)
    exact, bound = np.zeros(len(products)), np.zeros(len(products))
    for at in range(0, k, 16):
        terms = products[:, at : at + 16]
        largest = np.maximum(np.abs(terms).max(axis=-1), np.abs(exact))
        exact = exact + terms.sum(axis=-1)
        bound += step_bound(largest, exact)
    return products, bound


def _terms(relative: float) -> Callable[[tuple[int, ...]], Made]:
    """Random products, bound `relative` of the sum of magnitudes."""

    def make(shape: tuple[int, ...]) -> Made:
        k = shape[0]
        products = (signed(2, f"a{shape}", (64, k)) * signed(2, f"b{shape}", (64, k))).astype(np.float64)
        return products, relative * np.abs(products).sum(axis=-1)

    return make


def _squares(relative: float) -> Callable[[tuple[int, ...]], Made]:
    def make(shape: tuple[int, ...]) -> Made:
        products = signed(3, f"s{shape}", (64, shape[0])).astype(np.float64) ** 2
        return products, relative * products.sum(axis=-1)

    return make


def _mma(shape: tuple[int, ...]) -> Made:
    products, _ = _terms(0.0)(shape)
    return products, mma_bound(products)


def _site_up(shape: tuple[int, ...]) -> Made:
    products, _ = _terms(0.0)(shape)
    return products, shape[0] / 16 * 2.0**-23 * np.abs(products).sum(axis=-1)


def _ple(shape: tuple[int, ...]) -> Made:
    return _terms((2 * -(-shape[0] // 512) + 8) * F32_ULP)(shape)


# The published products by role (the last a leaf of an out-projection), then other lengths of units.
_DOTS: Final = (
    (2560, 640, GU_SEGMENT_INPUTS),
    (640, 2560, SEGMENT_INPUTS),
    (2560, 10240, GDN_IN_SEGMENT_INPUTS),
    (10240, 320, SEGMENT_INPUTS),
    (2560, 248320, SEGMENT_INPUTS),
    (768, 2560, OUT_SEGMENT_INPUTS),
    (1024, 512, SEGMENT_INPUTS),
    (512, 1024, SEGMENT_INPUTS),
    (4096, 128, SEGMENT_INPUTS),
)
_DOT: Final = Sum(
    "one cut to 25 bits of each of 16 products and the accumulator, and one of their sum to f32, a "
    "step of 16 inputs; nothing else in a unit",
    _DOTS,
    _exl3_dot,
)
_HADAMARD: Final = "7 additions in f32 and the scale, each rounded once, over 128 values"
_PLE: Final = Sum(
    "one f32 fma a channel of a thread, 5 additions over lanes, 3 over warps", ((256,), (2560,)), _ple
)
_UNITS: Final = "one f32 addition a unit after the first"

SUMS: Final[dict[str, Sum]] = {
    "linear_gemv_n8": _DOT,
    "linear_gemv_n16": _DOT,
    "moe_gemv_gu": _DOT,
    "moe_gemv_down": _DOT,
    "site_norm": Sum(
        "one f32 fma an element, 5 additions over lanes, 3 over warps",
        ((256,), (2560,), (3328,)),
        _squares(2.0**-19),
    ),
    "site_mid": Sum(_UNITS, ((8,), (16,), (32,)), lambda shape: _terms((shape[0] - 1) * F32_ULP)(shape)),
    "site_up_n8": Sum("as linear_gemv", ((320,), (64,), (512,)), _site_up),
    "site_up_n16": Sum("as linear_gemv", ((320,), (64,), (512,)), _site_up),
    "linear_input": Sum(_HADAMARD + ", then one rounding to f16", ((128,),), _terms(9 * F32_ULP)),
    "linear_finish": Sum(_UNITS + "; " + _HADAMARD, ((128,),), _terms(9 * F32_ULP)),
    "moe_input": Sum(_HADAMARD + ", then one rounding to f16", ((128,),), _terms(9 * F32_ULP)),
    "moe_act": Sum(_UNITS + "; " + _HADAMARD, ((128,),), _terms(9 * F32_ULP)),
    "moe_sum": Sum(
        _UNITS + "; " + _HADAMARD + "; one f32 fma a slot, 3 additions of leaves",
        ((5,), (11,), (33,)),
        lambda shape: _terms((shape[0] + 3) * F32_ULP)(shape),
    ),
    "moe_deep_input": Sum(_HADAMARD + ", then one rounding to f16", ((128,),), _terms(9 * F32_ULP)),
    "moe_deep_gu": _DOT,
    "moe_deep_down": _DOT,
    "moe_deep_sum": Sum(
        "one f32 fma a slot, 3 additions of leaves",
        ((5,), (11,), (33,)),
        lambda shape: _terms((shape[0] + 3) * F32_ULP)(shape),
    ),
    "deep_linear": _DOT,
    "deep_input": Sum(_HADAMARD + ", then one rounding to f16", ((128,),), _terms(9 * F32_ULP)),
    "deep_site_up": Sum("as linear_gemv", ((320,), (64,), (512,)), _site_up),
    "router_pick": Sum(
        "one f32 addition a chosen expert",
        ((4,), (10,), (32,)),
        lambda shape: _squares(shape[0] * F32_ULP)(shape),
    ),
    "gdn_conv": Sum("as linear_finish; then one product and three f32 fma", ((4,),), _terms(4.4 * F32_ULP)),
    "gdn_step": Sum(
        "one f32 fma a key row of a lane (32), 2 additions over lanes", ((128,),), _terms(34 * F32_ULP)
    ),
    "gdn_deep_input": Sum(
        "one product and three f32 fma, then one f32 fma an element of a lane (32), 2 additions over lanes",
        ((128,),),
        _squares(34 * F32_ULP),
    ),
    "gdn_scan": Sum(
        "one f32 fma a key row of a lane (32), 2 additions over lanes", ((128,),), _terms(34 * F32_ULP)
    ),
    "gdn_gate_input": Sum(
        "one f32 fma an element of a lane (4), 5 additions over lanes; " + _HADAMARD,
        ((128,),),
        _squares(9 * F32_ULP),
    ),
    "qsa_prep": Sum(
        "one f32 fma an element of a lane (8 or 4), 5 additions over lanes",
        ((256,), (128,)),
        lambda shape: _squares((shape[0] // 32 + 5) * F32_ULP)(shape),
    ),
    "index_score": Sum("as linear_gemv, 8 steps; 3 additions of heads and the scale", ((128,),), _mma),
    "index_score_deep": Sum("as index_score", ((128,),), _mma),
    "qsa_attn": Sum(
        "as linear_gemv, 16 steps for a score and 4 for a value; 6 additions of weights",
        ((256,), (64,)),
        _mma,
    ),
    "qsa_deep": Sum("as qsa_attn, and a product and an f32 fma a part", ((256,), (64,)), _mma),
    "qsa_merge": Sum(
        "a product and an f32 fma a part; " + _HADAMARD,
        ((2,), (8,), (33,)),
        lambda shape: _terms(10 * shape[0] * F32_ULP)(shape),
    ),
    "ple_mix": _PLE,
    "ple_gate": _PLE,
    "ple_conv": Sum("one product and three f32 fma", ((4,),), _terms(4.4 * F32_ULP)),
}

NO_SUMS: Final[dict[str, str]] = {
    "stream_add": "one fma an element",
    "moe_plan_count": "integers",
    "moe_plan_scan": "integers",
    "moe_plan_place": "integers",
    "index_select": "integers",
    "embed_rows": "copies",
    "rope_rows": "no sum over elements",
    "ngram_rows": "one product and one addition a value",
    "ple_tail": "copies",
    "draw_rows": "its sums are of integers",
    "synth_fill": "integers",
    "line_resolve": "integers",
    "line_fill": "copies",
    "count_replay": "integers",
    "advance_rows": "integers",
    "edit_logits": "no sum over elements",
    "math_sweep": "single functions",
    "math_f64": "single functions",
    "mma_tiles_f16": "one step, compared bit for bit with an integer model",
    "mma_tiles_bf16": "one step, compared bit for bit with an integer model",
    "warp_ops": "compared bit for bit",
    "barrier_turns": "integers",
    "shared_wide": "integers",
}
