"""One HTTP request and its answer, as ASGI: what the app is told, and how what it says is framed.

Invariants. Half an answer never looks whole: it is cut. The app's own headers cannot break the framing. After the
client has gone, the app is told so (`http.disconnect`) or, where its listener wants that, cancelled; what it still
sends goes nowhere.
"""

from __future__ import annotations

import asyncio
import functools
import http
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from rollyard.http._head import waits_to_be_asked

log = logging.getLogger("rollyard.http")

AsgiApp = Callable[
    [
        MutableMapping[str, Any],
        Callable[[], Awaitable[MutableMapping[str, Any]]],
        Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ],
    Awaitable[None],
]

SEND_NOW = "rollyard.send_now"
"""What an app finds in its scope's extensions: see `Exchange.send_now`."""

COPIED_BYTES = 64 << 10  # up to here, head and body in one write are worth the copy

_BAD_NAME = re.compile(rb"[^!#$%&'*+\-.^_`|~0-9A-Za-z]")
_BAD_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class ExchangeConnection(Protocol):
    """The connection that an exchange happens on."""

    @property
    def is_writable(self) -> bool: ...

    @property
    def is_cancelling(self) -> bool: ...

    @property
    def date(self) -> bytes: ...

    def wants_body(self) -> None: ...

    def answered(self) -> None: ...

    async def drained(self) -> None: ...


