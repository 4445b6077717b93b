"""EVAL as a plain function: scores what RUN left, in a sandbox in which no process of RUN has run.

The sandbox contains the declared artifacts or, with eval mode `same`, RUN's files. RUN's processes are proven dead
before it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path, PurePosixPath

from rollyard.core import Artifact, Deadline, DeadlineExpired, Message, Score, Trajectory
from rollyard.core.failure import ArtifactLost, EnvironmentBroken, SandboxStartFailed, VerifierCrashed
from rollyard.core.overlong import COMPONENT
from rollyard.core.score import MOST_REWARD
from rollyard.engines.base import ChatReply
from rollyard.envs.base import EnvContext, Evidence, Judge
from rollyard.envs.findings import Findings
from rollyard.observe.metrics import Metrics
from rollyard.pipeline.attempts.sandbox_start import check_whole, start, uninterrupted
from rollyard.pipeline.attempts.set_up_layers import eval_spec
from rollyard.pipeline.boundary import boundary
from rollyard.pipeline.resources import ResolvedTask, StageResources
from rollyard.sandbox.base import WORKDIR, Sandbox, SandboxSpec
from rollyard.sandbox.egress import EgressLedger

KILLED = "a verifier command was killed (SIGKILL), not by Rollyard and not at its memory limit"
UNREACHED = "a host that EVAL may reach could not be found or connected to"


class CheckKilled(Exception):
    """A verifier command was killed by SIGKILL, or a host that it may reach did not answer. Either the evaluated
    code or something outside the sandbox is the cause."""


async def evaluate(
    resolved: ResolvedTask,
    rollout_id: str,
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
    findings: Findings | None = None,
    owner: str = "",
) -> Score:
    """Scores saved artifacts in a fresh sandbox.

    With eval mode `same`, scores RUN's files (`layers`) over the image that RUN `ran_on`: RUN's workspace still holds
    that image, while its name may refer to another one by now. Policy failures pass through, and so does
    DeadlineExpired of the scoring itself; a sandbox that does not start in time is an infrastructure failure. Raises
    CheckKilled unless `is_last`: the score of the last try counts.
    """
    ledger = ledger or EgressLedger()
    failed_connections = ledger.failed_connections
    resources, task, plan = resolved.resources, resolved.task, resolved.plan
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
                        stack.enter_context(resolved.holding_image())
                        spec = resolved.spec(rollout_id)
                    egress = resolved.egress(ledger, is_eval=True)
                    spec = replace(eval_spec(spec, plan, layers), egress=egress)
                    sandbox = await start(resolved, spec, clock, owner=owner, lease_s=lease_s, metrics=metrics)
                    stack.push_async_callback(uninterrupted, sandbox.kill)
                    watch(sandbox)
                    if plan.eval_mode == "fresh":
                        artifacts = await _unpack(resources, sandbox, trajectory, rollout_id)
        except DeadlineExpired:
            raise SandboxStartFailed(f"EVAL's sandbox did not start within {clock.budget_s:g} s") from None
        async with clock.counting():
            judge = _UntimedJudge(resources.router, clock)
            context = EnvContext(task, rollout_id, sandbox, judge, findings or Findings(), owner)
            evidence = Evidence(trajectory, {artifact.name: artifact for artifact in artifacts})
            what, environment = f"{task.environment}.eval", resolved.environment
            with boundary(VerifierCrashed, what, (environment, VerifierCrashed), bug=EnvironmentBroken):
                score = await environment.eval(context, evidence)
            _check_score(score, trajectory, what)
            if sandbox is not None:
                check_whole(sandbox)
                if sandbox.odd_kills and not is_last:
                    raise CheckKilled(KILLED)
                if ledger.failed_connections > failed_connections and not is_last:
                    raise CheckKilled(UNREACHED)
    return score


class _UntimedJudge:
    """Calls the judges with EVAL's clock held: a slow judge does not use up the policy's deadline. A judge has its own
    time limit, after which it raises JudgeUnreachable."""

    def __init__(self, judge: Judge, clock: Deadline) -> None:
        self._judge = judge
        self._clock = clock

    async def ask(self, messages: Sequence[Message]) -> ChatReply:
        with self._clock.held():
            return await self._judge.ask(messages)


def _check_score(score: object, trajectory: Trajectory, what: str) -> None:
    """Validates a score, because it is stored unchanged and returned to every client that lists it."""
    if not isinstance(score, Score):
        raise VerifierCrashed(f"{what} returned {type(score).__name__}, not a Score")
    for reward in (score.reward, *(turn.reward for turn in score.turn_rewards)):
        if abs(reward) > MOST_REWARD:
            raise VerifierCrashed(f"{what} returned a reward of {reward:g}; the limit is {MOST_REWARD:g}")
    if COMPONENT in score.components:
        raise VerifierCrashed(f"{what} returned a component {COMPONENT!r}: that name is reserved")
    spans = [len(trace.spans) for trace in trajectory.traces]
    for turn in score.turn_rewards:
        if not (0 <= turn.trace < len(spans) and 0 <= turn.span < spans[turn.trace]):
            raise VerifierCrashed(f"{what} rewarded span {turn.span} of trace {turn.trace}, which does not exist")


async def _unpack(
    resources: StageResources, sandbox: Sandbox, trajectory: Trajectory, rollout_id: str
) -> tuple[Artifact, ...]:
    """Copies the artifacts into the sandbox and returns those that are in place.

    A file where the image has a folder, or the reverse, is the policy's doing and counts as missing: the environment's
    `eval` decides how to score that.
    """
    there: set[str] = set()
    # The deepest first: a folder from RUN may contain a link where another artifact goes, and must not redirect it.
    for artifact in sorted(trajectory.artifacts, key=_depth, reverse=True):
        path = await resources.artifacts.load(artifact, rollout_id, trajectory.attempt)
        with boundary(VerifierCrashed, f"unpacking the artifact {artifact.name}"):
            try:
                if artifact.kind == "tar":
                    await sandbox.unpack(path, artifact.path, is_replaced=True)  # by what RUN left, deletions included
                else:
                    await sandbox.upload(path, artifact.path)
            except (IsADirectoryError, NotADirectoryError, FileExistsError):
                continue
        there.add(artifact.name)
    return tuple(artifact for artifact in trajectory.artifacts if artifact.name in there)


def _depth(artifact: Artifact) -> int:
    return len(PurePosixPath(WORKDIR, artifact.path).parts)
