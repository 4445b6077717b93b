"""Finds agents: those of entry points (`rollyard.agents`), one instance of each, and every preset by its name.

Of two with one name, the first of these counts: what was given, entry points, the operator's presets, our own. A preset
that cannot be read is an agent that cannot be had, and says why; it keeps nobody else from working.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import cast

from rollyard.agents.base import Agent
from rollyard.agents.harness import HarnessAgent
from rollyard.agents.installation import AgentInstalls
from rollyard.agents.preset import PresetError, built_in, read_preset
from rollyard.core.failure import UnknownAgent
from rollyard.plugins import plugins

log = logging.getLogger("rollyard.agents")

GROUP = "rollyard.agents"


class Agents:
    """The agents that are installed, and those given as `extra` (which win). The service holds one.

    `shelf` has the operator's presets and what was installed for all of them; without it, only programs in an image."""

    def __init__(self, extra: Mapping[str, Agent] | None = None, *, shelf: AgentInstalls | None = None) -> None:
        self.shelf = shelf
        self._found = {point.name: point for point in plugins(GROUP)}
        own = shelf.own_presets() if shelf is not None else {}
        self._presets: dict[str, str | PresetError] = {**built_in(), **own}
        self._made: dict[str, Agent] = dict(extra or {})
        for name in self.presets:
            try:
                self._preset_agent(name)
            except UnknownAgent as error:
                log.error("a preset cannot be used", extra={"agent": name, "detail": error.detail})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted({*self._found, *self._presets, *self._made}))

    @property
    def presets(self) -> dict[str, str]:
        """The texts of those that are agents by their name, broken ones included; of one that cannot be read, none."""
        return {
            name: text if isinstance(text, str) else ""
            for name, text in sorted(self._presets.items())
            if name not in self._found and (name not in self._made or isinstance(self._made[name], HarnessAgent))
        }

    def get(self, name: str) -> Agent:
        """The agent of that name; it holds no state of a rollout, so all share it."""
        if name not in self._made:
            if name in self._found:
                self._made[name] = cast("Agent", self._found[name].load()())
            elif name in self._presets:
                return self._preset_agent(name)
            else:
                raise UnknownAgent(f"there is no agent {name!r}; there are: {', '.join(self.names)}")
        return self._made[name]

    def _preset_agent(self, name: str) -> Agent:
        if name in self._made:
            return self._made[name]
        try:
            text = self._presets[name]
            if isinstance(text, PresetError):
                raise text
            preset = read_preset(text)
            if preset.name != name:
                raise PresetError("name", f"{name!r} was expected, as the file is called")
        except PresetError as error:
            raise UnknownAgent(f"the preset {name!r} cannot be used: {error}") from error
        agent = self._made[name] = cast(
            "Agent", HarnessAgent(preset, self.shelf)
        )  # its name is its own, not its class's
        return agent
