"""The app at a sandbox's doorway: MCP servers below /mcp/ (those of the operator that the task names, and the
environment's tools), and the gateway at every other path during RUN.

A doorway gets its app once, in INIT; the gateway is open only during RUN. Outside of RUN, a request for it gets status
503 and `x-should-retry: false`.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from rollyard.sandbox.doorway import AsgiApp
from rollyard.tools.mcp.proxy import PREFIX, McpProxy
from rollyard.tools.mcp.tool_server import NAME, ToolServer

TOOLS = f"{PREFIX}{NAME}"

_CLOSED = b'{"error": {"message": "no model is available: RUN has not started, or has ended", "code": "ended"}}'


class DoorwayApp:
    """An ASGI app. Call `close` when its doorway is closed."""

    def __init__(self, proxy: McpProxy | None = None) -> None:
        self.tools: ToolServer | None = None
        self._proxy = proxy
        self._gateway: AsgiApp | None = None

    def open(self, gateway: AsgiApp) -> None:
        self._gateway = gateway

    def shut(self) -> None:
        """Removes the gateway. Requests in progress are not affected."""
        self._gateway = None

    async def close(self) -> None:
        self.shut()
        if self.tools is not None:
            await self.tools.close()
        if self._proxy is not None:
            await self._proxy.close()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if self.tools is not None and str(scope["path"]).rstrip("/") == TOOLS:
            await self.tools(scope, receive, send)
        elif self._proxy is not None and str(scope["path"]).startswith(PREFIX):
            await self._proxy(scope, receive, send)
        elif self._gateway is not None:
            await self._gateway(scope, receive, send)
        else:
            headers = [(b"content-type", b"application/json"), (b"x-should-retry", b"false")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": _CLOSED})
