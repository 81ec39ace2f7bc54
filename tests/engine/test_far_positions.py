"""Positions 262,000 to 262,143: state loaded from the reference's synthetic state, then rows compared with
it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext_drv.drv.memory import copy_to_device
from flashnext_drv.engine.engine import Engine, Limits, Prefill
from flashnext_drv.engine.prefill import Prompt, run_prompts
from flashnext_drv.engine.round import Window, run_round
from flashnext_drv.engine.sequence import Sequence
from flashnext_drv.kernels.tables import PAGE_TOKENS
from flashnext_drv.ref.files import FolderWeights
from flashnext_drv.ref.model import Dims, Model, State, synthetic_state
from flashnext_drv.ref.rounding import CONTRACT

pytestmark = pytest.mark.sim
CONTEXT = 262144


def load_state(engine: Engine, sequence: Sequence, arrays: dict[str, np.ndarray], position: int) -> None:
    """Put a reference state into a sequence's pages and slot; it continues at `position`."""
    rank = engine.rank
    stream, tables, layout = rank.stream, rank.tables, rank.layout
    rank.pages.reserve(sequence.i_slot, position)
    slot = rank.slots.span(sequence.i_slot)
    for i_layer, kind in enumerate(engine.config.layer_kinds):
        if kind == "gdn":
            state = np.ascontiguousarray(arrays[f"L{i_layer}.recurrent"].transpose(0, 2, 1), np.float32)
            copy_to_device(stream, slot.address + layout.recurrent.state[i_layer], state)
            copy_to_device(stream, slot.address + layout.recurrent.tail[i_layer], arrays[f"L{i_layer}.conv"])
        else:
            for i_page in range(-(-position // PAGE_TOKENS)):
                page = tables.pages[sequence.i_slot][i_page]
                part = slice(i_page * PAGE_TOKENS, (i_page + 1) * PAGE_TOKENS)
                at = int(page["kv"]) + layout.pages.kv[i_layer]
                keys = arrays[f"L{i_layer}.k"][part]
                copy_to_device(stream, at, keys)
                copy_to_device(stream, at + PAGE_TOKENS * keys[0].nbytes, arrays[f"L{i_layer}.v"][part])
                at = int(page["index"]) + layout.pages.index[i_layer]
                copy_to_device(stream, at, arrays[f"L{i_layer}.raw"][part])
                ratio = engine.config.index_ratio
                pooled = arrays[f"L{i_layer}.pooled"][part.start // ratio : part.stop // ratio]
                copy_to_device(stream, at + PAGE_TOKENS * engine.config.index_dim * 2, pooled)
        if i_layer in engine.config.ple_layers:
            copy_to_device(
                stream, slot.address + layout.recurrent.ple_tail[i_layer], arrays[f"L{i_layer}.ple_conv"]
            )
    sequence.first_position = position
    oldest, newest = (int(i) for i in arrays["ids"])
    sequence.before = (newest, oldest)


@pytest.fixture(scope="module")
def far_pack(tmp_path_factory: pytest.TempPathFactory, micro: Path) -> Path:
    """The micro pack with 262,144 positions."""
    folder = tmp_path_factory.mktemp("far") / "pack"
    shutil.copytree(micro, folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def reference(pack: Path, position: int, n_tokens: int, seed: int) -> tuple[Any, list[int], np.ndarray]:
    """A synthetic state at `position`, ids that go on there, and their logits by the reference."""
    dims = Dims.from_config(json.loads((pack / "config.json").read_text()))
    arrays = synthetic_state(dims, position, seed=seed)
    ids = [(i * 91 + 13) % dims.vocab for i in range(n_tokens)]
    model: Any = Model(dims, FolderWeights(pack), CONTRACT)
    state = State.restore(arrays, position, dims.n_layers, fp16=True)
    return arrays, ids, model.step(ids, state).logits


def check_median(rows: np.ndarray, expected: np.ndarray) -> None:
    """Same rounding points on both sides: what is left is the order of sums."""
    worst = np.abs(rows - expected).max(axis=1)
    assert np.median(worst) <= 0.00075, worst


@pytest.mark.parametrize(
    ("position", "n_tokens"), [(262_141, 3), pytest.param(262_000, 144, marks=pytest.mark.slow)]
)
def test_far_rows_are_within_the_micro_median(
    far_pack: Path, device: str, position: int, n_tokens: int
) -> None:
    arrays, ids, expected = reference(far_pack, position, n_tokens, seed=3)
    limits = Limits(context_tokens=CONTEXT, rows=16, prompt_rows=16, page_order="shuffled:9")
    with Engine.open(far_pack, limits, device=device) as engine, engine.sequence() as sequence:
        load_state(engine, sequence, arrays, position)
        sequence.extend(ids)
        rows = []
        while sequence.n_pending:
            window = Window(sequence, min(16, sequence.n_pending), logits=True)
            result = run_round(engine.rank, [window])
            assert result.logits is not None
            rows.append(result.logits)
        check_median(np.concatenate(rows), expected)


def test_far_rows_by_the_deep_pass_have_the_same_bytes(far_pack: Path, device: str) -> None:
    """Five rows over a page's border near the last position, after a state that no prompt made."""
    position = 262_077
    arrays, ids, expected = reference(far_pack, position, 5, seed=4)
    limits = Limits(context_tokens=CONTEXT, rows=16, prompt_rows=16, page_order="shuffled:9", chunk=16,
                    deep_rows=2)
    found = []
    with Engine.open(far_pack, limits, device=device) as engine:
        for deep in (False, True):
            logits = np.zeros_like(expected, np.float32)

            def keep(i_id: int, block: np.ndarray, into: np.ndarray = logits) -> None:
                into[i_id : i_id + len(block)] = block

            with engine.sequence() as sequence:
                load_state(engine, sequence, arrays, position)
                sequence.extend(ids)
                asked = Prompt(sequence, draw=True, keep_from=0, keep=keep)
                run_prompts(engine.rank, [asked], Prefill(deep=deep), engine.prompts)
                check_median(logits, expected)
                state = engine.export_state(sequence) | {"logits": logits}
                found.append((asked.token, {name: value.tobytes() for name, value in state.items()}))
        assert engine.prompts.deep_rows == engine.prompts.batched_rows == len(ids)
    assert found[0][0] == found[1][0]
    assert [name for name, value in found[0][1].items() if found[1][1][name] != value] == []
