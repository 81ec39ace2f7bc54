"""Any prompt, cut anywhere and run by any path, leaves the bytes of serial decode.

Drawn by hypothesis: pack, sequences, cuts, chunk, threshold, path, refusals, and a cancel after which the
prompt goes on.  The oracle is serial decode, one row a launch, once for each token stream: logits, draw and
all state bytes after every row.  CI draws the same few scenarios each time; --slow draws many more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from flashnext_drv.drv import faults
from flashnext_drv.engine.engine import Engine, Limits, Prefill
from flashnext_drv.engine.plan import plan
from flashnext_drv.engine.prefill import Prompt, run_prompts
from flashnext_drv.engine.round import Window, run_round
from flashnext_drv.engine.sequence import Sequence
from flashnext_drv.errors import Cancelled
from flashnext_drv.model.synth import SynthPack
from flashnext_drv.model.synth_models import MODELS
from flashnext_drv.sim import control

pytestmark = pytest.mark.sim
N_NEW = 24
CONTEXT = 192
FEW = settings(
    max_examples=16, derandomize=True, database=None, deadline=None, phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
MANY = settings(FEW, max_examples=200, derandomize=False)
EDGES = (1, 2, 3, 4, 5, 7, 13, 15, 16, 17, 31, 37, 61, 63, 64, 65, 79, 83, 127, 128, 129)
LEAN = {  # one expert a token, wider than the shared one; 16 query heads a kv head; 5 value heads a key head
    "hidden_size": 128, "vocab_size": 128, "hc_lowrank": 16, "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"], "ple_layer_ids": [2], "ple_embed_dim": 256,
    "heads_per_ngram": 1, "ngram_vocab_size_base": 67, "num_attention_heads": 16, "num_key_value_heads": 1,
    "linear_num_key_heads": 1, "linear_num_value_heads": 5, "num_experts": 7, "num_experts_per_tok": 1,
    "moe_intermediate_size": 384, "shared_expert_intermediate_size": 128, "indexer_budget": 4,
    "eos_token_id": 127,
}  # fmt: skip
# pack -> rows of each of its token streams; the first is the long one
PACKS = {"micro": (131, 37), "mixed": (67, 37), "lean": (67, 33), "tiny": (13, 5)}
MODES = ("open", "open", "open", "open", "request", "refused at open", "refused at request")


@dataclass(frozen=True)
class Scenario:
    """pack: of PACKS; seed: of a synthetic one.  rows: of each sequence, i-th on the pack's
    i-th token stream.  cuts: places where the prompts are given on, for each sequence that is longer.
    cancel: the ask that stops, 0: none.  after: compare greedy tokens of the first sequence too."""

    pack: str
    rows: tuple[int, ...]
    cuts: tuple[int, ...] = ()
    chunk: int | None = None
    deep_rows: int = 1
    deep: bool = True
    mode: str = "open"
    cancel: int = 0
    after: bool = False
    seed: int = 5


@st.composite
def scenarios(draw: st.DrawFn, seeds: tuple[int, ...] = (5,)) -> Scenario:
    pack = draw(st.sampled_from(("micro", "micro", "mixed", "lean", "tiny")))
    most = PACKS[pack]
    edge = st.sampled_from(EDGES)
    lengths = [draw(st.one_of(edge.filter(lambda n, m=m: n <= m), st.integers(1, m))) for m in most]
    rows = tuple(lengths[: draw(st.integers(1, 2))])
    longest = max(rows)
    cuts = draw(st.lists(st.one_of(edge, st.integers(1, longest)), max_size=3, unique=True))
    # a chunk costs the simulator about as much as 30 rows: no more than some 8 of them
    chunk = draw(st.one_of(st.none(), edge, st.integers(1, 130)))
    if chunk is not None:
        chunk = min(max(chunk, -(-sum(rows) // 8)), CONTEXT)
    mode = draw(st.sampled_from(MODES)) if pack != "tiny" else "open"
    after = pack != "tiny" and draw(st.sampled_from((False, True, False)))  # tiny's decode takes long here
    return Scenario(
        pack, rows, tuple(sorted(cuts)), chunk, draw(st.sampled_from((1, 1, 1, 2, 3, 9, 40))),
        draw(st.sampled_from((True, True, True, True, False))), mode,
        draw(st.sampled_from((0, 0, 0, 1, 2, 3, 5))), after, draw(st.sampled_from(seeds)),
    )


@dataclass
class Oracle:
    """Of one token stream by serial decode.  states: hashes of every array after each row."""

    ids: list[int]
    logits: np.ndarray
    drawn: list[int]
    states: list[dict[str, str]]
    greedy: dict[int, list[int]]


class World:
    """Engines by (pack, mode), opened when first asked for, and the oracles of their packs."""

    def __init__(self, micro: Path, device: str) -> None:
        self._stack = ExitStack()
        self._micro, self._device = micro, device
        self._engines: dict[tuple[str, int, str], Engine] = {}
        self._oracles: dict[tuple[str, int, int], Oracle] = {}

    def close(self) -> None:
        self._stack.close()

    def engine(self, pack: str, seed: int, mode: str) -> Engine:
        key = (pack, seed, mode)
        if key not in self._engines:
            limits = Limits(context_tokens=CONTEXT, rows=16, prompt_rows=16, sequences=3, deep_rows=1,
                            page_order="shuffled:7", deep="request" if "request" in mode else "open")
            if mode == "refused at open":
                whole = self.engine(pack, seed, "open")
                base = plan(whole.rank.layout, whole.pack, self._device == "sim").device
                limits = replace(limits, device_bytes=sum(base.values()) + 4096)
            self._engines[key] = self._stack.enter_context(
                Engine.open(self._pack(pack, seed), limits, device=self._device))
            if mode == "refused at open":
                assert self._engines[key].rank.deep is None
        return self._engines[key]

    def _pack(self, name: str, seed: int) -> Any:
        if name == "micro":
            return self._micro
        if name == "lean":
            lean = replace(MODELS["micro"], name=name, text=MODELS["micro"].text | LEAN)
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(MODELS, name, lean)
                return SynthPack(name, seed, mixed=True)
        model = "micro" if name == "mixed" else "tiny"
        return SynthPack(model, seed, mixed=name == "mixed", locality=0.1 * seed)

    def oracle(self, pack: str, seed: int, i_stream: int) -> Oracle:
        key = (pack, seed, i_stream)
        if key not in self._oracles:
            engine = self.engine(pack, seed, "open")
            self._oracles[key] = self._serial(engine, PACKS[pack][i_stream], i_stream)
        return self._oracles[key]

    def _serial(self, engine: Engine, n_rows: int, seed: int) -> Oracle:
        vocab, eos = engine.config.vocab, engine.config.eos_id
        rng = np.random.default_rng(1000 + seed)
        ids = [int(i) for i in rng.integers(0, vocab, n_rows)]
        ids = [eos if i in (0, 5, 6, 40, 63, 64) else ids[i] for i in range(n_rows)]
        made = Oracle(ids, np.empty((n_rows, vocab), np.float32), [], [], {})
        with engine.sequence() as sequence:
            sequence.extend(ids)
            for i in range(n_rows):
                result = run_round(engine.rank, [Window(sequence, draw=True, logits=True)])
                assert result.logits is not None
                made.logits[i] = result.logits[0]
                made.drawn.append(result.tokens[0])
                made.states.append(hashes(engine, sequence))
        return made

    def greedy(self, pack: str, seed: int, i_stream: int, n_rows: int) -> list[int]:
        """After the stream's first n_rows, by decode alone."""
        oracle = self.oracle(pack, seed, i_stream)
        if n_rows not in oracle.greedy:
            engine = self.engine(pack, seed, "open")
            with engine.sequence() as sequence:
                sequence.extend(oracle.ids[:n_rows])
                while sequence.n_pending > 1:
                    run_round(engine.rank, [Window(sequence, min(16, sequence.n_pending - 1))])
                token = run_round(engine.rank, [Window(sequence, draw=True)]).tokens[0]
                assert hashes(engine, sequence) == oracle.states[n_rows - 1]
                oracle.greedy[n_rows] = decode(engine, sequence, token)
        return oracle.greedy[n_rows]


