"""Inexact forms of the prompt kernels, made by edits of their real text: what tools/yardstick.py measures.

None is shipped, none is checked for bytes: they give up what exactness costs.  `chain`: all of K in one chain
of products, whatever units the order names: no unit ends, no sums of units, no leaves that wait.  `atomic`:
that, and experts add their weighted outputs to a row by float atomics, in any order.  All of them and `fast`:
exp, quotients and rsqrt by the approximate instructions (on a GPU).
What must stay true: an edit's old text stands exactly once in its file; a form takes the arguments of the
kernel it stands for, or others of the same layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from flashnext_drv.kernels import deep, moe_deep
from flashnext_drv.kernels.catalog import specs
from flashnext_drv.kernels.spec import PTR, Arg, Control, Edit, KernelSpec

__all__ = ["EXPERTS", "Form", "Option", "forms", "options"]

_DEEP: Final = "deep.cuh"
_LINEAR: Final = "deep/deep_linear.cu"
_DOWN: Final = "moe/moe_deep_down.cu"
_SUM: Final = "moe/moe_deep_sum.cu"
# kernels that are exchanged together: where a sum is made hangs together
EXPERTS: Final = ("moe_deep_gu", "moe_deep_down", "moe_deep_sum")


@dataclass(frozen=True)
class Form:
    """One kernel from other text.  spec: its declaration but for the name."""

    spec: KernelSpec
    control: Control


@dataclass(frozen=True)
class Option:
    """Forms that are used together, by the name of the kernel each stands for.  zero_first: the form of
    moe_deep_sum comes before moe_deep_down."""

    name: str
    forms: Mapping[str, Form]
    zero_first: bool = False


def options() -> Mapping[str, tuple[Option, ...]]:
    """Options by what they are for: a kernel's name, or "experts" for EXPERTS."""
    return _OPTIONS


def forms() -> list[Form]:
    """Every form of the options, once."""
    found = [form for given in _OPTIONS.values() for option in given for form in option.forms.values()]
    return list({(form.spec.name, form.control.name): form for form in found}.values())


# ---- approximate functions: all forms

_FAST: Final = (
    Edit("prelude.cuh", "{ return __fdiv_rn(a, b); }", "{ return __fdividef(a, b); }"),
    *(Edit("math.cuh", f"FN_DEVICE float {name}(float x) {{\n",
           f"FN_DEVICE float {name}(float x) {{\n#ifndef FN_SIM\n    return __expf(x);\n#endif\n")
      for name in ("fn_exp", "fn_exp_down")),
    Edit("prelude.cuh", "    float q = fn_mul(a, r);\n",
         "    return fn_mul(a, r);\n    float q = fn_mul(a, r);\n"),
    Edit("prelude.cuh", "return fn_fma(r, fn_fma(-d, r, 1.f), r);", "return r;"),
    Edit("math.cuh", "FN_DEVICE float fn_rsqrt(float x) {",
         "FN_DEVICE float fn_rsqrt(float x) {\n#ifndef FN_SIM\n    float r;\n"
         '    asm("rsqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(x));\n    return r;\n#endif\n   '),
)


def _form(spec: KernelSpec, name: str, *edits: Edit) -> Form:
    return Form(spec, Control(name, "order", (*_FAST, *edits)))


# ---- one chain over K

_WALK: Final = "{walk.format, 1u, walk.segments, 1u, walk.steps * walk.units}"
_CHAIN: Final = (
    # sm_90a.  Segments stay what they are: fn_keep needs a number that the compiler does not know
    Edit(_DEEP, "if (KIND != FN_DEEP_EXL3 && walk.leaves > 1u)", "if (false)"),
    Edit(_DEEP, "dot_wide<false>(walk, d);", f"dot_wide<false>({_WALK}, d);"),
    Edit(_DEEP, "dot<ROW_TILES>(walk, sum);", f"dot<ROW_TILES>({_WALK}, sum);"),
    Edit(_DEEP, "w.leaves == 1u || (KIND != FN_DEEP_EXL3 && w.segments == 1u);", "true;"),
    Edit(_DEEP, "units &= w.k % (64u * w.leaves * w.segments) == 0;", "units &= w.k % 64u == 0;"),
    Edit(_DEEP, "31u, units = w.leaves * w.segments, steps = w.k / 16u / units;",
         "31u, units = 1u, steps = w.k / 16u;"),
    # elsewhere
    Edit(_DEEP, "u32 units = w.leaves * w.segments, steps = w.k / 16u / units, at = 0,",
         "u32 units = 1u, steps = w.k / 16u, at = 0,"),
    Edit(_DEEP, "units_sum.add(w.leaves, w.segments, d, sum);", "units_sum.add(1u, 1u, d, sum);"),
    # the sum of one unit is that unit
    Edit(_DEEP, "        fn_deep_set(sum, -0.f);\n    }\n    FN_DEVICE void add(",
         "    }\n    FN_DEVICE void add("),
    Edit(_DEEP, "sum[j][i] = fn_add(sum[j][i], d[j][i]);", "sum[j][i] = d[j][i];"),
)

# what has leaves takes 256 rows too
_LINEAR_CHAIN: Final = (
    *_CHAIN,
    Edit(_LINEAR, " && (linears[j].leaves == 1u || linears[j].segments == 1u)) of_tile", ") of_tile"),
)

