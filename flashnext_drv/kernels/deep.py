"""Declarations of the deep family: operands and dense products of a prompt chunk, many rows a block.

Kernel sources: cuda_src/deep on cuda_src/deep.cuh.  Operands are tile images (FnLinear.tiled); the experts'
products are the moe_deep family's.  What must stay true: a row's bytes are those of linear_input, linear_gemv
and linear_finish, of site_up, whatever rows stand beside it.
"""

from __future__ import annotations

from typing import Final

from . import planted_deep as planted
from . import planted_deep_input as planted_input
from .exl3 import PAIRS
from .limits import limits_of
from .spec import PTR, U32, Arg, Case, KernelSpec

__all__ = ["DEEP_BLOCK", "DEEP_HOPPER_SHARED", "DEEP_INPUT", "DEEP_INPUT_BLOCK", "DEEP_INPUT_SHARED",
           "DEEP_LINEAR", "DEEP_SHARED", "DEEP_SITE_UP", "KERNELS", "deep_input_grid", "deep_tiles"]

DEEP_BLOCK: Final = 384
WIDE_BITS: Final = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6)  # widths whose products may be wide on sm_90a
# FnDeepShared: on sm_90a twelve slots, four stages of words and seventeen barriers; else the finished tile of
# 128 rows and a stage of rows
DEEP_SHARED: Final = 4 * 16384 + 16384 + 512
DEEP_HOPPER_SHARED: Final = 12 * 16384 + 4 * 6144 + 512 + 17 * 8
# FnHalfRows of each of four warps: 16 rows of 132 f32, 128 scales, 16 rows of 72 f16
DEEP_INPUT_BLOCK: Final = 128
DEEP_INPUT_SHARED: Final = 4 * (16 * 132 * 4 + 128 * 4 + 16 * 72 * 2)
DEEP_INPUT_ROWS: Final = 64


def deep_tiles(n: int) -> int:
    """Tiles of 128 outputs of a linear with n outputs."""
    return (n + 127) // 128


