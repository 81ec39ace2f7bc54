"""Rounds by graphs have the bytes of eager rounds, whatever joins, leaves, moves or is made late."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext_drv.drv.memory import DeviceArena, copy_to_device, copy_to_host
from flashnext_drv.engine.engine import Engine, Limits, Sampling
from flashnext_drv.engine.round import Window, run_round
from flashnext_drv.engine.sequence import Sequence
from flashnext_drv.errors import UsageError
from flashnext_drv.kernels.tables import PAGE_TOKENS
from flashnext_drv.model import layout as layout_module
from flashnext_drv.model.layout import BUCKETS

pytestmark = pytest.mark.sim
N_ROWS = 40  # beyond what attention chooses from, 32 tokens and the block that is not full
PROMPTS = ([3, 7, 250, 12, 12], [400, 9, 77])
HOT = Sampling(temperature=1.0, top_p=0.95, seed=5)


@pytest.fixture(scope="module")
def engine(micro: Any, device: str) -> Iterator[Engine]:
    limits = Limits(context_tokens=96, rows=16, prompt_rows=16, sequences=16, deep="off",
                    page_order="shuffled:3")
    with Engine.open(micro, limits, device=device) as opened:
        yield opened
        assert not opened.rank.graphs.off


def counted(engine: Engine) -> dict[str, int]:
    return dict(vars(engine.rank.graphs.counters))


def gained(engine: Engine, before: dict[str, int]) -> dict[str, int]:
    return {name: n - before[name] for name, n in counted(engine).items() if n != before[name]}


def state_bytes(engine: Engine, sequence: Sequence) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in engine.export_state(sequence).items()}


def decode(engine: Engine, graph: bool, live: list[list[int]]) -> list[Any]:
    """Rounds of one row for each sequence in `live`, each fed with its own draw; logits, tokens and at the
    end all states."""
    engine.rank.use_graphs = graph
    found: list[Any] = []
    try:
        with ExitStack() as stack:
            sequences: dict[int, Sequence] = {}
            for of_round in live:
                for i in of_round:
                    if i not in sequences:
                        sampling = HOT if i % 2 else Sampling()
                        sequences[i] = stack.enter_context(engine.sequence(sampling))
                        sequences[i].extend([(37 * i + 5) % 512])
                windows = [Window(sequences[i], draw=True, logits=True) for i in of_round]
                result = run_round(engine.rank, windows)
                assert result.logits is not None
                found += [result.tokens, result.logits.tobytes()]
                for i, token in zip(of_round, result.tokens, strict=True):
                    sequences[i].extend([token])
            found += [state_bytes(engine, each) for each in sequences.values()]
    finally:
        engine.rank.use_graphs = True
    return found


@pytest.mark.parametrize("bucket", BUCKETS)
def test_decode_by_graphs_has_eager_bytes(engine: Engine, bucket: int) -> None:
    live = [list(range(bucket))] * max(N_ROWS // bucket, 4)
    eager = decode(engine, False, live)
    before = counted(engine)
    assert decode(engine, True, live) == eager
    found = gained(engine, before)
    assert found["replays"] == found["head_replays"] == len(live) and "eager_rounds" not in found
    assert [each.pattern for each in engine.rank.graphs.identities()
            if (each.path, each.rows) == ("body", bucket)] == [(1,)]


def test_sequences_join_and_leave(engine: Engine) -> None:
    live = [[0], [0, 1], [0, 1, 2], [1, 2], [3, 2, 1], [3], [3, 4, 5, 6, 7], list(range(8, 16)), [15, 0, 9],
            list(range(12)), [2], [11, 2]]
    eager = decode(engine, False, live)
    before = counted(engine)
    assert decode(engine, True, live) == eager
    found = gained(engine, before)
    assert found["replays"] == len(live) and found.get("captures") == found.get("instantiations")
    assert decode(engine, True, live) == eager
    again = gained(engine, before)
    assert again["replays"] == 2 * len(live), "each round by a graph"
    assert again.get("captures") == found.get("captures"), "all were kept"


def test_windows_of_several_rows(micro: Any, device: str) -> None:
    """Windows of one round that are cut differently: each pattern is a graph of its own."""
    ids = [[(i * 29 + 7 * j) % 512 for i in range(12)] for j in range(3)]
    patterns = [(1, 4, 2), (5, 1, 1), (2, 2, 3), (4, 5, 6)]
    found: dict[bool, list[bytes]] = {}
    limits = Limits(context_tokens=64, rows=16, prompt_rows=16, sequences=3, deep="off")
    with Engine.open(micro, limits, device=device) as opened:
        for graph in (False, True):
            opened.rank.use_graphs = graph
            with ExitStack() as stack:
                sequences = [stack.enter_context(opened.sequence()) for _ in ids]
                for sequence, some in zip(sequences, ids, strict=True):
                    sequence.extend(some)
                found[graph] = []
                for pattern in patterns:
                    windows = [Window(s, n, logits=True) for s, n in zip(sequences, pattern, strict=True)]
                    logits = run_round(opened.rank, windows).logits
                    assert logits is not None
                    found[graph].append(logits.tobytes())
                found[graph] += [b"".join(state_bytes(opened, s).values()) for s in sequences]
        assert found[True] == found[False]
        bodies = [each for each in opened.rank.graphs.identities() if each.path == "body"]
        assert [each.pattern for each in bodies] == patterns
        assert [each.rows for each in bodies] == [8, 8, 8, 16]


def move_pages(engine: Engine, sequence: Sequence) -> None:
    """Give every page of a sequence another place, with its bytes, and spoil the old one."""
    rank = engine.rank
    tables, geometry = rank.tables, rank.layout.pages
    row = tables.pages[sequence.i_slot]
    with engine.sequence() as lender:
        n_pages = len(rank.pages.pages_of(sequence.i_slot))
        rank.pages.reserve(lender.i_slot, n_pages * PAGE_TOKENS)
        theirs = tables.pages[lender.i_slot]
        for i_page in range(n_pages):
            for name, size in (("kv", geometry.kv_bytes), ("index", geometry.index_bytes)):
                page = np.empty(size, np.uint8)
                old, new = int(row[i_page][name]), int(theirs[i_page][name])
                assert old != new
                copy_to_host(rank.stream, page, old)
                copy_to_device(rank.stream, new, page)
                copy_to_device(rank.stream, old, np.full(size, 0x7E, np.uint8))
                row[i_page][name], theirs[i_page][name] = new, old
        mine, lent = rank.pages._taken[sequence.i_slot], rank.pages._taken[lender.i_slot]
        mine[:], lent[:] = lent[:n_pages], mine[:]
        tables.touch_pages(sequence.i_slot, 0, n_pages)


def test_pages_move_between_replays_of_one_graph(engine: Engine) -> None:
    def run(graph: bool, moves: bool) -> list[Any]:
        engine.rank.use_graphs = graph
        found: list[Any] = []
        with engine.sequence() as sequence:
            sequence.extend([(i * 31 + 4) % 512 for i in range(62)])
            engine.prompt([sequence])
            before = counted(engine)
            sequence.extend([9])
            for i_round in range(6):  # over the border of the first page
                result = run_round(engine.rank, [Window(sequence, draw=True, logits=True)])
                assert result.logits is not None
                found.append(result.logits.tobytes())
                sequence.extend(result.tokens)
                if moves and i_round % 2:
                    move_pages(engine, sequence)
            if graph:
                assert gained(engine, before) == {"replays": 6, "head_replays": 6}
            found.append(state_bytes(engine, sequence))
        engine.rank.use_graphs = True
        return found

    run(True, False)  # the graph is there
    still = run(False, False)
    assert run(True, True) == still and run(True, False) == still and run(False, True) == still


def test_pages_released_are_taken_again_by_others(engine: Engine) -> None:
    """The same graph, the same tokens, other pages and another slot each time."""
    found, places = [], set()
    for n_others in (0, 1, 3):
        with ExitStack() as stack:
            for i in range(n_others):
                other = stack.enter_context(engine.sequence())
                engine.rank.pages.reserve(other.i_slot, 30 + 33 * i)
            sequence = stack.enter_context(engine.sequence())
            sequence.extend(PROMPTS[0])
            engine.prompt([sequence])
            places.add((sequence.i_slot, engine.rank.pages.pages_of(sequence.i_slot)))
            found.append(state_bytes(engine, sequence))
    assert len(places) == 3 and found[0] == found[1] == found[2]


def abab(engine: Engine, n_new: int) -> None:
    shas: list[list[str]] = []
    for graph in (False, True, False, True):
        engine.rank.use_graphs = graph
        made = [engine.generate(ids, max_new_tokens=n_new, stop_ids=(), sampling=HOT) for ids in PROMPTS]
        shas.append([each.sha256 for each in made])
        for each, ids in zip(made, PROMPTS, strict=True):
            n_rounds = -(-len(ids) // engine.limits.prompt_rows) + n_new - 1
            counters = each.counters
            wanted = (n_rounds, n_new, 0, 0) if graph else (0, 0, n_rounds, n_new)
            names = ("graph_replays", "head_replays", "eager_rounds", "eager_heads")
            assert tuple(counters[name] for name in names) == wanted
            assert counters.get("rank0.body.replays", 0) == wanted[0]
            heads = [counters.get(f"rank0.{path}.replays", 0) for path in ("head", "next")]
            assert sum(heads) == wanted[1]
    assert shas[0] == shas[1] == shas[2] == shas[3]


def test_phases_eager_and_by_graphs_in_one_process(engine: Engine) -> None:
    abab(engine, 12)


@pytest.mark.slow
def test_long_phases_eager_and_by_graphs_in_one_process(open_micro: Callable[..., Engine]) -> None:
    with open_micro() as opened:
        abab(opened, 128)


def test_two_sequences_at_once_are_as_alone(engine: Engine) -> None:
    together = decode(engine, True, [[0, 1]] * 8)
    for i in (0, 1):
        alone = decode(engine, True, [[i]] * 8)
        assert [tokens[i] for tokens in together[:16:2]] == [tokens[0] for tokens in alone[:16:2]]
        assert together[16 + i] == alone[16], "state"


@pytest.fixture(scope="module")
def wide_pack(tmp_path_factory: pytest.TempPathFactory, micro: Path) -> Path:
    """The micro pack whose attention takes more than one part of 64 tokens."""
    folder = tmp_path_factory.mktemp("wide") / "pack"
    shutil.copytree(micro, folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["indexer_budget"] = 128
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_reach_of_attention_grows_with_the_longest_sequence(
    wide_pack: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grids for 32, 64 and 96 tokens; full ones give the same bytes.  With room for two executables the body
    is updated to the next reach."""
    ids = [(i * 37 + 11) % 512 for i in range(80)]
    given: dict[str, Any] = {"context_tokens": 96, "deep": "off", "rows": 16, "prompt_rows": 16}
    with Engine.open(wide_pack, Limits(**given, graph=False), device=device) as opened:
        wanted = opened.logits(ids)
    monkeypatch.setattr(layout_module, "CONTEXT_BUCKET", 32)
    for limits in ({"graph": False}, {}, {"graphs": 2}):
        with Engine.open(wide_pack, Limits(**given, **limits), device=device) as opened:
            assert opened.logits(ids).tobytes() == wanted.tobytes(), limits
            contexts = [each.context for each in opened.rank.graphs.identities() if each.path == "body"]
            assert contexts == ([32, 64, 96] if limits == {} else [96] if limits == {"graphs": 2} else [])
            found = opened.rank.graphs.counters
            assert (found.updates, found.evicted) == ((2, 2) if "graphs" in limits else (0, 0))
            grids = [max(step.grid[0] for step in opened.rank.steps("body", context)
                         if step.kernel == "qsa_attn") for context in (64, 96)]
            assert grids[0] < grids[1] == opened.rank.layout.parts_of(96)


