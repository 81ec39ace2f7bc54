"""What a rank will allocate for given limits, before anything is.

Called by engine/rank.py while it opens and by `flashnext-drv plan`.  What must stay true: bytes by owner
equal the ledger's after the rank has opened.
"""

from __future__ import annotations

from ..model.deep_layout import DeepLayout
from ..model.layout import Layout, arena_bytes
from ..model.pack import PackBase
from ..model.plan import Plan
from ..state.experts import expert_bytes
from ..state.weights import weight_bytes

__all__ = ["plan"]


def plan(
    layout: Layout, pack: PackBase, guard: bool = False, deep: DeepLayout | None = None
) -> Plan:
    """Bytes by owner of a rank with this layout; nothing is allocated.  guard: with guard zones.

    deep: with the buffers of the deep pass.
    """
    weights, ngram = weight_bytes(layout, pack)
    n_pages, n_slots = layout.n_pages, layout.limits.sequences
    device = {
        "experts": expert_bytes(layout, pack),
        "weights": weights,
        "kv": arena_bytes([n_pages * layout.pages.kv_bytes], guard),
        "index": arena_bytes([n_pages * layout.pages.index_bytes], guard),
        "recurrent": arena_bytes([layout.recurrent.size_bytes] * n_slots, guard),
        "work": arena_bytes(layout.work.values(), guard),
        "tables": layout.table_bytes(),
    }
    if deep is not None:
        device["deep"] = deep.size_bytes(guard)
    return Plan(device, {"ngram": ngram})
