"""`McpProxy`: the operator's MCP servers for programs inside a sandbox, at `/mcp/NAME` of its doorway.

Invariants. Only the servers that the task names are reachable. The operator's headers are added to outgoing requests
and never visible in the sandbox; only the headers that MCP needs are forwarded, in both directions. Bodies are bounded,
responses are streamed, and a request ends when its client disconnects.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from yarl import URL

from rollyard.tools.mcp.sources import OutsideServer

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger("rollyard.tools")

PREFIX = "/mcp/"
BODY_BYTES = 4 << 20
"""The maximum of a request, which is a JSON-RPC message. The doorway's own bound applies to everything it serves."""

CONNECT_S = 10.0

METHODS = ("GET", "POST", "DELETE")  # listen, send a message, end the session
TO_SERVER = frozenset({b"accept", b"content-type", b"mcp-session-id", b"mcp-protocol-version", b"last-event-id"})
TO_CLIENT = ("content-type", "mcp-session-id", "cache-control", "allow", "retry-after")
PARAM_PREFIXES = (b"mcp-param-", b"mcp-method", b"mcp-name")  # newer revisions repeat parts of the message


class McpProxy:
    """An ASGI app. Call `close` when its doorway is closed. It connects at the first request."""

    def __init__(self, servers: Mapping[str, OutsideServer], *, owner: str = "") -> None:
        self._servers = dict(servers)
        self._owner = owner
        self._client: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def close(self) -> None:
        self._is_closed = True
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        path = str(scope["path"])
        server = self._servers.get(path.removeprefix(PREFIX).rstrip("/")) if path.startswith(PREFIX) else None
        if server is None or self._is_closed:
            names = ", ".join(sorted(self._servers)) or "none"
            return await _respond(send, 404, f"there is no such MCP server; there are: {names}")
        if scope["method"] not in METHODS:
            return await _respond(send, 405, "GET, POST or DELETE was expected", {"allow": ", ".join(METHODS)})
        body = await _body(receive)
        if body is None:
            return await _respond(send, 413, f"a message has at most {BODY_BYTES} bytes")
        return await self._pass_on(server, scope, body, send)

    async def _pass_on(self, server: OutsideServer, scope: MutableMapping[str, Any], body: bytes, send: Any) -> None:
        import aiohttp  # here, because it takes 0.1 s, and few services need it

        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in TO_SERVER or name.startswith(PARAM_PREFIXES)
        }
        headers |= {name.lower(): value for name, value in server.headers.items()}  # these take precedence
        is_started = False
        try:
            async with self._session().request(
                scope["method"],
                URL(server.url),
                data=io.BytesIO(body) if body else None,
                headers=headers,
                allow_redirects=False,
            ) as answer:
                response_headers = [(name, answer.headers[name]) for name in TO_CLIENT if name in answer.headers]
                status = answer.status if not 300 <= answer.status < 400 else 502  # hides the server's address
                await _start(send, status, response_headers)
                is_started = True
                async for chunk in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except (aiohttp.ClientError, TimeoutError) as error:
            log.warning("an MCP server cannot be reached", extra={"owner": self._owner, "error": type(error).__name__})
            if is_started:
                raise
            await _respond(send, 502, "the MCP server cannot be reached")

    def _session(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._client is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)  # a stream may be silent for long
            self._client = aiohttp.ClientSession(
                timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), skip_auto_headers=("User-Agent",)
            )
        return self._client


async def _body(receive: Any) -> bytes | None:
    """Returns the whole body, or None if it is too long."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return bytes(body)


async def _start(send: Any, status: int, headers: list[tuple[str, str]]) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def _respond(send: Any, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
    await _start(send, status, [("content-type", "text/plain; charset=utf-8"), *(headers or {}).items()])
    await send({"type": "http.response.body", "body": text.encode()})
