"""Traces of a forward and their comparison: choices first, numbers only where the choices agree.

Owns `Trace` (what a forward chose and gave), `compare_choices` and `median_error`.  Called by whole-model
tests with a reference trace and one from kernels or a golden file.  What must stay true: a choice is judged
only if nothing that it depends on was chosen differently, and then a difference must lie under its margin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from .rounding import Array

__all__ = ["ChoiceBounds", "ChoiceReport", "Choices", "Difference", "Trace", "compare_choices",
           "median_error"]


class Choices(Protocol):
    """What another implementation has to show: sets of experts and blocks, and logits."""

    @property
    def router_ids(self) -> NDArray[Any]: ...      # (layers, T, k), any order
    @property
    def qsa_blocks(self) -> NDArray[Any]: ...      # (sparse layers, T, budget), -1 padded, any order
    @property
    def logits(self) -> NDArray[Any]: ...          # (T, V)


@dataclass(frozen=True, eq=False)
class Trace:
    """One forward over T tokens.

    logits (T, V); router_ids, router_weights (layers, T, k) by falling probability; router_gap (layers, T):
    logit of the last chosen minus the first rejected; qsa_blocks (sparse layers, T, budget) ascending, -1
    padded; qsa_margin (sparse layers, T): score of the last chosen minus the best rejected, inf where none
    is rejected; sparse_layers: their layer indices.  outputs: name -> (T, ...) intermediate values, empty
    unless asked for.
    """

    logits: NDArray[Any]
    router_ids: NDArray[Any]
    router_weights: NDArray[Any]
    router_gap: NDArray[Any]
    qsa_blocks: NDArray[Any]
    qsa_margin: NDArray[Any]
    sparse_layers: tuple[int, ...]
    outputs: dict[str, Array] = field(default_factory=dict)

    @property
    def qsa_tie(self) -> NDArray[np.bool_]:
        """Where the margin is exactly 0: the lower index decided."""
        return np.asarray(self.qsa_margin == 0)

    @classmethod
    def join(cls, steps: Sequence[Trace]) -> Trace:
        """Traces of consecutive steps as one."""
        def cat(name: str, axis: int) -> NDArray[Any]:
            return np.concatenate([getattr(step, name) for step in steps], axis=axis)
        outputs = {name: np.concatenate([step.outputs[name] for step in steps]) for name in steps[0].outputs}
        return cls(cat("logits", 0), cat("router_ids", 1), cat("router_weights", 1), cat("router_gap", 1),
                   cat("qsa_blocks", 1), cat("qsa_margin", 1), steps[0].sparse_layers, outputs)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], case: str,
                    sparse_layers: Sequence[int]) -> Trace:
        """From a golden file's arrays `{case}.{name}`; logits_f64 are preferred to logits."""
        def get(*names: str) -> NDArray[Any]:
            return next(arrays[f"{case}.{name}"] for name in names if f"{case}.{name}" in arrays)
        return cls(get("logits_f64", "logits"), get("router_ids"),
                   get("router_weights_f64", "router_weights"),
                   get("router_gap"), get("qsa_blocks"), get("qsa_margin"), tuple(sparse_layers))


@dataclass(frozen=True)
class ChoiceBounds:
    """A choice may differ only where the reference's own margin is below this.

    router: logit gap; blocks: score margin; argmax: logit of the first minus the second.
    """

    router: float
    blocks: float
    argmax: float


@dataclass(frozen=True)
class Difference:
    """One choice that differs though all it depends on agrees."""

    kind: str
    layer: int
    position: int
    margin: float
    bound: float
    ours: tuple[int, ...]
    theirs: tuple[int, ...]

    def __str__(self) -> str:
        verdict = "near tie" if self.margin < self.bound else "WRONG"
        where = f"position {self.position}" + (f" layer {self.layer}" if self.layer >= 0 else "")
        return (f"{verdict}: {self.kind} at {where}: margin {self.margin:.3g}, bound {self.bound:.3g}, "
                f"only reference {list(self.ours)}, only other {list(self.theirs)}")


