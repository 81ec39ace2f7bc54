"""What opening leaves behind: nothing pending, owners that hold what they use, staging not overwritten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flashnext_drv.drv import faults
from flashnext_drv.engine.engine import Engine, Limits
from flashnext_drv.engine.round import Window, run_round
from flashnext_drv.errors import CapacityError, DriverError, UsageError
from flashnext_drv.lifetime import Owner
from flashnext_drv.sim import control
from flashnext_drv.state import upload

pytestmark = pytest.mark.sim
IDS = [11, 22, 33]


def test_an_open_engine_has_nothing_pending(open_micro: Callable[..., Engine]) -> None:
    """Weights are placed and a first round has run: what fails at all fails here, not in a request."""
    with open_micro() as engine:
        assert engine.rank.stream.query()


def test_staging_goes_only_after_its_copies(micro: Path, device: str) -> None:
    with faults.count_calls() as count:
        engine = Engine.open(micro, Limits(context_tokens=64), device=device)
    names = count.names
    freed = names.index("cuMemFreeHost")
    last_copy = max(i for i, name in enumerate(names[:freed]) if name == "cuMemcpyAsync")
    assert "cuStreamSynchronize" in names[last_copy:freed]
    engine.close()


def test_every_owner_of_a_rank_holds_what_it_uses(open_micro: Callable[..., Engine]) -> None:
    with open_micro() as engine:
        engine.generate(IDS, max_new_tokens=2, stop_ids=())
        rank = engine.rank
        assert {"compute", "round.done", "kernels", "tables", "pages", "slots", "work", "draws", "weights",
                "experts", "graphs", "tables.staging", "kv", "index", "recurrent", "ngram"} <= set(
                    rank.ctx.borrowers())
        for owner in (rank.stream, rank._done, rank.kernels, rank.tables, rank.tables.arena, rank.pages,
                      rank.slots, rank._work, rank._draws, rank.weights, rank.experts, rank.graphs,
                      *rank.pages.arenas, *rank.slots.arenas):
            assert rank.ctx in owner.holds, owner
        assert set(rank.tables.borrowers()) >= {"pages", "slots", "graphs"}
        used: list[Owner] = [rank.ctx, rank.tables, rank.pages, rank.slots, rank.weights, rank.experts,
                             rank.kernels, rank._work]
        graphs = {str(identity) for identity in rank.graphs.identities()}
        assert {name.split(".")[0] for name in graphs} >= {"body", "head"}
        for owner in used:
            assert graphs <= set(owner.borrowers()) or owner.name == "context", owner
            with pytest.raises(UsageError, match="cannot be closed"):
                owner.close()
            assert not owner.closed


@pytest.mark.parametrize("seed", [0, 3])
def test_small_staging_halves_take_turns_without_overwriting(
    micro: Path, device: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Both halves are used many times: each is written again only after the event of its last copy."""
    limits = Limits(context_tokens=64)
    with Engine.open(micro, limits, device=device) as engine:
        wanted = engine.logits(IDS).tobytes()
    monkeypatch.setattr(upload, "HALF_BYTES", 24 << 10)
    if device == "sim":
        control.set_seed(seed)
    try:
        with faults.count_calls() as count, Engine.open(micro, limits, device=device) as engine:
            assert count.names.count("cuEventSynchronize") > 10
            assert engine.logits(IDS).tobytes() == wanted
    finally:
        if device == "sim":
            control.set_seed(0)


def test_staged_pieces_start_at_multiples_of_256(
    open_micro: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[int] = []
    send = upload.Uploader._send

    def noted(self: upload.Uploader, address: int, size: int) -> None:
        starts.append(self._at)
        send(self, address, size)

    monkeypatch.setattr(upload.Uploader, "_send", noted)
    with open_micro():
        assert len(starts) > 100 and all(at % 256 == 0 for at in starts)
        assert len(set(starts)) == len(starts), "two pieces share a place"


def test_an_observed_launch_is_done(open_micro: Callable[..., Engine]) -> None:
    with open_micro() as engine:
        idle: list[bool] = []
        engine.rank.observer = lambda launch: idle.append(engine.rank.stream.query())
        engine.logits(IDS)
        assert len(idle) == 3 * len(engine.rank.launches("token", 1)) and all(idle)


def test_slots_and_pages_come_back_and_go_round(open_micro: Callable[..., Engine]) -> None:
    with open_micro(sequences=2, context_tokens=130) as engine:
        slots, pages = engine.rank.slots, engine.rank.pages
        assert (slots.free_slots, pages.free_pages) == (2, 6)
        for _ in range(3):
            with engine.sequence() as one, engine.sequence() as two:
                assert {one.i_slot, two.i_slot} == {0, 1} and slots.free_slots == 0
                pages.reserve(one.i_slot, 64)
                pages.reserve(two.i_slot, 65)
                assert [len(pages.pages_of(s.i_slot)) for s in (one, two)] == [1, 2]
                assert not set(pages.pages_of(0)) & set(pages.pages_of(1)) and pages.free_pages == 3
                pages.reserve(one.i_slot, 1)
                assert pages.free_pages == 3, "pages a slot has stay"
                pages.reserve(one.i_slot, 130)
                with pytest.raises(CapacityError, match="page_row=3"):
                    pages.reserve(one.i_slot, 193)
                assert (len(pages.pages_of(one.i_slot)), pages.free_pages) == (3, 1)
            assert (slots.free_slots, pages.free_pages) == (2, 6)
        with pytest.raises(UsageError, match="holds none"):
            pages.release(0)
        with pytest.raises(UsageError, match="given back twice"):
            slots.give_back(0)


def test_all_pages_of_a_pool_can_be_taken(open_micro: Callable[..., Engine]) -> None:
    with open_micro(sequences=1, context_tokens=128) as engine, engine.sequence() as sequence:
        engine.rank.pages.reserve(sequence.i_slot, 128)
        assert engine.rank.pages.free_pages == 0
        rows = engine.rank.tables.pages[sequence.i_slot]
        assert len(np.unique(rows["kv"])) == len(np.unique(rows["index"])) == 2
        with pytest.raises(CapacityError, match="no pages are left"):
            engine.rank.pages.reserve(sequence.i_slot, 129)


def test_a_fresh_slot_is_zeroed(open_micro: Callable[..., Engine]) -> None:
    with open_micro() as engine:
        first = engine.logits(IDS)
        assert engine.logits(IDS).tobytes() == first.tobytes()
        failing = pytest.raises(DriverError, match="cuMemsetD8Async")
        with faults.fail_nth(1, 1, only="cuMemsetD8Async"), failing, engine.sequence():
            pass
        assert engine.rank.slots.free_slots == 1, "a slot that could not be zeroed stays free"
        assert engine.logits(IDS).tobytes() == first.tobytes()


def test_pages_reserved_beyond_the_next_row_change_nothing(open_micro: Callable[..., Engine]) -> None:
    with open_micro(context_tokens=192) as engine:
        wanted = engine.logits(IDS).tobytes()
        with engine.sequence() as sequence:
            engine.rank.pages.reserve(sequence.i_slot, 192)
            sequence.extend(IDS)
            rows = [run_round(engine.rank, [Window(sequence, 1, logits=True)]).logits for _ in IDS]
        assert b"".join(row.tobytes() for row in rows if row is not None) == wanted


def test_staging_is_two_halves_and_gone_after_opening(open_micro: Callable[..., Engine]) -> None:
    with open_micro() as engine:
        row = next(row for row in engine.ledger.table() if row.owner == "upload.staging")
        assert (row.n_live, row.peak_bytes) == (0, 2 * upload.HALF_BYTES)
