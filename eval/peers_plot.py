"""Curves of loss against the share of steps computed, as an SVG without any dependency."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT = 820, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 270, 20, 50
_COLOURS = ("#c0392b", "#e59866", "#f1948a", "#2471a3", "#5dade2", "#117a65", "#7d3c98", "#bb8fce", "#566573", "#b7950b", "#000000")


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times powers of ten from low to high."""
    found = []
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        found += [step * 10.0**power for step in (1, 2, 5) if low <= step * 10.0**power <= high]
    return found


def curve_svg(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The plot: share computed from left to right, mean loss (1 is the tolerance) upwards on a logarithmic scale."""
    losses = [max(row["loss"]["mean"], 1e-4) for curve in curves.values() for row in curve]
    low, high = min(losses) / 1.2, max(*losses, 1.0) * 1.2
    shares: list[float] = [10 * row["computed"] for curve in curves.values() for row in curve]
    first, last = math.floor(min(shares)), max(math.ceil(max(shares)), math.floor(min(shares)) + 1)  # tenths

    def x(share: float) -> float:
        return _LEFT + (10 * share - first) / (last - first) * (WIDTH - _LEFT - _RIGHT)

    def y(loss: float) -> float:
        place = math.log(max(loss, 1e-4) / low) / math.log(high / low)
        return HEIGHT - _BOTTOM - place * (HEIGHT - _TOP - _BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for k in range(first, last + 1):
        out.append(f'<line x1="{x(k / 10):.1f}" x2="{x(k / 10):.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" stroke="#ddd"/>')
        out.append(f'<text x="{x(k / 10):.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{k / 10:g}</text>')
    for tick in _ticks(low, high):
        colour = "#888" if tick == 1 else "#ddd"
        out.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="{colour}"/>')
        out.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for k, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[k % len(_COLOURS)]
        points = sorted((row["computed"], row["loss"]["mean"]) for row in curve)
        line = " ".join(f"{x(share):.1f},{y(loss):.1f}" for share, loss in points)
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{x(share):.1f}" cy="{y(loss):.1f}" r="3" fill="{colour}"/>' for share, loss in points]
        out.append(f'<text x="{WIDTH - _RIGHT + 12}" y="{_TOP + 16 + 18 * k}" fill="{colour}">{escape(name)}</text>')
    middle = _LEFT + (WIDTH - _LEFT - _RIGHT) / 2
    out.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">share of steps computed</text>')
    out.append(f'<text transform="translate(16 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">mean loss (1 = tolerance)</text>')
    return "\n".join([*out, "</svg>"]) + "\n"
