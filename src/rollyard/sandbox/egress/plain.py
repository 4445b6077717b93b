"""Forwards plain HTTP: one request in absolute form, to the host that both its target and its Host header name.

h11 parses the heads of request and answer, and they are written again, so the server receives exactly what was
checked: one request, with one body length. Headers that could select another host are dropped. The connection ends
with the answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable

import h11
import httptools

from rollyard.sandbox.egress.base import ProxyBounds, Refused
from rollyard.sandbox.egress.gate import EgressGate, split_authority
from rollyard.sandbox.egress.streams import CHUNK, ProxyConnection

_TARGET = re.compile(r"http://([^/?#\\@\s]+)(/[\x21\x22\x24-\x5b\x5d-\x7e]*)?", re.ASCII | re.IGNORECASE)
_WEB_PORT = 80

_DROPPED = frozenset(
    b"connection keep-alive te trailer transfer-encoding upgrade http2-settings expect host forwarded via x-host"
    b" x-rewrite-url x-http-host-override".split()
)
"""Hop-by-hop headers, and headers that some servers use to override the host or the path."""
_DROPPED_PREFIX = (b"x-forwarded-", b"x-original-", b"proxy-")

Headers = list[tuple[bytes, bytes]]


def check_target(request: h11.Request) -> tuple[str, int, bytes]:
    """Returns host, port and path of a plain HTTP request. Raises Refused."""
    match = _TARGET.fullmatch(request.target.decode("latin-1"))
    if match is None:
        raise Refused("request", "a target of the form http://HOST/PATH was expected, or CONNECT HOST:PORT", 400)
    host, port = split_authority(match[1], _WEB_PORT)
    return host, port, (match[2] or "/").encode("ascii")


def check_request(request: h11.Request, gate: EgressGate, host: str, port: int) -> None:
    """Raises Refused unless the request may be sent to that host."""
    gate.check(host, port)
    names = [value for name, value in request.headers if name == b"host"]
    if len(names) != 1 or split_authority(names[0].decode("latin-1"), _WEB_PORT) != (host, port):
        raise Refused("request", f"the Host header does not name {host}:{port}, but the target does", 400)
    gate.check_method(request.method.decode("ascii"))
    header_names = {name for name, _ in request.headers}
    if b"upgrade" in header_names or b"http2-settings" in header_names:
        raise Refused("upgrade", "a connection stays HTTP/1.1: Upgrade is not allowed", 403)
    lengths = sum(name in (b"content-length", b"transfer-encoding") for name, _ in request.headers)
    if lengths > 1:
        raise Refused("request", "a request with both a length and a transfer coding is not forwarded", 400)


async def exchange(
    link: ProxyConnection, client: h11.Connection, request: h11.Request, host: str, port: int, path: bytes
) -> None:
    """Forwards one request and its answer. The link is connected."""
    assert link.outside is not None
    shown = f"[{host}]" if ":" in host else host
    authority = shown if port == _WEB_PORT else f"{shown}:{port}"
    headers: Headers = [(b"Host", authority.encode()), *_passed(request.headers), (b"Connection", b"close")]
    framing = Framing.of(request.headers, default_bytes=0)
    if framing.is_chunked:
        headers.append((b"Transfer-Encoding", b"chunked"))
    server = h11.Connection(h11.CLIENT, max_incomplete_event_size=link.bounds.answer_head_bytes)
    head = server.send(h11.Request(method=request.method, target=path, headers=headers)) or b""
    link.spend(sent=len(head))
    link.outside[1].write(head)
    if client.they_are_waiting_for_100_continue:
        link.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    async with asyncio.TaskGroup() as group:
        idle = group.create_task(link.watch_idle())
        body = group.create_task(_send_body(link, framing, client.trailing_data[0]))
        answer = group.create_task(_answer(link, server, request))
        await asyncio.wait([answer])
        idle.cancel()
        body.cancel()


async def _send_body(link: ProxyConnection, framing: Framing, data: bytes) -> None:
    """Sends exactly the body; data after it is dropped. Chunks are framed again."""
    assert link.outside is not None
    writer = link.outside[1]
    while True:
        try:
            part = framing.take(data)
        except BrokenChunk as error:
            raise Refused("request", str(error), 400) from None
        if part:
            part = b"%x\r\n%s\r\n" % (len(part), part) if framing.is_chunked else part
            link.spend(sent=len(part))
            writer.write(part)
            await writer.drain()
        if framing.is_done:
            break
        data = await link.reader.read(CHUNK)
        if not data:
            raise Refused("request", "the client disconnected during its request", 400)
    if framing.is_chunked:
        writer.write(b"0\r\n\r\n")


async def _answer(link: ProxyConnection, server: h11.Connection, request: h11.Request) -> None:
    """Writes the answer's head again and copies its body unchanged, up to its end."""
    response = await _answer_head(link, server)
    headers = _passed(response.headers)
    has_body = request.method != b"HEAD" and response.status_code not in (204, 304)
    framing = Framing.of(response.headers, default_bytes=None if has_body else 0)
    if framing.is_chunked:
        if request.http_version == b"1.0":
            raise Refused("connect", "the host sent a chunked answer, which HTTP/1.0 does not support", 502)
        headers.append((b"Transfer-Encoding", b"chunked"))
    if not has_body:
        framing = Framing(0)
    link.is_answered = True
    lines = [b"HTTP/1.1 %d %s" % (response.status_code, response.reason)]
    lines += [b"%s: %s" % header for header in (*headers, (b"Connection", b"close"))]
    link.writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
    assert link.outside is not None
    data, _ = server.trailing_data
    while True:
        try:
            taken = framing.take(data)
        except BrokenChunk as error:
            raise Refused("connect", f"the host's answer: {error}", 502) from None
        link.writer.write(data if framing.is_chunked else taken)
        await link.writer.drain()
        if framing.is_done:
            return
        data = await link.outside[0].read(CHUNK)
        if not data:
            return
        link.spend(received=len(data))


