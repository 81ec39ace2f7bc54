"""Deterministic weights of the hf_tiny golden model, by integer arithmetic alone.

`build(config)` gives checkpoint name -> array (fp32 or int64) in the published BF16 layout: fused experts,
n-gram table in row shards.  Every float is n * 2^-k with |n| <= 128 (DeltaNet norm: 1 + m / 128), hence
exact in bf16, fp16, fp32 and fp64.  The golden logits belong to exactly these values: changing a line here
invalidates golden.npz.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["build"]

_M64 = (1 << 64) - 1
_GAMMA, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class _Builder:
    def __init__(self, seed: int):
        self.seed = seed
        self.weights: dict[str, np.ndarray] = {}

    def bell(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Bell-shaped integers in -128..127 with standard deviation about 37 (sum of four hash bytes)."""
        z = _stream(_name_seed(self.seed, name), math.prod(shape))
        total = sum((z >> np.uint64(8 * i) & np.uint64(255)).astype(np.int32) for i in range(4)) - 510
        return (total >> 2).reshape(shape)

    def flat(self, name: str, n: int) -> np.ndarray:
        """Uniform integers in 0..255, (n,)."""
        return (_stream(_name_seed(self.seed, name), n) >> np.uint64(40) & np.uint64(255)).astype(np.int32)

    def linear(self, name: str, shape: tuple[int, ...], gain: float = 1.0) -> None:
        """Weight (..., out, in) of standard deviation about gain / sqrt(in), power-of-two scale."""
        k = round(math.log2(37.0 * math.sqrt(shape[-1]) / gain))
        self.weights[name] = _scaled(self.bell(name, shape), k)

    def dyadic(self, name: str, shape: tuple[int, ...], k: int) -> None:
        self.weights[name] = _scaled(self.bell(name, shape), k)

    def site(self, prefix: str, c: dict[str, Any], inject: bool = True) -> None:
        s, width, rank = c["hc_count"], c["hc_count"] * c["hidden_size"], c["hc_lowrank"]
        self.dyadic(f"{prefix}.hc_norm.weight", (width,), 8)
        self.linear(f"{prefix}.input_mix_weight_down.weight", (rank, width), 4.0)
        self.linear(f"{prefix}.input_mix_weight_up.weight", (width, rank), 2.0)
        if inject:
            self.linear(f"{prefix}.block_inject_weight.weight", (s, width), 4.0)


