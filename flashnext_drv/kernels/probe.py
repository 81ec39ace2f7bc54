"""Declarations of the probe family: kernels that check the language itself, not the model.

Kernel sources: cuda_src/probe.  Run by tests/contracts and tests/drv, cases in check/cases_probe.py.
What must stay true: every function of prelude, math, warp and mma is reached by one of them; the ones that
break rules on purpose (barrier_turns_broken, fault) declare no cases, so no check ever launches them on a
GPU.
"""

from __future__ import annotations

from typing import Final

from . import planted_probe as planted
from .limits import limits_of
from .spec import PTR, U32, Arg, Case, KernelSpec

__all__ = [
    "BARRIER_TURNS",
    "BARRIER_TURNS_BROKEN",
    "FAULT",
    "KERNELS",
    "MATH_F64",
    "MATH_FUNCTIONS",
    "MATH_SWEEP",
    "MMA_TILES_BF16",
    "MMA_TILES_F16",
    "SHARED_WIDE",
    "WARP_OPS",
]

MATH_FUNCTIONS: Final = (
    "exp2",
    "exp",
    "log",
    "log1p01",
    "sigmoid",
    "silu",
    "softplus",
    "rsqrt",
    "rcp",
    "div3",
    "sqrt",
    "fma",
    "max",
    "h2f",
    "b2f",
    "u32_to_f32",
    "f2h_f2b",
)
_N_POINTS: Final = 20000
# inputs from 1e-30 (rsqrt: the least normal number) to where the function leaves the range of normal floats
_LOW: Final = 0x0DA24260
_ENDS: Final = {
    "exp2": (0x43150000, 0x43000000),
    "exp": (0x42CE0000, 0x42B16666),
    "log": (0, 0x7F7FFFFF),
    "log1p01": (0, 0x3F800000),
    "sigmoid": (0x42AE0000, 0x42A00000),
    "silu": (0x42AE0000, 0x42A00000),
    "softplus": (0x42AE0000, 0x42A00000),
    "rsqrt": (0, 0x7F7FFFFF),
    "rcp": (0x7F000000, 0x7F000000),
    "div3": (0x7F7FFFFF, 0x7F7FFFFF),
    "sqrt": (0, 0x7F7FFFFF),
    "fma": (0x5F000000, 0x5F000000),
}


_NO_ROWS: Final = {"order": "no order of sums is shared", "mates": "independent elements: it has no rows"}


