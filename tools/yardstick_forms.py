"""Inexact forms of the prompt kernels, made by edits of their real text: what tools/yardstick.py measures.

None is shipped, none is checked for bytes: they give up what exactness costs.  `chain`: all of K in one chain
of products, whatever units the order names, so no sums of units are kept.  `wide`: with those registers free
a block takes 256 rows (sm_90a).  `atomic`: experts add their weighted outputs to a row by float atomics, in
any order.  All of them and `fast`: exp, quotients and rsqrt by the approximate instructions (on a GPU).
What must stay true: an edit's old text stands exactly once in its file; a form takes the arguments of the
kernel it stands for, or others of the same layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from flashnext_drv.kernels import deep, moe_deep
from flashnext_drv.kernels.catalog import specs
from flashnext_drv.kernels.spec import HOPPER, PTR, Arg, Control, Edit, KernelSpec

__all__ = ["EXPERTS", "Form", "Option", "forms", "options"]

_DEEP: Final = "deep.cuh"
_LINEAR: Final = "deep/deep_linear.cu"
_GU: Final = "moe/moe_deep_gu.cu"
_DOWN: Final = "moe/moe_deep_down.cu"
_SUM: Final = "moe/moe_deep_sum.cu"
_SCAN: Final = "moe/moe_plan_scan.cu"
_INPUT: Final = "moe/moe_deep_input.cu"
# kernels that are exchanged together: their tiles and where a sum is made hang together
EXPERTS: Final = ("moe_plan_scan", "moe_deep_input", "moe_deep_gu", "moe_deep_down", "moe_deep_sum")


@dataclass(frozen=True)
class Form:
    """One kernel from other text.  spec: its declaration but for the name.  hopper: exists for sm_90a alone.
    """

    spec: KernelSpec
    control: Control
    hopper: bool = False


@dataclass(frozen=True)
class Option:
    """Forms that are used together, by the name of the kernel each stands for.  zero_first: the form of
    moe_deep_sum comes before moe_deep_down."""

    name: str
    forms: Mapping[str, Form]
    zero_first: bool = False


def options(arch: str) -> dict[str, tuple[Option, ...]]:
    """Options by what they are for: a kernel's name, or "experts" for EXPERTS.  arch: or "simulator"."""
    return {
        group: tuple(o for o in given if arch == HOPPER or not any(f.hopper for f in o.forms.values()))
        for group, given in _OPTIONS.items()
    }


def forms(arch: str) -> list[Form]:
    """Every form of the options, once."""
    found = [form for given in options(arch).values() for option in given for form in option.forms.values()]
    return list({(form.spec.name, form.control.name): form for form in found}.values())


# ---- approximate functions: all forms

_FAST: Final = (
    Edit("prelude.cuh", "{ return __fdiv_rn(a, b); }", "{ return __fdividef(a, b); }"),
    *(Edit("math.cuh", f"FN_DEVICE float {name}(float x) {{\n",
           f"FN_DEVICE float {name}(float x) {{\n#ifndef FN_SIM\n    return __expf(x);\n#endif\n")
      for name in ("fn_exp", "fn_exp_down")),
    Edit("math.cuh", "    float q = fn_mul(a, r);\n",
         "    return fn_mul(a, r);\n    float q = fn_mul(a, r);\n"),
    Edit("prelude.cuh", "return fn_fma(r, fn_fma(-d, r, 1.f), r);", "return r;"),
    Edit("math.cuh", "FN_DEVICE float fn_rsqrt(float x) {",
         "FN_DEVICE float fn_rsqrt(float x) {\n#ifndef FN_SIM\n    float r;\n"
         '    asm("rsqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(x));\n    return r;\n#endif\n   '),
)


def _form(spec: KernelSpec, name: str, *edits: Edit, hopper: bool = False) -> Form:
    return Form(spec, Control(name, "order", (*_FAST, *edits)), hopper)


