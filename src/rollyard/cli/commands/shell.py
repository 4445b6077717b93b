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
from rollyard.cli._local_resources import default_runtime, local_resources
from rollyard.cli._tasks import TaskLine, read_task

if TYPE_CHECKING:
    from rollyard.core import Message, Score, Trajectory
    from rollyard.pipeline.attempts.runner import StageRunner

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
    from rollyard.core import Deadline, Rollout, RollyardError, Run, Trajectory
    from rollyard.pipeline.attempts.runner import StageRunner
    from rollyard.pipeline.attempts.stages import RunResult
    from rollyard.service.schemas.task import to_task

    try:
        task = to_task(line.task, {})
        name = runtime or task.sandbox.runtime or default_runtime()
        task = replace(task, sandbox=replace(task.sandbox, runtime=name))
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rollyard-shell-"))
            resources = await stack.enter_async_context(local_resources(Path(folder), name))
            rollout = Rollout(id="shell", run="shell", task=task)
            resources.check(task, Run("shell"))
            runner = StageRunner(resources, rollout, Run("shell"), lease_s=LEASE_S)
            stack.callback(runner.forget)
            workspace = await runner.init(Deadline(task.limits.init_s))
            try:
                if workspace.sandbox is None:
                    raise CommandError(f"{line.place}: this task has no sandbox")
                _show_messages(workspace.start.messages)
                status = await (interact if sys.stdin.isatty() else pipe)(workspace.sandbox)
                if not evaluate:
                    return ShellVisit(status)
                answer_messages: tuple[Message, ...] = ({"role": "assistant", "content": answer},) if answer else ()
                messages = (*workspace.start.messages, *answer_messages)
                trajectory = Trajectory(rollout.id, rollout.attempt, messages=messages, ended_by="finish")
                result = await runner.collect(RunResult(trajectory, None, "", 0))
            finally:
                await runner.close()
            if result.failure is not None:
                raise CommandError(f"{line.place}: {result.failure.detail}")
            return ShellVisit(status, await _score(runner, result.trajectory))
    except RollyardError as error:
        raise CommandError(f"{line.place}: {error.detail}", error.remedy) from error


async def _score(runner: StageRunner, trajectory: Trajectory) -> Score:
    from rollyard.core import Deadline, DeadlineExpired

    clock = Deadline(runner.resolved.task.limits.eval_s)
    try:
        return await runner.evaluate(trajectory, clock)
    except DeadlineExpired:
        raise CommandError(f"EVAL did not finish in {clock.budget_s:g} s", "raise limits.eval_s") from None


def _show_messages(messages: tuple[Message, ...]) -> None:
    """Prints the messages that the agent would get."""
    for message in messages:
        note(f"--- {message.get('role')}\n{message.get('content')}")
    note("---")
