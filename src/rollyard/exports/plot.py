"""Curves of a run for people without the page: the same charts, as data (`plot_svg` and `plot_terminal` draw them).

The data is the reply of GET /v1/runs/{id}/series; the colours are those of the dashboard's charts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.resources import files
from typing import Any

PALETTE = tuple(f"--series-{number}" for number in range(1, 7))
MOST_FAILURES = len(PALETTE)
DAY_S = 86_400

Values = list[float | None]

LABELS = {
    "reward": "reward",
    "length": "response length (tokens)",
    "turns": "turns",
    "staleness": "staleness (versions)",
    "time": "share of rollout time",
    "ended": "rollouts ended",
    "groups": "share of ended groups",
    "tokens": "tokens thrown away",
    "failures": "failures",
}
"""The charts of a run, by the name that chooses one."""

SHARES = frozenset({"reward", "time", "groups"})
"""Charts whose vertical axis has 0 and 1."""

KEPT = {"kept": ("delivered", "complete")}
LOST = {
    "filtered": ("filtered",),
    "failed": ("failed",),
    "cancelled, dropped or undone": ("cancelled", "dropped", "void"),
}


@dataclass(frozen=True, slots=True)
class Plot:
    """Curves over one axis."""

    title: str
    by: str  # time or version
    x: list[float]
    curves: dict[str, Values]  # by label; at most as many as PALETTE has colours
    least_high: float = 0.0  # the vertical axis goes up to this at least

    @property
    def low(self) -> float:
        return min(0.0, *self._values())

    @property
    def high(self) -> float:
        return max(self.least_high, *self._values()) or 1.0

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


def plots_of(series: Mapping[str, Any], only: Sequence[str] = ()) -> list[Plot]:
    """The charts of a reply that have a value, or those of them with these names, in the order of the page. Raises
    `ValueError`, `TypeError` or `KeyError` if the reply does not have its shape."""
    x, by = [float(value) for value in series["x"]], str(series.get("by") or "time")
    plots: list[Plot] = []
    for name, label in LABELS.items():
        curves = {curve: _values(curve, values, len(x)) for curve, values in _curves(name, series, len(x))}
        plot = Plot(label, by, x, curves, 1.0 if name in SHARES else 0.0)
        if (not only or name in only) and not plot.is_empty:
            plots.append(plot)
    return plots


def _curves(name: str, series: Mapping[str, Any], size: int) -> Iterator[tuple[str, Sequence[Any]]]:
    """The labels and values of a chart's curves. A figure that an older service does not return has none."""
    if name == "reward":
        yield "mean reward", series["reward"]
        yield "pass rate", series["pass_rate"]
    elif name == "time":
        labels = {"model": "model", "tool": "tools", "waiting": "waiting", "other": "other"}
        shares = series.get("share", {})
        yield from ((label, shares[share]) for share, label in labels.items() if share in shares)
    elif name == "groups" and series.get("group_counts"):
        columns = {label: _sum(series["group_counts"], states, size) for label, states in {**KEPT, **LOST}.items()}
        totals = [sum(numbers) for numbers in zip(*columns.values(), strict=True)]
        for label, column in columns.items():
            yield label, [number / total if total else None for number, total in zip(column, totals, strict=True)]
    elif name == "tokens" and series.get("group_tokens"):
        yield from ((label, _sum(series["group_tokens"], states, size)) for label, states in LOST.items())
    elif name == "failures":
        for one in series.get("failures", [])[:MOST_FAILURES]:
            yield f"{one['code']} ({one['blame']})", one["counts"]
    else:
        column = {"length": "response_tokens", "ended": "count"}.get(name, name)
        if column in series:
            yield LABELS[name], series[column]


def _sum(columns: Mapping[str, Sequence[int]], states: Sequence[str], size: int) -> list[int]:
    there = [columns[state] for state in states if state in columns]
    return [sum(numbers) for numbers in zip(*there, strict=True)] if there else [0] * size


def _values(label: str, values: Sequence[Any], size: int) -> Values:
    if len(values) != size:
        raise ValueError(f"{label} has {len(values)} values at {size} places")
    return [None if value is None else float(value) for value in values]


def short(value: float) -> str:
    """A number on an axis: 12k, 3.5M."""
    for least, factor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.3g}"


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


def pieces_of(x: Sequence[float], values: Sequence[float | None]) -> list[list[tuple[float, float]]]:
    """The parts of a curve between its gaps."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for place, value in zip(x, values, strict=True):
        if value is not None:
            pieces[-1].append((place, value))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]
