"""Which driver a process takes: never the simulator beside a real one."""

from __future__ import annotations

import pytest

from flashnext_drv.drv import api
from flashnext_drv.errors import UsageError


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_loaded", "")


def test_the_simulator_is_refused_where_a_real_driver_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_real_in_process", lambda: True)
    with pytest.raises(UsageError, match="cannot stand beside a real driver"):
        api.ensure("sim")
    assert api.loaded() == "" and api.resolve("auto") == "cuda"


def test_auto_takes_the_real_driver_where_a_device_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_real_in_process", lambda: False)
    for answers, chosen in ((True, "cuda"), (False, "sim")):
        monkeypatch.setattr(api, "_real_has_device", lambda answers=answers: answers)
        assert api.resolve("auto") == chosen


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UsageError, match="'gpu' is unknown"):
        api.ensure("gpu")
