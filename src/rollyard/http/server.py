"""An ASGI app on one listening socket.

Invariants. `ListenerBounds` limits everything that is done for a client. `close` ends everything immediately; `drain`
first answers requests that have started. After either, no task and no connection of the server is left; `drain` waits
for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl

from rollyard.http._connection import Connection
from rollyard.http._connection_group import ConnectionGroup
from rollyard.http._exchange import AsgiApp
from rollyard.http.bounds import ListenerBounds
from rollyard.http.refusals import Refusals

log = logging.getLogger("rollyard.http")

CANCEL_S = 5.0  # for cancelled apps to clean up


class HttpServer:
    """Serves an app within `bounds`, from `start` on.

    `is_cancelling`: an app is cancelled when its client disconnects; otherwise it only receives `http.disconnect`, so
    that an operation of several steps is not left half done. `is_eager`: an app starts in the iteration of the event
    loop in which its request arrived, which is faster under load and costs 20 µs of CPU before Python 3.12. `owner` is
    for logs.
    """

    def __init__(
        self,
        app: AsgiApp,
        bounds: ListenerBounds,
        *,
        refusals: Refusals | None = None,
        is_cancelling: bool = False,
        is_eager: bool = False,
        owner: str = "",
    ) -> None:
        self._group = ConnectionGroup(
            app, bounds, refusals or Refusals(), owner=owner, is_cancelling=is_cancelling, is_eager=is_eager
        )
        self._server: asyncio.Server | None = None

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._group.connections)

    async def start(self, sock: socket.socket, *, backlog: int, tls: ssl.SSLContext | None = None) -> None:
        """Listens on the socket, which the server owns from now on."""
        with contextlib.suppress(OSError):  # a Unix socket has no such option; accepted sockets inherit it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        group = self._group
        server = await loop.create_server(lambda: Connection(group, loop), sock=sock, backlog=backlog, ssl=tls)
        if group.is_ending:  # closed meanwhile
            server.close()
            return
        self._server = server

    async def drain(self, within_s: float) -> None:
        """Stops listening, answers requests that have started, and ends those that take too long."""
        self._stop_listening()
        try:
            async with asyncio.timeout(within_s):
                await self._group.empty()
        except TimeoutError:
            log.warning("requests were aborted", extra={"requests": len(self._group.tasks), "after_s": within_s})
        self.close()
        if self._group.tasks:
            _, pending = await asyncio.wait(list(self._group.tasks), timeout=CANCEL_S)
            if pending:
                log.error("requests did not end", extra={"requests": len(pending), "after_s": CANCEL_S})

    def close(self) -> None:
        """Ends everything immediately. Idempotent. Apps are cancelled; they may still clean up."""
        self._stop_listening()
        self._group.close()

    def _stop_listening(self) -> None:
        self._group.is_ending = True
        if self._server is not None:
            self._server.close()
            self._server = None
