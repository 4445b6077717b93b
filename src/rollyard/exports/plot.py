"""Curves of a run as an SVG file, or as lines for a terminal: the mean reward and the pass rate.

The data is the reply of GET /v1/runs/{id}/series; the colours are those of the dashboard's charts. A file is a drawing
without scripts and links, in light colours, or dark ones where the reader prefers them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

CURVES = (("reward", "mean reward", "--series-1"), ("pass_rate", "pass rate", "--series-2"))
WIDTH, HEIGHT = 760, 320
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 56, 40
DAY_S = 86_400

Values = list[float | None]


@dataclass(frozen=True, slots=True)
class Plot:
    """Curves over one axis."""

    title: str
    by: str  # time or version
    x: list[float]
    curves: dict[str, Values]  # by label

    @property
    def low(self) -> float:
        return min(0.0, *self._values())

    @property
    def high(self) -> float:
        return max(1.0, *self._values())

    def _values(self) -> list[float]:
        return [0.0, *(value for values in self.curves.values() for value in values if value is not None)]

    @property
    def is_empty(self) -> bool:
        return not any(value is not None for values in self.curves.values() for value in values)

    def x_label(self, x: float) -> str:
        if self.by == "version":
            return f"{x:g}"
        is_long = self.x[-1] - self.x[0] > DAY_S
        return datetime.fromtimestamp(x).strftime("%m-%d %H:%M" if is_long else "%H:%M:%S")


def plot_of(title: str, series: Mapping[str, Any]) -> Plot:
    """The plot of a reply. Raises `ValueError` if it does not have its shape."""
    x = [float(value) for value in series["x"]]
    curves: dict[str, Values] = {}
    for name, label, _ in CURVES:
        values = [None if value is None else float(value) for value in series[name]]
        if len(values) != len(x):
            raise ValueError(f"{name} has {len(values)} values at {len(x)} places")
        curves[label] = values
    return Plot(title, str(series.get("by") or "time"), x, curves)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between two values, both included if they are round."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1, 2, 5) if factor * power >= rough), 10 * power)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


@cache
def colours(*, is_dark: bool = False) -> dict[str, str]:
    """The colours of the dashboard by their names in app.css."""
    text = files("rollyard.web").joinpath("app.css").read_text("utf-8")
    start = ':root[data-theme="dark"]' if is_dark else ":root {"
    block = text[text.index(start) :].partition("}")[0]
    return dict(re.findall(r"(--[\w-]+): (#[0-9a-fA-F]{3,8});", block))


def svg(plot: Plot) -> str:
    """The plot as an SVG file."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    low, high = plot.low, plot.high
    first, last = (plot.x[0], plot.x[-1]) if plot.x else (0.0, 1.0)
    span = (last - first) or 1.0

    def across(x: float) -> float:
        return LEFT + (right - LEFT) * ((x - first) / span if last > first else 0.5)

    def up(y: float) -> float:
        return bottom - (bottom - TOP) * (y - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(plot.title)}">',
        f"<style>{_style()}</style>",
        f'<rect class="panel" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        f'<text class="title" x="{LEFT}" y="22">{escape(plot.title)}</text>',
    ]
    for y in ticks(low, high):
        parts.append(f'<path class="line" d="M{LEFT} {up(y):.1f}H{right}"/>')
        parts.append(f'<text class="label" x="{LEFT - 8}" y="{up(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in _places(plot):
        anchor = "middle" if len(plot.x) == 1 else {first: "start", last: "end"}.get(x, "middle")
        parts.append(
            f'<text class="label" x="{across(x):.1f}" y="{bottom + 18}" text-anchor="{anchor}">{plot.x_label(x)}</text>'
        )
    name = "weight version" if plot.by == "version" else "time"
    parts.append(f'<text class="label" x="{right}" y="{HEIGHT - 6}" text-anchor="end">{name}</text>')
    for number, (label, values) in enumerate(plot.curves.items(), 1):
        at = LEFT + 120 * (number - 1)
        parts.append(f'<path class="curve s{number}" d="M{at} 40h18"/>')
        parts.append(f'<text class="label" x="{at + 24}" y="44">{label}</text>')
        for piece in _pieces(plot.x, values):
            points = [(across(x), up(y)) for x, y in piece]
            if len(points) > 1:
                path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
                parts.append(f'<path class="curve s{number}" d="M{path}"/>')
            if len(points) == 1 or len(plot.x) < 40:
                parts += [f'<circle class="dot{number}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in points]
    return "\n".join([*parts, "</svg>", ""])


def _style() -> str:
    def rules(names: Mapping[str, str]) -> str:
        curves = "".join(
            f".s{number}{{stroke:{names[name]}}}.dot{number}{{fill:{names[name]}}}"
            for number, (_, _, name) in enumerate(CURVES, 1)
        )
        return (
            f".panel{{fill:{names['--panel']}}}.title{{fill:{names['--text']}}}.label{{fill:{names['--muted']}}}"
            f".line{{stroke:{names['--line']}}}{curves}"
        )

    return (
        "text{font:12px system-ui,sans-serif}.title{font-size:14px;font-weight:600}.curve{fill:none;stroke-width:1.75}"
        f"{rules(colours())}@media(prefers-color-scheme:dark){{{rules(colours(is_dark=True))}}}"
    )


def _places(plot: Plot) -> Sequence[float]:
    """The values of the horizontal axis that have a label: at most seven, the first and the last among them."""
    if len(plot.x) <= 7:
        return plot.x
    return [plot.x[round(number * (len(plot.x) - 1) / 6)] for number in range(7)]


def _pieces(x: Sequence[float], values: Sequence[float | None]) -> list[list[tuple[float, float]]]:
    """The parts of a curve between its gaps."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for place, value in zip(x, values, strict=True):
        if value is not None:
            pieces[-1].append((place, value))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


# --- a terminal

BRAILLE = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column of a character

Styled = list[tuple[str, int | None]]
"""Texts with the number of the curve that they show."""


def terminal(plot: Plot, width: int, height: int = 12) -> list[Styled]:
    """The plot as lines of braille characters, each 2 dots wide and 4 high."""
    low, high = plot.low, plot.high
    gutter = 1 + max(len(f"{low:g}"), len(f"{high:g}"), len(f"{(low + high) / 2:.3g}"))
    columns = max(10, width - gutter - 2)
    cells: dict[tuple[int, int], int] = {}
    owner: dict[tuple[int, int], int] = {}
    first, span = (plot.x[0], plot.x[-1] - plot.x[0]) if plot.x else (0.0, 0.0)

    def dot(at: float, value: float) -> tuple[int, int]:
        across = round((2 * columns - 1) * ((at - first) / span if span else 0.5))
        return across, round((4 * height - 1) * (high - value) / (high - low))

    for number, values in reversed(list(enumerate(plot.curves.values()))):  # the first curve is drawn last, on top
        for piece in _pieces(plot.x, values):
            dots = [dot(at, value) for at, value in piece]
            for start, end in zip(dots, dots[1:] or dots, strict=False):
                for column, line in _between(start, end):
                    cell = (line // 4, column // 2)
                    cells[cell] = cells.get(cell, 0) | DOTS[line % 4][column % 2]
                    owner[cell] = number
    lines: list[Styled] = []
    labels = {0: f"{high:g}", height // 2: f"{(low + high) / 2:.3g}", height - 1: f"{low:g}"}
    for line in range(height):
        parts: Styled = [(f"{labels.get(line, ''):>{gutter}} │", None)]
        for column in range(columns):
            dots_here = cells.get((line, column))
            parts.append((chr(BRAILLE + dots_here) if dots_here else " ", owner.get((line, column))))
        lines.append(parts)
    lines.append([(f"{'':>{gutter}} └{'─' * columns}", None)])
    start, end = (plot.x_label(plot.x[0]), plot.x_label(plot.x[-1])) if plot.x else ("", "")
    space = max(1, columns - len(start) - len(end))
    lines.append([(f"{'':>{gutter}}  {start}{' ' * space}{end}", None)])
    return lines


def _between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots of a straight line."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (round(start[0] + (end[0] - start[0]) * step / steps), round(start[1] + (end[1] - start[1]) * step / steps))
        for step in range(steps + 1)
    ]
