"""Experts in host memory: no byte of a result depends on where an expert lies, when it moves or how it is
read; the counters tell what happened; whatever goes wrong while opening leaves nothing behind."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flashnext_drv.drv import faults
from flashnext_drv.drv.context import Context
from flashnext_drv.drv.memory import copy_to_host
from flashnext_drv.drv.module import Launch
from flashnext_drv.engine import engine as engine_module
from flashnext_drv.engine.engine import Engine, Limits, Prefill
from flashnext_drv.errors import CheckpointError, OutOfMemory, UsageError
from flashnext_drv.kernels import tables as t
from flashnext_drv.ledger import Ledger
from flashnext_drv.model.layout import Layout
from flashnext_drv.model.pack import Pack, PackBase
from flashnext_drv.model.synth import SynthPack
from flashnext_drv.ref.lines import LineCache
from flashnext_drv.sim import control
from flashnext_drv.state.experts import ExpertStore

from .test_pack_forms import write

pytestmark = pytest.mark.sim
LIMITS = Limits(context_tokens=64, sequences=2, rows=4, prompt_rows=4, deep="off")
K, E = 4, 16  # chosen experts and experts of the micro pack
IDS = [3, 7, 250, 12, 12, 400, 9, 77, 130]
N_NEW = 3
STORE_OWNER = "experts.store"
WAYS = (Prefill(), Prefill(serial=True))
Opener = Callable[..., Engine]


@pytest.fixture
def opener(device: str, micro: Path) -> Opener:
    """opener(pack=micro, **limits)"""

    def run(pack: Path | PackBase = micro, **limits: Any) -> Engine:
        return Engine.open(pack, replace(LIMITS, **limits), device=device)

    return run


@pytest.fixture(scope="module")
def resident(device: str, micro: Path) -> Iterator[Engine]:
    """The micro pack with all experts on the device."""
    with Engine.open(micro, LIMITS, device=device) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(resident: Engine, prompt_run: Callable[..., Any]) -> Any:
    """What IDS leave with all experts resident."""
    return prompt_run(resident, IDS, WAYS[0], n_new=N_NEW)


def read(engine: Engine, name: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A device table of all layers, (layers, n)."""
    span = engine.rank.tables.spans[name]
    rows = np.zeros(span.size_bytes // dtype.itemsize, dtype)
    copy_to_host(engine.rank.stream, rows, span)
    return rows.reshape(engine.config.n_layers, -1)


def check_lines(engine: Engine) -> None:
    """Lines, homes, uses and the bytes in the lines agree, and name every expert where it is."""
    experts, stream = engine.rank.experts, engine.rank.stream
    homes, uses = read(engine, "homes", t.HOME), read(engine, "uses", t.USE)
    caches = read(engine, "caches", t.CACHE)[:, 0]
    assert (experts.residents(stream) == homes["line"]).all()
    for i_layer in range(engine.config.n_layers):
        lines = np.zeros(E + 1, t.LINE)
        copy_to_host(stream, lines, engine.rank.tables.spans[f"L{i_layer}.lines"])
        assert lines[E].tobytes() == experts.shared_row(i_layer).tobytes()
        held = {int(use): i for i, use in enumerate(uses["expert"][i_layer]) if use != t.NO_LINE}
        assert len(held) <= caches["n_lines"][i_layer]
        for i_expert in range(E):
            home, _, size = experts.home(i_layer, i_expert)
            assert (homes["address"][i_layer, i_expert], homes["bytes"][i_layer, i_expert]) == (home, size)
            i_line = held.get(i_expert, t.NO_LINE)
            assert homes["line"][i_layer, i_expert] == i_line
            base = home if i_line == t.NO_LINE else experts.line_base(i_layer, i_line)
            row = experts.line_row(i_layer, i_expert, base)
            row["source"] = i_line == t.NO_LINE
            assert lines[i_expert].tobytes() == row.tobytes(), (i_layer, i_expert, i_line)
            if i_line != t.NO_LINE:
                assert line_bytes(engine, i_layer, i_expert, base) == stored_bytes(engine, i_layer, i_expert)


def line_bytes(engine: Engine, i_layer: int, i_expert: int, base: int) -> bytes:
    """The bytes of an expert's nine parts in the copy at `base`."""
    row = engine.rank.experts.line_row(i_layer, i_expert, base)
    found = b""
    for info, name in zip(engine.pack.experts(i_layer)[i_expert], ("gate", "up", "down"), strict=True):
        trellis = engine.pack.tensor(info.parts["trellis"]).size
        for field, size in (("data", trellis), ("suh", 2 * info.k), ("svh", 2 * info.n)):
            part = np.zeros(size, np.uint8)
            copy_to_host(engine.rank.stream, part, int(row[name][field]))
            found += part.tobytes()
    return found


def stored_bytes(engine: Engine, i_layer: int, i_expert: int) -> bytes:
    """The same bytes as the pack gives them."""
    pack, found = engine.pack, b""
    for info in pack.experts(i_layer)[i_expert]:
        found += pack.read(info.parts["trellis"]).tobytes()
        found += pack.scale(info, "suh").tobytes() + pack.scale(info, "svh").tobytes()
    return found


@pytest.mark.parametrize("lines", [0, 1, 2, K - 1, K, K + 1, E // 2, E])
def test_lines_change_no_byte(
    opener: Opener, expected: Any, prompt_run: Callable[..., Any], lines: int
) -> None:
    """Prompt in batches with graphs, then row by row eagerly, as with all experts resident."""
    with opener(expert_lines=lines) as engine:
        assert engine.rank.experts.n_lines == lines
        check_lines(engine)
        held = engine.rank.experts.residents(engine.rank.stream)
        assert (held[:, :lines] == np.arange(lines)).all() and (held[:, lines:] == t.NO_LINE).all()
        for way in WAYS:
            engine.rank.use_graphs = not way.serial
            run = prompt_run(engine, IDS, way, n_new=N_NEW)
            assert run.differs(expected) == [], way
            check_lines(engine)
        counters = engine.rank.graphs.counters
        assert counters.replays and counters.eager_rounds and not counters.failures
        total = engine.rank.experts.counters(engine.rank.stream)
        assert (total["misses"] > 0).all() == (lines < E) and (total["hits"] > 0).all() == (lines > 0)
    engine.ledger.require_empty()


class Routes:
    """Observes eager rounds: the experts that each row of each layer asked for, round by round."""

    def __init__(self, engine: Engine) -> None:
        self.layers: list[list[list[list[int]]]] = [[] for _ in range(engine.config.n_layers)]
        self._engine = engine
        self._n_seen = 0

    def __call__(self, launch: Launch) -> None:
        if launch.name != "router_pick":
            return
        rank = self._engine.rank
        n_rows = int(rank.tables.round[0]["n_rows"])
        routes = np.zeros((n_rows, K + 1), t.ROUTE)
        copy_to_host(rank.stream, routes, rank.work["routes"].sub(0, routes.nbytes))
        self.layers[self._n_seen % len(self.layers)].append(routes["expert"][:, :K].tolist())
        self._n_seen += 1


def caches_of(engine: Engine) -> list[LineCache]:
    """The model of every layer's cache, as the device has it."""
    homes, uses = read(engine, "homes", t.HOME), read(engine, "uses", t.USE)
    found = []
    for i_layer, cache in enumerate(read(engine, "caches", t.CACHE)[:, 0]):
        of_layer = uses[i_layer, : int(cache["n_lines"])]
        holds = [None if expert == t.NO_LINE else int(expert) for expert in of_layer["expert"]]
        sizes = homes["bytes"][i_layer].tolist()
        found.append(LineCache(sizes, holds, of_layer["used"].tolist(), int(cache["clock"])))
    return found


@pytest.mark.parametrize("lines", [0, 1, K, E // 2])
def test_counters_are_those_of_the_model(
    opener: Opener, prompt_run: Callable[..., Any], lines: int
) -> None:
    """The recorded routes of eager rounds, played through ref/lines.py, give counters and residents; a graph
    from the same start gives the same."""
    with opener(expert_lines=E // 2) as engine:
        experts, stream = engine.rank.experts, engine.rank.stream
        gained = []
        for graph in (False, True):
            experts.seat(stream, n_lines=lines)
            models, before = caches_of(engine), experts.counters(stream)
            if not graph:
                expected = models
                engine.rank.observer = routes = Routes(engine)
            prompt_run(engine, IDS, WAYS[0], n_new=N_NEW)
            engine.rank.observer = None
            after = experts.counters(stream)
            gained.append([{name: int(b[name]) - int(a[name]) for name in t.COUNTERS}
                           for a, b in zip(before, after, strict=True)])
            if not graph:
                for model, rounds in zip(expected, routes.layers, strict=True):
                    assert len(rounds) == 3 + N_NEW - 1
                    for rows in rounds:
                        model.resolve(rows)
            assert gained[-1] == [model.counters for model in expected], graph
            assert [model.holds for model in caches_of(engine)] == [model.holds for model in expected]
            check_lines(engine)
        assert engine.rank.graphs.counters.replays
        for of_layer in gained[0]:  # what crossed the link
            size = experts.home(0, 0)[2]
            assert of_layer["filled_bytes"] == of_layer["fills"] * size
            assert of_layer["read_bytes"] == of_layer["reads"] * size
            assert of_layer["fills"] + of_layer["in_place"] == of_layer["misses"] > 0


def test_a_request_counts_its_own(opener: Opener, resident: Engine) -> None:
    with opener(expert_lines=2) as engine:
        first = engine.generate(IDS, max_new_tokens=N_NEW, stop_ids=())
        second = engine.generate(IDS, max_new_tokens=N_NEW, stop_ids=())
        assert first.tokens == second.tokens
        report = engine.memory()
        for name in t.COUNTERS:
            total = sum(layer[name] for layer in report.experts["layers"])
            assert total == first.counters[f"expert_{name}"] + second.counters[f"expert_{name}"]
        assert first.counters["expert_misses"] and second.counters["expert_misses"]
        for made in (first, second):
            moved = made.counters["expert_filled_bytes"] + made.counters["expert_read_bytes"]
            assert made.counters["link_bytes"] == moved and made.counters["ring_batches"] == 0
        assert (report.experts["requested"], report.experts["lines"]) == (2, 2)
        assert report.experts["ring_bytes"] == 0 and len(report.experts["layers"]) == engine.config.n_layers
        assert "2 lines a layer" in report.table() and report.as_dict()["experts"] == report.experts
        held = engine.ledger.live("pinned")[STORE_OWNER]
        assert held == sum(engine.rank.experts.bytes_of(i) * E for i in range(engine.config.n_layers))
    made = resident.generate(IDS, max_new_tokens=N_NEW, stop_ids=())
    assert made.tokens == first.tokens and not [name for name in made.counters if name.startswith("expert_")]
    assert resident.memory().experts == {} and STORE_OWNER not in resident.ledger.live("pinned")
    with pytest.raises(UsageError, match="resident"):
        resident.rank.experts.counters(resident.rank.stream)


def test_a_request_counts_what_the_ring_copies(opener: Opener, resident: Engine) -> None:
    """A ring made by the first prompt that wants it; its counters are the second request's alone there."""
    want = resident.generate(IDS, max_new_tokens=N_NEW, stop_ids=()).tokens
    limits = {"deep": "request", "deep_rows": 2, "ring_depth": 2, "ring_lines": 3}
    with opener(expert_lines=2, **limits) as engine:
        made = [engine.generate(IDS, max_new_tokens=N_NEW, stop_ids=()) for _ in range(2)]
        assert [each.tokens for each in made] == [want, want]
        ring = engine.rank.deep.ring.banks.counters
        layers = engine.memory().experts["layers"]
        for name in ring.dtype.names:
            assert sum(each.counters[f"ring_{name}"] for each in made) == ring[name].sum()
            assert [layer[f"ring_{name}"] for layer in layers] == ring[name].tolist()
        for each in made:
            counters, size = each.counters, engine.rank.experts.home(0, 0)[2]
            assert counters["deep_rows"] == len(IDS) and counters["ring_copied_lines"] > 0
            assert counters["ring_copied_bytes"] == counters["ring_copied_lines"] * size
            assert counters["link_bytes"] == size * (
                counters["ring_copied_lines"] + counters["expert_fills"] + counters["expert_reads"])
        assert engine.memory().experts["ring_bytes"] >= 2 * 3 * size


def test_forced_evictions_at_every_step(
    opener: Opener, resident: Engine, feed: Callable[..., list[npt.NDArray[Any]]], case_seed: int
) -> None:
    """Two sequences in one round, the experts in lines and the lines in use drawn anew before each."""
    ids = ([5, 9, 200, 31, 64, 64, 2, 8], [11, 450, 7, 7, 90, 3, 1, 301])
    choose = random.Random(case_seed)
    with opener(expert_lines=E // 2) as engine, engine.sequence() as a, engine.sequence() as b:
        with resident.sequence() as c, resident.sequence() as d:
            for sequence, tokens in ((a, ids[0]), (b, ids[1]), (c, ids[0]), (d, ids[1])):
                sequence.extend(tokens)
            while a.n_pending:
                n_lines = choose.randrange(E // 2 + 1)
                residents = [choose.sample(range(E), choose.randrange(n_lines + 1))
                             for _ in range(engine.config.n_layers)]
                engine.rank.experts.seat(engine.rank.stream, residents, n_lines)
                check_lines(engine)
                n_rows = min(choose.randint(1, 2), a.n_pending)
                for mine, theirs in zip(feed(engine, [a, b], n_rows), feed(resident, [c, d], n_rows),
                                        strict=True):
                    assert mine.tobytes() == theirs.tobytes(), (case_seed, n_lines, residents)
                check_lines(engine)
            for mine, theirs in ((a, c), (b, d)):
                state, want = engine.export_state(mine), resident.export_state(theirs)
                assert [name for name in want if state[name].tobytes() != want[name].tobytes()] == []
        assert engine.rank.experts.counters(engine.rank.stream)["evictions"].sum() > 0


def narrow(micro: Path, folder: Path) -> Path:
    """The micro pack with other widths: layer 1 gate 2 bits, layer 2 down 5 and one expert's up 7 bits."""
    pack = Pack.open(micro)
    stored = {name: (x.dtype, list(x.shape), pack.read(name).tobytes()) for name, x in pack.tensors.items()}
    changes = ((1, "gate", 2, range(E)), (2, "down", 5, range(E)), (2, "up", 7, [9]))
    for i_layer, part, bits, chosen in changes:
        for i_expert in chosen:
            name = f"model.language_model.layers.{i_layer}.mlp.experts.{i_expert}.{part}_proj.trellis"
            shape = [*stored[name][1][:2], 16 * bits]
            words = np.random.default_rng(i_expert).integers(-32768, 32768, shape, np.int16)
            stored[name] = ("I16", shape, words.tobytes())
    write(folder, micro, stored)
    return folder


@pytest.mark.parametrize("form", ["layers", "mixed", "mixed_disk"])
def test_experts_of_different_widths(
    opener: Opener, prompt_run: Callable[..., Any], micro: Path, tmp_path: Path, form: str
) -> None:
    """Between layers, between projections, between experts of a layer, and with legacy sign words."""
    pack: PackBase = Pack.open(narrow(micro, tmp_path / "pack")) if form == "layers" else SynthPack(
        "micro", mixed=True)
    with opener(pack) as engine:
        want = prompt_run(engine, IDS, WAYS[0], n_new=N_NEW)
    if form == "mixed_disk":
        pack.write(tmp_path / "pack")
        pack = Pack.open(tmp_path / "pack")
    with opener(pack, expert_lines=3) as engine:
        check_lines(engine)
        assert prompt_run(engine, IDS, WAYS[0], n_new=N_NEW).differs(want) == []
        check_lines(engine)
        sizes = {experts_bytes for i in range(engine.config.n_layers)
                 for experts_bytes in (engine.rank.experts.home(i, e)[2] for e in range(E))}
        assert len(sizes) > 2
        assert engine.rank.experts.counters(engine.rank.stream)["evictions"].sum() > 0


def test_progress_counts_every_byte(device: str, micro: Path) -> None:
    """From disk and made by kernels; never backwards, and to the end but for padding."""
    for pack in (Pack.open(micro), SynthPack("micro", mixed=True)):
        told: list[tuple[str, int, int]] = []
        limits = replace(LIMITS, expert_lines=2)
        with Engine.open(pack, limits, device=device, progress=partial(_append, told)) as engine:
            experts = sum(engine.rank.experts.home(i, e)[2] for i in range(4) for e in range(E))
        done, totals = [each[1] for each in told], {each[2] for each in told}
        assert done == sorted(done) and len(totals) == 1 and experts < done[-1]
        assert 0 <= totals.pop() - done[-1] < done[-1] // 50, "but for padding"


def _append(told: list[tuple[str, int, int]], what: str, done: int, of_all: int) -> None:
    told.append((what, done, of_all))


def test_seats_that_cannot_be_are_refused(opener: Opener) -> None:
    with opener(expert_lines=2) as engine:
        experts, stream, n = engine.rank.experts, engine.rank.stream, engine.config.n_layers
        experts.seat(stream, [[7, 3]] * n)
        before = [read(engine, name, dtype).tobytes() for name, dtype in
                  (("homes", t.HOME), ("uses", t.USE), ("caches", t.CACHE))]
        bad = (([[1, 2, 3]] * n, None), ([[1, 1]] * n, None), ([[E]] * n, None), ([[-1]] * n, None),
               ([[1]], None), ([[1, 2]] * n, 1), (None, 3), (None, -1))
        for residents, n_lines in bad:
            with pytest.raises(UsageError):
                experts.seat(stream, residents, n_lines)
        assert before == [read(engine, name, dtype).tobytes() for name, dtype in
                          (("homes", t.HOME), ("uses", t.USE), ("caches", t.CACHE))]
        check_lines(engine)


def test_lines_are_those_the_layout_has_room_for(ctx: Context, micro: Path) -> None:
    pack = Pack.open(micro)
    layout = Layout(pack.config, replace(LIMITS, expert_lines=2, expert_lines_most=5))
    for given, lines in ((None, 2), (0, 0), (5, 5)):
        with ExpertStore(ctx, layout, pack, given) as experts:
            assert experts.n_lines == lines and experts.offloads
    for given in (-1, 6):
        with pytest.raises(UsageError, match="lines"):
            ExpertStore(ctx, layout, pack, given)
    with ExpertStore(ctx, Layout(pack.config, replace(LIMITS, expert_lines=E + 1)), pack) as experts:
        assert experts.n_lines == E, "there are no more experts than that"
    with ExpertStore(ctx, Layout(pack.config, LIMITS), pack, E) as experts:
        assert experts.n_lines == E and not experts.offloads
        with pytest.raises(UsageError, match="resident"):
            experts.home(0, 0)


def test_graphs_hold_the_store(opener: Opener) -> None:
    with opener(expert_lines=2) as engine:
        engine.generate(IDS[:2], max_new_tokens=2, stop_ids=())
        assert engine.rank.graphs.identities()
        with pytest.raises(UsageError, match="graphs"):
            engine.rank.experts.close()
        assert engine.generate(IDS[:2], max_new_tokens=2, stop_ids=()).tokens


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch, device_name: str) -> Iterator[None]:
    """Ledger, simulator and threads are as before, whatever the test did."""
    made: list[Ledger] = []

    def new() -> Ledger:
        made.append(Ledger())
        return made[-1]

    monkeypatch.setattr(engine_module, "Ledger", new)
    held = {name: control.counter(name) for name in ("contexts", "handles", "used_bytes")} if (
        device_name == "sim") else {}
    yield
    assert made
    for ledger in made:
        ledger.require_empty()
    assert held == {name: control.counter(name) for name in held}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("flashnext")]


@pytest.mark.parametrize("i_layer", [0, 2])
def test_pinned_memory_refused(opener: Opener, micro: Path, nothing_left: None, i_layer: int) -> None:
    """The first layer's, and one while readers are at work; then with enough, all is well."""
    with faults.count_calls() as count:
        opener(expert_lines=2).close()
    first = sum(name == "cuMemHostAlloc" for name in count.names) - Pack.open(micro).config.n_layers + 1
    with pytest.raises(OutOfMemory) as caught, faults.fail_nth(first + i_layer, 2, only="cuMemHostAlloc"):
        opener(expert_lines=2)
    assert "largest holder" in str(caught.value) and caught.value.call == "cuMemHostAlloc"
    opener(expert_lines=2).close()


class Shrinking(Pack):
    """Loses the end of a file when an expert is read."""

    def read_parts(self, parts: Sequence[tuple[str, npt.NDArray[np.uint8]]]) -> None:
        tensor = self.tensor(parts[0][0])
        if ".experts.11." in tensor.name and tensor.offset + tensor.size <= tensor.file.stat().st_size:
            with open(tensor.file, "r+b") as stream:
                stream.truncate(tensor.offset + tensor.size // 2)
        super().read_parts(parts)


def test_a_file_that_shrinks_while_read(
    opener: Opener, micro: Path, tmp_path: Path, nothing_left: None
) -> None:
    shutil.copytree(micro, tmp_path / "pack")
    with pytest.raises(CheckpointError, match="lost bytes") as caught:
        opener(Shrinking.open(tmp_path / "pack"), expert_lines=2)
    assert "experts" in caught.value.facts["tensor"]
    opener(expert_lines=2).close()
