"""HTTP/1.1 for whoever is inside a sandbox: one connection, its requests one after another.

Written for clients that mean harm. Everything that a client can make grow is counted; each phase of a connection
(idle, headers, body) has one timer, set when the phase begins and by nothing that the client sends later. A request
that comes before the answer to the one before it is not answered: the connection closes after that answer, which
HTTP allows, and there is no queue to fill. A client that does not read its answers gets no further ones. WebSockets
and other upgrades are not offered; such a request is an ordinary one.
"""

from __future__ import annotations

import asyncio
import http
import urllib.parse
from dataclasses import dataclass
from typing import Any, Literal, cast

import httptools

from rollyard.core.deadline import Patience
from rollyard.core.eager import start_now
from rollyard.sandbox._exchange import AsgiApp, Exchange

HIGH_WATER_BYTES = 64 << 10
"""Of a body that the app has not read yet; beyond it we stop reading."""

LINGER_S = 2.0
"""How long a refused client may still send before the connection is cut: closed at once, the refusal would be lost."""

Phase = Literal["idle", "headers", "body", "answer", "refused"]


@dataclass(frozen=True, slots=True)
class DoorwayLimits:
    """What one sandbox may take of its server. One that holds connections filled 1,024 descriptors in 10 s."""

    connections: int = 16  # one more is closed at once; the others do not notice
    header_bytes: int = 32 << 10  # of one request; beyond: 431
    header_s: float = 10.0  # from a request's first byte to the end of its headers; beyond: 408
    idle_s: float = 75.0  # a connection on which nothing has begun is closed
    body_bytes: int = 16 << 20  # of one request, however it is framed; beyond: 413
    body_s: float = 60.0  # for the body to come, not counting while the app does not read; beyond: 408


class Desk:
    """What the connections of one doorway share: the app, the bounds, and who is there."""

    __slots__ = ("app", "connections", "is_closed", "limits", "owner", "tasks")

    def __init__(self, app: AsgiApp, limits: DoorwayLimits, owner: str) -> None:
        self.app = app
        self.limits = limits
        self.owner = owner
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True
        for connection in list(self.connections):
            connection.abort()
        for task in list(self.tasks):
            task.cancel()


