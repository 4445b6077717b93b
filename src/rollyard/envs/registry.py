"""Finds environments by entry point (`rollyard.environments`) and creates one instance of each.

The operator's settings name further classes, in files or modules that no package registers (`entry_point`).

An environment holds no state of a rollout. It may hold what all rollouts share (a verifier's processes); `close`
releases that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Self, cast

from rollyard.core.failure import UnknownEnvironment
from rollyard.envs.base import Environment
from rollyard.plugins import plugins

GROUP = "rollyard.environments"


def entry_point(name: str, place: str) -> EntryPoint:
    """Returns an entry point for `FILE.py:CLASS` or `MODULE:CLASS`. A file is imported as `python FILE.py` would import
    it: its folder, which may be relative to the current one, becomes the first in `sys.path`. Raises
    FileNotFoundError."""
    module, _, attribute = place.rpartition(":")
    if module.endswith(".py"):
        file = Path(module).expanduser().resolve()
        if not file.is_file():
            raise FileNotFoundError(f"there is no file {file}")
        if str(file.parent) not in sys.path:
            sys.path.insert(0, str(file.parent))
        module = file.stem
    return EntryPoint(name, f"{module}:{attribute}", GROUP)


class Environments:
    """The installed environments and those in `extra` and `points`, which take precedence. The service has one
    registry.

    `async with` closes the instances.
    """

    def __init__(
        self,
        extra: Mapping[str, Environment | type[Environment]] | None = None,
        *,
        points: Iterable[EntryPoint] = (),
    ) -> None:
        self._entry_points = {point.name: point for point in (*plugins(GROUP), *points)}
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
                raise UnknownEnvironment(f"there is no environment {name!r}; there are: {', '.join(self.names)}")
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
