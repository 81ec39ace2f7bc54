"""Several tokens a host visit give what one token a visit gives: tokens, all state bytes, errors and their
places, eager and as graphs, wherever sequences stop; and the host waits once a visit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext_drv.drv import faults
from flashnext_drv.drv.memory import copy_to_device, copy_to_host
from flashnext_drv.engine.decode import Ahead, decode, run_ahead
from flashnext_drv.engine.engine import Engine, Limits, Sampling
from flashnext_drv.engine.prefill import Prefill, Prompt, run_prompts
from flashnext_drv.engine.round import Window, run_round
from flashnext_drv.engine.sequence import Sequence
from flashnext_drv.errors import CapacityError, ContractError, DriverError, UsageError
from flashnext_drv.kernels.tables import AHEAD, ROUND

pytestmark = pytest.mark.sim
N_NEW = 11
FIELDS: dict[str, Any] = {"context_tokens": 128, "rows": 16, "prompt_rows": 16, "sequences": 4, "deep": "off",
                          "steps_ahead": 8}
State = dict[str, bytes]


@dataclass(frozen=True)
class Given:
    """A prompt and how its tokens are drawn."""

    ids: tuple[int, ...]
    sampling: Sampling


# The first ends a page, so pages are taken inside a visit; the third draws no token twice, so that a stop id
# or a NaN has one place.
GIVEN = (
    Given(tuple((37 * i + 5) % 512 for i in range(59)), Sampling(seed=3, temperature=1.0)),
    Given((3, 7, 250, 12), Sampling()),
    Given((9, 77, 500, 1, 7), Sampling(seed=5, temperature=1.0, top_k=400, top_p=0.99)),
    Given((301, 2), Sampling(seed=6, temperature=1.5, min_p=0.01)),
)


MAIN = 2


@dataclass(frozen=True)
class Alone:
    """What one token a visit gave: N_NEW tokens, and the state before each of them was appended."""

    tokens: list[int]
    states: list[State]


def state_of(engine: Engine, sequence: Sequence) -> State:
    return {name: value.tobytes() for name, value in engine.export_state(sequence).items()}


def begin(engine: Engine, sequence: Sequence, ids: tuple[int, ...]) -> int:
    """Run a prompt; the token drawn after it, appended."""
    sequence.extend(ids)
    asked = Prompt(sequence, draw=True)
    run_prompts(engine.rank, [asked], Prefill(), engine.prompts)
    sequence.extend([asked.token])
    return asked.token


@pytest.fixture(scope="module")
def engine(micro: Path, device: str) -> Iterator[Engine]:
    with Engine.open(micro, Limits(**FIELDS), device=device) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone(micro: Path, device: str) -> list[Alone]:
    """Of each of GIVEN, by eager rounds of one row."""
    made = []
    with Engine.open(micro, Limits(**FIELDS, graph=False), device=device) as opened:
        for given in GIVEN:
            with opened.sequence(given.sampling) as sequence:
                tokens, states = [begin(opened, sequence, given.ids)], []
                while len(tokens) < N_NEW:
                    tokens += run_round(opened.rank, [Window(sequence, draw=True)]).tokens
                    states.append(state_of(opened, sequence))
                    sequence.extend(tokens[-1:])
                made.append(Alone(tokens, states))
    return made


@contextmanager
def running(engine: Engine, graph: bool) -> Iterator[None]:
    before, engine.rank.use_graphs = engine.rank.use_graphs, graph
    try:
        yield
    finally:
        engine.rank.use_graphs = before


def follow(engine: Engine, sequence: Sequence, alone: Alone, n_done: int, steps: int) -> None:
    """Decode from the n_done-th token to the last, and compare every visit."""
    while n_done < N_NEW:
        drawn, = run_ahead(engine.rank, [Ahead(sequence, N_NEW - n_done)], steps)
        assert len(drawn.tokens) == min(steps, N_NEW - n_done) and drawn.error is None
        n_done += len(drawn.tokens)
        assert drawn.tokens == alone.tokens[n_done - len(drawn.tokens) : n_done]
        assert state_of(engine, sequence) == alone.states[n_done - 2]
        assert sequence.n_pending == 0
        sequence.extend(drawn.tokens[-1:])


def test_what_cannot_go_ahead_is_refused(engine: Engine) -> None:
    rank = engine.rank
    with ExitStack() as stack:
        live = [stack.enter_context(engine.sequence()) for _ in range(2)]
        begin(engine, live[0], (1, 2, 3))
        live[1].extend([1, 2])
        before = state_of(engine, live[0])
        for asked, steps in (([Ahead(live[0], 4)], 0), ([Ahead(live[0], 4)], 9), ([Ahead(live[0], 0)], 2),
                             ([Ahead(live[1], 4)], 2), ([], 2), ([Ahead(live[0], 4)] * 2, 2),
                             ([Ahead(live[0], 4)] * 17, 2)):
            with pytest.raises(UsageError):
                run_ahead(rank, asked, steps)
        assert state_of(engine, live[0]) == before and live[0].n_pending == 1
        with pytest.raises(UsageError):
            Limits(steps_ahead=0)


def test_more_stop_ids_than_the_tables_hold(engine: Engine, alone: list[Alone]) -> None:
    given, wanted = GIVEN[MAIN], alone[MAIN]
    stop = wanted.tokens[6]
    others = [i for i in range(512) if i not in wanted.tokens][:12]
    with engine.sequence(given.sampling) as sequence:
        begin(engine, sequence, given.ids)
        twelve = Ahead(sequence, 8, frozenset(others[:11]) | {stop})
        assert run_ahead(engine.rank, [twelve], 4)[0].tokens == wanted.tokens[1:5]
        sequence.extend(wanted.tokens[4:5])
        thirteen = Ahead(sequence, 8, frozenset(others) | {stop})
        assert run_ahead(engine.rank, [thirteen], 8)[0].tokens == wanted.tokens[5:6], "one token a visit"
        sequence.extend(wanted.tokens[5:6])
        assert list(decode(engine.rank, thirteen)) == [stop]


def test_pages_and_caches_that_end_shorten_a_visit(
    engine: Engine, alone: list[Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, wanted, pages = GIVEN[MAIN], alone[MAIN], engine.rank.pages
    reserve = pages.reserve

    def scarce(i_slot: int, n_tokens: int) -> None:
        if n_tokens > len(given.ids) + 5:
            raise CapacityError("no pages are left for this sequence", needed_tokens=n_tokens)
        reserve(i_slot, n_tokens)

    with engine.sequence(given.sampling) as sequence:
        begin(engine, sequence, given.ids)
        monkeypatch.setattr(pages, "reserve", scarce)
        assert run_ahead(engine.rank, [Ahead(sequence, 8)], 8)[0].tokens == wanted.tokens[1:6]
        sequence.extend(wanted.tokens[5:6])
        with pytest.raises(CapacityError):
            run_ahead(engine.rank, [Ahead(sequence, 8)], 8)
        monkeypatch.undo()
        follow(engine, sequence, wanted, 6, 8)
    with engine.sequence(given.sampling) as sequence:
        sequence.capacity = len(given.ids) + 4
        begin(engine, sequence, given.ids)
        got = []
        with pytest.raises(CapacityError, match="do not fit the sequence's cache"):
            got += list(decode(engine.rank, Ahead(sequence, 8)))
        assert sequence.position == sequence.capacity
        assert sequence.ids[len(given.ids) :] == wanted.tokens[:4]


def test_a_mapped_ngram_table_goes_one_token_a_visit(micro: Path, device: str, alone: list[Alone]) -> None:
    given, wanted = GIVEN[MAIN], alone[MAIN]
    fields = {**FIELDS, "rows": 1, "prompt_rows": 1, "ngram": "mapped"}
    with Engine.open(micro, Limits(**fields), device=device) as opened:
        with opened.sequence(given.sampling) as sequence:
            begin(opened, sequence, given.ids)
            assert run_ahead(opened.rank, [Ahead(sequence, 8)], 8)[0].tokens == wanted.tokens[1:2]
            assert state_of(opened, sequence) == wanted.states[0]
        made = opened.generate(given.ids, max_new_tokens=N_NEW, sampling=given.sampling, stop_ids=())
        assert made.tokens == wanted.tokens


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("i_bad", [1, 6])
def test_a_nan_ends_its_own_row_at_its_place(
    micro: Path, device: str, alone: list[Alone], i_bad: int, graph: bool
) -> None:
    """The embedding of the i_bad-th token drawn is NaN: the row after it draws from NaNs."""
    given, wanted = GIVEN[MAIN], alone[MAIN]
    bad = wanted.tokens[i_bad]
    mate = next(i for i in (3, 1) if bad not in (*alone[i].tokens[:9], *GIVEN[i].ids))
    assert bad not in (*wanted.tokens[:i_bad], *given.ids), "choose another seed"
    errors = []
    for steps in (1, 8):
        with Engine.open(micro, Limits(**FIELDS, graph=graph), device=device) as opened, ExitStack() as stack:
            row_bytes = 2 * opened.config.hidden
            at = opened.rank.weights.spans["embed"].address + bad * row_bytes
            copy_to_device(opened.rank.stream, at, np.full(row_bytes, 0xFF, np.uint8))
            live = [stack.enter_context(opened.sequence(each.sampling)) for each in (given, GIVEN[mate])]
            begin(opened, live[0], given.ids)
            begin(opened, live[1], GIVEN[mate].ids)
            drawn = run_ahead(opened.rank, [Ahead(live[0], 8), Ahead(live[1], 8)], steps)
            done = [one.tokens for one in drawn]
            while drawn[0].error is None:
                live[0].extend(drawn[0].tokens[-1:])
                drawn = run_ahead(opened.rank, [Ahead(live[0], 8)], steps)
                done[0] += drawn[0].tokens
            assert done[0] == wanted.tokens[1 : i_bad + 1]
            assert done[1] == alone[mate].tokens[1 : 1 + len(done[1])] and len(done[1]) == steps
            assert not live[0].failed and live[0].position == len(given.ids) + i_bad + 1
            errors.append((str(drawn[0].error), state_of(opened, live[0])))
            with pytest.raises(ContractError, match="a logit is NaN"):
                list(decode(opened.rank, Ahead(again(opened, stack, given), 8)))
            follow_from = len(done[1]) + 1
            live[1].extend(done[1][-1:])
            if bad not in alone[mate].tokens:
                follow(opened, live[1], alone[mate], follow_from, 8)
    assert errors[0] == errors[1] and f"position={len(given.ids) + i_bad}" in errors[0][0]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("i_given", [0, 1])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 8])
def test_any_number_of_steps_gives_the_same_bytes(
    engine: Engine, alone: list[Alone], i_given: int, steps: int, graph: bool
) -> None:
    given = GIVEN[i_given]
    with running(engine, graph), engine.sequence(given.sampling) as sequence:
        assert begin(engine, sequence, given.ids) == alone[i_given].tokens[0]
        follow(engine, sequence, alone[i_given], 1, steps)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("i_stop", range(1, 9))
def test_a_stop_at_every_place_leaves_the_state_there(
    engine: Engine, alone: list[Alone], i_stop: int, graph: bool
) -> None:
    """A visit of 8 steps that a stop id ends at its i_stop-th token; what comes after it is as ever."""
    given, wanted = GIVEN[MAIN], alone[MAIN]
    stop = wanted.tokens[i_stop]
    assert stop not in wanted.tokens[1:i_stop], "choose another seed"
    with running(engine, graph), engine.sequence(given.sampling) as sequence:
        begin(engine, sequence, given.ids)
        drawn, = run_ahead(engine.rank, [Ahead(sequence, N_NEW, (511, stop))], 8)
        assert drawn.tokens == wanted.tokens[1 : i_stop + 1] and drawn.error is None
        assert state_of(engine, sequence) == wanted.states[i_stop - 1]
        assert device_ahead(engine, sequence)["drawn"] == i_stop, "the device stopped where the host did"
        assert device_rows(engine) == 0
        sequence.extend(drawn.tokens[-1:])
        follow(engine, sequence, wanted, i_stop + 1, 3)


def device_ahead(engine: Engine, sequence: Sequence) -> Any:
    aheads = np.empty(FIELDS["sequences"], AHEAD)
    copy_to_host(engine.rank.stream, aheads, engine.rank.tables.spans["aheads"])
    return aheads[sequence.i_slot]


def device_rows(engine: Engine) -> int:
    found = np.empty(1, ROUND)
    copy_to_host(engine.rank.stream, found, engine.rank.tables.spans["round"])
    assert found["n_rows"] == found["n_runs"]
    return int(found["n_rows"][0])


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("order", "ends"), [
    ((0, 1, 2, 3), (8, 8, 8, 8)), ((2, 0, 3), (1, 8, 8)), ((3, 2, 1, 0), (8, 2, 8, 5)),
    ((1, 3, 0, 2), (2, 3, 4, 1)), ((0, 2), (3, 3))])
def test_sequences_stop_alone_and_the_others_go_on(
    engine: Engine, alone: list[Alone], order: tuple[int, ...], ends: tuple[int, ...], graph: bool
) -> None:
    """ends: how many tokens each draws in a visit of 8 steps; odd ends by a stop id, even ones by count."""
    with running(engine, graph), ExitStack() as stack:
        live = [stack.enter_context(engine.sequence(GIVEN[i].sampling)) for i in order]
        asked = []
        for i, sequence, end in zip(order, live, ends, strict=True):
            begin(engine, sequence, GIVEN[i].ids)
            by_stop = end % 2 and alone[i].tokens[end] not in alone[i].tokens[1:end]
            stops = (alone[i].tokens[end],) if by_stop else ()
            asked.append(Ahead(sequence, 8 if by_stop else end, stops))
        drawn = run_ahead(engine.rank, asked, 8)
        for i, sequence, end, one in zip(order, live, ends, drawn, strict=True):
            assert one.tokens == alone[i].tokens[1 : end + 1] and one.error is None
            assert state_of(engine, sequence) == alone[i].states[end - 1]
            sequence.extend(one.tokens[-1:])
        done = [end + 1 for end in ends]
        while going := [at for at, n in enumerate(done) if n < N_NEW]:  # together, in visits of 2
            drawn = run_ahead(engine.rank, [Ahead(live[at], N_NEW - done[at]) for at in going], 2)
            for at, one in zip(going, drawn, strict=True):
                i, n = order[at], done[at]
                assert one.tokens == alone[i].tokens[n : n + 2] and one.error is None
                done[at] += len(one.tokens)
                assert state_of(engine, live[at]) == alone[i].states[done[at] - 2]
                live[at].extend(one.tokens[-1:])


@pytest.mark.parametrize("graph", [False, True])
def test_nothing_else_on_the_device_differs(micro: Path, device: str, graph: bool) -> None:
    """Whole arenas of pages and slots, also behind the position and of other sequences."""
    found = []
    for steps in (1, 8):
        with Engine.open(micro, Limits(**FIELDS, graph=graph), device=device) as opened, ExitStack() as stack:
            live = [stack.enter_context(opened.sequence(given.sampling)) for given in GIVEN]
            first = [begin(opened, sequence, given.ids) for sequence, given in zip(live, GIVEN, strict=True)]
            tokens = [[token] for token in first]
            most = (2, 8, 5, 1)
            for sequence in live:  # pages that more steps need are taken earlier
                opened.rank.pages.reserve(sequence.i_slot, sequence.position + 8)
            while any(len(mine) <= n for mine, n in zip(tokens, most, strict=True)):
                going = [i for i in range(4) if len(tokens[i]) <= most[i]]
                asked = [Ahead(live[i], most[i] + 1 - len(tokens[i])) for i in going]
                for i, one in zip(going, run_ahead(opened.rank, asked, steps), strict=True):
                    tokens[i] += one.tokens
                    live[i].extend(one.tokens[-1:])
            rank = opened.rank
            arenas = (*rank.pages.arenas, *rank.slots.arenas)
            whole = []
            for arena in arenas:
                if device == "sim":  # no guard zones on a GPU
                    arena.check_guards()
                whole.append(np.empty(arena.size_bytes, np.uint8))
                copy_to_host(rank.stream, whole[-1], arena.address)
            found.append((tokens, [each.tobytes() for each in whole]))
    assert found[0][0] == found[1][0]
    assert found[0][1] == found[1][1]


def again(engine: Engine, stack: ExitStack, given: Given) -> Sequence:
    sequence = stack.enter_context(engine.sequence(given.sampling))
    begin(engine, sequence, given.ids)
    return sequence


@pytest.mark.parametrize("graph", [False, True])
def test_generate_stops_and_counts_as_with_one_step(
    engine: Engine, alone: list[Alone], graph: bool
) -> None:
    given, wanted = GIVEN[MAIN], alone[MAIN]
    with running(engine, graph):
        for n in (1, 2, 6):
            made = engine.generate(given.ids, max_new_tokens=n, sampling=given.sampling, stop_ids=())
            assert made.tokens == wanted.tokens[:n] and made.finish == "length"
            heads = made.counters["head_replays"] + made.counters["eager_heads"]
            assert heads == n, "no round more than tokens"
        for i_stop in (0, 1, 2, 5):
            stop = wanted.tokens[i_stop]
            assert stop not in wanted.tokens[:i_stop], "choose another seed"
            made = engine.generate(given.ids, max_new_tokens=N_NEW, sampling=given.sampling, stop_ids=[stop])
            assert made.tokens == wanted.tokens[: i_stop + 1] and made.finish == "stop"
        stream = engine.stream(given.ids, max_new_tokens=N_NEW, sampling=given.sampling, stop_ids=())
        assert [next(stream) for _ in range(5)] == wanted.tokens[:5]
        stream.close()  # in the middle of a visit's tokens
        assert engine.generate(given.ids, max_new_tokens=3, sampling=given.sampling).tokens == (
            wanted.tokens[:3])


def test_the_host_waits_once_a_visit(engine: Engine) -> None:
    given = GIVEN[MAIN]
    with running(engine, True), engine.sequence(given.sampling) as sequence:
        begin(engine, sequence, given.ids)
        for _ in range(2):  # the second time every graph is there
            with faults.count_calls() as calls:
                drawn, = run_ahead(engine.rank, [Ahead(sequence, 4)], 4)
            sequence.extend(drawn.tokens[-1:])
        assert calls.names.count("cuGraphLaunch") == 8, "body and head of four tokens"
        waits = [name for name in calls.names if "Synchronize" in name]
        assert len(waits) <= 2, "one for the tables' staging, one for the tokens"
        last = len(calls.names) - 1 - calls.names[::-1].index("cuGraphLaunch")
        first = calls.names.index("cuGraphLaunch")
        assert not any("Synchronize" in name for name in calls.names[first:last])
        assert "cuLaunchKernel" not in calls.names


@pytest.mark.parametrize("graph", [False, True])
def test_experts_in_host_memory_are_found_and_counted_alike(
    micro: Path, device: str, alone: list[Alone], graph: bool
) -> None:
    """Rounds behind a stop count nothing and move no line."""
    given, wanted = GIVEN[MAIN], alone[MAIN]
    stop = next(i for i in range(5, N_NEW) if wanted.tokens[i] not in wanted.tokens[1:i])
    found = []
    for steps in (1, 8):
        fields = {**FIELDS, "steps_ahead": steps, "expert_lines": 6, "graph": graph}
        with Engine.open(micro, Limits(**fields), device=device) as opened:
            made = opened.generate(given.ids, max_new_tokens=N_NEW, sampling=given.sampling,
                                   stop_ids=[wanted.tokens[stop]])
            assert made.tokens == wanted.tokens[: stop + 1]
            experts = opened.rank.experts
            stream = opened.rank.stream
            found.append((experts.counters(stream).tobytes(), experts.residents(stream)))
    assert str(found[0]) == str(found[1])


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_a_refused_replay_in_the_middle_runs_eagerly(
    micro: Path, device: str, alone: list[Alone], n: int
) -> None:
    given, wanted = GIVEN[MAIN], alone[MAIN]
    with (
        Engine.open(micro, Limits(**FIELDS), device=device) as opened,
        opened.sequence(given.sampling) as sequence,
    ):
        begin(opened, sequence, given.ids)
        with faults.fail_nth(n, 1, only="cuGraphLaunch") as plan:
            follow(opened, sequence, wanted, 1, 4)
        assert plan.fired == 1 and opened.rank.graphs.counters.failures == 1


@pytest.mark.parametrize("n", [1, 4, 7])
def test_a_launch_that_fails_in_the_middle_ends_its_sequences(
    micro: Path, device: str, alone: list[Alone], n: int
) -> None:
    given = GIVEN[MAIN]
    with Engine.open(micro, Limits(**FIELDS, graph=False), device=device) as opened:
        with opened.sequence(given.sampling) as sequence:
            begin(opened, sequence, given.ids)
            n_launches = len(opened.rank.launches("step", 1))
            name = "cuLaunchKernelEx" if opened.rank.programmatic else "cuLaunchKernel"
            with faults.fail_nth(n * n_launches // 2, 1, only=name), pytest.raises(DriverError):
                run_ahead(opened.rank, [Ahead(sequence, 8)], 4)
            assert sequence.failed
            with pytest.raises(UsageError, match="unknown after a failed round"):
                run_ahead(opened.rank, [Ahead(sequence, 8)], 4)
        made = opened.generate(given.ids, max_new_tokens=4, sampling=given.sampling, stop_ids=())
        assert made.tokens == alone[MAIN].tokens[:4]


def test_twice_as_many_steps_each_visit(micro: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashnext_drv.engine import decode as module

    asked: list[int] = []
    really: Callable[..., Any] = module.run_ahead

    def counted(rank: Any, aheads: Any, steps: int) -> Any:
        asked.append(steps)
        return really(rank, aheads, steps)

    monkeypatch.setattr(module, "run_ahead", counted)
    for most, wanted in ((1, [1] * 9), (3, [1, 2, 3, 3]), (4, [1, 2, 4, 4]), (8, [1, 2, 4, 8])):
        asked.clear()
        with Engine.open(micro, Limits(**{**FIELDS, "steps_ahead": most}), device=device) as opened:
            opened.generate([1, 2, 3], max_new_tokens=10, stop_ids=())
        assert asked == wanted


def test_the_device_counts_what_the_host_counts(engine: Engine, alone: list[Alone]) -> None:
    """Replays of each path by a node in its graphs; rows behind a stop are not live ones."""
    given, wanted = GIVEN[MAIN], alone[MAIN]
    with running(engine, True):
        made = engine.generate(given.ids, max_new_tokens=N_NEW, sampling=given.sampling,
                               stop_ids=[wanted.tokens[4]])
        assert made.tokens == wanted.tokens[:5]
        counters = made.counters
        for path in ("body", "head", "next"):
            assert counters[f"rank0.{path}.device_replays"] == counters[f"rank0.{path}.replays"]
        assert counters["rank0.body.device_replays"] == 8, "prompt, 1, 2 and 4 steps"
        assert counters["rank0.head.device_replays"] == 1
        assert counters["rank0.next.device_rows"] == 4, "tokens drawn after the first"
        assert counters["rank0.body.device_rows"] == len(given.ids) + 4
    with running(engine, False):
        counters = engine.generate(given.ids, max_new_tokens=3, stop_ids=()).counters
        assert counters["rank0.body.device_replays"] == counters["rank0.next.device_replays"] == 0
        assert counters["eager_rounds"] == 3