def _sweeps() -> tuple[Case, ...]:
    out = []
    for name, ends in _ENDS.items():
        low = 0x00800000 if name == "rsqrt" else _LOW
        for sign, end in zip((0x80000000, 0), ends, strict=True):
            if end:
                step = max((end - low) // _N_POINTS, 1)
                out.append(
                    Case(
                        f"{name}{'_minus' if sign else ''}",
                        {"function": name, "start": low | sign, "step": step, "n": (end - low) // step},
                    )
                )
    for name, step in (("max", 214743), ("f2h_f2b", 71579), ("u32_to_f32", 214739)):
        out.append(
            Case(
                name,
                {"function": name, "start": 0, "step": step, "n": 20000 if step > 100000 else 60000},
                shows=("integers",) if name == "u32_to_f32" else (),
            )
        )
    out.append(Case("f2h_edges", {"function": "f2h_f2b", "start": 0x38000000, "step": 4093, "n": 40000}))
    for name in ("h2f", "b2f"):
        out.append(Case(name, {"function": name, "start": 0, "step": 1, "n": 65536}))
    for name in MATH_FUNCTIONS[:11]:  # zeros, subnormals, infinities, NaNs and their neighbours
        dims: dict[str, int | float | str] = {"function": name, "start": 0, "step": 0x007FFFFF, "n": 512}
        out.append(Case(f"{name}_edges", dims, shows=("nonfinite",)))
    for name, start, step in (("f2h_midpoints", 0x38801000, 0x2000), ("f2b_midpoints", 0x30808000, 0x10000)):
        dims = {"function": "f2h_f2b", "start": start, "step": step, "n": 20000}
        out.append(Case(name, dims, shows=("midpoints",)))
    return tuple(out)


MATH_SWEEP: Final = KernelSpec(
    name="math_sweep",
    source="probe/math_sweep.cu",
    order="",
    args=(
        Arg("y", PTR, "(n,) u32", "w"),
        Arg("which", U32, "index in MATH_FUNCTIONS"),
        Arg("start", U32, "bits of x_0"),
        Arg("step", U32, "bits from one x to the next"),
        Arg("n", U32, "points"),
    ),
    grid="any",
    block=128, limits=limits_of("math_sweep"),
    reference="check.cases_probe",
    exempt=_NO_ROWS,
    controls=planted.MATH_SWEEP,
    bound="ulps in cases_probe.ULPS: maxima over 2 million points a range, up to the next quarter",
    cases=_sweeps(),
)

MATH_F64: Final = KernelSpec(
    name="math_f64",
    source="probe/math_f64.cu",
    order="",
    args=(Arg("x", PTR, "(n,) f64", "r"), Arg("y", PTR, "(n, 3) f64", "w"), Arg("n", U32, "points")),
    grid="any",
    block=128, limits=limits_of("math_f64"),
    reference="check.cases_probe",
    exempt={
        **_NO_ROWS,
        "integers": "sines and exponentials of integers have no exact answer",
        "midpoints": "outputs are f64: nothing is rounded to f16",
    },
    controls=planted.MATH_F64,
    bound="sine, cosine 1e-15 absolute below 3e5; e^x 5e-16 relative",
    cases=(
        Case("angles", {"kind": "angles", "n": 4096}),
        Case("quadrants", {"kind": "quadrants", "n": 4096}),
        Case("exponents", {"kind": "exponents", "n": 4096}),
        Case("edges", {"kind": "edges", "n": 64}, shows=("nonfinite",)),
    ),
)

_MMA_FAMILIES: Final = (
    "normal",
    "wide",
    "cancel",
    "pair",
    "dominated",
    "one_product",
    "cut",
    "patterns",
    "tiny",
    "huge",
    "zeros",
    "infinities",
    "nans",
)


_MMA_SHOWS: Final[dict[str, tuple[str, ...]]] = {
    "patterns": ("integers",),  # against an integer model
    "infinities": ("nonfinite",),
    "nans": ("nonfinite",),
}


def _mma(bf16: int) -> KernelSpec:
    name = "mma_tiles_bf16" if bf16 else "mma_tiles_f16"
    return KernelSpec(
        name=name,
        source="probe/mma_tiles.cu",
        order="",
        args=(
            Arg("a", PTR, "(n, 16, 16) u16", "r"),
            Arg("b", PTR, "(n, 8, 16) u16", "r"),
            Arg("c", PTR, "(n, 16, 8) f32", "r"),
            Arg("d", PTR, "(n, 16, 8) f32", "w"),
            Arg("n", U32, "tiles"),
        ),
        grid="ceil(n / 4)",
        block=128, limits=limits_of(name),
        defines=(("FN_PROBE_BF16", str(bf16)),),
        reference="check.mma_model",
        exempt={**_NO_ROWS, "midpoints": "sums are cut toward zero: nothing is rounded to nearest"},
        controls=planted.MMA_TILES_BF16 if bf16 else planted.MMA_TILES_F16,
        bound="bit for bit the integer model of the device's generation",
        cases=tuple(Case(f, {"family": f, "n": 24}, shows=_MMA_SHOWS.get(f, ())) for f in _MMA_FAMILIES),
    )


MMA_TILES_F16: Final = _mma(0)
MMA_TILES_BF16: Final = _mma(1)

WARP_OPS: Final = KernelSpec(
    name="warp_ops",
    source="probe/warp_ops.cu",
    order="",
    args=(
        Arg("x", PTR, "(128,) f32", "r"),
        Arg("k", PTR, "(128,) u64", "r"),
        Arg("f", PTR, "(11, 128) f32", "w"),
        Arg("u", PTR, "(16, 128) u64", "w"),
        Arg("counts", PTR, "(4,) u64", "rw"),
    ),
    grid="1",
    block=128, limits=limits_of("warp_ops"),
    shared_bytes=2048,
    reference="check.cases_probe",
    exempt={**_NO_ROWS, "midpoints": "nothing is rounded to f16"},
    controls=planted.WARP_OPS,
    bound="bit for bit",
    cases=(
        Case("plain", {"special": 0}, shows=("integers",)),
        Case("nonfinite", {"special": 1}, shows=("nonfinite",)),
    ),
)


def _turns(broken: int) -> KernelSpec:
    return KernelSpec(
        name="barrier_turns_broken" if broken else "barrier_turns",
        source="probe/barrier_turns.cu",
        order="",
        args=(
            Arg("x", PTR, "(blocks, 256) u32", "r"),
            Arg("y", PTR, "(blocks, 256) u32", "w"),
            Arg("turns", U32, "rounds"),
        ),
        grid="blocks",
        block=256, limits=limits_of("barrier_turns_broken" if broken else "barrier_turns"),
        shared_bytes=1024,
        defines=(("FN_PROBE_BROKEN", str(broken)),),
        reference="check.cases_probe",
        exempt={
            **_NO_ROWS,
            "midpoints": "nothing is rounded",
            "nonfinite": "its inputs are integers",
        },
        controls=() if broken else planted.BARRIER_TURNS,
        broken="leaves out a barrier on purpose: never launched on a GPU" if broken else "",
        bound="exact",
        cases=()
        if broken
        else (
            Case("one_block", {"blocks": 1, "turns": 9}, shows=("integers",)),
            Case("seven_blocks", {"blocks": 7, "turns": 3}, shows=("integers",)),
        ),
    )


BARRIER_TURNS: Final = _turns(0)
BARRIER_TURNS_BROKEN: Final = _turns(1)

SHARED_WIDE: Final = KernelSpec(
    name="shared_wide",
    source="probe/shared_wide.cu",
    order="",
    args=(Arg("x", PTR, "(blocks, 1024) u32", "r"), Arg("y", PTR, "(blocks, 1024) u32", "w")),
    grid="blocks",
    block=128, limits=limits_of("shared_wide"),
    shared_bytes=81920, hopper_shared_bytes=204800,
    reference="check.cases_probe",
    exempt={**_NO_ROWS, "midpoints": "nothing is rounded", "nonfinite": "its inputs are integers"},
    controls=planted.SHARED_WIDE,
    bound="exact",
    cases=(
        Case("one_block", {"blocks": 1}, shows=("integers",)),
        Case("five_blocks", {"blocks": 5}, shows=("integers",)),
    ),
)

FAULT: Final = KernelSpec(
    name="fault",
    source="probe/fault.cu",
    order="",
    args=(
        Arg("x", PTR, "(128,) u32", "r"),
        Arg("y", PTR, "(128,) u32", "w"),
        Arg("mode", U32, "which rule to break; 0 none"),
        Arg("index", U32, "element, for modes 5 and 9"),
    ),
    grid="any",
    block=128, limits=limits_of("fault"),
    programmatic=True,
    shared_bytes=32,
    broken="breaks the rule that `mode` names on purpose: launched by tests of the driver layer alone",
)

KERNELS: Final = (
    MATH_SWEEP,
    MATH_F64,
    MMA_TILES_F16,
    MMA_TILES_BF16,
    WARP_OPS,
    BARRIER_TURNS,
    BARRIER_TURNS_BROKEN,
    SHARED_WIDE,
    FAULT,
)
