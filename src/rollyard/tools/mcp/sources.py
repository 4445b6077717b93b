"""`mcp`: the tools of any MCP server, run inside the sandbox or reached by the service itself.

A task names its servers in `agent.options.mcp`: `{"NAME": {"command": ["python3", "server.py"], "env": {…}}}` is a
program that runs in the sandbox and communicates over its pipes; `{"NAME": {"server": "CONFIGURED"}}` is one that the
operator has configured in the settings, and with `"inside": true` programs in the sandbox may also use it, through the
doorway. The model sees each tool as `NAME__tool`.

Invariants. An error of a server is an observation once its tools are known. Before that, a program that does not start
is the task's fault, and a server outside that does not respond is an infrastructure failure. A server that died is
started again at the next call, and the model is informed that its state is lost.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module

from rollyard.core import Json
from rollyard.core.failure import TaskInvalid, UnknownTool
from rollyard.tools.base import Tool, ToolContext

NAME = re.compile(r"(?!.*__)[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
"""A server's name. Two underscores separate it from the tool's name."""

START_S = 60.0
"""The time in which a server has to start and respond; an interpreter with many imports takes seconds on a busy
machine."""


@dataclass(frozen=True, slots=True)
class OutsideServer:
    """An MCP server that the operator has configured. The headers may contain secrets, so the repr omits them."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)


@dataclass(frozen=True, slots=True)
class McpSource:
    """A `ToolSource`: one server of a task. Either `command` or `server` is set."""

    name: str
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    server: OutsideServer | None = None
    is_reached_from_inside: bool = False
    start_s: float = START_S

    @property
    def needs_sandbox(self) -> bool:
        return self.server is None or self.is_reached_from_inside

    @property
    def needs_python(self) -> bool:
        return False

    async def open(self, context: ToolContext) -> Sequence[Tool]:
        """Returns its tools. Raises SetupFailed or ToolUnreachable if it returns none, and ends it then."""
        module = await asyncio.to_thread(
            import_module, "rollyard.tools.mcp.server_tools"
        )  # the first import takes a second
        return await module.open_tools(self, context)


# --- task options ---------------------------------------------------------------------------------------


def mcp_sources(option: Json, servers: Mapping[str, OutsideServer]) -> list[McpSource]:
    """Reads the servers of `agent.options.mcp`. Raises TaskInvalid, or UnknownTool for one that the operator has not
    configured."""
    if option is None:
        return []
    if not isinstance(option, Mapping):
        raise TaskInvalid("agent.options.mcp: an object of servers by name was expected")
    return [_source(name, entry, servers) for name, entry in option.items()]


def _source(name: str, entry: Json, servers: Mapping[str, OutsideServer]) -> McpSource:
    where = f"agent.options.mcp.{name}"
    if not NAME.fullmatch(name):
        raise TaskInvalid(f"{where}: up to 32 letters, digits, - and _ were expected as a name, and no __")
    if not isinstance(entry, Mapping) or ("command" in entry) == ("server" in entry):
        raise TaskInvalid(f"{where}: an object with either a command or a server was expected")
    allowed = {"command", "env"} if "command" in entry else {"server", "inside"}
    if unknown := sorted(set(entry) - allowed):
        raise TaskInvalid(f"{where}.{unknown[0]}: unknown; there are {', '.join(sorted(allowed))}")
    if "server" in entry:
        server_name, inside = entry["server"], entry.get("inside", False)
        if not isinstance(inside, bool):
            raise TaskInvalid(f"{where}.inside: true or false was expected")
        if not isinstance(server_name, str) or server_name not in servers:
            known = ", ".join(sorted(servers)) or "none"
            raise UnknownTool(f"{where}: there is no MCP server {server_name!r} here; the operator has named: {known}")
        return McpSource(name, server=servers[server_name], is_reached_from_inside=inside)
    command, env = entry["command"], entry.get("env", {})
    if not _is_strings(command) or not command:
        raise TaskInvalid(f"{where}.command: a list of strings was expected")
    if not isinstance(env, Mapping) or not _is_strings([*env.values()]) or any("=" in key for key in env):
        raise TaskInvalid(f"{where}.env: an object of strings was expected")
    return McpSource(name, tuple(map(str, command)), {key: str(value) for key, value in env.items()})  # type: ignore[arg-type]


def _is_strings(value: Json) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) and "\0" not in item for item in value)
