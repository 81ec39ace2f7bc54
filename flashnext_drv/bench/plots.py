"""Charts of results, by bench/chart.py.

Called by cli/bench.py.  What must stay true: a chart holds figures of the result alone; a figure that was not
told is left out, never drawn as zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .chart import Panel, chart_svg
from .workload import PART

__all__ = ["DRAWN", "plot"]

DRAWN: Final = ("workload", "matrix", "concurrent", "cache", "cold")  # what `bench` can draw

Series = dict[str, list[tuple[float, float]]]


def plot(result: Mapping[str, Any]) -> str | None:
    """The result as SVG; None for a kind that has nothing to draw."""
    kind = result["kind"].removesuffix(PART)
    if kind in ("workload", "scaled"):
        return _workload(result)
    if kind == "matrix":
        return _matrix(result)
    if kind == "concurrent":
        waves = [(wave["streams"], wave["aggregate"]["decode_tokens_per_s"]) for wave in result["waves"]]
        points = {"all streams together": [(float(n), float(v)) for n, v in waves if v is not None]}
        return chart_svg([Panel("decode", "streams at once", "tokens/s", points)])
    if kind in ("cache", "cold"):
        panels = [_by_length(result, "prefill_tokens_per_s", "prompt", "tokens/s"),
                  _by_length(result, "ttft_s", "time to first token", "s")]
        return chart_svg(panels)
    return None


def _workload(result: Mapping[str, Any]) -> str:
    figures = (("decode_tokens_per_s", "decode, a stream", "tokens/s"),
               ("ttft_s", "time to first token", "s"),
               ("itl_p95_ms", "gap between tokens, p95", "ms"))
    panels = []
    for name, title, unit in figures:
        series: Series = {}
        for leg in result["legs"]:
            if leg["client"][name] is not None:
                series.setdefault(leg["mode"], []).append((float(leg["streams"]), float(leg["client"][name])))
        panels.append(Panel(title, "streams at once", unit, series))
    return chart_svg(panels)


def _matrix(result: Mapping[str, Any]) -> str:
    prompts: Series = {}
    widths: Series = {}
    for leg in result["legs"]:
        name = f"{leg['lines']} {leg['mode']}"
        for cell in leg["cells"]:
            if cell.get("state") == "first" and cell["prefill_tokens_per_s"] is not None:
                prompts.setdefault(name, []).append((cell["length"], cell["prefill_tokens_per_s"]))
            rate = cell.get("aggregate", {}).get("decode_tokens_per_s")
            if "width" in cell and rate is not None:
                widths.setdefault(name, []).append((cell["width"], rate))
    return chart_svg([Panel("prompt, alone", "tokens", "tokens/s", prompts),
                      Panel("decode, all streams", "streams at once", "tokens/s", widths)])


def _by_length(result: Mapping[str, Any], figure: str, title: str, unit: str) -> Panel:
    series: Series = {}
    for reply in sorted(result["replies"], key=lambda reply: reply["prompt_tokens"]):
        value = reply["client"][figure]
        if value is not None:
            name = reply["name"].split()[1]
            series.setdefault(name, []).append((float(reply["prompt_tokens"]), float(value)))
    return Panel(title, "prompt tokens", unit, series)
