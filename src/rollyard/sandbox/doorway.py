"""The doorway: a listening socket inside a sandbox that has no network, served by the service's event loop.

The launcher opens the socket in the sandbox's own network namespace before any command runs inside; this module serves
an ASGI app on it. Only the listener identifies the caller: every doorway has the same address.

Invariants. A sandbox can only harm itself: connections, headers, bodies and the time that each may take are bounded by
`DoorwayLimits`. A request in flight is cancelled when its client disconnects and when the doorway closes.
`close` first closes the listener and every connection, since an open one would keep the namespace alive.

The server is `rollyard.http`, the service's own. An unused doorway costs its socket and a few KB, and no task.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from rollyard.http import AsgiApp, HttpServer, ListenerBounds, Refusals

__all__ = ["BACKLOG", "DOORWAY_PORT", "AsgiApp", "Doorway", "DoorwayLimits"]

DOORWAY_PORT = 8129
"""On 127.0.0.1 in every sandbox's own network namespace."""

BACKLOG = 16
"""Connections that the kernel queues while the event loop is busy."""


@dataclass(frozen=True, slots=True)
class DoorwayLimits:
    """What one sandbox may use of the server. Without limits, one that held connections used up 1,024 descriptors in
    10 s."""

    connections: int = 16  # one more is closed at once; the others are not affected
    header_bytes: int = 32 << 10  # of one request; beyond: 431
    header_s: float = 10.0  # from a request's first byte to the end of its headers; beyond: 408
    idle_s: float = 75.0  # a connection without a request is closed after this time
    body_bytes: int = 16 << 20  # of one request, however it is framed; beyond: 413
    body_s: float = 60.0  # to receive the body, not counting time in which the app does not read; beyond: 408

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
    """The listener of one sandbox. `serve(app)` starts answering; `close()` closes the listener and all connections.

    The runtime creates it. Connections made before `serve` wait in the kernel. `owner` is for logs.
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
        """Its URL inside the sandbox."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """How many are open."""
        return self._server.connections if self._server is not None else 0

    async def serve(self, app: AsgiApp) -> None:
        """Serves the app on the listener. Can be called once."""
        if self._server is not None or self._is_closed:
            raise RuntimeError("this doorway is closed" if self._is_closed else "this doorway already has an app")
        quiet = Refusals(is_logged=False)  # a sandbox must not be able to write to the service's log
        self._server = HttpServer(
            app, self.limits.bounds, refusals=quiet, is_cancelling=True, is_eager=True, owner=self.owner
        )
        await self._server.start(self._sock, backlog=BACKLOG)

    def close(self) -> None:
        """Closes at once; idempotent. Running app calls are cancelled and may still do their own clean-up."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        else:
            self._sock.close()
