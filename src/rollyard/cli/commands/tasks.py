"""`rollyard tasks`: imports tasks from existing data, validates them, and runs one locally.

Everything runs in this process, with the settings' images and installed agents; no service is needed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollyard.cli._console import AsJson, CommandError, note, plain, print_json, print_lines, run, seconds, show, table
from rollyard.cli._tasks import FIELDS, TaskLine, read_task, scan_tasks

if TYPE_CHECKING:
    from rollyard.cli._task_import import ImportResult
    from rollyard.cli._validate import Finding
    from rollyard.core import DataField
    from rollyard.core.engine import EngineSpec
    from rollyard.pipeline.local_rollout import PlayResult

tasks = typer.Typer(help="Tasks on this machine: import, validate, try.", no_args_is_help=True)

ROWS = 60  # of a table; --json has all

Runtime = Annotated[str | None, typer.Option(help="The sandbox runtime; else the task's, else the settings'.")]


@tasks.command("import", epilog="Example: rollyard tasks import math gsm8k/main --split test --out tasks.jsonl")
def import_(
    environment: Annotated[str, typer.Argument(metavar="ENV", help="The environment that the tasks are for.")],
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[PATH]…", help="Files of rows or folders; none: the environment generates tasks."),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="An option of the importer; may be repeated."),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of a dataset that has several.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N tasks.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the tasks to this file; else, or with -, to stdout.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip rows that cannot be imported.")] = False,
    as_json: AsJson = False,
) -> None:
    """Convert existing data to tasks, one JSON object per line.

    Rows are .jsonl, .json, .parquet and folders of Hugging Face datasets. An environment's page in docs/how-to has the
    required fields of a row and the importer's options. A row that cannot be converted is reported with its place, and
    nothing is written.
    """
    from rollyard.cli._task_import import ImportOptions, import_tasks, read_options
    from rollyard.core.failure import TaskInvalid
    from rollyard.service.machine import all_environments
    from rollyard.service.settings import load_settings

    out = None if out == Path("-") else out
    if as_json and out is None:
        raise CommandError("--json prints a summary to stdout, where the tasks go", "give --out", 2)
    importer_options = read_options(options or ())

    async def work() -> ImportResult:  # environments may need an event loop when they are created
        async with all_environments(load_settings({}, os.environ).settings) as environments:
            return import_tasks(
                ImportOptions(environments.get(environment), paths or (), importer_options, split, limit, skip_bad), out
            )

    try:
        result = run(work())
    except TaskInvalid as error:  # without its remedy, which is for the author of a task
        raise CommandError(error.detail) from error
    if as_json:
        print_json({"environment": environment, "tasks": result.tasks, "skipped": result.bad, "out": str(out)})
        return
    skipped = f"; {result.bad} bad ones were skipped" if result.bad else ""
    note(f"{result.tasks} tasks{f' are in {out}' if out is not None else ''}{skipped}")


@tasks.command("validate", epilog="Example: rollyard tasks validate tasks.jsonl --run --jobs 4")
def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE…", help="JSON lines, one task each; - reads stdin.")],
    plays: Annotated[bool, typer.Option("--run", help="Run each task with the agents oracle and noop.")] = False,
    runtime: Runtime = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N lines.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="With --run: tasks that run at once.")] = 2,
    max_reward: Annotated[float, typer.Option(help="With --run: the reward that the oracle must get.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Report all problems of tasks, by file and line.

    Checks the fields, the environment's data, the agent, the tools and the image, as a service does at submit. With
    --run, each task also runs twice in real sandboxes: with its reference solution, which must get the highest reward,
    and with an agent that does nothing, which must get less. Exits with 1 if a task has a problem or was not run.
    """
    from rollyard.cli._local_play import open_resource_sets
    from rollyard.cli._validate import validate as look

    lines: list[TaskLine | CommandError] = list(islice(scan_tasks(files), limit))
    if not lines:
        raise CommandError(f"there is no task in {', '.join(files)}", "write one JSON object per line")

    async def work() -> list[Finding]:
        async with open_resource_sets(runtime) as resource_sets:
            return await look(lines, resource_sets, plays=plays, jobs=jobs, max_reward=max_reward)

    findings = run(work())
    if as_json:
        print_lines(finding.as_body() for finding in findings)
    else:
        _show(findings, plays)
    _summarize(findings, plays)
    if any(finding.problems and finding.oracle is None for finding in findings):  # of its text
        note(FIELDS)
    if not all(finding.is_good for finding in findings):
        raise typer.Exit(1)


def _show(findings: Sequence[Finding], plays: bool) -> None:
    """Prints problems and warnings, one line each; with `plays`, also a table of all tasks."""
    if plays:
        grid = table("task", "environment", "oracle", "no-op", "took", "", right=("oracle", "no-op", "took"))
        for finding in findings[:ROWS]:
            both = (finding.oracle, finding.noop)
            spent = sum(it.init_s + it.run_s + it.eval_s for it in both if it is not None)
            grid.add_row(
                plain(finding.place),
                plain(finding.environment),
                *map(_reward, both),
                seconds(spent),
                _state_word(finding),
            )
        if len(findings) > ROWS:
            grid.caption = f"… and {len(findings) - ROWS} more; --json has them all"
        show(grid)
    for finding in findings:
        for problem in (*finding.problems, *((finding.not_tried,) if finding.not_tried else ())):
            typer.echo(f"{finding.place}: {problem}")
        for warning in finding.warnings:
            typer.echo(f"{finding.place}: warning: {warning}")


