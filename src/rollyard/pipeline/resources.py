"""What the stages use on this machine: runtimes, engines, environments, agents, tools, renderers.

Created once when the service starts, and shared by all rollouts.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rollyard.agents.base import Agent
from rollyard.agents.registry import Agents
from rollyard.core import Run, Task
from rollyard.core.ceilings import Ceilings
from rollyard.core.egress import EgressCeiling, rules_of
from rollyard.core.failure import EgressNotAllowed, ImageMissing, RuntimeNotAllowed, SandboxStartFailed, TaskInvalid
from rollyard.engines.clients.sampling_extra import check_extra
from rollyard.engines.routing.router import Router
from rollyard.envs.base import Environment, Plan
from rollyard.envs.registry import Environments
from rollyard.pipeline.artifacts import ArtifactFolder
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
from rollyard.tools.mcp import OutsideServer, mcp_sources
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
    resolve: Resolve = field(default_factory=SystemResolver)  # for the names that sandboxes may reach

    def check(self, task: Task, run: Run) -> None:
        """Raises the specific error for a task that can never run here. It must be fast: every submit calls it."""
        environment = self.environments.get(task.environment)
        self.ceilings.check(task)
        environment.check(task)
        self.agent_of(task).check(task)
        self.tools_of(task)
        check_extra(task.sampling, self.router.kinds(run.policy))
        if task.sandbox.runtime is not None and task.sandbox.runtime not in self.runtimes:
            allowed = ", ".join(sorted(self.runtimes))
            raise RuntimeNotAllowed(f"runtime {task.sandbox.runtime!r} is not among the allowed ones ({allowed})")
        self.served_inside(task)
        runtime, agent = self.runtime_of(task), self.agent_of(task)
        if agent.sandbox_needs(task).needs_doorway and not runtime.is_isolated:
            raise TaskInvalid(
                f"the agent {agent.name} is a program that reaches its model from inside a sandbox, and the runtime"
                f" {runtime.name} provides none: choose another"
            )
        self._check_egress(task, runtime)
        self.image_of(task)

    def _check_egress(self, task: Task, runtime: Runtime) -> None:
        wanted = task.sandbox.egress
        if wanted is None or not (wanted.hosts or wanted.eval_hosts):
            return
        if not runtime.can_reach_out:
            raise TaskInvalid(
                f"sandbox.egress: the runtime {runtime.name} cannot restrict a task to a list of hosts: choose another"
            )
        self.egress.check(wanted)

    def egress_of(self, task: Task, ledger: EgressLedger, *, is_eval: bool = False) -> Egress | None:
        """Returns what a sandbox of this task may reach, or None if it is offline."""
        wanted = task.sandbox.egress
        hosts = () if wanted is None else wanted.eval_hosts if is_eval else wanted.hosts
        if wanted is None or not hosts:
            return None
        ceiling = self.egress
        try:
            ceiling.check(wanted)
        except EgressNotAllowed as error:  # the operator has changed the setting
            raise TaskInvalid(f"since the submit: {error.detail}") from error
        return Egress(
            rules=(*rules_of(hosts, "sandbox.egress"), *ceiling.mirror_hosts),
            resolve=self.resolve,
            methods=wanted.methods,
            private=(*ceiling.private, *ceiling.mirror_hosts),
            bounds=ProxyBounds(connections=ceiling.connections, most_bytes=ceiling.most_bytes),
            env=egress_env(ceiling.mirrors, CONTROL_DIR),
            mirrors=ceiling.mirrors,
            ledger=ledger,
        )

    def image_of(self, task: Task) -> ResolvedImage | None:
        """Returns what its sandbox starts from; None: the runtime's root. Raises ImageMissing or RuntimeNotAllowed."""
        if task.sandbox.image is None:
            return None
        return resolve_image(task.sandbox.image, self.runtime_of(task), self.image_folders, self.images)

    @contextmanager
    def holding_image(self, task: Task) -> Generator[None, None, None]:
        """Protects the task's image from pruning. Raises SandboxStartFailed if it was pruned since the submit."""
        with ExitStack() as stack:
            try:
                resolved = self.image_of(task)
                if resolved is not None and resolved.image is not None and self.images is not None:
                    stack.enter_context(self.images.hold(resolved.image))
            except ImageMissing as error:
                raise SandboxStartFailed(f"since the submit: {error.detail}") from error
            yield

    def environment_of(self, task: Task) -> Environment:
        return self.environments.get(task.environment)

    def agent_of(self, task: Task) -> Agent:
        environment = self.environments.get(task.environment)
        if not task.agent.name and isinstance(environment, Handler):
            return environment
        return self.agents.get(task.agent.name or NATIVE)

    def is_head_only(self, task: Task) -> bool:
        """Whether only the process that has the service's port can run the task."""
        return self.agent_of(task).is_head_only

    def needs_model(self, task: Task) -> bool:
        return self.agent_of(task).needs_model

    def tools_of(self, task: Task) -> list[ToolKind | ToolSource]:
        """Returns the agent's tools: those that the task names, else the environment's, else the agent's defaults; and
        the MCP servers that the task names. Empty for an agent behind the gateway, which brings its own tools."""
        if self.agent_of(task).needs_gateway:
            return []
        named = task.agent.options.get("tools")
        if named is not None:
            if not isinstance(named, (list, tuple)) or not all(isinstance(name, str) for name in named):
                raise TaskInvalid("agent.options.tools: a list of tool names was expected")
            names = tuple(str(name) for name in named)
        else:
            names = self.environment_of(task).tools or self.agent_of(task).default_tools
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise TaskInvalid(f"agent.options.tools: {twice!r} is named twice")
        return [*map(tool_kind, names), *mcp_sources(task.agent.options.get("mcp"), self.mcp_servers)]

    def served_inside(self, task: Task) -> dict[str, OutsideServer]:
        """Returns the MCP servers that programs in the task's sandbox may use, by the task's names for them."""
        sources = mcp_sources(task.agent.options.get("mcp"), self.mcp_servers)
        return {it.name: it.server for it in sources if it.is_reached_from_inside and it.server is not None}

    def runtime_of(self, task: Task) -> Runtime:
        name = task.sandbox.runtime or self.default_runtime
        if name not in self.runtimes:
            raise RuntimeNotAllowed(f"runtime {name!r} is not among the allowed ones")
        return self.runtimes[name]

    async def python_of(self, task: Task, kinds: Sequence[ToolKind | ToolSource]) -> PortablePython | None:
        """Returns Rollyard's own Python as this task's runtime starts it, if the agent or a tool needs it. The first
        call may take seconds."""
        is_needed = any(kind.needs_python for kind in kinds) or self.agent_of(task).sandbox_needs(task).needs_python
        if self.pythons is None or not is_needed:
            return None
        python = await self.pythons.get()
        return python if self.runtime_of(task).is_isolated else python.on_host()

    def layers_of(self, task: Task) -> LayerCache | None:
        return self.layers.get(self.runtime_of(task).name)

    def spec_of(self, task: Task, plan: Plan, owner: str) -> SandboxSpec:
        image = self.image_of(task)  # resolved again: a link may have changed
        env = {**image.env, **plan.env} if image is not None else plan.env
        wanted = task.sandbox
        limits = SandboxLimits(
            memory_bytes=wanted.memory_bytes,
            processes=wanted.processes,
            disk_bytes=wanted.disk_bytes,
            open_files=wanted.open_files,
            cpus=wanted.cpus,
            files=wanted.files,
        )
        path = None if image is None else str(image.path)
        return SandboxSpec(image=path, workdir=plan.workdir, env=env, limits=limits, owner=owner)
