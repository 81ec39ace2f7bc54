"""Dimensions read from config.json, and models refused by field and value."""

from __future__ import annotations

import copy
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from flashnext_drv.errors import CheckpointError
from flashnext_drv.model.config import GDN, QSA, ModelConfig
from flashnext_drv.model.inventory import mtp_needs

pytestmark = pytest.mark.host
DATA = Path(__file__).parents[1] / "data"
MICRO = DATA / "exl3_micro" / "pack"

REAL_TEXT = {
    "hidden_size": 2560,
    "num_hidden_layers": 48,
    "vocab_size": 248320,
    "hc_count": 4,
    "hc_lowrank": 320,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "output_gate_type": "sigmoid",
    "ple_layer_ids": [2],
    "full_attention_interval": 4,
    "eos_token_id": 248044,
    "max_position_embeddings": 262144,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {"rope_theta": 1e7},
    "indexer_n_heads": 4,
    "indexer_head_dim": 128,
    "indexer_compress_ratio": 4,
    "indexer_budget": 2048,
    "ple_embed_dim": 2560,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20000000,
    "mtp": {"layer_types": ["full_attention"], "num_hidden_layers": 1},
}


def real() -> dict[str, Any]:
    return {"model_type": "qwen4_exp", "text_config": copy.deepcopy(REAL_TEXT)}


def changed(**fields: object) -> dict[str, Any]:
    raw = real()
    raw["text_config"].update(fields)
    return raw


def test_micro_dimensions() -> None:
    config = ModelConfig.load(MICRO)
    assert (config.hidden, config.n_layers, config.vocab, config.low_rank) == (128, 4, 512, 32)
    assert config.layer_kinds == (GDN, GDN, GDN, QSA)
    assert config.kind(4) == QSA and config.names.layer(4) == "mtp.layers.0"
    assert config.names.layer(2) == "model.language_model.layers.2"
    assert (config.gdn_channels, config.query_width, config.kv_width, config.index_width) == (
        640,
        1024,
        512,
        640,
    )
    assert (config.rope_dim, config.index_blocks, config.ngram_row_dim, config.ple_layers) == (
        64,
        8,
        160,
        (1,),
    )


def test_real_dimensions_and_defaults() -> None:
    config = ModelConfig.from_json(real())
    assert [i for i, kind in enumerate(config.layer_kinds) if kind == QSA] == list(range(3, 48, 4))
    assert (config.seed, config.norm_topk, config.n_mtp_layers, config.eps) == (1234, True, 1, 1e-6)
    assert (config.ngram_align, config.ngram_parts, config.index_kv_heads) == (128, 128, 1)
    assert config.gdn_channels == 10240 and config.index_blocks == 512


def test_real_ngram_constants_are_the_published_ones() -> None:
    made = ModelConfig.from_json(real()).ngram()
    ends = (3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171)
    assert made.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert made.sizes == tuple(20_000_000 + n for n in ends)
    assert made.offsets[-1] + made.sizes[-1] == 320_001_446 and made.rows == 320_001_536


def test_flat_and_nested_configs_are_equal() -> None:
    flat = real()["text_config"] | {"model_type": "qwen4_exp_text"}
    assert ModelConfig.from_json(flat) == ModelConfig.from_json(real())


def test_first_eos_of_a_list_counts() -> None:
    assert ModelConfig.from_json(changed(eos_token_id=[5, 6])).eos_id == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("head_dim", 64),
        ("linear_conv_kernel_dim", 3),
        ("ple_conv_kernel_size", 5),
        ("ngram_size", 2),
        ("hc_count", 2),
        ("indexer_head_dim", 64),
        ("indexer_n_heads", 8),
        ("indexer_compress_ratio", 8),
        ("indexer_kv_heads", 2),
        ("hidden_size", 2624),
        ("vocab_size", 248310),
        ("moe_intermediate_size", 704),
        ("shared_expert_intermediate_size", 96),
        ("num_experts_per_tok", 17),
        ("hc_lowrank", 40),
        ("hidden_act", "gelu"),
        ("output_gate_type", "tanh"),
        ("norm_topk_prob", False),
        ("attention_bias", True),
    ],
)
def test_unsupported_field_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match="do not support") as caught:
        ModelConfig.from_json(changed(**{field: value}), source="X/config.json")
    assert (
        caught.value.field == field and caught.value.value == value and caught.value.file == "X/config.json"
    )
    assert "use a Flash-Next checkpoint" in str(caught.value)


def test_unsupported_deltanet_head_is_refused() -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_json(changed(linear_key_head_dim=64, linear_value_head_dim=64))
    assert (caught.value.field, caught.value.value) == ("linear_key_head_dim", 64)


def test_too_many_query_heads_a_kv_head_are_refused() -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_json(changed(num_attention_heads=34))
    assert caught.value.field == "heads a kv head" and caught.value.value == 17


@pytest.mark.parametrize("strict", [False, True])
def test_deltanet_keys_and_values_of_different_widths_are_refused(strict: bool) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_json(changed(linear_key_head_dim=64), strict=strict)
    assert caught.value.field == "linear_value_head_dim" and caught.value.value in (128, "128")


@pytest.mark.parametrize(("field", "value"), [
    ("ngram_size", 2), ("ple_layer_ids", [48]), ("ple_layer_ids", [1]), ("eos_token_id", 0),
    ("eos_token_id", 248319), ("num_experts_per_tok", 512), ("partial_rotary_factor", 0.5),
    ("indexer_budget", 4), ("full_attention_interval", 1), ("layer_types", ["linear_attention"] * 48)])
