"""HTTP/1.1 for clients that mean harm: one connection, its requests one after another.

Everything that a client can make grow is counted; each phase of a connection (idle, headers, body) has one timer, set
when the phase begins and by nothing that the client sends later. A request that comes before the answer to the one
before it is not answered: the connection closes after that answer, which HTTP allows, and there is no queue to fill. A
client that does not read its answers gets no further ones. WebSockets and other upgrades are not offered; such a
request is an ordinary one.
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
"""Of a body that the app has not read yet; beyond it we stop reading."""

LINGER_S = 2.0
"""How long a refused client may still send before the connection is cut: closed at once, the refusal would be lost."""

RETRY_AFTER_S = 2  # of a 503

Phase = Literal["idle", "headers", "body", "answer", "refused"]


class Connection(asyncio.Protocol):
    """See the module. The parser calls the `on_…` methods."""

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
        self._began_at = 0.0  # the wait for the body
        self._is_parsing = False  # meanwhile the phase's timer is not set: most requests come in one piece
        self._is_unarmed = False  # the phase has begun, and its timer is still to be set
        self._is_last = False  # nothing more is read as a request
        self._is_paused = False
        self._is_to_start = False  # a request whose app has not been called yet
        self._writable: asyncio.Future[None] | None = None  # somebody waits for room to write
        self._unread_bytes: int | None = None  # of what we wrote, when we last looked
        self._raw_bytes = 0  # of this phase, framing included
        self._begin()

    def _begin(self) -> None:
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body_bytes = 0

    # --- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = self._transport = cast("asyncio.Transport", transport)  # uvloop's own is no subclass
        self._client = _end(transport.get_extra_info("peername"))
        self._server = _end(transport.get_extra_info("sockname"))
        if transport.get_extra_info("sslcontext") is not None:
            self._scheme = "https"
        refused = self._group.admit(self, self._name)
        if refused is not None:
            self._turn_away(refused)
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
        self._parser = self._transport = None  # the parser and this hold each other

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
            detail = "the body has more framing than content: chunk extensions or trailers without end"
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
                    self._is_last = self._exchange.is_last = True  # noise behind a good request: answer that one
                else:
                    self._refuse(_malformed(f"this is not an HTTP/1.1 request: {error}"))

    def _start(self) -> None:
        """Outside of the parser, and with as much of the body as came along: mostly all of it."""
        self._is_to_start = False
        if self._exchange is not None and self._exchange.is_wanted:
            run = self._exchange.run(self._group.app, self._group.owner)
            task = self._exchange.task = start_now(run) if self._group.is_eager else self._loop.create_task(run)
            self._group.attend(task)

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
        """The listener closes: a request that has begun is still answered, nothing else."""
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
            self._began_at = self._loop.time()
        self._patience.set(self._bound_s)

    def _too_slow(self) -> None:
        bounds = self._group.bounds
        if self._phase == "headers":
            detail = f"the headers did not come within {bounds.header_s:g} s"
            self._refuse(Refusal(Reason.HEADERS_TOO_SLOW, RequestTimedOut(detail)))
        elif self._phase == "body":
            self._look_at_body()
        elif self._is_being_read():
            self._arm()
        else:
            if self._phase == "answer":
                self._group.refusals.note(Reason.ANSWER_UNREAD, self._name)
            self.abort()

    def _is_being_read(self) -> bool:
        """Whether the client took any of what is written since we last looked."""
        before, now = self._unread_bytes, self._transport.get_write_buffer_size() if self._transport else 0
        self._unread_bytes = now
        return now > 0 and (before is None or now < before)

    def _look_at_body(self) -> None:
        bounds = self._group.bounds
        if self._is_paused:  # it is the app that does not read
            self._arm()
            return
        left_s = self._began_at + bounds.body_s + self._body_bytes / bounds.body_bytes_per_s - self._loop.time()
        if left_s > 0:
            self._patience.set(left_s)
            return
        detail = f"the body did not come within {bounds.body_s:g} s"
        if bounds.body_bytes_per_s < inf:
            detail += f" and 1 s for each {bounds.body_bytes_per_s:g} bytes"
        self._refuse(Refusal(Reason.BODY_TOO_SLOW, RequestTimedOut(detail)))

    @property
    def _name(self) -> str:
        return self._client[0] if self._client else ""

    def _refuse(self, refusal: Refusal) -> None:
        """Answers by itself, if nothing of an answer has gone out, and has done with this client."""
        self._is_last = True
        self._group.refusals.note(refusal.reason, self._name)
        if self._transport is None or self._has_answered():
            self.abort()
            return
        self._write_refusal(refusal)
        self._resume()

    def _has_answered(self) -> bool:
        """Whether this request has got some of its answer, or all: a second one would be taken for that to the next.
        If not, it is taken away from the app."""
        if self._exchange is None or (self._exchange.is_complete and self._phase != "body"):
            return False
        return self._exchange.is_complete or not self._exchange.stop()

    def _turn_away(self, refusal: Refusal) -> None:
        """One connection too many. So many are told why at a time; the others are cut, or there would be no bound."""
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
        self._enter("refused", LINGER_S)  # reads on, into nothing, until the client closes or its time is over

    def _end_writing(self) -> None:
        if self._transport is not None and self._transport.can_write_eof():  # TLS cannot
            self._transport.write_eof()

    # --- the parser's side

    def on_message_begin(self) -> None:
        if self._exchange is not None and not self._exchange.is_complete:
            self._is_last = self._exchange.is_last = True  # pipelined: see the module
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
        if self._is_last or self._phase != "headers":  # a trailer tells us nothing
            return
        self._headers.append((name.lower(), value))
        if len(self._headers) > self._group.bounds.headers:
            raise too_many_headers(self._group.bounds)

    def on_headers_complete(self) -> None:
        if self._is_last:
            return
        method: bytes = self._parser.get_method()
        if self._parser.should_upgrade() and method != b"CONNECT":
            return  # it comes again without that
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

    @property
    def is_cancelling(self) -> bool:
        return self._group.is_cancelling

    @property
    def date(self) -> bytes:
        return self._group.date

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
                self._end_writing()
                self._enter("refused", LINGER_S)
            else:
                self._transport.close()
                self._enter("refused", self._group.bounds.idle_s)  # a client that reads nothing is not waited for
        elif self._phase == "answer":
            self._enter("idle", self._group.bounds.idle_s)

    async def drained(self) -> None:
        if self._writable is not None:
            await asyncio.shield(self._writable)


def _malformed(detail: str) -> Refusal:
    return Refusal(Reason.MALFORMED, MalformedRequest(detail))


def _end(address: Any) -> tuple[str, int] | None:
    """One end of a connection; None for a Unix socket."""
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None
