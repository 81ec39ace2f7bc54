"""config.json of a Flash-Next checkpoint as frozen dimensions.

Called by pack (`Pack.config`), synth, layout, ref and the commands.  What must stay true: every dimension
the engine uses is a field here under one name, and a model the kernels cannot run is refused here, by field
and value, before anything is allocated.  Importing touches nothing; `ModelConfig.load` reads one file.

Source of fields and defaults: the published config.json and the model's class defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Final

from ..errors import CheckpointError
from ..kernels.moe import MAX_EXPERTS
from ..kernels.token import MAX_ROW_DIM, MAX_VOCAB
from .names import Names
from .primes import primes_from

__all__ = ["GDN", "QSA", "ModelConfig", "NgramConstants", "ngram_constants"]

GDN: Final = "gdn"
QSA: Final = "qsa"

_KINDS: Final = {"linear_attention": GDN, "full_attention": QSA, "indexed_attention": QSA}
_M64: Final = (1 << 64) - 1
_GAMMA: Final = 0x9E3779B97F4A7C15
_MAX_LAYERS: Final = 4096  # beyond any model; bounds the work done before tensors are looked at
_MAX_NGRAM: Final = 256
_NOT_OURS: Final = "use a Flash-Next checkpoint with the published head sizes"


@dataclass(frozen=True)
class NgramConstants:
    """Hash constants of one PLE layer.  multipliers: ngram_size odd numbers.  sizes, offsets: one entry a
    head.

    rows: rows of the table, the sum of sizes rounded up to config.ngram_align.
    """

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    rows: int


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of the text model.  Widths in elements, indices zero-based, index_budget in tokens."""

    hidden: int
    n_layers: int
    vocab: int
    n_streams: int
    low_rank: int
    n_experts: int
    n_active: int
    moe_width: int
    shared_width: int
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_head_dim: int
    conv_taps: int
    gate_activation: str
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_dim: int
    rope_theta: float
    index_heads: int
    index_kv_heads: int
    index_dim: int
    index_ratio: int
    index_budget: int
    ple_layers: tuple[int, ...]
    ple_dim: int
    ple_taps: int
    ngram_size: int
    heads_per_ngram: int
    ngram_base: int
    ngram_align: int
    ngram_parts: int
    seed: int
    eos_id: int
    eps: float
    norm_topk: bool
    max_positions: int
    n_mtp_layers: int
    layer_kinds: tuple[str, ...]

    @property
    def index_blocks(self) -> int:
        """Most blocks a query may select: index_budget // index_ratio."""
        return self.index_budget // self.index_ratio

    @property
    def gdn_key_width(self) -> int:
        return self.gdn_key_heads * self.gdn_head_dim

    @property
    def gdn_value_width(self) -> int:
        return self.gdn_value_heads * self.gdn_head_dim

    @property
    def gdn_channels(self) -> int:
        """Channels of in_proj_qkv and its convolution: q, k, v."""
        return 2 * self.gdn_key_width + self.gdn_value_width

    @property
    def query_width(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def index_width(self) -> int:
        """Outputs of index_qk_proj: the query heads and the raw key."""
        return (self.index_heads + self.index_kv_heads) * self.index_dim

    @property
    def n_ngram_heads(self) -> int:
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def ngram_row_dim(self) -> int:
        return self.ple_dim // self.n_ngram_heads

    @cached_property
    def names(self) -> Names:
        return Names(self.n_layers)

    def kind(self, i_layer: int) -> str:
        """GDN or QSA; the MTP layer (index n_layers) is QSA."""
        return QSA if i_layer == self.n_layers else self.layer_kinds[i_layer]

    def ngram(self, i_ple: int = 0) -> NgramConstants:
        """Hash constants of the i_ple-th PLE layer by the formula."""
        return ngram_constants(self, i_ple)

    @classmethod
    def load(cls, folder: str | Path, strict: bool = True) -> ModelConfig:
        """Read `folder`/config.json.

        strict: refuse what the kernels cannot run; without it only what makes no sense is refused.
        Raises CheckpointError with the field and its value.
        """
        path = Path(folder) / "config.json"
        try:
            if path.exists() and not path.is_file():  # a pipe would wait for a writer
                raise OSError(0, "it is not a regular file")
            raw = json.loads(path.read_bytes())
        except FileNotFoundError as error:
            raise CheckpointError(
                "not a pack: config.json is missing",
                folder=str(folder),
                do="give the folder that holds config.json and the *.safetensors files",
            ) from error
        except OSError as error:
            raise CheckpointError(
                "config.json cannot be read",
                file=str(path),
                because=str(error.strerror),
                do="check the folder's permissions",
            ) from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                "config.json is not JSON", file=str(path), because=str(error), do="fetch the file again"
            ) from error
        return cls.from_json(raw, strict=strict, source=str(path))

    @classmethod
    def from_json(cls, raw: object, *, strict: bool = True, source: str = "config.json") -> ModelConfig:
        """Dimensions from the parsed config.  source: file name for messages.  Raises CheckpointError."""
        fields = _Fields(raw, source)
        config = fields.read()
        _check_sense(config, source)
        if strict:
            _check_supported(config, fields, source)
        return config


