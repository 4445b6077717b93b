"""`rollyard draws`: lists, shows and closes draws (dynamic sampling). Trainers create them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rollyard.cli._console import (
    AsJson,
    Token,
    Url,
    connect,
    note,
    number,
    plain,
    print_json,
    print_lines,
    run,
    show,
    table,
)
from rollyard.cli._ids import full_id

draws = typer.Typer(help="Streams of useful groups: list, show, close.", no_args_is_help=True)

DrawId = Annotated[str, typer.Argument(metavar="ID", help="The draw's id, or a unique prefix of it.")]

COLUMNS = ("id", "run", "state", "reason", "batch", "acked", "version", "epoch")
FIGURES = ("open", "complete", "delivered", "filtered", "failed", "keep_rate")
OPTIONAL = ("epoch", "version", "complete", "open", "reason", "acked")
"""Columns of the list that a narrow terminal does not show."""


@draws.command("list", epilog="Example: rollyard draws list")
def list_draws(url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """List the draws and their progress."""

    async def work() -> list[dict[str, Any]]:
        async with connect(url, token) as client:
            return await client.draws()

    rows = run(work())
    if as_json:
        print_lines(rows)
        return
    grid = table(*COLUMNS, *FIGURES, right=(*COLUMNS[4:], *FIGURES))
    for draw in rows:
        figures = draw.get("figures") or {}
        grid.add_row(
            *(plain(number(draw.get(name))) for name in COLUMNS),
            *(plain(number(figures.get(name))) for name in FIGURES),
        )
    show(grid, "reason", "run", "id", optional=OPTIONAL)


@draws.command("show", epilog="Example: rollyard draws show grpo-7b")
def show_draw(id: DrawId, url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """Show one draw: its state, figures and configuration."""

    async def work() -> dict[str, Any]:
        async with connect(url, token) as client:
            return await (await client.get_draw((await full_id(client, "draw", id))[0])).status()

    draw = run(work())
    if as_json:
        print_json(draw)
        return
    grid = table("name", "value")
    for name in (*COLUMNS, "detail"):
        grid.add_row(name, plain(_text(draw.get(name))))
    for part in ("figures", "config"):
        grid.add_section()
        for name, value in (draw.get(part) or {}).items():
            grid.add_row(name, plain(_text(value)))
    show(grid)


def _text(value: object) -> str:
    """A value of a draw; of an object, the fields that are set."""
    if isinstance(value, dict):
        return (
            ", ".join(f"{name} {_text(inner)}" for name, inner in value.items() if inner not in (None, "", {})) or "–"
        )
    return number(value)


@draws.command("close", epilog="Example: rollyard draws close grpo-7b")
def close(id: DrawId, url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """End a draw. Its running rollouts are cancelled; delivered groups remain."""

    async def work() -> dict[str, Any]:
        async with connect(url, token) as client:
            draw = await client.get_draw((await full_id(client, "draw", id))[0])
            await draw.close()
            return await draw.status()

    closed = run(work())
    if as_json:
        print_json(closed)
    else:
        note(f"{closed.get('id')} has ended ({closed.get('reason')})")