def test_a_moved_buffer_drops_the_graphs(micro: Any, device: str) -> None:
    """Draws go to another arena: bound anew, the head's graph is dropped and the body's kept."""
    with Engine.open(micro, Limits(context_tokens=64, deep="off"), device=device) as opened:
        rank = opened.rank
        wanted = opened.generate(PROMPTS[0], max_new_tokens=3, stop_ids=())
        n_heads = sum(identity.path != "body" for identity in rank.graphs.identities())
        size = rank.work["tokens"].size_bytes
        with DeviceArena(rank.ctx, "moved", size + 256) as arena:
            old = rank.work["tokens"]
            rank.work["tokens"] = rank._spans["tokens"] = arena.span("tokens", size)
            rank.rebind()
            made = opened.generate(PROMPTS[0], max_new_tokens=3, stop_ids=())
            assert made.tokens == wanted.tokens and made.counters["graph_dropped"] == n_heads
            assert made.counters["graph_captures"] == n_heads and made.counters["rank0.body.captures"] == 0
            with pytest.raises(UsageError, match=r"head\.rows1"):
                arena.close()
            rank.work["tokens"] = rank._spans["tokens"] = old
            rank.rebind()
            again = opened.generate(PROMPTS[0], max_new_tokens=3, stop_ids=())
            assert again.tokens == wanted.tokens and again.counters["graph_dropped"] == n_heads


