"""The forward proxy of one sandbox: it listens inside, and connects outside to the hosts that the task lists.

Its listener is in the sandbox's own network namespace, so the socket identifies the sandbox. A connection carries one
request: CONNECT for TLS (`tunnel.py`) or a plain HTTP request in absolute form (`plain.py`). A redirect is the
client's next request.

Invariants. No connection is made and no name is looked up before the request has been allowed. `ProxyBounds` limits
connections, heads, times and bytes; a sandbox can only exhaust its own. The ledger records the verdict on each
connection. `close` ends all connections at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

import h11

from rollyard.core.exception_groups import first_error
from rollyard.sandbox.egress.base import EGRESS_PORT, Egress, Refused
from rollyard.sandbox.egress.gate import EgressGate, split_authority
from rollyard.sandbox.egress.plain import Lines, check_request, check_target, exchange
from rollyard.sandbox.egress.streams import CHUNK, ProxyConnection
from rollyard.sandbox.egress.tunnel import open_tunnel

log = logging.getLogger("rollyard.egress")

BACKLOG = 16
LINGER_S = 1.0
"""How long to read from a refused client that is still sending: if closed at once, it would not receive the answer."""

_NOT_ME = b"\x15\x03\x01\x00\x02\x02\x70"
"""The TLS alert unrecognized_name, which a client that waits for a ServerHello can report."""


class EgressProxy:
    """The egress proxy of one sandbox. The runtime creates it; `owner` is for the log."""

    def __init__(self, sock: socket.socket, egress: Egress, *, owner: str = "") -> None:
        self._sock, self.egress, self._owner = sock, egress, owner
        self._gate = EgressGate(egress)
        self._server: asyncio.Server | None = None
        self._links: dict[asyncio.Task[None], ProxyConnection] = {}
        self._is_closed = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{EGRESS_PORT}"

    async def serve(self) -> None:
        self._sock.setblocking(False)
        server = await asyncio.start_server(self._connected, sock=self._sock, limit=CHUNK, backlog=BACKLOG)
        if self._is_closed:  # during the await
            server.close()
            return
        self._server = server

    def close(self) -> None:
        """Closes the listener and all connections at once. Idempotent."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
            self._server = None
        else:
            self._sock.close()
        for task, link in list(self._links.items()):
            link.abort()
            task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = ProxyConnection(reader, writer, self.egress.bounds, self.egress.ledger, self._owner)
        task = asyncio.current_task()
        assert task is not None
        most, now = self.egress.bounds.connections, len(self._links)
        if self._is_closed or now >= 2 * most:  # as many again are being refused already
            link.abort()
            return
        self._links[task] = link
        try:
            await self._serve(link, is_full=now >= most)
        except asyncio.CancelledError:
            link.abort()
        finally:
            del self._links[task]

    async def _serve(self, link: ProxyConnection, *, is_full: bool) -> None:
        """Serves one connection and handles its errors."""
        try:
            if is_full:
                raise Refused("connections", f"{link.bounds.connections} connections are open already", 503)
            await self._answer(link)
        except* Refused as group:
            await _refuse(link, first_error(group))
        except* h11.ProtocolError:
            await _refuse(link, Refused("request", "the request is not HTTP/1.1", 400))
        except* OSError:
            pass  # one end disconnected
        finally:
            await link.close()

    async def _answer(self, link: ProxyConnection) -> None:
        client = h11.Connection(h11.SERVER, max_incomplete_event_size=link.bounds.head_bytes)
        request = await _head(link, client)
        if request.method == b"CONNECT":
            link.host, link.port = split_authority(request.target.decode("latin-1"))
            self._gate.check(link.host, link.port)
            addresses = await self._addresses(link)
            early, _ = client.trailing_data
            await open_tunnel(link, link.host, link.port, addresses, early)
        else:
            link.host, link.port, path = check_target(request)
            check_request(request, self._gate, link.host, link.port)
            await link.connect(await self._addresses(link), link.port)
            await exchange(link, client, request, link.host, link.port, path)

    async def _addresses(self, link: ProxyConnection) -> list[str]:
        link.spend()  # refuses if the byte limit is already used up
        return await self._gate.addresses(link.host, link.port)


async def _head(link: ProxyConnection, client: h11.Connection) -> h11.Request:
    lines = Lines(link.bounds)
    try:
        async with asyncio.timeout(link.bounds.head_s):
            while (event := client.next_event()) is h11.NEED_DATA:
                data = await link.reader.read(link.bounds.head_bytes)
                lines.count(data)
                client.receive_data(data)
    except TimeoutError:
        raise Refused("request", "no complete request arrived in time", 408) from None
    except h11.RemoteProtocolError as error:
        raise Refused("request", f"this is not HTTP/1.1: {error}", error.error_status_hint) from None
    if not isinstance(event, h11.Request):
        raise ConnectionResetError("the client disconnected without a request")
    if event.http_version not in (b"1.0", b"1.1"):
        raise Refused("request", "HTTP/1.1 was expected", 505)
    return event


async def _refuse(link: ProxyConnection, refused: Refused) -> None:
    """Records the refusal, and reports it to the client if that is still possible."""
    link.record(refused.verdict, refused.detail)
    if link.outside is not None:
        link.outside[1].transport.abort()
    if link.is_tls:
        link.writer.write(_NOT_ME)
    elif not link.is_answered:
        text = f"Rollyard's proxy: {refused.detail}\n".encode("utf-8", "replace")
        head = (
            f"HTTP/1.1 {refused.status} Refused\r\nContent-Type: text/plain; charset=utf-8\r\n"
            f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        )
        link.writer.write(head.encode() + text)
    else:
        return  # part of an answer has been sent: only close the connection
    with contextlib.suppress(OSError, TimeoutError, RuntimeError):
        link.writer.write_eof()
        async with asyncio.timeout(LINGER_S):
            while await link.reader.read(CHUNK):
                pass
