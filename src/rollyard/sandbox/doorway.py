"""The doorway: a listening socket inside a sandbox that has no network, served by our event loop.

The launcher opens the socket in the sandbox's own network namespace before anything inside runs; here an ASGI app is
bound to it. Who is calling is known by the listener alone: every doorway has the same address.

Invariants. Whoever is inside can only hurt itself: connections, headers, bodies and the time that each may take are
bounded by `DoorwayLimits`. A request in flight is cancelled when its client goes away and when the doorway closes.
`close` first closes the listener and every connection, since an open one would keep the namespace alive.

Not uvicorn: its protocol bounds neither headers, bodies nor pipelined requests, and takes a cancelled app for a crash;
what would be left of it after overriding all that is `_http.py` and `_exchange.py`, on the same parser. A doorway that
nobody uses costs its socket and a few KB, and no task.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from rollyard.sandbox._exchange import AsgiApp
from rollyard.sandbox._http import Connection, Desk, DoorwayLimits

__all__ = ["BACKLOG", "DOORWAY_PORT", "AsgiApp", "Doorway", "DoorwayLimits"]

DOORWAY_PORT = 8129
"""On 127.0.0.1 in every sandbox's own network namespace."""

BACKLOG = 16
"""Connections that the kernel holds for us while the loop is busy."""


class Doorway:
    """`serve(app)` begins to answer; `close()` ends the listener and every connection. Made by the runtime.

    Whoever connects before `serve` waits in the kernel. `owner` is for logs.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        port: int = DOORWAY_PORT,
        limits: DoorwayLimits | None = None,
        owner: str = "",
    ) -> None:
        self._sock = sock
        self.port = port
        self.limits = limits or DoorwayLimits()
        self.owner = owner
        self._server: asyncio.Server | None = None
        self._desk: Desk | None = None
        self._is_closed = False

    @property
    def url(self) -> str:
        """As it is named inside."""
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, app: AsgiApp) -> None:
        """Binds the app to the listener, once and for good."""
        if self._desk is not None or self._is_closed:
            raise RuntimeError("this doorway is closed" if self._is_closed else "this doorway has its app already")
        desk = self._desk = Desk(app, self.limits, self.owner)
        with contextlib.suppress(OSError):  # a Unix socket has none; what is accepted inherits it
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.setblocking(False)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(desk, loop), sock=self._sock, backlog=BACKLOG)
        if self._is_closed:  # while we waited
            server.close()
            return
        self._server = server

    def close(self) -> None:
        """At once, and more than once if need be. Apps are cancelled; what they still do is their own cleaning up."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
            self._server = None
        elif self._desk is None:
            self._sock.close()
        if self._desk is not None:
            self._desk.close()
