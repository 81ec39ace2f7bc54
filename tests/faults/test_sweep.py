"""Every driver call of an engine's life fails, once and from there on, with each plausible code: typed error
or eager rounds with the same tokens, an empty ledger, nothing left in the driver, and a good life after it.

`pytest tests/faults --slow -s` runs the whole sweep and prints its table; without --slow a seeded sample that
holds each call name with each of its codes once.
"""

from __future__ import annotations

import random

import pytest

from . import sweep

pytestmark = pytest.mark.sim


@pytest.fixture
def bench(device_name: str, monkeypatch: pytest.MonkeyPatch) -> sweep.Bench:
    if device_name != "sim":
        pytest.skip("the sweep needs the simulator's counters")
    return sweep.Bench(monkeypatch)


def test_sample_over_every_call_name_and_code(bench: sweep.Bench, case_seed: int) -> None:
    some = sweep.sample(bench.faults(), case_seed)
    assert {f.name for f in some} == set(bench.names) and len(some) > 80
    outcomes = sweep.run(bench, some, case_seed)
    print(sweep.table(outcomes))
    assert sum(outcomes.values()) == len(some)


@pytest.mark.parametrize("deep", ["open", "request"])
def test_sample_over_a_life_with_the_deep_pass(
    device_name: str, monkeypatch: pytest.MonkeyPatch, case_seed: int, deep: str
) -> None:
    """Calls that make the deep pass may also end in a refusal, with the same tokens.  Made at a request: what
    comes before is the sweep without it, and what comes behind is that of a pass made at open."""
    if device_name != "sim":
        pytest.skip("the sweep needs the simulator's counters")
    bench, choose = sweep.Bench(monkeypatch, deep), random.Random(case_seed)
    making = [f for f in bench.faults() if f.n in bench.making]
    if deep == "open":
        some = sweep.sample(bench.faults(), case_seed)
    else:
        behind = [f for f in bench.faults() if f.n >= bench.making.stop]
        some = sweep.sample(making, case_seed) + choose.sample(behind, 30)
    some += choose.sample([f for f in making if not f.forever], 30)
    outcomes = sweep.run(bench, some, case_seed)
    print(sweep.table(outcomes))
    assert sum(outcomes.values()) == len(some) and outcomes[1, False, "fallback"] > 5


@pytest.mark.parametrize("deep", ["off", "open"])
def test_sample_over_a_life_with_experts_in_host_memory(
    device_name: str, monkeypatch: pytest.MonkeyPatch, case_seed: int, deep: str
) -> None:
    """Pinning layer by layer while readers work, line tables, counters; with the deep pass also its ring."""
    if device_name != "sim":
        pytest.skip("the sweep needs the simulator's counters")
    whole = sweep.Bench(monkeypatch, deep)
    bench = sweep.Bench(monkeypatch, deep, lines=2)
    assert bench.tokens == whole.tokens
    choose = random.Random(case_seed)
    some = choose.sample(sweep.sample(bench.faults(), case_seed), 30)
    n_layers = bench.pack.config.n_layers
    assert bench.names.count("cuMemHostAlloc") >= whole.names.count("cuMemHostAlloc") + n_layers
    pinning = [f for f in bench.faults() if f.name == "cuMemHostAlloc" and f.code in (2, 719)]
    some += choose.sample(pinning, 4)
    outcomes = sweep.run(bench, some, case_seed)
    print(sweep.table(outcomes))
    assert sum(outcomes.values()) == len(some)


