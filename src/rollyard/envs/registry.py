"""Finds environments by entry point (`rollyard.environments`) and creates one instance of each.

The operator's settings name further classes, in files or modules that no package registers (`entry_point`).

An environment holds no state of a rollout. It may hold what all rollouts share (a verifier's processes); `close`
releases that. One whose package cannot be loaded is refused with the reason; the others are not affected.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Self

from rollyard.core.failure import EnvironmentBroken, UnknownEnvironment
from rollyard.core.texts import unknown
from rollyard.envs.base import Environment
from rollyard.plugins import is_own, not_loaded, plugins

GROUP = "rollyard.environments"


def entry_point(name: str, place: str) -> EntryPoint:
    """Returns an entry point for `FILE.py:CLASS` or `MODULE:CLASS`. A file is imported as `python FILE.py` would import
    it: its folder becomes the first in `sys.path`. Raises FileNotFoundError."""
    module, _, attribute = place.rpartition(":")
    if module.endswith(".py"):
        file = Path(module).expanduser().resolve()
        if not file.is_file():
            raise FileNotFoundError(f"there is no file {file} on this machine")
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
        self._broken: dict[str, str] = {}  # why its package cannot be loaded: it is not imported again
        for name, environment in (extra or {}).items():
            self._instances[name] = environment() if isinstance(environment, type) else environment

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted({*self._entry_points, *self._instances}))

    def get(self, name: str) -> Environment:
        """Returns the environment with that name. Raises `UnknownEnvironment` or `EnvironmentBroken`."""
        if name not in self._instances:
            if name not in self._entry_points:
                raise UnknownEnvironment(unknown("environment", name, self.names))
            if name in self._broken:
                raise EnvironmentBroken(self._broken[name])
            self._instances[name] = self._installed(self._entry_points[name])
        return self._instances[name]

    def load_all(self) -> dict[str, str]:
        """Loads the environments of other packages. Returns why some cannot be loaded, by name."""
        for name, point in self._entry_points.items():
            if not is_own(point):
                with suppress(EnvironmentBroken):
                    self.get(name)
        return dict(self._broken)

    def _installed(self, point: EntryPoint) -> Environment:
        try:
            environment: object = point.load()()
            if not isinstance(environment, Environment):
                raise TypeError(f"{point.value} is not a subclass of rollyard.envs.Environment")
        except Exception as error:
            if is_own(point):
                raise
            self._broken[point.name] = f"the environment {point.name!r} cannot be used: {not_loaded(point, error)}"
            raise EnvironmentBroken(self._broken[point.name]) from error
        return environment

    async def close(self) -> None:
        async with AsyncExitStack() as stack:
            for environment in self._instances.values():
                stack.push_async_callback(environment.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
