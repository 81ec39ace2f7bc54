"""Output hashes of kernel cases, made in the simulator on a machine without a GPU, hold on this device too.

In the simulator a seeded sample shows that the committed file is current; on a GPU every case is compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flashnext_drv.check.contract import CheckDevice, family_of, run_case
from flashnext_drv.kernels import catalog

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import case_hashes as tool

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


def test_a_comparison_of_nothing_or_of_less_fails(
    known: dict[str, str], tmp_path: Path, data_dir: Path, device_name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = data_dir / "case_hashes.json"

    def run(path: Path, kernel: str) -> tuple[int, str]:
        code = tool.main(["--device", device_name, "--kernel", kernel, "--no-runs", "--compare", str(path)])
        return code, capsys.readouterr().out

    assert run(file, "rope_rows")[0] == 0
    code, said = run(file, "no_such_kernel")
    assert code == 1 and "nothing was compared" in said and "is called 'no_such_kernel'" in said
    told = json.loads(file.read_text(encoding="utf-8"))
    less = tmp_path / "less.json"
    for change, words in (({"rope_rows/gone": "0" * 64}, "not compared: rope_rows/gone"),
                          ({next(key for key in known if key.startswith("rope_rows")): "0" * 64}, "DIFFERS")):
        less.write_text(json.dumps(told | {"hashes": known | change}))
        code, said = run(less, "rope_rows")
        assert code == 1 and words in said


def test_a_pack_that_was_not_given_is_counted_and_not_missing(known: dict[str, str],
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    """The file holds runs of a pack that lies in no repository."""
    elsewhere = {key for key in known if key.startswith("exl3_tiny/")}
    mine = {key: value for key, value in known.items() if key not in elsewhere}
    assert elsewhere and tool.compare(mine, known, "", ["exl3_micro"]) == (len(mine), [], [])
    assert f"{len(elsewhere)} only in the file" in capsys.readouterr().out
    assert tool.compare(mine, known, "", ["exl3_micro", "exl3_tiny"])[2] != []
    less = {key: value for key, value in mine.items() if key != "exl3_micro/p1/serial"}
    assert tool.compare(less, known, "", ["exl3_micro"])[2] == ["not compared: exl3_micro/p1/serial ..."]


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
