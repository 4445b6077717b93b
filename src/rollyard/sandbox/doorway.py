"""The doorway: a listening socket inside a sandbox that has no network, served by our event loop.

The launcher opens the socket in the sandbox's own network namespace before anything inside runs; here an ASGI app is
bound to it. Who is calling is known by the listener alone: every doorway has the same address.

Invariants. Whoever is inside can only hurt itself: connections, headers, bodies and the time that each may take are
bounded by `DoorwayLimits`. A request in flight is cancelled when its client goes away and when the doorway closes.
`close` first closes the listener and every connection, since an open one would keep the namespace alive.

The server is `rollyard.http`, the service's own. A doorway that nobody uses costs its socket and a few KB, and no task.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from rollyard.http import AsgiApp, HttpServer, ListenerBounds, Refusals

__all__ = ["BACKLOG", "DOORWAY_PORT", "AsgiApp", "Doorway", "DoorwayLimits"]

DOORWAY_PORT = 8129
"""On 127.0.0.1 in every sandbox's own network namespace."""

BACKLOG = 16
"""Connections that the kernel holds for us while the loop is busy."""


@dataclass(frozen=True, slots=True)
class DoorwayLimits:
    """What one sandbox may take of its server. One that holds connections filled 1,024 descriptors in 10 s."""

    connections: int = 16  # one more is closed at once; the others do not notice
    header_bytes: int = 32 << 10  # of one request; beyond: 431
    header_s: float = 10.0  # from a request's first byte to the end of its headers; beyond: 408
    idle_s: float = 75.0  # a connection on which nothing has begun is closed
    body_bytes: int = 16 << 20  # of one request, however it is framed; beyond: 413
    body_s: float = 60.0  # for the body to come, not counting while the app does not read; beyond: 408

    @property
    def bounds(self) -> ListenerBounds:
        return ListenerBounds(
            connections=self.connections,
            header_bytes=self.header_bytes,
            header_s=self.header_s,
            idle_s=self.idle_s,
            body_bytes=self.body_bytes,
            body_s=self.body_s,
        )


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
        self._server: HttpServer | None = None
        self._is_closed = False

    @property
    def url(self) -> str:
        """As it is named inside."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """How many there are now."""
        return self._server.connections if self._server is not None else 0

    async def serve(self, app: AsgiApp) -> None:
        """Binds the app to the listener, once and for good."""
        if self._server is not None or self._is_closed:
            raise RuntimeError("this doorway is closed" if self._is_closed else "this doorway has its app already")
        quiet = Refusals(is_logged=False)  # whoever is inside must not write to the service's log
        self._server = HttpServer(
            app, self.limits.bounds, refusals=quiet, is_cancelling=True, is_eager=True, owner=self.owner
        )
        await self._server.start(self._sock, backlog=BACKLOG)

    def close(self) -> None:
        """At once, and more than once if need be. Apps are cancelled; what they still do is their own cleaning up."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        else:
            self._sock.close()
