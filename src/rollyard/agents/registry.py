"""Finds agents: entry points (`rollyard.agents`), with one instance of each, and every preset by its name.

If a name occurs twice, the first of these is used: `extra`, entry points, the operator's presets, built-in presets. A
preset that cannot be read is an agent that cannot be used, with the reason; other agents are not affected.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rollyard.agents.base import Agent
from rollyard.agents.harness import HarnessAgent
from rollyard.agents.installation import AgentInstalls
from rollyard.agents.preset import PresetError, built_in, read_preset
from rollyard.core.failure import UnknownAgent
from rollyard.plugins import plugins

log = logging.getLogger("rollyard.agents")

GROUP = "rollyard.agents"


class Agents:
    """The installed agents, and those given as `extra`, which take precedence. The service has one instance.

    `installs` holds the operator's presets and the installed programs; without it, only programs in an image run."""

    def __init__(self, extra: Mapping[str, Agent] | None = None, *, installs: AgentInstalls | None = None) -> None:
        self.installs = installs
        self._entry_points = {point.name: point for point in plugins(GROUP)}
        own = installs.own_presets() if installs is not None else {}
        self._presets: dict[str, str | PresetError] = {**built_in(), **own}
        self._agents: dict[str, Agent] = dict(extra or {})
        for name in self.presets:
            try:
                self._preset_agent(name)
            except UnknownAgent as error:
                log.error("a preset cannot be used", extra={"agent": name, "detail": error.detail})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted({*self._entry_points, *self._presets, *self._agents}))

    @property
    def presets(self) -> dict[str, str]:
        """The texts of the presets that are in use under their names, including broken ones; empty if unreadable."""
        return {
            name: text if isinstance(text, str) else ""
            for name, text in sorted(self._presets.items())
            if name not in self._entry_points
            and (name not in self._agents or isinstance(self._agents[name], HarnessAgent))
        }

    def get(self, name: str) -> Agent:
        """Returns the agent of that name. It holds no state of a rollout, so rollouts share it."""
        if name not in self._agents:
            if name in self._entry_points:
                self._agents[name] = self._installed(name)
            elif name in self._presets:
                return self._preset_agent(name)
            else:
                raise UnknownAgent(f"there is no agent {name!r}; there are: {', '.join(self.names)}")
        return self._agents[name]

    def _installed(self, name: str) -> Agent:
        agent: object = self._entry_points[name].load()()
        if not isinstance(agent, Agent):
            raise UnknownAgent(f"agent {name!r} cannot be used: {type(agent).__name__} is not a rollyard.agents.Agent")
        return agent

    def _preset_agent(self, name: str) -> Agent:
        if name in self._agents:
            return self._agents[name]
        try:
            text = self._presets[name]
            if isinstance(text, PresetError):
                raise text
            preset = read_preset(text, self.installs.folder if self.installs is not None else None)
            if preset.name != name:
                raise PresetError("name", f"{name!r} was expected, like the file's name")
        except PresetError as error:
            raise UnknownAgent(f"the preset {name!r} cannot be used: {error}") from error
        agent = self._agents[name] = HarnessAgent(preset, self.installs)
        return agent
