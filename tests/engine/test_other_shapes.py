"""Models of other shapes than the published ones, small and odd, against the reference.

mixed: with every width and codebook, plain matrices and sign words among the linears.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext_drv.engine.engine import Engine, Limits, Prefill
from flashnext_drv.model.synth import SynthPack
from flashnext_drv.model.synth_models import MODELS
from flashnext_drv.ref.choices import compare_choices, median_error
from flashnext_drv.ref.files import FolderWeights
from flashnext_drv.ref.model import Dims, Model
from flashnext_drv.ref.rounding import CONTRACT_FP32

from .test_ring import seat

pytestmark = pytest.mark.sim
ATTENTION, DELTA = "full_attention", "linear_attention"
SHAPES: dict[str, dict[str, Any]] = {
    # PLE before the first mixer, which is attention; no size a power of two; experts narrower than the shared
    "odd": {
        "hidden_size": 384, "vocab_size": 640, "hc_lowrank": 48, "num_hidden_layers": 3,
        "layer_types": [ATTENTION, DELTA, ATTENTION], "ple_layer_ids": [1], "ple_embed_dim": 480,
        "heads_per_ngram": 3, "ngram_vocab_size_base": 131, "num_attention_heads": 3,
        "num_key_value_heads": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "num_experts": 12,
        "num_experts_per_tok": 5, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 384,
        "indexer_budget": 16, "output_gate_type": "silu", "eos_token_id": 0,
    },
    # one expert a token, wider than the shared one; 16 query heads a kv head; one n-gram head an order
    "lean": {
        "hidden_size": 128, "vocab_size": 128, "hc_lowrank": 16, "num_hidden_layers": 2,
        "layer_types": [DELTA, ATTENTION], "ple_layer_ids": [2], "ple_embed_dim": 256, "heads_per_ngram": 1,
        "ngram_vocab_size_base": 67, "num_attention_heads": 16, "num_key_value_heads": 1,
        "linear_num_key_heads": 1, "linear_num_value_heads": 5, "num_experts": 7, "num_experts_per_tok": 1,
        "moe_intermediate_size": 384, "shared_expert_intermediate_size": 128, "indexer_budget": 4,
        "eos_token_id": 127,
    },
    # attention alone, DeltaNet nowhere; 16 experts a token
    "sparse": {
        "hidden_size": 256, "vocab_size": 256, "hc_lowrank": 32, "num_hidden_layers": 2,
        "layer_types": [ATTENTION, ATTENTION], "ple_layer_ids": [2], "num_attention_heads": 6,
        "num_key_value_heads": 3, "num_experts": 18, "num_experts_per_tok": 16, "indexer_budget": 8,
    },
    # DeltaNet alone
    "recurrent": {"num_hidden_layers": 2, "layer_types": [DELTA, DELTA], "num_experts": 1,
                  "num_experts_per_tok": 1},
}  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "mixed"),
    [("odd", False), ("odd", True), ("lean", True), ("sparse", True), ("recurrent", False)],
)
def test_logits_choices_and_launch_widths(
    tmp_path: Path,
    device: str,
    traced: Callable[..., Any],
    prompt_run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    shape: str,
    mixed: bool,
) -> None:
    model = replace(MODELS["micro"], name=shape, text=MODELS["micro"].text | SHAPES[shape])
    monkeypatch.setitem(MODELS, shape, model)
    pack = SynthPack(shape, 3, mixed=mixed)
    pack.write(tmp_path / "pack")
    weights = FolderWeights(tmp_path / "pack")
    reference = Model(Dims.from_config(weights.config()), weights, CONTRACT_FP32)
    ids = [(53 * i + 5) % pack.config.vocab for i in range(21)]
    want = reference.step(ids, reference.new_state())
    with Engine.open(pack, Limits(context_tokens=64, graph=False), device=device) as engine:
        ours = traced(engine, ids)
    report = compare_choices(want, ours)
    assert report.ok, str(report)
    assert median_error(ours.logits, want.logits) < 0.001 * np.abs(want.logits).max()
    limits = Limits(context_tokens=96, rows=16, prompt_rows=16, deep_rows=2)
    with Engine.open(tmp_path / "pack", limits, device=device) as engine:
        assert engine.logits(ids, prefill=Prefill(deep=False)).tobytes() == ours.logits.tobytes()
        longer = [(29 * i + 3) % pack.config.vocab for i in range(66)]  # over a page's border
        expected = prompt_run(engine, longer, Prefill(deep=False))
        for chunk in (None, 34):
            assert not expected.differs(prompt_run(engine, longer, Prefill(chunk=chunk)))
        assert engine.prompts.deep_rows == 2 * len(longer)


@pytest.mark.parametrize("shape", ["odd", "lean", "sparse"])
def test_batches_of_experts_leave_the_bytes_of_resident_ones(
    device: str, prompt_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """Experts as wide as, wider and narrower than the model: what a batch leaves, the next ones keep."""
    model = replace(MODELS["micro"], name=shape, text=MODELS["micro"].text | SHAPES[shape])
    monkeypatch.setitem(MODELS, shape, model)
    pack = SynthPack(shape, 3)
    n_experts = pack.config.n_experts
    limits = Limits(context_tokens=96, rows=16, prompt_rows=16, deep_rows=2, expert_lines=n_experts - 1,
                    ring_depth=2, ring_lines=3)
    ids = [(29 * i + 3) % pack.config.vocab for i in range(66)]
    with Engine.open(pack, limits, device=device) as engine:
        assert engine.rank.deep is not None and engine.rank.deep.ring is not None
        expected = prompt_run(engine, ids, Prefill(deep=False))
        for n_lines in (1, 3, 4, n_experts - 1):
            seat(engine, n_lines)
            assert not expected.differs(prompt_run(engine, ids, Prefill()))
