"""Output hashes of kernel cases, made in the simulator on a machine without a GPU, hold on this device too.

In the simulator a seeded sample shows that the committed file is current; on a GPU every case is compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flashnext_drv.check.contract import CheckDevice, family_of, run_case
from flashnext_drv.kernels import catalog

pytestmark = pytest.mark.sim
REFRESH = "refresh it: python tools/case_hashes.py --device sim --out tests/data/case_hashes.json"
CASES = {f"{spec.name}/{case.name}": (spec, case) for spec in catalog.specs() for case in spec.cases}


@pytest.fixture(scope="module")
def known(data_dir: Path) -> dict[str, str]:
    data = json.loads((data_dir / "case_hashes.json").read_text(encoding="utf-8"))
    assert data["source_digest"] == catalog.source_digest(), f"made from other kernel sources; {REFRESH}"
    hashes: dict[str, str] = data["hashes"]
    return hashes


def test_every_case_has_a_hash(known: dict[str, str]) -> None:
    missing = sorted(CASES.keys() - known.keys())
    assert not missing, f"{len(missing)} cases without a hash, first {missing[:3]}; {REFRESH}"


def test_hashes_hold_on_this_device(known: dict[str, str], device_name: str,
                                    check_device: Callable[[str], CheckDevice]) -> None:
    keys = sorted(CASES)
    if device_name == "sim":
        keys = keys[::9]
    differ = []
    for key in keys:
        spec, case = CASES[key]
        if run_case(check_device(family_of(spec.name)), spec.name, case).sha256 != known[key]:
            differ.append(key)
    assert not differ, f"{len(differ)} of {len(keys)} differ, first {differ[:5]}"
