"""`rollyard runs`: lists, creates and deletes runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollyard.cli._console import (
    AsJson,
    Token,
    Url,
    age,
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
from rollyard.cli._tasks import read_defaults
from rollyard.core import State

if TYPE_CHECKING:
    from rich.table import Table

runs = typer.Typer(help="Runs: list, create, delete.", no_args_is_help=True)


@runs.command("list", epilog="Example: rollyard runs list")
def list_runs(
    oldest: Annotated[bool, typer.Option("--oldest", help="Oldest first.")] = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """List the runs, newest first: rollouts by state, mean reward, trainable share, time since the last change."""

    async def work() -> list[dict[str, Any]]:
        async with connect(url, token) as client:
            return await client.list_runs(results=True)

    rows = run(work())
    rows = rows if oldest else rows[::-1]
    if as_json:
        print_lines(rows)
    else:
        show(results_table(rows, time.time()), "policy", "id")


def results_table(rows: list[dict[str, Any]], now: float) -> Table:
    """Creates a table with the results of runs; `now` is the current time."""
    numbers = (*(state.value for state in State), "reward", "trainable")
    grid = table("id", "policy", *numbers, "idle", right=(*numbers, "idle"))
    for item in rows:
        results: dict[str, Any] = item.get("results") or {}
        states: dict[str, int] = results.get("states") or {}
        reward, ended = results.get("mean_reward"), states.get("ended") or 0
        grid.add_row(
            plain(item.get("id")),
            plain(item.get("policy")),
            *(number(states.get(state.value)) for state in State),
            "–" if reward is None else f"{reward:.3f}",
            f"{(results.get('trainable') or 0) / ended:.0%}" if ended else "–",
            age(now - (results.get("active_at") or item.get("created_at") or now)),
        )
    return grid


def _show(rows: list[dict[str, Any]]) -> None:
    columns = ("id", "mode", "policy", "seed", "priority", "max_live")
    grid = table(*columns, right=columns[3:])
    for item in rows:
        grid.add_row(*(plain(number(item.get(column))) for column in columns))
    show(grid)


@runs.command("create", epilog="Example: rollyard runs create grpo-7b --policy actor --seed 7")
def create(
    id: Annotated[str | None, typer.Argument(metavar="ID", help="Its id; else generated.")] = None,
    mode: Annotated[str | None, typer.Option(help="train or eval. [default: train]")] = None,
    policy: Annotated[str | None, typer.Option(help="Policy whose engines it uses. [default: default]")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed from which sampling seeds are derived. [default: 0]")] = None,
    priority: Annotated[int | None, typer.Option(help="Higher goes first. [default: 0]")] = None,
    max_live: Annotated[int | None, typer.Option(min=1, help="Maximum rollouts beyond the queue at once.")] = None,
    max_queued: Annotated[int | None, typer.Option(min=1, help="Maximum rollouts in the queue at once.")] = None,
    defaults: Annotated[str | None, typer.Option(help="Defaults of the run's tasks, a partial task as JSON.")] = None,
    trainable_on_deadline: Annotated[
        bool | None, typer.Option("--trainable-on-deadline", help="Also train on rollouts that ran out of time.")
    ] = None,
    mask_truncated: Annotated[
        bool | None,
        typer.Option("--mask-truncated", help="Do not train on truncated rollouts: by turns, tokens, context or time."),
    ] = None,
    overlong_penalty: Annotated[
        str | None,
        typer.Option(
            metavar="FROM:TO[:MOST]",
            help="Subtract up to MOST (default: 1) from the reward, linearly from FROM to TO sampled tokens.",
        ),
    ] = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Create a run. The same id with the same settings is the same run."""
    partial = read_defaults(defaults)
    penalty = _penalty(overlong_penalty)

    async def work() -> dict[str, Any]:
        async with connect(url, token) as client:
            return await client.create_run(
                id,
                mode=mode,
                policy=policy,
                defaults=partial,
                seed=seed,
                priority=priority,
                max_live=max_live,
                max_queued=max_queued,
                trainable_on_deadline=trainable_on_deadline,
                mask_truncated=mask_truncated,
                overlong_penalty=penalty,
            )

    created = run(work())
    if as_json:
        print_json(created)
    else:
        _show([created])


def _penalty(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    start, _, remainder = text.partition(":")
    end, _, most = remainder.partition(":")
    try:
        penalty: dict[str, Any] = {"from_tokens": int(start), "to_tokens": int(end)}
        return {**penalty, "most": float(most)} if most else penalty
    except ValueError:
        detail = f"--overlong-penalty {text}: expected FROM:TO or FROM:TO:MOST, such as 8192:10240:0.5"
        raise typer.BadParameter(detail) from None


@runs.command("delete", epilog="Example: rollyard runs delete grpo-7b")
def delete(
    id: Annotated[str, typer.Argument(metavar="ID", help="The run to delete.")],
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Cancel a run's unfinished rollouts, and delete the run with all its rollouts."""

    async def work() -> None:
        async with connect(url, token) as client:
            await client.delete_run(id)

    run(work())
    if as_json:
        print_json({"id": id, "deleted": True})
    else:
        note(f"{id} is deleted")
