"""A few thousand mangled inputs of every kind: errors of our tree and nothing else.

The long run is `python tools/fuzz.py --n 100000`; a failure here prints the command that repeats one input.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashnext_drv.errors import UsageError
from flashnext_drv.kernels.cubin import CubinKernel, read_cubin
from flashnext_drv.ledger import Ledger
from flashnext_drv.model.layout import Layout, Limits
from flashnext_drv.model.pack import Pack
from tools import fuzz, fuzz_pack
from tools.fuzz_targets import TARGETS, Bench, Target
from tools.fuzz_values import mangle_bytes, mangle_json

N = 300     # inputs of each kind; 10 kinds


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    yield Bench(tmp_path)


def test_the_unmangled_pack_is_whole(bench: Bench) -> None:
    pack = Pack.open(bench.pack)
    pack.check()
    assert pack.ngram().bits == 2 and Layout(pack.config, Limits()).n_pages == 64


def test_the_unmangled_cubin_is_read() -> None:
    sm, kernels = read_cubin(fuzz_pack.tiny_cubin())
    text = hashlib.sha256(bytes(range(64))).hexdigest()
    assert (sm, kernels) == (90, {"k": CubinKernel(40, 8, 16, 128, 1, ((0, 8), (8, 4)), text)})


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_only_typed_errors(target: Target, tmp_path: Path, case_seed: int) -> None:
    found = fuzz.run_fuzz(N, case_seed, targets=(target,), folder=tmp_path, growth_kib=8192, cpu_s=5.0)
    assert not found.failures, "\n".join(found.failures)
    typed = sum(n for kind, n in found.outcomes[target.name].items() if kind != "accepted")
    assert found.n == N and typed > N // 20, f"hardly an input was refused: {found.line()}"


def test_mangling_follows_the_seed() -> None:
    value = {"a": [1, {"b": "c"}], "d": 2.5}
    made = [json.dumps(mangle_json(random.Random(s), value, 3), sort_keys=True) for s in range(200)]
    assert made == [json.dumps(mangle_json(random.Random(s), value, 3), sort_keys=True) for s in range(200)]
    assert len(set(made)) > 150
    assert len({mangle_bytes(random.Random(s), b"0123456789") for s in range(200)}) > 100


# The runner must see what it is there to see.


def _run(run: object, n: int = 40, **bounds: float) -> fuzz.Outcome:
    return fuzz.run_fuzz(n, 0, targets=(Target("planted", 1, run),), **bounds)  # type: ignore[arg-type]


def test_another_error_is_a_failure_that_can_be_repeated() -> None:
    def broken(rng: random.Random, bench: Bench) -> None:
        if rng.random() < 0.2:
            raise KeyError("planted")
        raise UsageError("typed")

    found = _run(broken)
    assert 0 < len(found.failures) < 20 and "KeyError" in found.failures[0]
    assert "python tools/fuzz.py --seed 0 --only " in found.failures[0]
    assert found.line().startswith("FUZZ FAIL 40 inputs")


def test_a_hang_is_a_failure() -> None:
    def slow(rng: random.Random, bench: Bench) -> None:
        while True:
            try:
                pow(3, 100_000)
            except Exception:
                continue

    found = _run(slow, n=1, cpu_s=0.2)
    assert len(found.failures) == 1 and "processor time" in found.failures[0]


def test_a_leak_of_files_memory_or_ledger_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    held: list[object] = []

    def files(rng: random.Random, bench: Bench) -> None:
        held.append(open(tmp_path / "x", "rb"))     # noqa: SIM115

    def memory(rng: random.Random, bench: Bench) -> None:
        pages = mmap.mmap(-1, 1 << 18)      # not the heap, which may hold freed memory to grow into
        pages.write(b"x" * (1 << 18))
        held.append(pages)

    def ledger(rng: random.Random, bench: Bench) -> None:
        bench.ledgers.append(Ledger())
        if rng.random() < 0.3:
            bench.ledgers[-1].add("planted", "host", 4)

    found = _run(files, n=200)
    for stream in held:
        stream.close()      # type: ignore[attr-defined]
    held.clear()
    assert any("open files" in text for text in found.failures)
    assert any("resident memory" in text for text in _run(memory, n=200, growth_kib=1024).failures)
    held.clear()
    found = _run(ledger)
    assert found.n_ledgers and any("ledger: " in text for text in found.failures)


def test_a_message_of_several_lines_is_a_failure() -> None:
    def lines(rng: random.Random, bench: Bench) -> None:
        raise UsageError("two\nlines")

    assert "several lines" in _run(lines, n=1).failures[0]
