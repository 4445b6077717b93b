"""Real sandboxes of the local runtime, which has the same interface as the others and works on every machine."""

import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path

import pytest

from rollyard.core import Artifact, Json, Limits, Task, Trajectory
from rollyard.envs import EnvContext, Evidence
from rollyard.sandbox import WORKDIR, LocalRuntime, Sandbox, SandboxSpec

Start = Callable[[], Awaitable[Sandbox]]


@pytest.fixture
async def new_sandbox() -> AsyncGenerator[Start, None]:
    with tempfile.TemporaryDirectory() as folder:  # a shorter path than tmp_path: it may contain sockets
        async with LocalRuntime(root=Path(folder) / "root") as runtime:

            async def start() -> Sandbox:
                return await runtime.start(SandboxSpec(owner="test"), lease_s=60.0)

            yield start


def task(environment: str, data: Mapping[str, Json], limits: Limits | None = None) -> Task:
    return Task(environment, data, limits=limits or Limits())


def context(env_task: Task, sandbox: Sandbox | None = None) -> EnvContext:
    return EnvContext(env_task, "r1", sandbox)


def evidence(message: str = "", saved: tuple[str, ...] = ("workspace",), **info: Json) -> Evidence:
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": message})
    artifacts = {name: Artifact(name, WORKDIR, 0, "", "tar") for name in saved}
    return Evidence(Trajectory("r1", 1, messages=messages, info=info), artifacts)
