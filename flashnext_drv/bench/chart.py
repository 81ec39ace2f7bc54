"""Small line charts as SVG text: panels side by side, points on a logarithmic x axis.

Called by tools/bench_prefill.py.  What must stay true: the text is a function of the numbers alone: a chart
made again from a receipt is the same file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import log2

__all__ = ["Panel", "chart_svg"]

_COLOURS = ("#1f5fa8", "#c2571a", "#3a8a3f", "#7a4fa3", "#666666")
_WIDTH, _HEIGHT = 460, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 34, 66


@dataclass(frozen=True)
class Panel:
    """One chart.  series: points (x > 0, y >= 0) by name, x rising."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]


def chart_svg(panels: Sequence[Panel]) -> str:
    """The panels beside each other as one SVG document."""
    width = _WIDTH * len(panels)
    body = "\n".join(
        f'<g transform="translate({i * _WIDTH} 0)">\n{_panel(panel)}\n</g>' for i, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}" '
        f'viewBox="0 0 {width} {_HEIGHT}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="{width}" height="{_HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _panel(panel: Panel) -> str:
    points = [point for line in panel.series.values() for point in line]
    xs = sorted({x for x, _ in points}) or [1.0]
    low, high = log2(xs[0]), log2(xs[-1])
    top = max((y for _, y in points), default=1.0) or 1.0
    step = _step(top)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (log2(x) - low) / (high - low) if high > low else 0.5
        return (_LEFT + across * (_WIDTH - _LEFT - _RIGHT),
                _HEIGHT - _BOTTOM - y / (top * 1.05) * (_HEIGHT - _TOP - _BOTTOM))

    out = [_text(_WIDTH / 2, 18, panel.title, "middle", 13),
           _text(_WIDTH / 2, _HEIGHT - _BOTTOM + 30, panel.x_label, "middle"),
           _text(6, _TOP - 8, panel.y_label, "start")]
    for i in range(int(top * 1.05 / step) + 1):
        _, y = place(xs[0], i * step)
        out.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#dddddd" fill="none"/>')
        out.append(_text(_LEFT - 5, y + 4, f"{i * step:g}", "end"))
    for x in xs:
        across, y = place(x, 0)
        out.append(_text(across, y + 15, f"{x:g}", "middle"))
    for i, (name, line) in enumerate(panel.series.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        places = [place(x, y) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        at = _LEFT + i * (_WIDTH - _LEFT - _RIGHT) / max(len(panel.series), 1)
        out.append(f'<rect x="{at:.1f}" y="{_HEIGHT - 20}" width="10" height="10" fill="{colour}"/>')
        out.append(_text(at + 14, _HEIGHT - 11, name, "start"))
    return "\n".join(out)


def _step(top: float) -> float:
    """A round distance of lines that gives 4 to 10 of them up to `top`."""
    step = 1.0
    while step * 10 < top:
        step *= 10
    while step > top:
        step /= 10
    return next(step * part for part in (0.1, 0.2, 0.5, 1.0, 2.0) if step * part * 10 >= top)


def _text(x: float, y: float, text: str, anchor: str, size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
