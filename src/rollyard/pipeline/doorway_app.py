"""What is served at a sandbox's doorway: MCP servers below /mcp/ (the operator's that the task names, and the tools
that an environment brings), and at every other path the gateway, while RUN lasts.

A doorway gets its app once, at INIT; the gateway is there only from RUN's beginning to its end. Outside of that whoever
calls is told 503, and not to try again.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from rollyard.sandbox.doorway import AsgiApp
from rollyard.tools.mcp_proxy import PREFIX, McpProxy
from rollyard.tools.mcp_tools import NAME, ToolServer

TOOLS = f"{PREFIX}{NAME}"

_CLOSED = b'{"error": {"message": "there is no model here: RUN has not begun, or is over", "code": "ended"}}'


class DoorwayApp:
    """An ASGI app. `close` it when its doorway is closed."""

    def __init__(self, proxy: McpProxy | None = None) -> None:
        self.tools: ToolServer | None = None
        self._proxy = proxy
        self._gateway: AsgiApp | None = None

    def open(self, gateway: AsgiApp) -> None:
        self._gateway = gateway

    def shut(self) -> None:
        """No gateway any more; requests that it has are its own to end."""
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