def test_values_at_the_edge_of_sense_are_read(field: str, value: object) -> None:
    made = ModelConfig.from_json(changed(**{field: value}), strict=False)
    assert made.n_layers == len(made.layer_kinds) == 48


def test_without_layer_types_every_fourth_layer_attends() -> None:
    listed = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(48)]
    assert ModelConfig.from_json(changed(layer_types=listed)) == ModelConfig.from_json(real())
    kinds = ModelConfig.from_json(changed(full_attention_interval=1), strict=False).layer_kinds
    assert set(kinds) == {QSA}


@pytest.mark.parametrize("layers", [[], [2, 3]])
def test_other_numbers_of_ple_layers_are_refused(layers: list[int]) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_json(changed(ple_layer_ids=layers))
    assert caught.value.field == "PLE layers" and caught.value.value == len(layers)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "2560"),
        ("hidden_size", True),
        ("hidden_size", 0),
        ("hidden_size", 2560.0),
        ("num_experts_per_tok", 600),
        ("num_attention_heads", 23),
        ("linear_num_value_heads", 20),
        ("indexer_budget", 2047),
        ("eos_token_id", 248320),
        ("eos_token_id", None),
        ("layer_types", ["full_attention"]),
        ("ple_layer_ids", [0]),
        ("ple_layer_ids", [49]),
        ("rms_norm_eps", -1.0),
        ("ple_embed_dim", 2559),
    ],
)
def test_senseless_field_is_refused_even_without_strict(field: str, value: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_json(changed(**{field: value}), strict=False)
    assert caught.value.field == field


@pytest.mark.parametrize("value", [0, 0.0, 1e30, float("nan"), "1e-6", True])
def test_a_norm_epsilon_is_a_positive_number(value: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_json(changed(rms_norm_eps=value), strict=False)
    assert caught.value.field == "rms_norm_eps"


@pytest.mark.parametrize(("field", "value"), [
    ("rms_norm_eps", 9e29), ("hidden_size", 1), ("vocab_size", 2**20)])
def test_numbers_are_taken_as_they_stand(field: str, value: float) -> None:
    made = ModelConfig.from_json(changed(**{field: value, "eos_token_id": 0}), strict=False)
    assert {"rms_norm_eps": made.eps, "hidden_size": made.hidden, "vocab_size": made.vocab}[field] == value


@pytest.mark.parametrize(("field", "value"), [
    ("ple_layer_ids", [49]), ("eos_token_id", 248320), ("ple_embed_dim", 2559), ("indexer_budget", 2047)])
def test_a_contradiction_shows_the_value_that_was_given(field: str, value: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_json(changed(**{field: value}), strict=False)
    assert caught.value.value == value


@pytest.mark.parametrize(("mtp", "layers"), [({}, 0), ({"num_hidden_layers": 0}, 0),
                                             ({"num_hidden_layers": 3}, 3), (5, 0)])
def test_mtp_layers_are_counted(mtp: object, layers: int) -> None:
    assert ModelConfig.from_json(changed(mtp=mtp), strict=False).n_mtp_layers == layers


@pytest.mark.parametrize("wrong", [-1, 1.0, True, "1", None])
def test_mtp_layers_that_are_no_count(wrong: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_json(changed(mtp={"num_hidden_layers": wrong}), strict=False)
    assert caught.value.field == "mtp.num_hidden_layers"


def test_unknown_layer_type_is_refused() -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_json(changed(layer_types=["mamba"] * 48))
    assert (caught.value.field, caught.value.value) == ("layer_types", "'mamba'")


def test_missing_field_is_named() -> None:
    raw = real()
    del raw["text_config"]["hc_count"]
    with pytest.raises(CheckpointError, match="lacks a field") as caught:
        ModelConfig.from_json(raw)
    assert caught.value.field == "hc_count"


def test_another_model_type_is_refused() -> None:
    with pytest.raises(CheckpointError, match="not a Flash-Next checkpoint") as caught:
        ModelConfig.from_json({"model_type": "llama", "hidden_size": 4096})
    assert caught.value.value == "'llama'"


def test_strict_is_what_refuses_small_heads() -> None:
    small = changed(head_dim=128)
    assert ModelConfig.from_json(small, strict=False).rope_dim == 32
    with pytest.raises(CheckpointError):
        ModelConfig.from_json(small)


def test_config_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON") as caught:
        ModelConfig.load(tmp_path)
    assert caught.value.file == str(tmp_path / "config.json")


def test_config_that_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps([1, 2]))
    with pytest.raises(CheckpointError, match="holds no object"):
        ModelConfig.load(tmp_path)


def test_a_pipe_in_place_of_the_config_is_refused_without_reading(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    pipe = os.open(tmp_path / "config.json", os.O_RDWR | os.O_NONBLOCK)
    os.write(pipe, b"{}")
    end = threading.Timer(2.0, os.close, (pipe,))   # a reader would see the end then, and fail below
    end.start()
    with pytest.raises(CheckpointError, match="not a regular file"):
        ModelConfig.load(tmp_path)
    end.cancel()
    os.close(pipe)


def test_a_model_without_mtp_needs_no_mtp_weights() -> None:
    assert list(mtp_needs(ModelConfig.from_json(changed(mtp={}), strict=False))) == []
    assert len(list(mtp_needs(ModelConfig.from_json(real())))) > 10
