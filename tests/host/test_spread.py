"""Shares of products: decode's units a block and the memory that spreads blocks evenly over the SMs; prompt
kernels' blocks that stride, of which a launch has one an SM at most."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from flashnext_drv.drv.context import DeviceFacts
from flashnext_drv.kernels import catalog
from flashnext_drv.kernels.bind import make_launch, spread_bytes
from flashnext_drv.kernels.spec import KernelSpec
from flashnext_drv.model.layout import Layout, Limits
from flashnext_drv.model.linears import MANY_BLOCKS, Group, Member
from flashnext_drv.model.synth import SynthPack

pytestmark = pytest.mark.host
H200 = DeviceFacts(
    ordinal=0, name="H200", cc=(9, 0), n_sms=132, total_bytes=1 << 37, l2_bytes=1 << 26,
    shared_per_block_bytes=49152, shared_optin_bytes=232448, maps_host=True, driver_version=13000,
    is_simulator=False)
RESERVED = 1024  # of every block
GEMV = next(spec for spec in catalog.specs("moe_gemv") if spec.name == "moe_gemv_gu")  # 16 blocks an SM


def fitting(facts: DeviceFacts, dynamic_bytes: int, static_bytes: int = 0) -> int:
    """Blocks that the shared memory of an SM holds."""
    return (facts.shared_optin_bytes + RESERVED) // (dynamic_bytes + static_bytes + RESERVED)


@pytest.mark.parametrize("blocks", [133, 352, 1280, 1760, 1952])
def test_an_sm_holds_its_share_and_no_more(blocks: int) -> None:
    given = spread_bytes(H200, GEMV, "sm_90a", (blocks, 1, 1))
    assert fitting(H200, given) == -(-blocks // H200.n_sms) > 1
    assert given % 128 == 0 and given <= H200.shared_optin_bytes
    assert given == spread_bytes(H200, GEMV, "sm_90a", (1, blocks, 1))


@pytest.mark.parametrize("blocks", [1, 132, 16 * 132, 7760])
def test_nothing_is_asked_for_where_nothing_is_held(blocks: int) -> None:
    """One block an SM or fewer; as many as registers allow; more than one wave."""
    assert spread_bytes(H200, GEMV, "sm_90a", (blocks, 1, 1)) == 0


def test_only_early_launches_on_a_gpu_are_spread() -> None:
    grid = (1280, 1, 1)
    assert spread_bytes(H200, GEMV, "sm_90a", grid)
    for facts in (replace(H200, is_simulator=True), replace(H200, cc=(8, 9))):
        assert spread_bytes(facts, GEMV, "sm_90a", grid) == 0
    assert spread_bytes(H200, replace(GEMV, spread=False), "sm_90a", grid) == 0


def test_a_kernels_own_memory_counts() -> None:
    own = replace(GEMV, shared_bytes=4096)
    given, without = (spread_bytes(H200, spec, "sm_90a", (1280, 1, 1)) for spec in (own, GEMV))
    assert fitting(H200, given, 4096) == 10 and given == without - 4096


@pytest.mark.parametrize(("k", "n", "leaves", "least", "blocks"), [
    (2560, 10240, 1, 1024, 640),   # 2 units of 80 steps
    (2560, 6144, 1, 1024, 384),
    (2560, 12288, 1, 256, 1536),   # 4 units of 40 steps: long enough
    (2560, 6144, 1, 256, 768),     # 8 units of 20 steps, two a block
    (2560, 512, 1, 256, 128),      # few blocks: none to spare
    (6144, 2560, 8, 256, 1280),    # 16 units of 24 steps; half as many blocks would be fewer than MANY_BLOCKS
    (6144, 2560, 8, 512, 640),     # a unit a leaf
    (10240, 320, 1, 256, 320),
    (2560, 248320, 1, 256, 7760),  # one unit
])
def test_units_a_block_at_the_published_sizes(k: int, n: int, leaves: int, least: int, blocks: int) -> None:
    member = Member("x", k, n, leaves, least=least)
    assert member.n_warps == blocks
    at_once = -(-n // 32) * member.units // blocks
    assert at_once & (at_once - 1) == 0 and at_once <= member.units
    assert at_once == 1 or blocks >= MANY_BLOCKS


def test_every_role_has_its_segments() -> None:
    """At the published widths: segments are a table over role, K and N, a part of the orders."""
    layout = Layout(SynthPack("quarter", 1).config, Limits(context_tokens=256))
    found = {member.prefix.rsplit(".", 1)[-1]: (member.leaves, member.segments)
             for group in layout.groups.values() for member in group.members}
    assert found == {
        "in_proj_qkv": (1, 2), "in_proj_z": (1, 2), "in_proj_a": (1, 8), "in_proj_b": (1, 8),
        "out_proj": (8, 1), "q_proj": (1, 4), "k_proj": (1, 8), "v_proj": (1, 8), "index_qk_proj": (1, 8),
        "o_proj": (8, 1), "gate": (1, 8), "shared_expert_gate": (1, 8), "input_mix_weight_down": (1, 32),
        "block_inject_weight": (1, 32), "input_mix_weight_up": (1, 1), "key_proj": (1, 4),
        "value_proj": (1, 8), "lm_head": (1, 1)}
    assert layout.moe_units == (4, 2)


def test_operands_are_made_for_members_that_share_none() -> None:
    own, alike = Member("own", 2560, 512), Member("alike", 2560, 1, shares=0)
    group = Group("router", (own, alike))
    assert group.n_inputs == 1 and Group("in", (own, own, alike)).n_inputs == 2
    assert group.n_warps == own.n_warps + alike.n_warps


def launched(spec: KernelSpec, grid: int | tuple[int, ...], n_sms: int = H200.n_sms) -> tuple[int, int, int]:
    """The grid that a launch of the kernel has, of one that was asked for."""
    ctx = SimpleNamespace(facts=replace(H200, n_sms=n_sms, is_simulator=True))
    function = SimpleNamespace(name=spec.name, handle=0, allow_shared=lambda size_bytes: None)
    module: Any = SimpleNamespace(ctx=ctx, function=lambda name: function)
    return make_launch(module, spec, grid, {arg.name: 0 for arg in spec.args}).grid


def test_blocks_that_stride_are_one_an_sm_at_most() -> None:
    striding = [spec for spec in catalog.specs() if spec.strides]
    assert {spec.name for spec in striding} == {"deep_linear", "deep_site_up", "moe_deep_gu", "moe_deep_down"}
    for spec in striding:
        assert [launched(spec, blocks)[0] for blocks in (1, 131, 132, 133, 70000)] == [1, 131, 132, 132, 132]
        assert launched(spec, (500, 300, 7)) == (132, 300, 7)
        assert launched(spec, 500, n_sms=78) == (78, 1, 1)


def test_other_grids_are_what_was_asked_for() -> None:
    other = replace(catalog.spec("deep_linear"), strides=False)
    assert launched(other, 70000) == (70000, 1, 1) and launched(GEMV, (500, 2)) == (500, 2, 1)