@dataclass(frozen=True)
class ChoiceReport:
    """compared: choices judged.  skipped: choices that depend on a difference.  agreed (T,): every choice up
    to and at this position agrees, so numbers may be compared there."""

    compared: int
    skipped: int
    differences: tuple[Difference, ...]
    agreed: NDArray[np.bool_]

    @property
    def ok(self) -> bool:
        return all(d.margin < d.bound for d in self.differences)

    def __str__(self) -> str:
        head = (f"{self.compared} choices compared, {len(self.differences)} differ, "
                f"{self.skipped} follow from those; "
                f"{int(self.agreed.sum())} of {len(self.agreed)} positions agree in everything")
        return "\n".join([head, *map(str, self.differences)])


# measured: contract rounding against exact FP64 where choices agree, exl3_micro and exl3_tiny, all cases:
# router gaps differ by up to 1.3e-3, block margins by 3.9e-3, logits by 1.5e-3; the bounds are twice that
_DEFAULT: Final = ChoiceBounds(router=0.0026, blocks=0.008, argmax=0.003)


def compare_choices(ref_trace: Trace, other_trace: Choices, bounds: ChoiceBounds = _DEFAULT) -> ChoiceReport:
    """Judge experts, blocks and argmax of `other_trace` against the reference.

    A choice at (position, stage) depends on all earlier stages at this and earlier positions, where the
    stages are blocks then experts of layer 0, 1, ..., then the argmax.  It is judged when those agree; `ok`
    of the report says that every judged difference lies under its bound.  Raises ValueError when the shapes
    differ.
    """
    for name in ("router_ids", "qsa_blocks", "logits"):
        ours, theirs = getattr(ref_trace, name), getattr(other_trace, name)
        if ours.shape != theirs.shape:
            raise ValueError(f"traces cannot be compared: {name} has shapes {ours.shape} and {theirs.shape}")
    n_layers, n_tokens = ref_trace.router_ids.shape[:2]
    sparse = {layer: i for i, layer in enumerate(ref_trace.sparse_layers)}
    clean_stages = 2 * n_layers + 1                # stages below this agree at all positions so far
    compared = skipped = 0
    differences: list[Difference] = []
    agreed = np.zeros(n_tokens, np.bool_)
    for t in range(n_tokens):
        clean_here = clean_stages
        for stage in range(2 * n_layers + 1):
            layer = stage // 2
            if stage == 2 * n_layers:
                kind, layer, bound = "argmax", -1, bounds.argmax
                ours, theirs = (_Set({int(np.argmax(x.logits[t]))}) for x in (ref_trace, other_trace))
                top = np.partition(ref_trace.logits[t], -2)[-2:]
                margin = float(top[1] - top[0])
            elif stage % 2:
                kind, bound = "experts", bounds.router
                ours, theirs = (_Set(x.router_ids[layer, t].tolist()) for x in (ref_trace, other_trace))
                margin = float(ref_trace.router_gap[layer, t])
            elif layer in sparse:
                kind, bound, i = "blocks", bounds.blocks, sparse[layer]
                ours, theirs = (_Set(x.qsa_blocks[i, t].tolist()) for x in (ref_trace, other_trace))
                margin = float(ref_trace.qsa_margin[i, t])
            else:
                continue
            if stage > clean_here:
                skipped += 1
                continue
            compared += 1
            if ours != theirs:
                differences.append(Difference(kind, layer, t, margin, bound, tuple(sorted(ours - theirs)),
                                              tuple(sorted(theirs - ours))))
                clean_here = min(clean_here, stage)
        if clean_here < 2 * n_layers:              # an argmax changes nothing of the forward itself
            clean_stages = min(clean_stages, clean_here)
        agreed[t] = clean_here >= 2 * n_layers
    return ChoiceReport(compared, skipped, tuple(differences), agreed)


def median_error(logits: NDArray[Any], golden: NDArray[Any]) -> float:
    """Median over positions of the largest absolute difference of a position; logits (T, V)."""
    if logits.shape != golden.shape:
        raise ValueError(f"logits {logits.shape} and golden {golden.shape} differ in shape")
    difference = np.abs(np.asarray(logits, np.float64) - np.asarray(golden, np.float64))
    return float(np.median(difference.max(axis=1)))


_Set = frozenset
