"""`ToolServer`: an environment's own tools for an agent program, as an MCP server at `/mcp/environment` of its doorway.

The native loop offers these tools to the model itself. A program has tools of its own and uses others only by MCP; its
configuration contains the address (`{{root_url}}/mcp/environment`).

Invariants. The tools are the same objects that the native loop would call, opened once for the rollout. A call is
bounded by the task's `tool_s`, and cancelled `GRACE_S` after that. An error that is not an observation (the sandbox has
ended, the environment's server is down, a tool has a bug) is not shown to the program: it ends the rollout, by
`on_failure`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from rollyard.core import Json, RollyardError
from rollyard.core.failure import EnvironmentBroken, InternalError
from rollyard.observe.call_log import CallLog
from rollyard.plugins import OWN, package_of, raised
from rollyard.tools.base import Tool

log = logging.getLogger(__name__)

NAME = "environment"

GRACE_S = 15.0
"""Added to `tool_s`, which a tool enforces itself: as in the native loop, only a tool that hangs is cancelled."""


class ToolServer:
    """An ASGI app between `open` and `close`."""

    def __init__(self, tools: Mapping[str, Tool], *, tool_s: float) -> None:
        self._tools = dict(tools)
        self._tool_s = tool_s
        self.on_failure: Callable[[RollyardError], None] = lambda _: None
        self.call_log = CallLog()  # set for each RUN, as the next one is
        self.turn: Callable[[], int] = lambda: 0  # of the model's last reply
        self._app: Any = None
        self._ended = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> None:
        from mcp.server.lowlevel import Server
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

        server = Server("rollyard", on_list_tools=self._list, on_call_tool=self._call)
        manager = StreamableHTTPSessionManager(server, json_response=True, stateless=True)
        is_ready = asyncio.Event()

        async def serve() -> None:
            async with manager.run():  # must be exited by the task that entered it
                is_ready.set()
                await self._ended.wait()

        self._serving = asyncio.create_task(serve(), name="tools by MCP")
        await is_ready.wait()
        self._app = manager.asgi_app

    async def close(self) -> None:
        self._app = None
        self._ended.set()
        if self._serving is not None:
            await asyncio.wait({self._serving})

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if self._app is None:
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await self._app(scope, receive, send)

    async def _list(self, _: Any, __: Any) -> Any:
        from mcp_types import ListToolsResult
        from mcp_types import Tool as McpTool

        specs = [tool.spec for tool in self._tools.values()]
        return ListToolsResult(
            tools=[
                McpTool(name=spec.name, description=spec.description, input_schema=dict(spec.parameters))
                for spec in specs
            ]
        )

    async def _call(self, _: Any, params: Any) -> Any:
        from mcp_types import CallToolResult, TextContent

        tool = self._tools.get(params.name)
        if tool is None:
            text, is_error = f"there is no tool {params.name!r}; there are: {', '.join(self._tools)}", True
        else:
            logged, is_error = self.call_log.begin("tool", self.turn(), tool.spec.name), True
            try:
                text, is_error = await self._called(tool, params.arguments or {})
            finally:
                self.call_log.end(logged, is_error=is_error)
        return CallToolResult(content=[TextContent(type="text", text=text)], is_error=is_error)

    async def _called(self, tool: Tool, arguments: Mapping[str, Json]) -> tuple[str, bool]:
        """Returns the tool's output, and whether it is an error."""
        name, guard = tool.spec.name, asyncio.timeout(self._tool_s + GRACE_S)
        try:
            async with guard:
                result = await tool.call(arguments, timeout_s=self._tool_s)
            return result.content, result.is_error
        except RollyardError as error:
            failure = error
        except Exception as error:
            if isinstance(error, TimeoutError) and guard.expired():
                return f"Error: {name} did not answer within {self._tool_s:g} s", True
            log.exception("a tool raised an unexpected exception", extra={"tool": name})
            package = package_of(tool)
            broken = InternalError if package == OWN else EnvironmentBroken
            failure = broken(f"the tool {name} raised {raised(error, package)}")
        self.on_failure(failure)
        return "this rollout has ended", True
