"""Plots of a run as lines of braille characters for a terminal, each character 2 dots wide and 4 high."""

from __future__ import annotations

from rollyard.exports.plot import Plot, pieces_of, short

BRAILLE = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column of a character

Styled = list[tuple[str, int | None]]
"""Texts with the number of the curve that they show."""


def terminal(plot: Plot, width: int, height: int = 12) -> list[Styled]:
    """The plot as lines of braille characters, each 2 dots wide and 4 high."""
    low, high = plot.low, plot.high
    labels = {0: short(high), height // 2: short((low + high) / 2), height - 1: short(low)}
    gutter = 1 + max(map(len, labels.values()))
    columns = max(10, width - gutter - 2)
    cells: dict[tuple[int, int], int] = {}
    owner: dict[tuple[int, int], int] = {}
    first, span = (plot.x[0], plot.x[-1] - plot.x[0]) if plot.x else (0.0, 0.0)

    def dot(at: float, value: float) -> tuple[int, int]:
        across = round((2 * columns - 1) * ((at - first) / span if span else 0.5))
        return across, round((4 * height - 1) * (high - value) / (high - low))

    for number, values in reversed(list(enumerate(plot.curves.values()))):  # the first curve is drawn last, on top
        for piece in pieces_of(plot.x, values):
            dots = [dot(at, value) for at, value in piece]
            for start, end in zip(dots, dots[1:] or dots, strict=False):
                for column, line in _between(start, end):
                    cell = (line // 4, column // 2)
                    cells[cell] = cells.get(cell, 0) | DOTS[line % 4][column % 2]
                    owner[cell] = number
    lines: list[Styled] = []
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
