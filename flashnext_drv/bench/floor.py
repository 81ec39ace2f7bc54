"""What one decoded token must cost at least: bytes read from device memory and trellis weights decoded.

Called by tools/bench_decode.py.  Counted from the pack's tensors, not from a table, so mixed widths are
right.  The rates to divide by are measured elsewhere and passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..model.layout import Layout
from ..model.linears import model_groups
from ..model.pack import PackBase
from ..model.weight import LinearInfo

__all__ = ["Floor", "decode_floor"]


@dataclass(frozen=True)
class Floor:
    """Of one token of one sequence.  bytes_read: weights, scales, states (read and written) and KV.
    trellis_weights: EXL3 weights decoded."""

    bytes_read: int
    trellis_weights: int

    def seconds(self, bytes_per_s: float, weights_per_s: float) -> dict[str, float]:
        """Time for the bytes, for the trellis decode, and the larger of the two, which is the floor."""
        memory, decode = self.bytes_read / bytes_per_s, self.trellis_weights / weights_per_s
        return {"bytes": memory, "trellis": decode, "floor": max(memory, decode)}


def decode_floor(layout: Layout, pack: PackBase, context_tokens: int) -> Floor:
    """Floor of one decoded row at `context_tokens` tokens of context."""
    c, names = layout.config, layout.config.names
    size = weights = 0
    linears = [pack.linear(m.prefix) for group in model_groups(c).values() for m in group.members]
    for i_layer in range(c.n_layers):
        linears += [pack.linear(f"{names.shared(i_layer)}.{name}_proj") for name in ("gate", "up", "down")]
        experts = pack.experts(i_layer)
        # any n_active experts: the mean over all, for packs whose experts differ in width
        size += sum(_bytes(pack, info) for linear in experts for info in linear) * c.n_active // c.n_experts
        weights += sum(info.k * info.n for linear in experts for info in linear) * c.n_active // c.n_experts
    size += sum(_bytes(pack, info) for info in linears)
    weights += sum(info.k * info.n for info in linears if info.is_exl3)
    n_gdn = sum(kind == "gdn" for kind in c.layer_kinds)
    n_qsa = c.n_layers - n_gdn
    state = n_gdn * 2 * c.gdn_value_heads * 128 * 128 * 4
    attended = min(context_tokens, c.index_budget + c.index_ratio - 1)
    scored = context_tokens // c.index_ratio if context_tokens // c.index_ratio > layout.budget else 0
    kv = n_qsa * (attended * 2 * c.kv_width * 2 + scored * c.index_dim * 2)
    return Floor(size + state + kv, weights)


def _bytes(pack: PackBase, info: LinearInfo) -> int:
    return sum(pack.tensor(name).size for part, name in info.parts.items() if part not in ("mcg", "mul1"))