def build(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """All weights of `config` (a parsed config.json with `tiny_seed`)."""
    c, b = config["text_config"], _Builder(config["tiny_seed"])
    root = "model.language_model"
    b.dyadic(f"{root}.embed_tokens.weight", (c["vocab_size"], c["hidden_size"]), 5)
    for i, kind in enumerate(c["layer_types"]):
        prefix = f"{root}.layers.{i}"
        b.site(f"{prefix}.attn_hyper_connection", c)
        b.site(f"{prefix}.mlp_hyper_connection", c)
        if kind == "linear_attention":
            _delta_net(b, f"{prefix}.linear_attn", c)
        else:
            _attention(b, f"{prefix}.self_attn", c)
        _experts(b, f"{prefix}.mlp", c)
        if i + 1 in c["ple_layer_ids"]:
            _ple(b, f"{prefix}.ple", c, sorted(c["ple_layer_ids"]).index(i + 1))
    b.site(f"{root}.hyper_connection_mixer", c, inject=False)
    b.linear("lm_head.weight", (c["vocab_size"], c["hidden_size"]), 6.0)
    return b.weights


def _delta_net(b: _Builder, p: str, c: dict[str, Any]) -> None:
    hidden, n_v, d_v = c["hidden_size"], c["linear_num_value_heads"], c["linear_value_head_dim"]
    channels = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + n_v * d_v
    b.linear(f"{p}.in_proj_qkv.weight", (channels, hidden), 2.0)
    b.linear(f"{p}.in_proj_z.weight", (n_v * d_v, hidden), 3.0)
    b.linear(f"{p}.in_proj_b.weight", (n_v, hidden), 3.0)
    b.linear(f"{p}.in_proj_a.weight", (n_v, hidden), 3.0)
    b.dyadic(f"{p}.conv1d.weight", (channels, 1, c["linear_conv_kernel_dim"]), 6)
    b.weights[f"{p}.A_log"] = _scaled(b.flat(f"{p}.A_log", n_v) * 216 // 256 - 128, 5)
    bias = _scaled(b.flat(f"{p}.dt_bias", n_v) * 192 // 256 - 160, 5)
    b.weights[f"{p}.dt_bias"] = np.trunc(bias * 16).astype(np.float32) / 16
    norm = _scaled(b.bell(f"{p}.norm.weight", (d_v,)) >> 1, 7)
    b.weights[f"{p}.norm.weight"] = (1 + norm).astype(np.float32)
    b.linear(f"{p}.out_proj.weight", (hidden, n_v * d_v), 0.5)


def _attention(b: _Builder, p: str, c: dict[str, Any]) -> None:
    hidden, n_q, n_kv, d = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    b.linear(f"{p}.q_proj.weight", (n_q * d * 2, hidden), 2.0)
    b.linear(f"{p}.k_proj.weight", (n_kv * d, hidden))
    b.linear(f"{p}.v_proj.weight", (n_kv * d, hidden), 2.0)
    b.linear(f"{p}.o_proj.weight", (hidden, n_q * d))
    b.dyadic(f"{p}.q_norm.weight", (d,), 8)
    b.dyadic(f"{p}.k_norm.weight", (d,), 8)
    n_i, d_i = c["indexer_n_heads"], c["indexer_head_dim"]
    b.linear(f"{p}.indexer.index_qk_proj.weight", ((n_i + c["indexer_kv_heads"]) * d_i, hidden))
    b.dyadic(f"{p}.indexer.q_layernorm.weight", (d_i,), 8)
    b.dyadic(f"{p}.indexer.k_layernorm.weight", (d_i,), 8)


def _experts(b: _Builder, p: str, c: dict[str, Any]) -> None:
    hidden, n, width = c["hidden_size"], c["num_experts"], c["moe_intermediate_size"]
    shared = c["shared_expert_intermediate_size"]
    b.linear(f"{p}.gate.weight", (n, hidden), 8.0)
    b.linear(f"{p}.experts.gate_up_proj", (n, 2 * width, hidden), 2.0)
    b.linear(f"{p}.experts.down_proj", (n, hidden, width))
    b.linear(f"{p}.shared_expert.gate_proj.weight", (shared, hidden), 2.0)
    b.linear(f"{p}.shared_expert.up_proj.weight", (shared, hidden), 2.0)
    b.linear(f"{p}.shared_expert.down_proj.weight", (hidden, shared))
    b.linear(f"{p}.shared_expert_gate.weight", (1, hidden), 4.0)


def _ple(b: _Builder, p: str, c: dict[str, Any], i_ple: int) -> None:
    width, dim, parts = c["hc_count"] * c["hidden_size"], c["ple_embed_dim"], c["split_ngram_parts"]
    multipliers, sizes, offsets, rows = _ngram_constants(c, i_ple)
    e = f"{p}.ple_embedding"
    for name, value in (("layer_multipliers", multipliers), ("ngram_heads_vocab_sizes", sizes),
                        ("ngram_heads_offsets", offsets)):
        b.weights[f"{e}.{name}"] = np.array(value, np.int64)
    table = _scaled(b.bell(f"{e}.ngram_embedding.weight", (rows, dim // len(sizes))), 5)
    for j in range(parts):
        b.weights[f"{e}.ngram_embedding.shard_{j}.weight"] = table[j * rows // parts:(j + 1) * rows // parts]
    b.linear(f"{p}.key_proj.weight", (width, dim))
    b.linear(f"{p}.value_proj.weight", (c["hidden_size"], dim), 2.0)
    for name in ("norm_key", "norm_query", "norm_conv"):
        b.dyadic(f"{p}.{name}.weight", (width,), 8)
    b.dyadic(f"{p}.conv1d.weight", (width, 1, c["ple_conv_kernel_size"]), 6)


def _ngram_constants(c: dict[str, Any], i_ple: int) -> tuple[list[int], list[int], list[int], int]:
    """Multipliers, head sizes, head offsets and padded rows of the i_ple-th PLE layer."""
    heads = (c["ngram_size"] - 1) * c["heads_per_ngram"]
    primes: list[int] = []
    value = c["ngram_vocab_size_base"]
    while len(primes) < (i_ple + 1) * heads:
        if all(value % d for d in range(2, math.isqrt(value) + 1)):
            primes.append(value)
        value += 1
    sizes = primes[i_ple * heads:]
    half = max(1, ((1 << 63) - 1) // c["vocab_size"] // 2)
    base = c["seed"] + 10007 * i_ple
    multipliers = [2 * (_splitmix64(base + _GAMMA * (i + 1) & _M64) % half) + 1
                   for i in range(c["ngram_size"])]
    unit = c["make_ngram_vocab_size_divisible_by"]
    return multipliers, sizes, [sum(sizes[:i]) for i in range(heads)], -(-sum(sizes) // unit) * unit


def _scaled(n: np.ndarray, k: int) -> np.ndarray:
    return (n.astype(np.float64) * 2.0**-k).astype(np.float32)


def _splitmix64(x: int) -> int:
    x = x + _GAMMA & _M64
    x = (x ^ x >> 30) * _MIX1 & _M64
    x = (x ^ x >> 27) * _MIX2 & _M64
    return x ^ x >> 31


def _stream(seed: int, count: int) -> np.ndarray:
    """splitmix64 of seed + i * gamma for i in 0..count-1, uint64."""
    with np.errstate(over="ignore"):
        x = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA)
        x = (x ^ x >> np.uint64(30)) * np.uint64(_MIX1)
        x = (x ^ x >> np.uint64(27)) * np.uint64(_MIX2)
        return x ^ x >> np.uint64(31)


def _name_seed(base: int, name: str) -> int:
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = (h ^ byte) * 0x100000001B3 & _M64
    return _splitmix64(h ^ _splitmix64(base))
