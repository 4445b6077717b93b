"""CONNECT: opens a tunnel to the requested host, once the client's TLS names the same host.

The client receives a 200 and sends its ClientHello. The proxy connects only after the ClientHello has named the host.
Everything after it is TLS between client and host: the proxy reads neither the certificate nor the requests inside.
"""

from __future__ import annotations

import asyncio

from rollyard.core.egress import host_of, is_address
from rollyard.sandbox.egress.base import Refused
from rollyard.sandbox.egress.hello import NotTls, complete_hello, server_name
from rollyard.sandbox.egress.streams import CHUNK, ProxyConnection

ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"


async def open_tunnel(link: ProxyConnection, host: str, port: int, addresses: list[str], early: bytes) -> None:
    """Serves a tunnel until both ends close. `early` is data that the client sent with its request."""
    link.is_answered = link.is_tls = True
    link.writer.write(ESTABLISHED)
    data = await _hello(link, host, early)
    await link.connect(addresses, port)
    assert link.outside is not None
    reader, writer = link.outside
    link.spend(sent=len(data))
    writer.write(data)
    async with asyncio.TaskGroup() as group:
        idle = group.create_task(link.watch_idle())
        ways = [
            group.create_task(_copy(link, link.reader, writer, is_outward=True)),
            group.create_task(_copy(link, reader, link.writer, is_outward=False)),
        ]
        await asyncio.wait(ways)
        idle.cancel()


async def _hello(link: ProxyConnection, host: str, data: bytes) -> bytes:
    """Reads a ClientHello that names `host`, and returns all bytes that the client has sent so far."""
    try:
        async with asyncio.timeout(link.bounds.head_s):
            while (hello := complete_hello(data)) is None:
                more = await link.reader.read(CHUNK)
                if not more:
                    raise Refused("tls", "the client closed the connection before its ClientHello was complete")
                data += more
        name = server_name(hello)
    except NotTls as error:
        raise Refused("tls", f"a tunnel is for TLS only: {error}") from None
    except TimeoutError:
        raise Refused("tls", "no ClientHello arrived in time", 408) from None
    if is_address(host):
        if name is not None:
            raise Refused("sni", f"CONNECT was to the address {host}, but the ClientHello names {name[:100]!r}")
        return data
    if name is None:
        raise Refused("sni", f"CONNECT was to {host}, but the ClientHello names no host")
    try:
        is_same = host_of(name) == host
    except ValueError:
        is_same = False
    if not is_same:
        raise Refused("sni", f"CONNECT was to {host}, but the ClientHello names {name[:100]!r}")
    return data


async def _copy(
    link: ProxyConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_outward: bool
) -> None:
    """Copies one direction to its end, then sends EOF to the other side."""
    try:
        while data := await reader.read(CHUNK):
            link.spend(**{"sent" if is_outward else "received": len(data)})
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:  # one end disconnected; the other must not wait for it
        link.abort()
