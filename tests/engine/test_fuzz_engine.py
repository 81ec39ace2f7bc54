"""Mangled packs through the whole engine in the simulator: typed errors, empty ledgers, a good run after."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashnext_drv.engine.engine import Engine
from flashnext_drv.model.layout import Limits
from tools import fuzz
from tools.fuzz_targets import DEVICE_TARGETS, Bench

N = 80


def test_mangled_packs_end_in_typed_errors(device_name: str, tmp_path: Path, case_seed: int) -> None:
    if device_name != "sim":
        pytest.skip("mangled inputs stay off a real device")
    found = fuzz.run_fuzz(N, case_seed, targets=DEVICE_TARGETS, device="sim", folder=tmp_path, cpu_s=60.0,
                          wall_s=600.0, growth_kib=65536)
    assert not found.failures, "\n".join(found.failures)
    kinds, tables = found.outcomes["engine"], found.outcomes["tables"]
    assert kinds["CheckpointError"] > 10 and kinds["CapacityError"] and kinds["accepted"], kinds
    assert tables["accepted"] > 5 and tables["CapacityError"], tables
    assert found.n_ledgers > N // 4
    (tmp_path / "after").mkdir()
    with Engine.open(Bench(tmp_path / "after").pack, Limits(context_tokens=8), device="sim") as engine:
        assert len(engine.generate([5], max_new_tokens=2, stop_ids=()).tokens) == 2
