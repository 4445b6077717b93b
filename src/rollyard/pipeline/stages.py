"""The three stages as plain functions: what happens in a slot, not when it gets one.

INIT makes a `Kit` (sandbox, tools, first messages). RUN lets the agent work with it and makes a trajectory. EVAL
scores what was saved, in a sandbox of its own. Each is bounded by the clock it is given; none writes to the store.

Invariants. INIT that fails leaves nothing running. RUN returns whatever was sampled, however it ended. EVAL sees
only declared artifacts: RUN's processes are proven dead before it starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from rollyard.agents.base import AgentContext, Conversation
from rollyard.agents.conversation import converse
from rollyard.core import (
    Deadline,
    DeadlineExpired,
    Failure,
    Json,
    Rollout,
    RollyardError,
    Run,
    Score,
    Task,
    Trajectory,
)
from rollyard.core.failure import (
    EnvironmentBroken,
    InternalError,
    RunDeadline,
    SandboxStartFailed,
    SetupDeadline,
    VerifierCrashed,
)
from rollyard.envs.base import EnvContext, Evidence, Plan, Start
from rollyard.observe.metrics import Metrics
from rollyard.observe.spans import Span
from rollyard.pipeline.boundary import boundary
from rollyard.pipeline.workshop import Workshop
from rollyard.sandbox.base import Sandbox, SandboxEnd
from rollyard.tools.base import Tool, ToolContext, ToolKind

AGENT = "the agent"


@dataclass(slots=True)
class Kit:
    """What INIT made and RUN uses. `close` ends all of it and proves the sandbox gone."""

    plan: Plan
    start: Start = field(default_factory=lambda: Start(()))
    sandbox: Sandbox | None = None
    tools: dict[str, Tool] = field(default_factory=dict[str, Tool])

    async def close(self) -> None:
        async with AsyncExitStack() as stack:
            if self.sandbox is not None:
                stack.push_async_callback(self.sandbox.kill)
            for tool in self.tools.values():
                stack.push_async_callback(tool.close)
            self.tools = {}


async def init(
    shop: Workshop, rollout: Rollout, clock: Deadline, *, lease_s: float, metrics: Metrics | None = None
) -> Kit:
    """Sandbox, prepared files, started services, opened tools."""
    task = rollout.task
    environment = shop.environment_of(task)
    with boundary(EnvironmentBroken, f"{task.environment}.plan"):
        kit = Kit(environment.plan(task))
    kinds = shop.tools_of(task)
    phase = "start"
    try:
        async with clock.counting():
            if kit.plan.needs_sandbox or any(kind.needs_sandbox for kind in kinds):
                kit.sandbox = await _start(shop, rollout, kit.plan, lease_s, metrics)
            phase = "set-up"
            context = EnvContext(task, rollout.id, kit.sandbox, shop.router)
            with boundary(EnvironmentBroken, f"{task.environment}.prepare"):
                await environment.prepare(context)
            with boundary(EnvironmentBroken, f"{task.environment}.init"):
                kit.start = await environment.init(context)
            phase = "tools"
            await _open_tools(kit, [*kinds, *kit.start.tools], task)
    except DeadlineExpired:
        await kit.close()
        detail = f"INIT was not done in {clock.budget_s:g} s; it was in {phase}"
        raise (SetupDeadline if phase == "set-up" else SandboxStartFailed)(detail) from None
    except BaseException:
        await kit.close()
        raise
    return kit


async def _start(shop: Workshop, rollout: Rollout, plan: Plan, lease_s: float, metrics: Metrics | None) -> Sandbox:
    runtime = shop.runtime_of(rollout.task)
    begun = time.monotonic()
    try:
        with boundary(SandboxStartFailed, "the runtime"):
            sandbox = await runtime.start(shop.spec_of(rollout.task, plan, rollout.id), lease_s=lease_s)
    except RollyardError as error:
        if metrics is not None:
            metrics.sandbox_failed(runtime.name, error.code)
        raise
    if metrics is not None:
        metrics.sandbox_started(runtime.name, time.monotonic() - begun)
    return sandbox


async def _open_tools(kit: Kit, kinds: list[ToolKind], task: Task) -> None:
    context = ToolContext(kit.sandbox, task.limits.output_bytes)
    for kind in kinds:
        with boundary(SandboxStartFailed, f"opening the tool {kind.spec.name}"):
            kit.tools[kind.spec.name] = await kind.open(context)


@dataclass(frozen=True, slots=True)
class Ran:
    """How RUN ended, and what it left. `failure` None: the agent ended by itself."""

    trajectory: Trajectory
    failure: Failure | None
    engine: str
    prompt_tokens: int
    is_sandbox_gone: bool = False  # by the policy's own doing: there is nothing left to collect


@dataclass(slots=True)
class Running:
    """What RUN has so far; readable from outside when RUN is cut off in the middle."""

    conversation: Conversation | None = None
    info: dict[str, Json] = field(default_factory=dict[str, Json])

    @property
    def sampled_tokens(self) -> int:
        return self.conversation.sampled_tokens if self.conversation else 0

    @property
    def turns(self) -> int:
        return self.conversation.turns if self.conversation else 0

    def trajectory(self, rollout: Rollout, kit: Kit, ended_by: str) -> Trajectory:
        conversation = self.conversation
        return Trajectory(
            rollout_id=rollout.id,
            attempt=rollout.attempt,
            traces=conversation.traces() if conversation else (),
            messages=tuple(conversation.messages) if conversation else kit.start.messages,
            tools=tuple(tool.spec.schema() for tool in kit.tools.values()),
            turns=self.turns,
            ended_by=ended_by,
            info=self.info,
        )


@dataclass(frozen=True, slots=True)
class Watch:
    """Who is told what happens in RUN: the stall watch, the tracer, the metrics."""

    beat: Callable[[], None]
    span: Span
    metrics: Metrics


async def run(
    shop: Workshop, rollout: Rollout, run: Run, kit: Kit, running: Running, clock: Deadline, watch: Watch
) -> Ran:
    """The agent's work. Policy and infra failures are returned, with what was sampled; only cancels raise."""
    task = rollout.task
    agent = shop.agent_of(task)
    failure: Failure | None = None
    engine = ""
    ended_by = ""
    try:
        async with shop.router.session(run.policy, session_id=rollout.id, priority=rollout.priority) as session:
            engine = session.engine.spec.id
            conversation = running.conversation = await converse(
                session,
                shop.renderers.of,
                task=task,
                run=run,
                rollout_id=rollout.id,
                clock=clock,
                span=watch.span,
                metrics=watch.metrics,
            )
            context = AgentContext(
                task,
                rollout.id,
                conversation,
                kit.tools,
                kit.sandbox,
                clock,
                watch.beat,
                running.info,
                watch.span,
                watch.metrics,
            )
            with boundary(InternalError, AGENT):
                ended_by = await agent.run(context, kit.start.messages)
            engine = session.engine.spec.id
    except DeadlineExpired:
        failure = RunDeadline(f"RUN used up its {clock.budget_s:g} s").failure("run")
    except RollyardError as error:
        failure = error.failure("run")
    if failure is not None and running.turns == 0 and not running.sampled_tokens:
        failure = failure.without_model_call()
    trajectory = running.trajectory(rollout, kit, ended_by or (failure.code if failure else ""))
    prompt_tokens = sum(len(trace) for trace in trajectory.traces) - trajectory.sampled_tokens
    is_gone = kit.sandbox is not None and kit.sandbox.end is not None and _is_policys(kit.sandbox.end)
    return Ran(trajectory, failure, engine, prompt_tokens, is_gone)


