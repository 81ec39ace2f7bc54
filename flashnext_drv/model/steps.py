"""One token's walk through the model as plain lists of kernel launches.

A Step names a kernel, its grid and its arguments; strings in `args` are span names that engine/rank.py
resolves to addresses, numbers stay as they are, and "rows" in a grid is the launch's padded row count.  A
kernel name that ends in "*" has a form for up to 8 and one for up to 16 rows.  What a kernel does and the
order of its sums stand in cuda_src/ARITHMETIC.md; what each argument is stands in its declaration.

Scratch spans are shared by all layers, so the order of the steps is the order of a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..kernels.tables import FORMAT_BF16, FORMAT_F16
from .layout import Layout

__all__ = ["Step", "Value", "ahead_steps", "body_steps", "draw_steps", "edit_steps", "head_steps"]

Value = str | int | float
FILL_BLOCKS = 64  # of line_fill; 8 reach the link's rate
# Units a block of the experts' products takes at one row, where an H200 has all blocks at once, and at more.
GU_UNITS = (1, 2)
DOWN_UNITS = (1, 2)


@dataclass(frozen=True)
class Step:
    """One launch.  grid: up to three of int or "rows".  scope: the layer or part it belongs to, for people.
    units_a_block: grid[0] counts units of work, of which a block takes so many at one row, at more."""

    kernel: str
    grid: tuple[int | str, ...]
    args: Mapping[str, Value]
    scope: str = ""
    units_a_block: tuple[int, int] = (1, 1)


def body_steps(
    layout: Layout, embed_bf16: bool, ngram_bits: Mapping[int, int], context: int = 0
) -> Iterator[Step]:
    """Everything from token ids to the streams after the last layer.

    embed_bf16: dtype of the embedding rows.  ngram_bits: per PLE layer the table's width, 0 for plain bf16
    rows. The last layer's expert output is left in y; the head's first step adds it.
    context: tokens that the grids of attention reach, at least those of the longest sequence; 0 =
    Limits.context_tokens.  The bytes do not depend on it.
    """
    c = layout.config
    yield Step(
        "embed_rows",
        (-(-c.hidden // 512), "rows"),
        {
            "rows": "rows",
            "table": "embed",
            "format": FORMAT_BF16 if embed_bf16 else FORMAT_F16,
            "streams": "streams",
            "hidden": c.hidden,
        },
        "embed",
    )
    yield Step(
        "rope_rows",
        ("rows",),
        {
            "rows": "rows",
            "theta": float(c.rope_theta),
            "rope_dim": c.rope_dim,
            "rope": "rope",
            "rope_block": "rope_block",
        },
        "rope",
    )
    pending = False
    for i_layer, kind in enumerate(c.layer_kinds):
        stem = f"L{i_layer}"
        if i_layer in c.ple_layers:
            if pending:
                yield Step("stream_add", (-(-c.hidden // 256), "rows"), _add(layout), stem)
                pending = False
            yield from _ple(layout, i_layer, ngram_bits[i_layer])
        yield from _site(layout, f"{stem}.attn_site", pending)
        yield from _gdn(layout, i_layer) if kind == "gdn" else _qsa(layout, i_layer, context)
        yield from _site(layout, f"{stem}.mlp_site", True, feeds=f"{stem}.router")
        yield from _moe(layout, i_layer)
        pending = True


def head_steps(layout: Layout) -> Iterator[Step]:
    """From the streams after the last layer to float32 logits of every row of the round."""
    yield from _site(layout, "mixer", True, inject=False)
    yield from _linears(layout, "head", "m", layout.config.hidden)


def draw_steps(layout: Layout) -> Iterator[Step]:
    """Draw a token for each row that asks for one."""
    yield Step(
        "draw_rows",
        ("rows",),
        {
            "rows": "rows",
            "slots": "slots",
            "logits": "logits",
            "tokens": "tokens",
            "status": "status",
            "vocab": layout.config.vocab,
        },
        "draw",
    )


def edit_steps(layout: Layout, restore: bool) -> Iterator[Step]:
    """Edit the logits of rows that ask for it, or, behind the draws, put the raw ones back."""
    yield Step(
        "edit_logits",
        ("rows",),
        {
            "rows": "rows",
            "edits": "edits",
            "logits": "logits",
            "vocab": layout.config.vocab,
            "cap": layout.edit_cap,
            "restore": int(restore),
        },
        "draw",
    )


def ahead_steps(layout: Layout) -> Iterator[Step]:
    """Behind the draws: the rows of the next token; drawn tokens go to the pinned ring."""
    yield Step(
        "advance_rows",
        (1,),
        {
            "rows": "rows",
            "runs": "runs",
            "aheads": "aheads",
            "tokens": "tokens",
            "status": "status",
            "ring": "ahead",
            "ring_steps": layout.limits.steps_ahead,
        },
        "ahead",
    )


def _add(layout: Layout) -> dict[str, Value]:
    return {"streams": "streams", "y": "y", "inject": "inject", "hidden": layout.config.hidden}


def _site(layout: Layout, name: str, add: bool, inject: bool = True, feeds: str = "") -> Iterator[Step]:
    """feeds: group of plain linears that share one operand, which is made here."""
    c = layout.config
    weights = f"{name}.norm"
    yield Step(
        "site_norm",
        (c.n_streams, "rows"),
        {
            **_add(layout),
            "add": int(add),
            "w": weights,
            "n16": "n16",
            "rinv": "rinv",
            "eps": c.eps,
            "tiled": 0,
        },
        name,
    )
    yield from _gemv(layout, f"{name}.down")
    yield Step(
        "site_mid",
        ("rows",),
        {
            "linears": f"{name}.down.linears",
            "has_inject": int(inject),
            "u": "u16",
            "inject": "inject",
            "tiled": 0,
        },
        name,
    )
    yield Step(
        "site_up_n*",
        (-(-c.hidden // 16),),
        {
            "linear": f"{name}.up.linears",
            "streams": "streams",
            "rinv": "rinv",
            "w": weights,
            "m": "m",
            "m16": f"x+{layout.member_offsets(feeds)[0][0]}" if feeds else 0,
            "hidden": c.hidden,
        },
        name,
    )


def _gemv(layout: Layout, group: str) -> Iterator[Step]:
    members = layout.groups[group]
    yield Step(
        "linear_gemv_n*",
        (members.n_warps,),
        {"linears": f"{group}.linears", "n_linears": len(members.members)},
        group,
    )


def _finish_grid(layout: Layout, group: str) -> tuple[int | str, ...]:
    members = layout.groups[group].members
    return -(-max(m.n for m in members) // 512), len(members), "rows"


def _finish(layout: Layout, group: str) -> Iterator[Step]:
    yield Step("linear_finish", _finish_grid(layout, group), {"linears": f"{group}.linears"}, group)


def _linears(layout: Layout, group: str, x: str, x_stride: int, finish: bool = True) -> Iterator[Step]:
    """Operands, products and finished outputs of a group whose input row is the f32 span `x`; finish: False
    where the next kernel finishes them itself."""
    members = layout.groups[group]
    yield Step(
        "linear_input",
        (-(-max(m.k for m in members.members) // 512), members.n_inputs, "rows"),
        {"linears": f"{group}.linears", "x": x, "x_stride": x_stride},
        group,
    )
    yield from _gemv(layout, group)
    if finish:
        yield from _finish(layout, group)


def _gdn(layout: Layout, i_layer: int) -> Iterator[Step]:
    c, stem, geometry = layout.config, f"L{i_layer}", layout.recurrent
    group = f"{stem}.gdn_in"
    yield from _linears(layout, group, "m", c.hidden, finish=False)
    _, z, a, b = (f"out+{offset}" for offset in layout.member_offsets(group)[2])
    channels, n_k, n_v = c.gdn_channels, c.gdn_key_heads, c.gdn_value_heads
    state: dict[str, Value] = {"runs": "runs", "slots": "slots"}
    yield Step(
        "gdn_conv",
        _finish_grid(layout, group),
        {
            **state,
            "linears": f"{group}.linears",
            "w": f"{stem}.gdn.conv",
            "out": "conv",
            "tail_offset": geometry.tail[i_layer],
            "channels": channels,
        },
        group,
    )
    yield Step(
        "gdn_step",
        (n_v * 4, "rows"),
        {
            **state,
            "qkv": "conv",
            "a": a,
            "b": b,
            "a_log": f"{stem}.gdn.a_log",
            "dt_bias": f"{stem}.gdn.dt_bias",
            "state_offset": geometry.state[i_layer],
            "o": "o",
            "n_k": n_k,
            "n_v": n_v,
        },
        group,
    )
    yield Step(
        "gdn_gate_input",
        (-(-n_v // 4), "rows"),
        {
            "o": "o",
            "z": z,
            "norm_w": f"{stem}.gdn.norm",
            "linear": f"{stem}.gdn_out.linears",
            "gate": int(c.gate_activation == "silu"),
            "n_v": n_v,
            "eps": c.eps,
        },
        group,
    )
    yield from _gemv(layout, f"{stem}.gdn_out")
    yield from _finish(layout, f"{stem}.gdn_out")


def _qsa(layout: Layout, i_layer: int, context: int) -> Iterator[Step]:
    context = context or layout.limits.context_tokens
    c, stem, geometry = layout.config, f"L{i_layer}", layout.pages
    group = f"{stem}.qsa_in"
    yield from _linears(layout, group, "m", c.hidden)
    q, k, v, idx = (f"out+{offset}" for offset in layout.member_offsets(group)[2])
    n_q, n_kv = c.n_heads, c.n_kv_heads
    kv: dict[str, Value] = {"kv_offset": geometry.kv[i_layer]}
    index: dict[str, Value] = {"index_offset": geometry.index[i_layer]}
    row: dict[str, Value] = {"rows": "rows", "slots": "slots"}
    norms: dict[str, Value] = {
        name: f"{stem}.qsa.{name}" for name in ("q_norm", "k_norm", "iq_norm", "ik_norm")
    }
    yield Step(
        "qsa_prep",
        (-(-(n_q + 2 * n_kv + 5) // 4), "rows"),
        {
            **row,
            **kv,
            **index,
            **norms,
            "runs": "runs",
            "q": q,
            "k": k,
            "v": v,
            "idx": idx,
            "rope": "rope",
            "rope_block": "rope_block",
            "q16": "q16",
            "iq16": "iq16",
            "n_q": n_q,
            "n_kv": n_kv,
            "rope_dim": c.rope_dim,
            "eps": c.eps,
        },
        group,
    )
    yield Step(
        "index_score",
        (min(-(-layout.blocks_of(context) // 64), 264), "rows"),
        {
            **row,
            **index,
            "iq16": "iq16",
            "score": "score",
            "max_blocks": layout.max_blocks,
            "budget": layout.budget,
        },
        group,
    )
    yield Step(
        "index_select",
        ("rows",),
        {
            "rows": "rows",
            "score": "score",
            "sel": "sel",
            "flag": "flag",
            "max_blocks": layout.max_blocks,
            "budget": layout.budget,
            "first_row": 0,
        },
        group,
    )
    parts: dict[str, Value] = {
        "part_m": "part_m",
        "part_l": "part_l",
        "part_o": "part_o",
        "n_q": n_q,
        "budget": layout.budget,
        "max_parts": layout.max_parts,
    }
    yield Step(
        "qsa_attn",
        (layout.parts_of(context), n_kv, "rows"),
        {**row, **kv, **parts, "q16": "q16", "sel": "sel", "n_kv": n_kv},
        group,
    )
    yield Step(
        "qsa_merge",
        (n_q, "rows"),
        {**parts, "rows": "rows", "q": q, "flag": "flag", "linear": f"{stem}.qsa_out.linears"},
        group,
    )
    yield from _gemv(layout, f"{stem}.qsa_out")
    yield from _finish(layout, f"{stem}.qsa_out")


def _moe(layout: Layout, i_layer: int) -> Iterator[Step]:
    c, stem, slots = layout.config, f"L{i_layer}", layout.n_slots
    group = f"{stem}.router"
    yield from _gemv(layout, group)
    width = layout.width_cap
    gu_units, down_units = layout.moe_units
    table: dict[str, Value] = {"routes": "routes", "lines": f"{stem}.lines"}
    size: dict[str, Value] = {"hidden": c.hidden, "n_slots": slots, "width_cap": width}
    scope = f"{stem}.moe"
    yield Step(
        "router_pick",
        ("rows",),
        {
            "linears": f"{group}.linears",
            "routes": "routes",
            "n_experts": c.n_experts,
            "n_active": c.n_active,
        },
        scope,
    )
    if layout.offloads:
        yield from _lines(layout, i_layer)
    yield Step(
        "moe_input",
        (-(-c.hidden // 512), 2 * slots, "rows"),
        {**table, "m": "m", "x": "moe_x", "hidden": c.hidden, "n_slots": slots, "n_experts": c.n_experts},
        scope,
    )
    yield Step(
        "moe_gemv_gu",
        (width // 32 * gu_units, 2 * slots, "rows"),
        {**table, **size, "x": "moe_x", "part": "moe_part"},
        scope,
        units_a_block=GU_UNITS,
    )
    yield Step(
        "moe_act",
        (-(-width // 512), slots, "rows"),
        {**table, **size, "part": "moe_part", "x": "moe_h"},
        scope,
    )
    yield Step(
        "moe_gemv_down",
        (c.hidden // 32 * down_units, slots, "rows"),
        {**table, **size, "x": "moe_h", "part": "moe_part"},
        scope,
        units_a_block=DOWN_UNITS,
    )
    yield Step(
        "moe_sum",
        (c.hidden // 128, "rows"),
        {**table, **size, "part": "moe_part", "y": "y", "n_experts": c.n_experts},
        scope,
    )


def _lines(layout: Layout, i_layer: int) -> Iterator[Step]:
    """Bring the experts that were chosen into device lines, as far as there are lines for them."""
    stem = f"L{i_layer}"
    yield Step(
        "line_resolve",
        (1,),
        {
            "routes": "routes",
            "lines": f"{stem}.lines",
            "homes": f"{stem}.homes",
            "uses": f"{stem}.uses",
            "cache": f"{stem}.cache",
            "fills": "fills",
            "n_experts": layout.config.n_experts,
            "n_slots": layout.n_slots,
        },
        f"{stem}.moe",
    )
    yield Step("line_fill", (FILL_BLOCKS,), {"cache": f"{stem}.cache", "fills": "fills"}, f"{stem}.moe")


def _ple(layout: Layout, i_layer: int, bits: int) -> Iterator[Step]:
    c, stem = layout.config, f"L{i_layer}"
    n_heads = (c.ngram_size - 1) * c.heads_per_ngram
    gathered = layout.limits.ngram == "mapped"
    yield Step(
        "ngram_rows",
        (n_heads, "rows"),
        {
            "rows": "rows",
            "table": f"{stem}.ngram.rows" if gathered else f"{stem}.ngram.table",
            "bits": bits,
            "head_bias": f"{stem}.ngram.head_bias" if bits else 0,
            "head_offsets": f"{stem}.ngram.head_offsets",
            "head_sizes": f"{stem}.ngram.head_sizes",
            "multipliers": f"{stem}.ngram.multipliers",
            "eos": c.eos_id,
            "n_heads": n_heads,
            "row_dim": c.ple_dim // n_heads,
            "emb": "emb",
            "tiled": 0,
            "gathered": int(gathered),
        },
        f"{stem}.ple",
    )
    group = f"{stem}.ple"
    yield from _gemv(layout, group)
    yield from _finish(layout, group)
    key, value = (f"out+{offset}" for offset in layout.member_offsets(group)[2])
    yield Step(
        "ple_mix",
        (c.n_streams, "rows"),
        {
            "runs": "runs",
            "slots": "slots",
            "key": key,
            "value": value,
            "streams": "streams",
            "norm_key": f"{stem}.ple.norm_key",
            "norm_query": f"{stem}.ple.norm_query",
            "norm_conv": f"{stem}.ple.norm_conv",
            "conv": f"{stem}.ple.conv",
            "tail_offset": layout.recurrent.ple_tail[i_layer],
            "hidden": c.hidden,
            "eps": c.eps,
        },
        group,
    )
