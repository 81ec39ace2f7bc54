"""Times of a reply: to the first token, of the prompt, between tokens; from the client's stamps and, apart
from them, from the server's.

Called by the measurements of this folder.  What must stay true: a time that cannot be told is None, never 0;
gaps of tokens that came in one piece are 0 and count.

    TTFT = first token - sent.  prefill tokens/s = prompt tokens / TTFT
    decode tokens/s = (n - 1) / (last - first)
    ITL = gap between neighbouring tokens as they arrive: its mean, median (p50) and 95th percentile (p95)

The engine looks at its draws once in up to Limits.steps_ahead tokens, and those of one look arrive together.
So with three or more a look most gaps are 0 and itl_p50_ms is 0 or nearly so, and itl_p95_ms is the time
between looks; the time a token takes is itl_mean_ms alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

__all__ = ["Times", "gaps_us", "middle", "percentile", "stamps_of", "times"]


@dataclass(frozen=True)
class Times:
    """Seconds, tokens a second, milliseconds; None where the stamps do not tell.

    itl_p50_ms, itl_p95_ms: of gaps as tokens arrive, bursts of one look included; see the module.
    """

    ttft_s: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    itl_mean_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p95_ms: float | None = None
    total_s: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        return {name: None if value is None else round(value, 6) for name, value in vars(self).items()}


def times(sent_at: float | None, token_at: Sequence[float], prompt_tokens: int) -> Times:
    """Of one reply whose tokens came at `token_at`, rising, after a prompt of `prompt_tokens` ids."""
    if sent_at is None or not token_at:
        return Times()
    first, last, n = token_at[0], token_at[-1], len(token_at)
    ttft, span = first - sent_at, last - first
    gaps = [(b - a) * 1e3 for a, b in zip(token_at, token_at[1:], strict=False)]
    return Times(
        ttft_s=ttft,
        prefill_tokens_per_s=prompt_tokens / ttft if ttft > 0 else None,
        decode_tokens_per_s=(n - 1) / span if n > 1 and span > 0 else None,
        itl_mean_ms=span / (n - 1) * 1e3 if n > 1 else None,
        itl_p50_ms=percentile(gaps, 50),
        itl_p95_ms=percentile(gaps, 95),
        total_s=last - sent_at,
    )


def percentile(values: Sequence[float], share: float) -> float | None:
    """Linear between the two nearest ranks (rank share / 100 * (n - 1), from 0); None of none."""
    if not values:
        return None
    ordered = sorted(values)
    rank = share / 100 * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def middle(found: Sequence[Times]) -> dict[str, Any]:
    """The median of each figure over several replies; None as soon as one of them does not tell it."""
    out: dict[str, Any] = {}
    for name in Times.__dataclass_fields__:
        values = [getattr(one, name) for one in found]
        told = [value for value in values if value is not None]
        out[name] = round(median(told), 6) if told and len(told) == len(values) else None
    return out


def gaps_us(stamps: Sequence[float], start: float) -> list[int]:
    """Stamps as whole microseconds: the first since `start`, each other since the one before it."""
    at = [round((stamp - start) * 1e6) for stamp in stamps]
    return [b - a for a, b in zip([0, *at], at, strict=False)]


def stamps_of(gaps: Sequence[int]) -> list[float]:
    """Seconds since the start that `gaps_us` counted from."""
    return [us / 1e6 for us in accumulate(gaps)]
