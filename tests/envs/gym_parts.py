"""A resources server, its tasks, and the replies of a scripted model."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from rollyard.core import Limits, Task
from rollyard.envs import Environments
from rollyard.envs.gym import GymEnvironment
from rollyard.service.schemas.task import to_task
from rollyard.testing.gym_server import GymServer, row
from rollyard.testing.script import Reply, Rules
from rollyard.tools.base import Tool, ToolContext
from tests.pipeline.site import Site, open_site

from .conftest import context

IMPORT = {"server": "counter", "oracle": "solution"}
QUICK = Limits(init_s=20, run_s=20, eval_s=20, tool_s=5, model_s=10, max_turns=8)


def body(initial: int = 3, *counts: int) -> dict[str, Any]:
    """A task as the importer creates it; by default the counter goes from 3, by 1 and 2, to 6."""
    return dict(GymEnvironment().from_row(row(initial, *(counts or (1, 2))), IMPORT))


def gym_task(**limits: Any) -> Task:
    return replace(to_task(body(), {}), limits=replace(QUICK, **limits))


def calls(name: str, **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def says(*turns: str) -> Rules:
    return Rules(rules=(("Add 1, then 2", tuple(map(Reply, turns))),))


PERFECT = says(
    calls("increment_counter", count=1) + calls("increment_counter", count=2),
    calls("get_counter_value"),
    "It stands at 6.",
)


@asynccontextmanager
async def gym_of(server: GymServer) -> AsyncGenerator[GymEnvironment, None]:
    gym = GymEnvironment({"counter": server.url})
    try:
        yield gym
    finally:
        await gym.close()


@asynccontextmanager
async def gym_site(folder: Path, script: Any, server: GymServer, **options: Any) -> AsyncGenerator[Site, None]:
    async with (
        gym_of(server) as gym,
        open_site(folder, script, environments=Environments({"gym": gym}), **options) as site,
    ):
        yield site


async def opened(gym: GymEnvironment, name: str = "increment_counter", **limits: Any) -> tuple[Tool, dict[str, Any]]:
    """A tool of a new session, and the info for EVAL."""
    start = await gym.init(context(gym_task(**limits)))
    for kind in start.tools:
        tool = await kind.open(ToolContext(None))
        assert not isinstance(tool, list | tuple)
        if tool.spec.name == name:  # type: ignore[union-attr]
            return tool, start.info  # type: ignore[return-value]
    raise AssertionError(f"no tool {name}")


class Slow(GymServer):
    """A server that never answers at one path, until it ends."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == self._path:
            await self._over.wait()
        return await super().answer(request)

    async def __aenter__(self) -> Self:
        self._over = asyncio.Event()
        return await super().__aenter__()

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await super().__aexit__()
