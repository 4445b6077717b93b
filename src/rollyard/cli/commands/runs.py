"""`rollyard runs`: lists, creates, plots, exports and deletes runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rollyard.cli._console import (
    AsJson,
    CommandError,
    Token,
    Url,
    age,
    connect,
    note,
    number,
    out,
    plain,
    print_json,
    print_lines,
    run,
    show,
    table,
)
from rollyard.cli._ids import full_id
from rollyard.cli._tasks import read_defaults
from rollyard.core import State

if TYPE_CHECKING:
    from rich.table import Table

    from rollyard.exports.plot import Plot

runs = typer.Typer(help="Runs: list, create, plot, export, delete.", no_args_is_help=True)


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
        show(results_table(rows, time.time()), "policy", "id", optional=RUNS_OPTIONAL)


RUNS_OPTIONAL = ("init", "ready", "eval", "policy")


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


Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's id, or a unique prefix of it.")]


class Chart(StrEnum):
    """The names of `rollyard.exports.plot.LABELS`, which is imported only to plot."""

    REWARD = "reward"
    LENGTH = "length"
    TURNS = "turns"
    STALENESS = "staleness"
    TIME = "time"
    ENDED = "ended"
    GROUPS = "groups"
    TOKENS = "tokens"
    FAILURES = "failures"


@runs.command("plot", epilog="Example: rollyard runs plot grpo-7b --only reward --by version --out reward.svg")
def plot(
    id: Run,
    file: Annotated[Path | None, typer.Option("--out", help="Write an SVG file instead.")] = None,
    by: Annotated[
        Literal["time", "version"], typer.Option(help="The horizontal axis: time or weight version.")
    ] = "time",
    points: Annotated[int, typer.Option(min=2, max=500, help="Maximum number of points.")] = 60,
    only: Annotated[list[Chart] | None, typer.Option(help="A plot to draw; can be repeated. Else all are.")] = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Plot a run's curves in the terminal or to a file: those of its page in the dashboard."""
    if file is not None and file.suffix != ".svg":
        raise CommandError(f"{file}: unknown file format", "use a name that ends in .svg", 2)

    async def work() -> tuple[str, dict[str, Any]]:
        async with connect(url, token) as client:
            run_id = (await full_id(client, "run", id))[0]
            return run_id, await client.get_json(f"/runs/{run_id}/series", by=by, points=points)

    run_id, series = run(work())
    if as_json:
        print_json(series)
        return
    from rollyard.exports.plot import plots_of
    from rollyard.exports.plot_svg import svg

    title = f"{run_id}: {number(series.get('totals', {}).get('count'))} rollouts"
    try:
        drawn = plots_of(series, only or ())
    except (KeyError, TypeError, ValueError) as error:
        raise CommandError(f"the service's reply has no curves: {error}", "update the service") from error
    if not drawn:
        missing = f"no {' and no '.join(only)} to plot" if only else "no ended rollouts"
        raise CommandError(f"run {run_id} has {missing} yet", "see them: rollyard rollouts list --run " + run_id)
    if file is None:
        _print_plots(title, drawn)
        return
    try:
        file.write_text(svg(title, drawn), "utf-8")
    except OSError as error:
        raise CommandError(f"{file} cannot be written: {error.strerror}", "give another file with --out") from error
    note(f"{'the plot is' if len(drawn) == 1 else f'{len(drawn)} plots are'} in {file}")


PLOT_LINES, LOW_PLOT_LINES = 12, 6
"""Height of the only plot in a terminal, and of each of several."""


def _print_plots(title: str, drawn: Sequence[Plot]) -> None:
    from rich.text import Text

    from rollyard.exports.plot import PALETTE, colours
    from rollyard.exports.plot_terminal import terminal

    console = out()
    shades = [colours(is_dark=True)[name] for name in PALETTE]  # they are legible on light and dark grounds
    console.print(Text(title, "bold"))
    for plot in drawn:
        console.print(Text(f"\n{plot.title}", "bold"))
        if [*plot.curves] != [plot.title]:
            legend = [Text(f"── {label}", shades[place]) for place, label in enumerate(plot.curves)]
            console.print(Text("  ").join(legend))
        width = min(console.width if console.is_terminal else 80, 160)
        for line in terminal(plot, width, PLOT_LINES if len(drawn) == 1 else LOW_PLOT_LINES):
            text = Text()
            for part, curve in line:
                text.append(part, "dim" if curve is None else shades[curve])
            console.print(text, no_wrap=True, crop=False, overflow="ignore")


@runs.command("export", epilog="Example: rollyard runs export grpo-7b --atif trajectories.jsonl")
def export(
    id: Run,
    atif: Annotated[Path, typer.Option("--atif", help="The file: one ATIF v1.7 trajectory per line.")],
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Write the trajectories of a run's ended rollouts to a file."""
    if atif.suffix not in (".jsonl", ".ndjson"):
        raise CommandError(f"{atif}: unknown file format", "use a name that ends in .jsonl", 2)
    from rollyard.cli._exporting import export_run

    async def work() -> dict[str, Any]:
        async with connect(url, token) as client:
            return await export_run(client, (await full_id(client, "run", id))[0], atif)

    written = run(work())
    if as_json:
        print_json(written)
        return
    skipped = f"; {number(written['skipped'])} without a conversation are left out" if written["skipped"] else ""
    note(f"{number(written['written'])} trajectories are in {atif}{skipped}")


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
