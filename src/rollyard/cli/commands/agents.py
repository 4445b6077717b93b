"""`rollyard agents`: the agent programs that tasks may name, defined by presets and installed on this machine.

Works on the settings' data folder, with or without a running service. A service finds an installed program at once,
and an operator's new preset (DATA_DIR/agents/NAME.toml) when it starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rollyard.cli._console import AsJson, CommandError, note, plain, print_json, print_lines, run, show, table

if TYPE_CHECKING:
    from rollyard.agents.harness import HarnessAgent
    from rollyard.agents.registry import Agents
    from rollyard.service.settings import Settings

T = TypeVar("T")

agents = typer.Typer(help="Agent programs on this machine: list, show, install, try.", no_args_is_help=True)

File = Annotated[
    Path | None, typer.Option("--config", help="The TOML file; else $ROLLYARD_CONFIG, else ./rollyard.toml.")
]
DataDir = Annotated[Path | None, typer.Option(help="The service's data folder; else from the settings.")]
Source = Annotated[
    Path | None,
    typer.Option(
        "--from", metavar="DIR", help="Install from wheels or npm tarballs in this folder, without a network."
    ),
]


@agents.command("list", epilog="Example: rollyard agents list --json")
def list_agents(file: File = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the agent programs that tasks may name as `agent.name`, and whether they are installed."""
    registry = _registry(_settings(file, data_dir))
    rows = [_row(registry, name) for name in registry.presets]
    if as_json:
        print_lines(rows)
        return
    grid = table("name", "version", "dialect", "installed", "about")
    for row in rows:
        grid.add_row(*(plain(row[name] or "") for name in ("name", "version", "dialect", "state", "about")))
    show(grid)


@agents.command("show", epilog="Example: rollyard agents show mini-swe-agent")
def show_agent(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An agent of `rollyard agents list`.")],
    file: File = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Print a preset, to read or to start your own from, and where it is installed."""
    import sys

    registry = _registry(_settings(file, data_dir))
    if name not in registry.presets:
        raise _unknown(registry, name)
    row = _row(registry, name)
    if as_json:
        print_json({**row, "preset": registry.presets[name]})
        return
    sys.stdout.write(registry.presets[name])
    note(f"installed: {row['folder'] or row['state']}")


@agents.command("install", epilog="Example: rollyard agents install mini-swe-agent")
def install(
    names: Annotated[list[str], typer.Argument(metavar="NAME…", help="Agents of `rollyard agents list`.")],
    source: Source = None,
    file: File = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Fetch agent programs, pinned to one version, into the data folder.

    A service never fetches programs itself: a task that names a program that is not installed is refused.
    """
    settings = _settings(file, data_dir)
    registry = _registry(settings)
    harnesses = [_harness(registry, name) for name in names]
    for agent in harnesses:
        folder = _install(agent, settings, source)
        if as_json:
            print_json(_row(registry, agent.name))
        else:
            note(f"{agent.name} {agent.preset.version} is installed: {folder}")


@agents.command("try", epilog="Example: rollyard agents try mini-swe-agent --engine http://gpu1:8000")
def try_agent(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An agent of `rollyard agents list`.")],
    task: Annotated[
        str | None, typer.Option(metavar="FILE", help="A task, FILE or FILE:LINE; else a small built-in one.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="URL", help="A real engine; else a scripted one replaces the model.")
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="The engine's tokenizer: a folder or hub name; else found by its model.")
    ] = "",
    kind: Annotated[
        str | None, typer.Option(help="The engine's API: vllm, sglang, openai or prorl. [default: vllm]")
    ] = None,
    source: Source = None,
    file: File = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Run one rollout with an agent program in a real sandbox, in this process, and show the result.

    Installs the program if necessary. The exit status is 1 unless the rollout was completed or ended by a limit.
    """
    from rollyard.cli._local_play import given_engine
    from rollyard.cli._tasks import read_task
    from rollyard.cli._try import Trial, show_trial, try_once

    model = given_engine(engine, kind, tokenizer)
    settings = _settings(file, data_dir)
    registry = _registry(settings)
    agent = _harness(registry, name)
    if task is None and engine is None and not agent.preset.try_.turns:
        raise CommandError(f"the preset {name} has no [try]", "give --task and --engine", 2)
    if task is not None and engine is None:
        raise CommandError("a scripted engine cannot solve your own task", "also give --engine", 2)
    if agent.preset.is_installable:
        _install(agent, settings, source)
    task_line = None if task is None else read_task(task)
    trial: Trial = run(try_once(agent, settings, task_line, model))
    if as_json:
        print_json(trial.as_body())
    else:
        show_trial(trial)
    if not trial.is_fine:
        raise typer.Exit(1)


def _settings(file: Path | None, data_dir: Path | None) -> Settings:
    from rollyard.service.settings import load_settings

    return load_settings({"data_dir": data_dir}, os.environ, file).settings


def _registry(settings: Settings) -> Agents:
    from rollyard.agents.installation import AgentInstalls
    from rollyard.agents.registry import Agents
    from rollyard.service.machine import AGENTS

    return Agents(installs=AgentInstalls(settings.data_dir / AGENTS))


def _harness(registry: Agents, name: str) -> HarnessAgent:
    """Raises `UnknownAgent`, with the reason, if the preset is broken."""
    from rollyard.agents.harness import HarnessAgent

    agent = registry.get(name) if name in registry.presets else None
    if not isinstance(agent, HarnessAgent):
        raise _unknown(registry, name)
    return agent


def _unknown(registry: Agents, name: str) -> CommandError:
    what = "is part of Rollyard, not a preset" if name in registry.names else "is not a preset"
    return CommandError(f"{name} {what}", f"there are: {', '.join(registry.presets)}")


def _row(registry: Agents, name: str) -> dict[str, Any]:
    from rollyard.core.failure import UnknownAgent

    try:
        agent = _harness(registry, name)
    except UnknownAgent as error:
        return {"name": name, "version": None, "dialect": None, "state": "broken", "folder": None,
                "about": error.detail}  # fmt: skip
    preset = agent.preset
    folder = registry.installs.folder_of(preset) if registry.installs is not None else None
    state = "in the image" if not preset.is_installable else "yes" if folder is not None else "no"
    return {
        "name": name,
        "version": preset.version or None,
        "dialect": preset.dialect,
        "state": state,
        "folder": None if folder is None else str(folder),
        "about": preset.about,
    }


def _install(agent: HarnessAgent, settings: Settings, source: Path | None) -> Path:
    from rollyard.service.machine import open_data_dir

    assert agent.installs is not None
    installs = agent.installs
    open_data_dir(settings.data_dir)
    if source is not None and not source.is_dir():
        raise CommandError(f"{source} is not a folder", "give the folder with the wheels or tarballs", 2)
    return _guard(lambda: run(installs.install(agent.preset, note, source=source)))


def _guard(work: Callable[[], T]) -> T:
    from rollyard.agents.installation import InstallError

    try:
        return work()
    except InstallError as error:
        raise CommandError(error.what, error.remedy) from error