class Exchange:
    """One request and its answer: the app's `receive` and `send`."""

    def __init__(
        self,
        line: ExchangeConnection,
        transport: asyncio.Transport,
        scope: MutableMapping[str, Any],
        *,
        is_last: bool,
    ) -> None:
        self._line = line
        self._transport = transport
        self._scope = scope
        self.task: asyncio.Task[None] | None = None
        self.is_last = is_last  # the connection closes after it
        self.is_complete = False
        self._is_gone = False  # the client is
        self._is_started = False
        self._wants_continue = waits_to_be_asked(scope["headers"])
        self._body = bytearray()
        self._has_more = True
        self._is_told = False  # the app has had the end of the body
        self._news: asyncio.Event | None = None  # once somebody waits for any
        self._unsent = b""  # the answer's head, until its body comes, which is mostly at once
        self._left_bytes: int | None = None  # of an answer whose length was announced; None: chunked
        scope.setdefault("extensions", {})[SEND_NOW] = self.send_now

    @property
    def is_wanted(self) -> bool:
        return not (self._is_gone or self.is_complete)

    async def run(self, app: AsgiApp, owner: str) -> None:
        try:
            await app(self._scope, self._receive, self._send)
            if not self.is_complete and not self._is_gone:
                raise RuntimeError("the app returned without a complete answer")
        except Exception:
            log.exception("an app failed", extra={"owner": owner, "method": self._scope["method"]})
            await self._fail()
        finally:
            if not self.is_complete and not self._is_gone:  # the app was cancelled, by itself or by the server
                self._transport.abort()

    async def _fail(self) -> None:
        if self._is_started and not self._unsent:  # half an answer is cut
            return
        self._unsent, self._is_started = b"", False
        self.is_last = True
        text = b"Internal Server Error"
        await self._send({"type": "http.response.start", "status": 500, "headers": [(b"content-type", b"text/plain")]})
        await self._send({"type": "http.response.body", "body": text})

    def _tell(self) -> None:
        if self._news is not None:
            self._news.set()

    # --- from the connection

    def feed(self, body: bytes) -> int:
        if not self.is_complete:
            self._body += body
            self._tell()
        return len(self._body)

    def feed_end(self) -> None:
        self._has_more = False
        self._tell()

    def disconnect(self) -> None:
        self._is_gone = True
        self._tell()
        if not self.is_complete and self.task is not None and self._line.is_cancelling:
            self.task.cancel()

    def stop(self) -> bool:
        """Takes the answer away from the app. False if part of it has gone out already."""
        if self.is_complete:
            return True
        self.disconnect()
        return not self._is_started

    # --- for the app

    async def _receive(self) -> MutableMapping[str, Any]:
        if self._wants_continue and not self._is_started and not self._is_gone:
            self._wants_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self.is_complete:
            self._line.wants_body()
        while not (self._is_gone or self.is_complete or self._body or (not self._has_more and not self._is_told)):
            self._news = self._news or asyncio.Event()
            self._news.clear()
            await self._news.wait()
        if self._is_gone or self.is_complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        self._is_told = not self._has_more
        return {"type": "http.request", "body": body, "more_body": self._has_more}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        kind = message["type"]
        if self._is_gone:
            return
        if self.is_complete or kind != ("http.response.body" if self._is_started else "http.response.start"):
            raise RuntimeError(f"the app sent {kind} where it has no place")
        if kind == "http.response.start":
            self._unsent = self._head(message["status"], message.get("headers", ()))
            self._is_started = True
            if self._left_bytes is None:  # a stream, whose first part may be far away
                self._write(b"")
            return
        is_end = not message.get("more_body", False)
        self._write(self._framed(message.get("body", b""), is_end=is_end))
        if is_end:
            self._complete()
        elif not self._line.is_writable:
            await self._line.drained()

    def send_now(self, body: bytes, *, is_end: bool) -> bool:
        """Part of an answer that has begun, from wherever the app has it, without a task that wakes up for it. False:
        nothing was sent; the client does not keep up, or is gone, and the app's own `send` has to see to that."""
        if self._is_gone or not self._is_started or self.is_complete or not self._line.is_writable:
            return False
        self._write(self._framed(body, is_end=is_end))
        if is_end:
            self._complete()
        return True

    def _write(self, data: bytes) -> None:
        head, self._unsent = self._unsent, b""
        if head and len(data) > COPIED_BYTES:
            self._transport.write(head)
            self._transport.write(data)
        elif head or data:
            self._transport.write(head + data if head else data)

    def _complete(self) -> None:
        self.is_complete = True
        self._body.clear()
        self._tell()
        self._line.answered()

    def _head(self, status: int, headers: Any) -> bytes:
        parts = [b"HTTP/1.1 %d %s\r\n%s" % (status, phrase(status), self._line.date)]
        length: int | None = None
        for raw_name, value in headers:
            name = _lower(raw_name)
            if not name or _BAD_VALUE.search(value):
                raise RuntimeError("the app gave a header that cannot be sent")
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                self.is_last = self.is_last or b"close" in value.lower()
                continue
            elif name == b"transfer-encoding":
                continue  # framing is ours
            parts.append(b"%s: %s\r\n" % (name, value))
        self._has_body = self._scope["method"] != "HEAD" and status >= 200 and status not in (204, 304)
        self._left_bytes = length
        if self._has_body and length is None:
            if self._scope["http_version"] == "1.1":
                parts.append(b"transfer-encoding: chunked\r\n")
            else:
                self.is_last = True
        if self._wants_continue:  # whether the body still comes is the client's choice: no telling where it ends
            self.is_last = True
        if self.is_last:
            parts.append(b"connection: close\r\n")
        elif self._scope["http_version"] == "1.0":
            parts.append(b"connection: keep-alive\r\n")
        return b"".join((*parts, b"\r\n"))

    def _framed(self, body: bytes, *, is_end: bool) -> bytes:
        if not self._has_body:
            return b""
        if self._left_bytes is not None:
            self._left_bytes -= len(body)
            if self._left_bytes < 0 or (is_end and self._left_bytes > 0):
                raise RuntimeError("the app's answer is not as long as it said")
            return body
        if self._scope["http_version"] != "1.1":
            return body
        chunk = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
        return chunk + b"0\r\n\r\n" if is_end else chunk


@functools.lru_cache(maxsize=512)
def _lower(name: bytes) -> bytes:
    """Empty for one that cannot be sent."""
    return b"" if _BAD_NAME.search(name) else name.lower()


@functools.cache
def phrase(status: int) -> bytes:
    """The reason phrase; empty for a status that has none."""
    try:
        return http.HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""
