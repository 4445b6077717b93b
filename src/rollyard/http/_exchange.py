"""One HTTP request and its response as ASGI: what the app receives, and the framing of what it sends.

Invariants. A partial response never looks complete: its connection is aborted. The app's own headers cannot break the
framing. After the client has disconnected, the app receives `http.disconnect` or, if its listener is configured so, is
cancelled; what it still sends is discarded.
"""

from __future__ import annotations

import asyncio
import functools
import http
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from rollyard.http._head import expects_continue

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
"""The key of `Exchange.send_now` in the extensions of an app's scope."""

COPIED_BYTES = 64 << 10  # up to this size, head and body in one write are worth the copy

_BAD_NAME = re.compile(rb"[^!#$%&'*+\-.^_`|~0-9A-Za-z]")
_BAD_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class ExchangeConnection(Protocol):
    """The connection of an exchange."""

    @property
    def is_writable(self) -> bool: ...

    @property
    def is_cancelling(self) -> bool: ...

    @property
    def date(self) -> bytes: ...

    def resume_body(self) -> None: ...

    def answered(self) -> None: ...

    async def drained(self) -> None: ...


class Exchange:
    """One request and its response: the app's `receive` and `send`."""

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
        self._is_disconnected = False  # the client has disconnected
        self._is_started = False
        self._expects_continue = expects_continue(scope["headers"])
        self._body = bytearray()
        self._has_more = True
        self._is_end_received = False  # the app has received the end of the body
        self._wakeup: asyncio.Event | None = None  # created when the app first waits
        self._unsent = b""  # the response's head, until its body comes, usually at once
        self._remaining_bytes: int | None = None  # of a response with a content-length; None: chunked
        scope.setdefault("extensions", {})[SEND_NOW] = self.send_now

    @property
    def is_active(self) -> bool:
        return not (self._is_disconnected or self.is_complete)

    async def run(self, app: AsgiApp, owner: str) -> None:
        try:
            await app(self._scope, self._receive, self._send)
            if not self.is_complete and not self._is_disconnected:
                raise RuntimeError("the app returned without a complete response")
        except Exception:
            log.exception("an app failed", extra={"owner": owner, "method": self._scope["method"]})
            await self._fail()
        finally:
            if not self.is_complete and not self._is_disconnected:  # the app was cancelled, by itself or by the server
                self._transport.abort()

    async def _fail(self) -> None:
        if self._is_started and not self._unsent:  # a partial response is aborted
            return
        self._unsent, self._is_started = b"", False
        self.is_last = True
        text = b"Internal Server Error"
        await self._send({"type": "http.response.start", "status": 500, "headers": [(b"content-type", b"text/plain")]})
        await self._send({"type": "http.response.body", "body": text})

    def _wake_app(self) -> None:
        if self._wakeup is not None:
            self._wakeup.set()

    # --- called by the connection

    def feed(self, body: bytes) -> int:
        if not self.is_complete:
            self._body += body
            self._wake_app()
        return len(self._body)

    def feed_end(self) -> None:
        self._has_more = False
        self._wake_app()

    def disconnect(self) -> None:
        self._is_disconnected = True
        self._wake_app()
        if not self.is_complete and self.task is not None and self._line.is_cancelling:
            self.task.cancel()

    def stop(self) -> bool:
        """Prevents the app's response. Returns False if a part of it has already been sent."""
        if self.is_complete:
            return True
        self.disconnect()
        return not self._is_started

    # --- called by the app

    async def _receive(self) -> MutableMapping[str, Any]:
        if self._expects_continue and not self._is_started and not self._is_disconnected:
            self._expects_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self.is_complete:
            self._line.resume_body()
        while not (
            self._is_disconnected
            or self.is_complete
            or self._body
            or (not self._has_more and not self._is_end_received)
        ):
            self._wakeup = self._wakeup or asyncio.Event()
            self._wakeup.clear()
            await self._wakeup.wait()
        if self._is_disconnected or self.is_complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        self._is_end_received = not self._has_more
        return {"type": "http.request", "body": body, "more_body": self._has_more}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        kind = message["type"]
        if self._is_disconnected:
            return
        if self.is_complete or kind != ("http.response.body" if self._is_started else "http.response.start"):
            raise RuntimeError(f"the app sent an unexpected {kind}")
        if kind == "http.response.start":
            self._unsent = self._head(message["status"], message.get("headers", ()))
            self._is_started = True
            if self._remaining_bytes is None:  # a stream, whose first part may come much later
                self._write(b"")
            return
        is_end = not message.get("more_body", False)
        self._write(self._framed(message.get("body", b""), is_end=is_end))
        if is_end:
            self._complete()
        elif not self._line.is_writable:
            await self._line.drained()

    def send_now(self, body: bytes, *, is_end: bool) -> bool:
        """Sends a part of a response that has started, from any code of the app, without waking up a task. Returns
        False if nothing was sent: the client does not keep up or has disconnected, and the app must use `send`."""
        if self._is_disconnected or not self._is_started or self.is_complete or not self._line.is_writable:
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
        self._wake_app()
        self._line.answered()

    def _head(self, status: int, headers: Any) -> bytes:
        parts = [b"HTTP/1.1 %d %s\r\n%s" % (status, phrase(status), self._line.date)]
        length: int | None = None
        for raw_name, value in headers:
            name = _lower(raw_name)
            if not name or _BAD_VALUE.search(value):
                raise RuntimeError("the app returned a header that cannot be sent")
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                self.is_last = self.is_last or b"close" in value.lower()
                continue
            elif name == b"transfer-encoding":
                continue  # the server does the framing
            parts.append(b"%s: %s\r\n" % (name, value))
        self._has_body = self._scope["method"] != "HEAD" and status >= 200 and status not in (204, 304)
        self._remaining_bytes = length
        if self._has_body and length is None:
            if self._scope["http_version"] == "1.1":
                parts.append(b"transfer-encoding: chunked\r\n")
            else:
                self.is_last = True
        if self._expects_continue:  # the client may or may not send the body: its end is unknown
            self.is_last = True
        if self.is_last:
            parts.append(b"connection: close\r\n")
        elif self._scope["http_version"] == "1.0":
            parts.append(b"connection: keep-alive\r\n")
        return b"".join((*parts, b"\r\n"))

    def _framed(self, body: bytes, *, is_end: bool) -> bytes:
        if not self._has_body:
            return b""
        if self._remaining_bytes is not None:
            self._remaining_bytes -= len(body)
            if self._remaining_bytes < 0 or (is_end and self._remaining_bytes > 0):
                raise RuntimeError("the app's response does not match its content-length")
            return body
        if self._scope["http_version"] != "1.1":
            return body
        chunk = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
        return chunk + b"0\r\n\r\n" if is_end else chunk


@functools.lru_cache(maxsize=512)
def _lower(name: bytes) -> bytes:
    """Returns the name in lower case; empty for one that cannot be sent."""
    return b"" if _BAD_NAME.search(name) else name.lower()


@functools.cache
def phrase(status: int) -> bytes:
    """Returns the reason phrase; empty for a status that has none."""
    try:
        return http.HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""
