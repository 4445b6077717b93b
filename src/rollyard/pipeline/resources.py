"""What the stages use on this machine: runtimes, engines, environments, agents, tools, renderers.

`StageResources` is created once when the service starts, and shared by all rollouts. `ResolvedTask` is a task together
with what it names of them, looked up once per attempt.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from rollyard.agents.base import Agent, SandboxNeeds
from rollyard.agents.registry import Agents
from rollyard.core import Run, Task
from rollyard.core.ceilings import Ceilings
from rollyard.core.egress import EgressCeiling, rules_of
from rollyard.core.failure import (
    AgentBroken,
    EgressNotAllowed,
    EnvironmentBroken,
    ImageMissing,
    RuntimeNotAllowed,
    SandboxStartFailed,
    TaskInvalid,
)
from rollyard.engines.clients.sampling_extra import check_extra
from rollyard.engines.routing.router import Router
from rollyard.envs.base import Environment, Plan
from rollyard.envs.registry import Environments
from rollyard.pipeline.artifacts import ArtifactFolder
from rollyard.pipeline.boundary import Suspect, boundary
from rollyard.pipeline.handler import Handler
from rollyard.pipeline.image_resolution import ResolvedImage, resolve_image
from rollyard.pipeline.renderers import Renderers
from rollyard.sandbox.base import CONTROL_DIR, Runtime, SandboxLimits, SandboxSpec
from rollyard.sandbox.breaker import Breakers
from rollyard.sandbox.egress import Egress, EgressLedger, ProxyBounds, Resolve, SystemResolver, egress_env
from rollyard.sandbox.images import ImageStore
from rollyard.sandbox.layers import LayerCache
from rollyard.sandbox.python import PortablePython, PythonBuilds
from rollyard.tools.base import ToolKind, ToolSource
from rollyard.tools.mcp.sources import OutsideServer, mcp_sources
from rollyard.tools.registry import tool_kind

NATIVE = "native"


@dataclass(frozen=True, slots=True)
class StageResources:
    """What the stages use. A task can choose only among `runtimes`, which the operator allows. The same holds for
    images: a path outside `image_folders` would expose any folder of the host to a task. `image_folders` is None only
    in a person's own shell, where any path is allowed."""

    runtimes: Mapping[str, Runtime]
    default_runtime: str
    router: Router
    environments: Environments
    agents: Agents
    renderers: Renderers
    artifacts: ArtifactFolder
    image_folders: tuple[Path, ...] | None = None
    images: ImageStore | None = None  # by name; None: only paths
    layers: Mapping[str, LayerCache] = field(
        default_factory=dict[str, LayerCache]
    )  # by runtime; without one, nothing is shared
    breakers: Breakers = field(default_factory=Breakers)
    pythons: PythonBuilds | None = None  # Rollyard's own Python; None: tools have only the image's
    mcp_servers: Mapping[str, OutsideServer] = field(default_factory=dict[str, OutsideServer])  # the operator's
    ceilings: Ceilings = field(default_factory=Ceilings)
    egress: EgressCeiling = field(default_factory=EgressCeiling)
    resolve_name: Resolve = field(default_factory=SystemResolver)  # for the names that sandboxes may reach

    def resolve(self, task: Task) -> ResolvedTask:
        return ResolvedTask(self, task)

    def check(self, task: Task, run: Run) -> None:
        """Raises the specific error for a task that can never run here. It must be fast: every submit calls it."""
        resolved = self.resolve(task)
        _ = resolved.environment  # raises if there is none
        self.ceilings.check(task)
        resolved.check_data()
        resolved.check_agent()
        _ = resolved.tools, resolved.served_inside  # raises if one is unknown
        check_extra(task.sampling, self.router.kinds(run.policy))
        runtime, agent = resolved.runtime, resolved.agent
        if resolved.needs.needs_doorway and not runtime.is_isolated:
            raise TaskInvalid(
                f"the agent {agent.name} is a program that reaches its model from inside a sandbox, and the runtime"
                f" {runtime.name} provides none: choose another"
            )
        self._check_egress(task, runtime)
        resolved.image()

    def _check_egress(self, task: Task, runtime: Runtime) -> None:
        requested = task.sandbox.egress
        if requested is None or not (requested.hosts or requested.eval_hosts):
            return
        if not runtime.can_reach_out:
            raise TaskInvalid(
                f"sandbox.egress: the runtime {runtime.name} cannot restrict a task to a list of hosts: choose another"
            )
        self.egress.check(requested)


