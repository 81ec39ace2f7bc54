"""Limits.ngram "mapped" gives the bytes of the pinned table: logits, states and tokens, on every path; and a
pack that loses rows while it is in use gives a typed error, nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext_drv.engine.engine import Engine, Limits
from flashnext_drv.engine.plan import plan
from flashnext_drv.engine.prefill import Prompt, run_prompts
from flashnext_drv.errors import CheckpointError
from flashnext_drv.model.deep_layout import DeepLayout
from flashnext_drv.model.pack import Pack, PackBase
from flashnext_drv.model.synth import SynthPack

from . import prompts
from .test_pack_forms import NGRAM, write

pytestmark = pytest.mark.sim
IDS, N_NEW = prompts.IDS[:26], 3
LIMITS: dict[str, Any] = {"context_tokens": 96, "rows": 4, "prompt_rows": 4, "sequences": 2, "deep_rows": 2}


def opened(pack: str | Path | PackBase, device: str, ngram: str, **fields: Any) -> Engine:
    return Engine.open(pack, Limits(**{**LIMITS, **fields, "ngram": ngram}), device=device)


@pytest.fixture(scope="module", params=["rules", "trellis", "bf16", "mixed"])
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, micro: Path) -> Any:
    """A synthetic pack; on disk in shards of trellis rows, as plain rows, and in one piece."""
    if request.param == "rules":
        return SynthPack("micro", 4)
    if request.param == "trellis":
        return micro
    folder = tmp_path_factory.mktemp("ngram") / "pack"
    if request.param == "mixed":
        SynthPack("micro", 4, mixed=True).write(folder)
        return folder
    stored = Pack.open(micro)
    plain = {name: (t.dtype, list(t.shape), stored.read(name).tobytes()) for name, t in stored.tensors.items()
             if not name.startswith((f"{NGRAM}.shard_", f"{NGRAM}.head_bias"))}
    values = np.random.default_rng(4).standard_normal((896, 160), np.float32)
    plain[f"{NGRAM}.weight"] = ("BF16", [896, 160], (values.view(np.uint32) >> 16).astype("<u2").tobytes())
    write(folder, micro, plain, pad=3)
    return folder


@pytest.fixture(scope="module")
def pinned_run(pack: Any, device: str, prompt_run: Callable[..., Any]) -> Any:
    with opened(pack, device, "pinned", deep="off") as engine:
        return prompt_run(engine, IDS, prompts.SERIAL, n_new=N_NEW)


@pytest.fixture(scope="module")
def mapped(pack: Any, device: str, pinned_run: Any) -> Iterator[Engine]:
    with opened(pack, device, "mapped") as engine:
        yield engine
        assert engine.rank.deep is not None and engine.rank.deep.ngram is not None


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_serial_and_batched_rounds(
    mapped: Engine, pinned_run: Any, prompt_run: Callable[..., Any], graphs: bool
) -> None:
    mapped.rank.use_graphs = graphs
    try:
        for prefill in (prompts.SERIAL, prompts.deep(deep=False, chunk=5), prompts.deep(deep=False)):
            assert not pinned_run.differs(prompt_run(mapped, IDS, prefill, n_new=N_NEW))
    finally:
        mapped.rank.use_graphs = True


def test_chunks_of_the_deep_pass(mapped: Engine, pinned_run: Any, prompt_run: Callable[..., Any]) -> None:
    before = mapped.prompts.deep_rows
    for chunk, cuts in ((None, ()), (11, ()), (9, (5, 16))):
        assert not pinned_run.differs(prompt_run(mapped, IDS, prompts.deep(chunk=chunk), cuts, N_NEW))
    assert mapped.prompts.deep_rows == before + 3 * len(IDS)


def test_two_sequences_together(mapped: Engine, pinned_run: Any) -> None:
    """In the rows of one round, and in one chunk, a sequence's rows stay its own."""
    for prefill in (prompts.deep(deep=False), prompts.deep()):
        with mapped.sequence() as one, mapped.sequence() as two:
            one.extend(prompts.LONG[:15])
            two.extend(IDS)
            asked = [Prompt(one), Prompt(two, draw=True)]
            run_prompts(mapped.rank, asked, prefill, mapped.prompts)
            assert asked[1].token == pinned_run.tokens[0]
            state = mapped.export_state(two)
        assert all(state[name].tobytes() == value.tobytes() for name, value in pinned_run.state.items())


def test_the_plan_is_the_ledgers_and_holds_no_table(mapped: Engine) -> None:
    layout, rank = mapped.rank.layout, mapped.rank
    deep = rank.deep.layout if rank.deep is not None else DeepLayout(layout, 128)
    planned = plan(layout, mapped.pack, mapped.facts.is_simulator, deep)
    for tier, owners in (("device", planned.device), ("pinned", planned.pinned)):
        live = mapped.ledger.live(tier)
        assert {owner: live.get(owner) for owner in owners} == dict(owners)
    info = mapped.pack.ngram()
    assert planned.pinned["ngram"] < info.rows * info.row_bytes / 5
    assert planned.pinned["deep.ngram"] == -(-deep.rows * 4 * info.row_bytes // 256) * 256
    mapped_rows = 4 * 4 * info.row_bytes
    assert 2 * mapped_rows <= planned.pinned["ngram"] < 2 * mapped_rows + 512


@pytest.fixture
def frail(tmp_path: Path, micro: Path) -> tuple[Path, Path]:
    """A pack's folder and the file of its table."""
    folder = tmp_path / "pack"
    shutil.copytree(micro, folder)
    pack = Pack.open(folder)
    return folder, Path(pack.tensor(pack.ngram().sources[0][0]).file)


@pytest.mark.parametrize("loss", ["shrinks", "vanishes"])
def test_a_pack_that_loses_rows_while_in_use(
    frail: tuple[Path, Path], device: str, prompt_run: Callable[..., Any], loss: str
) -> None:
    """Rounds and chunks refuse before anything is launched, so the sequences go on when the file is back."""
    folder, file = frail
    stored = file.read_bytes()
    with opened(folder, device, "mapped") as engine:
        whole = prompt_run(engine, IDS, prompts.deep(deep=False), n_new=1)
        with engine.sequence() as sequence:
            for i, prefill in enumerate((prompts.deep(), prompts.deep(deep=False), prompts.SERIAL)):
                sequence.extend(IDS[9 * i : 9 * (i + 1)])
                if loss == "vanishes":
                    file.unlink()
                else:
                    file.write_bytes(stored[: len(stored) // 3])
                with pytest.raises(CheckpointError) as caught:
                    run_prompts(engine.rank, [Prompt(sequence)], prefill, engine.prompts)
                assert caught.value.file == str(file)
                file.write_bytes(stored)
                asked = Prompt(sequence, draw=True)
                run_prompts(engine.rank, [asked], prefill, engine.prompts)
            state = engine.export_state(sequence)
        assert asked.token == whole.tokens[0]
        assert all(state[name].tobytes() == value.tobytes() for name, value in whole.state.items())
        ledger = engine.ledger
        file.unlink()
        with pytest.raises(CheckpointError):
            engine.generate(IDS, max_new_tokens=1, stop_ids=())
    ledger.require_empty()