async def _answer_head(link: ProxyConnection, server: h11.Connection) -> h11.Response:
    assert link.outside is not None
    lines = Lines(link.bounds)
    try:
        while not isinstance(event := server.next_event(), h11.Response):
            if event is h11.NEED_DATA:
                data = await link.outside[0].read(CHUNK)
                link.spend(received=len(data))
                lines.count(data)
                server.receive_data(data)
            elif not isinstance(event, h11.InformationalResponse):
                raise Refused("connect", "the host closed the connection before its answer was complete", 502)
    except h11.RemoteProtocolError as error:
        raise Refused("connect", f"the host's answer is not HTTP/1.1: {error}", 502) from None
    return event


class BrokenChunk(ValueError):
    """Raised if a chunked body is malformed."""


class Framing:
    """Finds the end of a body: after `left_bytes`, after its last chunk, or (None) at the end of the connection."""

    def __init__(self, remaining_bytes: int | None, *, is_chunked: bool = False) -> None:
        self._remaining_bytes = remaining_bytes
        self.is_chunked = is_chunked
        self.is_done = remaining_bytes == 0 and not is_chunked
        self._decoded = bytearray()
        if is_chunked:  # parsed by llhttp: with chunks of one byte, h11 is a thousand times slower
            self._parser = httptools.HttpRequestParser(self)
            self._parser.feed_data(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")

    @classmethod
    def of(cls, headers: Iterable[tuple[bytes, bytes]], *, default_bytes: int | None) -> Framing:
        """Returns the framing that these headers declare. h11 has validated them."""
        fields = dict(headers)
        if b"transfer-encoding" in fields:
            return cls(None, is_chunked=True)
        return cls(int(fields[b"content-length"]) if b"content-length" in fields else default_bytes)

    def take(self, data: bytes) -> bytes:
        """Returns the part of these bytes that belongs to the body, without chunk framing. Raises BrokenChunk."""
        if self.is_chunked:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError as error:
                if not self.is_done:
                    raise BrokenChunk(f"a chunk is malformed: {error}") from None
            part, self._decoded = bytes(self._decoded), bytearray()
            return part
        if self._remaining_bytes is None:
            return data
        part = data[: self._remaining_bytes]
        self._remaining_bytes -= len(part)
        self.is_done = self._remaining_bytes == 0
        return part

    def on_body(self, body: bytes) -> None:
        if not self.is_done:
            self._decoded += body

    def on_message_complete(self) -> None:
        self.is_done = True


class Lines:
    """Limits the lines of a head before it is parsed: parsing thousands of short lines costs more than their bytes."""

    def __init__(self, bounds: ProxyBounds) -> None:
        self._remaining_lines = bounds.head_lines

    def count(self, data: bytes) -> None:
        head, _, _ = data.partition(b"\r\n\r\n")
        self._remaining_lines -= head.count(b"\n")
        if self._remaining_lines < 0:
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
