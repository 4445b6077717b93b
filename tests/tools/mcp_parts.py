"""MCP servers for tests: a real one of the `mcp` package, and a hand-written one that misbehaves on request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import sysconfig
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import uvicorn
from mcp.server.mcpserver import Context, MCPServer

from rollyard.sandbox import Bind

LIBRARY = Bind(Path(sysconfig.get_path("purelib")), "/mcp-library")
"""The `mcp` package for the sandbox's own Python, which must have the same version."""

REAL = """
import sys
sys.path.insert(0, "/mcp-library")
from mcp.server.mcpserver import MCPServer
server = MCPServer("counter")
count = 0

@server.tool()
def add(number: int) -> str:
    "Adds to the count."
    global count
    count += number
    return f"count is {count}"

@server.tool()
def where() -> dict:
    "Returns where it runs."
    import os
    return {"cwd": os.getcwd(), "secret": os.environ.get("SECRET")}

server.run()
"""

BY_HAND = r"""
import json, os, sys, time

def say(message):
    sys.stdout.write(message if isinstance(message, str) else json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()

NAMES = ["echo", "garbage", "huge", "flood", "notify", "die", "hang", "fail", "refuse", "kinds", "nonsense", "deaf",
         "schema", "deep", "x" * 80, "x" * 80 + "y", "a.b", "a/b"]
calls = 0
print("starting", file=sys.stderr, flush=True)
for line in sys.stdin:
    message = json.loads(line)
    method, number = message.get("method"), message.get("id")
    if method == "initialize":
        version = message["params"]["protocolVersion"]
        say("a banner, as some servers print\n")
        say({"id": number, "result": {"protocolVersion": version, "capabilities": {"tools": {}},
                                      "serverInfo": {"name": "by hand", "version": "1"}}})
    elif method == "tools/list":
        evil = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}, "required": ["a"]}
        tools = [{"name": n, "description": n, "inputSchema": {"type": "object"},
                  **({"outputSchema": evil} if n == "schema" else {})} for n in NAMES]
        half = len(tools) // 2  # two pages
        if "cursor" in (message.get("params") or {}):
            say({"id": number, "result": {"tools": tools[half:]}})
        else:
            say({"id": number, "result": {"tools": tools[:half], "nextCursor": "2"}})
    elif method == "tools/call":
        calls += 1
        name, arguments = message["params"]["name"], message["params"].get("arguments", {})
        content = [{"type": "text", "text": f"{name} {calls} {json.dumps(arguments)}"}]
        result = {"content": content}
        if name == "garbage":
            say("not json\n")
            say('{"jsonrpc": "2.0", "id": 99999, "result": {}}\n')
            say('{"jsonrpc": "2.0", "method": "notifications/unheard"}\n[1]\n"x"\nnull\n')
            sys.stdout.buffer.write(b"\xff\xfe\x00\n"); sys.stdout.flush()
            say("[" * 100000 + "\n")
        elif name == "huge":
            result = {"content": [{"type": "text", "text": "h" * (5 << 20)}]}
        elif name == "flood":
            note = json.dumps({"jsonrpc": "2.0", "method": "notifications/message",
                               "params": {"level": "info", "data": "f" * 60000}}) + "\n"
            while True:
                say(note)
        elif name == "notify":
            for _ in range(100):
                say({"method": "notifications/message", "params": {"level": "info", "data": "x"}})
                say({"method": "notifications/progress", "params": {"progressToken": 5, "progress": "bad"}})
                say({"method": "notifications/tools/list_changed"})
            say({"id": "theirs", "method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}})
            say({"id": "other", "method": "no/such", "params": {}})
        elif name == "die":
            print("oh no", file=sys.stderr, flush=True)
            os._exit(3)
        elif name == "hang":
            continue
        elif name == "deaf":
            say({"id": number, "result": result})
            time.sleep(3600)
        elif name == "fail":
            result["isError"] = True
        elif name == "refuse":
            say({"id": number, "error": {"code": -32602, "message": "bad arguments"}})
            continue
        elif name == "kinds":
            result = {"content": [
                {"type": "image", "data": "QUJDRA==", "mimeType": "image/png"},
                {"type": "resource", "resource": {"uri": "file:///a", "text": "inner"}},
                {"type": "resource_link", "uri": "file:///b", "name": "b"}], "structuredContent": {"a": [1]}}
        elif name == "nonsense":
            result = {"content": "no list"}
        elif name == "schema":
            result["structuredContent"] = {"a": "a" * 60 + "!"}
        elif name == "deep":
            say('{"jsonrpc": "2.0", "id": %d, "result": {"content": [], "structuredContent": {"d": %s}}}\n'
                % (number, "[" * 150 + "]" * 150))
            continue
        say({"id": number, "result": result})
"""


def outside() -> MCPServer:
    """A real server for streamable HTTP. It keeps a count per session, and returns a header of its request."""
    server = MCPServer("outside")
    state = {"count": 0}

    @server.tool()
    def add(number: int) -> str:
        state["count"] += number
        return f"count is {state['count']}"

    @server.tool()
    def header(ctx: Context[Any, Any]) -> str:
        headers = ctx.request_context.request.headers  # type: ignore[union-attr]
        return json.dumps({name: headers.get(name) for name in ("authorization", "cookie", "x-inside")})

    @server.tool()
    async def slow() -> str:
        await asyncio.sleep(3600)
        return "late"

    return server


@contextlib.asynccontextmanager
async def served(app: Any, sock: socket.socket | None = None) -> AsyncGenerator[str, None]:
    """Serves an ASGI app with its lifespan on loopback; yields its URL."""
    sock = sock or loopback()
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
    server = _Quiet(config)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    await server.listening.wait()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/mcp"
    finally:
        server.should_exit = server.force_exit = True
        await task


class _Quiet(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


def loopback(port: int = 0) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    return sock


def same_python() -> bool:
    """Whether the host's Python can import the packages of this one."""
    import subprocess

    out = subprocess.run(["/usr/bin/python3", "-c", "import sys; print(sys.version_info[:2])"], capture_output=True)
    return out.stdout.decode().strip() == str(sys.version_info[:2])
