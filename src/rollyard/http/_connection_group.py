"""The state that the connections of one listener share: the app, the bounds, and the open connections."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from email.utils import formatdate
from typing import Protocol

from rollyard.core.failure import TooManyConnections
from rollyard.http._exchange import AsgiApp
from rollyard.http._head import Refusal
from rollyard.http.bounds import ListenerBounds
from rollyard.http.refusals import Reason, Refusals


class OpenConnection(Protocol):
    """A connection, as its group needs it."""

    def finish(self) -> None:
        """Closes it after the response in progress."""

    def abort(self) -> None:
        """Closes it immediately."""


class ConnectionGroup:
    """The connections of one listener. `HttpServer` describes the options."""

    def __init__(
        self,
        app: AsgiApp,
        bounds: ListenerBounds,
        refusals: Refusals,
        *,
        owner: str,
        is_cancelling: bool,
        is_eager: bool,
    ) -> None:
        self.app = app
        self.bounds = bounds
        self.refusals = refusals
        self.owner = owner
        self.is_cancelling = is_cancelling
        self.is_eager = is_eager
        self.connections: set[OpenConnection] = set()
        self.turned_away: set[OpenConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.is_ending = False  # no connection is admitted any more
        self.is_closed = False
        self._is_empty: asyncio.Event | None = None  # created by `empty`
        self._by_network: dict[str, int] = {}
        self._date = b""
        self._dated_at = 0

    @property
    def date(self) -> bytes:
        """The date header for the current second."""
        if self._dated_at != (now := int(time.time())):
            self._dated_at = now
            self._date = b"date: %s\r\n" % formatdate(now, usegmt=True).encode()
        return self._date

    def admit(self, connection: OpenConnection, address: str) -> Refusal | None:
        """Registers a connection, or returns why it is refused."""
        bounds = self.bounds
        if self.is_ending or len(self.connections) >= bounds.connections:
            detail = f"{bounds.connections} connections are open, which is the limit"
            return Refusal(Reason.TOO_MANY_CONNECTIONS, TooManyConnections(detail))
        network = network_of(address)
        count = self._by_network.get(network, 0)
        if network and count >= bounds.connections_per_address:
            detail = f"{network} has {count} connections open, which is the limit for one address"
            return Refusal(Reason.TOO_MANY_FROM_ADDRESS, TooManyConnections(detail))
        self._by_network[network] = count + 1
        self.connections.add(connection)
        return None

    def leave(self, connection: OpenConnection, address: str) -> None:
        self.turned_away.discard(connection)
        if connection in self.connections:
            self.connections.remove(connection)
            network = network_of(address)
            self._by_network[network] -= 1
            if not self._by_network[network]:
                del self._by_network[network]
        if not self.connections and self._is_empty is not None:
            self._is_empty.set()

    def track(self, task: asyncio.Task[None]) -> None:
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        if self.is_closed:  # the app itself closed the server
            task.cancel()

    async def empty(self) -> None:
        """Admits no more connections, and returns when all are closed: requests that have started are answered."""
        self.is_ending = True
        self._is_empty = asyncio.Event()
        for connection in list(self.connections):
            connection.finish()
        if self.connections:
            await self._is_empty.wait()
        if self.tasks:  # an app may continue after its response; no new one starts without a connection
            await asyncio.wait(list(self.tasks))

    def close(self) -> None:
        """Aborts every connection and cancels every app, immediately."""
        self.is_ending = self.is_closed = True
        for connection in (*self.connections, *self.turned_away):
            connection.abort()
        for task in list(self.tasks):
            task.cancel()


def network_of(address: str) -> str:
    """Returns what counts as one client: an IPv4 address, or a /64 of IPv6, since one host may use a whole /64."""
    if ":" not in address:
        return address
    ipv6 = ipaddress.IPv6Address(address)
    if ipv6.ipv4_mapped is not None:
        return str(ipv6.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(ipv6) >> 64 << 64, 64)))