def hashes(engine: Engine, sequence: Sequence) -> dict[str, str]:
    state = engine.export_state(sequence)
    return {name: hashlib.sha256(np.ascontiguousarray(value)).hexdigest() for name, value in state.items()}


def decode(engine: Engine, sequence: Sequence, token: int) -> list[int]:
    """N_NEW greedy tokens, the given one first."""
    tokens = [token]
    while len(tokens) < N_NEW:
        sequence.extend(tokens[-1:])
        tokens.append(run_round(engine.rank, [Window(sequence, draw=True)]).tokens[0])
    return tokens


def run_scenario(world: World, scenario: Scenario) -> None:
    """Run it and compare everything with serial decode."""
    pack = (scenario.pack, scenario.seed)
    engine = world.engine(*pack, scenario.mode)
    oracles = [world.oracle(*pack, i) for i in range(len(scenario.rows))]
    logits = [np.zeros((n, engine.config.vocab), np.float32) for n in scenario.rows]
    drawn = [-1] * len(scenario.rows)
    before = replace(engine.prompts)
    refuses = scenario.mode == "refused at request"
    with ExitStack() as stack:
        sequences = [stack.enter_context(engine.sequence()) for _ in scenario.rows]
        asks = 0

        def stop() -> bool:
            nonlocal asks
            asks += 1
            return asks == scenario.cancel

        how = Prefill(chunk=scenario.chunk, deep_rows=scenario.deep_rows, deep=scenario.deep, cancel=stop)
        for end in (*scenario.cuts, max(scenario.rows)):
            for sequence, oracle, n in zip(sequences, oracles, scenario.rows, strict=True):
                sequence.extend(oracle.ids[len(sequence.ids) : min(end, n)])
            while any(sequence.n_pending for sequence in sequences):
                prompts = [_asked(sequence, kept) for sequence, kept in zip(sequences, logits, strict=True)]
                pending = sum(sequence.n_pending for sequence in sequences)
                told: list[tuple[int, int]] = []
                now = replace(how, progress=lambda done, of, to=told: to.append((done, of)))
                try:
                    with faults.fail_nth(1, 2, only="cuMemAlloc") if refuses else nullcontext():
                        run_prompts(engine.rank, prompts, now, engine.prompts)
                    assert told[-1] == (pending, pending)
                except Cancelled as error:
                    left = sum(sequence.n_pending for sequence in sequences)
                    assert error.done_tokens == pending - left and left > 0
                    assert not told or told[-1] == (pending - left, pending)
                drawn = [p.token if p.token >= 0 else old for p, old in zip(prompts, drawn, strict=True)]
        made = engine.prompts.since(before)
        assert made["serial_rows"] == 0 and made["deep_rows"] + made["batched_rows"] == sum(scenario.rows)
        if not scenario.deep or "refused" in scenario.mode:
            assert made["deep_rows"] == 0
        elif scenario.deep_rows == 1:
            assert made["batched_rows"] == 0
        for i, (sequence, oracle, n) in enumerate(zip(sequences, oracles, scenario.rows, strict=True)):
            wrong = [j for j in range(n) if logits[i][j].tobytes() != oracle.logits[j].tobytes()]
            assert not wrong, f"sequence {i}: logits of rows {wrong[:9]}"
            found = hashes(engine, sequence)
            assert found.keys() == oracle.states[n - 1].keys()
            wrong_names = [name for name, value in oracle.states[n - 1].items() if found[name] != value]
            assert not wrong_names, f"sequence {i}: {wrong_names}"
            assert drawn[i] == oracle.drawn[n - 1]
        if scenario.after:
            expected = world.greedy(*pack, 0, scenario.rows[0])
            assert decode(engine, sequences[0], drawn[0]) == expected
    assert engine.rank.slots.free_slots == 3 and engine.rank.pages.free_pages == engine.rank.layout.n_pages


