"""A GPU generation whose kernels were never compared byte for byte says so when it is opened."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flashnext_drv.kernels import bind, catalog


class Facts(SimpleNamespace):
    def __str__(self) -> str:
        return "GPU 0 Test (compute 8.6)"


def warning(cc: tuple[int, int], is_simulator: bool = False) -> str:
    ctx = SimpleNamespace(facts=Facts(cc=cc, is_simulator=is_simulator))
    return bind._warning(ctx)  # type: ignore[arg-type]


def test_unqualified_generation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "QUALIFIED", frozenset({"9.0"}))
    text = warning((8, 6))
    assert "compute capability 8.6" in text and "has no receipt" in text


def test_qualified_generation_and_simulator_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "QUALIFIED", frozenset({"9.0"}))
    assert not warning((9, 0)) and not warning((8, 0), is_simulator=True)
