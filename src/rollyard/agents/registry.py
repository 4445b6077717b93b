"""Finds agents by entry point (`rollyard.agents`), one instance of each."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import cast

from rollyard.agents.base import Agent
from rollyard.core.failure import UnknownAgent

GROUP = "rollyard.agents"


class Agents:
    """The agents that are installed, and those given as `extra` (which win). The service holds one."""

    def __init__(self, extra: Mapping[str, Agent] | None = None) -> None:
        self._found = {point.name: point for point in entry_points(group=GROUP)}
        self._made: dict[str, Agent] = dict(extra or {})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted({*self._found, *self._made}))

    def get(self, name: str) -> Agent:
        """The agent of that name; it holds no state of a rollout, so all share it."""
        if name not in self._made:
            if name not in self._found:
                raise UnknownAgent(f"there is no agent {name!r}; there are: {', '.join(self.names)}")
            self._made[name] = cast("Agent", self._found[name].load()())
        return self._made[name]
