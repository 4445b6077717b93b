"""One MCP server and the session with it: started, asked, and started again when it has died.

A session's task group must end in the task that began it, and a rollout's stages are different tasks; so the session
lives in a task of its own, which `close` ends and waits for.

Invariants. One request at a time. A request ends at its timeout, and the server is told that it is cancelled. A
server that is dead, or does not read what is said to it, is ended; the next request finds a new one.
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
from rollyard.tools._mcp_pipes import MESSAGE_BYTES
from rollyard.tools.mcp import START_S, OutsideServer

log = logging.getLogger("rollyard.tools")

T = TypeVar("T")

CONNECT_S = 10.0
END_S = 5.0  # for a session to end; beyond it, it is left to its cancellation


class McpServer(Protocol):
    """The other side of a session."""

    is_writing: bool

    @property
    def is_dead(self) -> bool: ...

    async def epitaph(self) -> str: ...


class RemoteMcpServer:
    """A server outside. What the client library makes of an HTTP status loses it, so it is noted here."""

    is_writing = False
    is_dead = False

    async def note(self, response: httpx2.Response) -> None:
        if response.status_code == 404 and "mcp-session-id" in response.request.headers:
            self.is_dead = True  # it has forgotten the session

    async def epitaph(self) -> str:
        return "the connection to it ended"


Connect = Callable[[], AbstractAsyncContextManager[tuple[McpServer, Any]]]


@asynccontextmanager
async def reached(server: OutsideServer) -> AsyncGenerator[tuple[McpServer, Any], None]:
    """The streams to a server outside, over streamable HTTP."""
    far = RemoteMcpServer()
    timeout = httpx2.Timeout(CONNECT_S, read=None)  # how long an answer may take is the call's to say
    hooks = {"response": [far.note]}
    async with (
        httpx2.AsyncClient(headers=dict(server.headers), timeout=timeout, event_hooks=hooks) as client,
        streamable_http_client(server.url, http_client=client, max_sse_event_size=MESSAGE_BYTES) as streams,
    ):
        yield far, streams


class ServerNotStarted(Exception):
    """The server does not start, or does not answer as one. The message says how."""


class ServerDied(Exception):
    """The server ended while it was asked. The message says how."""


class TimedOut(Exception):
    """No answer came in time. The message says what became of the server."""


class McpConnection:
    """See the module."""

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
        """What the server answered, and whether it had to be started anew for that. MCPError is its own refusal."""
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
                how = await self._other.epitaph() if self._other is not None else "it is gone"
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
            how = await self._other.epitaph() if self._other is not None else ""
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
                        how = await other.epitaph() if error.code == CONNECTION_CLOSED else error.message
                        raise ServerNotStarted(how) from error
                    self._session = session
                    if not ready.done():
                        ready.set_result(None)
                    await stop.wait()
        except asyncio.CancelledError:
            ready.cancel()
            raise
        except BaseException as error:
            found = _first(error)
            if not ready.done():
                known = isinstance(found, RollyardError | ServerNotStarted)
                ready.set_exception(found if known else ServerNotStarted(f"{type(found).__name__}: {found}"))
            elif not stop.is_set():
                log.warning("an MCP session broke", extra={"error": type(found).__name__})

    async def _end(self) -> None:
        task, self._task = self._task, None
        is_up, self._session, self._other = self._session is not None, None, None
        if task is None:
            return
        self._stop.set()
        if not is_up:
            task.cancel()  # it waits for an answer, not for us
        done, _ = await asyncio.wait((task,), timeout=END_S)
        if not done:
            task.cancel()
            await asyncio.wait((task,), timeout=END_S)
        with contextlib.suppress(asyncio.CancelledError):
            if task.done():
                task.exception()


def _first(error: BaseException) -> BaseException:
    """What is at the bottom of a task group's groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
