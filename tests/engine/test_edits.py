"""Edited logits: tokens are those that the formula gives over raw logits, in any launch, beside any rows;
what callers read stays raw; and rounds without edits run what they ran."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from flashnext_drv.__main__ import main
from flashnext_drv.check import draw_model
from flashnext_drv.drv import faults
from flashnext_drv.engine.decode import Ahead, run_ahead
from flashnext_drv.engine.engine import Edits, Engine, Limits, Sampling
from flashnext_drv.engine.prefill import Prefill
from flashnext_drv.engine.round import Window, run_round
from flashnext_drv.engine.sequence import Sequence
from flashnext_drv.errors import DriverError, UsageError

pytestmark = pytest.mark.sim
N_NEW = 6
STEPS = 4  # a visit of all, and one token behind it: N_NEW with the first


@dataclass(frozen=True)
class Given:
    """A prompt, how its tokens are drawn, and from what."""

    ids: tuple[int, ...]
    sampling: Sampling
    edits: Edits


# The third edits nothing; the others each have a rule of their own, and two draw ids of their prompt again.
GIVEN = (
    Given((3, 7, 250, 12, 3, 7), Sampling(), Edits(repetition=0.4, presence=-1.5, frequency=0.9)),
    Given((9, 77, 500, 1, 7), Sampling(seed=5, temperature=1.0, top_k=40, top_p=0.9),
          Edits(repetition=0.6, frequency=-0.5, bias=((9, 3.0), (77, -np.inf), (40, 2.5)))),
    Given((301, 2, 60), Sampling(seed=6, temperature=1.5, min_p=0.01), Edits()),
    Given((11, 4, 5), Sampling(), Edits(presence=-30.0, min_new_tokens=4, stop_ids=(8, 300))),
)


@pytest.fixture(scope="module")
def engine(micro: Path, device: str) -> Iterator[Engine]:
    limits = Limits(context_tokens=96, rows=16, prompt_rows=16, sequences=4, steps_ahead=STEPS, deep_rows=4,
                    chunk=64)
    with Engine.open(micro, limits, device=device) as opened:
        yield opened


@contextmanager
def running(engine: Engine, graph: bool) -> Iterator[None]:
    before, engine.rank.use_graphs = engine.rank.use_graphs, graph
    try:
        yield
    finally:
        engine.rank.use_graphs = before


def drawn_from(raw: np.ndarray, prompt: list[int], output: list[int], edits: Edits) -> np.ndarray:
    """(V,) float32: the logits that the next token is drawn from, over the whole vocabulary at once."""
    x = raw.copy()
    seen, counts = np.zeros(len(x), bool), np.bincount(output, minlength=len(x)).astype(np.float32)
    seen[[*prompt, *output]] = True
    r = np.float32(edits.repetition)
    x = np.where(seen, np.where(x > 0, x / r, x * r), x)
    x = np.where(counts > 0, (x - np.float32(edits.frequency) * counts) - np.float32(edits.presence), x)
    for token, bias in edits.bias:
        x[token] += np.float32(bias)
    if len(output) < edits.min_new_tokens:
        x[list(edits.stop_ids)] = -np.inf
    return x.astype(np.float32)


def formula(engine: Engine, ids: list[int], n_prompt: int, given: Given) -> list[int]:
    """What is drawn behind each of ids[n_prompt - 1 :], from the raw logits of the same ids."""
    raw = engine.logits(ids, (n_prompt - 1, len(ids)), prefill=Prefill(deep=False))
    sampling = draw_model.Sampling(**{name: getattr(given.sampling, name) for name in (
        "seed", "temperature", "top_k", "top_p", "min_p")})
    return [draw_model.draw(drawn_from(row, ids[:n_prompt], ids[n_prompt : n_prompt + i], given.edits),
                            sampling, n_prompt - 1 + i)[0] for i, row in enumerate(raw)]


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[list[int]]:
    """Of each of GIVEN: N_NEW tokens by eager rounds of one row, also in the prompt, one token a visit."""
    made = []
    with running(engine, False):
        for given in GIVEN:
            with engine.sequence(given.sampling, given.edits) as sequence:
                tokens = begin(engine, sequence, given.ids, Prefill(serial=True))
                while len(tokens) < N_NEW:
                    tokens += run_round(engine.rank, [Window(sequence, draw=True)]).tokens
                    sequence.extend(tokens[-1:])
                made.append(tokens)
    return made


def begin(
    engine: Engine, sequence: Sequence, ids: tuple[int, ...], prefill: Prefill | None = None
) -> list[int]:
    """Run a prompt; the token drawn after it, appended."""
    sequence.extend(ids)
    tokens = engine.prompt([sequence], draw=True, prefill=prefill or Prefill(deep=False))
    sequence.extend(tokens)
    return tokens


@pytest.mark.parametrize("i_given", range(len(GIVEN)))
def test_tokens_are_those_of_the_formula(engine: Engine, alone: list[list[int]], i_given: int) -> None:
    given, tokens = GIVEN[i_given], alone[i_given]
    assert formula(engine, [*given.ids, *tokens[:-1]], len(given.ids), given) == tokens
    if given.edits.active:
        plain = replace(given, edits=Edits())
        assert formula(engine, [*given.ids, *tokens[:-1]], len(given.ids), plain) != tokens, "nothing changed"


@pytest.mark.parametrize(("i_given", "prefill", "graph"), [
    (0, Prefill(deep=False), True), (1, Prefill(deep=False, chunk=2), False),
    (3, Prefill(deep=False, chunk=2), True), (0, Prefill(deep_rows=1), False)])
def test_every_way_of_one_sequence_draws_the_same(
    engine: Engine, alone: list[list[int]], i_given: int, prefill: Prefill, graph: bool
) -> None:
    """Chunked and deep prompts, then several tokens a visit."""
    given, before = GIVEN[i_given], engine.prompts.deep_rows
    with running(engine, graph):
        made = engine.generate(given.ids, max_new_tokens=N_NEW, sampling=given.sampling, stop_ids=(),
                               edits=given.edits, prefill=prefill)
    assert made.tokens == alone[i_given]
    assert engine.prompts.deep_rows - before == (len(given.ids) if prefill.deep else 0)


@pytest.mark.parametrize(("order", "graph"), [((0, 1, 2, 3), True), ((3, 2, 0), False)])
def test_rows_with_and_without_edits_do_not_see_each_other(
    engine: Engine, alone: list[list[int]], order: tuple[int, ...], graph: bool
) -> None:
    """One visit of several tokens for all, in which the second stops alone, then one token a visit."""
    with running(engine, graph), ExitStack() as stack:
        live = [stack.enter_context(engine.sequence(GIVEN[i].sampling, GIVEN[i].edits)) for i in order]
        for i, sequence in zip(order, live, strict=True):
            assert begin(engine, sequence, GIVEN[i].ids) == alone[i][:1]
        asked = [Ahead(sequence, 2 if n == 1 else 8) for n, sequence in enumerate(live)]
        done = [1 + len(one.tokens) for one in run_ahead(engine.rank, asked, STEPS)]
        assert done == [3 if n == 1 else 1 + STEPS for n in range(len(order))]
        for i, sequence, n in zip(order, live, done, strict=True):
            sequence.extend([alone[i][n - 1]])
            assert sequence.ids == [*GIVEN[i].ids, *alone[i][:n]]
        last = run_round(engine.rank, [Window(sequence, draw=True) for sequence in live])
        assert last.tokens == [alone[i][n] for i, n in zip(order, done, strict=True)]


def test_logits_that_are_kept_are_the_raw_ones(engine: Engine, alone: list[list[int]]) -> None:
    given = GIVEN[0]
    raw = engine.logits([*given.ids, *alone[0][:2]], prefill=Prefill(deep=False))
    with engine.sequence(given.sampling, given.edits) as sequence, engine.sequence() as other:
        other.extend([1, 2])
        sequence.extend(given.ids)
        whole = Window(sequence, len(given.ids), draw=True, logits=True)
        made = run_round(engine.rank, [Window(other, draw=True, logits=True), whole])
        assert made.logits is not None and made.tokens[1] == alone[0][0]
        assert made.logits[1:].tobytes() == raw[: len(given.ids)].tobytes()
        for i in range(2):
            sequence.extend([alone[0][i]])
            made = run_round(engine.rank, [Window(sequence, draw=True, logits=True)])
            assert made.tokens == [alone[0][i + 1]] and made.logits is not None
            assert made.logits.tobytes() == raw[len(given.ids) + i].tobytes()
        sequence.extend([alone[0][2]])
        assert run_ahead(engine.rank, [Ahead(sequence, 1)], 1)[0].tokens == alone[0][3:4]
        left = engine.rank.read_logits(0, 1)[0]
    assert left.tobytes() == engine.logits([*given.ids, *alone[0][:3]], (8, 9)).tobytes(), "put back here too"


def test_what_was_not_drawn_counts_from_the_first_draw_on(engine: Engine) -> None:
    """Other tokens than the drawn ones are appended, several at once, and rows are run that do not draw."""
    given = replace(GIVEN[0], sampling=Sampling(seed=9, temperature=1.0))
    with engine.sequence(given.sampling, given.edits) as sequence:
        sequence.extend(given.ids)
        tokens = [engine.prompt([sequence], draw=True)[0]]
        sequence.extend([12, 12, 4])
        tokens += run_round(engine.rank, [Window(sequence, 3, draw=True)]).tokens
        sequence.extend([tokens[-1]])
        run_round(engine.rank, [Window(sequence)])
        sequence.extend([44])
        tokens += run_ahead(engine.rank, [Ahead(sequence, 3)], 3)[0].tokens
        sequence.extend(tokens[-1:])
        tokens += run_ahead(engine.rank, [Ahead(sequence, 1)], 1)[0].tokens
        ids, n_prompt = list(sequence.ids), len(given.ids)
        wanted = formula(engine, ids, n_prompt, given)
        assert sequence.n_prompt == n_prompt
        assert tokens == [wanted[i] for i in (0, 3, 5, 6, 7, 8)]
        sequence.edits = Edits(bias=((17, 500.0),))
        sequence.extend(tokens[-1:])
        assert run_round(engine.rank, [Window(sequence, draw=True)]).tokens == [17], "others from now on"


def test_no_stop_before_the_least_number_of_tokens(engine: Engine) -> None:
    plain = engine.generate((3, 7), max_new_tokens=5, stop_ids=()).tokens
    stop = plain[0]
    assert engine.generate((3, 7), max_new_tokens=5, stop_ids=[stop]).tokens == [stop]
    for least in (1, 3):
        made = engine.generate((3, 7), max_new_tokens=least + 1, stop_ids=[stop],
                               edits=Edits(min_new_tokens=least, bias=((stop, 1000.0),)))
        assert stop not in made.tokens[:least] and made.tokens[least:] == [stop] and made.finish == "stop"


def test_rounds_without_edits_run_no_node_more(engine: Engine) -> None:
    rank = engine.rank
    for path in ("head", "next", "body"):
        assert "edit_logits" not in [launch.name for launch in rank.launches(path, 1)]
    made = engine.generate((3, 7), max_new_tokens=3, stop_ids=(), edits=Edits(min_new_tokens=2))
    assert made.counters["rank0.next_edits.device_rows"] == made.counters["rank0.head_edits.device_rows"] == 0
    assert not Edits(min_new_tokens=2).active and Edits(min_new_tokens=2, stop_ids=(1,)).active
    given = GIVEN[0]
    with engine.sequence(given.sampling, given.edits) as sequence:
        begin(engine, sequence, given.ids)
        for _ in range(2):  # the second time every graph is there
            with faults.count_calls() as calls:
                drawn, = run_ahead(rank, [Ahead(sequence, 2)], 2)
            sequence.extend(drawn.tokens[-1:])
        assert "cuMemcpyHtoDAsync" not in calls.names, "the device goes on counting"
        assert calls.names.count("cuGraphLaunch") == 4


def test_a_list_that_cannot_be_sent_ends_its_sequence_alone(engine: Engine, alone: list[list[int]]) -> None:
    given = GIVEN[0]
    with engine.sequence(given.sampling, given.edits) as sequence, engine.sequence() as other:
        sequence.extend(given.ids)
        with faults.fail_nth(1, 2, only="cuMemcpyHtoDAsync"), pytest.raises(DriverError):
            run_round(engine.rank, [Window(sequence, len(given.ids), draw=True)])
        assert sequence.failed and not other.failed
    made = engine.generate(given.ids, max_new_tokens=2, stop_ids=(), edits=given.edits)
    assert made.tokens == alone[0][:2]


def test_edits_that_no_engine_takes(engine: Engine) -> None:
    wrong = [Edits(bias=((512, 1.0),)), Edits(bias=((-1, 1.0),)), Edits(min_new_tokens=1, stop_ids=(10**12,)),
             "none", {"presence": 1.0}]
    for edits in wrong:
        with pytest.raises(UsageError):
            engine.stream((1, 2), max_new_tokens=1, edits=edits)  # type: ignore[arg-type]
        with pytest.raises(UsageError), engine.sequence(edits=edits):  # type: ignore[arg-type]
            pass
    with engine.sequence() as sequence:
        sequence.extend([1, 2])
        sequence.edits = wrong[0]  # type: ignore[assignment]
        with pytest.raises(UsageError, match="outside the vocabulary"):
            run_round(engine.rank, [Window(sequence, 2, draw=True)])
        assert not sequence.failed and sequence.n_done == 0


def test_the_command_takes_edits(
    micro: Path, device: str, alone: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    given = GIVEN[1]
    argv = ["generate", str(micro), "--device", device, "--json", "--ids", ",".join(map(str, given.ids)),
            "--max-new", "3", "--no-stop", "--no-deep", "--temperature", "1", "--top-k", "40", "--top-p",
            "0.9", "--seed", "5", "--repetition-penalty", "0.6", "--frequency-penalty", "-0.5"]
    bias = ["--logit-bias", "9=3", "--logit-bias", "77=-inf", "--logit-bias", "40=2.5"]
    assert main([*argv, *bias]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == alone[1][:3]
    for wrong in (["--logit-bias", "9"], ["--logit-bias", "9=x"], ["--logit-bias", "9=nan"],
                  ["--presence-penalty", "inf"], ["--repetition-penalty", "0"], ["--min-new", "-1"]):
        assert main([*argv, *wrong]) == 2, wrong
        capsys.readouterr()
