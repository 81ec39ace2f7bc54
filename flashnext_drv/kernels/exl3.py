"""Declarations of the exl3 family (linears of every format) and the rules of their layouts.

Kernel sources: cuda_src/exl3.  A linear is linear_input (operand), linear_gemv_n8 or _n16 (partial sums of
its units), linear_finish (sum of units, output rotation); other kernels replace the first and the last step.
What must stay true: `dot_segments` equals fn_dot_segments of cuda_src/exl3.cuh, `fragment_order_rows` equals
fn_frag_pos, and both widths of linear_gemv give a row the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from . import planted_exl3 as planted
from .limits import limits_of
from .spec import PTR, U32, Arg, Case, KernelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "GEMV_BLOCK",
    "KERNELS",
    "LINEAR_FINISH",
    "LINEAR_GEMV_N8",
    "LINEAR_GEMV_N16",
    "LINEAR_INPUT",
    "PAIRS",
    "dot_segments",
    "fragment_order_rows",
    "fragment_order_weights",
    "gu_segments",
    "leaves",
]

PAIRS: Final = tuple(
    (name, float(bits)) for name in ("3inst", "mcg", "mul1") for bits in range(1, 9)
) + tuple(("mul1", bits) for bits in (1.5, 2.5, 3.5))
# A block of linear_gemv and moe_gemv_*: a pair of tiles of 16 outputs, a warp each.
GEMV_BLOCK: Final = 64
_MAX_OUTPUTS: Final = 49152  # outputs times segments that fill the machine in a decode step
# Fewest inputs of a segment, by role: as many as decode's occupancy allows, for sums of units cost prompts.
SEGMENT_INPUTS: Final = 256
GU_SEGMENT_INPUTS: Final = 512  # gate and up: of 20 and more such products at once
GDN_IN_SEGMENT_INPUTS: Final = 1024
OUT_SEGMENT_INPUTS: Final = 512  # of projections with leaves


def dot_segments(k: int, n: int, leaves: int = 1, least: int = SEGMENT_INPUTS) -> int:
    """Segments of each leaf of a dot with `k` inputs and `n` outputs: 1, 2, 4 .. 32.  Part of the orders.

    k is a multiple of 16 * leaves.  least: inputs of a segment, a power of two, which the role says.
    """
    leaf, segments = k // leaves, 1
    while (
        segments < 32
        and 2 * segments * n <= _MAX_OUTPUTS
        and leaf % (32 * segments) == 0
        and leaf // (2 * segments) >= least
    ):
        segments *= 2
    return segments


def gu_segments(hidden: int, width: int) -> int:
    """Segments of an expert's gate and of its up projection."""
    return dot_segments(hidden, width, least=GU_SEGMENT_INPUTS)