def _reward(played: PlayResult | None) -> str:
    return "–" if played is None or played.score is None else f"{played.score.reward:.3g}"


def _state_word(finding: Finding) -> str:
    if finding.problems:
        return "[red]problem[/]"
    if finding.not_tried:
        return "[yellow]not tried[/]"
    return "[yellow]warning[/]" if finding.warnings else "[green]ok[/]"


def _summarize(findings: Sequence[Finding], plays: bool) -> None:
    bad = sum(bool(finding.problems) for finding in findings)
    not_tried = sum(bool(finding.not_tried) and not finding.problems for finding in findings)
    warned = sum(bool(finding.warnings) for finding in findings)
    parts = [f"{len(findings)} tasks", f"{bad} with problems"]
    if plays:
        parts.append(f"{not_tried} not tried for reasons outside the task")
    note(", ".join([*parts, f"{warned} with warnings"]))


@tasks.command("fields", epilog="Example: rollyard tasks fields shell")
def fields(
    environment: Annotated[
        str | None, typer.Argument(metavar="[ENV]", help="An environment: the fields of its data.")
    ] = None,
    agent: Annotated[str | None, typer.Option(help="An agent: the fields of its options.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the fields of a task with their types, defaults and bounds; or those of an environment's data.

    docs/reference/task.md has the same tables.
    """
    from rollyard.cli._fields import task_fields

    if environment is not None and agent is not None:
        raise CommandError("give an environment or --agent, not both", status=2)
    if environment is None and agent is None:
        rows = [row for section in task_fields().values() for row in section]
    else:
        rows = run(_described(environment, agent))
    if as_json:
        print_lines({"name": row.name, "type": row.kind, "default": row.default, "about": row.about} for row in rows)
        return
    grid = table("field", "type", "default", "meaning")
    for row in rows:
        grid.add_row(plain(row.name), plain(row.kind), plain(row.default), plain(row.about))
    show(grid)
    if environment is None and agent is None:
        note("`data`: rollyard tasks fields ENVIRONMENT; `agent.options`: rollyard tasks fields --agent NAME")


async def _described(environment: str | None, agent: str | None) -> list[DataField]:
    """Returns the fields of an environment's data, or of an agent's options. Raises `CommandError` if it describes
    none."""
    from rollyard.agents.installation import AgentInstalls
    from rollyard.agents.registry import Agents
    from rollyard.service.machine import AGENTS, all_environments
    from rollyard.service.settings import load_settings

    settings = load_settings({}, os.environ).settings
    async with all_environments(settings) as environments:  # which may need an event loop when they are created
        if environment is not None:
            found, what = environments.get(environment).data_fields, f"the environment {environment}"
        else:
            agents = Agents(installs=AgentInstalls(settings.data_dir / AGENTS))
            found, what = agents.get(agent or "").option_fields, f"the agent {agent}"
    if not found:
        raise CommandError(f"{what} does not describe its fields", "see its own documentation")
    return list(found)


@tasks.command("try", epilog="Example: rollyard tasks try tasks.jsonl:3 --agent oracle")
def try_task(
    task: Annotated[str, typer.Argument(metavar="TASK", help="A file with one task, or FILE:LINE of JSON lines.")],
    agent: Annotated[
        str | None, typer.Option(help="oracle, noop, or one that needs a model; else the task's own.")
    ] = None,
    runtime: Runtime = None,
    engine: Annotated[str | None, typer.Option(metavar="URL", help="The model, for agents that need one.")] = None,
    tokenizer: Annotated[
        str, typer.Option(help="The engine's tokenizer: a folder or hub name; else found by its model.")
    ] = "",
    kind: Annotated[
        str | None, typer.Option(help="The engine's API: vllm, sglang, openai or prorl. [default: vllm]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run one task in real sandboxes, and show its messages and its score.

    oracle applies the task's reference solution, noop does nothing: neither needs a model. The exit status is 1 if
    there is no score.
    """
    from rollyard.cli._local_play import given_engine, played_body, show_played

    model = given_engine(engine, kind, tokenizer)
    line = read_task(task)
    played = run(_try(line, agent, runtime, model))
    if as_json:
        trajectory = played.trajectory
        summary = {
            "messages": trajectory.messages if trajectory else (),
            "turns": trajectory.turns if trajectory else 0,
            "sampled_tokens": trajectory.sampled_tokens if trajectory else 0,
        }
        print_json({**played_body(played), **summary})
    else:
        show_played(played)
    if played.score is None:
        raise typer.Exit(1)


async def _try(line: TaskLine, agent: str | None, runtime: str | None, engine: EngineSpec | None) -> PlayResult:
    from dataclasses import replace

    from rollyard.cli._local_play import add_engine, open_resource_sets
    from rollyard.core import AgentSpec, RollyardError
    from rollyard.pipeline.local_rollout import play
    from rollyard.service.schemas.task import to_task

    try:
        task = to_task(line.task, {}, ())
        if agent is not None and agent != task.agent.name:
            task = replace(task, agent=AgentSpec(agent))
        async with open_resource_sets(runtime) as resource_sets:
            task = resource_sets.placed(task)
            resources = await resource_sets.of(task)
            task_agent = resources.resolve(task).agent
            if task_agent.needs_model:
                if engine is None:
                    raise CommandError(
                        f"the agent {task_agent.name} needs a model", "give --engine URL, or --agent oracle", 2
                    )
                await add_engine(resources.router, engine)
            await resource_sets.add_judges()
            return await play(resources, task)
    except RollyardError as error:
        raise CommandError(f"{line.place}: {error.detail}", error.remedy) from error
