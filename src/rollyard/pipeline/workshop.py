"""What the stages work with on this machine: runtimes, engines, environments, agents, tools, renderers.

Made once when the service starts; a rollout only borrows from it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollyard.agents.base import Agent
from rollyard.agents.registry import Agents
from rollyard.core import Run, Task
from rollyard.core.failure import RuntimeNotAllowed, TaskInvalid
from rollyard.engines.router import Router
from rollyard.envs.base import Environment, Plan
from rollyard.envs.registry import Environments
from rollyard.pipeline.artifacts import ArtifactFolder
from rollyard.pipeline.handler import Handler
from rollyard.pipeline.renderers import Renderers
from rollyard.sandbox.base import Runtime, SandboxLimits, SandboxSpec
from rollyard.tools.base import ToolKind
from rollyard.tools.registry import tool_kind

NATIVE = "native"


@dataclass(frozen=True, slots=True)
class Workshop:
    """See the module. `runtimes` are those that the operator allows; a task can only choose among them. So with
    images: one outside `image_folders` would show a task any folder of the host. None: a person's own shell."""

    runtimes: Mapping[str, Runtime]
    default_runtime: str
    router: Router
    environments: Environments
    agents: Agents
    renderers: Renderers
    artifacts: ArtifactFolder
    image_folders: tuple[Path, ...] | None = None

    def check(self, task: Task, run: Run) -> None:
        """Raises the named error for a task that can never run here. No I/O: it is asked at every submit."""
        environment = self.environments.get(task.environment)
        environment.check(task)
        self.agent_of(task).check(task)
        self.tools_of(task)
        if task.sandbox.runtime is not None and task.sandbox.runtime not in self.runtimes:
            allowed = ", ".join(sorted(self.runtimes))
            raise RuntimeNotAllowed(f"runtime {task.sandbox.runtime!r} is not among the allowed ones ({allowed})")
        self._check_image(task)

    def _check_image(self, task: Task) -> None:
        if task.sandbox.image is None or self.image_folders is None:
            return
        image = Path(os.path.realpath(task.sandbox.image))
        if not any(image.is_relative_to(os.path.realpath(folder)) for folder in self.image_folders):
            raise RuntimeNotAllowed(
                f"image {task.sandbox.image!r} does not lie in a folder that the operator's setting `images` names"
            )

    def environment_of(self, task: Task) -> Environment:
        return self.environments.get(task.environment)

    def agent_of(self, task: Task) -> Agent:
        environment = self.environments.get(task.environment)
        if not task.agent.name and isinstance(environment, Handler):
            return environment
        return self.agents.get(task.agent.name or NATIVE)

    def tools_of(self, task: Task) -> list[ToolKind]:
        """The agent's tools: those that the task names, else the environment's choice, else the agent's own."""
        named = task.agent.options.get("tools")
        if named is not None:
            if not isinstance(named, (list, tuple)) or not all(isinstance(name, str) for name in named):
                raise TaskInvalid("agent.options.tools: a list of tool names was expected")
            names = tuple(str(name) for name in named)
        else:
            names = self.environment_of(task).tools or self.agent_of(task).default_tools
        return [tool_kind(name) for name in names]

    def runtime_of(self, task: Task) -> Runtime:
        name = task.sandbox.runtime or self.default_runtime
        if name not in self.runtimes:
            raise RuntimeNotAllowed(f"runtime {name!r} is not among the allowed ones")
        return self.runtimes[name]

    def spec_of(self, task: Task, plan: Plan, owner: str) -> SandboxSpec:
        self._check_image(task)  # again: a link may lead elsewhere by now
        wanted = task.sandbox
        limits = SandboxLimits(wanted.memory_bytes, wanted.processes, wanted.disk_bytes, wanted.open_files)
        return SandboxSpec(image=wanted.image, env=plan.env, limits=limits, owner=owner)
