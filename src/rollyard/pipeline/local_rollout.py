"""Runs one rollout without a service: the three stages in sequence, nothing stored. For trying tasks out.

Stages, sandboxes and scoring are the same as in a service; only queues, retries and records are missing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import pairwise

from rollyard.core import (
    AgentSpec,
    Blame,
    Deadline,
    DeadlineExpired,
    Failure,
    Rollout,
    RollyardError,
    Run,
    Score,
    Task,
    Trajectory,
    new_id,
)
from rollyard.core.failure import EvalDeadline, PolicyFailure
from rollyard.pipeline import stages
from rollyard.pipeline.evaluation import evaluate
from rollyard.pipeline.resources import StageResources
from rollyard.pipeline.sandbox_start import ended_by_policy, to_its_end

LEASE_S = 86_400.0
"""This lease is not renewed: the task's own limits end the sandbox long before."""


@dataclass(frozen=True, slots=True)
class PlayResult:
    """The result of one rollout. If there is no score, `failure` contains the reason."""

    score: Score | None
    failure: Failure | None
    trajectory: Trajectory | None
    init_s: float = 0.0
    run_s: float = 0.0
    eval_s: float = 0.0


async def play(
    resources: StageResources, task: Task, *, agent: str = "", rollout_id: str = "", run: Run | None = None
) -> PlayResult:
    """Runs the task with `agent`, by default the task's own. Raises what a service refuses at submit; every other
    failure is in the result."""
    if agent:
        task = replace(task, agent=task.agent if agent == task.agent.name else AgentSpec(agent))
    owner = run or Run("try")
    rollout = Rollout(rollout_id or new_id("try"), owner.id, task)  # artifacts are stored by this id
    resources.check(task, owner)
    marks = [time.monotonic()]
    trajectory: Trajectory | None = None
    try:
        workspace = await stages.init(resources, rollout, Deadline(task.limits.init_s), lease_s=LEASE_S)
        try:
            marks.append(time.monotonic())
            try:
                clock = Deadline(task.limits.run_s)
                ran = await stages.run(
                    resources, rollout, owner, workspace, stages.RunState(), clock, stages.RunObserver()
                )
                trajectory = ran.trajectory
                if ran.failure is not None and ran.failure.blame is not Blame.POLICY:
                    return _told(marks, None, ran.failure, trajectory)
                failure = ran.failure
                gone: PolicyFailure | None = None
                if not ran.is_sandbox_gone:
                    try:
                        saved = await stages.collect(resources, rollout, workspace)
                        trajectory = replace(trajectory, artifacts=tuple(saved))
                        if workspace.plan.eval_mode == "same":
                            await workspace.freeze(resources.layers_of(task))
                    except PolicyFailure as error:
                        gone = error
                gone = gone or ended_by_policy(workspace.sandbox)
                if gone is not None:
                    return _told(marks, workspace.plan.failing_score, failure or gone.failure("run"), trajectory)
            finally:
                await to_its_end(workspace.close)
            marks.append(time.monotonic())
            score, overran = await _scored(resources, rollout, trajectory, workspace)
            return _told(marks, score, overran or failure, trajectory)
        finally:
            workspace.forget()
    except RollyardError as error:
        stage = ("init", "run", "eval")[min(len(marks) - 1, 2)]
        return _told(marks, None, error.failure(stage), trajectory)


async def _scored(
    resources: StageResources, rollout: Rollout, trajectory: Trajectory, workspace: stages.Workspace
) -> tuple[Score, Failure | None]:
    clock = Deadline(rollout.task.limits.eval_s)
    try:
        score = await evaluate(
            resources,
            rollout,
            trajectory,
            clock,
            lease_s=LEASE_S,
            watch=lambda _: None,
            layers=workspace.eval_layers,
            ran_on=workspace.sandbox.spec if workspace.sandbox is not None else None,
        )
        return score, None
    except DeadlineExpired:
        failure = EvalDeadline(f"EVAL was not done in {clock.budget_s:g} s").failure("eval")
        return workspace.plan.failing_score, failure
    except PolicyFailure as error:
        return workspace.plan.failing_score, error.failure("eval")


def _told(
    marks: list[float], score: Score | None, failure: Failure | None, trajectory: Trajectory | None
) -> PlayResult:
    times = [*marks, time.monotonic()]
    spent = [end - begin for begin, end in pairwise(times)]
    return PlayResult(score, failure, trajectory, *[round(seconds, 3) for seconds in spent[:3]])
