"""`rollyard shell TASK`: a shell for a person in the agent's place, in the task's sandbox, without a model.

Uses the stages of the pipeline: INIT prepares the sandbox as for a rollout; with `--eval`, EVAL scores the result in a
fresh sandbox when the shell ends. All files are in a temporary folder, so a service on this machine is not affected.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollyard.cli._console import AsJson, CommandError, note, print_json, run
from rollyard.cli._solo import default_runtime, local_resources
from rollyard.cli._tasks import TaskLine, read_task

if TYPE_CHECKING:
    from rollyard.core import Artifact, Message, Rollout, Score
    from rollyard.pipeline import StageResources
    from rollyard.pipeline.stages import Workspace

LEASE_S = 7 * 86_400.0  # for a person; if this process dies, the lifeline ends the sandbox


@dataclass(frozen=True, slots=True)
class ShellVisit:
    """The exit status of a shell, and the score with `--eval`."""

    status: int
    score: Score | None = None


def shell(
    task: Annotated[str, typer.Argument(metavar="TASK", help="A file with one task, or FILE:LINE of JSON lines.")],
    evaluate: Annotated[bool, typer.Option("--eval", help="Score the result when the shell ends.")] = False,
    answer: Annotated[str | None, typer.Option(help="With --eval: the agent's final answer.")] = None,
    runtime: Annotated[
        str | None, typer.Option(help="The sandbox runtime; else the task's, else the settings'.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start a task's sandbox and open a shell in it. No model and no service needed.

    If stdin is not a terminal, its lines are the commands (rollyard shell task.json < solution.sh), and the status of
    the last one is the exit status.
    """
    line = read_task(task)
    visit = run(_visit(line, runtime, evaluate, answer))
    score = visit.score
    if as_json:
        body = {"status": visit.status, "reward": score and score.reward}
        print_json({**body, "components": dict(score.components)} if score else body)
    elif score is not None:
        parts = "".join(f"\n  {name}: {value:g}" for name, value in score.components.items())
        note(f"reward {score.reward:g}{parts}")
    raise typer.Exit(visit.status if visit.status >= 0 else 128 - visit.status)


async def _visit(line: TaskLine, runtime: str | None, evaluate: bool, answer: str | None) -> ShellVisit:
    from rollyard.cli._terminal import interact, pipe
    from rollyard.core import Deadline, Rollout, RollyardError, Run
    from rollyard.pipeline import stages
    from rollyard.service.models import to_task

    try:
        wanted = to_task(line.task, {})
        name = runtime or wanted.sandbox.runtime or default_runtime()
        wanted = replace(wanted, sandbox=replace(wanted.sandbox, runtime=name))
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rollyard-shell-"))
            resources = await stack.enter_async_context(local_resources(Path(folder), name))
            rollout = Rollout(id="shell", run="shell", task=wanted)
            resources.check(wanted, Run("shell"))
            workspace = await stages.init(resources, rollout, Deadline(wanted.limits.init_s), lease_s=LEASE_S)
            try:
                if workspace.sandbox is None:
                    raise CommandError(f"{line.place}: this task has no sandbox")
                _tell(workspace.start.messages)
                status = await (interact if sys.stdin.isatty() else pipe)(workspace.sandbox)
                if not evaluate:
                    return ShellVisit(status)
                saved = await stages.collect(resources, rollout, workspace)
                if workspace.plan.eval_mode == "same":
                    await workspace.freeze(resources.layers_of(wanted))
            finally:
                await workspace.close()
            try:
                return ShellVisit(status, await _score(resources, rollout, workspace, saved, answer))
            finally:
                workspace.forget()
    except RollyardError as error:
        raise CommandError(f"{line.place}: {error.detail}", error.remedy) from error


async def _score(
    resources: StageResources, rollout: Rollout, workspace: Workspace, saved: list[Artifact], answer: str | None
) -> Score:
    from rollyard.core import Deadline, DeadlineExpired, Trajectory
    from rollyard.pipeline.evaluation import evaluate

    said: tuple[Message, ...] = ({"role": "assistant", "content": answer},) if answer else ()
    trajectory = Trajectory(
        rollout.id,
        rollout.attempt,
        messages=(*workspace.start.messages, *said),
        artifacts=tuple(saved),
        ended_by="finish",
    )
    clock = Deadline(rollout.task.limits.eval_s)
    try:
        return await evaluate(
            resources, rollout, trajectory, clock, lease_s=LEASE_S, watch=lambda _: None, layers=workspace.eval_layers
        )
    except DeadlineExpired:
        raise CommandError(f"EVAL did not finish in {clock.budget_s:g} s", "raise limits.eval_s") from None


def _tell(messages: tuple[Message, ...]) -> None:
    """Prints the messages that the agent would get."""
    for message in messages:
        note(f"--- {message.get('role')}\n{message.get('content')}")
    note("---")
