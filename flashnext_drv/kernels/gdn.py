"""Declarations of the gdn family: convolution, recurrence and output gate of the DeltaNet layers.

Kernel sources: cuda_src/gdn.  A round's rows come as runs (rows of one sequence in order); state is read and
written where the sequence's slot says.  What must stay true: a run of n rows gives the bytes of n runs of one
row.
"""

from __future__ import annotations

from typing import Final

from . import planted_gdn as planted
from .limits import limits_of
from .spec import F32, PTR, U32, U64, Arg, Case, KernelSpec

__all__ = ["GDN_CONV", "GDN_DEEP_INPUT", "GDN_GATE_INPUT", "GDN_SCAN", "GDN_STEP", "KERNELS",
           "gate_grid"]

_ROUND: Final = Arg("round", PTR, "FnRound", "r")
_RUNS: Final = Arg("runs", PTR, "FnRun[rows_cap]", "r")
_SLOTS: Final = Arg("slots", PTR, "FnSlot[], by a run's slot", "r")


def gate_grid(rows: int, n_v: int) -> tuple[int, int]:
    """Blocks of gdn_gate_input, which stride over the rows: at 48 heads eight on each of 132 SMs."""
    return -(-n_v // 4), min(rows, 88)


def _case(name: str, **dims: int | float | str) -> Case:
    return Case(name, {"runs": "1", "rows_cap": 16, **dims})


def _conv(name: str, linears: str, **dims: int | str) -> Case:
    """linears: as the cases of kernels/exl3.py have them; the first one is convolved."""
    return _case(name, linears=linears, **dims)


# q, k, v, then z, a, b of the published layer.
_REAL: Final = "mul1_3 2560x10240:2; mul1_3 2560x6144:2; f16 2560x48:8; f16 2560x48:8"

GDN_CONV: Final = KernelSpec(
    name="gdn_conv",
    source="gdn/gdn_conv.cu",
    order="gdn_conv_v1, part_sum_v1, hadamard",
    args=(
        _ROUND,
        _RUNS,
        _SLOTS,
        Arg("linears", PTR, "FnLinear[]: the first is convolved, the others' out written", "r"),
        Arg("w", PTR, "(channels, 4) f32, oldest tap first", "r"),
        Arg("tail_offset", U64, "bytes from slot.recurrent to the tail, f16 (3, channels), oldest first"),
        Arg("out", PTR, "(rows_cap, channels) f32", "w"),
        Arg("channels", U32, "outputs of linear 0: 2 n_k 128 + n_v 128"),
    ),
    grid="ceil(n_max / 512), n_linears, rows_cap as runs of linear 0, as rows of others",
    block=128,
    blocks_per_sm=4,
    programmatic=True,
    constants=("linears", "w"),
    settled=("round", "runs", "slots", "tail_offset"),
    limits=limits_of("gdn_conv"),
    reference="gdn.causal_conv",
    rows={"part*": 1, "out*": 0},
    exempt={"order": "gdn_deep_input and gdn_scan are compared with gdn_conv and gdn_step",
            "integers": "passes through silu: integers have no exact answer"},
    controls=planted.GDN_CONV,
    bound=(
        "Linears other than the first: bytes, and FP64 as linear_finish. The first, from its outputs rounded "
        "to f16 (bytes of the order, FP64 as linear_finish and half an f16 ulp: the tail shows them): four "
        "roundings of 2^-24 times sum |w f|, slope 1.1 of silu, 3 ulp of silu."
    ),
    cases=(
        _conv("one_row", "f16 16x640"),
        _conv("decode_seven", "f16 16x640", runs="1,1,1,1,1,1,1"),
        _conv("window", "f16 16x640", runs="5"),
        _conv("mixed_runs", "f16 16x1280; f16 16x640; bf16 16x5", runs="3,1,2,7,3"),
        _conv("sixteen", "f16 16x200; f16 16x640; f16 16x4", runs="16"),
        _conv("odd_width", "f16 512x203; bf16 16x130", runs="5,1", rows_cap=7),
        _conv("real_width", _REAL, runs="1,2", rows_cap=4),
        _conv("real_sixteen", _REAL, runs="7,1,8"),
        _conv("units", "mul1_3 1024x384:7; mcg_4 512x128:8+bias; f16 8192x129; f16 512x8:9", runs="3,1",
              rows_cap=5),
        _conv("many_units", "mul1_2.5 8192x256+bias; f16 8192x12", runs="4,2", rows_cap=6),
        _conv("nonfinite", "f16 16x640; f16 16x4", runs="5,1", special="nonfinite"),
        _conv("nonfinite_rotated", "mul1_3 512x256; f16 16x4", runs="5,1", special="nonfinite"),
        _conv("midpoints", "f16 16x640", runs="5,1", special="midpoints"),
    ),
)

GDN_STEP: Final = KernelSpec(
    name="gdn_step",
    source="gdn/gdn_step.cu",
    order="gdn_step_v1",
    args=(
        _ROUND,
        _RUNS,
        _SLOTS,
        Arg("qkv", PTR, "(rows_cap, 2 n_k 128 + n_v 128) f32: q, k, v heads", "r"),
        Arg("a", PTR, "(rows_cap, n_v) f32", "r"),
        Arg("b", PTR, "(rows_cap, n_v) f32", "r"),
        Arg("a_log", PTR, "(n_v) f32", "r"),
        Arg("dt_bias", PTR, "(n_v) f32", "r"),
        Arg(
            "state_offset",
            U64,
            "bytes from slot.recurrent to the state, f32 (n_v, 128 columns, 128 key rows)",
        ),
        Arg("o", PTR, "(rows_cap, n_v 128) f32", "w"),
        Arg("n_k", U32, "key heads"),
        Arg("n_v", U32, "value heads, multiple of n_k"),
    ),
    grid="4 n_v, rows_cap as runs",
    block=128,
    blocks_per_sm=4,
    programmatic=True,
    constants=("a_log", "dt_bias"),
    settled=("round", "runs", "slots", "state_offset"),
    limits=limits_of("gdn_step"),
    reference="gdn.delta_rule",
    rows={"qkv": 0, "a": 0, "b": 0, "o": 0},
    exempt={"order": "gdn_deep_input and gdn_scan are compared with gdn_conv and gdn_step",
            "integers": "passes through roots and exponentials: integers have no exact answer",
            "midpoints": "outputs are f32: nothing is rounded to f16"},
    controls=planted.GDN_STEP,
    bound=(
        "One step from the state as stored: sums of 128 products err by (32 + 2) 2^-24 sum |terms|; the "
        "scales, beta and decay by a few ulp each; carried through the run's rows by the FP64 reference's "
        "own magnitudes."
    ),
    cases=(
        _case("one_row", n_k=1, n_v=3),
        _case("decode_three", n_k=1, n_v=3, runs="1,1,1"),
        _case("window", n_k=1, n_v=3, runs="5"),
        _case("mixed_runs", n_k=2, n_v=6, runs="3,1,2"),
        _case("sixteen", n_k=1, n_v=1, runs="16"),
        _case("real_heads", n_k=16, n_v=48, runs="1,2"),
        _case("zero_state", n_k=1, n_v=3, runs="2", special="zero"),
        _case("nonfinite", n_k=1, n_v=3, runs="3,1", special="nonfinite"),
        _case("nonfinite_state", n_k=1, n_v=3, runs="2,1", special="nonfinite_state"),
    ),
)

GDN_GATE_INPUT: Final = KernelSpec(
    name="gdn_gate_input",
    source="gdn/gdn_gate_input.cu",
    order="gdn_gate_v1",
    args=(
        _ROUND,
        Arg("o", PTR, "(rows_cap, n_v 128) f32", "r"),
        Arg("z", PTR, "(rows_cap, n_v 128) f32", "r"),
        Arg("norm_w", PTR, "(128) f32, plain weight", "r"),
        Arg("linear", PTR, "FnLinear: out_proj (k = n_v 128); its x is written", "r"),
        Arg("gate", U32, "0 sigmoid, 1 silu"),
        Arg("n_v", U32, "value heads"),
        Arg("eps", F32, "1e-7..1e-4"),
    ),
    grid="ceil(n_v / 4), 1 .. rows_cap",
    block=128,
    programmatic=True,
    constants=("norm_w", "linear"),
    settled=("round",),
    limits=limits_of("gdn_gate_input"),
    reference="gdn.DeltaNet",
    rows={"o": 0, "z": 0, "x": 0},
    exempt={"order": "the only kernel of its order; its rotation is held to FP64",
            "integers": "passes through a root and a sigmoid: integers have no exact answer",
            "midpoints": "what is rounded has passed through a root: no input gives an exact tie"},
    controls=planted.GDN_GATE_INPUT,
    bound=(
        "From o and z: the sum of 128 squares 9 roundings, rsqrt 3, three products, sigmoid or silu 3 ulp: "
        "20 2^-24 relative; EXL3: 8 roundings of the rotation on the block's magnitudes; then half an f16 "
        "ulp."
    ),
    cases=(
        _case("one_row", n_v=3, rows=1, gate=0, dtype="exl3"),
        _case("plain_f16", n_v=3, rows=2, gate=0, dtype="f16"),
        _case("silu", n_v=6, rows=3, gate=1, dtype="exl3"),
        _case("seven", n_v=1, rows=7, gate=0, dtype="exl3"),
        _case("all_rows", n_v=3, rows=16, gate=1, dtype="f16"),
        _case("real_heads", n_v=48, rows=2, gate=0, dtype="exl3"),
        _case("nonfinite", n_v=3, rows=3, gate=0, dtype="exl3", special="nonfinite"),
        _case("tiled", n_v=3, rows=11, gate=0, dtype="exl3", tiled=1),
        _case("tiled_two_images", n_v=2, rows_cap=80, gate=1, dtype="f16", tiled=1,
              order=",".join(str(5 * i % 16) for i in range(70))),
        _case("by_turns", n_v=5, rows=11, gate=0, dtype="exl3", tiled=1, at_once=3),
    ),
)

GDN_DEEP_INPUT: Final = KernelSpec(
    name="gdn_deep_input",
    source="gdn/gdn_deep_input.cu",
    order="gdn_conv_v1",
    args=(
        _ROUND,
        Arg("rows", PTR, "FnRow[rows_cap]", "r"),
        _RUNS,
        _SLOTS,
        Arg("x", PTR, "(rows_cap, C) f32, C = (2 n_k + n_v) 128: q, k, v heads", "r"),
        Arg("a", PTR, "(rows_cap, n_v) f32", "r"),
        Arg("b", PTR, "(rows_cap, n_v) f32", "r"),
        Arg("w", PTR, "(C, 4) f32, oldest tap first", "r"),
        Arg("a_log", PTR, "(n_v) f32", "r"),
        Arg("dt_bias", PTR, "(n_v) f32", "r"),
        Arg("tail_offset", U64, "bytes from slot.recurrent to the tail, f16 (3, C), oldest first"),
        Arg("qkv", PTR, "(rows_cap, C) f32: unit q times 128^-1/2, unit k, v", "w"),
        Arg("gates", PTR, "(rows_cap, n_v, 2) f32: decay, beta", "w"),
        Arg("n_k", U32, "key heads"),
        Arg("n_v", U32, "value heads, multiple of n_k"),
    ),
    grid="2 n_k + n_v + 1, ceil(rows_cap / 32)",
    block=128,
    shared_bytes=32 * 144 * 4,
    blocks_per_sm=4,
    limits=limits_of("gdn_deep_input"),
    reference="gdn.causal_conv",
    replaces="gdn_step",  # with gdn_scan behind it
    rows={"rows": 0, "x": 0, "a": 0, "b": 0, "qkv": 0, "gates": 0, "out": 0, "o": 0},
    exempt={"integers": "passes through silu: integers have no exact answer"},
    controls=planted.GDN_DEEP_INPUT,
    bound=(
        "Before the norm as gdn_conv. A unit vector: of what stands before it, its own error and that of the "
        "root of the sum of squares; 22 roundings of 2^-24 (q: 23). beta 3 ulp; decay: 8 roundings of its "
        "exponent and 4."
    ),
    cases=(
        _case("one_row", n_k=1, n_v=2),
        _case("window", n_k=1, n_v=2, runs="5"),
        _case("mixed_runs", n_k=2, n_v=4, runs="3,1,2,7,3"),
        _case("blocks", n_k=1, n_v=1, runs="30,1,16", rows_cap=96),
        _case("edges", n_k=1, n_v=1, runs="32,2,31", rows_cap=96),
        _case("long", n_k=1, n_v=1, runs="70", rows_cap=72),
        _case("real_heads", n_k=16, n_v=48, runs="1,2"),
        _case("zero", n_k=1, n_v=1, runs="2", special="zero"),
        _case("nonfinite", n_k=1, n_v=2, runs="5,1", special="nonfinite"),
        _case("midpoints", n_k=1, n_v=1, runs="5,1", special="midpoints"),
    ),
)

GDN_SCAN: Final = KernelSpec(
    name="gdn_scan",
    source="gdn/gdn_scan.cu",
    order="gdn_step_v1",
    args=(
        _ROUND,
        _RUNS,
        _SLOTS,
        Arg("x", PTR, "(rows_cap, C) f32, C = (2 n_k + n_v) 128: inputs of the convolution", "r"),
        Arg("qkv", PTR, "(rows_cap, C) f32: unit q times 128^-1/2, unit k, v", "r"),
        Arg("gates", PTR, "(rows_cap, n_v, 2) f32: decay, beta", "r"),
        Arg(
            "state_offset",
            U64,
            "bytes from slot.recurrent to the state, f32 (n_v, 128 columns, 128 key rows)",
        ),
        Arg("tail_offset", U64, "bytes from slot.recurrent to the tail, f16 (3, C), oldest first"),
        Arg("o", PTR, "(rows_cap, n_v 128) f32", "w"),
        Arg("n_k", U32, "key heads"),
        Arg("n_v", U32, "value heads, multiple of n_k"),
    ),
    grid="n_k ceil(8 n_v / (3 n_k)), rows_cap as runs",
    block=128,
    shared_bytes=32 * 1248,
    blocks_per_sm=2,
    limits=limits_of("gdn_scan"),
    reference="gdn.delta_rule",
    rows={"x": 0, "qkv": 0, "gates": 0, "o": 0},
    exempt={"order": "its bytes stand in gdn_deep_input's pair: both against gdn_conv and gdn_step",
            "integers": "sums of 128 products after products: integers have no exact answer",
            "midpoints": "the tail alone is rounded to f16; gdn_conv's midpoints show that rounding"},
    controls=planted.GDN_SCAN,
    bound=(
        "One step from the state as stored: sums of 128 products err by (32 + 2) 2^-24 sum |terms|; carried "
        "through the run's rows by the FP64 reference's own magnitudes. The tail is exact."
    ),
    cases=(
        _case("one_row", n_k=1, n_v=3),
        _case("decode_three", n_k=1, n_v=3, runs="1,1,1"),
        _case("two_rows", n_k=1, n_v=1, runs="2"),
        _case("mixed_runs", n_k=2, n_v=6, runs="3,1,2"),
        _case("two_heads", n_k=1, n_v=2, runs="9,8", rows_cap=24),
        _case("ring", n_k=1, n_v=1, runs="40,7,24", rows_cap=72),
        _case("real_heads", n_k=16, n_v=48, runs="1,2"),
        _case("zero_state", n_k=1, n_v=3, runs="2", special="zero"),
        _case("nonfinite", n_k=1, n_v=3, runs="3,1", special="nonfinite"),
        _case("nonfinite_state", n_k=1, n_v=3, runs="2,1", special="nonfinite_state"),
    ),
)

KERNELS: Final = (GDN_CONV, GDN_STEP, GDN_GATE_INPUT, GDN_DEEP_INPUT, GDN_SCAN)
