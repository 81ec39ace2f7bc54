"""A row's bytes depend on its own earlier tokens and on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from flashnext_drv.engine.engine import Engine, Limits, Sampling

pytestmark = pytest.mark.sim
IDS = [3, 7, 250, 12, 12, 400, 9, 77, 500, 1, 7, 33, 64, 5, 88, 301, 2]  # more than a launch's 16 rows
LONG = [(i * 37 + 11) % 512 for i in range(134)]  # in three pages


@pytest.fixture(scope="module")
def oracle(micro: Path, device: str) -> np.ndarray:
    """Logits of IDS by serial eager decode, one row a launch."""
    with Engine.open(micro, Limits(context_tokens=512, graph=False), device=device) as engine:
        return engine.logits(IDS)


@pytest.mark.parametrize("prompt_rows", [2, 3, 7, 16])
@pytest.mark.parametrize("graph", [False, True])
def test_rows_of_one_launch_equal_serial_decode(
    open_micro: Callable[..., Engine], oracle: np.ndarray, prompt_rows: int, graph: bool
) -> None:
    with open_micro(rows=prompt_rows, prompt_rows=prompt_rows, graph=graph) as engine:
        assert engine.logits(IDS).tobytes() == oracle.tobytes()


@pytest.mark.parametrize("n_mates", [1, 2, 6, 15])
def test_row_among_other_sequences_equals_row_alone(
    open_micro: Callable[..., Engine], oracle: np.ndarray, feed: Callable[..., list[np.ndarray]], n_mates: int
) -> None:
    with open_micro(rows=16, sequences=n_mates + 1) as engine, ExitStack() as stack:
        sequences = [stack.enter_context(engine.sequence()) for _ in range(n_mates + 1)]
        place = n_mates // 2
        for i, sequence in enumerate(sequences):
            ids = IDS if i == place else [(17 * i + 5 * j) % 512 for j in range(len(IDS))]
            sequence.extend(ids)
        for i_row in range(len(IDS)):
            logits = feed(engine, sequences, 1)[place]
            assert logits.tobytes() == oracle[i_row : i_row + 1].tobytes(), f"row {i_row}"


@pytest.fixture(scope="module")
def expected(micro: Path, device: str) -> bytes:
    """Of the last ten rows of LONG, pages in rising order."""
    with Engine.open(micro, Limits(context_tokens=512, rows=16, prompt_rows=16), device=device) as engine:
        return engine.logits(LONG, rows=(124, 134)).tobytes()


@pytest.mark.parametrize("page_order", ["reversed", "shuffled:5"])
def test_page_order_does_not_change_bytes(
    open_micro: Callable[..., Engine], expected: bytes, page_order: str
) -> None:
    limits = {"rows": 16, "prompt_rows": 16, "page_order": page_order, "sequences": 2}
    with open_micro(**limits) as engine, engine.sequence() as other:
        other.extend(LONG[::-1])
        engine.rank.pages.reserve(other.i_slot, 200)
        assert engine.logits(LONG, rows=(124, 134)).tobytes() == expected


def test_slot_used_before_gives_the_same_bytes(open_micro: Callable[..., Engine], oracle: np.ndarray) -> None:
    with open_micro() as engine:
        engine.logits(IDS[::-1])
        assert engine.logits(IDS).tobytes() == oracle.tobytes()
        assert engine.rank.pages.free_pages == engine.rank.layout.n_pages


def test_sampled_tokens_do_not_depend_on_graph_or_prompt_cut(open_micro: Callable[..., Engine]) -> None:
    sampling = Sampling(temperature=1.0, top_k=50, top_p=0.95, min_p=0.01, seed=11)
    replies = []
    for limits in ({"graph": False}, {"graph": True}, {"rows": 7, "prompt_rows": 7}):
        with open_micro(**limits) as engine:
            replies.append(engine.generate(IDS, max_new_tokens=12, sampling=sampling, stop_ids=()))
    assert len({reply.sha256 for reply in replies}) == 1
    assert replies[0].counters["graph_replays"] == 0 and replies[0].counters["eager_rounds"] == len(IDS) + 11
    assert replies[1].counters["graph_replays"] == len(IDS) + 11 and replies[1].counters["eager_rounds"] == 0
    assert len(replies[0].tokens) == 12


def test_another_seed_draws_other_tokens(open_micro: Callable[..., Engine]) -> None:
    with open_micro() as engine:
        replies = {
            engine.generate(
                IDS, max_new_tokens=12, stop_ids=(), sampling=Sampling(temperature=1.5, seed=seed)
            ).sha256
            for seed in range(3)
        }
    assert len(replies) == 3