# ---- sums of experts by atomics

_ATOMIC_ARGS: Final = tuple(
    Arg("y", PTR, "(rows_cap, hidden) f32, zeros", "rw") if arg.name == "v" else arg
    for arg in moe_deep.MOE_DEEP_DOWN.args
) + tuple(
    next(arg for arg in spec.args if arg.name == name)
    for spec, name in (
        (moe_deep.MOE_DEEP_SUM, "routes"),
        (moe_deep.MOE_DEEP_INPUT, "pair_of"),
        (moe_deep.MOE_DEEP_INPUT, "n_slots"),
    )
)
_ADD4: Final = """
// p[0..3] += v, in no order.
FN_DEVICE void add4(float* p, const float* v) {
#ifdef FN_HOPPER
    u64 at = __cvta_generic_to_global(p);
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v[0]),
                 "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
#else
    for (u32 i = 0; i < 4; i++) {
#ifdef FN_SIM
        u32 *at = reinterpret_cast<u32*>(p + i), old = __atomic_load_n(at, __ATOMIC_RELAXED);
        while (!__atomic_compare_exchange_n(at, &old, fn_f2u(fn_u2f(old) + v[i]), false, __ATOMIC_RELAXED,
                                            __ATOMIC_RELAXED)) {
        }
#else
        atomicAdd(p + i, v[i]);
#endif
    }
#endif
}
"""
_ATOMIC: Final = (
    Edit(_DOWN, "typedef FnDeep<FN_DEEP_EXL3> Deep;\n", f"typedef FnDeep<FN_DEEP_EXL3> Deep;\n{_ADD4}"),
    Edit(_DOWN, "    float* v;\n    u32 n_tiles,",
         "    float* y;\n    const FnRoute* routes;\n    const u32* pair_of;\n    u32 n_slots, n_tiles,"),
    Edit(_DOWN, "float* v, u32 hidden, u32 width_cap)) {",
         "float* y, u32 hidden, u32 width_cap, const FnRoute* routes, const u32* pair_of,\n"
         "           u32 n_slots)) {"),
    Edit(_DOWN, "lines, h, v, fn_ld(n_tiles),", "lines, h, y, routes, pair_of, n_slots, fn_ld(n_tiles),"),
    # A lane holds the pair and the weight of one of its warp's 16 rows.
    Edit(_DOWN, "deep.store_rotated(from, n, nullptr, v + (u64)first * hidden + output, hidden);\n",
         """u32 lane = fn_thread_here() & 31u, end = from + n;
        float scale[4];
        deep.scale(0, scale);
#pragma unroll 1
        for (; from < end; from += 128u) {
            u32 own = deep.own_row(from), stop = fn_min_u32(own + 16u, end);
            if (own >= end) continue;
            u32 pair = fn_ldg(pair_of + first + fn_min_u32(own + (lane & 15u), stop - 1u));
            float weight = fn_ldg(routes + pair).weight;
            deep.rotate(own);
#pragma unroll 4
            for (u32 row = own; row < stop; row++) {
                float4 q = deep.quad(row);
                float of_row = fn_shfl(weight, row - own), v[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                for (u32 i = 0; i < 4; i++) v[i] = fn_mul(fn_mul(v[i], scale[i]), of_row);
                add4(y + (u64)(fn_shfl(pair, row - own) / n_slots) * hidden + output + 4u * lane, v);
            }
        }
"""),
)
_ZERO: Final = _form(
    moe_deep.MOE_DEEP_SUM, "zero",
    Edit(_SUM, "    if (row >= sum.n_rows) return;\n",
         "    for (; works && row < sum.n_rows; row += gridDim.y)\n"
         "        *reinterpret_cast<float4*>(y + (u64)row * hidden + c) = make_float4(0.f, 0.f, 0.f, 0.f);\n"
         "    return;\n"),
)
_GU_CHAIN: Final = _form(moe_deep.MOE_DEEP_GU, "chain", *_CHAIN)
_DOWN_CHAIN: Final = _form(moe_deep.MOE_DEEP_DOWN, "chain", *_CHAIN)
_DOWN_ATOMIC: Final = _form(
    replace(moe_deep.MOE_DEEP_DOWN, args=_ATOMIC_ARGS), "atomic", *_CHAIN, *_ATOMIC
)

_SPECS: Final = {spec.name: spec for spec in specs()}
_OPTIONS: Final[Mapping[str, tuple[Option, ...]]] = {
    "deep_linear": (Option("chain", {"deep_linear": _form(deep.DEEP_LINEAR, "chain", *_LINEAR_CHAIN)}),),
    "deep_site_up": (Option("chain", {"deep_site_up": _form(deep.DEEP_SITE_UP, "chain", *_CHAIN)}),),
    "experts": (
        Option("chain", {"moe_deep_gu": _GU_CHAIN, "moe_deep_down": _DOWN_CHAIN}),
        Option("atomic", {"moe_deep_gu": _GU_CHAIN, "moe_deep_down": _DOWN_ATOMIC, "moe_deep_sum": _ZERO},
               zero_first=True),
    ),
    **{
        name: (Option("fast", {name: _form(_SPECS[name], "fast")}),)
        for name in ("gdn_deep_input", "gdn_gate_input", "qsa_deep", "site_mid")
    },
}
