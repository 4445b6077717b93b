"""EVAL as a plain function: what RUN left is scored, in a sandbox that no process of RUN ever lived in.

It sees declared artifacts, or with `same` RUN's files: RUN's processes are proven dead before it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from rollyard.core import Artifact, Deadline, DeadlineExpired, Message, Rollout, Score, Trajectory
from rollyard.core.failure import ArtifactLost, SandboxStartFailed, VerifierCrashed
from rollyard.core.overlong import COMPONENT
from rollyard.core.score import MOST_REWARD
from rollyard.engines.base import ChatReply
from rollyard.envs.base import EnvContext, Evidence, Judge
from rollyard.observe.metrics import Metrics
from rollyard.pipeline.boundary import boundary
from rollyard.pipeline.resources import StageResources
from rollyard.pipeline.sandbox_start import check_whole, start, to_its_end
from rollyard.pipeline.set_up_layers import eval_spec
from rollyard.sandbox.base import Sandbox, SandboxSpec
from rollyard.sandbox.egress import EgressLedger

KILLED = "a command that judges was killed (SIGKILL), not by Rollyard and not at its memory limit"
UNREACHED = "a host that EVAL may reach could not be found or connected to"


class CheckKilled(Exception):
    """A check was killed by SIGKILL, or a host that it may reach did not answer: the cause is the code that is judged,
    or something outside the sandbox."""


async def evaluate(
    resources: StageResources,
    rollout: Rollout,
    trajectory: Trajectory,
    clock: Deadline,
    *,
    lease_s: float,
    watch: Callable[[Sandbox], None],
    metrics: Metrics | None = None,
    layers: Sequence[Path] = (),
    ran_on: SandboxSpec | None = None,
    ledger: EgressLedger | None = None,
    is_last: bool = True,
) -> Score:
    """The score of saved artifacts, in a fresh sandbox; or with `same`, of RUN's files, the `layers`, over the image
    that RUN `ran_on`, whose kit still holds it: its name may mean another by now. The policy's failures pass through,
    and DeadlineExpired of the judging itself: a sandbox that was not there in time is ours. Raises CheckKilled, except
    in the `is_last` try, whose score counts."""
    ledger = ledger or EgressLedger()
    troubles = ledger.troubles
    task = rollout.task
    environment = resources.environment_of(task)
    plan = environment.plan(task)
    if plan.eval_mode == "same" and not layers:
        raise ArtifactLost("the files that RUN left are gone with the process that ran it; EVAL `same` needs them")
    async with AsyncExitStack() as stack:
        sandbox: Sandbox | None = None
        artifacts = trajectory.artifacts
        try:
            async with clock.counting():
                if plan.eval_needs_sandbox:
                    if plan.eval_mode == "same" and ran_on is not None:
                        spec = replace(ran_on, binds=(), has_doorway=False)
                    else:
                        stack.enter_context(resources.holding_image(task))
                        spec = resources.spec_of(task, plan, rollout.id)
                    egress = resources.egress_of(task, ledger, is_eval=True)
                    spec = replace(eval_spec(spec, plan, layers), egress=egress)
                    sandbox = await start(resources, task, spec, clock, lease_s=lease_s, metrics=metrics)
                    stack.push_async_callback(to_its_end, sandbox.kill)
                    watch(sandbox)
                    if plan.eval_mode == "fresh":
                        artifacts = await _unpack(resources, sandbox, trajectory, rollout.id)
        except DeadlineExpired:
            raise SandboxStartFailed(f"EVAL's sandbox was not there within {clock.budget_s:g} s") from None
        async with clock.counting():
            context = EnvContext(task, rollout.id, sandbox, _PatientJudge(resources.router, clock))
            evidence = Evidence(trajectory, {artifact.name: artifact for artifact in artifacts})
            with boundary(VerifierCrashed, f"{task.environment}.eval"):
                score = await environment.eval(context, evidence)
            _check_score(score, trajectory, f"{task.environment}.eval")
            if sandbox is not None:
                check_whole(sandbox)
                if sandbox.odd_kills and not is_last:
                    raise CheckKilled(KILLED)
                if ledger.troubles > troubles and not is_last:
                    raise CheckKilled(UNREACHED)
    return score


class _PatientJudge:
    """The judges, with EVAL's clock held while one answers: a slow judge is not the policy's deadline. It has its own
    bound, and beyond it is JudgeUnreachable."""

    def __init__(self, judge: Judge, clock: Deadline) -> None:
        self._judge = judge
        self._clock = clock

    async def ask(self, messages: Sequence[Message]) -> ChatReply:
        with self._clock.held():
            return await self._judge.ask(messages)


def _check_score(score: object, trajectory: Trajectory, what: str) -> None:
    """What an environment returns is stored as it is, and read by everyone who lists: so it is looked at here."""
    if not isinstance(score, Score):
        raise VerifierCrashed(f"{what} returned {type(score).__name__}, not a Score")
    for reward in (score.reward, *(turn.reward for turn in score.turn_rewards)):
        if abs(reward) > MOST_REWARD:
            raise VerifierCrashed(f"{what} gave a reward of {reward:g}; the most is {MOST_REWARD:g}")
    if COMPONENT in score.components:
        raise VerifierCrashed(f"{what} returned a component {COMPONENT!r}: that name is Rollyard's")
    spans = [len(trace.spans) for trace in trajectory.traces]
    for turn in score.turn_rewards:
        if not (0 <= turn.trace < len(spans) and 0 <= turn.span < spans[turn.trace]):
            raise VerifierCrashed(f"{what} rewarded span {turn.span} of trace {turn.trace}, which is not there")


async def _unpack(
    resources: StageResources, sandbox: Sandbox, trajectory: Trajectory, rollout_id: str
) -> tuple[Artifact, ...]:
    """Those that are in place now. A file where the image has a folder, or the other way round, is the policy's doing
    and as good as missing: `eval` says what that means."""
    there: list[Artifact] = []
    for artifact in trajectory.artifacts:
        path = await resources.artifacts.load(artifact, rollout_id, trajectory.attempt)
        with boundary(VerifierCrashed, f"unpacking the artifact {artifact.name}"):
            try:
                if artifact.kind == "tar":
                    await sandbox.unpack(path, artifact.path)
                else:
                    await sandbox.upload(path, artifact.path)
            except (IsADirectoryError, NotADirectoryError, FileExistsError):
                continue
        there.append(artifact)
    return tuple(there)