class Connection(asyncio.Protocol):
    """See the module. The parser calls the `on_…` methods."""

    def __init__(self, desk: Desk, loop: asyncio.AbstractEventLoop) -> None:
        self._desk = desk
        self._loop = loop
        self._parser: Any = None
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._phase: Phase = "idle"
        self._patience = Patience(loop, self._too_slow)
        self._is_last = False  # nothing more is read as a request
        self._is_paused = False
        self._is_to_start = False  # a request whose app has not been called yet
        self._writable: asyncio.Future[None] | None = None  # somebody waits for room to write
        self._raw_bytes = 0  # of this phase, framing included
        self._begin()

    def _begin(self) -> None:
        self._url = bytearray()
        self._headers: list[tuple[bytes, bytes]] = []
        self._header_bytes = 0
        self._body_bytes = 0

    # --- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = self._transport = cast("asyncio.Transport", transport)  # uvloop's own is no subclass
        if self._desk.is_closed or len(self._desk.connections) >= self._desk.limits.connections:
            self._is_last = True
            transport.abort()
            return
        self._desk.connections.add(self)
        self._parser = httptools.HttpRequestParser(self)
        self._enter("idle", self._desk.limits.idle_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._desk.connections.discard(self)
        self._patience.end()
        self._is_last = True
        self.resume_writing()
        if self._exchange is not None:
            self._exchange.disconnect()
        self._parser = self._transport = None  # the parser and this hold each other

    def data_received(self, data: bytes) -> None:
        if self._is_last:
            return
        if self._phase in ("idle", "headers", "body"):
            self._raw_bytes += len(data)
        while data and not self._is_last:
            try:
                self._parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_upgrade() + data[upgrade.args[0] :]
            except httptools.HttpParserError:
                if self._phase != "answer" or self._exchange is None:
                    self._refuse(400)
                    return
                self._is_last = self._exchange.is_last = True  # noise behind a good request: answer that one
        limits = self._desk.limits
        if self._phase in ("idle", "headers") and self._raw_bytes > limits.header_bytes:
            self._refuse(431)
        elif self._phase == "body" and self._raw_bytes > 8 * self._body_bytes + limits.header_bytes:
            self._refuse(400)  # more framing than body: chunk extensions or trailers without end
        if self._is_to_start:
            self._start()

    def _start(self) -> None:
        """Outside of the parser, and with as much of the body as came along: mostly all of it."""
        self._is_to_start = False
        if self._exchange is not None and self._exchange.is_wanted:
            task = self._exchange.task = start_now(self._exchange.run(self._desk.app, self._desk.owner))
            self._desk.tasks.add(task)
            task.add_done_callback(self._desk.tasks.discard)
            if self._desk.is_closed:  # the app itself did that
                task.cancel()

    def _without_upgrade(self) -> bytes:
        """The request's head as it would be without the offer, for a parser that does not wait for its acceptance."""
        line = b"%s %s HTTP/1.1\r\n" % (self._parser.get_method(), self._url)
        kept = ((name, value) for name, value in self._headers if name not in (b"connection", b"upgrade"))
        self._parser = httptools.HttpRequestParser(self)
        return line + b"".join(b"%s: %s\r\n" % header for header in kept) + b"\r\n"

    def eof_received(self) -> bool:
        return False  # half a connection is none: the transport closes

    def pause_writing(self) -> None:
        self._writable = self._writable or self._loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None
        if self._exchange is not None and self._exchange.is_complete:
            self._resume()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- phases

    def _enter(self, phase: Phase, bound_s: float | None) -> None:
        self._phase = phase
        self._raw_bytes = 0
        self._patience.set(bound_s)

    def _too_slow(self) -> None:
        if self._phase == "headers":
            self._refuse(408)
        elif self._phase != "body":
            self.abort()
        elif self._is_paused:  # it is the app that does not read
            self._patience.set(self._desk.limits.body_s)
        else:
            self._refuse(408)

    def _refuse(self, status: int) -> None:
        """Answers by itself, if nothing of an answer has gone out, and has done with this client."""
        exchange, self._is_last = self._exchange, True
        if self._transport is None or (exchange is not None and not exchange.stop()):
            self.abort()
            return
        phrase = http.HTTPStatus(status).phrase.encode()
        head = b"HTTP/1.1 %d %s\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
        self._transport.write(head % (status, phrase, len(phrase), phrase))
        self._resume()
        self._transport.write_eof()
        self._enter("refused", LINGER_S)  # reads on, into nothing, until the client closes or its time is over

    # --- the parser's side

    def on_message_begin(self) -> None:
        if self._exchange is not None and not self._exchange.is_complete:
            self._is_last = self._exchange.is_last = True  # pipelined: see the module
        if self._is_last:
            return
        self._begin()
        raw_bytes = self._raw_bytes  # of the chunk that is being parsed
        self._enter("headers", self._desk.limits.header_s)
        self._raw_bytes = raw_bytes

    def on_url(self, url: bytes) -> None:
        if not self._is_last:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_last or self._phase != "headers":  # a trailer tells us nothing
            return
        self._header_bytes += len(name) + len(value) + 4
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._is_last:
            return
        if self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT":
            return  # it comes again without that
        limits = self._desk.limits
        if self._header_bytes + len(self._url) > limits.header_bytes:
            self._refuse(431)
            return
        if self._parser.get_method() == b"CONNECT":
            self._refuse(405)
            return
        try:
            url = httptools.parse_url(bytes(self._url))
            raw_path = url.path or b"/"
            path = urllib.parse.unquote(raw_path.decode("ascii"))
        except (httptools.HttpParserError, UnicodeDecodeError):
            self._refuse(400)
            return
        announced = next((value for name, value in self._headers if name == b"content-length"), b"0")
        if int(announced) > limits.body_bytes:  # the parser has seen to it that it is a number
            self._refuse(413)
            return
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self._parser.get_http_version(),
            "method": self._parser.get_method().decode("ascii"),
            "scheme": "http",
            "path": path,
            "raw_path": raw_path,
            "query_string": url.query or b"",
            "root_path": "",
            "headers": self._headers,
            "client": None,  # every sandbox has the same address: it says nothing
            "server": None,
        }
        self._enter("body", limits.body_s)
        assert self._transport is not None
        self._exchange = Exchange(self, self._transport, scope, is_last=not self._parser.should_keep_alive())
        self._is_to_start = True

    def on_body(self, body: bytes) -> None:
        if self._is_last or self._exchange is None:
            return
        self._body_bytes += len(body)
        if self._body_bytes > self._desk.limits.body_bytes:
            self._refuse(413)
        elif self._exchange.feed(body) > HIGH_WATER_BYTES:
            self._pause()

    def on_message_complete(self) -> None:
        if self._is_last or self._exchange is None or self._phase != "body":
            return
        self._enter("answer", None)
        self._exchange.feed_end()
        if self._exchange.is_complete:  # answered before all of the body was here
            self.answered()

    # --- the exchange's side

    def _pause(self) -> None:
        if not self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    @property
    def is_writable(self) -> bool:
        return self._writable is None

    def wants_body(self) -> None:
        self._resume()

    def answered(self) -> None:
        """The answer is complete; the next request may come once the body of this one is over, and once the client
        has taken most of what there is for it."""
        if self._writable is None:
            self._resume()
        else:
            self._pause()
        if self._exchange is not None and self._exchange.is_last:
            self._is_last = True
            if self._transport is None:
                return
            if self._phase == "body":  # closed at once, the answer would be lost: the client still sends
                self._transport.write_eof()
                self._enter("refused", LINGER_S)
            else:
                self._transport.close()
                self._enter("refused", self._desk.limits.idle_s)  # a client that reads nothing is not waited for
        elif self._phase == "answer":
            self._enter("idle", self._desk.limits.idle_s)

    async def drained(self) -> None:
        if self._writable is not None:
            await asyncio.shield(self._writable)
