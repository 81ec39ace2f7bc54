"""The dense linears of the text model, in the groups that one launch serves.

Read by layout.py (bytes of operands, partial sums and outputs), steps.py (launch grids) and state/weights.py
(upload and descriptors).  A group's linears share one input row; its descriptors lie one after another in the
device table `<group>.linears`.  Everything about a sum's order (leaves, segments) comes from kernels/exl3.py.

The linears a launch must prepare operands for stand first; the others reuse the operand of the member they
name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..kernels.exl3 import (
    GDN_IN_SEGMENT_INPUTS,
    OUT_SEGMENT_INPUTS,
    SEGMENT_INPUTS,
    dot_segments,
)
from .config import ModelConfig

__all__ = ["Group", "Member", "canonical_leaves", "model_groups"]

LONG_STEPS, MANY_BLOCKS = 40, 768  # of a block of linear_gemv; of a linear whose blocks may be longer


@dataclass(frozen=True)
class Member:
    """One linear.  prefix: its name in the pack, without the part.  k, n: inputs, outputs.  leaves: of the
    sum.

    shares: index of the member in the same group whose operand it reads, or -1 for its own.  least: fewest
    inputs of a segment.
    """

    prefix: str
    k: int
    n: int
    leaves: int = 1
    shares: int = -1
    least: int = SEGMENT_INPUTS

    @property
    def segments(self) -> int:
        return dot_segments(self.k, self.n, self.leaves, self.least)

    @property
    def units(self) -> int:
        return self.leaves * self.segments

    @property
    def n_warps(self) -> int:
        """Blocks of linear_gemv: 32 outputs each, of as many units as make a block worth its beginning.

        What a block finds out first, and its first read of memory, cost as much as many k steps; but as long
        as all blocks are on the device at once, more of them are faster than longer ones.
        """
        blocks, steps = (self.n + 31) // 32 * self.units, self.k // self.units // 16
        at_once, most = 1, min(self.units, blocks // MANY_BLOCKS)
        while steps * at_once < LONG_STEPS and 2 * at_once <= most:
            at_once *= 2
        return blocks // at_once


@dataclass(frozen=True)
class Group:
    """Linears of one launch.

    name: stem of the device table.  x: scratch span of the operand: "x" is shared and has a place for each
    member, any other holds one operand that the kernel in front writes.  out: where finished outputs go ("" =
    not finished in memory; "y", "logits" = that buffer; "out" = the shared output scratch).
    """

    name: str
    members: tuple[Member, ...]
    out: str = "out"
    x: str = "x"

    @property
    def n_inputs(self) -> int:
        """Members with an operand of their own; they stand first."""
        return sum(m.shares < 0 for m in self.members)

    @property
    def n_warps(self) -> int:
        return sum(m.n_warps for m in self.members)


def canonical_leaves(k: int) -> int:
    """Leaves of a sum that ranks could share (o_proj, out_proj): the largest of 8, 4, 2, 1 that divides
    K/128."""
    return next(leaves for leaves in (8, 4, 2, 1) if (k // 128) % leaves == 0)


def _ranked(prefix: str, k: int, n: int) -> Member:
    """A projection that ranks could share by its inputs."""
    return Member(prefix, k, n, canonical_leaves(k), least=OUT_SEGMENT_INPUTS)


def model_groups(config: ModelConfig) -> dict[str, Group]:
    """Every dense group of the text model, by name, in the order in which a token meets them."""
    return {group.name: group for group in _groups(config)}


def _groups(config: ModelConfig) -> Iterator[Group]:
    names = config.names
    for i_layer, kind in enumerate(config.layer_kinds):
        stem, mlp = f"L{i_layer}", names.mlp(i_layer)
        if i_layer in config.ple_layers:
            ple, width = names.ple(i_layer), config.n_streams * config.hidden
            yield Group(
                f"{stem}.ple",
                (
                    Member(f"{ple}.key_proj", config.ple_dim, width),
                    Member(f"{ple}.value_proj", config.ple_dim, config.hidden, shares=0),
                ),
                x="emb",
            )
        yield from _site(config, f"{stem}.attn_site", names.attn_site(i_layer))
        yield from _gdn(config, i_layer) if kind == "gdn" else _qsa(config, i_layer)
        yield from _site(config, f"{stem}.mlp_site", names.mlp_site(i_layer))
        # plain in every pack (inventory.py): site_up makes the one operand, router_pick sums the units
        yield Group(
            f"{stem}.router",
            (
                Member(f"{mlp}.gate", config.hidden, config.n_experts),
                Member(f"{mlp}.shared_expert_gate", config.hidden, 1, shares=0),
            ),
            out="",
        )
    yield from _site(config, "mixer", names.mixer, inject=False)
    yield Group("head", (Member(names.head, config.hidden, config.vocab),), out="logits")


def _site(config: ModelConfig, name: str, prefix: str, inject: bool = True) -> Iterator[Group]:
    width = config.n_streams * config.hidden
    members = [Member(f"{prefix}.input_mix_weight_down", width, config.low_rank)]
    if inject:
        members.append(Member(f"{prefix}.block_inject_weight", width, config.n_streams, shares=0))
    yield Group(f"{name}.down", tuple(members), out="", x="n16")
    up = Member(f"{prefix}.input_mix_weight_up", config.low_rank, width)
    yield Group(f"{name}.up", (up,), out="", x="u16")


def _gdn(config: ModelConfig, i_layer: int) -> Iterator[Group]:
    prefix, hidden = config.names.gdn(i_layer), config.hidden
    n_v, width = config.gdn_value_heads, config.gdn_value_width
    yield Group(
        f"L{i_layer}.gdn_in",
        (
            Member(f"{prefix}.in_proj_qkv", hidden, config.gdn_channels, least=GDN_IN_SEGMENT_INPUTS),
            Member(f"{prefix}.in_proj_z", hidden, width, least=GDN_IN_SEGMENT_INPUTS),
            Member(f"{prefix}.in_proj_a", hidden, n_v),
            Member(f"{prefix}.in_proj_b", hidden, n_v, shares=2),
        ),
    )
    yield Group(
        f"L{i_layer}.gdn_out",
        (_ranked(f"{prefix}.out_proj", width, hidden),),
        out="y",
    )


def _qsa(config: ModelConfig, i_layer: int) -> Iterator[Group]:
    prefix, hidden = config.names.qsa(i_layer), config.hidden
    width = config.query_width
    yield Group(
        f"L{i_layer}.qsa_in",
        (
            Member(f"{prefix}.q_proj", hidden, 2 * width),
            Member(f"{prefix}.k_proj", hidden, config.kv_width),
            Member(f"{prefix}.v_proj", hidden, config.kv_width),
            Member(f"{prefix}.indexer.index_qk_proj", hidden, config.index_width),
        ),
    )
    yield Group(
        f"L{i_layer}.qsa_out", (_ranked(f"{prefix}.o_proj", width, hidden),), out="y"
    )
