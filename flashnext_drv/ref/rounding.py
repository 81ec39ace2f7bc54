"""The rounding switch of the reference: where the arithmetic contract rounds, and whether a run does so.

Every forward function takes a `Rounding` and calls `half` exactly at the points that the contract lists as
fp16 and `single` at those it lists as fp32, each time on the value that would be stored.  EXACT makes both
the identity, so the same text is the plain FP64 forward.  Nothing else in ref rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["CONTRACT", "CONTRACT_FP32", "EXACT", "Array", "Rounding"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Rounding:
    """fp16: round at the contract's fp16 points.  fp32: round at its fp32 points too (sums stay FP64
    inside)."""

    fp16: bool
    fp32: bool

    def half(self, x: NDArray[Any]) -> Array:
        """`x` as stored in fp16, returned as fp64 (identity when off)."""
        if not self.fp16:
            return np.asarray(x, dtype=np.float64)
        with np.errstate(over="ignore"):
            return np.asarray(x, dtype=np.float64).astype(np.float16).astype(np.float64)

    def single(self, x: NDArray[Any]) -> Array:
        """`x` as stored in fp32, returned as fp64 (identity when off)."""
        if not self.fp32:
            return np.asarray(x, dtype=np.float64)
        with np.errstate(over="ignore"):
            return np.asarray(x, dtype=np.float64).astype(np.float32).astype(np.float64)


EXACT: Final = Rounding(fp16=False, fp32=False)
CONTRACT: Final = Rounding(fp16=True, fp32=False)
CONTRACT_FP32: Final = Rounding(fp16=True, fp32=True)
