"""An HTTP/1.1 client for engines: keep-alive connections, complete replies, and streams that are read as bytes arrive.

The other packages use aiohttp's client. For engine calls it was the largest part of the gateway's cost per completion,
and it wakes a task for each chunk of a stream. This client passes a chunk to its reader within the read that received
it. The parser is httptools. Compression, redirects, cookies and proxies are not supported, because engines need none.

Invariants. A connection carries one exchange at a time and is reused only after a complete reply that allows it. A
cancelled exchange closes its connection. Nothing is sent twice: an idle connection that the engine closes is noticed at
once and not reused; if the engine closes it just as a request is sent, the exchange fails and the session handles it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, cast
from urllib.parse import urlsplit

import httptools

from rollyard.core.deadline import ResettableTimeout
from rollyard.core.texts import os_reason
from rollyard.engines.base import Contact

CONNECT_S = 10.0
KEEPALIVE_S = 4.0  # below uvicorn's 5 s, so that this side, not the engine, closes an idle connection
DRAIN_S = 1.0  # to wait for the end of a reply whose reader is done; only then can its connection be reused

OnBody = Callable[[bytes], bool]
"""Receives a stream's bytes as they arrive; returns True when it needs no more. An exception ends the exchange."""


class HttpFailure(Exception):
    """The engine could not be reached, or its reply is not HTTP."""


class TooLarge(Exception):
    """A reply has more bytes than allowed."""


@dataclass(frozen=True, slots=True)
class Target:
    """The address of an engine."""

    host: str
    port: int
    is_tls: bool
    prefix: str  # of every path

    @classmethod
    def of(cls, url: str) -> Target:
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        return cls(parts.hostname or "", parts.port or (443 if is_tls else 80), is_tls, parts.path.rstrip("/"))

    @property
    def url(self) -> str:
        """Without a user's name and password."""
        return f"{'https' if self.is_tls else 'http'}://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class HttpReply:
    status: int
    content_type: str
    body: bytes  # empty for a stream, which goes to its reader


@dataclass(slots=True)
class _TargetState:
    """A target's contact counters and its number of open connections."""

    contact: Contact = field(default_factory=Contact)
    open: int = 0


class HttpPool:
    """The connections of one router. `async with` closes them on exit."""

    def __init__(self) -> None:
        self._idle: dict[Target, list[_Connection]] = {}
        self._all: set[_Connection] = set()
        self._known: dict[Target, _TargetState] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for connection in list(self._all):
            connection.abort()
        await asyncio.sleep(0)  # the transports close in the next iteration of the loop

    @property
    def idle(self) -> int:
        return sum(map(len, self._idle.values()))

    def contact(self, target: Target) -> Contact:
        return self._known[target].contact if target in self._known else Contact()

    async def request(self, target: Target, head: bytes, body: bytes, most: int, on_body: OnBody | None) -> HttpReply:
        """`head` is the complete head of the request. With `on_body`, an event stream is passed there as it arrives.
        Raises HttpFailure, TooLarge beyond `most` bytes, or what `on_body` raises."""
        connection = self._idle_connection(target) or await self._connect(target)
        return await connection.exchange(head, body, most, on_body)

    def _idle_connection(self, target: Target) -> _Connection | None:
        waiting = self._idle.get(target)
        while waiting:
            connection = waiting.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self, target: Target) -> _Connection:
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context() if target.is_tls else None
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self, target, loop), target.host, target.port, ssl=context
                )
        except TimeoutError:
            self._lost(target)
            raise HttpFailure(f"it did not accept a connection within {CONNECT_S:g} s") from None
        except (OSError, ssl.SSLError, ValueError, OverflowError) as error:  # the last two: not an address
            self._lost(target)
            why = os_reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise HttpFailure(why) from error
        self._all.add(connection)
        return connection

    # --- called by the connections

    def opened(self, target: Target) -> None:
        known = self._known.setdefault(target, _TargetState())
        known.contact = known.contact._replace(gaps=known.contact.gaps + (known.open == 0))
        known.open += 1

    def _lost(self, target: Target) -> None:
        known = self._known.setdefault(target, _TargetState())
        known.contact = known.contact._replace(losses=known.contact.losses + 1)

    def keep(self, connection: _Connection) -> None:
        self._idle.setdefault(connection.target, []).append(connection)

    def forget(self, connection: _Connection, *, is_closed_by_us: bool) -> None:
        if not is_closed_by_us:
            self._lost(connection.target)
        self._known[connection.target].open -= 1
        self._all.discard(connection)
        waiting = self._idle.get(connection.target)
        if waiting and connection in waiting:
            waiting.remove(connection)


