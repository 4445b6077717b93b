"""INIT and RUN as plain functions: what happens in a slot, not when it is granted. EVAL is in evaluation.py.

INIT creates a `Workspace` (sandbox, tools, first messages). RUN lets the agent work with it and returns a trajectory;
`collect` copies what RUN left out of the sandbox. Each is bounded by the clock that it is given and does not write to
the store.

Invariants. An INIT that fails leaves nothing running. RUN returns whatever was sampled, however it ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rollyard.agents.base import AgentContext, Conversation
from rollyard.agents.conversation import converse
from rollyard.agents.oracle import SilentConversation
from rollyard.core import (
    CODES,
    Artifact,
    Deadline,
    DeadlineExpired,
    Failure,
    Json,
    Rollout,
    RollyardError,
    Run,
    Task,
    Trajectory,
)
from rollyard.core.failure import (
    EngineFailure,
    EngineTimeout,
    EnvironmentBroken,
    InternalError,
    RunDeadline,
    SandboxFailure,
    SandboxStartFailed,
    TaskInvalid,
)
from rollyard.engines.base import Session
from rollyard.envs.base import COLLECT_S, EnvContext, Environment, Plan, Solution, Start
from rollyard.gateway.app import GatewayApp
from rollyard.gateway.session import GatewaySession
from rollyard.gateway.session_opening import open_gateway
from rollyard.observe.call_log import CallLog
from rollyard.observe.metrics import Metrics
from rollyard.observe.spans import NO_SPAN, Span
from rollyard.pipeline.attempts.doorway_app import DoorwayApp
from rollyard.pipeline.attempts.sandbox_start import check_whole, ended_by_policy, start, uninterrupted
from rollyard.pipeline.attempts.set_up_layers import INIT_GRACE_S, excluded_paths, late, prepared, setting_up
from rollyard.pipeline.attempts.storable import storable
from rollyard.pipeline.boundary import boundary
from rollyard.pipeline.resources import ResolvedTask
from rollyard.sandbox.base import WORKDIR, Bind, Sandbox, SandboxSpec
from rollyard.sandbox.egress import EgressLedger
from rollyard.sandbox.layers import LayerCache, LayerLease, ScratchLayer
from rollyard.sandbox.python import INSIDE, PortablePython
from rollyard.tools.base import Tool, ToolContext, ToolKind, ToolSource
from rollyard.tools.mcp.proxy import McpProxy
from rollyard.tools.mcp.tool_server import NAME as TOOLS_NAME
from rollyard.tools.mcp.tool_server import ToolServer

ENGINE_CODES = frozenset(code for code, kind in CODES.items() if issubclass(kind, EngineFailure))


@dataclass(slots=True)
class Workspace:
    """What INIT creates and RUN uses. `close` ends all of it and proves the sandbox gone. After `freeze`, RUN's files
    remain for EVAL until `forget`."""

    plan: Plan
    start: Start = field(default_factory=lambda: Start(()))
    sandbox: Sandbox | None = None
    tools: dict[str, Tool] = field(default_factory=dict[str, Tool])
    lease: LayerLease | None = None  # of the prepared layer below the sandbox
    run_layer: ScratchLayer | None = None  # what RUN wrote
    python: PortablePython | None = None  # Rollyard's own, bound into the sandbox if a tool needs it
    doorway_app: DoorwayApp | None = None  # the app at the sandbox's doorway
    holding: ExitStack = field(default_factory=ExitStack)  # protects its image from pruning

    async def close(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                if self.doorway_app is not None:
                    stack.push_async_callback(self.doorway_app.close)
                if self.sandbox is not None:
                    stack.push_async_callback(self.sandbox.kill)
                for tool in self.tools.values():
                    stack.push_async_callback(tool.close)
                self.tools = {}
        finally:
            if self.run_layer is None:
                self.forget()

    async def freeze(self, layers: LayerCache | None) -> None:
        """Ends the sandbox like `close`, and keeps its files for EVAL `same`."""
        if self.sandbox is None or layers is None:
            raise EnvironmentBroken("EVAL `same` needs a sandbox of a runtime that has layers")
        self.run_layer = layers.scratch()
        try:
            with boundary(SandboxStartFailed, "freezing RUN's files"):
                with suppress(OSError, ValueError):  # raises SandboxFailure if the sandbox is just ending
                    await self.sandbox.read(WORKDIR, limit_bytes=1)
                await self.sandbox.freeze(self.run_layer.path, without=excluded_paths(self.plan, self.sandbox.spec))
        except SandboxFailure as error:
            raise ended_by_policy(self.sandbox) or error from error
        if (policy_failure := ended_by_policy(self.sandbox)) is not None:
            raise policy_failure

    @property
    def eval_layers(self) -> tuple[Path, ...]:
        """The layers of EVAL `same`, topmost first; empty before `freeze`."""
        if self.run_layer is None:
            return ()
        return (self.run_layer.path, *((self.lease.path,) if self.lease is not None else ()))

    def forget(self) -> None:
        """Releases its files, which are no longer needed. Files that a stuck sandbox uses are kept."""
        if self.sandbox is not None and self.sandbox.end is None:
            return
        if self.run_layer is not None:
            self.run_layer.discard()
        if self.lease is not None:
            self.lease.release()
        self.run_layer = self.lease = None
        self.holding.close()


async def init(
    resolved: ResolvedTask,
    rollout_id: str,
    clock: Deadline,
    *,
    owner: str,
    lease_s: float,
    metrics: Metrics | None = None,
    ledger: EgressLedger | None = None,
) -> Workspace:
    """Starts the sandbox, prepares files, starts services, opens tools. `owner` is that of the run; `ledger` records
    what sandboxes reach."""
    task, environment, needs, kinds = resolved.task, resolved.environment, resolved.needs, resolved.tools
    workspace = Workspace(resolved.plan)
    spec: SandboxSpec | None = None
    phase = "start"
    try:
        if workspace.plan.needs_sandbox or needs.needs_doorway or any(kind.needs_sandbox for kind in kinds):
            workspace.holding.enter_context(resolved.holding_image())
            spec = resolved.spec(rollout_id)
            spec = replace(spec, egress=resolved.egress(ledger or EgressLedger()))
            workspace.python = await resolved.python()
            if workspace.python is not None and resolved.runtime.is_isolated:
                spec = replace(spec, binds=(*spec.binds, Bind(workspace.python.folder, INSIDE)))
            workspace.lease = await prepared(resolved, rollout_id, spec, clock, owner=owner, metrics=metrics)
            if workspace.lease is not None:
                spec = replace(spec, layers=(workspace.lease.path,))
        async with clock.counting():
            if spec is not None:
                has_doorway = needs.needs_doorway or bool(resolved.served_inside)
                spec = replace(spec, binds=(*spec.binds, *needs.binds), has_doorway=has_doorway)
                init_lease_s = max(lease_s, task.limits.init_s + INIT_GRACE_S)
                workspace.sandbox = await start(
                    resolved, spec, clock, owner=owner, lease_s=init_lease_s, metrics=metrics
                )
                await _serve_inside(workspace, resolved, rollout_id)
            phase = "set-up"
            context = EnvContext(task, rollout_id, workspace.sandbox, resolved.resources.router, owner=owner)
            if workspace.lease is None:
                with setting_up(environment, "prepare", task, workspace.sandbox):
                    await environment.prepare(context)
            with setting_up(environment, "init", task, workspace.sandbox):
                workspace.start = await environment.init(context)
            phase = "tools"
            await _open_tools(workspace, [*kinds, *workspace.start.tools], task, environment)
            if workspace.tools and resolved.agent.needs_gateway:
                await _serve_tools(workspace, resolved)
    except DeadlineExpired:
        await uninterrupted(workspace.close)
        raise late(clock, phase) from None
    except BaseException:
        await uninterrupted(workspace.close)
        raise
    return workspace


async def _serve_inside(workspace: Workspace, resolved: ResolvedTask, rollout_id: str) -> None:
    """Serves the MCP servers that programs inside may use, and later the gateway, at the sandbox's doorway."""
    if workspace.sandbox is None or not workspace.sandbox.spec.has_doorway:
        return
    if workspace.sandbox.doorway is None:
        name = resolved.runtime.name
        raise TaskInvalid(f"the runtime {name} has no doorway, so nothing can be served inside: choose another runtime")
    servers = resolved.served_inside
    workspace.doorway_app = DoorwayApp(McpProxy(servers, owner=rollout_id) if servers else None)
    await workspace.sandbox.doorway.serve(workspace.doorway_app)