# ---- one chain over K

_CHAIN: Final = (
    Edit(_DEEP, "walk.segments = fn_shfl(w.segments, 0u);", "walk.segments = 1u;"),
    Edit(_DEEP, "walk.leaves = fn_shfl(w.leaves, 0u);", "walk.leaves = 1u;"),
    Edit(_DEEP, "walk.units = walk.leaves * walk.segments;", "walk.units = 1u;"),
    Edit(_DEEP, "u32 units = w.leaves * w.segments, steps = w.k / 16u / units, tiles = w.n / 16u;",
         "u32 units = 1u, steps = w.k / 16u, tiles = w.n / 16u;"),
    Edit(_DEEP, "u32 units = w.leaves * w.segments, steps = w.k / 16u / units, at = 0,",
         "u32 units = 1u, steps = w.k / 16u, at = 0,"),
    Edit(_DEEP, "units_sum.add(w.leaves, w.segments, d, sum);", "units_sum.add(1u, 1u, d, sum);"),
    Edit(_DEEP, "{ fn_deep_set(sum, -0.f); }", "{}"),
    Edit(_DEEP, "sum[j][i] = fn_add(sum[j][i], d[j][i]);", "sum[j][i] = d[j][i];"),
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
struct Adds {
    float* y;
    const FnRoute* routes;
    const u32* pair_of;
    u32 n_slots;
};
"""


def _atomic(rows: int) -> tuple[Edit, ...]:
    return (
        Edit(_DOWN, "    FnDeepShared<4, 8192> deep;\n};",
             f"    FnDeepShared<4, 8192> deep;\n    u32 to[{rows}];\n    float weight[{rows}];\n}};{_ADD4}"),
        Edit(_DOWN, "if (row < live) fn_rows4_store(v + (u64)row * hidden, o);",
             """if (row >= live) continue;
        float weight = s.weight[begin + row];
        float* to = v + (u64)s.to[begin + row] * hidden;
#pragma unroll
        for (u32 i = 0; i < 16; i++) o[i] = fn_mul(o[i], weight);
#pragma unroll
        for (u32 j = 0; j < 4; j++) add4(to + fn_rows4_at(j), o + 4u * j);"""),
        Edit(_DOWN, "u32 live, u32 hidden, float* v) {", "u32 live, u32 hidden, float* v, u32 begin = 0) {"),
        Edit(_DOWN, "const u16* h, float* v, u32 hidden,\n                   u32 width_cap) {\n",
             f"""const u16* h, const Adds& v, u32 hidden,
                   u32 width_cap) {{
    if (threadIdx.x < p.tile.n_rows && threadIdx.x < {rows}u) {{
        u32 pair = fn_ldg(v.pair_of + p.tile.first + threadIdx.x);
        s.to[threadIdx.x] = pair / v.n_slots;
        s.weight[threadIdx.x] = fn_ldg(v.routes + pair).weight;
    }}
"""),
        Edit(_DOWN, "v + (u64)p.tile.first * hidden + p.output;", "v.y + p.output;"),
        Edit(_DOWN, "float* v, u32 hidden, u32 width_cap)) {",
             "float* y, u32 hidden, u32 width_cap, const FnRoute* routes, const u32* pair_of,\n"
             "           u32 n_slots)) {"),
        Edit(_DOWN, "    Piece p(blockIdx.x, hidden, tiles, lines);\n",
             "    Piece p(blockIdx.x, hidden, tiles, lines);\n    Adds v = {y, routes, pair_of, n_slots};\n"),
    )


def _with(
    spec: KernelSpec, *, args: tuple[Arg, ...] | None = None, more: int = 0, hopper: int = 0
) -> KernelSpec:
    """more: shared bytes added.  hopper: all of them on sm_90a."""
    return replace(
        spec,
        args=args or spec.args,
        shared_bytes=spec.shared_bytes + more,
        hopper_shared_bytes=hopper or (spec.hopper_shared_bytes + more if spec.hopper_shared_bytes else 0),
    )


_ZERO: Final = _form(
    moe_deep.MOE_DEEP_SUM, "zero",
    Edit(_SUM, "    if (row >= fn_ld(&round->n_rows)) return;\n",
         "    if (row >= fn_ld(&round->n_rows)) return;\n"
         "    if (c < hidden) *reinterpret_cast<float4*>(y + (u64)row * hidden + c) = "
         "make_float4(0.f, 0.f, 0.f, 0.f);\n    return;\n"),
)
_GU_CHAIN: Final = _form(moe_deep.MOE_DEEP_GU, "chain", *_CHAIN)
_DOWN_CHAIN: Final = _form(moe_deep.MOE_DEEP_DOWN, "chain", *_CHAIN)
_DOWN_ATOMIC: Final = _form(
    _with(moe_deep.MOE_DEEP_DOWN, args=_ATOMIC_ARGS, more=1024), "atomic", *_CHAIN, *_atomic(128))

# ---- 256 rows a block: the finished tile holds 64 of them at a time

_D: Final = ", ".join


_WGMMA: Final = f"""FN_DEVICE void fn_wgmma(float (&d)[32][4], u64 a, u64 b, u32 more) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %130, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {{"
        "{_D(f"%{i}" for i in range(128))}"
        "}}, %128, %129, p, 1, 1, 0, 0;\\n}}"
        : {_D(f"FN_D4({j})" for j in range(32))}
        : "l"(a), "l"(b), "r"(more));
}}

#undef FN_D4
"""
_WIDE: Final = (
    *_CHAIN,
    Edit("hopper.cuh", "#undef FN_D4\n", _WGMMA),
    Edit(_DEEP, "u8 rows[STAGES][16384];", "u8 rows[STAGES][32768];"),
    Edit(_DEEP, "plain [warp][step]\n    float tile[FN_DEEP_ROWS][FN_DEEP_PITCH];",
         "plain [warp][step]\n    float tile[64][FN_DEEP_PITCH];"),
    Edit(_DEEP, "u32 images = n_rows > 64u ? 2u : 1u;", "u32 images = (n_rows + 63u) / 64u;"),
)


def _parts(finish: str, live: str) -> str:
    """Spill and finish 64 rows at a time.  finish: what is done with `live` rows from row `begin` of the
    block on; live: of the block."""
    return f"""#pragma unroll
    for (u32 part = 0; part < ROW_TILES; part += 8u) {{
        u32 begin = 8u * part;
        if (begin >= {live}) continue;
        u32 live = fn_min_u32({live} - begin, 64u);
        deep.spill(reinterpret_cast<const float (&)[8][4]>(sum[part]));
        {finish}
    }}
    deep.meet();
"""


_STAGE: Final = 32768 + 8192  # rows and EXL3 weights of 64 k
_PART: Final = 64 * 132 * 4
_LINEAR_WIDE: Final = _form(
    _with(deep.DEEP_LINEAR, hopper=4 * (32768 + 16384) + _PART + 64), "wide", *_WIDE,
    Edit(_LINEAR, "row0 = FN_DEEP_ROWS * of_rows;", "row0 = 256u * of_rows;"),
    Edit(_LINEAR, "fn_min_u32(n_rows - row0, FN_DEEP_ROWS);", "fn_min_u32(n_rows - row0, 256u);"),
    Edit(_LINEAR, "((n_rows + FN_DEEP_ROWS - 1u) / FN_DEEP_ROWS);", "((n_rows + 255u) / 256u);"),
    Edit(_LINEAR, "    deep.spill(sum);\n    finish(s, *t.linear, t.tile, t.row0, t.live);\n",
         _parts("finish(s, *t.linear, t.tile, t.row0 + begin, live);", "t.live")),
    Edit(_LINEAR,
         "    if (t.live <= 64u)\n        run<8>(deep, s, t);\n    else\n        run<16>(deep, s, t);",
         "    if (t.live <= 128u)\n        run<16>(deep, s, t);\n    else\n        run<32>(deep, s, t);"),
    hopper=True,
)
_SCAN_WIDE: Final = _form(
    moe_deep.MOE_PLAN_SCAN, "wide",
    Edit(_SCAN, "pieces = (n + 127u) / 128u;", "pieces = (n + 255u) / 256u;"),
    Edit(_SCAN, "my_position + 128u * i, fn_min_u32(n - 128u * i, 128u)",
         "my_position + 256u * i, fn_min_u32(n - 256u * i, 256u)"),
    hopper=True,
)
_INPUT_WIDE: Final = _form(
    _with(moe_deep.MOE_DEEP_INPUT, more=512), "wide",
    Edit(_INPUT, "if (threadIdx.x < 128u)  //", "if (threadIdx.x < 256u)  //"),
    Edit(_INPUT, "u32 row[128];", "u32 row[256];"),
    hopper=True,
)
_DOWN_ROWS: Final = (
    Edit(_DOWN, "    if (p.tile.n_rows <= 64u)\n        run<8>(deep, s, p, h, v, hidden, width_cap);\n"
         "    else\n",
         """    if (p.tile.n_rows > 128u)
        run<32>(deep, s, p, h, v, hidden, width_cap);
    else if (p.tile.n_rows <= 64u)
        run<8>(deep, s, p, h, v, hidden, width_cap);
    else
"""),
)


def _down_parts(begin: str) -> tuple[Edit, ...]:
    return (
        Edit(_DOWN, "    deep.spill(sum);\n", ""),
        Edit(_DOWN, "    if (threadIdx.x < 32u * FN_DEEP_WARPS) finish(s, svh, p.tile.n_rows, hidden, to);\n"
             "    deep.meet();\n", _parts(begin, "p.tile.n_rows")),
    )


_DOWN_WIDE: Final = _form(
    _with(moe_deep.MOE_DEEP_DOWN, hopper=4 * _STAGE + _PART + 64), "wide", *_WIDE, *_DOWN_ROWS,
    *_down_parts("finish(s, svh, live, hidden, to + (u64)begin * hidden);"), hopper=True,
)
_DOWN_WIDE_ATOMIC: Final = _form(
    _with(moe_deep.MOE_DEEP_DOWN, args=_ATOMIC_ARGS, hopper=4 * _STAGE + _PART + 64 + 2048), "wide_atomic",
    *_WIDE, *_atomic(256), *_DOWN_ROWS, *_down_parts("finish(s, svh, live, hidden, to, begin);"), hopper=True,
)
_GU_WIDE: Final = _form(
    _with(moe_deep.MOE_DEEP_GU, hopper=3 * _STAGE + _PART + 48 + 256 * 128 * 2), "wide", *_WIDE,
    Edit(_DEEP, "#define FN_DEEP_LOADERS 4u", "#define FN_DEEP_LOADERS 3u"),
    Edit(_GU, "struct DeepGuShared {\n    FnDeepShared<4, 8192> deep;",
         "struct DeepGuShared {\n    FnDeepShared<3, 8192> deep;"),
    Edit(_GU, "    float gate[FN_DEEP_ROWS][128];", "    u16 gate[256][128];"),
    Edit(_GU, "typedef FnDeep<FnDeepShared<4, 8192>, FN_DEEP_EXL3> Deep;",
         """typedef FnDeep<FnDeepShared<3, 8192>, FN_DEEP_EXL3> Deep;
FN_DEVICE void store_gate(u16* p, const float (&v)[16]) {
#pragma unroll
    for (u32 j = 0; j < 4; j++)
        *reinterpret_cast<uint2*>(p + fn_rows4_at(j)) =
            make_uint2(fn_pack_h2(v[4u * j], v[4u * j + 1u]), fn_pack_h2(v[4u * j + 2u], v[4u * j + 3u]));
}
FN_DEVICE void load_gate(const u16* p, float (&v)[16]) {
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        uint2 h = *reinterpret_cast<const uint2*>(p + fn_rows4_at(j));
        v[4u * j] = fn_h2f((u16)h.x), v[4u * j + 1u] = fn_h2f((u16)(h.x >> 16));
        v[4u * j + 2u] = fn_h2f((u16)h.y), v[4u * j + 3u] = fn_h2f((u16)(h.y >> 16));
    }
}"""),
    Edit(_GU, "FN_DEVICE float* gate_row(", "FN_DEVICE u16* gate_row("),
    Edit(_GU, "fn_rows4_store(gate_row(s, row), v);", "store_gate(gate_row(s, begin + row), v);"),
    Edit(_GU, "fn_rows4_load(gate_row(s, row), gate);", "load_gate(gate_row(s, begin + row), gate);"),
    Edit(_GU, "void finish_gate(DeepGuShared& s, const Piece& piece) {",
         "void finish_gate(DeepGuShared& s, const Piece& piece, u32 begin) {"),
    Edit(_GU, "void activate(DeepGuShared& s, const Piece& piece, u16* h, u32 k_blocks) {",
         "void activate(DeepGuShared& s, const Piece& piece, u16* h, u32 k_blocks, u32 begin) {"),
    Edit(_GU, """        deep.spill(sum);
        if (threadIdx.x < 32u * FN_DEEP_WARPS) {
            if (up)
                activate(s, piece, h, width_cap / 64u);
            else
                finish_gate(s, piece);
        }
        deep.meet();