class _Connection(asyncio.Protocol):
    """One connection, which carries one exchange after another. The parser calls the `on_…` methods."""

    def __init__(self, owner: HttpPool, target: Target, loop: asyncio.AbstractEventLoop) -> None:
        self.target = target
        self._owner = owner
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._waiter: asyncio.Future[HttpReply] | None = None
        self._patience = ResettableTimeout(loop, self.abort)
        self._is_in_use = False  # an exchange's reply is not complete
        self._is_aborted = False  # by this side
        self._begin(0, None)

    def _begin(self, most: int, on_body: OnBody | None) -> None:
        self._most, self._on_body = most, on_body
        self._body = bytearray()
        self._status = 0
        self._content_type = ""
        self._has_bytes = self._has_head = self._is_framed = self._is_stream = False

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, head: bytes, body: bytes, most: int, on_body: OnBody | None) -> HttpReply:
        if self._transport is None or self._transport.is_closing():
            raise HttpFailure("it closed the connection")
        self._patience.set(None)
        self._begin(most, on_body)
        self._parser = httptools.HttpResponseParser(self)
        self._is_in_use = True
        waiter = self._waiter = self._loop.create_future()
        self._transport.write(head + body)
        try:
            return await waiter
        except asyncio.CancelledError:
            self.abort()
            raise

    def abort(self) -> None:
        if self._transport is not None:
            self._is_aborted = self._is_aborted or not self._transport.is_closing()
            self._transport.abort()

    # --- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass
        self._owner.opened(self.target)

    def data_received(self, data: bytes) -> None:
        if not self._is_in_use:  # data without a request: the connection's state is unknown
            self.abort()
            return
        self._has_bytes = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._fail(HttpFailure(f"its reply is not HTTP: {error}"))

    def eof_received(self) -> bool:
        return False  # the transport closes itself

    def connection_lost(self, exc: Exception | None) -> None:
        self._patience.end()
        self._owner.forget(self, is_closed_by_us=self._is_aborted)
        self._transport = self._parser = None  # breaks the reference cycle with the parser
        if self._has_head and not self._is_framed and exc is None:  # the end of the connection ends such a reply
            self._end()
        else:
            why = f"{type(exc).__name__}: {exc}" if exc is not None else "it closed the connection"
            self._fail(HttpFailure(f"{why} in the middle of its reply" if self._has_bytes else why))

    # --- called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.lower()
        if key == b"content-type":
            self._content_type = value.decode("latin-1").partition(";")[0].strip().lower()
        elif key in (b"content-length", b"transfer-encoding"):
            self._is_framed = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._has_head = self._status >= 200  # 1xx replies precede the actual one
        self._is_framed = self._is_framed or self._status in (204, 304)
        is_stream = self._status < 300 and self._content_type == "text/event-stream"
        self._is_stream = is_stream and self._on_body is not None

    def on_body(self, body: bytes) -> None:
        if self._waiter is None:
            return  # the reader needs no more; the rest is only drained
        if self._is_stream and self._on_body is not None:
            if self._on_body(body):
                self._deliver()
                self._patience.set(DRAIN_S)
            return
        self._body += body
        if len(self._body) > self._most:
            raise TooLarge

    def on_message_complete(self) -> None:
        if not self._has_head:
            return
        is_keep_alive = self._parser.should_keep_alive()
        self._end()
        if is_keep_alive and self.is_open:
            self._patience.set(KEEPALIVE_S)
            self._owner.keep(self)
        else:
            self.abort()

    # --- ending an exchange

    def _end(self) -> None:
        self._is_in_use = False
        self._deliver()

    def _deliver(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(HttpReply(self._status, self._content_type, bytes(self._body)))

    def _fail(self, error: BaseException) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
        self.abort()