def leaves(k: int) -> int:
    """Leaves of a sum that ranks could share (o_proj, out_proj): largest of 8, 4, 2, 1 dividing k / 128."""
    return next(n for n in (8, 4, 2, 1) if k // 128 % n == 0)


def fragment_order_rows(x: NDArray[Any]) -> NDArray[Any]:
    """Operand rows (..., K) in natural order -> (..., K) in fragment order, any dtype.  K a multiple of 16.

    Position i of an aligned group of 16 holds k = 2 (i >> 2) + (i & 1) + 8 (i >> 1 & 1).
    """
    if x.shape[-1] % 16:
        raise ValueError(f"fragment order needs K in groups of 16, not {x.shape[-1]}")
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // 16, 2, 4, 2)  # k = 8 h + 2 t + c
    return groups.swapaxes(-3, -2).reshape(x.shape)


def fragment_order_weights(w: NDArray[Any]) -> NDArray[Any]:
    """Plain weights (N, K) of 16-bit elements -> (ceil(N / 16), K / 16, 256), missing outputs zero.

    A tile's 256 elements are 8 of each of 32 lanes: with g = lane / 4, t = lane % 4, element 2 q + c of a
    lane is output g + 8 (q & 1), input 2 t + c + 8 (q >> 1): the registers a0 .. a3 of mma.m16n8k16.
    """
    n, k = w.shape
    if k % 16:
        raise ValueError(f"fragment order needs K in groups of 16, not {k}")
    import numpy as np  # here: the build reads this module without numpy

    tiles = -(-n // 16)
    grown = np.zeros((16 * tiles, k), w.dtype)
    grown[:n] = w
    # output = 16 i + 8 r + g, input = 16 j + 8 h + 2 t + c  ->  [i, j, g, t, h, r, c]
    split = grown.reshape(tiles, 2, 8, k // 16, 2, 4, 2)
    return split.transpose(0, 3, 2, 5, 4, 1, 6).reshape(tiles, k // 16, 256)


_ROUND: Final = Arg("round", PTR, "FnRound", "r")
_LINEARS: Final = Arg("linears", PTR, "FnLinear[]; writes go to what it points to", "r")
_DOT_BOUND: Final = (
    "From the f16 operand and the exact f16 weights, per unit of K/16 mma steps (bf16: twice as many): a "
    "step cuts 17 terms toward zero at 2^-25 of the power of two of the largest, of magnitude M (sm_80: "
    "twice, 9 terms at 2^-24), and its sum of magnitude A at 2^-23: at most 2^-23 (9 M + 2 A) a step. "
    "Bytes: those of ref.orders.mma_chain of the device's generation."
)


def _case(name: str, linears: str, rows: int, rows_cap: int, **dims: int | str) -> Case:
    """linears: "<format> <K>x<N>[/<leaves>][:<segments>][+bias]" separated by "; "; form: f16, bf16,
    <codebook>_<bits>; segments: of a leaf, else by the rule."""
    shows = ("integers",) if dims.get("data") == "onehot" else ()
    return Case(name, {"linears": linears, "rows": rows, "rows_cap": rows_cap, **dims}, shows)


def _gemv_cases(rows_max: int) -> Iterator[Case]:
    counts = (1, 2, 3, 7, 8) if rows_max == 8 else (16, 9, 11, 1, 13)
    for i, (codebook, bits) in enumerate(PAIRS):
        text = f"{codebook}_{bits:g}"
        yield _case(text, f"{text} 256x{128 << i % 2}", counts[i % 5], rows_max)
        yield _case(f"{text}_onehot", f"{text} 128x128", rows_max, rows_max, data="onehot")
    for i, n in enumerate((1, 4, 48, 129)):
        for dtype, k in (("f16", 80), ("bf16", 48), ("f16", 512), ("bf16", 512)):
            yield _case(f"{dtype}_{k}x{n}", f"{dtype} {k}x{n}", counts[i % 5], rows_max)
    yield _case("one_step", "f16 16x33; bf16 16x16", 2, rows_max)
    for segments in (2, 4, 8, 16, 32):
        yield _case(f"segments{segments}", f"mul1_3 {256 * segments}x128", counts[segments % 5], rows_max)
    yield _case("segments32_f16", "f16 10240x4", 1, rows_max)
    for at_once in (2, 4):  # 16 and 17 k steps a unit: whole groups, and some that make none
        yield _case(
            f"at_once{at_once}",
            "mul1_3 1024x128; f16 1088x40; bf16 544x33; mul1_5 512x256/2; mul1_2.5 1024x128",
            counts[at_once],
            rows_max,
            at_once=at_once,
        )
    yield _case("leaves2", "mul1_5 256x128/2", 3, rows_max)
    yield _case("leaves4", "mul1_5 512x256/4", 2, rows_max)
    yield _case("leaves8", "mul1_5 1024x128/8", 1, rows_max)
    yield _case("leaves8_segments2", "mul1_4 4096x128/8", 2, rows_max)
    yield _case("leaves2_plain", "f16 512x48/2", 3, rows_max)
    yield _case("odd_steps", "mul1_5 384x128; mcg_8 896x128; 3inst_3 640x128", rows_max - 1, rows_max)
    yield _case(
        "mixed", "mul1_5 512x256; mul1_2.5 512x128; f16 512x48; bf16 512x5; mcg_4 512x128", 3, rows_max
    )
    yield _case("short_rows_cap", "mul1_3 256x128; f16 256x4", 2, 3)
    yield _case("nonfinite", "mul1_3 256x128; f16 128x20; bf16 128x20", 3, rows_max, data="nonfinite")
    yield _case("integers", "f16 1024x20; bf16 1024x20", 5, rows_max, data="integers")
    yield _case("no_rows", "mul1_3 256x128", 0, rows_max)


LINEAR_INPUT: Final = KernelSpec(
    name="linear_input",
    source="exl3/linear_input.cu",
    order="hadamard",
    args=(_ROUND, _LINEARS, Arg("x", PTR, "(rows_cap, x_stride) f32", "r"),
          Arg("x_stride", U32, "elements, multiple of 4")),
    grid="ceil(k_max / 512), n_linears, rows_cap",
    block=128,
    programmatic=True,
    constants=("linears",),
    settled=("round",),
    limits=limits_of("linear_input"),
    reference="exl3.Linear.operand",
    rows={"x": 0, "x?": 0},
    exempt={
        "order": "compared from moe_input and deep_input, on their cases",
        "integers": "the rotation's scale 1/sqrt(128) is no power of two: integers have no exact answer",
    },
    controls=planted.LINEAR_INPUT,
    bound="Bytes: the f32 product, ref.orders.hadamard128 and one rounding to f16.  FP64: a product, 7 sums "
    "and the scale round by 2^-24 each of the block's sum of magnitudes / sqrt(128), then half an f16 ulp.",
    cases=(
        _case("exl3", "mul1_3 128x128", 1, 8),
        _case("blocks", "mul1_3 640x128; mcg_4 640x128", 3, 8),
        _case("wide", "mul1_3 2560x128", 16, 16),
        _case("plain", "f16 48x3; bf16 16x1; f16 528x8", 2, 4),
        _case("mixed", "mul1_5 512x128; f16 512x4", 7, 8),
        _case("one_of_many", "mul1_2 256x128", 1, 16),
        _case("nonfinite", "mul1_5 256x128; f16 256x4", 4, 4, data="nonfinite"),
        _case("nonfinite_scales", "mul1_5 256x128", 4, 4, data="nonfinite_scales"),
        _case("midpoints", "f16 256x4; bf16 256x4", 3, 4, data="midpoints"),
    ),
)


def _gemv(rows_max: int, blocks_per_sm: int) -> KernelSpec:
    return KernelSpec(
        name=f"linear_gemv_n{rows_max}",
        source="exl3/linear_gemv.cu",
        order="exl3_dot_v1, plain_dot_v1",
        args=(_ROUND, _LINEARS, Arg("n_linears", U32, "1.., first_warp rising from 0")),
        grid="total warps",
        block=GEMV_BLOCK,
        blocks_per_sm=blocks_per_sm,
        defines=(("FN_ROW_TILES", str(rows_max // 8)),),
        programmatic=True,
        spread=True,
        constants=("linears",),
        settled=("round",),
        limits=limits_of(f"linear_gemv_n{rows_max}"),
        reference="exl3.decode_linear",
        rows={"x*": 0, "part*": 1},
        exempt={
            "midpoints": "outputs are f32: nothing is rounded to f16",
            **({} if rows_max == 8 else {"order": "compared from linear_gemv_n8, on its cases"}),
        },
        controls=planted.LINEAR_GEMV_N8 if rows_max == 8 else planted.LINEAR_GEMV_N16,
        bound=_DOT_BOUND,
        cases=tuple(_gemv_cases(rows_max)),
    )


LINEAR_GEMV_N8: Final = _gemv(8, 10)
LINEAR_GEMV_N16: Final = _gemv(16, 11)

LINEAR_FINISH: Final = KernelSpec(
    name="linear_finish",
    source="exl3/linear_finish.cu",
    order="part_sum_v1, hadamard",
    args=(_ROUND, _LINEARS),
    grid="ceil(n_max / 512), n_linears, rows_cap",
    block=128,
    programmatic=True,
    constants=("linears",),
    settled=("round",),
    limits=limits_of("linear_finish"),
    reference="exl3.Linear.__call__",
    rows={"part*": 1, "out*": 0},
    exempt={
        "order": "part_sum_v1 is followed by other functions in every kernel that uses it",
        "midpoints": "outputs are f32: nothing is rounded to f16",
    },
    controls=planted.LINEAR_FINISH,
    bound="Bytes: segments in rising order, ref.orders.tree, hadamard128, times svh, plus bias.  FP64: "
    "units + 9 roundings of 2^-24 of the block's sum of magnitudes.",
    cases=(
        _case("exl3", "mul1_3 256x128", 1, 8),
        _case("segments", "mul1_3 2048x128; f16 8192x4; f16 4096x129", 2, 3),
        _case("many_segments", "mul1_3 8192x128; f16 4096x128", 1, 2),
        _case("leaves", "mul1_3 256x128/2; mul1_3 512x256/4; mul1_3 1024x128/8; mul1_3 4096x128/8", 3, 8),
        _case("leaves_segments", "mul1_3 16384x128/8; f16 4096x128/2", 2, 2),
        _case("bias", "mul1_2.5 256x640+bias; mcg_4 256x128", 7, 8),
        _case("plain", "f16 16x1; bf16 16x5; f16 16x48", 2, 4),
        _case("plain_leaves", "f16 512x6/2; f16 512x8/4", 2, 4),
        _case("sixteen", "mul1_3 512x1280", 16, 16),
        _case("nonfinite", "mul1_5 512x256; f16 512x20", 4, 4, data="nonfinite"),
        _case("nonfinite_scales", "mul1_5 512x256", 4, 4, data="nonfinite_scales"),
        _case("integers", "f16 2048x16; f16 512x6/2", 4, 4, data="integers"),
    ),
)

KERNELS: Final = (LINEAR_INPUT, LINEAR_GEMV_N8, LINEAR_GEMV_N16, LINEAR_FINISH)
