"""The text model in FP64: the oracle of whole-model tests, with incremental state and the contract's
rounding switch.

`Model(Dims.from_config(config), weights, rounding)` runs `step(tokens, state)` over chunks of any length;
the result does not depend on the cuts.  weights: any mapping from checkpoint name to array (BF16 tensors
already widened to a float dtype).  Called by tests and checks only.  What must stay true: nothing here
shares code with the kernels or with the pack's decode rules.  Source: model notes, sections 1-8; arithmetic
contract, rule 9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .attn import BlockChoice, QsaShape, SparseAttention
from .choices import ChoiceBounds, ChoiceReport, Trace, compare_choices, median_error
from .gdn import DeltaNet, DeltaShape
from .glue import Site, Weights, load_linear
from .moe import Experts, Routes
from .rounding import EXACT, Array, Rounding
from .state import State, synthetic_state
from .token import HashTables, Ple, hash_tables

__all__ = ["ChoiceBounds", "ChoiceReport", "Dims", "Model", "State", "Trace", "compare_choices",
           "median_error", "synthetic_state"]


@dataclass(frozen=True)
class Dims:
    """Dimensions of the text model, from a checkpoint's config.  ple_layers: ZERO-based layer indices,
    ascending."""

    hidden: int
    n_layers: int
    vocab: int
    n_streams: int
    eps: float
    eos: int
    sparse_layers: tuple[int, ...]
    gdn: DeltaShape
    qsa: QsaShape
    n_experts: int
    n_active: int
    ple_layers: tuple[int, ...]
    ple_dim: int
    ple_taps: int
    ngram_size: int
    heads_per_ngram: int
    ngram_vocab_base: int
    seed: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Dims:
        """From a parsed config.json, nested (`text_config`) or flat.  Raises KeyError on a missing field."""
        c = config.get("text_config", config)
        eos = c["eos_token_id"]
        kinds = c.get("layer_types") or [
            "full_attention" if (i + 1) % c["full_attention_interval"] == 0 else "linear_attention"
            for i in range(c["num_hidden_layers"])]
        rope = c["rope_parameters"]
        fraction = rope.get("partial_rotary_factor", c.get("partial_rotary_factor"))
        return cls(
            hidden=c["hidden_size"], n_layers=c["num_hidden_layers"], vocab=c["vocab_size"],
            n_streams=c["hc_count"], eps=c["rms_norm_eps"], eos=eos[0] if isinstance(eos, list) else eos,
            sparse_layers=tuple(i for i, kind in enumerate(kinds) if kind != "linear_attention"),
            gdn=DeltaShape(c["linear_num_key_heads"], c["linear_num_value_heads"], c["linear_key_head_dim"],
                           c["linear_value_head_dim"], c["linear_conv_kernel_dim"], c["output_gate_type"]),
            qsa=QsaShape(c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"],
                         int(c["head_dim"] * fraction), float(rope["rope_theta"]), c["indexer_n_heads"],
                         c["indexer_head_dim"], c["indexer_compress_ratio"],
                         c["indexer_budget"] // c["indexer_compress_ratio"]),
            n_experts=c["num_experts"], n_active=c["num_experts_per_tok"],
            ple_layers=tuple(sorted(i - 1 for i in c["ple_layer_ids"])), ple_dim=c["ple_embed_dim"],
            ple_taps=c["ple_conv_kernel_size"], ngram_size=c["ngram_size"],
            heads_per_ngram=c["heads_per_ngram"],
            ngram_vocab_base=c["ngram_vocab_size_base"], seed=c.get("seed", 1234))

    def hash_tables(self, i_ple: int) -> HashTables:
        """Hash constants of the i_ple-th PLE layer, from the formula."""
        return hash_tables(i_ple, ngram_size=self.ngram_size, heads_per_ngram=self.heads_per_ngram,
                           vocab_base=self.ngram_vocab_base, vocab_size=self.vocab, seed=self.seed)


class _Layer:
    """One decoder layer: optional PLE, mixer site and mixer, expert site and experts."""

    def __init__(self, dims: Dims, weights: Weights, prefix: str, i_layer: int):
        self.attn_site = Site(weights, f"{prefix}.attn_hyper_connection", dims.n_streams, dims.eps)
        self.mlp_site = Site(weights, f"{prefix}.mlp_hyper_connection", dims.n_streams, dims.eps)
        self.experts = Experts(weights, f"{prefix}.mlp", dims.n_active)
        self.sparse = self.delta = self.ple = None
        if i_layer in dims.sparse_layers:
            self.sparse = SparseAttention(weights, f"{prefix}.self_attn", dims.qsa, dims.eps)
        else:
            self.delta = DeltaNet(weights, f"{prefix}.linear_attn", dims.gdn, dims.eps)
        if i_layer in dims.ple_layers:
            self.ple = Ple(weights, f"{prefix}.ple", n_streams=dims.n_streams, hidden=dims.hidden,
                           eps=dims.eps, eos=dims.eos, embed_dim=dims.ple_dim,
                           tables=dims.hash_tables(dims.ple_layers.index(i_layer)))


class Model:
    """The whole text model over one weight mapping.  Experts are decoded at first use and kept."""

    def __init__(self, dims: Dims, weights: Weights, rounding: Rounding = EXACT, *,
                 prefix: str = "model.language_model"):
        self.dims, self.rounding = dims, rounding
        self._embed = weights[f"{prefix}.embed_tokens.weight"]
        self._layers = [_Layer(dims, weights, f"{prefix}.layers.{i}", i) for i in range(dims.n_layers)]
        self._mixer = Site(weights, f"{prefix}.hyper_connection_mixer", dims.n_streams, dims.eps)
        self._head = load_linear(weights, "lm_head")

    def with_rounding(self, rounding: Rounding) -> Model:
        """The same decoded weights under another rounding."""
        other = object.__new__(Model)
        other.__dict__.update(self.__dict__)
        other.rounding = rounding
        return other

    def new_state(self) -> State:
        """The state before the first token."""
        dtype: type[np.floating[Any]] = np.float16 if self.rounding.fp16 else np.float64
        layers = [layer.sparse.empty_state(dtype) if layer.sparse else _delta(layer).empty_state()
                  for layer in self._layers]
        return State(0, layers,
                     {i: layer.ple.empty_state() for i, layer in enumerate(self._layers) if layer.ple})

    def step(self, tokens: Sequence[int] | NDArray[Any], state: State, *,
             keep_outputs: bool = False) -> Trace:
        """Run `tokens` (T >= 1 ids) from `state`, which is advanced.  Logits of every position are in the
        trace.

        keep_outputs: also the streams after each layer and each sub-layer's output, by the goldens' names.
        Raises ValueError on no tokens or an id outside the vocabulary.
        """
        ids = [int(i) for i in tokens]
        if not ids or min(ids) < 0 or max(ids) >= self.dims.vocab:
            raise ValueError(f"token ids must be 1 or more of 0..{self.dims.vocab - 1}")
        r, kept = self.rounding, _Kept(keep_outputs)
        row = np.asarray(self._embed[ids], np.float64)
        streams = np.repeat(row[:, None, :], self.dims.n_streams, axis=1)
        routes: list[Routes] = []
        choices: list[list[BlockChoice]] = []
        for i, layer in enumerate(self._layers):
            if layer.ple:
                added = layer.ple(ids, streams, state.ple[i], r)
                streams = r.single(streams + added)
                kept.add(f"L{i}.ple.out", added)
            mixed, inject = layer.attn_site(streams, r)
            kept.add(f"L{i}.attn_hyper_connection.mixed", mixed)
            kept.add(f"L{i}.attn_hyper_connection.inject", inject)
            if layer.sparse:
                y, chosen = layer.sparse(mixed, state.layers[i], r)
                choices.append(chosen)
            else:
                y = _delta(layer)(mixed, state.layers[i], r)
            streams = r.single(streams + inject[:, :, None] * y[:, None, :])
            kept.add(f"L{i}.attn.out", y)
            mixed, inject = layer.mlp_site(streams, r)
            kept.add(f"L{i}.mlp_hyper_connection.mixed", mixed)
            kept.add(f"L{i}.mlp_hyper_connection.inject", inject)
            y, route = layer.experts(mixed, r)
            routes.append(route)
            streams = r.single(streams + inject[:, :, None] * y[:, None, :])
            kept.add(f"L{i}.mlp.out", y)
            kept.add(f"L{i}.streams", streams)
        mixed, _ = self._mixer(streams, r)
        kept.add("mixer.out", mixed)
        state.position += len(ids)
        return self._trace(self._head(mixed, r), routes, choices, kept.values, len(ids))

    def _trace(self, logits: Array, routes: list[Routes], choices: list[list[BlockChoice]],
               outputs: dict[str, Array], n_tokens: int) -> Trace:
        blocks = np.full((len(choices), n_tokens, self.dims.qsa.budget), -1, np.int64)
        margin = np.full((len(choices), n_tokens), np.inf)
        for i, rows in enumerate(choices):
            for t, choice in enumerate(rows):
                blocks[i, t, :len(choice.blocks)] = choice.blocks
                margin[i, t] = choice.margin
        return Trace(logits, np.stack([r.ids for r in routes]), np.stack([r.weights for r in routes]),
                     np.stack([r.gap for r in routes]), blocks, margin, self.dims.sparse_layers, outputs)


class _Kept:
    """Intermediate values by name, flattened to (T, channels), if they are wanted at all."""

    def __init__(self, wanted: bool):
        self._wanted = wanted
        self.values: dict[str, Array] = {}

    def add(self, name: str, value: Array) -> None:
        if self._wanted:
            self.values[name] = value.reshape(len(value), -1)


def _delta(layer: _Layer) -> DeltaNet:
    assert layer.delta is not None
    return layer.delta
