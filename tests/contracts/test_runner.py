"""The case runner itself: planted faults must be reported, operands and hashes must be the same
everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashnext_drv.check import contract, stages
from flashnext_drv.check.contract import CheckDevice, Operands, bits, canonical_bytes, hash_outputs, poison
from flashnext_drv.errors import ContractError, UsageError
from flashnext_drv.kernels import catalog
from flashnext_drv.kernels.spec import Case
from flashnext_drv.kernels.tables import ROUND

HIDDEN = 256
CASE = Case("planted", {"rows": 1})


def operands(**change: Any) -> Operands:
    """stream_add on one row, every value known."""
    streams, y = np.ones((1, 4 * HIDDEN), np.float32), np.full((1, HIDDEN), 2.0, np.float32)
    arrays = {"round": np.array([(1, 1, 1, 1)], ROUND), "streams": streams, "y": y,
              "inject": np.full((1, 4), 3.0, np.float32)}

    def expect(found: dict[str, np.ndarray]) -> None:
        assert (found["streams"] == 7.0).all(), "streams are not 1 + 3 * 2"

    given = {"arrays": arrays, "scalars": {"hidden": HIDDEN}, "grid": (1, 1, 1), "relocations": [],
             "outputs": ("streams",), "expect": expect}
    return Operands(**{**given, **change})


def run(check_device: Callable[[str], CheckDevice], given: Operands, seed: int = 3) -> contract.CaseResult:
    return contract.run_case(check_device("glue"), "stream_add", CASE, seed, given)


def test_a_right_kernel_passes_and_hashes_its_outputs(check_device: Callable[[str], CheckDevice]) -> None:
    result = run(check_device, operands())
    assert (result.outputs["streams"] == 7.0).all() and len(result.sha256) == 64
    assert result.sha256 == hash_outputs({"streams": np.full((1, 4 * HIDDEN), 7.0, np.float32)})
    assert result.sha256 != hash_outputs({"streams": np.full((1, 4 * HIDDEN), 6.0, np.float32)})


def test_a_wrong_result_names_case_seed_and_command(check_device: Callable[[str], CheckDevice]) -> None:
    given = operands()
    given.arrays["inject"][:] = 4.0
    with pytest.raises(ContractError) as caught:
        run(check_device, given)
    text = str(caught.value)
    assert "stream_add" in text and "case=planted" in text and "seed=3" in text and "not 1 + 3 * 2" in text
    assert "python -m flashnext_drv.check.contract" in text


def test_bytes_written_behind_an_array_are_found(check_device: Callable[[str], CheckDevice]) -> None:
    case = catalog.spec("synth_fill").cases[0]
    given = contract.build_operands("synth_fill", case)
    name = given.outputs[0]
    given.arrays[name] = given.arrays[name][:int(given.scalars["count"]) - 1].copy()
    with pytest.raises(ContractError, match=f"behind span {name}"):
        contract.run_case(check_device("move"), "synth_fill", case, 0, given)


def test_a_case_without_an_array_is_refused(check_device: Callable[[str], CheckDevice]) -> None:
    given = operands()
    del given.arrays["y"]
    with pytest.raises(ContractError, match=r"lacks arrays: y"):
        run(check_device, given)


def test_addresses_are_written_where_relocations_say(check_device: Callable[[str], CheckDevice]) -> None:
    given = operands()
    given.arrays["table"] = np.zeros(3, np.uint64)
    given.relocations = [("table", 8, "y", 0), ("table", 16, "y", 256)]

    def expect(found: dict[str, np.ndarray]) -> None:
        first, second, third = (int(v) for v in found["table"])
        assert first == 0 and second != 0 and third == second + 256

    given.expect = expect
    run(check_device, given)


def test_a_written_read_only_array_is_reported() -> None:
    spec = catalog.spec("stream_add")
    sent = {"y": np.zeros(4, np.float32), "streams": np.zeros(4, np.float32)}
    changed = {name: array + 1 for name, array in sent.items()}
    contract.inputs_kept(spec, sent, {**changed, "y": sent["y"]})
    with pytest.raises(AssertionError, match="array y is declared read-only"):
        contract.inputs_kept(spec, sent, changed)


def test_bits_are_the_same_on_every_machine() -> None:
    assert bits(0, "a", (2, 3)).tolist() == [[2162823795, 3254225638, 3090038064],
                                             [3997718683, 3639240763, 456306571]]
    assert (bits(0, "a", 100)[:6] == bits(0, "a", (2, 3)).reshape(-1)).all()
    assert (bits(1, "a", 6) != bits(0, "a", 6)).all() and (bits(0, "b", 6) != bits(0, "a", 6)).all()
    assert bits(0, "a", (0, 5)).shape == (0, 5)
    ones = np.unpackbits(bits(7, "x", 4096).view(np.uint8)).mean()
    assert 0.49 < ones < 0.51


@pytest.mark.parametrize(("dtype", "pattern"),
                         [("<f2", 0x7FFF), ("<f4", 0x7FFFFFFF), ("<f8", 0x7FFFFFFFFFFFFFFF)])
def test_every_nan_hashes_alike_and_nothing_else_changes(dtype: str, pattern: int) -> None:
    word = np.dtype(dtype.replace("f", "u"))
    array = np.array([1.0, np.nan, -np.inf, -0.0, 0.0], dtype)
    other = array.copy()
    other.view(word)[1] = np.iinfo(word).max
    assert canonical_bytes(array) == canonical_bytes(other)
    assert int(np.frombuffer(canonical_bytes(other), word)[1]) == pattern
    keep = [0, 2, 3, 4]
    assert (np.frombuffer(canonical_bytes(array), word)[keep] == array.view(word)[keep]).all()
    assert hash_outputs({"x": array}) != hash_outputs({"x": array[:4]}) != hash_outputs({"y": array[:4]})


def test_poison_is_nan_in_every_float_format() -> None:
    for dtype in ("f2", "f4", "f8"):
        assert np.isnan(poison((3, 2), dtype)).all()
    assert (poison(4, "u4") == 0xFFFFFFFF).all() and (poison((), "i8") == -1).all()


def test_unknown_kernels_and_cases_are_refused() -> None:
    with pytest.raises(UsageError, match="no kernel is called 'nothing'"):
        contract.family_of("nothing")


def test_the_command_prints_hashes(device_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = catalog.spec("stream_add")
    assert contract.main([device_name, spec.name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [f"stream_add/{case.name}/0" for case in spec.cases]
    assert contract.main([device_name, spec.name, spec.cases[0].name]) == 0
    assert capsys.readouterr().out.split() == lines[0].split()
    assert contract.main([device_name, spec.name, spec.cases[0].name, "4"]) == 0
    assert capsys.readouterr().out.split()[0] != lines[0].split()[0]
    with pytest.raises(UsageError, match="has no case 'x'"):
        contract.main([device_name, spec.name, "x"])
    with pytest.raises(UsageError, match="DEVICE KERNEL"):
        contract.main([device_name])


def test_a_failing_case_fails_its_stages_and_stops_no_other(check_device: Callable[[str], CheckDevice],
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    spec = catalog.spec("stream_add")
    real = contract.build_operands

    def build(kernel: str, case: Case, seed: int = 0) -> Operands:
        made = real(kernel, case, seed)
        if case.name == spec.cases[0].name:
            made.arrays["y"] = made.arrays["y"] + 1
        return made

    monkeypatch.setattr(stages, "build_operands", build)
    failed = {(one.case, one.stage) for one in stages.check_kernel(lambda: check_device("glue"), spec)
              if not one.ok}
    assert failed == {(spec.cases[0].name, "fp64"), (spec.cases[0].name, "written")}
