"""Rounds whose launches start ahead of the end of those before them: the same bytes, eager and in graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from flashnext_drv.engine.engine import Engine, Limits
from flashnext_drv.engine.rank import BODY, HEAD, NEXT, NEXT_EDITS, TOKEN
from flashnext_drv.engine.round import Window, run_round
from flashnext_drv.model.synth import SynthPack
from flashnext_drv.sim import control

PROMPT = [(i * 2654435761 + 12345) % (1 << 32) % 512 for i in range(9)]


@pytest.fixture
def seeds(device: str) -> Iterator[list[int]]:
    """Schedules to run under: on a real device the one there is."""
    if device != "sim":
        yield [0]
        return
    before = control.counter("seed")
    yield [0, 1, 2]
    control.set_seed(before)


def decode(engine: Engine, n_tokens: int = 3) -> bytes:
    """Logits of a prompt's last row and of each token after it."""
    rank = engine.rank
    rows = []
    with engine.sequence() as sequence:
        sequence.extend([t % engine.config.vocab for t in PROMPT])
        while sequence.n_pending > 1:
            run_round(rank, [Window(sequence, min(engine.limits.prompt_rows, sequence.n_pending - 1))])
        for _ in range(n_tokens):
            token = run_round(rank, [Window(sequence, 1, draw=True)]).tokens[0]
            rows.append(rank.read_logits(0, 1).tobytes() + np.uint32(token).tobytes())
            sequence.extend([token])
    return b"".join(rows)


def compare(engine: Engine, seeds: list[int], device: str) -> None:
    rank, found = engine.rank, set()
    for seed in seeds:
        if device == "sim":
            control.set_seed(seed)
        for programmatic in (True, False):
            rank.programmatic = programmatic
            for rank.use_graphs in (True, False):
                before = rank.graphs.counters.replays
                found.add(decode(engine))
                assert (rank.graphs.counters.replays > before) == rank.use_graphs
    assert len(found) == 1


def test_decode_is_the_same_ahead_or_not(open_micro: Callable[..., Engine], seeds: list[int],
                                         device: str) -> None:
    with open_micro(rows=4, prompt_rows=4) as engine:
        compare(engine, seeds, device)


def test_decode_with_lines_and_mapped_rows_is_the_same(seeds: list[int], device: str) -> None:
    limits = Limits(context_tokens=64, rows=4, prompt_rows=4, expert_lines=4,
                    ngram="mapped")
    with Engine.open(SynthPack("micro", 1, ngram_rows=4096), limits, device=device) as engine:
        names = {launch.name for launch in engine.rank.launches(TOKEN, 1)}
        assert names >= {"line_resolve", "line_fill", "ngram_rows"}
        compare(engine, seeds, device)


def test_steps_without_the_host_are_the_same(open_micro: Callable[..., Engine], seeds: list[int],
                                             device: str) -> None:
    """Tables that the step before wrote on the device are read early; only a path's first launch, which waits
    for all of that step, makes that safe: with one that does not, some schedule shows old rows."""
    with open_micro(graph=False) as engine:
        rank, prompt = engine.rank, [t % engine.config.vocab for t in PROMPT]

        def last_logits(seed: int) -> bytes:
            if device == "sim":
                control.set_seed(seed)
            engine.generate(prompt, max_new_tokens=7, stop_ids=())
            return rank.read_logits(0, 1).tobytes()

        assert len({last_logits(seed) for seed in seeds}) == 1
        if device == "sim" and rank.ctx.facts.cc >= (9, 0):
            want, context = last_logits(0), rank.layout.context_bucket(0)
            for path in (BODY, NEXT):
                rank.launches(path, 1, context)[0].programmatic = True
            assert any(last_logits(seed) != want for seed in range(1, 9))


def test_all_but_the_first_of_a_path_may_lead_and_the_switch_drops_graphs(
        open_micro: Callable[..., Engine]) -> None:
    with open_micro(rows=4, prompt_rows=4) as engine:
        rank = engine.rank
        can = rank.ctx.facts.cc >= (9, 0)
        decode(engine, 1)
        parts = [rank.launches(path, 1) for path in (BODY, HEAD, NEXT, NEXT_EDITS)]
        assert rank.launches(TOKEN, 1) == parts[0] + parts[1]
        assert rank.programmatic and not any(first.programmatic for first, *_ in parts)
        assert all(launch.programmatic == can for _, *others in parts for launch in others)
        assert rank.graphs.identities()
        for identity in rank.graphs.identities():
            graph = rank.graphs.graph(identity)
            n_edges = len(graph.nodes()) - 1
            assert len(graph.edges()) == n_edges
            whole = {(0, 1)}  # a graph's first node counts, its second is the path's first launch
            kept = set(graph.edges()) - set(graph.programmatic_edges())
            assert kept == (whole if can else set(graph.edges()))
        rank.programmatic = False
        assert not rank.graphs.identities()
        decode(engine, 1)
        assert not any(launch.programmatic for launch in rank.launches(TOKEN, 1))
        assert rank.graphs.identities()
        for identity in rank.graphs.identities():
            assert rank.graphs.graph(identity).programmatic_edges() == []
        rank.programmatic = True
        assert [launch.programmatic for launch in rank.launches(TOKEN, 1)] == [
            can and i > 0 for part in parts[:2] for i in range(len(part))]
