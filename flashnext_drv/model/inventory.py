"""Which tensors a Flash-Next text model has, by its configuration.

Called by pack (check, classes of bytes) and synth (what to make).  What must stay true: one list, in the
module order of published files, so that what synth writes is what check asks for.

Source: model.md section 11, exl3.md section 11 of the format notes (names and shapes of published packs).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from .config import GDN, ModelConfig

__all__ = ["GROUPS", "Need", "group_of", "mtp_needs", "text_needs"]

GROUPS: Final = (
    "embedding",
    "sites",
    "gdn",
    "attention",
    "indexer",
    "router",
    "experts",
    "shared",
    "ple",
    "ngram",
    "head",
    "mtp",
    "vision",
    "other",
)

_GROUP_BY_PART: Final = (
    (re.compile(r"(^|\.)ngram_embedding\.|\.ple_embedding\."), "ngram"),
    (re.compile(r"hyper_connection"), "sites"),
    (re.compile(r"\.linear_attn\."), "gdn"),
    (re.compile(r"\.indexer\."), "indexer"),
    (re.compile(r"\.self_attn\."), "attention"),
    (re.compile(r"\.mlp\.experts\."), "experts"),
    (re.compile(r"\.mlp\.shared_expert\."), "shared"),
    (re.compile(r"\.mlp\.(gate|shared_expert_gate)\."), "router"),
    (re.compile(r"\.ple\."), "ple"),
    (re.compile(r"\.embed_tokens\."), "embedding"),
    (re.compile(r"^lm_head\."), "head"),
)


@dataclass(frozen=True, slots=True)
class Need:
    """One thing the model needs.

    role: stable word for it ("gdn.in_proj_z", "site.down", ...), the same in every layer.  name: prefix of a
    linear, full name of another tensor.  k, n: inputs and outputs of a linear, else 0.  plain: the linear
    must be f16 or bf16, not EXL3 (it shares its operand with others); exl3: it must be EXL3 (expert kernels
    take nothing else).  shape: of a tensor that is no linear.
    """

    role: str
    name: str
    k: int = 0
    n: int = 0
    plain: bool = False
    exl3: bool = False
    shape: tuple[int, ...] = ()


def text_needs(config: ModelConfig) -> Iterator[Need]:
    """Everything the trunk needs but the n-gram table, in file order."""
    c, names = config, config.names
    yield Need("embed", f"{names.embed}.weight", shape=(c.vocab, c.hidden))
    for i_layer in range(c.n_layers):
        yield from _layer(c, i_layer)
    yield from _site(c, names.mixer, inject=False)
    yield Need("head", names.head, c.hidden, c.vocab)


def mtp_needs(config: ModelConfig) -> Iterator[Need]:
    """Everything the MTP head needs, its mixer last; nothing when the model has none."""
    c, names = config, config.names
    if not c.n_mtp_layers:
        return
    yield Need("mtp.norm", f"{names.mtp}.pre_fc_norm_embedding.weight", shape=(c.hidden,))
    yield Need("mtp.norm", f"{names.mtp}.pre_fc_norm_hidden.weight", shape=(c.n_streams * c.hidden,))
    yield Need("mtp.fc", f"{names.mtp}.fc_embedding", c.hidden, c.hidden)
    yield Need("mtp.fc", f"{names.mtp}.fc_hidden", c.hidden, c.hidden)
    yield from _layer(c, c.n_layers)
    yield from _site(c, names.mtp_mixer, inject=False)


def group_of(name: str) -> str:
    """The class of bytes a tensor belongs to, one of GROUPS."""
    if name.startswith("mtp."):
        return "mtp"
    if name.startswith("model.visual."):
        return "vision"
    for pattern, group in _GROUP_BY_PART:
        if pattern.search(name):
            return group
    return "other"


def _layer(c: ModelConfig, i_layer: int) -> Iterator[Need]:
    names = c.names
    if i_layer in c.ple_layers:
        yield from _ple(c, names.ple(i_layer))
    yield from _site(c, names.attn_site(i_layer))
    yield from _site(c, names.mlp_site(i_layer))
    if c.kind(i_layer) == GDN:
        yield from _gdn(c, names.gdn(i_layer))
    else:
        yield from _qsa(c, names.qsa(i_layer))
    mlp = names.mlp(i_layer)
    yield Need("router", f"{mlp}.gate", c.hidden, c.n_experts, plain=True)
    yield Need("router.shared", f"{mlp}.shared_expert_gate", c.hidden, 1, plain=True)
    for i_expert in range(c.n_experts):
        expert = names.expert(i_layer, i_expert)
        yield Need("expert.gate", f"{expert}.gate_proj", c.hidden, c.moe_width, exl3=True)
        yield Need("expert.up", f"{expert}.up_proj", c.hidden, c.moe_width, exl3=True)
        yield Need("expert.down", f"{expert}.down_proj", c.moe_width, c.hidden, exl3=True)
    shared = names.shared(i_layer)
    yield Need("shared.gate", f"{shared}.gate_proj", c.hidden, c.shared_width, exl3=True)
    yield Need("shared.up", f"{shared}.up_proj", c.hidden, c.shared_width, exl3=True)
    yield Need("shared.down", f"{shared}.down_proj", c.shared_width, c.hidden, exl3=True)


def _site(c: ModelConfig, prefix: str, inject: bool = True) -> Iterator[Need]:
    wide = c.n_streams * c.hidden
    yield Need("site.norm", f"{prefix}.hc_norm.weight", shape=(wide,))
    yield Need("site.down", f"{prefix}.input_mix_weight_down", wide, c.low_rank, plain=True)
    yield Need("site.up", f"{prefix}.input_mix_weight_up", c.low_rank, wide, plain=True)
    if inject:
        yield Need("site.inject", f"{prefix}.block_inject_weight", wide, c.n_streams, plain=True)


def _gdn(c: ModelConfig, prefix: str) -> Iterator[Need]:
    yield Need("gdn.qkv", f"{prefix}.in_proj_qkv", c.hidden, c.gdn_channels)
    yield Need("gdn.z", f"{prefix}.in_proj_z", c.hidden, c.gdn_value_width)
    yield Need("gdn.out", f"{prefix}.out_proj", c.gdn_value_width, c.hidden)
    yield Need("gdn.a", f"{prefix}.in_proj_a", c.hidden, c.gdn_value_heads, plain=True)
    yield Need("gdn.b", f"{prefix}.in_proj_b", c.hidden, c.gdn_value_heads, plain=True)
    yield Need("gdn.conv", f"{prefix}.conv1d.weight", shape=(c.gdn_channels, 1, c.conv_taps))
    yield Need("gdn.a_log", f"{prefix}.A_log", shape=(c.gdn_value_heads,))
    yield Need("gdn.dt_bias", f"{prefix}.dt_bias", shape=(c.gdn_value_heads,))
    yield Need("gdn.norm", f"{prefix}.norm.weight", shape=(c.gdn_head_dim,))


def _qsa(c: ModelConfig, prefix: str) -> Iterator[Need]:
    yield Need("qsa.q", f"{prefix}.q_proj", c.hidden, 2 * c.query_width)
    yield Need("qsa.k", f"{prefix}.k_proj", c.hidden, c.kv_width)
    yield Need("qsa.v", f"{prefix}.v_proj", c.hidden, c.kv_width)
    yield Need("qsa.o", f"{prefix}.o_proj", c.query_width, c.hidden)
    yield Need("qsa.norm", f"{prefix}.q_norm.weight", shape=(c.head_dim,))
    yield Need("qsa.norm", f"{prefix}.k_norm.weight", shape=(c.head_dim,))
    yield Need("index.qk", f"{prefix}.indexer.index_qk_proj", c.hidden, c.index_width)
    yield Need("index.norm", f"{prefix}.indexer.q_layernorm.weight", shape=(c.index_dim,))
    yield Need("index.norm", f"{prefix}.indexer.k_layernorm.weight", shape=(c.index_dim,))


def _ple(c: ModelConfig, prefix: str) -> Iterator[Need]:
    wide = c.n_streams * c.hidden
    yield Need("ple.key", f"{prefix}.key_proj", c.ple_dim, wide, plain=True)
    yield Need("ple.value", f"{prefix}.value_proj", c.ple_dim, c.hidden, plain=True)
    yield Need("ple.conv", f"{prefix}.conv1d.weight", shape=(wide, 1, c.ple_taps))
    for part in ("norm_key", "norm_query", "norm_conv"):
        yield Need("ple.norm", f"{prefix}.{part}.weight", shape=(wide,))
