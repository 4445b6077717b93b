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
from rollyard.envs.findings import Findings
from rollyard.pipeline.attempts.runner import StageRunner
from rollyard.pipeline.attempts.sandbox_start import uninterrupted
from rollyard.pipeline.resources import StageResources

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
    evidence: bytes = b""  # what EVAL printed, as JSON


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
    runner = StageRunner(resources, rollout, owner, lease_s=LEASE_S)
    try:
        try:
            try:
                await runner.init(Deadline(task.limits.init_s))
                marks.append(time.monotonic())
                result = await runner.run(Deadline(task.limits.run_s))
                trajectory = result.trajectory
                if result.failure is not None and result.failure.blame is not Blame.POLICY:
                    return _play_result(marks, None, result.failure, trajectory)
                result = await runner.collect(result)
                trajectory = result.trajectory
            finally:
                await uninterrupted(runner.close)
            if result.is_sandbox_gone:
                return _play_result(marks, runner.resolved.plan.failing_score, result.failure, trajectory)
            marks.append(time.monotonic())
            findings = Findings()
            score, overran = await _scored(runner, trajectory, findings)
            played = _play_result(marks, score, overran or result.failure, trajectory)
            return replace(played, evidence=findings.encoded())
        finally:
            runner.forget()
    except RollyardError as error:
        stage = ("init", "run", "eval")[min(len(marks) - 1, 2)]
        return _play_result(marks, None, error.failure(stage), trajectory)


async def _scored(runner: StageRunner, trajectory: Trajectory, findings: Findings) -> tuple[Score, Failure | None]:
    clock = Deadline(runner.resolved.task.limits.eval_s)
    try:
        return await runner.evaluate(trajectory, clock, findings=findings), None
    except DeadlineExpired:
        failure = EvalDeadline(f"EVAL was not done in {clock.budget_s:g} s").failure("eval")
        return runner.resolved.plan.failing_score, failure
    except PolicyFailure as error:
        return runner.resolved.plan.failing_score, error.failure("eval")


def _play_result(
    marks: list[float], score: Score | None, failure: Failure | None, trajectory: Trajectory | None
) -> PlayResult:
    times = [*marks, time.monotonic()]
    spent = [round(end - begin, 3) for begin, end in pairwise(times)]
    init_s, run_s, eval_s = [*spent, 0.0, 0.0][:3]
    return PlayResult(score, failure, trajectory, init_s, run_s, eval_s)
