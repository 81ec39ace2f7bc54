"""One engine and one server of the synthetic micro pack with its tokenizer, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flashnext_drv.model.synth import SynthPack
from flashnext_drv.model.synth_text import write_text

from .served import Served, serving, worker_of


@pytest.fixture(scope="session")
def text_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `flashnext-drv synth OUT --tokenizer --seed 1` writes."""
    folder = tmp_path_factory.mktemp("served") / "micro"
    pack = SynthPack("micro", 1)
    pack.write(folder)
    write_text(folder, pack.config)
    return folder


@pytest.fixture(scope="session")
def served(text_pack: Path, device_name: str) -> Iterator[Served]:
    """Idle between tests."""
    with worker_of(text_pack, device_name) as (worker, model), serving(worker, model) as made:
        yield made
