"""Everything that is counted while an engine runs, under the names of `Generation.counters`.

Called by engine/engine.py and engine/scheduler.py, which tell what a request did by the difference of two
readings.  What must stay true: reading changes nothing, and counters only grow.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..kernels.tables import COUNTERS
from ..state.residency import COUNTERS as RING_COUNTERS
from .deep import DEEP
from .graphs import GraphCounters
from .prefill import PromptCounters
from .rank import Rank

__all__ = ["counted_since", "read_counters", "ring_counters"]

_PLAIN_NAMES = ("head_replays", "eager_rounds", "eager_heads")  # of GraphCounters, told without "graph_"


def read_counters(rank: Rank, prompts: PromptCounters) -> dict[str, int]:
    """All counters since the rank was opened.  Waits for the stream; raises DriverError."""
    return {**_graph_counters(rank), **vars(prompts), **_expert_counters(rank)}


def counted_since(earlier: Mapping[str, int], later: Mapping[str, int]) -> dict[str, int]:
    """What was added between two readings; a path that the earlier one had not met began at 0."""
    return {name: n - earlier.get(name, 0) for name, n in later.items()}


def ring_counters(rank: Rank) -> np.ndarray:
    """(layers,) RING_COUNTERS, host; zeros without a ring."""
    ring = None if rank.deep is None else rank.deep.ring
    return np.zeros(rank.layout.config.n_layers, RING_COUNTERS) if ring is None else ring.banks.counters


def _expert_counters(rank: Rank) -> dict[str, int]:
    """Of line caches and ring, over all layers."""
    if not rank.experts.offloads:
        return {}
    layers, ring = rank.experts.counters(rank.stream), ring_counters(rank)
    found = {f"expert_{name}": int(layers[name].sum()) for name in COUNTERS}
    found |= {f"ring_{name}": int(ring[name].sum()) for name in RING_COUNTERS.names or ()}
    parts = ("expert_filled_bytes", "expert_read_bytes", "ring_copied_bytes")
    return found | {"link_bytes": sum(found[part] for part in parts)}


def _graph_counters(rank: Rank) -> dict[str, int]:
    total = vars(rank.graphs.counters).items()
    found = {name if name in _PLAIN_NAMES else f"graph_{name}": n for name, n in total}
    for path in rank.graphs.paths:
        of_path = vars(rank.graphs.counters_of(path)).items()
        found |= {f"rank0.{path}.{name}": n for name, n in of_path if "head" not in name}
    deep = rank.deep
    of_deep = GraphCounters() if deep is None or deep.graphs is None else deep.graphs.counters
    for name in (each for each in vars(of_deep) if "head" not in each):
        total_name = "deep_eager_parts" if name == "eager_rounds" else f"deep_graph_{name}"
        found[total_name] = found[f"rank0.{DEEP}.{name}"] = getattr(of_deep, name)
    for path, (replays, rows) in rank.device_replays().items():
        found |= {f"rank0.{path}.device_replays": replays, f"rank0.{path}.device_rows": rows}
    return found
