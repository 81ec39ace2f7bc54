"""Staging of gathered n-gram rows is written only after its last reader: driver calls recorded, their order
checked by check/happens.py; a run that waits for one event less is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext_drv.check.happens import Access, Recorder, findings
from flashnext_drv.drv.stream import Event
from flashnext_drv.engine.engine import Engine, Limits, Prefill
from flashnext_drv.engine.prefill import Prompt, run_prompts
from flashnext_drv.errors import UsageError
from flashnext_drv.state.ngram import TableRows

from . import prompts

pytestmark = pytest.mark.sim
PATHS = {"rounds": Prefill(deep=False), "chunks": prompts.deep(chunk=12)}


@pytest.fixture(scope="module")
def engine(micro: Path, device: str) -> Iterator[Engine]:
    limits = Limits(context_tokens=96, rows=4, prompt_rows=4, deep_rows=2, graph=False, ngram="mapped")
    with Engine.open(micro, limits, device=device) as opened:
        yield opened


@contextmanager
def recorded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Record the driver calls made inside, what ngram_rows reads, and what the host writes into staging."""
    rank = engine.rank
    assert rank.ngram is not None and rank.deep is not None and rank.deep.ngram is not None
    spans = [*rank.deep.ngram.spans.values(), *(span for half in rank.ngram._halves for span in half[0])]
    arenas: list[Any] = [span.arena for span in spans]
    wide = rank.ngram.tables.row_bytes[0]
    real = TableRows.read

    def rows(args: Mapping[str, int], grid: tuple[int, int, int]) -> list[Access]:
        assert args["gathered"] == 1
        return [Access(args["table"], grid[1] * wide)]

    def read(self: TableRows, i_ple: int, token: Any, prev1: Any, prev2: Any, dest: np.ndarray) -> None:
        shift = next(a.address - a.host_address for a in arenas
                     if a.host_address <= dest.ctypes.data < a.host_address + a.size_bytes)
        written = Access(dest.ctypes.data + shift, len(token) * wide, write=True)
        recorder.host(f"gather of {len(token)} rows", written)
        real(self, i_ple, token, prev1, prev2, dest)

    recorder = Recorder(rank.ctx.function_names, {"ngram_rows": rows})
    with monkeypatch.context() as patch, recorder.on():
        patch.setattr(TableRows, "read", read)
        yield recorder


def run(engine: Engine, prefill: Prefill) -> None:
    """Rounds or chunks that the host does not wait for."""
    with engine.sequence() as sequence:
        sequence.extend(prompts.IDS[:36])
        run_prompts(engine.rank, [Prompt(sequence)], prefill, engine.prompts)


@pytest.mark.parametrize("path", PATHS)
def test_every_write_of_staging_follows_its_last_reader(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    with recorded(engine, monkeypatch) as recorder:
        run(engine, PATHS[path])
        run(engine, PATHS[path])
    gathers = [call for call in recorder.calls if call.text.startswith("gather")]
    readers = [call for call in recorder.calls if call.text == "ngram_rows"]
    assert len(gathers) == len(readers) == (18 if path == "rounds" else 6)
    assert not findings(recorder.calls)


@pytest.mark.parametrize(("path", "event"), [("rounds", "ngram.half0"), ("rounds", "ngram.half1"),
                                             ("chunks", "deep.ngram")])
def test_a_wait_left_out_is_reported(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, path: str, event: str
) -> None:
    real: Callable[[Event], None] = Event.synchronize
    with recorded(engine, monkeypatch) as recorder, monkeypatch.context() as patch:
        patch.setattr(Event, "synchronize", lambda self: None if self.name == event else real(self))
        run(engine, PATHS[path])
    found = findings(recorder.calls)
    assert found and all("gather" in text for text in found), found[:3]


def test_what_the_staging_needs_cannot_be_closed_before_it(engine: Engine) -> None:
    rank = engine.rank
    assert rank.deep is not None and rank.deep.ngram is not None
    assert all("ngram" in owner.borrowers() for owner in (rank.ctx, rank._work))
    assert {"deep.ngram", "ngram.half0", "ngram.half1"} <= set(rank.ctx.borrowers())
    assert rank.deep.ngram.holds == (rank.ctx,)
    for owner in (rank.ctx, rank._work):
        with pytest.raises(UsageError):
            owner.close()
    run(engine, PATHS["rounds"])