async def _serve_tools(workspace: Workspace, resolved: ResolvedTask) -> None:
    """Serves the environment's own tools by MCP, the only way an agent program can use them."""
    task = resolved.task
    if workspace.doorway_app is None:
        raise TaskInvalid(f"{task.environment} brings tools, and {resolved.agent.name} has no doorway")
    if TOOLS_NAME in resolved.served_inside:
        raise TaskInvalid(f"agent.options.mcp.{TOOLS_NAME}: that name is reserved for {task.environment}'s own tools")
    workspace.doorway_app.tools = ToolServer(workspace.tools, tool_s=task.limits.tool_s)
    await workspace.doorway_app.tools.open()


async def _open_tools(
    workspace: Workspace, kinds: Sequence[ToolKind | ToolSource], task: Task, environment: Environment
) -> None:
    context = ToolContext(workspace.sandbox, task.limits.output_bytes, workspace.python)
    for kind in kinds:
        own = (environment, EnvironmentBroken)
        with boundary(SandboxStartFailed, f"opening the tool {_name_of(kind)}", own):
            opened = [await kind.open(context)] if isinstance(kind, ToolKind) else await kind.open(context)
        for tool in opened:
            if tool.spec.name in workspace.tools:
                await tool.close()
                raise TaskInvalid(f"two tools are named {tool.spec.name!r}; the second is from {_name_of(kind)}")
            workspace.tools[tool.spec.name] = tool


