"""The models that synth can make: dimensions, widths and gains, as data.

Read by synth.  micro and tiny have the sizes of small test models, quarter and full the real widths; widths
in bits follow the published 3.05 bpw pack: experts and indexer 3, attention, DeltaNet and shared expert 5,
head 5, MTP joints 4, n-gram rows 5.

Source: model.md sections 1 and 11, exl3.md section 11.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..errors import UsageError

__all__ = ["MODELS", "SynthModel"]

_GAINS: Final[Mapping[str, int]] = {
    "head": 4,
    "gdn.out": 3,
    "router": 4,
    "router.shared": 4,
    "gdn.a": 3,
    "gdn.b": 3,
}


@dataclass(frozen=True)
class SynthModel:
    """One model.  text: fields of text_config.  bits: width by role; a role that is absent is a plain matrix.

    shard_bytes: most data bytes of a shard, 0 = half of the pack.  ngram_rows: rows of the table by default,
    0 = as `text` says.
    """

    name: str
    text: Mapping[str, Any]
    bits: Mapping[str, int]
    ngram_bits: int
    shard_bytes: int = 0
    ngram_rows: int = 0

    def gain(self, role: str) -> int:
        """Std of a linear's outputs for inputs of std 1."""
        return _GAINS.get(role, 1)

    def config_json(self, ngram_rows: int | None) -> dict[str, Any]:
        """The pack's config.json.  ngram_rows: about as many rows; sizes stay distinct primes, one a head."""
        text = dict(self.text)
        wanted = self.ngram_rows if ngram_rows is None else ngram_rows
        heads = (text["ngram_size"] - 1) * text["heads_per_ngram"]
        if wanted or ngram_rows is not None:
            if wanted < 32 * heads or wanted > 1 << 31:
                raise UsageError(
                    "ngram_rows is out of range", ngram_rows=wanted, do=f"use {32 * heads}..{1 << 31}"
                )
            text["ngram_vocab_size_base"] = wanted // heads
        return {
            "architectures": ["Qwen4ExpForConditionalGeneration"],
            "model_type": "qwen4_exp",
            "text_config": text,
            "quantization_config": {
                "quant_method": "exl3",
                "version": "1.6.5",
                "bits": 3.05 if self.bits["expert.up"] == 3 else 0.0,
                "head_bits": self.bits["head"],
                "calibration": {"rows": 0, "cols": 0},
                "out_scales": "always",
                "codebook": "mul1",
                "mtp_bits": self.bits["expert.up"],
            },
        }


def _text(**fields: Any) -> dict[str, Any]:
    """Fields that all models share, and `fields`."""
    n_layers = fields["num_hidden_layers"]
    common: dict[str, Any] = {
        "model_type": "qwen4_exp_text",
        "head_dim": 256,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "hc_count": 4,
        "ple_layer_ids": [2],
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_compress_ratio": 4,
        "mtp_num_hidden_layers": 1,
        "rms_norm_eps": 1e-06,
        "make_ngram_vocab_size_divisible_by": 128,
        "seed": 1234,
        "norm_topk_prob": True,
        "output_gate_type": "sigmoid",
        "attn_output_gate": True,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(n_layers)],
    }
    return common | fields


def _bits(experts: int, dense: int, head: int) -> dict[str, int]:
    out = {f"expert.{part}": experts for part in ("gate", "up", "down")} | {
        "index.qk": experts,
        "head": head,
        "mtp.fc": experts + 1,
    }
    roles = (
        "shared.gate",
        "shared.up",
        "shared.down",
        "gdn.qkv",
        "gdn.z",
        "gdn.out",
        "qsa.q",
        "qsa.k",
        "qsa.v",
        "qsa.o",
    )
    return out | dict.fromkeys(roles, dense)


_SMALL: Final[dict[str, Any]] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "ple_embed_dim": 640,
    "heads_per_ngram": 2,
    "split_ngram_parts": 4,
    "eos_token_id": 7,
    "bos_token_id": 7,
    "max_position_embeddings": 4096,
}
_REAL: Final[dict[str, Any]] = {
    "hidden_size": 2560,
    "vocab_size": 248320,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "hc_lowrank": 320,
    "ple_embed_dim": 2560,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20000000,
    "split_ngram_parts": 128,
    "indexer_budget": 2048,
    "eos_token_id": 248044,
    "bos_token_id": 248044,
    "max_position_embeddings": 262144,
}
_SHARD_BYTES: Final = 8192 << 20

MODELS: Final[Mapping[str, SynthModel]] = {
    "micro": SynthModel(
        "micro",
        _text(
            hidden_size=128,
            num_hidden_layers=4,
            vocab_size=512,
            hc_lowrank=32,
            linear_num_key_heads=1,
            linear_num_value_heads=3,
            indexer_budget=32,
            ngram_vocab_size_base=211,
            **_SMALL,
        ),
        _bits(3, 4, 4),
        4,
    ),
    "tiny": SynthModel(
        "tiny",
        _text(
            hidden_size=256,
            num_hidden_layers=8,
            vocab_size=1024,
            hc_lowrank=64,
            linear_num_key_heads=2,
            linear_num_value_heads=6,
            indexer_budget=64,
            ngram_vocab_size_base=997,
            **_SMALL,
        ),
        _bits(3, 5, 5),
        5,
    ),
    "quarter": SynthModel(
        "quarter", _text(num_hidden_layers=12, **_REAL), _bits(3, 5, 5), 5, _SHARD_BYTES, 4_000_000
    ),
    "full": SynthModel("full", _text(num_hidden_layers=48, **_REAL), _bits(3, 5, 5), 5, _SHARD_BYTES),
}
