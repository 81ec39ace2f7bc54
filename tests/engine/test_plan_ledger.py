"""A plan's bytes by owner are the ledger's after open, on every tier and under many limits; what the engine
reports is what was planned, and what does not fit is refused before anything is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashnext_drv.engine import rank as rank_module
from flashnext_drv.engine.engine import Engine, Limits
from flashnext_drv.engine.plan import Seating, Sizer
from flashnext_drv.errors import CapacityError
from flashnext_drv.host_memory import HostMemory, host_memory
from flashnext_drv.model.pack import Pack
from flashnext_drv.model.source import open_pack

pytestmark = pytest.mark.sim
LIMITS: dict[str, dict[str, Any]] = {
    "resident": {"deep": "off"},
    "resident, deep": {"deep_rows": 64, "chunk": 128},
    "resident, many": {"sequences": 3, "rows": 16, "prompt_rows": 16, "context_tokens": 300},
    "request": {"deep": "request", "deep_rows": 64, "chunk": 128},
    "no lines": {"expert_lines": 0, "deep": "off"},
    "lines": {"expert_lines": 5, "rows": 4, "prompt_rows": 2, "deep": "off"},
    "lines filled": {"expert_lines": 3, "expert_lines_most": 16, "deep": "off"},
    "all in lines": {"expert_lines": 1024, "deep": "off"},
    "ring": {"expert_lines": 2, "ring_depth": 3, "ring_lines": 2, "deep_rows": 64, "chunk": 128},
    "a wide ring": {"expert_lines": 0, "ring_depth": 1, "ring_lines": 1024, "deep_rows": 64, "chunk": 256},
    "mapped": {"ngram": "mapped", "deep": "off"},
    "mapped, deep": {"ngram": "mapped", "expert_lines": 4, "rows": 2, "deep_rows": 64, "chunk": 128},
}


@pytest.fixture
def seatings(monkeypatch: pytest.MonkeyPatch) -> list[Seating]:
    """What ranks were given while they opened."""
    kept: list[Seating] = []
    seat = Sizer.seat

    def keeping(self: Sizer, *args: Any) -> Seating:
        kept.append(seat(self, *args))
        return kept[-1]

    monkeypatch.setattr(Sizer, "seat", keeping)
    return kept


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("micro", name) for name in LIMITS),
        *(("mixed", name) for name in ("resident", "lines filled", "ring")),
    ],
)
def test_the_plan_is_the_ledger_after_open(
    kind: str, name: str, micro: Path, device: str, seatings: list[Seating]
) -> None:
    pack = Pack.open(micro) if kind == "micro" else open_pack("synth:micro?seed=2&mixed=1")
    limits = Limits(**{"context_tokens": 192, **LIMITS[name]})
    with Engine.open(pack, limits, device=device) as engine:
        planned = seatings[0].plan
        for tier in ("device", "pinned", "host"):
            assert engine.ledger.live(tier) == dict(getattr(planned, tier)), tier
        opening = {
            row.owner: row.peak_bytes
            for row in engine.ledger.table()
            if row.tier == "pinned" and not row.n_live
        }
        assert opening == dict(planned.opening)
        assert engine.rank.pages.free_pages == planned.pages
        assert (0 if engine.rank.deep is None else engine.rank.deep.layout.rows) == planned.deep_rows
        assert engine.rank.chunk == seatings[0].chunk
        if limits.expert_lines is not None:
            assert engine.rank.experts.n_lines == planned.lines
            assert engine.rank.experts.residents(engine.rank.stream).shape[1] == pack.config.n_experts
        assert (planned.deep_rows > 0) == (limits.deep == "open" and limits.deep_rows == 64)


def test_a_pass_made_later_takes_what_was_kept_for_it(
    micro: Path, device: str, seatings: list[Seating]
) -> None:
    limits = Limits(context_tokens=192, deep="request", deep_rows=64, chunk=128, expert_lines=2, ring_lines=3)
    with Engine.open(micro, limits, device=device) as engine:
        assert engine.rank.deep is None and seatings[0].deep is not None
        assert engine.rank.want_deep() is not None, engine.rank.deep_refused
        sizer = Sizer(engine.pack, engine.facts.is_simulator)
        planned = sizer.plan(engine.rank.layout, seatings[0].deep, seatings[0].plan.lines)
        assert {"deep", "ring"} <= set(planned.device)
        assert {"deep.staging", "ring.staging"} <= set(planned.pinned)
        for tier in ("device", "pinned", "host"):
            assert engine.ledger.live(tier) == dict(getattr(planned, tier)), tier


def test_free_memory_is_filled_with_lines_and_reserves_stay_free(micro: Path, device: str) -> None:
    """Two lines more fit exactly; the deep pass takes its place before lines do."""
    pack = Pack.open(micro)
    fields: dict[str, Any] = {
        "context_tokens": 192,
        "expert_lines": 3,
        "expert_lines_most": 16,
        "expert_reserve_bytes": 5 << 20,
        "server_reserve_bytes": 3 << 20,
    }
    for deep in ({"deep": "off"}, {"deep_rows": 64, "chunk": 128, "ring_lines": 2, "ring_depth": 2}):
        asked = Limits(**fields, **deep)
        with Engine.open(pack, asked, device=device) as engine:
            guard, layout = engine.facts.is_simulator, engine.rank.layout
            assert engine.rank.experts.n_lines == 16
            chosen = engine.rank.deep.layout if engine.rank.deep is not None else None
        base = Sizer(pack, guard).plan(layout, chosen)
        exact = base.device_bytes + (8 << 20) + 2 * base.line_bytes
        for size, lines in ((exact, 5), (exact - 1, 4), (exact - 2 * base.line_bytes, 3)):
            with Engine.open(pack, Limits(**fields, **deep, device_bytes=size), device=device) as engine:
                assert engine.rank.experts.n_lines == lines
                assert (engine.rank.deep is not None) == ("ring_lines" in deep), engine.rank.deep_refused
                assert sum(engine.ledger.live("device").values()) + (8 << 20) <= size


def test_what_does_not_fit_is_refused_before_anything_is_taken(
    micro: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(match: str, **fields: Any) -> None:
        with pytest.raises(CapacityError, match=match):
            Engine.open(micro, Limits(**{"context_tokens": 192, "deep": "off", **fields}), device=device)

    refused("exceed device memory", server_reserve_bytes=1 << 49)
    refused("exceed device memory", expert_lines=2, expert_reserve_bytes=1 << 49)
    refused("host memory .*Limits.host_bytes allows 1.0 MiB; largest owner upload", host_bytes=1 << 20)
    refused("expert_reserve_bytes=16777216 fits", expert_lines=2, device_bytes=20 << 20)
    small = HostMemory(1 << 30, 1 << 30, (1 << 30) + (70 << 20), "MemAvailable", None)
    monkeypatch.setattr(rank_module, "host_memory", lambda: small)
    with Engine.open(micro, Limits(context_tokens=192, deep="off"), device=device):
        pass
    refused("are available, of which 1.1 GiB stay in reserve", host_reserve_bytes=1126 << 20)
    refused("host memory", host_bytes=1 << 40, host_reserve_bytes=1126 << 20)
    monkeypatch.undo()
    assert host_memory().available_bytes is not None
