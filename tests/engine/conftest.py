"""What the engine tests share: the golden micro pack, and forwards with their choices read back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext_drv.drv.memory import copy_to_host
from flashnext_drv.drv.module import Launch
from flashnext_drv.engine.engine import Engine, Limits
from flashnext_drv.engine.prefill import Prefill, Prompt, run_prompts
from flashnext_drv.engine.round import Window, run_round
from flashnext_drv.kernels.tables import ROUTE

from . import prompts

MICRO = Path(__file__).parents[1] / "data" / "exl3_micro"


@pytest.fixture(scope="session")
def device(device_name: str) -> str:
    """ "sim" or "cuda", for Engine.open."""
    return device_name


@pytest.fixture(scope="session")
def micro() -> Path:
    return MICRO / "pack"


@pytest.fixture(scope="session")
def micro_golden() -> dict[str, np.ndarray]:
    return dict(np.load(MICRO / "golden.npz"))


@pytest.fixture
def open_micro(micro: Path, device: str) -> Callable[..., Engine]:
    """Engine.open on the golden micro pack with given limits."""

    def opener(**limits: Any) -> Engine:
        return Engine.open(micro, Limits(**{"context_tokens": 512, **limits}), device=device)

    return opener


@dataclass(frozen=True, eq=False)
class Choices:
    """What a forward chose: router_ids (layers, T, k), qsa_blocks (sparse layers, T, budget) -1 padded,
    logits."""

    router_ids: np.ndarray
    qsa_blocks: np.ndarray
    logits: np.ndarray


def trace_logits(engine: Engine, ids: list[int] | np.ndarray) -> Choices:
    """Logits of every row with the experts and blocks that the kernels chose, one row a launch."""
    rank, c = engine.rank, engine.config
    routes: list[np.ndarray] = []
    blocks: list[np.ndarray] = []

    def observe(launch: Launch) -> None:
        if launch.name == "router_pick":
            row = np.empty(c.n_active + 1, ROUTE)
            copy_to_host(rank.stream, row, rank.work["routes"].sub(0, row.nbytes))
            routes.append(row["expert"][:-1].astype(np.int64))
        elif launch.name == "index_select":
            n_blocks = (int(rank.tables.rows[0]["position"]) + 1) // c.index_ratio
            budget = rank.layout.budget
            chosen = np.full(budget, -1, np.int64)
            if n_blocks <= budget:
                chosen[:n_blocks] = np.arange(n_blocks)
            else:
                row = np.empty(budget, np.uint32)
                copy_to_host(rank.stream, row, rank.work["sel"].sub(0, row.nbytes))
                chosen[:] = row
            blocks.append(chosen)

    rank.observer = observe
    try:
        logits = engine.logits(ids)
    finally:
        rank.observer = None
    n = len(logits)
    return Choices(
        np.array(routes).reshape(n, -1, c.n_active).transpose(1, 0, 2),
        np.array(blocks).reshape(n, -1, rank.layout.budget).transpose(1, 0, 2),
        logits,
    )


def feed_round(engine: Engine, sequences: list[Any], n_rows: int) -> list[np.ndarray]:
    """One round with the next n_rows rows of every sequence; logits per sequence."""
    result = run_round(engine.rank, [Window(s, n_rows, logits=True) for s in sequences])
    assert result.logits is not None
    return np.split(result.logits, len(sequences))


@pytest.fixture(scope="session")
def traced() -> Callable[[Engine, Any], Choices]:
    """traced(engine, ids): see trace_logits."""
    return trace_logits


@pytest.fixture(scope="session")
def feed() -> Callable[[Engine, list[Any], int], list[np.ndarray]]:
    """feed(engine, sequences, n_rows): see feed_round."""
    return feed_round


@dataclass(frozen=True, eq=False)
class Run:
    """What a prompt left: logits of every row, all state bytes, and the greedy tokens drawn after it."""

    logits: np.ndarray
    state: dict[str, np.ndarray]
    tokens: list[int]

    def greedy(self, n_ids: int) -> list[int]:
        """The one token that is drawn after the first n_ids ids."""
        return [int(self.logits[n_ids - 1].argmax())]

    def differs(self, other: Run) -> list[str]:
        """What is not byte for byte the same, in words; empty when all is."""
        rows = [i for i, (a, b) in enumerate(zip(self.logits, other.logits, strict=True))
                if a.tobytes() != b.tobytes()]
        found = [f"{len(rows)} rows of logits, first {rows[0]}"] if rows else []
        assert self.state.keys() == other.state.keys()
        theirs = other.state
        found += [name for name, value in self.state.items() if value.tobytes() != theirs[name].tobytes()]
        return found + (["tokens"] if self.tokens != other.tokens else [])


def run_prompt(
    engine: Engine, ids: list[int], prefill: Prefill, cuts: tuple[int, ...] = (), n_new: int = 0
) -> Run:
    """One prompt on a new sequence, given in pieces that end at `cuts`; then n_new greedy tokens."""
    logits = np.empty((len(ids), engine.config.vocab), np.float32)

    def keep(i_id: int, block: np.ndarray) -> None:
        logits[i_id : i_id + len(block)] = block

    with engine.sequence() as sequence:
        token = -1
        for end in (*sorted(set(cuts)), len(ids)):
            sequence.extend(ids[len(sequence.ids) : end])
            asked = Prompt(sequence, draw=True, keep_from=sequence.n_done, keep=keep)
            if sequence.n_pending:
                run_prompts(engine.rank, [asked], prefill, engine.prompts)
                token = asked.token
        state = engine.export_state(sequence)
        tokens = [token][:n_new]
        while len(tokens) < n_new:
            sequence.extend(tokens[-1:])
            tokens.append(run_round(engine.rank, [Window(sequence, draw=True)]).tokens[0])
    return Run(logits, state, tokens)


@pytest.fixture(scope="session")
def prompt_run() -> Callable[..., Run]:
    """prompt_run(engine, ids, prefill, cuts=(), n_new=0): see run_prompt."""
    return run_prompt


@pytest.fixture(scope="module")
def deep_engine(micro: Path, device: str) -> Iterator[Engine]:
    """The micro pack with the deep pass for chunks of up to 256 rows."""
    limits = Limits(context_tokens=192, rows=16, prompt_rows=16, sequences=4, deep="open", deep_rows=2)
    with Engine.open(micro, limits, device=device) as opened:
        assert opened.rank.deep is not None, opened.rank.deep_refused
        yield opened


@pytest.fixture(scope="session")
def serial_run(micro: Path, device: str) -> Run:
    """prompts.IDS by serial decode, one row a launch."""
    with Engine.open(micro, Limits(context_tokens=192, deep="off"), device=device) as engine:
        return run_prompt(engine, prompts.IDS, prompts.SERIAL, n_new=prompts.N_NEW)
