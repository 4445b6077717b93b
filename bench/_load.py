"""A cheap HTTP/1.1 client: one kept connection, requests and responses as bytes.

An SDK would use most of a core for the same requests, and the benchmark would measure the SDK.
"""

from __future__ import annotations

import asyncio
import time
from typing import cast
from urllib.parse import urlsplit


class Line(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._got = bytearray()
        self._head_end = -1
        self._length: int | None = None  # None: chunked
        self._response: asyncio.Future[tuple[int, bytes]] | None = None
        self.first_at = 0.0  # when the first byte of the response's body arrived

    @classmethod
    async def open(cls, url: str) -> Line:
        parts = urlsplit(url)
        loop = asyncio.get_running_loop()
        _, line = await loop.create_connection(cls, parts.hostname or "127.0.0.1", parts.port or 80)
        return line

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass

    def connection_lost(self, exc: Exception | None) -> None:
        if self._response is not None and not self._response.done():
            self._response.set_exception(ConnectionError(str(exc or "the connection was closed")))

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Returns the status and the body. A chunked body keeps its framing."""
        assert self._transport is not None
        self._got.clear()
        self._head_end = -1
        self.first_at = 0.0
        self._response = asyncio.get_running_loop().create_future()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: "
        self._transport.write(b"%s%d\r\n\r\n%s" % (head.encode(), len(body), body))
        return await self._response

    def data_received(self, data: bytes) -> None:
        self._got += data
        if self._head_end < 0:
            self._head_end = self._got.find(b"\r\n\r\n")
            if self._head_end < 0:
                return
            self._length = _length(bytes(self._got[: self._head_end]))
        at = self._head_end + 4
        if not self.first_at and len(self._got) > at:
            self.first_at = time.perf_counter()
        is_whole = (
            self._got.endswith(b"0\r\n\r\n") and len(self._got) > at
            if self._length is None
            else len(self._got) >= at + self._length
        )
        if is_whole and self._response is not None and not self._response.done():
            self._response.set_result((int(self._got[9:12]), bytes(self._got[at:])))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _length(head: bytes) -> int | None:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return None
