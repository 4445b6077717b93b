"""One HTTP/1.1 connection of an untrusted client, and its requests in sequence.

Everything that a client can make grow is counted. Each phase of a connection (idle, headers, body) has one timer, which
is set when the phase starts and never by what the client sends later. A pipelined request, which arrives before the
response to the previous one, is not answered: the connection closes after that response, which HTTP allows, so there is
no queue to fill. A client that does not read its responses gets no further ones. WebSockets and other upgrades are not
offered; such a request is handled as an ordinary one.
"""

from __future__ import annotations

import asyncio
import logging
from math import inf
from typing import Any, Literal, cast

import httptools

from rollyard.core.deadline import ResettableTimeout
from rollyard.core.eager import start_now
from rollyard.core.failure import MalformedRequest, RequestTimedOut
from rollyard.http._connection_group import ConnectionGroup
from rollyard.http._exchange import Exchange, phrase
from rollyard.http._head import Refusal, body_too_large, headers_too_large, scope_of, size_of, too_many_headers
from rollyard.http.refusals import Reason, problem_body

log = logging.getLogger("rollyard.http")

HIGH_WATER_BYTES = 64 << 10
"""Of a body that the app has not read yet; above it, reading from the client pauses."""

LINGER_S = 2.0
"""How long a refused client may still send before its connection is aborted: closing at once would lose the refusal."""

RETRY_AFTER_S = 2  # of a 503

Phase = Literal["idle", "headers", "body", "answer", "refused"]