def _name_of(kind: ToolKind | ToolSource) -> str:
    return kind.spec.name if isinstance(kind, ToolKind) else kind.name


@dataclass(frozen=True, slots=True)
class RunResult:
    """How RUN ended, and what it left. `failure` is None if the agent ended by itself."""

    trajectory: Trajectory
    failure: Failure | None
    engine: str
    prompt_tokens: int
    is_sandbox_gone: bool = False  # ended by the policy: there is nothing left to collect


@dataclass(slots=True)
class RunState:
    """RUN's state so far; readable from outside when RUN is interrupted."""

    conversation: Conversation | GatewaySession | None = None
    info: dict[str, Json] = field(default_factory=dict[str, Json])
    call_log: CallLog | None = None  # from the start of RUN on

    @property
    def requests(self) -> bytes:
        """The requests of an agent program so far, as JSON; empty for other agents."""
        return self.conversation.request_log.encoded() if isinstance(self.conversation, GatewaySession) else b""

    @property
    def conversation_number(self) -> int:
        """Another one when an agent program's messages are of another of its conversations."""
        return self.conversation.conversation_number if isinstance(self.conversation, GatewaySession) else 0

    @property
    def message_turns(self) -> Mapping[int, int]:
        return self.conversation.message_turns if self.conversation else {}

    @property
    def sampled_tokens(self) -> int:
        return self.conversation.sampled_tokens if self.conversation else 0

    @property
    def turns(self) -> int:
        return self.conversation.turns if self.conversation else 0

    def trajectory(self, rollout: Rollout, workspace: Workspace, ended_by: str) -> Trajectory:
        conversation = self.conversation
        messages = tuple(conversation.messages if conversation else ()) or workspace.start.messages
        message_turns = [self.message_turns.get(number) for number in range(len(messages))]
        return Trajectory(
            rollout_id=rollout.id,
            attempt=rollout.attempt,
            traces=conversation.traces() if conversation else (),
            messages=messages,
            tools=tuple(tool.spec.schema() for tool in workspace.tools.values()),
            turns=self.turns,
            ended_by=ended_by,
            info={
                **self.info,
                **(self.call_log.info() if self.call_log is not None else {}),
                "message_turns": list[Json](message_turns),
            },
            requests=self.requests,
        )


@dataclass(frozen=True, slots=True)
class RunObserver:
    """Receives what happens in RUN: the stall watch, the tracer, the metrics."""

    beat: Callable[[], None] = lambda: None
    span: Span = NO_SPAN
    metrics: Metrics | None = None


