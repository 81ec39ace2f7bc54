"""What a rank will allocate for given limits, before anything is: bytes by owner, device lines, the deep pass
that fits beside them, and, when the plan does not fit, settings that would.

Called by engine/rank.py while it opens and by `flashnext-drv plan`.  What must stay true: bytes by owner
equal the ledger's after the rank has opened; a setting is only named after the plan with it was found to fit.

    device memory   [ reserves | plan with the lines requested | deep pass and ring | more lines, up to most ]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..errors import CapacityError, UsageError, bytes_text
from ..model.deep_layout import DeepLayout, deep_layouts
from ..model.layout import BUCKETS, MAX_CHUNK, Layout, Limits, arena_bytes, seat_lines
from ..model.pack import PackBase
from ..model.plan import Plan, host_allowed
from ..model.rows import ngram_staging_bytes
from ..state import upload
from ..state.lines import layer_line_bytes
from ..state.ring import ring_bytes, ring_staging_bytes
from ..state.tables import shadow_bytes, staging_bytes
from ..state.weights import weight_bytes

__all__ = ["Seating", "Sizer", "plan"]

_MIB = 1 << 20


@dataclass(frozen=True)
class Seating:
    """How a rank takes its place in the memory that is free.

    plan: what it has after open; plan.lines device lines a layer.  deep: the layout of the deep pass for
    which there is room, None without; with Limits.deep "request" it is not in the plan yet, its room is kept.
    refused: why there is none.  chunk: most rows of a prompt's segment.
    """

    plan: Plan
    deep: DeepLayout | None
    refused: str
    chunk: int


def plan(
    layout: Layout,
    pack: PackBase,
    guard: bool = False,
    deep: DeepLayout | None = None,
    lines: int | None = None,
) -> Plan:
    """Bytes by owner of a rank with this layout; nothing is allocated.  As Sizer.plan."""
    return Sizer(pack, guard).plan(layout, deep, lines)


class Sizer:
    """Plans for one pack under any limits.  guard: with the guard zones that the simulator has."""

    def __init__(self, pack: PackBase, guard: bool = False) -> None:
        self._pack, self._guard = pack, guard
        self._line_bytes = [layer_line_bytes(pack, i) for i in range(pack.config.n_layers)]
        self._weights: dict[tuple[str, int], tuple[int, int]] = {}

    def plan(self, layout: Layout, deep: DeepLayout | None = None, lines: int | None = None) -> Plan:
        """Bytes by owner.  deep: with the buffers of the deep pass.  lines: device lines a layer, by default
        those requested."""
        limits, config, guard = layout.limits, layout.config, self._guard
        requested = config.n_experts if limits.expert_lines is None else limits.expert_lines
        requested = min(requested, config.n_experts)
        lines = requested if lines is None else lines
        weights, ngram = self._weight_bytes(layout)
        device = {
            "experts": arena_bytes([size * lines for size in self._line_bytes]),
            "weights": weights,
            "kv": arena_bytes([layout.n_pages * layout.pages.kv_bytes], guard),
            "index": arena_bytes([layout.n_pages * layout.pages.index_bytes], guard),
            "recurrent": arena_bytes([layout.recurrent.size_bytes] * limits.sequences, guard),
            "work": arena_bytes(layout.work.values(), guard),
            "tables": layout.table_bytes(),
        }
        pinned = {
            "ngram": ngram,
            "tables.staging": staging_bytes(layout),
            "draws": 8 * layout.rows_cap,
            "ahead": layout.ahead_bytes,
        }
        ring = (0, 0)
        if layout.offloads:
            pinned["experts.store"] = sum(self._line_bytes) * config.n_experts
        if deep is not None:
            device["deep"] = deep.size_bytes(guard)
            pinned["deep.staging"] = 2 * deep.sizes["tables"]
            if limits.ngram == "mapped":
                pinned["deep.ngram"] = ngram_staging_bytes(layout, self._pack, deep.rows)
            if layout.offloads:
                ring = (limits.ring_depth, min(limits.ring_lines, config.n_experts))
                device["ring"] = ring_bytes(layout, max(self._line_bytes), guard)
                pinned["ring.staging"] = ring_staging_bytes(deep)
        return Plan(
            device,
            pinned,
            host={"tables": shadow_bytes(layout)},
            opening={"upload.staging": 2 * upload.HALF_BYTES},
            lines=lines,
            lines_requested=requested,
            line_bytes=sum(self._line_bytes),
            pages=layout.n_pages,
            deep_rows=0 if deep is None else deep.rows,
            ring=ring,
        )

    def seat(self, layout: Layout, free_bytes: int | None, available_bytes: int | None) -> Seating:
        """Choose the deep pass and the device lines for the memory there is.

        free_bytes: of the device before any of the plan, None where it is not known: then everything fits
        and no line is added.  available_bytes: of the host, None where it is not known.
        Raises CapacityError when the plan without the deep pass and with the lines requested does not fit.
        """
        limits = layout.limits
        free = 1 << 60 if free_bytes is None else free_bytes
        base = self.plan(layout)
        base.require_fits(free, limits, available_bytes, lambda: self.nearest(limits, free, available_bytes))
        deep, refused, chunk = self._choose_deep(layout, free, available_bytes)
        lines = base.lines
        if layout.offloads and free_bytes is not None:
            room = self.plan(layout, deep).room(free, limits)
            lines = seat_lines(lines, limits.expert_lines_most, [room], base.line_bytes,
                               layout.config.n_experts, limits.uniform_lines)[0]
        at_open = self.plan(layout, deep if limits.deep == "open" else None, lines)
        return Seating(at_open, deep, refused, chunk)

    def nearest(self, limits: Limits, free_bytes: int | None, available_bytes: int | None) -> list[str]:
        """Settings with which the plan fits, each the nearest to what `limits` has; as text.

        One setting alone where that is enough, else one together with ngram, with no device lines, with both;
        when none of them is, what the smallest plan takes.
        """
        search = _Search(self, free_bytes, available_bytes)
        mapped: dict[str, Any] = {"ngram": "mapped"} if limits.ngram == "pinned" else {}
        no_lines = {} if limits.expert_lines == 0 else {"expert_lines": 0, "expert_lines_most": 0}
        tried: list[dict[str, Any]] = []
        found: list[str] = []
        for beside in ({}, mapped, no_lines, mapped | no_lines):
            if beside not in tried and not found:
                tried.append(beside)
                found = list(search.settings(limits, beside))
        if not found:
            least = self._plan_of(replace(limits, **_SMALLEST | mapped | no_lines))
            found.append(
                f"no setting alone is enough: the smallest plan takes {bytes_text(least.device_bytes)} of "
                f"device and {bytes_text(least.host_bytes)} of host memory"
            )
        planned = self._plan_of(limits)
        if mapped and not planned.fits(None, limits, available_bytes):
            less = planned.host_bytes - self._plan_of(replace(limits, **mapped)).host_bytes
            found.append(f"ngram='mapped' needs {bytes_text(less)} less of host memory")
        return found

    def fits(self, limits: Limits, free_bytes: int | None, available_bytes: int | None) -> bool:
        """Whether the plan fits, without the deep pass and with the lines requested."""
        return self._plan_of(limits).fits(free_bytes, limits, available_bytes)

    def _plan_of(self, limits: Limits) -> Plan:
        return self.plan(Layout(self._pack.config, limits))

    @property
    def n_experts(self) -> int:
        return self._pack.config.n_experts

    def _choose_deep(
        self, layout: Layout, free: int, available: int | None
    ) -> tuple[DeepLayout | None, str, int]:
        """(layout, why none, chunk): the largest deep layout that fits beside the plan."""
        limits = layout.limits
        choices = deep_layouts(layout)
        fitting = [deep for deep in choices if self.plan(layout, deep).fits(free, limits, available)]
        refused = ""
        if limits.deep == "off":
            refused = "Limits.deep is off"
        elif not choices:
            refused = f"no segment of these limits reaches Limits.deep_rows={limits.deep_rows} rows"
        elif not fitting:
            base, least = self.plan(layout), self.plan(layout, choices[-1])
            need, room = least.device_bytes - base.device_bytes, base.room(free, limits)
            refused = (
                f"the smallest deep buffers take {bytes_text(need)}, the plan leaves {bytes_text(room)}; "
                "lower Limits.chunk or give more device memory"
            )
            allowed = host_allowed(available, limits)
            if need <= room and allowed is not None:
                refused = (
                    f"the smallest deep buffers take {bytes_text(least.host_bytes - base.host_bytes)} of "
                    f"host memory, the plan leaves {bytes_text(allowed - base.host_bytes)}"
                )
        chunk = limits.chunk or ((fitting or choices)[0].rows if choices else MAX_CHUNK)
        return (fitting[0] if fitting else None), refused, chunk

    def _weight_bytes(self, layout: Layout) -> tuple[int, int]:
        key = (layout.limits.ngram, layout.rows_cap)
        if key not in self._weights:
            self._weights[key] = weight_bytes(layout, self._pack)
        return self._weights[key]


_SMALLEST = {"context_tokens": 64, "sequences": 1, "rows": 1, "prompt_rows": 1}


class _Search:
    """Looks for the nearest value of one setting at a time, under memory that is given."""

    def __init__(self, sizer: Sizer, free_bytes: int | None, available_bytes: int | None) -> None:
        self._sizer, self._free, self._available = sizer, free_bytes, available_bytes

    def settings(self, limits: Limits, beside: dict[str, Any]) -> Iterator[str]:
        """One text for each setting that makes the plan fit, together with `beside`."""
        base = replace(limits, **beside)
        suffix = f" with ngram={base.ngram!r}" if "ngram" in beside else ""
        if "expert_lines" in beside:
            suffix += f" with expert_lines={base.expert_lines}"
        if beside and self._fits(base):
            yield f"{suffix.removeprefix(' with ').replace(' with ', ' and ')} fits"
            return
        if "expert_lines" not in beside:
            yield from self._lines(base, suffix)
        for name, step in (("context_tokens", 64), ("sequences", 1)):
            yield from self._largest(base, name, getattr(base, name) - 1, step, suffix, least=step)
        for rows in reversed([bucket for bucket in BUCKETS if bucket < base.rows]):
            if self._fits(base, rows=rows, prompt_rows=min(base.prompt_rows, rows)):
                yield f"rows={rows}{suffix} fits"
                break
        reserves = ["server_reserve_bytes"]
        if base.expert_lines is not None:
            reserves.append("expert_reserve_bytes")
        for name in reserves:
            yield from self._largest(base, name, getattr(base, name) - 1, _MIB, suffix)
        if not beside and base.ngram == "pinned" and self._fits(base, ngram="mapped"):
            yield "ngram='mapped' fits"
        for name in ("device_bytes", "host_bytes"):
            if getattr(base, name) and self._fits(base, **{name: 0}):
                yield f"{name}=0{suffix} fits"

    def _lines(self, base: Limits, suffix: str) -> Iterator[str]:
        most = self._sizer.n_experts if base.expert_lines is None else base.expert_lines
        yield from self._largest(base, "expert_lines", min(most, self._sizer.n_experts) - 1, 1, suffix)
        if base.expert_lines is not None and self._fits(base, expert_lines=None, expert_lines_most=0):
            yield f"expert_lines=None{suffix} fits"

    def _largest(
        self, base: Limits, name: str, most: int, step: int, suffix: str, least: int = 0
    ) -> Iterator[str]:
        """The largest multiple of `step` in least..most with which the plan fits: more never fits better."""
        low, high = least // step, most // step
        if high < low or not self._fits(base, **{name: low * step}):
            return
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(base, **{name: middle * step}):
                low = middle
            else:
                high = middle - 1
        yield f"{name}={low * step}{suffix} fits"

    def _fits(self, base: Limits, **changes: Any) -> bool:
        try:
            return self._sizer.fits(replace(base, **changes), self._free, self._available)
        except (CapacityError, UsageError):  # a value that no engine takes
            return False