def test_graphs_made_on_a_thread(
    micro: Any, device: str, engine: Engine
) -> None:
    """Eager rounds until the thread is ready, then replays; the same tokens, the same counts each time."""
    wanted = [engine.generate(ids, max_new_tokens=10, stop_ids=(), sampling=HOT).tokens for ids in PROMPTS]
    counts = []
    for _ in range(2):
        limits = Limits(context_tokens=96, deep="off", graph_async=True)
        with Engine.open(micro, limits, device=device) as opened:
            made = [opened.generate(ids, max_new_tokens=10, stop_ids=(), sampling=HOT) for ids in PROMPTS]
            assert [each.tokens for each in made] == wanted
            counts.append([dict(each.counters) for each in made])
            assert made[0].counters["eager_rounds"] > 0 and made[0].counters["eager_heads"] > 0
            if device == "sim":
                assert made[1].counters["graph_replays"] > 0 == made[1].counters["eager_rounds"]
                assert made[1].counters["graph_captures"] == made[1].counters["graph_uploads"] == 0
            assert opened.memory().graphs["paths"]["body"]["failures"] == 0
        assert not [each for each in threading.enumerate() if each.name.startswith("flashnext")]
    assert device != "sim" or counts[0] == counts[1]


def test_closed_while_graphs_are_being_made(micro: Any, device: str) -> None:
    for n_new in (1, 2, 3):
        limits = Limits(context_tokens=64, deep="off", graph_async=True)
        with Engine.open(micro, limits, device=device) as opened:
            opened.generate(PROMPTS[1], max_new_tokens=n_new, stop_ids=())
            ledger = opened.ledger
        ledger.require_empty()
        assert not [each for each in threading.enumerate() if each.name.startswith("flashnext")]