def test_sample_over_a_life_with_a_mapped_table(
    device_name: str, monkeypatch: pytest.MonkeyPatch, case_seed: int
) -> None:
    """Staging of rounds and of chunks, and the copies in front of rounds."""
    if device_name != "sim":
        pytest.skip("the sweep needs the simulator's counters")
    whole = sweep.Bench(monkeypatch, "open")
    bench = sweep.Bench(monkeypatch, "open", ngram="mapped")
    assert bench.tokens == whole.tokens
    assert bench.names.count("cuMemHostAlloc") == whole.names.count("cuMemHostAlloc") + 1
    assert bench.names.count("cuEventRecord") > whole.names.count("cuEventRecord")
    choose = random.Random(case_seed)
    some = choose.sample(sweep.sample(bench.faults(), case_seed), 20)
    staged = ("cuMemHostAlloc", "cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuMemcpyAsync")
    for name in staged:
        some += choose.sample([f for f in bench.faults() if f.name == name], 6)
    outcomes = sweep.run(bench, some, case_seed)
    print(sweep.table(outcomes))
    assert sum(outcomes.values()) == len(some)


def test_calls_are_the_same_in_every_life(bench: sweep.Bench) -> None:
    with sweep.faults.count_calls() as count:
        assert bench.live(compute=True).tokens == bench.tokens
    assert count.names == bench.names, "skipping kernels may not change the calls"
    assert len(count.names) > 1000 and len(bench.capturing) > 100


def test_sample_over_the_calls_of_closing(bench: sweep.Bench, case_seed: int) -> None:
    """Closing frees much and must try every step."""
    first = max(n for n, name in enumerate(bench.names, 1) if name == "cuEventSynchronize") + 1
    some = [f for f in bench.faults() if f.n >= first and f.code in (1, 719)]
    assert len({f.n for f in some}) > 60
    some = random.Random(case_seed).sample(some, 40)
    assert sum(sweep.run(bench, some, case_seed).values()) == len(some)


@pytest.mark.slow
@pytest.mark.parametrize("forever", [False, True], ids=["once", "from_there_on"])
@pytest.mark.parametrize("code", sweep.CODES)
def test_whole_sweep(bench: sweep.Bench, case_seed: int, code: int, forever: bool) -> None:
    some = [f for f in bench.faults() if f.code == code and f.forever == forever]
    outcomes = sweep.run(bench, some, case_seed)
    print(f"\n{len(some)} of {len(bench.names)} calls\n{sweep.table(outcomes)}", flush=True)
    assert sum(outcomes.values()) == len(some) > 0


@pytest.mark.slow
@pytest.mark.parametrize("deep", ["open", "request"])
@pytest.mark.parametrize("code", sweep.CODES)
def test_whole_sweep_from_the_deep_pass_on(
    device_name: str, monkeypatch: pytest.MonkeyPatch, case_seed: int, code: int, deep: str
) -> None:
    """Its making, the empty rounds, the prompt and the close; what comes before is the sweep above."""
    if device_name != "sim":
        pytest.skip("the sweep needs the simulator's counters")
    bench = sweep.Bench(monkeypatch, deep)
    some = [f for f in bench.faults() if f.n >= bench.making.start and f.code == code and not f.forever]
    outcomes = sweep.run(bench, some, case_seed)
    print(f"\n{len(some)} of {len(bench.names)} calls\n{sweep.table(outcomes)}", flush=True)
    assert sum(outcomes.values()) == len(some) > 0


@pytest.mark.slow
@pytest.mark.parametrize("deep", ["off", "open"])
@pytest.mark.parametrize("code", sweep.CODES)
def test_whole_sweep_with_experts_in_host_memory(
    device_name: str, monkeypatch: pytest.MonkeyPatch, case_seed: int, code: int, deep: str
) -> None:
    """From the first layer pinned on; what comes before is the sweep above."""
    if device_name != "sim":
        pytest.skip("the sweep needs the simulator's counters")
    bench = sweep.Bench(monkeypatch, deep, lines=2)
    pins = [n for n, name in enumerate(bench.names, 1) if name == "cuMemHostAlloc"]
    first = pins[-bench.pack.config.n_layers - 2 * (deep != "off")]  # the deep pass pins twice after it
    some = [f for f in bench.faults() if f.n >= first and f.code == code and not f.forever]
    outcomes = sweep.run(bench, some, case_seed)
    print(f"\n{len(some)} of {len(bench.names)} calls\n{sweep.table(outcomes)}", flush=True)
    assert sum(outcomes.values()) == len(some) > 0