def deep_input_grid(rows: int, k_max: int) -> tuple[int, int]:
    """Blocks of deep_input for `rows` rows and the longest operand."""
    return -(-rows // DEEP_INPUT_ROWS), -(-k_max // 256)


def _case(name: str, linears: str, rows: int, rows_cap: int, **dims: int | str) -> Case:
    """linears: as in kernels/exl3.py."""
    shows = ("integers",) if dims.get("data") == "onehot" else ()
    return Case(name, {"linears": linears, "rows": rows, "rows_cap": rows_cap, **dims}, shows)


def _linear_cases() -> tuple[Case, ...]:
    rows = (1, 2, 3, 7, 8, 9, 17)
    cases = [
        _case(f"{codebook}_{bits:g}", f"{codebook}_{bits:g} 128x128", rows[i % 7], 64)
        for i, (codebook, bits) in enumerate(PAIRS)
    ]
    cases += [
        _case(
            "onehot", "mul1_3 128x128; mul1_1.5 128x128; mcg_4 128x128; 3inst_7 128x128", 9, 64, data="onehot"
        ),
        _case("f16", "f16 80x1; f16 48x129; f16 128x48", 3, 64),
        _case("bf16", "bf16 48x4; bf16 144x20", 10, 64),
        _case("one_step", "f16 16x33; bf16 16x16", 2, 64),
        _case("segments", "mul1_3 512x128; f16 1024x4; bf16 512x5", 2, 64),
        _case("leaves2", "mul1_5 256x128/2; f16 512x48/2", 3, 64),
        _case("leaves4", "mul1_5 512x128/4", 2, 64),
        _case("leaves8", "mul1_5 1024x128/8", 1, 64),
        _case("leaves8_segments2", "mul1_4 4096x128/8", 1, 64),
        _case("odd_steps", "mul1_5 384x128; mcg_8 896x128", 5, 64),
        _case("mixed", "mul1_5 256x256; mul1_2.5 256x128; f16 256x48; bf16 256x5; mcg_4 256x128", 3, 64),
        _case("bias", "mul1_2.5 128x256+bias", 7, 64),
        _case("rows64", "mul1_3 128x128; f16 64x4", 64, 64),
        _case("rows65", "mul1_3 128x128; f16 64x4", 65, 128),
        _case("rows130", "mul1_3 128x128; bf16 64x4", 130, 192),
        # sm_90a takes these rows together and what is behind them alone; every width that it does so for
        _case("wide", "; ".join(f"mul1_{bits:g} 512x128" for bits in WIDE_BITS), 257, 320),
        _case("wide_whole", "mul1_5 1280x128+bias; f16 64x20; mul1_3 256x256", 256, 256),
        _case("wide_leaves", "mul1_5 512x128/2; mul1_8 128x128; mcg_4 128x128; mul1_3 384x128", 150, 192),
        _case("wide_leaves8", "mul1_5 1024x128/8+bias; mul1_3 512x128/4; mul1_2 512x128/8; mul1_4 768x128/4",
              257, 320),
        _case("wide_leaves_split", "mul1_5 4096x128/8; mul1_3 768x128/8", 130, 192),
        _case("nonfinite", "mul1_3 256x128; f16 128x20; bf16 128x20", 3, 64, data="nonfinite"),
        _case("nonfinite_scales", "mul1_5 128x128", 4, 64, data="nonfinite_scales"),
        _case("integers", "f16 1024x20; bf16 512x20", 5, 64, data="integers"),
        _case("no_rows", "mul1_3 128x128", 0, 64),
    ]
    return tuple(cases)


def _input_cases() -> tuple[Case, ...]:
    mixed = "mul1_5 512x128; f16 512x4; mcg_4 256x128; bf16 128x1"
    cases = [_case(f"rows{rows}", mixed, rows, -(-rows // 64) * 64) for rows in (1, 15, 17, 63, 64, 65, 129)]
    cases += [
        _case("exl3", "mul1_3 128x128", 3, 64),
        _case("odd_blocks", "mul1_3 384x128; 3inst_3 640x128", 20, 64),
        _case("published", "mul1_3 2560x128; mul1_4 2560x128; f16 2560x4", 18, 64),
        _case("plain", "f16 48x3; bf16 16x1; f16 528x8", 21, 64),
        _case("short_image", "mul1_3 256x128; f16 48x4", 67, 128),
        _case("nonfinite", "mul1_5 256x128; f16 256x4", 4, 64, data="nonfinite"),
        _case("nonfinite_scales", "mul1_5 256x128", 4, 64, data="nonfinite_scales"),
        _case("midpoints", "f16 256x4; bf16 256x4", 3, 64, data="midpoints"),
        _case("no_rows", "mul1_3 128x128; f16 128x4", 0, 64),
    ]
    return tuple(cases)


_ROUND: Final = Arg("round", PTR, "FnRound", "r")

DEEP_LINEAR: Final = KernelSpec(
    name="deep_linear",
    source="deep/deep_linear.cu",
    order="exl3_dot_v1, plain_dot_v1, part_sum_v1, hadamard",
    args=(
        _ROUND,
        Arg("linears", PTR, "FnLinear[], tiled, first_warp and n_warps in tiles of 128 outputs", "r"),
        Arg("n_linears", U32, "1.., first_warp rising from 0"),
    ),
    grid="total tiles * ceil(rows_cap / 128)",
    block=DEEP_BLOCK,
    shared_bytes=DEEP_SHARED,
    hopper_shared_bytes=DEEP_HOPPER_SHARED,
    strides=True,
    limits=limits_of("deep_linear"),
    reference="exl3.Linear.__call__",
    replaces="linear_finish",
    rows={"x*": 0, "out*": 0},
    exempt={"midpoints": "outputs are f32: nothing is rounded to f16"},
    controls=planted.DEEP_LINEAR,
    bound="Bytes: ref.orders.mma_chain a unit, segments in rising order, ref.orders.tree, hadamard128, times "
    "svh, plus bias.  FP64: as linear_gemv a unit, then units + 9 roundings of 2^-24 of the block's sum of "
    "magnitudes.",
    cases=_linear_cases(),
)


def _site_case(name: str, rows: int, rows_cap: int, hidden: int, rank: int, dtype: str, **dims: str) -> Case:
    return Case(
        name,
        {"rows": rows, "rows_cap": rows_cap, "hidden": hidden, "rank": rank, "dtype": dtype, **dims},
    )


DEEP_SITE_UP: Final = KernelSpec(
    name="deep_site_up",
    source="deep/deep_site_up.cu",
    order="site_mix_v1",
    args=(
        _ROUND,
        Arg("linear", PTR, "FnLinear: up (k = R, n = 4 hidden), tiled, x = u of site_mid", "r"),
        Arg("streams", PTR, "(rows_cap, 4 hidden) f32", "r"),
        Arg("rinv", PTR, "(rows_cap, 4) f32", "r"),
        Arg("w", PTR, "(4 hidden) f32, norm weight", "r"),
        Arg("m", PTR, "(rows_cap, hidden) f32", "w"),
        Arg("hidden", U32, "multiple of 32"),
    ),
    grid="hidden / 32 * ceil(rows_cap / 128)",
    block=DEEP_BLOCK,
    shared_bytes=DEEP_SHARED,
    hopper_shared_bytes=DEEP_HOPPER_SHARED,
    strides=True,
    limits=limits_of("deep_site_up"),
    reference="glue.Site",
    replaces="site_up_n16",
    rows={"u": 0, "streams": 0, "rinv": 0, "m": 0},
    exempt={
        "integers": "passes through a sigmoid: integers have no exact answer",
        "midpoints": "outputs are f32: nothing is rounded to f16",
    },
    controls=planted.DEEP_SITE_UP,
    bound="From u and the weights as given: as site_up.",
    cases=(
        _site_case("rows1", 1, 64, 128, 16, "f16"),
        _site_case("rows3", 3, 64, 256, 64, "f16"),
        _site_case("rows16", 16, 64, 128, 48, "f16"),
        _site_case("rows70", 70, 128, 128, 32, "f16"),
        _site_case("rows200", 200, 256, 320, 320, "f16"),
        _site_case("bf16", 3, 64, 128, 80, "bf16"),
        _site_case("segments", 2, 64, 128, 512, "f16"),
        _site_case("nonfinite", 3, 64, 128, 32, "f16", special="nonfinite"),
        _site_case("nonfinite_published", 70, 128, 128, 320, "f16", special="nonfinite"),
    ),
)

DEEP_INPUT: Final = KernelSpec(
    name="deep_input",
    source="deep/deep_input.cu",
    order="hadamard",
    args=(
        _ROUND,
        Arg("linears", PTR, "FnLinear[n_linears], tiled; writes go to what it points to", "r"),
        Arg("n_linears", U32, "1..32"),
        Arg("x", PTR, "(rows_cap, x_stride) f32", "r"),
        Arg("x_stride", U32, "elements, multiple of 4"),
    ),
    grid="ceil(rows_cap / 64), ceil(k_max / 256)",
    block=DEEP_INPUT_BLOCK,
    shared_bytes=DEEP_INPUT_SHARED,
    blocks_per_sm=3,
    limits=limits_of("deep_input"),
    reference="exl3.Linear.operand",
    replaces="linear_input",
    rows={"x": 0, "x?": 0},
    exempt={"integers": "the rotation's scale 1/sqrt(128) is no power of two: integers have no exact answer"},
    controls=planted_input.DEEP_INPUT,
    bound="As linear_input.",
    cases=_input_cases(),
)

KERNELS: Final = (DEEP_LINEAR, DEEP_SITE_UP, DEEP_INPUT)
