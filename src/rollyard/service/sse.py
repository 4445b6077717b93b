"""A response of server-sent events: frames as they are produced and keep-alive comments, until either side ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollyard.service.schemas.records import encode
from rollyard.service.security.bounds import disconnected, end_all

MEDIA_TYPE = "text/event-stream"

KEEP_ALIVE_S = 15.0
"""Shorter than the time after which proxies and NAT devices drop an idle connection (30 s and more)."""


def frame(kind: str, data: object, id: str | None = None) -> bytes:
    head = b"" if id is None else b"id: %s\n" % id.encode()
    return head + b"event: %s\ndata: %s\n\n" % (kind.encode(), encode(data))


class EventStream(Response):
    """A streaming response of `frames`. It ends when they do, when the client disconnects, when `closing` is set, or
    before the first frame that is not admitted any more."""

    def __init__(
        self, frames: AsyncGenerator[bytes, None], closing: asyncio.Event, *, is_admitted: Callable[[], bool]
    ) -> None:
        super().__init__(media_type=MEDIA_TYPE, headers={"cache-control": "no-store"})
        self._frames = frames
        self._closing = closing
        self._is_admitted = is_admitted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send(send, b": open\n\n")
        pump = asyncio.create_task(self._pump(send))
        alive = asyncio.create_task(self._keep_alive(send))
        disconnect = asyncio.create_task(disconnected(receive))
        closed = asyncio.create_task(self._closing.wait())
        try:
            await asyncio.wait((pump, alive, disconnect, closed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_all(pump, alive, disconnect, closed)
        if not pump.cancelled():
            pump.result()  # raises the error that ended it, if any
        if not disconnect.cancelled():
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, send: Send) -> None:
        async with aclosing(self._frames) as frames:
            async for data in frames:
                if not self._is_admitted():
                    return
                await _send(send, data)

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            if not self._is_admitted():
                return
            await _send(send, b": still here\n\n")


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
