"""Plots of a run as an SVG file: a drawing without scripts and links, in light colours, or dark ones where the reader
prefers them. Several plots are beside and below each other, below a common title.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from rollyard.exports.plot import PALETTE, Plot, colours, pieces_of, short, ticks

WIDTH, HEIGHT = 760, 320
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 40, 40
COLUMNS = 2
HEAD, GAP = 40, 12
CHARACTER = 6.6  # width of one in a label: an estimate, as the font is the reader's
LEGEND_GAP, LEGEND_LINE = 44, 16


def svg(title: str, plots: Sequence[Plot]) -> str:
    """The plots as an SVG file. One alone has the title."""
    columns = min(COLUMNS, max(1, len(plots)))
    rows = -(-len(plots) // columns)
    is_single = len(plots) == 1
    head = 0 if is_single else HEAD
    width = columns * (WIDTH + GAP) - GAP
    height = head + max(0, rows * (HEIGHT + GAP) - GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">',
        f"<style>{_style()}</style>",
    ]
    if not is_single:
        parts.append(f'<rect class="panel" width="{width}" height="{HEAD - GAP}" rx="8"/>')
        parts.append(f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>')
    for number, plot in enumerate(plots):
        row, column = divmod(number, columns)
        parts.append(f'<g transform="translate({column * (WIDTH + GAP)} {head + row * (HEIGHT + GAP)})">')
        parts += _panel(plot, title if is_single else plot.title)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _legend(plot: Plot) -> list[tuple[float, int]]:
    """The place of each curve's label: how far from the left, and in which line."""
    places: list[tuple[float, int]] = []
    at, line = float(LEFT), 0
    for label in plot.curves:
        width = len(label) * CHARACTER + LEGEND_GAP
        if at > LEFT and at + width > WIDTH - RIGHT:
            at, line = float(LEFT), line + 1
        places.append((at, line))
        at += width
    return places


def _panel(plot: Plot, title: str) -> Iterator[str]:
    legend = _legend(plot)
    has_legend = [*plot.curves] != [title]
    lines = 1 + legend[-1][1] if has_legend else 0
    right, top, bottom = WIDTH - RIGHT, TOP + LEGEND_LINE * lines, HEIGHT - BOTTOM
    low, high = plot.low, plot.high
    first, last = (plot.x[0], plot.x[-1]) if plot.x else (0.0, 1.0)
    span = (last - first) or 1.0

    def across(x: float) -> float:
        return LEFT + (right - LEFT) * ((x - first) / span if last > first else 0.5)

    def up(y: float) -> float:
        return bottom - (bottom - top) * (y - low) / (high - low)

    yield f'<rect class="panel" width="{WIDTH}" height="{HEIGHT}" rx="8"/>'
    yield f'<text class="title" x="{LEFT}" y="22">{escape(title)}</text>'
    for y in ticks(low, high):
        yield f'<path class="line" d="M{LEFT} {up(y):.1f}H{right}"/>'
        yield f'<text class="label" x="{LEFT - 8}" y="{up(y) + 4:.1f}" text-anchor="end">{short(y)}</text>'
    for x in _places(plot):
        anchor = "middle" if len(plot.x) == 1 else {first: "start", last: "end"}.get(x, "middle")
        place = f'x="{across(x):.1f}" y="{bottom + 18}" text-anchor="{anchor}"'
        yield f'<text class="label" {place}>{plot.x_label(x)}</text>'
    name = "weight version" if plot.by == "version" else "time"
    yield f'<text class="label" x="{right}" y="{HEIGHT - 6}" text-anchor="end">{name}</text>'
    for number, ((label, values), (at, line)) in enumerate(zip(plot.curves.items(), legend, strict=True), 1):
        if has_legend:
            y = TOP + LEGEND_LINE * line
            yield f'<path class="curve s{number}" d="M{at:.0f} {y}h18"/>'
            yield f'<text class="label" x="{at + 24:.0f}" y="{y + 4}">{escape(label)}</text>'
        for piece in pieces_of(plot.x, values):
            points = [(across(x), up(y)) for x, y in piece]
            if len(points) > 1:
                path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
                yield f'<path class="curve s{number}" d="M{path}"/>'
            if len(points) == 1 or len(plot.x) < 40:
                yield from (f'<circle class="dot{number}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in points)


def _style() -> str:
    def rules(names: Mapping[str, str]) -> str:
        curves = "".join(
            f".s{number}{{stroke:{names[name]}}}.dot{number}{{fill:{names[name]}}}"
            for number, name in enumerate(PALETTE, 1)
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