def test_memory_says_what_graphs_are_and_cost(micro: Any, device: str) -> None:
    with Engine.open(micro, Limits(context_tokens=64, deep="off"), device=device) as opened:
        assert opened.memory().graphs["kept"] == 0
        made = opened.generate(PROMPTS[0], max_new_tokens=2, stop_ids=())
        report = opened.memory()
        kept = report.graphs["kept"]
        assert kept == len(opened.rank.graphs.identities()) and report.graphs["cap"] == 64
        assert set(report.graphs["sizes"]) >= {"body.rows1.1.context64", "head.rows1"}
        assert report.graphs["bytes"] == sum(report.graphs["sizes"].values()) and not report.graphs["off"]
        assert device != "sim" or report.graphs["bytes"] == kept << 16
        replays = [of["replays"] for path, of in report.graphs["paths"].items() if path != "body"]
        assert sum(replays) == made.counters["head_replays"] == 2
        assert f"graphs: {kept} of at most 64" in report.table()
        with pytest.raises(UsageError, match="graphs"):
            opened.rank._work.close()


@pytest.mark.parametrize(("limits", "text"), [({"graphs": 1}, "graphs"), ({"graph_after": 3}, "graph_after"),
                                              ({"graph_floor_bytes": -1}, "graph_floor_bytes")])
def test_limits_out_of_range(limits: dict[str, int], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Limits(**limits)
