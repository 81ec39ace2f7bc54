"""A chunk's walk through the model by the deep pass, as plain lists of kernel launches.

The steps of steps.py for up to 16,384 rows at a time: row-wise kernels are decode's, products and state
updates have forms of their own with the same bytes.  Span names are those of model/deep_layout.py; "round",
"rows" and "runs" are the chunk's tables; descriptors are the tables `<group>.deep`.  Grids are for a bucket
of rows; rows beyond the chunk's are neither read nor written.

Where the experts lie in host memory, line_fill sends the lines and tiles that the host wrote, and
moe_deep_input to moe_deep_down are for one batch of a layer's experts: the host runs them for each batch,
with that batch's tiles and grids.

The walk ends with the streams after the last layer, and its last expert output in d_y: rows whose logits are
asked for go through decode's head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..kernels.attn import score_grid
from ..kernels.deep import deep_input_grid, deep_tiles
from ..kernels.gdn import gate_grid
from ..kernels.moe_deep import deep_pairs, deep_sum_grid
from ..kernels.tables import FORMAT_BF16, FORMAT_F16
from .deep_layout import ROW_STEP, DeepLayout
from .steps import Step, Value

__all__ = ["PUSH_BLOCKS", "deep_steps"]

PUSH_BLOCKS = 8  # of line_fill, which sends a layer's lines and tiles: some 90 KiB


def deep_steps(
    deep: DeepLayout, rows: int, embed_bf16: bool, ngram_bits: Mapping[int, int]
) -> list[Step]:
    """Everything from token ids to the streams after the last layer.

    rows: of the grids, one of deep.buckets().  embed_bf16, ngram_bits: as steps.body_steps.
    """
    return list(_Walk(deep, rows).steps(embed_bf16, ngram_bits))


class _Walk:
    """One bucket's steps."""

    def __init__(self, deep: DeepLayout, rows: int) -> None:
        self.deep, self.rows = deep, rows
        self.layout, self.c = deep.layout, deep.layout.config
        self.blocks = rows // ROW_STEP
        self.runs = min(rows, deep.runs_cap)

    def steps(self, embed_bf16: bool, ngram_bits: Mapping[int, int]) -> Iterator[Step]:
        c = self.c
        yield Step(
            "embed_rows",
            (-(-c.hidden // 512), self.rows),
            {
                "rows": "rows",
                "table": "embed",
                "format": FORMAT_BF16 if embed_bf16 else FORMAT_F16,
                "streams": "d_streams",
                "hidden": c.hidden,
            },
            "embed",
        )
        yield Step(
            "rope_rows",
            (self.rows,),
            {
                "rows": "rows",
                "theta": float(c.rope_theta),
                "rope_dim": c.rope_dim,
                "rope": "d_rope",
                "rope_block": "d_rope_block",
            },
            "rope",
        )
        pending = False
        for i_layer, kind in enumerate(c.layer_kinds):
            stem = f"L{i_layer}"
            if i_layer in c.ple_layers:
                if pending:
                    yield Step("stream_add", (-(-c.hidden // 256), self.rows), self._add(), stem)
                    pending = False
                yield from self._ple(i_layer, ngram_bits[i_layer])
            yield from self._site(f"{stem}.attn_site", pending)
            yield from self._gdn(i_layer) if kind == "gdn" else self._qsa(i_layer)
            yield from self._site(f"{stem}.mlp_site", True)
            yield from self._moe(i_layer)
            pending = True

    def _add(self) -> dict[str, Value]:
        return {"streams": "d_streams", "y": "d_y", "inject": "d_inject", "hidden": self.c.hidden}

    def _site(self, name: str, add: bool) -> Iterator[Step]:
        c = self.c
        weights = f"{name}.norm"
        yield Step(
            "site_norm",
            (c.n_streams, self.rows),
            {
                **self._add(),
                "add": int(add),
                "w": weights,
                "n16": "d_wide",
                "rinv": "d_rinv",
                "eps": c.eps,
                "tiled": 1,
            },
            name,
        )
        yield self._linear(f"{name}.down")
        yield Step(
            "site_mid",
            (self.rows,),
            {
                "linears": f"{name}.down.deep",
                "has_inject": 1,
                "u": "d_low",
                "inject": "d_inject",
                "tiled": 1,
            },
            name,
        )
        yield Step(
            "deep_site_up",
            (c.hidden // 32 * self.blocks,),
            {
                "linear": f"{name}.up.deep",
                "streams": "d_streams",
                "rinv": "d_rinv",
                "w": weights,
                "m": "d_m",
                "hidden": c.hidden,
            },
            name,
        )

    def _linear(self, group: str) -> Step:
        """Products and finished sums of a group whose operands are made."""
        members = self.layout.groups[group].members
        return Step(
            "deep_linear",
            (sum(deep_tiles(m.n) for m in members) * self.blocks,),
            {"linears": f"{group}.deep", "n_linears": len(members)},
            group,
        )

    def _linears(self, group: str) -> Iterator[Step]:
        """Operands, products and finished sums of a group whose input row is d_m."""
        members = self.layout.groups[group]
        yield Step(
            "deep_input",
            deep_input_grid(self.rows, max(m.k for m in members.members)),
            {
                "linears": f"{group}.deep",
                "n_linears": members.n_inputs,
                "x": "d_m",
                "x_stride": self.c.hidden,
            },
            group,
        )
        yield self._linear(group)

    def _outs(self, group: str) -> list[str]:
        return [f"d_out+{offset}" for offset in self.deep.member_offsets(group)[1]]

    def _gdn(self, i_layer: int) -> Iterator[Step]:
        c, stem, geometry = self.c, f"L{i_layer}", self.layout.recurrent
        group = f"{stem}.gdn_in"
        yield from self._linears(group)
        qkv, z, a, b = self._outs(group)
        n_k, n_v = c.gdn_key_heads, c.gdn_value_heads
        heads: dict[str, Value] = {"n_k": n_k, "n_v": n_v}
        tail = geometry.tail[i_layer]
        yield Step(
            "gdn_deep_input",
            (2 * n_k + n_v + 1, self.rows // 32),
            {
                "rows": "rows",
                "runs": "runs",
                "slots": "slots",
                "x": qkv,
                "a": a,
                "b": b,
                "w": f"{stem}.gdn.conv",
                "a_log": f"{stem}.gdn.a_log",
                "dt_bias": f"{stem}.gdn.dt_bias",
                "tail_offset": tail,
                "qkv": "d_conv",
                "gates": "d_gates",
                **heads,
            },
            group,
        )
        yield Step(
            "gdn_scan",
            (n_k * -(-8 * n_v // (3 * n_k)), self.runs),
            {
                "runs": "runs",
                "slots": "slots",
                "x": qkv,
                "qkv": "d_conv",
                "gates": "d_gates",
                "state_offset": geometry.state[i_layer],
                "tail_offset": tail,
                "o": "d_o",
                **heads,
            },
            group,
        )
        yield Step(
            "gdn_gate_input",
            gate_grid(self.rows, n_v),
            {
                "o": "d_o",
                "z": z,
                "norm_w": f"{stem}.gdn.norm",
                "linear": f"{stem}.gdn_out.deep",
                "gate": int(c.gate_activation == "silu"),
                "n_v": n_v,
                "eps": c.eps,
            },
            group,
        )
        yield self._linear(f"{stem}.gdn_out")

    def _qsa(self, i_layer: int) -> Iterator[Step]:
        c, stem, geometry = self.c, f"L{i_layer}", self.layout.pages
        group = f"{stem}.qsa_in"
        yield from self._linears(group)
        q, k, v, idx = self._outs(group)
        n_q, n_kv = c.n_heads, c.n_kv_heads
        kv: dict[str, Value] = {"kv_offset": geometry.kv[i_layer]}
        index: dict[str, Value] = {"index_offset": geometry.index[i_layer]}
        row: dict[str, Value] = {"rows": "rows", "slots": "slots"}
        choice: dict[str, Value] = {"max_blocks": self.layout.max_blocks, "budget": self.layout.budget}
        norms: dict[str, Value] = {
            name: f"{stem}.qsa.{name}" for name in ("q_norm", "k_norm", "iq_norm", "ik_norm")
        }
        yield Step(
            "qsa_prep",
            (-(-(n_q + 2 * n_kv + 5) // 4), self.rows),
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
                "rope": "d_rope",
                "rope_block": "d_rope_block",
                "q16": "d_q16",
                "iq16": "d_iq16",
                "n_q": n_q,
                "n_kv": n_kv,
                "rope_dim": c.rope_dim,
                "eps": c.eps,
            },
            group,
        )
        for first_row in range(0, self.rows, self.deep.score_rows):
            window = min(self.deep.score_rows, self.rows - first_row)
            yield Step(
                "index_score_deep",
                score_grid(window, self.layout.max_blocks),
                {
                    **row,
                    **index,
                    **choice,
                    "runs": "runs",
                    "iq16": "d_iq16",
                    "score": "d_score",
                    "first_row": first_row,
                },
                group,
            )
            yield Step(
                "index_select",
                (window,),
                {
                    **choice,
                    "rows": "rows",
                    "score": "d_score",
                    "sel": "d_sel",
                    "flag": "d_flag",
                    "first_row": first_row,
                },
                group,
            )
        yield Step(
            "qsa_deep",
            (n_kv, self.rows),
            {
                **row,
                **kv,
                "q": q,
                "q16": "d_q16",
                "sel": "d_sel",
                "flag": "d_flag",
                "linear": f"{stem}.qsa_out.deep",
                "n_q": n_q,
                "n_kv": n_kv,
                "budget": self.layout.budget,
            },
            group,
        )
        yield self._linear(f"{stem}.qsa_out")

    def _moe(self, i_layer: int) -> Iterator[Step]:
        c, stem = self.c, f"L{i_layer}"
        group = f"{stem}.router"
        yield from self._linears(group)
        pairs_cap = self.deep.pairs[0]
        tiles_cap = deep_pairs(self.rows, self.layout.n_slots, c.n_experts)[1]
        width = self.layout.width_cap
        scope = f"{stem}.moe"
        slots: dict[str, Value] = {"n_slots": self.layout.n_slots}
        counted: dict[str, Value] = {**slots, "n_experts": c.n_experts}
        offloads = self.layout.offloads
        plan: dict[str, Value] = {"tiles": "d_tiles", "n_tiles": "d_n_tiles"}
        lines: dict[str, Value] = {"lines": "d_lines" if offloads else f"{stem}.lines"}
        tiles: dict[str, Value] = {"tiles": "d_batch_tiles", "n_tiles": "d_batch_n"} if offloads else plan
        yield Step(
            "router_pick",
            (self.rows,),
            {
                "linears": f"{group}.deep",
                "routes": "d_routes",
                "n_experts": c.n_experts,
                "n_active": c.n_active,
            },
            scope,
        )
        yield Step(
            "moe_plan_count",
            (self.blocks,),
            {"routes": "d_routes", "counts": "d_counts", **counted},
            scope,
        )
        yield Step(
            "moe_plan_scan",
            (1,),
            {
                **plan,
                "counts": "d_counts",
                "starts": "d_starts",
                "n_experts": c.n_experts,
                "tiles_cap": tiles_cap,
            },
            scope,
        )
        yield Step(
            "moe_plan_place",
            (self.blocks,),
            {
                "routes": "d_routes",
                "starts": "d_starts",
                "pair_at": "d_pair_at",
                "pair_of": "d_pair_of",
                **counted,
            },
            scope,
        )
        if offloads:
            yield Step(
                "line_fill", (PUSH_BLOCKS,), {"cache": "push_cache", "fills": "push_fill"}, scope
            )
        yield Step(
            "moe_deep_input",
            (tiles_cap, -(-c.hidden // 256)),
            {
                **lines,
                **tiles,
                **slots,
                "pair_of": "d_pair_of",
                "m": "d_m",
                "x": "d_moe_x",
                "hidden": c.hidden,
                "pairs_cap": pairs_cap,
            },
            scope,
        )
        yield Step(
            "moe_deep_gu",
            (width // 128 * tiles_cap,),
            {
                **lines,
                **tiles,
                "x": "d_moe_x",
                "h": "d_moe_h",
                "gate": self.deep.gates,
                "hidden": c.hidden,
                "width_cap": width,
                "pairs_cap": pairs_cap,
            },
            scope,
        )
        yield Step(
            "moe_deep_down",
            (c.hidden // 128 * tiles_cap,),
            {**lines, **tiles, "h": "d_moe_h", "v": "d_moe_v", "hidden": c.hidden, "width_cap": width},
            scope,
        )
        yield Step(
            "moe_deep_sum",
            deep_sum_grid(self.rows, c.hidden),
            {
                **counted,
                "routes": "d_routes",
                "pair_at": "d_pair_at",
                "v": "d_moe_v",
                "y": "d_y",
                "hidden": c.hidden,
            },
            scope,
        )

    def _ple(self, i_layer: int, bits: int) -> Iterator[Step]:
        c, stem = self.c, f"L{i_layer}"
        n_heads = c.n_ngram_heads
        gathered = self.layout.limits.ngram == "mapped"
        group = f"{stem}.ple"
        yield Step(
            "ngram_rows",
            (n_heads, self.rows),
            {
                "rows": "rows",
                "table": f"{stem}.ngram.chunk" if gathered else f"{stem}.ngram.table",
                "bits": bits,
                "head_bias": f"{stem}.ngram.head_bias" if bits else 0,
                "head_offsets": f"{stem}.ngram.head_offsets",
                "head_sizes": f"{stem}.ngram.head_sizes",
                "multipliers": f"{stem}.ngram.multipliers",
                "eos": c.eos_id,
                "n_heads": n_heads,
                "row_dim": c.ple_dim // n_heads,
                "emb": "d_emb",
                "tiled": 1,
                "gathered": int(gathered),
            },
            group,
        )
        yield self._linear(group)
        key, value = self._outs(group)
        state: dict[str, Value] = {"slots": "slots", "tail_offset": self.layout.recurrent.ple_tail[i_layer]}
        yield Step(
            "ple_gate",
            (c.n_streams, self.rows),
            {
                "key": key,
                "value": value,
                "streams": "d_streams",
                "norm_key": f"{stem}.ple.norm_key",
                "norm_query": f"{stem}.ple.norm_query",
                "norm_conv": f"{stem}.ple.norm_conv",
                "conv_in": "d_ple_in",
                "g": "d_ple_g",
                "hidden": c.hidden,
                "eps": c.eps,
            },
            group,
        )
        yield Step(
            "ple_conv",
            (-(-4 * c.hidden // 512), self.rows // 16),
            {
                **state,
                "rows": "rows",
                "runs": "runs",
                "value": value,
                "g": "d_ple_g",
                "conv_in": "d_ple_in",
                "conv": f"{stem}.ple.conv",
                "streams": "d_streams",
                "hidden": c.hidden,
            },
            group,
        )
        yield Step(
            "ple_tail",
            (-(-4 * c.hidden // 512), self.runs),
            {**state, "runs": "runs", "conv_in": "d_ple_in", "hidden": c.hidden},
            group,
        )