def _is_policys(end: SandboxEnd) -> bool:
    return end.reason in ("ended_inside", "memory")


async def evaluate(
    shop: Workshop,
    rollout: Rollout,
    trajectory: Trajectory,
    clock: Deadline,
    *,
    lease_s: float,
    watch: Callable[[Sandbox], None],
    metrics: Metrics | None = None,
) -> Score:
    """The score of saved artifacts, in a fresh sandbox. DeadlineExpired and SandboxEndedByPolicy pass through."""
    task = rollout.task
    environment = shop.environment_of(task)
    plan = environment.plan(task)
    async with AsyncExitStack() as stack:
        sandbox: Sandbox | None = None
        async with clock.counting():
            if plan.eval_needs_sandbox:
                sandbox = await _start(shop, rollout, plan, lease_s, metrics)
                stack.push_async_callback(sandbox.kill)
                watch(sandbox)
                await _unpack(shop, sandbox, trajectory, rollout.id)
            context = EnvContext(task, rollout.id, sandbox, shop.router)
            evidence = Evidence(trajectory, {artifact.name: artifact for artifact in trajectory.artifacts})
            with boundary(VerifierCrashed, f"{task.environment}.eval"):
                return await environment.eval(context, evidence)


async def _unpack(shop: Workshop, sandbox: Sandbox, trajectory: Trajectory, rollout_id: str) -> None:
    for artifact in trajectory.artifacts:
        path = await shop.artifacts.load(artifact, rollout_id, trajectory.attempt)
        with boundary(VerifierCrashed, f"unpacking the artifact {artifact.name}"):
            if artifact.kind == "tar":
                await sandbox.unpack(path, artifact.path)
            else:
                await sandbox.upload(path, artifact.path)
