"""tools/wgmma_registers.py: which writes it takes for too early."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import wgmma_registers  # noqa: E402

pytestmark = pytest.mark.host

FIRST = "HGMMA.64x128x16.F32 R24, R140, gdesc[UR16], R24, UP0, gsb0 ;"
SECOND = "HGMMA.64x128x16.F32 R24, R136, gdesc[UR16], R24, gsb0 ;"
UNCOMMITTED = "HGMMA.64x128x16.F32 R24, R140, gdesc[UR16], R24 ;"
SHARED = "HGMMA.64x128x16.F32 R24, gdesc[UR12], R24, gsb0 ;"
ONE_LEFT, NONE_LEFT = (f"WARPGROUP.DEPBAR.LE gsb0, 0x{n} ;" for n in (1, 0))


def early(*lines: str) -> list[str]:
    return [line for _, line in wgmma_registers.early_writes([".text.kernel:", *lines])]


@pytest.mark.parametrize(
    "write",
    ["HFMA2 R141, R1, R2 ;", "@!P2 LDS.128 R140, [R7] ;", "LDS.64 R142, [R7] ;", "MOV R143, R9 ;",
     "@P0 IMAD.WIDE.U32 R139, R1, R2, R4 ;"],
)
def test_a_write_ahead_of_the_wait_is_too_early(write: str) -> None:
    assert early(FIRST, write, NONE_LEFT) == [write]
    assert early(FIRST, NONE_LEFT, write) == []
    assert early(FIRST, ONE_LEFT, write, NONE_LEFT) == [write]  # the one that may be left is this one


def test_a_wait_that_leaves_one_covers_the_product_before_the_last() -> None:
    assert early(FIRST, SECOND, ONE_LEFT, "MOV R140, R9 ;", "MOV R136, R9 ;", NONE_LEFT) == ["MOV R136, R9 ;"]
    one_group = early(UNCOMMITTED, SECOND, ONE_LEFT, "MOV R140, R9 ;", NONE_LEFT)
    assert one_group == ["MOV R140, R9 ;"]


def test_what_only_reads_or_writes_others_is_not() -> None:
    reads = ["@!P0 STS.128 [UR13], R140 ;", "MOV R72, R140 ;", "LDS.128 R136, [R140] ;", "UMOV UR4, 0x1 ;",
             "ISETP.NE.AND P1, PT, R140, RZ, PT ;", "FADD R14, R140, R141 ;"]
    assert early(FIRST, *reads, NONE_LEFT) == []
    assert early(SHARED, "MOV R24, R9 ;") == []


def test_a_loop_is_followed_around() -> None:
    """The write at the loop's head meets the product at its end."""
    body = [".L_x_1:", "LDS.128 R140, [R7] ;", NONE_LEFT, FIRST, "@P0 BRA `(.L_x_1) ;", NONE_LEFT]
    assert early(*body) == ["LDS.128 R140, [R7] ;"]
    assert early(body[0], body[2], body[1], *body[3:]) == []


def test_a_loop_within_does_not_hide_the_loop_around() -> None:
    """A thread that waits for a barrier goes round by itself ahead of the outer loop's end."""
    spin = [".L_x_2:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR8], R128 ;", "@!P1 BRA `(.L_x_2) ;"]
    body = [".L_x_1:", "LDS.128 R140, [R7] ;", NONE_LEFT, FIRST, *spin, "@P0 BRA `(.L_x_1) ;", NONE_LEFT]
    assert early(*body) == ["LDS.128 R140, [R7] ;"]


def test_a_missing_program_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        wgmma_registers.main(["--nvdisasm", "no-such-nvdisasm"])
    assert ended.value.code == 2 and "no-such-nvdisasm" in capsys.readouterr().err


def test_the_next_kernel_is_another() -> None:
    lines = [".text.one:", FIRST, "EXIT ;", ".text.two:", "MOV R140, R9 ;", SECOND, NONE_LEFT]
    assert wgmma_registers.early_writes(lines) == []
    assert [p.kernel for p in wgmma_registers.products(lines)] == ["one", "two"]