class ResolvedTask:
    """A task with its environment, plan, agent, tools and runtime. Each is looked up at most once, when it is first
    used: EVAL of a rollout still works if its agent has been uninstalled."""

    def __init__(self, resources: StageResources, task: Task) -> None:
        self.resources = resources
        self.task = task

    @cached_property
    def environment(self) -> Environment:
        return self.resources.environments.get(self.task.environment)

    def check_data(self) -> None:
        """Raises TaskInvalid for data that can never work."""
        with boundary(None, f"{self.task.environment}.check", (self.environment, EnvironmentBroken)):
            self.environment.check(self.task)

    def check_agent(self) -> None:
        """Raises TaskInvalid for invalid options of the agent."""
        with boundary(None, f"{self.agent.name}.check", *self.suspects):
            self.agent.check(self.task)

    @cached_property
    def plan(self) -> Plan:
        environment = self.environment
        with boundary(EnvironmentBroken, f"{self.task.environment}.plan", (environment, EnvironmentBroken)):
            return environment.plan(self.task)

    @cached_property
    def agent(self) -> Agent:
        if not self.task.agent.name and isinstance(self.environment, Handler):
            return self.environment
        return self.resources.agents.get(self.task.agent.name or NATIVE)

    @property
    def suspects(self) -> tuple[Suspect, ...]:
        """Whose code may raise while the agent runs: its own, and the environment's tools. A Handler is both."""
        environment = (self.environment, EnvironmentBroken)
        return (environment,) if isinstance(self.agent, Handler) else ((self.agent, AgentBroken), environment)

    @cached_property
    def needs(self) -> SandboxNeeds:
        return self.agent.sandbox_needs(self.task)

    @cached_property
    def runtime(self) -> Runtime:
        runtimes, name = self.resources.runtimes, self.task.sandbox.runtime or self.resources.default_runtime
        if name not in runtimes:
            raise RuntimeNotAllowed(f"runtime {name!r} is not among the allowed ones ({', '.join(sorted(runtimes))})")
        return runtimes[name]

    @property
    def layers(self) -> LayerCache | None:
        return self.resources.layers.get(self.runtime.name)

    @cached_property
    def tools(self) -> tuple[ToolKind | ToolSource, ...]:
        """The agent's tools: those that the task names, else the environment's, else the agent's defaults; and the MCP
        servers that the task names. Empty for an agent behind the gateway, which brings its own tools."""
        if self.agent.needs_gateway:
            return ()
        options = self.task.agent.options
        named = options.get("tools")
        if named is not None:
            if not isinstance(named, (list, tuple)) or not all(isinstance(name, str) for name in named):
                raise TaskInvalid("agent.options.tools: a list of tool names was expected")
            names = tuple(str(name) for name in named)
        else:
            names = self.environment.tools or self.agent.default_tools
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise TaskInvalid(f"agent.options.tools: {twice!r} is named twice")
        return (*map(tool_kind, names), *mcp_sources(options.get("mcp"), self.resources.mcp_servers))

    @cached_property
    def served_inside(self) -> Mapping[str, OutsideServer]:
        """The MCP servers that programs in the task's sandbox may use, by the task's names for them."""
        sources = mcp_sources(self.task.agent.options.get("mcp"), self.resources.mcp_servers)
        return {it.name: it.server for it in sources if it.is_reached_from_inside and it.server is not None}

    # --- looked up at each start of a sandbox, because the operator may change them ---

    def image(self) -> ResolvedImage | None:
        """Returns what its sandbox starts from; None: the runtime's root. Raises ImageMissing or RuntimeNotAllowed."""
        if self.task.sandbox.image is None:
            return None
        resources = self.resources
        return resolve_image(self.task.sandbox.image, self.runtime, resources.image_folders, resources.images)

    @contextmanager
    def holding_image(self) -> Generator[None, None, None]:
        """Protects the task's image from pruning. Raises SandboxStartFailed if it was pruned since the submit."""
        with ExitStack() as stack:
            try:
                resolved = self.image()
                if resolved is not None and resolved.image is not None and self.resources.images is not None:
                    stack.enter_context(self.resources.images.hold(resolved.image))
            except ImageMissing as error:
                raise SandboxStartFailed(f"since the submit: {error.detail}") from error
            yield

    def spec(self, owner: str) -> SandboxSpec:
        image = self.image()  # resolved again: a link may have changed
        plan, options = self.plan, self.task.sandbox
        env = {**image.env, **plan.env} if image is not None else plan.env
        limits = SandboxLimits(
            memory_bytes=options.memory_bytes,
            processes=options.processes,
            disk_bytes=options.disk_bytes,
            open_files=options.open_files,
            cpus=options.cpus,
            files=options.files,
        )
        path = None if image is None else str(image.path)
        return SandboxSpec(image=path, workdir=plan.workdir, env=env, limits=limits, owner=owner)

    def egress(self, ledger: EgressLedger, *, is_eval: bool = False) -> Egress | None:
        """Returns what a sandbox of this task may reach, or None if it is offline."""
        requested = self.task.sandbox.egress
        hosts = () if requested is None else requested.eval_hosts if is_eval else requested.hosts
        if requested is None or not hosts:
            return None
        ceiling = self.resources.egress
        try:
            ceiling.check(requested)
        except EgressNotAllowed as error:  # the operator has changed the setting
            raise TaskInvalid(f"since the submit: {error.detail}") from error
        return Egress(
            rules=(*rules_of(hosts, "sandbox.egress"), *ceiling.mirror_hosts),
            resolve=self.resources.resolve_name,
            methods=requested.methods,
            private=(*ceiling.private, *ceiling.mirror_hosts),
            bounds=ProxyBounds(connections=ceiling.connections, most_bytes=ceiling.most_bytes),
            env=egress_env(ceiling.mirrors, CONTROL_DIR),
            mirrors=ceiling.mirrors,
            ledger=ledger,
        )

    async def python(self) -> PortablePython | None:
        """Returns Rollyard's own Python as this task's runtime starts it, if the agent or a tool needs it. The first
        call may take seconds."""
        is_needed = any(kind.needs_python for kind in self.tools) or self.needs.needs_python
        if self.resources.pythons is None or not is_needed:
            return None
        python = await self.resources.pythons.get()
        return python if self.runtime.is_isolated else python.on_host()
