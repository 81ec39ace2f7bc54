"""What each launch of a prompt chunk must do at least: products, vector operations and bytes.

Called by tools/bench_prefill.py and tools/yardstick.py with the steps of model/deep_steps.py.  Counted from
the pack's tensors and the model's dimensions: padding, tiles that are not full and operands read twice are
the kernels' own affair.  What must stay true: every kernel of the walk has a method of its name in `WorkOf`,
which raises without one.

An operand counts once, a weight once a chunk.  Of a layer's routed experts those count that a uniform router
would meet: E (1 - (1 - active/E)^rows).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ..errors import UsageError
from ..kernels.tables import ROUTE
from ..model.deep_layout import DeepLayout
from ..model.pack import PackBase
from ..model.steps import Step
from ..model.weight import LinearInfo

__all__ = ["CLASSES", "Rates", "Work", "WorkOf", "kernel_class"]

CLASSES: Final = ("site", "gdn", "scan", "qsa", "index", "moe", "ple", "other")
_CLASS_OF: Final = {
    "gdn_scan": "scan", "index_score_deep": "index", "index_select": "index", "stream_add": "other",
    "embed_rows": "other", "rope_rows": "other",
}  # fmt: skip
_SCOPES: Final = (("_site", "site"), ("gdn_", "gdn"), ("qsa_", "qsa"), ("router", "moe"), ("moe", "moe"),
                  ("ple", "ple"))


@dataclass(frozen=True)
class Rates:
    """Of a device: f16 products, f32 lane instructions and bytes, each a second.  Defaults: an H200 (132
    multiprocessors of 128 lanes at 1.98 GHz; dense f16 of the data sheet; streaming read as measured)."""

    flop_s: float = 989e12
    vector_s: float = 33.4e12
    bytes_s: float = 4.4e12


@dataclass(frozen=True)
class Work:
    """flop: of products, a multiply-add is two.  vector: f32 instructions of a recurrence, an fma is one.
    bytes: read and written."""

    flop: float = 0.0
    vector: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flop + other.flop, self.vector + other.vector, self.bytes + other.bytes)

    def seconds(self, rates: Rates) -> float:
        """The largest of the three times."""
        return max(self.flop / rates.flop_s, self.vector / rates.vector_s, self.bytes / rates.bytes_s)


def kernel_class(step: Step) -> str:
    """One of CLASSES: the part of the model a launch belongs to; the scan and the indexer apart."""
    if step.kernel in _CLASS_OF:
        return _CLASS_OF[step.kernel]
    return next((name for part, name in _SCOPES if part in step.scope), "other")


class WorkOf:
    """Work of the steps of one chunk of one sequence.  first: position of its first row.  rows: its rows."""

    def __init__(self, deep: DeepLayout, pack: PackBase, first: int, rows: int) -> None:
        self._deep, self._layout, self._c, self._pack = deep, deep.layout, deep.layout.config, pack
        self._first, self._rows = first, rows

    def __call__(self, step: Step) -> Work:
        """Raises UsageError for a kernel that no chunk has."""
        find: Callable[[Step], Work] | None = getattr(self, f"_{step.kernel}", None)
        if find is None:
            raise UsageError("no floor is known for a kernel", kernel=step.kernel)
        return find(step)

    # ---- dense parts

    def _each(self, row_bytes: float) -> Work:
        return Work(bytes=self._rows * row_bytes)

    def _products(self, group: str, out_bytes: int = 4) -> Work:
        work = Work()
        for member in self._layout.groups[group].members:
            info = self._pack.linear(member.prefix)
            own = 2 * member.k if member.shares < 0 else 0
            work += Work(2.0 * self._rows * member.k * member.n,
                         bytes=self._weight(info) + self._rows * (own + out_bytes * member.n))
        return work

    def _weight(self, info: LinearInfo) -> int:
        return sum(self._pack.tensor(name).size for part, name in info.parts.items()
                   if part not in ("mcg", "mul1"))

    def _deep_linear(self, step: Step) -> Work:
        return self._products(str(step.args["linears"]).removesuffix(".deep"))

    def _deep_site_up(self, step: Step) -> Work:
        c = self._c
        name = str(step.args["linear"]).removesuffix(".deep")
        return self._products(name, 0) + self._each(4 * (c.n_streams + 1) * c.hidden)

    def _deep_input(self, step: Step) -> Work:
        group = self._layout.groups[str(step.args["linears"]).removesuffix(".deep")]
        return self._each(4 * self._c.hidden + 2 * sum(m.k for m in group.members if m.shares < 0))

    def _embed_rows(self, step: Step) -> Work:
        return self._each(2 * self._c.hidden + 4 * self._c.n_streams * self._c.hidden)

    def _rope_rows(self, step: Step) -> Work:
        return self._each(8 * self._c.rope_dim)

    def _stream_add(self, step: Step) -> Work:
        return self._each(4 * self._c.hidden * (2 * self._c.n_streams + 1))

    def _site_norm(self, step: Step) -> Work:
        wide = self._c.n_streams * self._c.hidden
        added = 4 * (wide + self._c.hidden + self._c.n_streams) if step.args["add"] else 0
        return self._each(4 * wide + 2 * wide + 4 * self._c.n_streams + added)

    def _site_mid(self, step: Step) -> Work:
        return self._each(6 * self._c.low_rank + 8 * self._c.n_streams)

    # ---- DeltaNet

    def _gdn_deep_input(self, step: Step) -> Work:
        return self._each(8 * self._c.gdn_channels + 16 * self._c.gdn_value_heads)

    def _gdn_scan(self, step: Step) -> Work:
        n_v = self._c.gdn_value_heads
        state = n_v * 128 * 128
        row = 4 * self._c.gdn_channels + 8 * n_v + 4 * n_v * 128
        # of an element and token: the decay's product and three fma
        return Work(vector=4.0 * self._rows * state, bytes=self._rows * row + 8 * state)

    def _gdn_gate_input(self, step: Step) -> Work:
        return self._each(10 * self._c.gdn_value_width)

    # ---- attention

    def _qsa_prep(self, step: Step) -> Work:
        c = self._c
        stored = 2 * (c.query_width + 2 * c.kv_width + c.index_width)
        return self._each(4 * (c.query_width + 2 * c.kv_width + c.index_width) + stored)

    def _index_score_deep(self, step: Step) -> Work:
        c, blocks = self._c, self._scored(step)
        keys = 2 * c.index_dim * max(blocks, default=0)
        return Work(2.0 * c.index_heads * c.index_dim * sum(blocks),
                    bytes=4 * sum(blocks) + keys + 2 * c.index_heads * c.index_dim * len(blocks))

    def _index_select(self, step: Step) -> Work:
        blocks = self._scored(step)
        return Work(bytes=4 * sum(blocks) + 4 * self._layout.budget * len(blocks))

    def _scored(self, step: Step) -> list[int]:
        """Complete blocks of each of the step's rows that has more than the budget."""
        start = int(step.args["first_row"])
        end = min(start + self._deep.score_rows, self._rows)
        counts = [(self._first + row + 1) // self._c.index_ratio for row in range(start, end)]
        return [count for count in counts if count > self._layout.budget]

    def _qsa_deep(self, step: Step) -> Work:
        c = self._c
        most = c.index_budget + c.index_ratio - 1
        attended = sum(min(self._first + row + 1, most) for row in range(self._rows))
        # keys and values that some row attends to: all, where the rows are many
        cached = min(self._first + self._rows, attended) * 4 * c.kv_width
        return Work(4.0 * c.query_width * attended, bytes=cached + self._rows * 8 * c.query_width)

    # ---- experts

    def _pairs(self) -> tuple[int, int]:
        """(routed, all) pairs of a row and an expert."""
        return self._rows * self._c.n_active, self._rows * self._layout.n_slots

    def _expert_bytes(self, step: Step, which: tuple[int, ...]) -> float:
        c, i_layer = self._c, int(step.scope.split(".")[0].removeprefix("L"))
        met = 1 - (1 - c.n_active / c.n_experts) ** self._rows
        routed = sum(self._weight(expert[i]) for expert in self._pack.experts(i_layer) for i in which)
        names = ("gate", "up", "down")
        stem = c.names.shared(i_layer)
        return routed * met + sum(self._weight(self._pack.linear(f"{stem}.{names[i]}_proj")) for i in which)

    def _widths(self) -> int:
        """Channels of all pairs together."""
        return self._pairs()[0] * self._c.moe_width + self._rows * self._c.shared_width

    def _router_pick(self, step: Step) -> Work:
        return self._each(4 * (self._c.n_experts + 1) + ROUTE.itemsize * self._layout.n_slots)

    def _moe_plan_count(self, step: Step) -> Work:
        return self._each(ROUTE.itemsize * self._layout.n_slots)

    def _moe_plan_scan(self, step: Step) -> Work:
        return Work(bytes=8 * (self._c.n_experts + 1) * -(-self._rows // 128))

    def _moe_plan_place(self, step: Step) -> Work:
        return self._each((ROUTE.itemsize + 8) * self._layout.n_slots)

    def _moe_deep_input(self, step: Step) -> Work:
        return self._each(4 * self._c.hidden) + Work(bytes=4 * self._pairs()[1] * self._c.hidden)

    def _moe_deep_gu(self, step: Step) -> Work:
        hidden, widths = self._c.hidden, self._widths()
        return Work(4.0 * hidden * widths,
                    bytes=self._expert_bytes(step, (0, 1)) + 4 * self._pairs()[1] * hidden + 2 * widths)

    def _moe_deep_down(self, step: Step) -> Work:
        hidden, widths = self._c.hidden, self._widths()
        return Work(2.0 * hidden * widths,
                    bytes=self._expert_bytes(step, (2,)) + 2 * widths + 4 * self._pairs()[1] * hidden)

    def _moe_deep_sum(self, step: Step) -> Work:
        return self._each(4 * self._c.hidden * (self._layout.n_slots + 1))

    # ---- n-grams

    def _ngram_rows(self, step: Step) -> Work:
        bits = int(step.args["bits"]) or 16
        return self._each(self._c.ple_dim * (bits / 8 + 2))

    def _ple_gate(self, step: Step) -> Work:
        wide = self._c.n_streams * self._c.hidden
        return self._each(10 * wide + 4 * self._c.hidden)

    def _ple_conv(self, step: Step) -> Work:
        wide = self._c.n_streams * self._c.hidden
        return self._each(10 * wide + 4 * self._c.hidden)

    def _ple_tail(self, step: Step) -> Work:
        past = (self._c.ple_taps - 1) * self._c.ngram_size
        return Work(bytes=4 * past * self._c.n_streams * self._c.hidden)
