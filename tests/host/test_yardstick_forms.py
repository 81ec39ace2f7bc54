"""The inexact kernels of the yardstick still fit the text of the kernels that they are made from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import yardstick_forms
from yardstick_forms import Form

from flashnext_drv.kernels.planting import control_digest

pytestmark = pytest.mark.host


@pytest.mark.parametrize(
    "form", yardstick_forms.forms(), ids=lambda form: f"{form.spec.name}.{form.control.name}"
)
def test_a_kernel_changed_without_its_forms(form: Form) -> None:
    assert len(control_digest(form.spec, form.control)) == 64  # BuildError where an edit does not fit