""", _parts("""Piece some = piece;
        some.first += begin, some.live = live;
        if (up)
            activate(s, some, h, width_cap / 64u, begin);
        else
            finish_gate(s, some, begin);""", "piece.live")),
    Edit(_GU, "#ifdef FN_HOPPER\n    if (piece.live <= 64u)\n",
         """#ifdef FN_HOPPER
    if (piece.live > 128u)
        run<32>(deep, s, piece, x, x_up, h, hidden, width_cap);
    else if (piece.live <= 64u)
"""),
    hopper=True,
)
_WIDE_EXPERTS: Final = {"moe_plan_scan": _SCAN_WIDE, "moe_deep_input": _INPUT_WIDE, "moe_deep_gu": _GU_WIDE}

_SPECS: Final = {spec.name: spec for spec in specs()}
_OPTIONS: Final[Mapping[str, tuple[Option, ...]]] = {
    "deep_linear": (
        Option("chain", {"deep_linear": _form(deep.DEEP_LINEAR, "chain", *_CHAIN)}),
        Option("wide", {"deep_linear": _LINEAR_WIDE}),
    ),
    "deep_site_up": (Option("chain", {"deep_site_up": _form(deep.DEEP_SITE_UP, "chain", *_CHAIN)}),),
    "experts": (
        Option("chain", {"moe_deep_gu": _GU_CHAIN, "moe_deep_down": _DOWN_CHAIN}),
        Option("atomic", {"moe_deep_gu": _GU_CHAIN, "moe_deep_down": _DOWN_ATOMIC, "moe_deep_sum": _ZERO},
               zero_first=True),
        Option("wide", {**_WIDE_EXPERTS, "moe_deep_down": _DOWN_WIDE}),
        Option("wide_atomic", {**_WIDE_EXPERTS, "moe_deep_down": _DOWN_WIDE_ATOMIC, "moe_deep_sum": _ZERO},
               zero_first=True),
    ),
    **{
        name: (Option("fast", {name: _form(_SPECS[name], "fast")}),)
        for name in ("gdn_deep_input", "gdn_gate_input", "qsa_deep", "site_mid")
    },
}
