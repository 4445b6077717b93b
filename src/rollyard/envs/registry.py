"""Finds environments by entry point (`rollyard.environments`) and creates one instance of each.

An environment holds no state of a rollout. It may hold what all rollouts share (a verifier's processes); `close`
releases that.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Self, cast

from rollyard.core.failure import UnknownEnvironment
from rollyard.core.texts import unknown
from rollyard.envs.base import Environment
from rollyard.plugins import plugins

GROUP = "rollyard.environments"


class Environments:
    """The installed environments and those in `extra`, which take precedence. The service has one registry.

    `async with` closes the instances.
    """

    def __init__(self, extra: Mapping[str, Environment | type[Environment]] | None = None) -> None:
        self._entry_points = {point.name: point for point in plugins(GROUP)}
        self._instances: dict[str, Environment] = {}
        for name, environment in (extra or {}).items():
            self._instances[name] = environment() if isinstance(environment, type) else environment

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted({*self._entry_points, *self._instances}))

    def get(self, name: str) -> Environment:
        """Returns the environment with that name. Raises `UnknownEnvironment`."""
        if name not in self._instances:
            if name not in self._entry_points:
                raise UnknownEnvironment(unknown("environment", name, self.names))
            self._instances[name] = cast("type[Environment]", self._entry_points[name].load())()
        return self._instances[name]

    async def close(self) -> None:
        async with AsyncExitStack() as stack:
            for environment in self._instances.values():
                stack.push_async_callback(environment.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
