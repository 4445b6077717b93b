"""What the connections of one listener share: the app, the bounds, and who is there."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from email.utils import formatdate
from typing import TYPE_CHECKING

from rollyard.core.failure import TooManyConnections
from rollyard.http._exchange import AsgiApp
from rollyard.http.bounds import Bounds
from rollyard.http.refusals import Reason, Refusals

if TYPE_CHECKING:
    from rollyard.http._connection import Connection

Refused = tuple[Reason, TooManyConnections]


class Desk:
    """See the module. `is_cancelling`: an app is cancelled when its client goes away, not only told."""

    def __init__(
        self, app: AsgiApp, bounds: Bounds, refusals: Refusals, *, owner: str, is_cancelling: bool, is_dated: bool
    ) -> None:
        self.app = app
        self.bounds = bounds
        self.refusals = refusals
        self.owner = owner
        self.is_cancelling = is_cancelling
        self.connections: set[Connection] = set()
        self.turned_away: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.is_ending = False  # nobody is admitted any more
        self.is_closed = False
        self.quiet: asyncio.Event | None = None  # set when nobody is left; see `empty`
        self._by_network: dict[str, int] = {}
        self._is_dated = is_dated
        self._date = b""
        self._dated_at = 0

    @property
    def date(self) -> bytes:
        """The header of this second."""
        if self._is_dated and self._dated_at != (now := int(time.time())):
            self._dated_at = now
            self._date = b"date: %s\r\n" % formatdate(now, usegmt=True).encode()
        return self._date

    def admit(self, connection: Connection, address: str) -> Refused | None:
        """Counts a connection in, or says why not."""
        bounds = self.bounds
        if self.is_ending or len(self.connections) >= bounds.connections:
            detail = f"{bounds.connections} connections are open, which is all that there may be"
            return Reason.TOO_MANY_CONNECTIONS, TooManyConnections(detail)
        network = network_of(address)
        count = self._by_network.get(network, 0)
        if network and count >= bounds.connections_per_address:
            detail = f"{network} has {count} connections open, which is all that one address may have"
            return Reason.TOO_MANY_FROM_ADDRESS, TooManyConnections(detail)
        self._by_network[network] = count + 1
        self.connections.add(connection)
        return None

    def leave(self, connection: Connection, address: str) -> None:
        self.turned_away.discard(connection)
        if connection in self.connections:
            self.connections.remove(connection)
            network = network_of(address)
            self._by_network[network] -= 1
            if not self._by_network[network]:
                del self._by_network[network]
        self._look_for_quiet()

    def attend(self, task: asyncio.Task[None]) -> None:
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        if self.is_closed:  # the app itself did that
            task.cancel()

    async def empty(self) -> None:
        """Admits nobody any more, and returns when nobody is left: requests that have begun are answered."""
        self.is_ending = True
        self.quiet = asyncio.Event()
        for connection in list(self.connections):
            connection.finish()
        self._look_for_quiet()
        await self.quiet.wait()

    def close(self) -> None:
        """At once: every connection is cut, every app cancelled."""
        self.is_ending = self.is_closed = True
        for connection in (*self.connections, *self.turned_away):
            connection.abort()
        for task in list(self.tasks):
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self._look_for_quiet()

    def _look_for_quiet(self) -> None:
        if self.quiet is not None and not self.connections and not self.tasks:
            self.quiet.set()


def network_of(address: str) -> str:
    """What counts as one client: an IPv4 address, or a /64 of IPv6, since one host may use all addresses of that."""
    if ":" not in address:
        return address
    given = ipaddress.IPv6Address(address)
    if given.ipv4_mapped is not None:
        return str(given.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(given) >> 64 << 64, 64)))
