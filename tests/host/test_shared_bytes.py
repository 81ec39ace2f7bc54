"""Shared memory in declarations: what each architecture allows, where it differs, and what is dynamic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashnext_drv.check.resources import SM_LIMITS
from flashnext_drv.kernels import catalog, planting
from flashnext_drv.kernels.probe import BARRIER_TURNS, SHARED_WIDE
from flashnext_drv.kernels.spec import ARCHS, HOPPER, SHARED_LIMITS, STATIC_SHARED_BYTES, KernelSpec


def declared(shared: int, hopper: int = 0) -> KernelSpec:
    return KernelSpec("k", "k.cu", "", (), "1", 32, shared_bytes=shared, hopper_shared_bytes=hopper)


def test_limits_leave_an_sm_its_reserved_kib() -> None:
    assert set(SHARED_LIMITS) == set(ARCHS)
    for arch, most in SHARED_LIMITS.items():
        assert most + 1024 == SM_LIMITS[arch].shared_bytes


@pytest.mark.parametrize(("shared", "hopper", "text"), [
    (-4, 0, "on sm_80"), (101380, 0, "on sm_86"), (232448, 0, "on sm_80"), (0, 232452, "on sm_90a"),
    (1024, -4, "on sm_90a")])
def test_more_than_an_architecture_has_is_refused(shared: int, hopper: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        declared(shared, hopper)


def test_all_is_dynamic_above_48_kib_and_nothing_below() -> None:
    small, large = declared(STATIC_SHARED_BYTES), declared(101376, 232448)
    for arch in (*ARCHS, "simulator"):
        assert (small.static_on(arch), small.dynamic_on(arch)) == (49152, 0)
        assert (large.static_on(arch), large.dynamic_on(arch)) == (0, 232448 if arch == HOPPER else 101376)
    mixed = declared(32, 65536)
    assert dict(mixed.macros())["FN_SHARED_KIND"] == "STATIC"
    assert dict(mixed.macros("sm_90a"))["FN_SHARED_KIND"] == "DYNAMIC"
    assert dict(mixed.macros("sm_90a"))["FN_SHARED_BYTES"] == "65536"


def test_digests_cover_the_size_on_hopper() -> None:
    control = SHARED_WIDE.controls[0]
    other = replace(SHARED_WIDE, hopper_shared_bytes=204796)
    assert planting.control_digest(SHARED_WIDE, control) != planting.control_digest(other, control)
    paths = (SHARED_WIDE.source,)
    assert catalog._sources_digest(paths, (SHARED_WIDE,)) != catalog._sources_digest(paths, (other,))
    assert BARRIER_TURNS.all_macros() == BARRIER_TURNS.macros() == BARRIER_TURNS.macros("sm_90a")


def test_a_control_is_built_for_its_architecture() -> None:
    control = SHARED_WIDE.controls[0]
    for arch, size in (("sm_80", 81920), ("sm_90a", 204800)):
        assert f"#define FN_SHARED_BYTES {size}\n" in planting.planted_unit(SHARED_WIDE, control, arch)
