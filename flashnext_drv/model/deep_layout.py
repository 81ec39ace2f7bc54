"""Sizes and places of the deep prompt pass: its tables, descriptors and scratch, and how many rows it takes.

Pure arithmetic over a Layout: no driver, no files.  state/deep.py allocates exactly what stands here as the
arena "deep"; model/deep_steps.py names its spans.  What must stay true: the mixer's spans and the experts'
spans may lie in the same bytes, because no step reads one side after the other side was written.

    arena "deep":  [tables | linears | ring | d_streams | d_m | ... | shared ]
                                                      shared = mixer's spans, or experts' spans

Where the experts lie in host memory (Layout.offloads) "ring" holds what a layer's expert kernels work
through: lines, and the plan's tiles batch by batch.  The plan itself then goes to pinned memory, where the
host reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..kernels import tables as t
from ..kernels.moe_deep import deep_pairs
from .layout import MAX_CHUNK, Cursor, Layout, Limits, aligned, arena_bytes
from .linears import Group

__all__ = [
    "OVERLAY",
    "ROW_STEP",
    "SCORE_BYTES",
    "SMALLEST_CHUNK",
    "DeepLayout",
    "deep_groups",
    "deep_layouts",
    "deep_operands",
]

ROW_STEP = 128
SCORE_BYTES = 512 << 20  # most index scores at a time; more rows take several windows
SMALLEST_CHUNK = 512
OVERLAY = True  # False lays every span apart: then each has its own guard zone


@dataclass
class DeepLayout:
    """The arena "deep" for chunks of up to `rows` rows, a multiple of 128.

    sizes: bytes of the spans that lie one after another in the arena, by name.  shared: (offset, bytes) of
    the spans inside the span "shared".  tables: (offset, bytes) of round, runs and rows inside "tables".
    linears: (offset, bytes) of each group's descriptors inside "linears".
    With offloaded experts, else empty: ring: (offset, bytes) inside "ring" of lines, number of tiles of each
    batch, and the batches' tiles.  plan: (offset, bytes) in pinned memory of what moe_plan_scan says.
    """

    layout: Layout
    rows: int
    sizes: dict[str, int] = field(init=False)
    shared: dict[str, tuple[int, int]] = field(init=False)
    tables: dict[str, tuple[int, int]] = field(init=False)
    linears: dict[str, tuple[int, int]] = field(init=False)
    ring: dict[str, tuple[int, int]] = field(init=False)
    plan: dict[str, tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.tables = _places(
            {
                "round": t.ROUND.itemsize,
                "runs": self.runs_cap * t.RUN.itemsize,
                "rows": self.rows * t.ROW.itemsize,
            }
        )
        groups = self.layout.groups
        self.linears = _places(
            {name: len(groups[name].members) * t.LINEAR.itemsize for name in deep_groups(self.layout)}
        )
        mixer, experts = self._mixer(), self._experts()
        tiles = {"d_n_tiles": 4, "d_tiles": self.pairs[1] * t.TILE.itemsize}
        self.ring, self.plan = {}, {}
        self.sizes = {"tables": _end(self.tables), "linears": _end(self.linears), **self._private()}
        if self.layout.offloads:
            n_lines = self.layout.config.n_experts + 1
            self.ring = _places(
                {
                    "d_lines": n_lines * t.LINE.itemsize,
                    "d_batch_n": n_lines * 4,  # the most batches: one expert in each
                    "d_batch_tiles": tiles["d_tiles"],
                }
            )
            self.plan = _places(tiles)
            self.sizes["ring"] = _end(self.ring)
        else:
            self.sizes |= tiles
        self.shared = {}
        if OVERLAY:
            self.shared = _places(mixer) | _places(experts)
            self.sizes["shared"] = max(_end(self.shared), 1)
        else:
            self.sizes |= mixer | experts

    @property
    def runs_cap(self) -> int:
        """Most runs of a chunk: a sequence stands in it once."""
        return min(self.rows, self.layout.limits.sequences)

    @property
    def pairs(self) -> tuple[int, int]:
        """(pairs_cap, tiles_cap) of a full chunk."""
        return deep_pairs(self.rows, self.layout.n_slots, self.layout.config.n_experts)

    @property
    def score_rows(self) -> int:
        """Rows whose index scores are held at a time."""
        fitting = SCORE_BYTES // (4 * self.layout.max_blocks) // ROW_STEP * ROW_STEP
        return min(self.rows, max(fitting, ROW_STEP))

    @property
    def gates(self) -> str:
        """Span of the finished gates: the rows that outputs come to lie in, where they fit there.  Offloaded
        experts come batch by batch, so a gate must not lie in another position's output."""
        fits = self.layout.width_cap <= self.layout.config.hidden or not self.layout.offloads
        return "d_moe_v" if fits else "d_moe_gate"

    def size_bytes(self, guard: bool = False) -> int:
        """Bytes of the arena.  guard: with a guard zone behind each span."""
        return arena_bytes(self.sizes.values(), guard)

    def span_bytes(self) -> dict[str, int]:
        """Bytes by name, the overlaid spans too; for people."""
        inside = self.shared | self.ring
        return self.sizes | {name: size for name, (_, size) in inside.items()}

    def buckets(self) -> tuple[int, ...]:
        """Launch grids' row counts: powers of two from 128 on, and `rows` itself."""
        found, rows = [], ROW_STEP
        while rows < self.rows:
            found.append(rows)
            rows *= 2
        return (*found, self.rows)

    def bucket(self, n_rows: int) -> int:
        """The smallest of `buckets` that holds n_rows (1..rows)."""
        return next(rows for rows in self.buckets() if rows >= n_rows)

    def member_offsets(self, name: str) -> tuple[list[int], list[int]]:
        """(x, out) byte offsets of a group's members in the spans d_x and d_out."""
        at_x, at_out = Cursor(), Cursor()
        x: list[int] = []
        out: list[int] = []
        for member in self.layout.groups[name].members:
            own = member.shares < 0
            x.append(at_x.take(self.image_bytes(member.k)) if own else x[member.shares])
            out.append(at_out.take(self.rows * member.n * 4))
        return x, out

    def image_bytes(self, k: int, rows: int = 0) -> int:
        """A tile image of `rows` rows (by default a chunk's): 64 x 64 halves an image."""
        return (rows or self.rows) * -(-k // 64) * 64 * 2

    def _private(self) -> dict[str, int]:
        c, rows = self.layout.config, self.rows
        blocks = rows // ROW_STEP * (c.n_experts + 1) * 4
        return {
            "d_streams": rows * c.n_streams * c.hidden * 4,
            "d_rinv": rows * c.n_streams * 4,
            "d_inject": rows * c.n_streams * 4,
            "d_m": rows * c.hidden * 4,
            "d_y": rows * c.hidden * 4,
            "d_rope": rows * c.rope_dim * 4,
            "d_rope_block": rows * c.rope_dim * 4,
            "d_routes": rows * self.layout.n_slots * t.ROUTE.itemsize,
            "d_counts": blocks,
            "d_starts": blocks,
            "d_pair_at": rows * self.layout.n_slots * 4,
            "d_pair_of": self.pairs[0] * 4,
        }

    def _mixer(self) -> dict[str, int]:
        """Of sites, mixers, router and n-grams: dead when the experts' operands are made."""
        c, rows = self.layout.config, self.rows
        groups = self.layout.groups
        x = out = 0
        for name in deep_groups(self.layout):
            at_x, at_out = self.member_offsets(name)
            members = groups[name].members
            x_span, out_span = deep_operands(groups[name])
            if x_span == "d_x":
                x = max(x, *(at + self.image_bytes(m.k) for at, m in zip(at_x, members, strict=True)))
            if out_span == "d_out":
                out = max(out, *(at + rows * m.n * 4 for at, m in zip(at_out, members, strict=True)))
        return {
            "d_wide": self.image_bytes(c.n_streams * c.hidden),
            "d_low": self.image_bytes(c.low_rank),
            "d_x": x,
            "d_out": out,
            "d_conv": rows * c.gdn_channels * 4,
            "d_gates": rows * c.gdn_value_heads * 2 * 4,
            "d_o": rows * c.gdn_value_width * 4,
            "d_q16": rows * c.query_width * 2,
            "d_iq16": rows * c.index_heads * c.index_dim * 2,
            "d_score": self.score_rows * self.layout.max_blocks * 4,
            "d_sel": rows * self.layout.budget * 4,
            "d_flag": rows * 4,
            "d_emb": self.image_bytes(c.ple_dim),
            "d_ple_in": rows * c.n_streams * c.hidden * 2,
            "d_ple_g": rows * c.n_streams * 4,
        }

    def _experts(self) -> dict[str, int]:
        hidden, pairs_cap = self.layout.config.hidden, self.pairs[0]
        spans = {
            "d_moe_x": 2 * self.image_bytes(hidden, pairs_cap),
            "d_moe_h": self.image_bytes(self.layout.width_cap, pairs_cap),
            "d_moe_v": pairs_cap * hidden * 4,
        }
        return spans | {self.gates: pairs_cap * max(hidden, self.layout.width_cap) * 4}


def deep_groups(layout: Layout) -> tuple[str, ...]:
    """The groups that a chunk meets: all but those of the head, which decode's kernels serve."""
    return tuple(name for name in layout.groups if name != "head" and not name.startswith("mixer."))


def deep_operands(group: Group) -> tuple[str, str]:
    """(x, out): spans of a group's tile images and of its finished sums.

    d_x and d_out have a place for each member.  out is "" where a kernel of its own ends the products.
    """
    x = {"x": "d_x", "n16": "d_wide", "u16": "d_low", "emb": "d_emb"}[group.x]
    if group.name.endswith(".up"):
        return x, ""
    return x, "d_y" if group.out == "y" else "d_out"


def deep_layouts(layout: Layout) -> tuple[DeepLayout, ...]:
    """The layouts worth reserving, largest first; empty when no segment of these limits goes deep.

    A given Limits.chunk makes one, for as many rows as the live sequences can hold; else there is one for
    each of 16384, 8192 .. 512 that is not larger than one sequence's context needs.
    """
    limits = layout.limits
    if limits.deep == "off":
        return ()
    return tuple(DeepLayout(layout, rows) for rows in _row_counts(limits) if rows)


def _row_counts(limits: Limits) -> list[int]:
    tokens = limits.context_tokens
    if limits.chunk:
        most = min(limits.chunk, tokens * limits.sequences)
        return [_rounded(most)] if most >= limits.deep_rows else []
    found: list[int] = []
    chunk = MAX_CHUNK
    while chunk >= SMALLEST_CHUNK:
        rows = _rounded(min(chunk, tokens))
        if rows not in found and min(chunk, tokens) >= limits.deep_rows:
            found.append(rows)
        chunk //= 2
    return found


def _rounded(rows: int) -> int:
    return -(-rows // ROW_STEP) * ROW_STEP


def _places(sizes: dict[str, int]) -> dict[str, tuple[int, int]]:
    at = Cursor()
    return {name: (at.take(size), size) for name, size in sizes.items()}


def _end(places: dict[str, tuple[int, int]]) -> int:
    return max(offset + aligned(size) for offset, size in places.values())
