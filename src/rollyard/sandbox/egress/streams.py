"""One connection of the proxy: its two ends, the bytes transferred, and its limits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence

from rollyard.core.egress import is_address
from rollyard.sandbox.egress.base import ProxyBounds, Refused
from rollyard.sandbox.egress.ledger import ALLOWED, EgressEntry, EgressLedger

log = logging.getLogger("rollyard.egress")

CHUNK = 32 << 10
"""Bytes per read. A connection buffers at most eight chunks, in both directions together."""

MOST_TRIES = 4  # addresses of one host


class ProxyConnection:
    """A client inside and, once connected, a host outside. `ledger` counts every byte between them."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        bounds: ProxyBounds,
        ledger: EgressLedger,
        owner: str = "",
    ) -> None:
        self.reader, self.writer, self.bounds, self.ledger = reader, writer, bounds, ledger
        self.host, self.port, self._owner = "", 0, owner  # host and port that the client requested
        self.outside: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.entry: EgressEntry | None = None
        self.is_answered = False  # part of an answer has been sent to the client
        self.is_tls = False  # the client now expects TLS, not HTTP
        self._moved_at = asyncio.get_running_loop().time()

    async def connect(self, addresses: Sequence[str], port: int) -> None:
        """Connects to one of these addresses. Raises Refused if all fail."""
        tried, last = addresses[:MOST_TRIES], "it has no address"
        for address in tried:
            try:
                async with asyncio.timeout(self.bounds.connect_s / len(tried)):
                    self.outside = await _connected(address, port)
                self.entry = self.record(ALLOWED, address)
                return
            except TimeoutError:
                last = "it did not answer in time"
            except OSError as error:
                last = str(error)
        raise Refused("connect", f"cannot connect to the host: {last}", 502)

    def record(self, verdict: str, detail: str) -> EgressEntry:
        """Records the verdict. Logs the first of each kind, so the log is bounded as the ledger is."""
        entry, is_new = self.ledger.enter(self.host, self.port, verdict)
        if is_new:
            fields = {"rollout": self._owner, "host": self.host, "port": self.port, "verdict": verdict}
            log.info("egress", extra={**fields, "detail": detail[:200]})
        self._moved_at = asyncio.get_running_loop().time()
        return entry

    def spend(self, *, sent: int = 0, received: int = 0) -> None:
        """Counts bytes before they are forwarded. Raises Refused when the attempt has reached its byte limit."""
        total = self.ledger.total_bytes + sent + received
        if total > self.bounds.most_bytes or (total == self.bounds.most_bytes and not sent + received):
            raise Refused("bytes", f"this rollout has reached its limit of {self.bounds.most_bytes} bytes")
        self.ledger.add(self.entry, sent=sent, received=received)
        self._moved_at = asyncio.get_running_loop().time()

    async def watch_idle(self) -> None:
        """Raises Refused when no data has been transferred in either direction for `idle_s`."""
        loop = asyncio.get_running_loop()
        while (remaining_s := self._moved_at + self.bounds.idle_s - loop.time()) > 0:
            await asyncio.sleep(remaining_s)
        raise Refused("idle", f"no data was transferred for {self.bounds.idle_s:g} s", 504)

    def abort(self) -> None:
        """Closes both ends at once: an open connection would keep the sandbox's network namespace."""
        self.writer.transport.abort()
        if self.outside is not None:
            self.outside[1].transport.abort()

    async def close(self) -> None:
        """Closes both ends. Data already written is still delivered if the peer reads it within a second."""
        for writer in (self.writer, *(self.outside[1:] if self.outside else ())):
            with contextlib.suppress(OSError, TimeoutError, RuntimeError):
                async with asyncio.timeout(1.0):
                    writer.close()
                    await writer.wait_closed()
        self.abort()


async def _connected(address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to an address that was checked; raises OSError for a name, since it must not look one up."""
    if not is_address(address):
        raise OSError(f"{address} is not an address")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, (address, port))
        return await asyncio.open_connection(sock=sock, limit=CHUNK)
    except BaseException:
        sock.close()
        raise