async def run(
    resolved: ResolvedTask,
    rollout: Rollout,
    run: Run,
    workspace: Workspace,
    running: RunState,
    clock: Deadline,
    watch: RunObserver,
) -> RunResult:
    """Runs the agent. Policy and infra failures are returned, with what was sampled; only cancels raise."""
    agent = resolved.agent
    failure: Failure | None = None
    engine = ""
    ended_by = ""
    running.info.update(workspace.start.info)
    call_log = running.call_log = CallLog()
    try:
        async with AsyncExitStack() as stack:
            session: Session | None = None
            model: Conversation | GatewaySession = SilentConversation()
            if agent.needs_model:
                avoid = {lost.engine for lost in rollout.lost if lost.code in ENGINE_CODES}
                session = await stack.enter_async_context(
                    resolved.resources.router.session(run.policy, rollout.id, priority=rollout.priority, avoid=avoid)
                )
                engine = session.engine.spec.id
                model = await _model(resolved, rollout.id, run, session, clock, watch, call_log)
            running.conversation = model
            context = AgentContext(
                task=resolved.task,
                rollout_id=rollout.id,
                model=model,
                tools=workspace.tools,
                sandbox=workspace.sandbox,
                clock=clock,
                beat=watch.beat,
                info=running.info,
                span=watch.span,
                metrics=watch.metrics,
                call_log=call_log,
                lost=rollout.lost,
                seq=rollout.seq,
                python=workspace.python,
                solve=partial(_solved, resolved, rollout.id, workspace, run.owner),
            )
            try:
                if workspace.doorway_app is not None and isinstance(model, GatewaySession):
                    workspace.doorway_app.open(GatewayApp(model))
                    if workspace.doorway_app.tools is not None:
                        tools = workspace.doorway_app.tools
                        tools.on_failure, tools.call_log = model.fail, call_log
                        tools.turn = lambda gateway=model: max(0, gateway.turns - 1)
                with boundary(InternalError, f"the agent {agent.name}", *resolved.suspects):
                    ended_by = await agent.run(context, workspace.start.messages)
            finally:
                running.info.update(workspace.start.info)  # tools may have changed it
                if session is not None:
                    engine = session.engine.spec.id  # the session may have moved
                if isinstance(model, GatewaySession):
                    await _end_gateway(model, workspace, running)
    except DeadlineExpired:
        failure = RunDeadline(f"RUN used up its {clock.budget_s:g} s").failure("run")
    except RollyardError as error:
        failure = error.failure("run")
    if failure is not None and running.turns == 0 and not running.sampled_tokens:
        if failure.code == RunDeadline.code and running.info.get("model_s"):  # called, but no token was sampled
            failure = EngineTimeout(f"the model sampled nothing in the {clock.budget_s:g} s of RUN").failure("run")
        else:
            failure = failure.without_model_call()
    trajectory = storable(running.trajectory(rollout, workspace, ended_by or (failure.code if failure else "")))
    prompt_tokens = sum(len(trace) for trace in trajectory.traces) - trajectory.sampled_tokens
    return RunResult(trajectory, failure, engine, prompt_tokens, ended_by_policy(workspace.sandbox) is not None)


async def _solved(resolved: ResolvedTask, rollout_id: str, workspace: Workspace, owner: str) -> Solution:
    task, environment = resolved.task, resolved.environment
    with boundary(EnvironmentBroken, f"{task.environment}.solve", (environment, EnvironmentBroken)):
        return await environment.solve(EnvContext(task, rollout_id, workspace.sandbox, owner=owner), workspace.tools)


async def collect(resolved: ResolvedTask, rollout: Rollout, workspace: Workspace) -> list[Artifact]:
    """Saves what RUN left as artifacts. The environment's `collect` first creates those that do not exist yet."""
    if workspace.sandbox is None:
        return []
    guard, environment = asyncio.timeout(COLLECT_S), resolved.environment
    with boundary(EnvironmentBroken, f"{rollout.task.environment}.collect", (environment, EnvironmentBroken)):
        try:
            async with guard:
                await environment.collect(EnvContext(rollout.task, rollout.id, workspace.sandbox))
        except TimeoutError:
            if not guard.expired():  # from a call that the environment made: not caused by what RUN left
                raise
    artifacts = resolved.resources.artifacts
    saved = await artifacts.save(workspace.sandbox, workspace.plan.artifacts, rollout.id, rollout.attempt)
    check_whole(workspace.sandbox)  # last: covers RUN's commands and those that packed their files
    return saved


async def _model(
    resolved: ResolvedTask,
    rollout_id: str,
    run: Run,
    session: Session,
    clock: Deadline,
    watch: RunObserver,
    call_log: CallLog,
) -> Conversation | GatewaySession:
    """Returns the conversation or gateway session of the agent. Raises EngineRefused if it needs token ids and the
    engine returns none."""
    task, renderers = resolved.task, resolved.resources.renderers
    if not resolved.agent.needs_gateway:
        return await converse(
            session,
            renderers.of,
            task=task,
            run=run,
            rollout_id=rollout_id,
            clock=clock,
            span=watch.span,
            metrics=watch.metrics,
            call_log=call_log,
        )
    return await open_gateway(
        session,
        renderers.of,
        task=task,
        run=run,
        rollout_id=rollout_id,
        clock=clock,
        beat=watch.beat,
        span=watch.span,
        metrics=watch.metrics,
        call_log=call_log,
    )


async def _end_gateway(gateway: GatewaySession, workspace: Workspace, running: RunState) -> None:
    """Closes the gateway, however RUN ended: it takes no more requests, and all that was sampled is recorded before
    traces are taken."""
    if workspace.doorway_app is not None:
        workspace.doorway_app.shut()
    await uninterrupted(gateway.close)
    running.info["gateway"] = gateway.info()
