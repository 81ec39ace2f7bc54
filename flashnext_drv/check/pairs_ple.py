"""ple_gate, ple_conv and ple_tail one after the other, in place of ple_mix.

Called by pairs.py.  What must stay true: a case of ple_gate holds what all four kernels read, and only what a
kernel wrote reaches the next one.
"""

from __future__ import annotations

from dataclasses import replace

from ..kernels.spec import Case
from .contract import Operands, Ran
from .pairing import Turned

__all__ = ["after_conv", "after_gate", "as_mix"]


def after_gate(given: Operands, ran: Ran) -> Operands:
    """ple_conv on what ple_gate left."""
    arrays = {**given.arrays, **ran.outputs}
    cap, width = arrays["streams"].shape
    return replace(given, arrays=arrays, grid=(-(-width // 512), -(-cap // 16), 1), outputs=("streams",))


def after_conv(given: Operands, ran: Ran) -> Operands:
    """ple_tail on what ple_gate and ple_conv left."""
    arrays = {**given.arrays, "conv_in": ran.found["conv_in"], **ran.outputs}
    cap, width = arrays["streams"].shape
    return replace(given, arrays=arrays, grid=(-(-width // 512), cap, 1), outputs=("state",))


def as_mix(case: Case, given: Operands, ran: Ran) -> Turned:
    """ple_mix on the case of ple_gate; streams and tails are compared with those of the last run."""
    operands = replace(given, grid=(4, len(given.arrays["streams"]), 1), outputs=("streams", "state"))
    return operands, lambda mix: [(name, ran.found[name], mix.found[name]) for name in mix.names]
