"""Bad input to the engine: a typed error that names the value, nothing lost, the engine usable afterwards."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext_drv.engine.engine import Engine, Limits, Sampling
from flashnext_drv.engine.round import Window, run_round
from flashnext_drv.errors import CapacityError, CheckpointError, UsageError

pytestmark = pytest.mark.sim


@pytest.fixture(scope="module")
def engine(micro: Path, device: str) -> Iterator[Engine]:
    with Engine.open(micro, Limits(context_tokens=64, graph=False), device=device) as opened:
        yield opened


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], "non-empty list of token ids"),
        ([1, 512], "index=1, id=512, vocab=512"),
        ([-1], "id=-1"),
        ([1.5], "integers"),
        ([[1, 2]], "non-empty list"),
    ],
)
def test_ids_that_cannot_be_used(engine: Engine, ids: object, text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        engine.generate(ids, max_new_tokens=1)  # type: ignore[arg-type]
    assert engine.generate([1], max_new_tokens=1).tokens


def test_ids_given_to_a_sequence_are_checked_too(engine: Engine) -> None:
    """Before anything is launched: a kernel would read outside the embedding."""
    for wrong in (512, -1):
        with engine.sequence() as sequence:
            sequence.extend([5, wrong])
            run_round(engine.rank, [Window(sequence)])
            with pytest.raises(UsageError, match=f"index=1, id={wrong}, vocab=512"):
                run_round(engine.rank, [Window(sequence, draw=True)])
            assert sequence.n_done == 1


@pytest.mark.parametrize("wrong", [5, None, ["a"], [1, 1.5], [None], [[1]]])
def test_a_sequence_takes_integers_only(engine: Engine, wrong: Any) -> None:
    """1.5 would run as 1."""
    with engine.sequence() as sequence:
        with pytest.raises(UsageError, match="token ids are integers"):
            sequence.extend(wrong)
        assert not sequence.ids
        sequence.extend(np.array([1, 2], np.uint32))  # type: ignore[arg-type]
        assert sequence.ids == [1, 2]
    with pytest.raises(UsageError, match="closed sequence takes no tokens"):
        sequence.extend([1])


def test_sequences_that_are_not_this_engines(engine: Engine, open_micro: Callable[..., Engine]) -> None:
    """Their slots and pages may be another sequence's by now: neither run nor read."""
    with open_micro(context_tokens=64, graph=False) as another, another.sequence() as strange:
        strange.extend([1, 2])
        with engine.sequence() as mine:
            mine.extend([3])
            engine.prompt([mine])
            before = engine.export_state(mine)
            for call in (lambda: engine.prompt([strange]), lambda: engine.export_state(strange)):
                with pytest.raises(UsageError, match="another engine's"):
                    call()
            after = engine.export_state(mine)
        assert all(after[name].tobytes() == value.tobytes() for name, value in before.items())
    for call in (lambda: engine.prompt([mine]), lambda: engine.export_state(mine)):
        with pytest.raises(UsageError, match="a closed sequence"):
            call()


@pytest.mark.parametrize("wrong", [None, 5, [1], ["a"]])
def test_sequences_of_a_wrong_type(engine: Engine, wrong: object) -> None:
    with pytest.raises(UsageError, match="sequence"):
        engine.prompt(wrong)  # type: ignore[arg-type]


def test_prefill_of_a_wrong_type(engine: Engine) -> None:
    wrong: Any = {"chunk": 2}
    for call in (lambda: engine.generate([1], max_new_tokens=1, prefill=wrong),
                 lambda: engine.stream([1], max_new_tokens=1, prefill=wrong),
                 lambda: engine.logits([1], prefill=wrong), lambda: engine.prompt([], prefill=wrong)):
        with pytest.raises(UsageError, match="prefill is a Prefill"):
            call()


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "1", None])
def test_max_new_tokens_is_a_count(engine: Engine, wrong: object) -> None:
    with pytest.raises(UsageError, match="max_new_tokens is an integer"):
        engine.generate([1], max_new_tokens=wrong)  # type: ignore[arg-type]
    assert len(engine.generate([1], max_new_tokens=np.int64(2), stop_ids=()).tokens) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(("wrong", "text"), [(5, "collection"), (["a"], "integers"), ([512], "id=512")])
