"""`rollyard pools`: shows and changes the sizes of the stages' worker pools."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rollyard.cli._console import (
    AsJson,
    CommandError,
    Token,
    Url,
    connect,
    number,
    print_json,
    run,
    show,
    table,
)

pools = typer.Typer(help="The stages' worker pools: list, resize.", no_args_is_help=True)


@pools.command("list", epilog="Example: rollyard pools list")
def list_pools(url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """List the pools: size, active and waiting rollouts."""

    async def work() -> dict[str, Any]:
        async with connect(url, token) as client:
            return (await client.status())["pools"]

    _show(run(work()), as_json)


@pools.command("resize", epilog="Example: rollyard pools resize --run 512 --live 600")
def resize(
    init: Annotated[int | None, typer.Option(min=0, help="Rollouts in INIT at once.")] = None,
    ready: Annotated[int | None, typer.Option(min=0, help="Rollouts that may wait in READY for RUN.")] = None,
    run_: Annotated[int | None, typer.Option("--run", min=0, help="Rollouts in RUN at once.")] = None,
    eval_: Annotated[int | None, typer.Option("--eval", min=0, help="Rollouts in EVAL at once.")] = None,
    live: Annotated[int | None, typer.Option(min=0, help="Maximum live rollouts, from INIT to EVAL.")] = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Resize pools of the running service, at once, until its next start.

    0 stops a stage: rollouts in it continue, no others enter. To keep the sizes, also change the settings.
    """
    sizes = {"init": init, "ready": ready, "run": run_, "eval": eval_, "live": live}
    if all(size is None for size in sizes.values()):
        raise CommandError("no size was given", "give --init, --ready, --run, --eval or --live", 2)

    async def work() -> dict[str, Any]:
        async with connect(url, token) as client:
            return await client.resize_pools(**sizes)

    _show(run(work()), as_json)


def _show(rows: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    columns = ("size", "active", "waiting")
    grid = table("pool", *columns, right=columns)
    for name, pool in rows.items():
        grid.add_row(name, *(number(pool.get(column)) for column in columns))
    show(grid)