def ngram_constants(config: ModelConfig, i_ple: int) -> NgramConstants:
    """Multipliers by splitmix64, sizes the next primes from ngram_base on; exact integers."""
    n_heads = config.n_ngram_heads
    skipped = i_ple * n_heads
    sizes = tuple(islice(primes_from(config.ngram_base), skipped, skipped + n_heads))
    offsets = tuple(sum(sizes[:i]) for i in range(n_heads))
    half = max(1, ((1 << 63) - 1) // config.vocab // 2)
    base = config.seed + 10007 * i_ple
    multipliers = tuple(
        2 * (_splitmix64(base + _GAMMA * (j + 1)) % half) + 1 for j in range(config.ngram_size)
    )
    align = config.ngram_align
    return NgramConstants(multipliers, sizes, offsets, -(-sum(sizes) // align) * align)


def _splitmix64(z: int) -> int:
    z = (z + _GAMMA) & _M64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _M64
    return z ^ (z >> 31)


class _Fields:
    """Typed reading of the text configuration, nested in text_config or flat."""

    def __init__(self, raw: object, source: str) -> None:
        self.source = source
        if not isinstance(raw, Mapping):
            raise CheckpointError("config.json holds no object", file=source, do="fetch the file again")
        text = raw.get("text_config", raw)
        if not isinstance(text, Mapping):
            raise self._bad("text_config", text, "an object")
        self.text: Mapping[str, Any] = text
        model_type = text.get("model_type", raw.get("model_type"))
        if model_type not in ("qwen4_exp", "qwen4_exp_text"):
            raise CheckpointError(
                "not a Flash-Next checkpoint",
                file=source,
                field="model_type",
                value=repr(model_type),
                do="this engine runs model_type qwen4_exp only",
            )
        rope = text.get("rope_parameters", {})
        if not isinstance(rope, Mapping):
            raise self._bad("rope_parameters", rope, "an object")
        self.rope: Mapping[str, Any] = rope

    def read(self) -> ModelConfig:
        n_layers = self.count("num_hidden_layers", most=_MAX_LAYERS)
        head_dim = self.count("head_dim")
        if self.count("linear_key_head_dim") != self.count("linear_value_head_dim"):
            raise self._bad(
                "linear_value_head_dim", self.text["linear_value_head_dim"], "linear_key_head_dim"
            )
        return ModelConfig(
            hidden=self.count("hidden_size"),
            n_layers=n_layers,
            vocab=self.count("vocab_size"),
            n_streams=self.count("hc_count"),
            low_rank=self.count("hc_lowrank"),
            n_experts=self.count("num_experts"),
            n_active=self.count("num_experts_per_tok"),
            moe_width=self.count("moe_intermediate_size"),
            shared_width=self.count("shared_expert_intermediate_size"),
            gdn_key_heads=self.count("linear_num_key_heads"),
            gdn_value_heads=self.count("linear_num_value_heads"),
            gdn_head_dim=self.count("linear_key_head_dim"),
            conv_taps=self.count("linear_conv_kernel_dim"),
            gate_activation=self.word("output_gate_type", "sigmoid"),
            n_heads=self.count("num_attention_heads"),
            n_kv_heads=self.count("num_key_value_heads"),
            head_dim=head_dim,
            rope_dim=self._rope_dim(head_dim),
            rope_theta=self.number("rope_theta", 1e7, self.rope),
            index_heads=self.count("indexer_n_heads"),
            index_kv_heads=self.count("indexer_kv_heads", 1),
            index_dim=self.count("indexer_head_dim"),
            index_ratio=self.count("indexer_compress_ratio"),
            index_budget=self.count("indexer_budget"),
            ple_layers=self._ple_layers(),
            ple_dim=self.count("ple_embed_dim"),
            ple_taps=self.count("ple_conv_kernel_size"),
            ngram_size=self.count("ngram_size", most=_MAX_NGRAM),
            heads_per_ngram=self.count("heads_per_ngram", most=_MAX_NGRAM),
            ngram_base=self.count("ngram_vocab_size_base"),
            ngram_align=self.count("make_ngram_vocab_size_divisible_by", 128),
            ngram_parts=self.count("split_ngram_parts", 128),
            seed=self.count("seed", 1234, least=0),
            eos_id=self._eos(),
            eps=self.number("rms_norm_eps", 1e-6, self.text),
            norm_topk=self.flag("norm_topk_prob", True),
            max_positions=self.count("max_position_embeddings"),
            n_mtp_layers=self._mtp_layers(),
            layer_kinds=self._kinds(n_layers),
        )

    def count(
        self, name: str, default: int | None = None, least: int = 1, most: int = (1 << 40) - 1
    ) -> int:
        value = self.text.get(name, default)
        if value is None:
            raise CheckpointError(
                "config.json lacks a field",
                file=self.source,
                field=name,
                do="fetch the checkpoint's own config.json",
            )
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._bad(name, value, f"an integer {least}..{most}")
        return value

    def number(self, name: str, default: float, where: Mapping[str, Any]) -> float:
        value = where.get(name, self.text.get(name, default))
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self._bad(name, value, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.text.get(name, default)
        if not isinstance(value, bool):
            raise self._bad(name, value, "true or false")
        return value

    def word(self, name: str, default: str) -> str:
        value = self.text.get(name, default)
        if not isinstance(value, str):
            raise self._bad(name, value, "a string")
        return value

    def _rope_dim(self, head_dim: int) -> int:
        factor = self.number("partial_rotary_factor", 0.25, self.rope)
        return int(head_dim * factor)

    def _ple_layers(self) -> tuple[int, ...]:
        ids = self.text.get("ple_layer_ids", ())
        if not isinstance(ids, list | tuple) or not all(type(i) is int and i >= 1 for i in ids):
            raise self._bad("ple_layer_ids", ids, "a list of one-based layer numbers")
        return tuple(i - 1 for i in sorted(set(ids)))

    def _eos(self) -> int:
        value = self.text.get("eos_token_id")
        if isinstance(value, list) and value:
            value = value[0]
        if type(value) is not int:
            raise self._bad("eos_token_id", value, "a token id or a list of them")
        return value

    def _mtp_layers(self) -> int:
        if "mtp_num_hidden_layers" in self.text:
            return self.count("mtp_num_hidden_layers", least=0)
        mtp = self.text.get("mtp")
        value = mtp.get("num_hidden_layers", 0) if isinstance(mtp, Mapping) else 0
        if type(value) is not int or value < 0:
            raise self._bad("mtp.num_hidden_layers", value, "an integer >= 0")
        return value

    def _kinds(self, n_layers: int) -> tuple[str, ...]:
        types = self.text.get("layer_types")
        if types is None:
            every = self.count("full_attention_interval", 4)
            return tuple(QSA if (i + 1) % every == 0 else GDN for i in range(n_layers))
        if not isinstance(types, list) or len(types) != n_layers:
            raise self._bad("layer_types", types, f"a list of {n_layers} layer types")
        for kind in types:
            if not isinstance(kind, str) or kind not in _KINDS:
                raise self._bad("layer_types", kind, f"one of {sorted(_KINDS)}")
        return tuple(_KINDS[kind] for kind in types)

    def _bad(self, name: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(
            "config.json has an impossible field",
            file=self.source,
            field=name,
            value=repr(value),
            because=f"expected {wanted}",
            do="fetch the checkpoint's own config.json",
        )


def _check_sense(config: ModelConfig, source: str) -> None:
    """What no implementation could run."""
    wrong: list[tuple[str, object, str]] = []

    def need(good: bool, name: str, value: object, rule: str) -> None:
        if not good:
            wrong.append((name, value, rule))

    c = config
    need(c.n_active <= c.n_experts, "num_experts_per_tok", c.n_active, f"at most num_experts={c.n_experts}")
    need(
        c.n_heads % c.n_kv_heads == 0,
        "num_attention_heads",
        c.n_heads,
        f"a multiple of num_key_value_heads={c.n_kv_heads}",
    )
    need(
        c.gdn_value_heads % c.gdn_key_heads == 0,
        "linear_num_value_heads",
        c.gdn_value_heads,
        f"a multiple of linear_num_key_heads={c.gdn_key_heads}",
    )
    need(
        c.rope_dim >= 2 and c.rope_dim % 2 == 0 and c.rope_dim <= min(c.head_dim, c.index_dim),
        "partial_rotary_factor",
        c.rope_dim,
        "an even number of rotated channels, at most the head dims",
    )
    need(
        c.index_budget % c.index_ratio == 0,
        "indexer_budget",
        c.index_budget,
        f"a multiple of indexer_compress_ratio={c.index_ratio}",
    )
    need(c.ngram_size >= 2, "ngram_size", c.ngram_size, "at least 2")
    need(
        c.ngram_size >= 2 and c.ple_dim % c.n_ngram_heads == 0,
        "ple_embed_dim",
        c.ple_dim,
        "a multiple of the number of n-gram heads",
    )
    need(
        all(i < c.n_layers for i in c.ple_layers),
        "ple_layer_ids",
        [i + 1 for i in c.ple_layers],
        f"layers 1..{c.n_layers}",
    )
    need(0 <= c.eos_id < c.vocab, "eos_token_id", c.eos_id, f"a token id below vocab_size={c.vocab}")
    for name, value, rule in wrong:
        raise CheckpointError(
            "config.json contradicts itself",
            file=source,
            field=name,
            value=value,
            because=f"expected {rule}",
            do="fetch the checkpoint's own config.json",
        )


def _check_supported(config: ModelConfig, fields: _Fields, source: str) -> None:
    """What the kernels cannot run: each field by name, with the values that work."""
    c = config
    text = fields.text
    exact: tuple[tuple[str, object, object], ...] = (
        ("hc_count", c.n_streams, 4),
        ("head_dim", c.head_dim, 256),
        ("linear_key_head_dim", c.gdn_head_dim, 128),
        ("linear_conv_kernel_dim", c.conv_taps, 4),
        ("rotary dimension", c.rope_dim, 64),
        ("indexer_n_heads", c.index_heads, 4),
        ("indexer_kv_heads", c.index_kv_heads, 1),
        ("indexer_head_dim", c.index_dim, 128),
        ("indexer_compress_ratio", c.index_ratio, 4),
        ("ple_conv_kernel_size", c.ple_taps, 4),
        ("ngram_size", c.ngram_size, 3),
        ("norm_topk_prob", c.norm_topk, True),
        ("hidden_act", text.get("hidden_act", "silu"), "silu"),
        ("attn_output_gate", text.get("attn_output_gate", True), True),
        ("attention_bias", text.get("attention_bias", False), False),
        ("rope_parameters.rope_type", fields.rope.get("rope_type", "default"), "default"),
        ("mtp_use_dedicated_embeddings", text.get("mtp_use_dedicated_embeddings", False), False),
    )
    for name, value, wanted in exact:
        if value != wanted:
            raise _unsupported(source, name, value, f"the kernels have {wanted!r} only")
    multiples = (
        ("hidden_size", c.hidden, 128),
        ("vocab_size", c.vocab, 128),
        ("moe_intermediate_size", c.moe_width, 128),
        ("shared_expert_intermediate_size", c.shared_width, 128),
        ("hc_lowrank", c.low_rank, 16),
        ("ple_embed_dim", c.ple_dim, 16),
        ("width of an n-gram row", c.ngram_row_dim, 16),
    )
    for name, value, step in multiples:
        if value % step:
            raise _unsupported(source, name, value, f"it must be a multiple of {step}")
    limits = (
        ("num_experts_per_tok", c.n_active, 1, 16),
        ("heads a kv head", c.n_heads // c.n_kv_heads, 1, 16),
        ("PLE layers", len(c.ple_layers), 1, 1),
        ("mtp_num_hidden_layers", c.n_mtp_layers, 0, 1),
        ("num_experts", c.n_experts, 1, MAX_EXPERTS),
        ("vocab_size", c.vocab, 1, MAX_VOCAB),
        ("width of an n-gram row", c.ngram_row_dim, 16, MAX_ROW_DIM),
    )
    for name, value, least, most in limits:
        if not least <= value <= most:
            raise _unsupported(source, name, value, f"it must lie in {least}..{most}")
    if c.gate_activation not in ("sigmoid", "silu"):
        raise _unsupported(source, "output_gate_type", c.gate_activation, "it must be sigmoid or silu")


def _unsupported(source: str, name: str, value: object, rule: str) -> CheckpointError:
    return CheckpointError(
        "the kernels do not support this model",
        file=source,
        field=name,
        value=value,
        because=rule,
        do=_NOT_OURS,
    )
