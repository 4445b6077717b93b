"""One MCP server and its session: starts the server, sends requests, and restarts it when it has died.

A session's task group must end in the task that started it, and a rollout's stages are different tasks; so the session
has a task of its own, which `close` ends and waits for.

Invariants. One request at a time. A request ends at its timeout, and the server is notified that it is cancelled. A
server that is dead, or does not read its input, is ended; the next request starts a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeVar

import httpx2
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.types import CONNECTION_CLOSED

from rollyard.core import RollyardError
from rollyard.core.exception_groups import first_error
from rollyard.tools.mcp.pipes import MESSAGE_BYTES
from rollyard.tools.mcp.sources import START_S, OutsideServer

log = logging.getLogger("rollyard.tools")

T = TypeVar("T")

CONNECT_S = 10.0
END_S = 5.0  # for a session to end; after that its task is cancelled


class McpServer(Protocol):
    """The other side of a session."""

    is_writing: bool

    @property
    def is_dead(self) -> bool: ...

    async def exit_reason(self) -> str: ...


class RemoteMcpServer:
    """A server outside the sandbox. The client library does not expose the HTTP status, so it is recorded here."""

    is_writing = False
    is_dead = False

    async def note(self, response: httpx2.Response) -> None:
        if response.status_code == 404 and "mcp-session-id" in response.request.headers:
            self.is_dead = True  # the server no longer has the session

    async def exit_reason(self) -> str:
        return "the connection to it ended"


Connect = Callable[[], AbstractAsyncContextManager[tuple[McpServer, Any]]]


@asynccontextmanager
async def connected_to(server: OutsideServer) -> AsyncGenerator[tuple[McpServer, Any], None]:
    """Yields the streams to a server outside, over streamable HTTP."""
    far = RemoteMcpServer()
    timeout = httpx2.Timeout(CONNECT_S, read=None)  # each call has its own timeout
    hooks = {"response": [far.note]}
    async with (
        httpx2.AsyncClient(headers=dict(server.headers), timeout=timeout, event_hooks=hooks) as client,
        streamable_http_client(server.url, http_client=client, max_sse_event_size=MESSAGE_BYTES) as streams,
    ):
        yield far, streams


class ServerNotStarted(Exception):
    """The server does not start, or does not respond as an MCP server. The message describes the error."""


class ServerDied(Exception):
    """The server ended during a request. The message describes how."""


class TimedOut(Exception):
    """There was no response in time. The message describes the state of the server."""


class McpConnection:
    """The connection to one MCP server. It restarts the server when needed."""

    def __init__(self, connect: Connect, *, start_s: float = START_S) -> None:
        self._connect = connect
        self._start_s = start_s
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._session: ClientSession | None = None
        self._other: McpServer | None = None
        self._is_closed = False

    async def request(self, ask: Callable[[ClientSession], Awaitable[T]], *, timeout_s: float) -> tuple[T, bool]:
        """Returns the server's response, and whether the server was restarted for it. MCPError is the server's
        refusal."""
        async with self._turn:
            if self._is_closed:
                raise ServerNotStarted("its rollout is over")
            is_new = self._session is None or self._other is None or self._other.is_dead
            if is_new:
                await self._end()
                await self._start(min(self._start_s, timeout_s))
            try:
                async with asyncio.timeout(timeout_s):
                    assert self._session is not None
                    return await ask(self._session), is_new
            except TimeoutError:
                if self._other is None or not self._other.is_writing:
                    raise TimedOut(f"no answer within {timeout_s:g} s; the call was cancelled") from None
                await self._end()
                raise TimedOut(f"it did not even read the call within {timeout_s:g} s; it was ended") from None
            except MCPError as error:
                if error.code != CONNECTION_CLOSED:
                    raise
                how = await self._other.exit_reason() if self._other is not None else "it is gone"
                await self._end()
                raise ServerDied(how) from None

    async def close(self) -> None:
        self._is_closed = True
        await self._end()

    # --- the session's own task

    async def _start(self, timeout_s: float) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._live(ready, self._stop), name="mcp session")
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(ready)
        except TimeoutError:
            how = await self._other.exit_reason() if self._other is not None else ""
            raise ServerNotStarted(f"it did not answer within {timeout_s:g} s{f': {how}' if how else ''}") from None
        finally:
            if self._session is None:
                ready.cancel()
                await self._end()

    async def _live(self, ready: asyncio.Future[None], stop: asyncio.Event) -> None:
        try:
            async with self._connect() as (other, (read, write)):
                self._other = other
                async with ClientSession(read, write) as session:
                    try:
                        await session.initialize()
                    except MCPError as error:
                        how = await other.exit_reason() if error.code == CONNECTION_CLOSED else error.message
                        raise ServerNotStarted(how) from error
                    self._session = session
                    if not ready.done():
                        ready.set_result(None)
                    await stop.wait()
        except asyncio.CancelledError:
            ready.cancel()
            raise
        except BaseException as error:
            cause = first_error(error)
            if not ready.done():
                known = isinstance(cause, RollyardError | ServerNotStarted)
                ready.set_exception(cause if known else ServerNotStarted(f"{type(cause).__name__}: {cause}"))
            elif not stop.is_set():
                log.warning("an MCP session failed", extra={"error": type(cause).__name__})

    async def _end(self) -> None:
        task, self._task = self._task, None
        is_up, self._session, self._other = self._session is not None, None, None
        if task is None:
            return
        self._stop.set()
        if not is_up:
            task.cancel()  # it waits for the server, not for `stop`
        done, _ = await asyncio.wait((task,), timeout=END_S)
        if not done:
            task.cancel()
            await asyncio.wait((task,), timeout=END_S)
        with contextlib.suppress(asyncio.CancelledError):
            if task.done():
                task.exception()