class Connection(asyncio.Protocol):
    """One connection. The parser calls the `on_…` methods."""

    def __init__(self, group: ConnectionGroup, loop: asyncio.AbstractEventLoop) -> None:
        self._group = group
        self._loop = loop
        self._parser: Any = None
        self._transport: asyncio.Transport | None = None
        self._client: tuple[str, int] | None = None
        self._server: tuple[str, int] | None = None
        self._scheme = "http"
        self._exchange: Exchange | None = None
        self._phase: Phase = "idle"
        self._patience = ResettableTimeout(loop, self._too_slow)
        self._bound_s: float | None = None  # of this phase
        self._body_started_at = 0.0  # when the wait for the body started
        self._is_parsing = False  # delays the phase's timer: most requests arrive in one piece and need none
        self._is_unarmed = False  # the phase has started, and its timer is not set yet
        self._is_last = False  # no further request is read
        self._is_paused = False
        self._is_to_start = False  # a request whose app has not been called yet
        self._writable: asyncio.Future[None] | None = None  # set while the write buffer is full
        self._unread_bytes: int | None = None  # in the write buffer, at the last check
        self._raw_bytes = 0  # of this phase, including framing
        self._begin()

    def _begin(self) -> None:
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body_bytes = 0

    # --- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = self._transport = cast("asyncio.Transport", transport)  # uvloop's own is not a subclass
        self._client = _end(transport.get_extra_info("peername"))
        self._server = _end(transport.get_extra_info("sockname"))
        if transport.get_extra_info("sslcontext") is not None:
            self._scheme = "https"
        refused = self._group.admit(self, self._name)
        if refused is not None:
            self._refuse_connection(refused)
            return
        self._parser = httptools.HttpRequestParser(self)
        self._enter("idle", self._group.bounds.idle_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._group.leave(self, self._name)
        self._is_last = True
        self.resume_writing()
        self._patience.end()
        if self._exchange is not None:
            self._exchange.disconnect()
        self._parser = self._transport = None  # breaks the reference cycle with the parser

    def data_received(self, data: bytes) -> None:
        if self._is_last:
            return
        if self._phase != "answer":
            self._raw_bytes += len(data)
        self._is_parsing = True
        self._parse(data)
        bounds = self._group.bounds
        if self._phase in ("idle", "headers") and self._raw_bytes > bounds.header_bytes:
            self._refuse(headers_too_large(bounds))
        elif self._phase == "body" and self._raw_bytes > 8 * self._body_bytes + bounds.header_bytes:
            detail = "the body has more framing than content: too many chunk extensions or trailers"
            self._refuse(_malformed(detail))
        if self._is_to_start:
            self._start()
        self._is_parsing = False
        if self._is_unarmed:
            self._arm()

    def _parse(self, data: bytes) -> None:
        while data and not self._is_last:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_upgrade() + data[upgrade.args[0] :]
            except httptools.HttpParserError as error:
                if isinstance(error.__context__, Refusal):
                    self._refuse(error.__context__)
                elif isinstance(error, httptools.HttpParserCallbackError):
                    log.error("a request could not be read", exc_info=error.__context__)
                    self._refuse(_malformed("the request could not be read"))
                elif self._phase == "answer" and self._exchange is not None:
                    self._is_last = self._exchange.is_last = True  # invalid data after a valid request: answer that one
                else:
                    self._refuse(_malformed(f"this is not an HTTP/1.1 request: {error}"))

    def _start(self) -> None:
        """Calls the app, outside the parser and with the body that has arrived, which is usually all of it."""
        self._is_to_start = False
        if self._exchange is not None and self._exchange.is_active:
            run = self._exchange.run(self._group.app, self._group.owner)
            task = self._exchange.task = start_now(run) if self._group.is_eager else self._loop.create_task(run)
            self._group.track(task)

    def _without_upgrade(self) -> bytes:
        """Returns the request's head without the upgrade, for a new parser that does not wait for its acceptance."""
        line = b"%s %s HTTP/1.1\r\n" % (self._parser.get_method(), self._url)
        headers = ((name, value) for name, value in self._headers if name not in (b"connection", b"upgrade"))
        self._parser = httptools.HttpRequestParser(self)
        return line + b"".join(b"%s: %s\r\n" % header for header in headers) + b"\r\n"

    def eof_received(self) -> bool:
        return False  # half-closed connections are not supported: the transport closes

    def pause_writing(self) -> None:
        self._writable = self._writable or self._loop.create_future()
        if self._phase == "answer":
            self._bound_s = self._group.bounds.unread_s
            self._arm()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None
        if self._phase == "answer":
            self._bound_s = None
            self._arm()
        if self._exchange is not None and self._exchange.is_complete:
            self._resume()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def finish(self) -> None:
        """Called when the listener closes: a request that has started is still answered, no other one."""
        if self._exchange is not None and not self._exchange.is_complete:
            self._exchange.is_last = True
        elif self._phase in ("idle", "headers") and self._transport is not None:
            self._is_last = True
            self._transport.close()
            self._enter("refused", LINGER_S)

    # --- phases

    def _enter(self, phase: Phase, bound_s: float | None) -> None:
        self._phase = phase
        self._raw_bytes = 0
        self._bound_s = bound_s
        self._unread_bytes = None
        if self._is_parsing:
            self._is_unarmed = True
        else:
            self._arm()

    def _arm(self) -> None:
        self._is_unarmed = False
        if self._phase == "body":
            self._body_started_at = self._loop.time()
        self._patience.set(self._bound_s)

    def _too_slow(self) -> None:
        bounds = self._group.bounds
        if self._phase == "headers":
            detail = f"the headers did not arrive within {bounds.header_s:g} s"
            self._refuse(Refusal(Reason.HEADERS_TOO_SLOW, RequestTimedOut(detail)))
        elif self._phase == "body":
            self._check_body_rate()
        elif self._is_being_read():
            self._arm()
        else:
            if self._phase == "answer":
                self._group.refusals.note(Reason.ANSWER_UNREAD, self._name)
            self.abort()

    def _is_being_read(self) -> bool:
        """Whether the client has read any of the written data since the last check."""
        before, now = self._unread_bytes, self._transport.get_write_buffer_size() if self._transport else 0
        self._unread_bytes = now
        return now > 0 and (before is None or now < before)

    def _check_body_rate(self) -> None:
        bounds = self._group.bounds
        if self._is_paused:  # the app does not read
            self._arm()
            return
        remaining_s = (
            self._body_started_at + bounds.body_s + self._body_bytes / bounds.body_bytes_per_s - self._loop.time()
        )
        if remaining_s > 0:
            self._patience.set(remaining_s)
            return
        detail = f"the body did not arrive within {bounds.body_s:g} s"
        if bounds.body_bytes_per_s < inf:
            detail += f" and 1 s for each {bounds.body_bytes_per_s:g} bytes"
        self._refuse(Refusal(Reason.BODY_TOO_SLOW, RequestTimedOut(detail)))

    @property
    def _name(self) -> str:
        return self._client[0] if self._client else ""

    def _refuse(self, refusal: Refusal) -> None:
        """Sends the refusal, if no part of a response has been sent, and reads no more requests."""
        self._is_last = True
        self._group.refusals.note(refusal.reason, self._name)
        if self._transport is None or self._has_answered():
            self.abort()
            return
        self._write_refusal(refusal)
        self._resume()

    def _has_answered(self) -> bool:
        """Whether any part of this request's response was sent: a second response would be taken for that to the next
        request. If not, the app can no longer send one."""
        if self._exchange is None or (self._exchange.is_complete and self._phase != "body"):
            return False
        return self._exchange.is_complete or not self._exchange.stop()

    def _refuse_connection(self, refusal: Refusal) -> None:
        """Refuses a connection above the limit. Only `bounds.turned_away` of them at a time get a response; the others
        are aborted, since there would be no limit otherwise."""
        self._is_last = True
        group = self._group
        if not group.is_ending:
            group.refusals.note(refusal.reason, self._name)
        if group.is_ending or len(group.turned_away) >= group.bounds.turned_away:
            self.abort()
            return
        group.turned_away.add(self)
        self._write_refusal(refusal)

    def _write_refusal(self, refusal: Refusal) -> None:
        assert self._transport is not None
        status = refusal.status
        body = problem_body(refusal.error, status)
        again = b"retry-after: %d\r\n" % RETRY_AFTER_S if status == 503 else b""
        self._transport.write(
            b"HTTP/1.1 %d %s\r\n%s" % (status, phrase(status), self.date)
            + b"content-type: application/problem+json\r\ncontent-length: %d\r\n" % len(body)
            + again
            + b"connection: close\r\n\r\n"
            + body
        )
        self._end_writing()
        self._enter("refused", LINGER_S)  # discards all data until the client closes or the time is over

    def _end_writing(self) -> None:
        if self._transport is not None and self._transport.can_write_eof():  # TLS cannot
            try:
                self._transport.write_eof()
            except OSError:  # the client has reset the connection, and the loop has not read that yet
                self._transport.abort()

    # --- called by the parser

    def on_message_begin(self) -> None:
        if self._exchange is not None and not self._exchange.is_complete:
            self._is_last = self._exchange.is_last = True  # pipelined: not answered
        if self._is_last:
            return
        self._begin()
        raw_bytes = self._raw_bytes  # of the chunk that is being parsed
        self._enter("headers", self._group.bounds.header_s)
        self._raw_bytes = raw_bytes

    def on_url(self, url: bytes) -> None:
        if not self._is_last:
            self._url = self._url + url if self._url else url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_last or self._phase != "headers":  # trailers are ignored
            return
        self._headers.append((name.lower(), value))
        if len(self._headers) > self._group.bounds.headers:
            raise too_many_headers(self._group.bounds)

    def on_headers_complete(self) -> None:
        if self._is_last:
            return
        method: bytes = self._parser.get_method()
        if self._parser.should_upgrade() and method != b"CONNECT":
            return  # it is parsed again without the upgrade
        bounds = self._group.bounds
        if self._raw_bytes > bounds.header_bytes and size_of(self._url, self._headers) > bounds.header_bytes:
            raise headers_too_large(bounds)
        scope = scope_of(method, self._url, self._headers, bounds)
        scope["http_version"] = self._parser.get_http_version()
        scope["scheme"] = self._scheme
        scope["client"] = self._client
        scope["server"] = self._server
        self._enter("body", bounds.body_s)
        assert self._transport is not None
        self._exchange = Exchange(self, self._transport, scope, is_last=not self._parser.should_keep_alive())
        self._is_to_start = True

    def on_body(self, body: bytes) -> None:
        if self._is_last or self._exchange is None:
            return
        self._body_bytes += len(body)
        if self._body_bytes > self._group.bounds.body_bytes:
            raise body_too_large(self._group.bounds)
        if self._exchange.feed(body) > HIGH_WATER_BYTES:
            self._pause()

    def on_message_complete(self) -> None:
        if self._is_last or self._exchange is None or self._phase != "body":
            return
        self._enter("answer", None if self._writable is None else self._group.bounds.unread_s)
        self._exchange.feed_end()
        if self._exchange.is_complete:  # answered before the whole body had arrived
            self.answered()

    # --- called by the exchange

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

    @property
    def is_cancelling(self) -> bool:
        return self._group.is_cancelling

    @property
    def date(self) -> bytes:
        return self._group.date

    def resume_body(self) -> None:
        self._resume()

    def answered(self) -> None:
        """The response is complete. The next request is read once the body of this one has ended, and once the client
        has read most of the response."""
        if self._writable is None:
            self._resume()
        else:
            self._pause()
        if self._exchange is not None and self._exchange.is_last:
            self._is_last = True
            if self._transport is None:
                return
            if self._phase == "body":  # the client still sends: an immediate close would lose the response
                self._end_writing()
                self._enter("refused", LINGER_S)
            else:
                self._transport.close()
                self._enter("refused", self._group.bounds.idle_s)  # limits the wait for a client that reads nothing
        elif self._phase == "answer":
            self._enter("idle", self._group.bounds.idle_s)

    async def drained(self) -> None:
        if self._writable is not None:
            await asyncio.shield(self._writable)


def _malformed(detail: str) -> Refusal:
    return Refusal(Reason.MALFORMED, MalformedRequest(detail))


def _end(address: Any) -> tuple[str, int] | None:
    """Returns one address of a connection; None for a Unix socket."""
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None
