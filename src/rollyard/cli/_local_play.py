"""Runs tasks on this machine without a service, for `rollyard tasks`, by `pipeline.local_rollout`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollyard.cli._console import CommandError, check_engine_url, err, out, plain, seconds
from rollyard.cli._local_resources import default_runtime, local_resources

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollyard.core import Task
    from rollyard.core.engine import EngineSpec
    from rollyard.engines.routing.router import Router
    from rollyard.pipeline import StageResources
    from rollyard.pipeline.local_rollout import PlayResult


ENGINE_KINDS = ("vllm", "sglang", "openai", "prorl")


class ResourcesByRuntime:
    """Holds `StageResources` for each runtime that the tasks use, opened on first use. As in a service, MCP servers
    and judges come from the settings."""

    def __init__(self, stack: AsyncExitStack, folder: Path, runtime: str | None) -> None:
        from rollyard.service.settings import load_settings

        self._stack = stack
        self._folder = folder
        self._runtime = runtime
        self._settings = load_settings({}, os.environ).settings
        self._open: dict[str, StageResources] = {}

    def placed(self, task: Task) -> Task:
        """Sets the task's runtime: that of the command line, else its own, else that of the settings."""
        name = self._runtime or task.sandbox.runtime or default_runtime()
        return replace(task, sandbox=replace(task.sandbox, runtime=name))

    async def of(self, task: Task) -> StageResources:
        """Returns the resources for a `placed` task. Raises `CommandError` if its runtime does not exist."""
        name = task.sandbox.runtime or default_runtime()
        if name not in self._open:
            self._open[name] = await self._stack.enter_async_context(local_resources(self._folder / name, name))
        return self._open[name]

    async def add_judges(self) -> None:
        """Adds the judges of the settings. One that does not answer fails the tasks that use it."""
        from rollyard.core import RollyardError
        from rollyard.service.build import engine_spec

        for judge in (engine for engine in self._settings.engines if engine.role == "judge"):
            try:
                for resources in self._open.values():
                    await resources.router.add(engine_spec(judge), must_answer=False)
            except RollyardError as error:
                raise CommandError(f"the judge {judge.url}: {error.detail}", error.remedy) from error


@asynccontextmanager
async def open_resource_sets(runtime: str | None) -> AsyncGenerator[ResourcesByRuntime, None]:
    """Opens the resources in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="rollyard-tasks-") as folder:
        async with AsyncExitStack() as stack:
            yield ResourcesByRuntime(stack, Path(folder), runtime)


def given_engine(url: str | None, kind: str | None, tokenizer: str, policy: str | None = None) -> EngineSpec | None:
    """Returns the engine of the command line, if there is one. Raises `CommandError` for wrong values."""
    if url is None:
        for option, value in (("--tokenizer", tokenizer), ("--kind", kind)):
            if value:
                raise CommandError(f"{option} needs --engine", "give the engine", 2)
        return None
    from rollyard.core import RollyardError
    from rollyard.service.schemas.body import check_body
    from rollyard.service.schemas.engine import EngineBody

    check_engine_url(url)
    kind, policy = kind or "vllm", policy or "default"
    if kind not in ENGINE_KINDS:
        raise CommandError(f"--kind {kind}: there is no such kind of engine", f"give {', '.join(ENGINE_KINDS)}", 2)
    try:
        return check_body({"url": url, "kind": kind, "tokenizer": tokenizer, "policy": policy}, EngineBody).to_spec()
    except RollyardError as error:
        raise CommandError(f"--engine {url}: {error.detail}", error.remedy) from error


async def add_engine(router: Router, engine: EngineSpec) -> None:
    """Adds the engine of the command line. Raises `CommandError` if it cannot be used."""
    from rollyard.core import RollyardError

    try:
        await router.add(engine)
    except RollyardError as error:
        raise CommandError(f"--engine {engine.url}: {error.detail}", error.remedy) from error


@contextmanager
def progress(what: str, total: int) -> Generator[Callable[[], None], None, None]:
    """Shows a progress bar if stderr is a terminal. Yields a function to call for each finished item."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = err()
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


def played_body(played: PlayResult) -> dict[str, Any]:
    """Returns the result of a rollout as a JSON object, without its messages."""
    import msgspec

    score = played.score
    return {
        "reward": None if score is None else score.reward,
        "components": {} if score is None else dict(score.components),
        "metrics": {} if score is None else dict(score.metrics),
        "failure": msgspec.to_builtins(played.failure),
        "init_s": played.init_s,
        "run_s": played.run_s,
        "eval_s": played.eval_s,
    }


def show_played(played: PlayResult) -> None:
    """Prints the result of a rollout: messages, score and its components, durations, failure."""
    from rollyard.cli._try import shortened

    console = out()
    for message in played.trajectory.messages if played.trajectory is not None else ():
        console.print(f"[bold]{plain(message.get('role'))}[/]: {plain(shortened(message))}", soft_wrap=True)
    console.print()
    score, failure = played.score, played.failure
    console.print(f"reward     {'none' if score is None else f'{score.reward:g}'}")
    if score is not None:
        _show_numbers("", score.components)
        _show_numbers("metric ", score.metrics)
    if played.trajectory is not None and played.trajectory.turns:
        console.print(f"turns      {played.trajectory.turns}, {played.trajectory.sampled_tokens} tokens sampled")
    times = (("INIT", played.init_s), ("RUN", played.run_s), ("EVAL", played.eval_s))
    console.print("took       " + ", ".join(f"{name} {seconds(spent)}" for name, spent in times))
    if failure is not None:
        console.print(f"failure    {failure.code} (blame: {failure.blame}, in {failure.stage})")
        console.print(f"\n{plain(failure.detail)}", soft_wrap=True)


def _show_numbers(prefix: str, numbers: Mapping[str, float]) -> None:
    for name, value in numbers.items():
        out().print(f"  {prefix}{plain(name)}: {value:g}")
