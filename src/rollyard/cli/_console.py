"""Shared by all commands: output functions, and options with the same meaning everywhere.

Data goes to stdout, progress and notes to stderr, so that `rollyard … --json | jq` always works. With --json, a list
is printed as one JSON object per line, and a single object on one line.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from rollyard.core.texts import url_problem

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column, Table

    from rollyard.client import AsyncClient

T = TypeVar("T")

Url = Annotated[
    str | None, typer.Option("--url", help="URL of the service; else $ROLLYARD_URL, else from the settings.")
]
Token = Annotated[
    str | None, typer.Option("--token", help="Bearer token; else $ROLLYARD_TOKEN, else the settings' token file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout: one object per line.")]


class CommandError(Exception):
    """A user's error that the command itself found: what was wrong, and what to do."""

    def __init__(self, what: str, remedy: str = "", status: int = 1) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy
        self.status = status


def out() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def err() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


SHORTEST = 8  # columns of a shortened text
SHORTEST_OF = {"state": len("completed")}
LEGIBLE = 16  # columns of an id; optional columns give way to that

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def note(text: str) -> None:
    """Writes a line for the user to stderr; never data."""
    sys.stderr.write(visible(text) + "\n")


def as_clause(remedy: str) -> str:
    """A remedy as it continues a line: without its capital letter and its full stop."""
    text = remedy.strip().removesuffix(".")
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, ensure_ascii=False, default=str) + "\n")


def print_lines(values: Iterable[object]) -> None:
    for value in values:
        print_json(value)


def table(*columns: str, title: str | None = None, right: Iterable[str] = ()) -> Table:
    """Creates a plain table; `right` names the right-aligned columns, which hold numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    grid = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        is_number = column in right
        grid.add_column(column, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number)
    return grid


def show(grid: Table, *give_way: str, optional: Sequence[str] = ()) -> None:
    """Prints a table: as wide as the terminal, or in a pipe as wide as it needs, without lines and padding.

    With `give_way`, each row is one line of the terminal (`shorten`)."""
    console = out()
    if console.is_terminal:
        console.print(shorten(grid, console, *give_way, optional=optional) if give_way else grid)
        return
    console.width = 400
    grid.box, grid.padding = None, (0, 2, 0, 0)
    with console.capture() as capture:
        console.print(grid)
    lines = (line.rstrip() for line in capture.get().splitlines())
    sys.stdout.write("".join(f"{line}\n" for line in lines if line))


def shorten(grid: Table, console: Console, *give_way: str, optional: Sequence[str] = ()) -> Table:
    """Returns the table with each row on one line: shortens the named columns with an ellipsis, always the widest of
    them. The last one, such as an id, is shortened only if that is not enough. In a terminal that is too narrow even
    for that, the `optional` columns are left out, the first of them first, and the caption names them."""
    options = console.options.update(max_width=10_000)

    def natural(column: Column) -> int:
        return max((console.measure(cell, options=options).maximum for cell in column.cells), default=0)

    widths = {str(column.header): natural(column) for column in grid.columns}
    shortest = {name: min(widths[name], SHORTEST_OF.get(name, SHORTEST)) for name in give_way}
    least = dict(shortest)
    if give_way:
        least[give_way[-1]] = min(widths[give_way[-1]], LEGIBLE)

    def missing(least: Mapping[str, int]) -> int:
        """By how many columns the table is too wide with these widths."""
        spare = sum(max(widths[name], len(name)) - max(width, len(name)) for name, width in least.items())
        return console.measure(grid, options=options).maximum - console.width - spare

    left_out: list[str] = []
    for name in optional:
        if missing(least) <= 0:
            break
        if name in widths:
            grid = _part(grid, [column for column in grid.columns if str(column.header) != name])
            least.pop(name, None)
            left_out.append(name)
    if left_out:
        grid.caption = f"too narrow for: {', '.join(left_out)}; --json has everything"
        grid.caption_justify = "left"
    columns = {str(column.header): column for column in grid.columns}
    for column in grid.columns:
        column.no_wrap, column.overflow = True, "ellipsis"
    excess = missing({})
    for names in (set(least) - {*give_way[-1:]}, {*give_way[-1:]} - {*left_out}):
        while excess > 0 and (longer := [name for name in names if widths[name] > shortest[name]]):
            widest = max(longer, key=widths.__getitem__)
            widths[widest] -= 1
            excess -= widths[widest] >= len(widest)
            columns[widest].width = max(widths[widest], len(widest))
    return grid


def show_in_parts(grid: Table) -> None:
    """Prints a table. In a terminal that is too narrow, several: each with the first column and some of the others."""
    console = out()
    if not console.is_terminal:
        show(grid)
        return
    options = console.options.update(max_width=10_000)
    first, *others = grid.columns
    parts: list[list[Column]] = [[]]
    for column in others:
        wider = [first, *parts[-1], column]
        if parts[-1] and console.measure(_part(grid, wider), options=options).maximum > console.width:
            parts.append([])
        parts[-1].append(column)
    for number_of, part in enumerate(parts, 1):
        narrower = _part(grid, [first, *part])
        narrower.caption = grid.caption if number_of == len(parts) else None
        narrower.caption_justify = "left"
        console.print(narrower)


def _part(grid: Table, columns: Sequence[Column]) -> Table:
    """A table with some of the columns."""
    right = [str(column.header) for column in columns if column.justify == "right"]
    part = table(*(str(column.header) for column in columns), right=right)
    for row in zip(*(column.cells for column in columns), strict=True):
        part.add_row(*row)
    return part


def plain(text: object) -> str:
    """Escapes external text for a table: markup and control characters in it are shown, not interpreted."""
    from rich.markup import escape

    return escape(visible(str(text)))


def visible(text: str) -> str:
    """Shows control characters and changes of the writing direction as escapes. A model may have written the text: it
    must not move the cursor, set the title or the clipboard, or hide a part of a line."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def run(work: Coroutine[object, object, T]) -> T:
    return asyncio.run(work)


def check_engine_url(url: str) -> None:
    """Raises `CommandError` if the URL of an engine cannot be one."""
    if (problem := url_problem(url)) is not None:
        raise CommandError(f"the engine's URL: {problem[0]}", problem[1], 2)


def connect(url: str | None, token: str | None, *, retry_s: float = 0.0) -> AsyncClient:
    """Creates a client. By default it does not retry, so that an unreachable service is reported at once."""
    from rollyard.client import AsyncClient

    return AsyncClient(url, token, retry_s=retry_s)


def seconds(value: float | None) -> str:
    """12 ms, 3.4 s, 2 m 05 s."""
    if not value:
        return "–"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 100:
        return f"{value:.1f} s"
    return f"{int(value) // 60} m {int(value) % 60:02d} s"


def age(value_s: float) -> str:
    """5 s, 12 min, 3 h, 2 d."""
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if value_s >= unit_s:
            return f"{int(value_s // unit_s)} {unit}"
    return f"{max(0, int(value_s))} s"


def number(value: object) -> str:
    """Formats a count with thousands separators, and a fraction with four significant digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–" if value is None else str(value)
    if isinstance(value, int) or (value == int(value) and abs(value) >= 1000):
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
