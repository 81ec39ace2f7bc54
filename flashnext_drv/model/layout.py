"""Limits, and from them sizes and offsets of everything an engine allocates.

Pure arithmetic over the configuration: no driver, no files.  engine/rank.py allocates exactly what stands
here, and the names here are the owners in the ledger.  State geometry (pages, recurrent slots) is a byte form
that kernels share, see KV and recurrent offsets below.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import CapacityError, UsageError
from ..kernels import tables as t
from ..kernels.exl3 import dot_segments, gu_segments
from .config import ModelConfig
from .linears import Group, model_groups

__all__ = [
    "BUCKETS",
    "CONTEXT_BUCKET",
    "COUNTED_PATHS",
    "DEEP_MODES",
    "MAX_CHUNK",
    "MAX_LINES",
    "MOST_EDITS",
    "NGRAM_MODES",
    "Cursor",
    "Layout",
    "Limits",
    "PageGeometry",
    "RecurrentGeometry",
    "aligned",
    "arena_bytes",
    "bucket_of",
    "seat_lines",
]

BUCKETS = (1, 2, 4, 8, 16)
COUNTED_PATHS = 8  # kinds of graphs whose replays the device may count apart
CONTEXT_BUCKET = 2048  # tokens that the attention grids of the smallest round reach
MAX_CHUNK = 16384
DEEP_MODES = ("open", "request", "off")
NGRAM_MODES = ("pinned", "mapped")
MAX_LINES = 1024  # what a router kernel chooses from
MOST_EDITS = 1024  # ids that one sequence may bias or forbid
ALIGN = 256
_PAGE_ORDER = re.compile(r"forward|reversed|shuffled:[0-9]{1,18}")


@dataclass(frozen=True)
class Limits:
    """What an engine may use.

    context_tokens: longest sequence, prompt and output.  sequences: live at one time.  rows: most rows of one
    launch round, 1..16.  prompt_rows: prompt tokens a launch takes at once, 1..rows; any value gives the same
    bytes.
    device_bytes: device memory that the engine counts with, 0 = what the driver reports free less
    reserve_bytes; the plan and the reserves of experts and server must fit into it.
    graph: replay captured graphs in decode and in chunks of prompts.  graphs: executables kept at most, those
    used longest ago go first; of chunks so many whole walks.  graph_floor_bytes: free device memory below
    which the oldest quarter of them goes; 0 = half of reserve_bytes.  graph_after: 1 makes a graph for the
    first round of its kind (of chunks, the second), 2 for the one after it.
    graph_async: executables are made on another thread while rounds run eagerly.
    steps_ahead: most tokens that decode draws before the host looks at them, 1..64.
    primary_context: use the device's primary context instead of an own one.
    page_order: "forward", "reversed" or "shuffled:<seed>": which physical pages a sequence is given.
    chunk: most rows of a prompt's segment, 1..16384; 0 = what the memory plan allows (`deep_layouts`).
    deep: buffers of the deep prompt pass: "open" reserves them at open, "request" at the first prompt that
    wants them, "off" never.  Refused buffers change time only.
    deep_rows: segments of at least so many rows take the deep pass.  Where no segment can hold that many,
    nothing is reserved.
    expert_lines: device lines a layer for routed experts, the experts lying in pinned host memory; None = all
    experts on the device and none on the host.  expert_lines_most: lines a layer that free device memory may
    be filled up to; 0 = expert_lines alone.  expert_reserve_bytes, server_reserve_bytes: device memory that
    lines leave free, the second also without expert_lines.  uniform_lines: every rank takes the fewest lines
    that any of them has room for.
    ring_depth, ring_lines: banks of the ring that the deep pass streams experts through, and lines of each.
    ring_prefetch: fill banks for the next layer before its routing is known.
    ngram: the n-gram table in "pinned" memory, or "mapped": read from the pack as rows are asked for.
    host_bytes: most host memory the plan may take, 0 = all but host_reserve_bytes of what the system reports
    available, which no plan goes beyond.
    None of these changes a byte of any result.
    """

    context_tokens: int = 4096
    sequences: int = 1
    rows: int = 1
    prompt_rows: int = 1
    device_bytes: int = 0
    reserve_bytes: int = 256 << 20
    graph: bool = True
    graphs: int = 64
    graph_floor_bytes: int = 0
    graph_after: int = 1
    graph_async: bool = False
    steps_ahead: int = 4
    primary_context: bool = False
    page_order: str = "forward"
    chunk: int = 0
    deep: str = "open"
    deep_rows: int = 512
    expert_lines: int | None = None
    expert_lines_most: int = 0
    expert_reserve_bytes: int = 512 << 20
    server_reserve_bytes: int = 0
    uniform_lines: bool = False
    ring_depth: int = 4
    ring_lines: int = 64
    ring_prefetch: bool = True
    ngram: str = "pinned"
    host_bytes: int = 0
    host_reserve_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        ranges = (
            ("context_tokens", 1, 1 << 20),
            ("sequences", 1, 4096),
            ("rows", 1, 16),
            ("prompt_rows", 1, 16),
            ("device_bytes", 0, 1 << 50),
            ("graphs", 2, 4096),
            ("graph_floor_bytes", 0, 1 << 50),
            ("graph_after", 1, 2),
            ("steps_ahead", 1, 64),
            ("reserve_bytes", 0, 1 << 50),
            ("chunk", 0, MAX_CHUNK),
            ("deep_rows", 1, 1 << 20),
            ("expert_lines", 0, MAX_LINES),
            ("expert_lines_most", 0, MAX_LINES),
            ("expert_reserve_bytes", 0, 1 << 50),
            ("server_reserve_bytes", 0, 1 << 50),
            ("ring_depth", 1, 64),
            ("ring_lines", 1, MAX_LINES),
            ("host_bytes", 0, 1 << 50),
            ("host_reserve_bytes", 0, 1 << 50),
        )
        for name, low, high in ranges:
            value = getattr(self, name)
            if name == "expert_lines" and value is None:
                continue
            if not isinstance(value, int) or not low <= value <= high:
                raise UsageError(f"limit {name} is outside its range", value=value, range=f"{low}..{high}")
        if self.expert_lines_most and self.expert_lines is None:
            raise UsageError(
                "expert_lines_most needs expert_lines",
                expert_lines_most=self.expert_lines_most,
                do="give expert_lines too: experts are all on the device without it",
            )
        if self.prompt_rows > self.rows:
            raise UsageError(
                "prompt_rows is larger than rows",
                prompt_rows=self.prompt_rows,
                rows=self.rows,
                do="raise rows or lower prompt_rows",
            )
        if not isinstance(self.deep, str) or self.deep not in DEEP_MODES:
            raise UsageError("deep is not known", value=self.deep, do=f"use one of {', '.join(DEEP_MODES)}")
        if not isinstance(self.ngram, str) or self.ngram not in NGRAM_MODES:
            raise UsageError("ngram is not known", value=self.ngram,
                             do=f"use one of {', '.join(NGRAM_MODES)}")
        if not isinstance(self.page_order, str) or not _PAGE_ORDER.fullmatch(self.page_order):
            raise UsageError(
                "page_order is not known",
                value=self.page_order,
                do='use "forward", "reversed" or "shuffled:<seed>"',
            )


def bucket_of(n_rows: int) -> int:
    """Smallest row bucket that holds n_rows (1..16)."""
    return next(bucket for bucket in BUCKETS if bucket >= n_rows)


@dataclass(frozen=True)
class RecurrentGeometry:
    """A sequence's recurrent slot, bytes from its start.

    Per GDN layer: state f32 [n_v][128 v columns][128 k rows], conv tail f16 [3][channels]; per PLE layer its
    conv tail f16 [9][4 H].  Every part starts at a multiple of 256.
    """

    state: Mapping[int, int]
    tail: Mapping[int, int]
    ple_tail: Mapping[int, int]
    size_bytes: int

    @classmethod
    def of(cls, config: ModelConfig) -> RecurrentGeometry:
        at = Cursor()
        state: dict[int, int] = {}
        tail: dict[int, int] = {}
        for i_layer, kind in enumerate(config.layer_kinds):
            if kind == "gdn":
                state[i_layer] = at.take(config.gdn_value_heads * 128 * 128 * 4)
                tail[i_layer] = at.take(3 * config.gdn_channels * 2)
        past = (config.ple_taps - 1) * config.ngram_size
        ple = {i: at.take(past * config.n_streams * config.hidden * 2) for i in config.ple_layers}
        return cls(state, tail, ple, at.size_bytes)


@dataclass(frozen=True)
class PageGeometry:
    """A page of 64 tokens over all attention layers, bytes from the page's two starts.

    kv: per layer K f16 [64][n_kv][256], then V of the same shape.  index: per layer raw keys f16 [64][128],
    then pooled keys f16 [16][128].
    """

    kv: Mapping[int, int]
    index: Mapping[int, int]
    kv_bytes: int
    index_bytes: int

    @classmethod
    def of(cls, config: ModelConfig) -> PageGeometry:
        kv, index = Cursor(), Cursor()
        layers = [i for i, kind in enumerate(config.layer_kinds) if kind == "qsa"]
        kv_bytes = 2 * t.PAGE_TOKENS * config.n_kv_heads * config.head_dim * 2
        index_bytes = (t.PAGE_TOKENS + t.PAGE_TOKENS // config.index_ratio) * config.index_dim * 2
        return cls(
            {i: kv.take(kv_bytes) for i in layers},
            {i: index.take(index_bytes) for i in layers},
            kv.size_bytes,
            index.size_bytes,
        )


@dataclass
class Layout:
    """Everything the engine's arenas hold, for one configuration and limits.

    groups: the dense linears by launch.  recurrent, pages: byte forms of a sequence's state.  work: bytes of
    each scratch span, by name.
    """

    config: ModelConfig
    limits: Limits
    groups: dict[str, Group] = field(init=False)
    recurrent: RecurrentGeometry = field(init=False)
    pages: PageGeometry = field(init=False)
    work: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.groups = model_groups(self.config)
        self.recurrent = RecurrentGeometry.of(self.config)
        self.pages = PageGeometry.of(self.config)
        if self.limits.context_tokens > self.config.max_positions:
            raise CapacityError(
                "the context is longer than the model's positions",
                context_tokens=self.limits.context_tokens,
                max_positions=self.config.max_positions,
                do="lower context_tokens",
            )
        self.work = self._work()

    @property
    def rows_cap(self) -> int:
        return bucket_of(self.limits.rows)

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.limits.context_tokens // t.PAGE_TOKENS)

    @property
    def n_pages(self) -> int:
        return self.pages_per_sequence * self.limits.sequences

    @property
    def page_form(self) -> str:
        """Number and bytes of pages, and how many a sequence has: what graphs are told apart by."""
        sizes = f"{self.pages.kv_bytes}+{self.pages.index_bytes}"
        return f"{self.n_pages}x{sizes}/{self.pages_per_sequence}"

    @property
    def n_slots(self) -> int:
        """Slots of an expert round: the chosen experts and the shared one."""
        return self.config.n_active + 1

    @property
    def offloads(self) -> bool:
        """Whether the routed experts lie in host memory, with lines of them on the device."""
        return self.limits.expert_lines is not None

    @property
    def lines_cap(self) -> int:
        """Most device lines a layer may be given; 0 when nothing is offloaded."""
        most = max(self.limits.expert_lines or 0, self.limits.expert_lines_most) if self.offloads else 0
        return min(most, self.config.n_experts)

    @property
    def width_cap(self) -> int:
        return max(self.config.moe_width, self.config.shared_width)

    @property
    def max_blocks(self) -> int:
        """Complete index blocks of the longest sequence, rounded up to a warp's 16."""
        return self.blocks_of(self.limits.context_tokens)

    def blocks_of(self, context: int) -> int:
        """Complete index blocks of `context` tokens, rounded up to a warp's 16."""
        return -(-(context // self.config.index_ratio) // 16) * 16 or 16

    @property
    def budget(self) -> int:
        return self.config.index_budget // self.config.index_ratio

    @property
    def max_parts(self) -> int:
        """Attention parts of 64 list entries: the selected blocks' tokens and a tail, or the whole
        context."""
        return self.parts_of(self.limits.context_tokens)

    def parts_of(self, context: int) -> int:
        """Attention parts of a sequence of up to `context` tokens."""
        return -(-min(self.config.index_budget + self.config.index_ratio - 1, context) // 64)

    def context_bucket(self, n_tokens: int) -> int:
        """Smallest of CONTEXT_BUCKET * 2^i that holds n_tokens, at most Limits.context_tokens."""
        bucket = CONTEXT_BUCKET
        while bucket < n_tokens:
            bucket *= 2
        return min(bucket, self.limits.context_tokens)

    @property
    def moe_units(self) -> tuple[int, int]:
        """Most segments of the gate/up and of the down projections over routed and shared widths."""
        hidden, widths = self.config.hidden, (self.config.moe_width, self.config.shared_width)
        return (
            max(gu_segments(hidden, w) for w in widths),
            max(dot_segments(w, hidden, 1) for w in widths),
        )

    def member_offsets(self, name: str) -> tuple[list[int], list[int], list[int]]:
        """(x, part, out) byte offsets of a group's members in the scratch spans x, part and out."""
        rows, group = self.rows_cap, self.groups[name]
        at_x, at_part, at_out = Cursor(), Cursor(), Cursor()
        x: list[int] = []
        part: list[int] = []
        out: list[int] = []
        for member in group.members:
            x.append(x[member.shares] if member.shares >= 0 else at_x.take(rows * member.k * 2))
            part.append(at_part.take(member.units * rows * member.n * 4))
            out.append(at_out.take(rows * member.n * 4))
        return x, part, out

    @property
    def ahead_bytes(self) -> int:
        """The pinned ring of drawn tokens, FnDrawn (sequences, steps_ahead)."""
        return self.limits.sequences * self.limits.steps_ahead * t.DRAWN.itemsize

    @property
    def edit_cap(self) -> int:
        """Entries of a slot's list of logit edits: as many ids as its sequence can hold or bias."""
        return min(self.config.vocab, self.limits.context_tokens + MOST_EDITS)

    @property
    def edit_bytes(self) -> int:
        """A slot's head and list of logit edits."""
        return t.EDITS.itemsize + self.edit_cap * t.EDIT.itemsize

    def table_bytes(self) -> int:
        """The tables arena: round rows, slots, pages, logit edits, linear descriptors, expert lines, line
        caches."""
        at = Cursor()
        at.take(
            t.ROUND.itemsize
            + self.rows_cap * (t.ROW.itemsize + t.RUN.itemsize)
            + self.limits.sequences * (t.SLOT.itemsize + t.AHEAD.itemsize)
        )
        at.take(self.limits.sequences * self.pages_per_sequence * t.PAGE.itemsize)
        at.take(self.limits.sequences * self.edit_bytes)
        for group in self.groups.values():
            at.take(len(group.members) * t.LINEAR.itemsize)
        for _ in range(self.config.n_layers):
            at.take((self.config.n_experts + 1) * t.LINE.itemsize)
        if self.offloads:
            at.take(self.config.n_layers * t.CACHE.itemsize)
            at.take(self.config.n_layers * self.config.n_experts * t.HOME.itemsize)
            at.take(max(self.config.n_layers * self.lines_cap * t.USE.itemsize, 1))
        return at.size_bytes

    def _work(self) -> dict[str, int]:
        c, rows = self.config, self.rows_cap
        wide, gu_units, down_units = c.n_streams * c.hidden, *self.moe_units
        sizes = {
            "streams": wide * 4,
            "n16": wide * 2,
            "rinv": c.n_streams * 4,
            "inject": c.n_streams * 4,
            "u16": c.low_rank * 2,
            "m": c.hidden * 4,
            "y": c.hidden * 4,
            "conv": c.gdn_channels * 4,
            "o": c.gdn_value_heads * 128 * 4,
            "q16": c.n_heads * c.head_dim * 2,
            "iq16": c.index_heads * c.index_dim * 2,
            "score": self.max_blocks * 4,
            "sel": self.budget * 4,
            "flag": 4,
            "part_m": c.n_heads * self.max_parts * 4,
            "part_l": c.n_heads * self.max_parts * 4,
            "part_o": c.n_heads * self.max_parts * c.head_dim * 4,
            "rope": c.rope_dim * 4,
            "rope_block": c.rope_dim * 4,
            "emb": c.ple_dim * 2,
            "routes": self.n_slots * t.ROUTE.itemsize,
            "moe_x": self.n_slots * 2 * c.hidden * 2,
            "moe_h": self.n_slots * self.width_cap * 2,
            "moe_part": self.n_slots * 4 * max(gu_units * 2 * self.width_cap, down_units * c.hidden),
            "logits": c.vocab * 4,
            "tokens": 4,
            "status": 4,
        }
        work = {name: rows * size for name, size in sizes.items()}
        work["counts"] = 16 * COUNTED_PATHS
        if self.offloads:  # distinct experts of a round's rows
            work["fills"] = max(min(rows * c.n_active, self.lines_cap), 1) * t.FILL.itemsize
        if self.limits.ngram == "mapped":  # no row is wider than plain ones
            work["ngram"] = len(c.ple_layers) * aligned(rows * c.n_ngram_heads * 2 * c.ngram_row_dim)
        for i_span, name in enumerate(("x", "part", "out")):
            work[name] = max(self._group_end(group, i_span) for group in self.groups)
        return work

    def _group_end(self, name: str, i_span: int) -> int:
        members, rows = self.groups[name].members, self.rows_cap
        offsets = self.member_offsets(name)[i_span]
        size = [m.k * 2 if i_span == 0 else m.n * 4 * (m.units if i_span == 1 else 1) for m in members]
        return max(offset + rows * width for offset, width in zip(offsets, size, strict=True))


def seat_lines(
    requested: int, most: int, rooms: Sequence[int], line_bytes: int, n_experts: int, uniform: bool = False
) -> list[int]:
    """Device lines a layer for each rank: those requested, and free memory filled with more.

    requested: a floor, paid for before the rooms were measured.  most: lines that free memory is filled up
    to; no more than requested fills nothing.  rooms: bytes a rank has left after the plan with the requested
    lines.  line_bytes: of one more line in every layer.  uniform: all ranks take the fewest of any.
    """
    floor = min(requested, n_experts)
    extra = max(min(most, n_experts) - floor, 0)
    lines = [floor + (min(extra, max(room, 0) // line_bytes) if line_bytes else extra) for room in rooms]
    return [min(lines)] * len(lines) if uniform and lines else lines


def aligned(size_bytes: int) -> int:
    """size_bytes rounded up to the alignment of spans."""
    return -(-size_bytes // ALIGN) * ALIGN


def arena_bytes(sizes: Iterable[int], guard: bool = False) -> int:
    """Bytes of an arena that holds spans of these sizes one after another; guard: with a guard zone behind
    each."""
    return max(sum(aligned(size + (ALIGN if guard else 0)) for size in sizes), ALIGN)


class Cursor:
    """Hands out consecutive offsets, each a multiple of ALIGN."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def take(self, size_bytes: int) -> int:
        at = self.size_bytes
        self.size_bytes = at + aligned(size_bytes)
        return at