def _asked(sequence: Sequence, kept: np.ndarray) -> Prompt:
    def keep(i_id: int, block: np.ndarray) -> None:
        assert not kept[i_id : i_id + len(block)].any(), "a row was handed over twice"
        kept[i_id : i_id + len(block)] = block

    return Prompt(sequence, draw=True, keep_from=sequence.n_done, keep=keep)


@pytest.fixture(scope="module")
def world(micro: Path, device: str) -> Iterator[World]:
    made = World(micro, device)
    yield made
    made.close()


@FEW
@given(scenario=scenarios())
@example(Scenario("micro", (129,), (63, 64, 65, 127, 128), 64, after=True))
@example(Scenario("micro", (129, 37), (), 65, 40, cancel=2, after=True))
@example(Scenario("micro", (65, 17), (1, 2, 3), None, 2, mode="refused at request", after=True))
@example(Scenario("tiny", (13, 5), (), 7, 1))
def test_any_prompt_leaves_the_bytes_of_serial_decode(world: World, scenario: Scenario) -> None:
    run_scenario(world, scenario)


@pytest.mark.slow
@MANY
@given(scenario=scenarios(seeds=(0, 3, 5, 10)))
def test_many_prompts_leave_the_bytes_of_serial_decode(world: World, scenario: Scenario) -> None:
    run_scenario(world, scenario)


class LeftOut:
    """A launch whose kernel does nothing: outputs keep what was there."""

    def __init__(self, launch: Any) -> None:
        self.launch, self.name = launch, launch.name

    def run(self, stream: Any) -> None:
        stream.synchronize()
        control.set_skip_kernels(True)
        try:
            self.launch.run(stream)
            stream.synchronize()
        finally:
            control.set_skip_kernels(False)


@pytest.mark.parametrize(("kernel", "text"), [
    ("ple_tail", ".ple_conv'"), ("gdn_scan", "logits of rows"), ("moe_deep_sum", "logits of rows"),
    ("stream_add", "logits of rows"), ("qsa_deep", "logits of rows"), ("moe_plan_place", "logits of rows")])
def test_the_property_fails_when_one_kernel_is_wrong(
    world: World, device: str, kernel: str, text: str
) -> None:
    """The last launch of that kernel in the walk is left out."""
    if device != "sim":
        pytest.skip("kernels are left out in the simulator only")
    scenario = Scenario("micro", (40,))
    run_scenario(world, scenario)
    rank = world.engine("micro", scenario.seed, "open").rank
    deep = rank.deep
    assert deep is not None
    launches = deep.launches(128)
    index = max(i for i, launch in enumerate(launches) if launch.name == kernel)
    real = launches[index]
    launches[index] = LeftOut(real)
    rank.use_graphs = False  # a graph holds the real one
    try:
        with pytest.raises(AssertionError, match=text):
            run_scenario(world, scenario)
    finally:
        launches[index] = real
        rank.use_graphs = True
    run_scenario(world, scenario)