def test_stop_ids_are_token_ids(engine: Engine, wrong: object, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        engine.generate([1], max_new_tokens=1, stop_ids=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", (1e-31, 1e-40, 1e-50))
def test_a_temperature_that_no_quotient_survives_is_greedy(engine: Engine, temperature: float) -> None:
    """Quotients beyond f32 would all be equal, and the lowest id the likeliest."""
    how = Sampling(temperature=temperature, seed=3)
    drawn = engine.generate([1, 2], max_new_tokens=4, stop_ids=(), sampling=how).tokens
    assert drawn == engine.generate([1, 2], max_new_tokens=4, stop_ids=()).tokens


def test_more_tokens_than_the_cache(engine: Engine) -> None:
    with pytest.raises(CapacityError) as caught:
        engine.generate(list(range(60)), max_new_tokens=6)
    assert caught.value.needed_tokens == 65 and caught.value.context_tokens == 64
    with pytest.raises(CapacityError):
        engine.logits(list(range(65)))
    assert len(engine.generate(list(range(60)), max_new_tokens=5, stop_ids=()).tokens) == 5
    assert engine.rank.pages.free_pages == engine.rank.layout.n_pages


def test_more_sequences_than_slots(engine: Engine) -> None:
    with engine.sequence(), pytest.raises(CapacityError, match="no sequence slot is free"):
        engine.generate([1], max_new_tokens=1)
    assert engine.generate([1], max_new_tokens=1).tokens


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": 2.0},
        {"top_k": -1},
        {"seed": 1 << 64},
    ],
)
def test_sampling_outside_its_range(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Sampling(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"rows": 17}, {"rows": 0}, {"prompt_rows": 2}, {"context_tokens": 0}, {"page_order": "random"}]
)
def test_limits_outside_their_range(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        Limits(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ((2, 5), "rows=2:5"),
        ((2, 2), "rows=2:2"),
        ((-1, 2), "rows=-1:2"),
        (5, "two integers"),
        ((0.5, 2), "two integers"),
    ],
)
def test_rows_outside_the_prompt(engine: Engine, rows: object, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        engine.logits([1, 2, 3], rows=rows)  # type: ignore[arg-type]


def test_context_beyond_the_model(open_micro: Callable[..., Engine]) -> None:
    with pytest.raises(CapacityError, match="max_positions=4096"):
        open_micro(context_tokens=8192)


def test_device_memory_too_small_names_the_largest_owner(open_micro: Callable[..., Engine]) -> None:
    with pytest.raises(CapacityError) as caught:
        open_micro(device_bytes=1 << 20)
    assert "largest owner" in str(caught.value) and caught.value.needed_bytes > caught.value.allowed_bytes


def test_folder_that_is_no_pack(tmp_path: Path, device: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape("config.json is missing")):
        Engine.open(tmp_path, device=device)


def test_synthetic_name_with_unknown_knob(device: str) -> None:
    with pytest.raises(UsageError, match="colour=red"):
        Engine.open("synth:micro?colour=red", device=device)


def test_closed_engine_refuses_work(open_micro: Callable[..., Engine]) -> None:
    engine = open_micro(graph=False)
    engine.close()
    engine.close()
    calls: list[Callable[[], object]] = [
        lambda: engine.generate([1], max_new_tokens=1), lambda: engine.logits([1]), engine.memory,
        lambda: engine.stream([1], max_new_tokens=1)]
    for call in calls:
        with pytest.raises(UsageError, match="Engine engine is closed"):
            call()


def test_nan_weight_gives_a_typed_error(tmp_path: Path, micro: Path, device: str) -> None:
    """A NaN in the final mixer's norm reaches every logit; the draw refuses it and the engine stays
    usable."""
    import shutil

    from flashnext_drv.errors import ContractError
    from flashnext_drv.model.pack import Pack

    folder = tmp_path / "pack"
    shutil.copytree(micro, folder)
    folder.chmod(0o755)
    tensor = Pack.open(folder).tensors["model.language_model.hyper_connection_mixer.hc_norm.weight"]
    path = folder / Path(tensor.file).name
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[tensor.offset : tensor.offset + 2] = np.uint16(0x7E00 if tensor.dtype == "F16" else 0x7FC0).tobytes()
    path.write_bytes(data)
    with Engine.open(folder, Limits(context_tokens=64, graph=False), device=device) as engine:
        with pytest.raises(ContractError, match="a logit is NaN"):
            engine.generate([1, 2], max_new_tokens=1)
        assert engine.rank.slots.free_slots == 1
        assert np.isnan(engine.logits([1])).any()
