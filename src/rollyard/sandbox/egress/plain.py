"""Plain HTTP: one request in absolute form, to the host that both its target and its Host header name.

Both sides are parsed and written anew by h11, so a server sees exactly what was checked: one request, with a body of
one length. Headers that could change who is meant are left out, and the connection ends with the answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable

import h11

from rollyard.sandbox.egress.base import Bounds, Refused
from rollyard.sandbox.egress.gate import Gate, split_authority
from rollyard.sandbox.egress.streams import CHUNK, Link

_TARGET = re.compile(r"http://([^/?#\\@\s]+)(/[\x21\x22\x24-\x5b\x5d-\x7e]*)?", re.ASCII | re.IGNORECASE)
_WEB_PORT = 80
_EVENTS_A_TURN = 64
"""Parts of a body that are handled before others get their turn on the loop: chunks may be one byte each."""

_DROPPED = frozenset(
    b"connection keep-alive te trailer transfer-encoding upgrade http2-settings expect host forwarded via x-host"
    b" x-rewrite-url x-http-host-override".split()
)
"""Of one connection only, or such as some servers take for the host or the path that is meant."""
_DROPPED_PREFIX = (b"x-forwarded-", b"x-original-", b"proxy-")

Headers = list[tuple[bytes, bytes]]


def check_target(request: h11.Request) -> tuple[str, int, bytes]:
    """Host, port and path of a request for plain HTTP. Refused."""
    match = _TARGET.fullmatch(request.target.decode("latin-1"))
    if match is None:
        raise Refused("request", "a target of the form http://HOST/PATH was expected, or CONNECT HOST:PORT", 400)
    host, port = split_authority(match[1], _WEB_PORT)
    return host, port, (match[2] or "/").encode("ascii")


def check_request(request: h11.Request, gate: Gate, host: str, port: int) -> None:
    """Refused unless it may go to that host."""
    gate.check(host, port)
    names = [value for name, value in request.headers if name == b"host"]
    if len(names) != 1 or split_authority(names[0].decode("latin-1"), _WEB_PORT) != (host, port):
        raise Refused("request", f"the Host header does not name {host}:{port}, as the target does", 400)
    gate.check_method(request.method.decode("ascii"))
    found = {name for name, _ in request.headers}
    if b"upgrade" in found or b"http2-settings" in found:
        raise Refused("upgrade", "a connection stays HTTP/1.1: Upgrade is not allowed", 403)
    lengths = sum(name in (b"content-length", b"transfer-encoding") for name, _ in request.headers)
    if lengths > 1:
        raise Refused("request", "a request with both a length and a transfer coding is not passed on", 400)


async def exchange(link: Link, client: h11.Connection, request: h11.Request, host: str, port: int, path: bytes) -> None:
    """Passes on one request and its answer. The link is connected."""
    assert link.outside is not None
    server = h11.Connection(h11.CLIENT, max_incomplete_event_size=link.bounds.answer_head_bytes)
    shown = f"[{host}]" if ":" in host else host
    authority = shown if port == _WEB_PORT else f"{shown}:{port}"
    headers: Headers = [(b"Host", authority.encode()), *_passed(request.headers), (b"Connection", b"close")]
    if any(name == b"transfer-encoding" for name, _ in request.headers):
        headers.append((b"Transfer-Encoding", b"chunked"))
    _write_outside(link, server, h11.Request(method=request.method, target=path, headers=headers))
    async with asyncio.TaskGroup() as group:
        idle = group.create_task(link.watch_idle())
        body = group.create_task(_send_body(link, client, server))
        answer = group.create_task(_answer(link, client, server))
        await asyncio.wait([answer])
        idle.cancel()
        body.cancel()


async def _send_body(link: Link, client: h11.Connection, server: h11.Connection) -> None:
    assert link.outside is not None
    count = 0
    while True:
        event = client.next_event()
        if event is h11.NEED_DATA:
            if client.they_are_waiting_for_100_continue:
                link.writer.write(_bytes(client, h11.InformationalResponse(status_code=100, headers=[])))
            client.receive_data(await link.reader.read(CHUNK))
        elif isinstance(event, h11.Data):
            _write_outside(link, server, h11.Data(data=bytes(event.data)))
            await link.outside[1].drain()
        elif isinstance(event, h11.EndOfMessage):
            _write_outside(link, server, h11.EndOfMessage())
            return
        else:
            raise Refused("request", "the client went away in its request", 400)
        count += 1
        if count % _EVENTS_A_TURN == 0:
            await asyncio.sleep(0)


async def _answer(link: Link, client: h11.Connection, server: h11.Connection) -> None:
    assert link.outside is not None
    lines = Lines(link.bounds)
    count = 0
    while True:
        try:
            event = server.next_event()
        except h11.RemoteProtocolError as error:
            raise Refused("connect", f"the host's answer is not HTTP/1.1: {error}", 502) from None
        if event is h11.NEED_DATA:
            data = await link.outside[0].read(CHUNK)
            link.spend(received=len(data))
            if not link.is_answered:
                lines.count(data)
            server.receive_data(data)
        elif isinstance(event, h11.Response):
            link.is_answered = True
            headers: Headers = [*_passed(event.headers), (b"Connection", b"close")]
            answer = h11.Response(status_code=event.status_code, reason=event.reason, headers=headers)
            link.writer.write(_bytes(client, answer))
        elif isinstance(event, h11.Data):
            link.writer.write(_bytes(client, h11.Data(data=bytes(event.data))))
            await link.writer.drain()
        elif isinstance(event, h11.EndOfMessage):
            link.writer.write(_bytes(client, h11.EndOfMessage()))
            await link.writer.drain()
            return
        elif not isinstance(event, h11.InformationalResponse):
            raise Refused("connect", "the host ended before its answer did", 502)
        count += 1
        if count % _EVENTS_A_TURN == 0:
            await asyncio.sleep(0)


class Lines:
    """Counts the lines of a head before it is parsed: thousands of short ones cost more than their bytes."""

    def __init__(self, bounds: Bounds) -> None:
        self._left = bounds.head_lines

    def count(self, data: bytes) -> None:
        head, _, _ = data.partition(b"\r\n\r\n")
        self._left -= head.count(b"\n")
        if self._left < 0:
            raise Refused("request", "too many header lines", 431)


def _passed(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    named = {word.strip().lower() for name, value in headers if name == b"connection" for word in value.split(b",")} - {
        b"content-length"
    }
    return [
        (name, value)
        for name, value in headers
        if name not in _DROPPED and name not in named and not name.startswith(_DROPPED_PREFIX)
    ]


def _write_outside(link: Link, server: h11.Connection, event: h11.Request | h11.Data | h11.EndOfMessage) -> None:
    assert link.outside is not None
    data = _bytes(server, event)
    link.spend(sent=len(data))
    link.outside[1].write(data)


def _bytes(connection: h11.Connection, event: h11.Event) -> bytes:
    return connection.send(event) or b""
