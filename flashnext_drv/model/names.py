"""Tensor name prefixes of a Flash-Next checkpoint.

Used by config (`config.names`), pack, inventory, synth, the engine and ref.  Source: model.md section 11 of
the format notes, the published packs.  Layer index n_layers means the MTP head's one layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["Names"]

_TRUNK: Final = "model.language_model"


@dataclass(frozen=True)
class Names:
    """Prefixes; the names of tensors are prefix + '.' + part.  n_layers: decoder layers of the trunk."""

    n_layers: int

    embed: str = f"{_TRUNK}.embed_tokens"
    head: str = "lm_head"
    mixer: str = f"{_TRUNK}.hyper_connection_mixer"
    mtp: str = "mtp"
    mtp_mixer: str = "mtp.hyper_connection_mixer"

    def layer(self, i_layer: int) -> str:
        """Prefix of decoder layer `i_layer`, 0..n_layers; n_layers is the MTP layer."""
        return "mtp.layers.0" if i_layer == self.n_layers else f"{_TRUNK}.layers.{i_layer}"

    def gdn(self, i_layer: int) -> str:
        return f"{self.layer(i_layer)}.linear_attn"

    def qsa(self, i_layer: int) -> str:
        return f"{self.layer(i_layer)}.self_attn"

    def mlp(self, i_layer: int) -> str:
        return f"{self.layer(i_layer)}.mlp"

    def expert(self, i_layer: int, i_expert: int) -> str:
        return f"{self.layer(i_layer)}.mlp.experts.{i_expert}"

    def shared(self, i_layer: int) -> str:
        return f"{self.layer(i_layer)}.mlp.shared_expert"

    def attn_site(self, i_layer: int) -> str:
        return f"{self.layer(i_layer)}.attn_hyper_connection"

    def mlp_site(self, i_layer: int) -> str:
        return f"{self.layer(i_layer)}.mlp_hyper_connection"

    def ple(self, i_layer: int) -> str:
        return f"{self.layer(i_layer)}.ple"

    def ngram(self, i_layer: int) -> str:
        """Prefix of the n-gram table's tensors in the published layout."""
        return f"{self.layer(i_layer)}.ple.ple_embedding.ngram_embedding"
