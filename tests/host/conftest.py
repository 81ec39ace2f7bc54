"""Host tests run as if cuda-python were not installed: what they touch must not need it."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse every import of the binding during a test, also where another test has loaded it already."""
    for name in {"cuda", "cuda.bindings", *(m for m in sys.modules if m.startswith("cuda."))}:
        monkeypatch.setitem(sys.modules, name, None)
