"""Bounds on a call: the size of its body, and the time that it may wait.

Invariants. A body is counted as it streams in; a Content-Length header is trusted only if it exceeds the limit. A wait
ends at once when its client disconnects or the service closes; in both cases no task of it is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollyard.core.failure import BodyTooLarge
from rollyard.fleet.views import MOST_VIEW_BYTES
from rollyard.service.problems import problem

T = TypeVar("T")

NODE_PATHS = "/v1/fleet/"
"""The paths for which a node's token is valid."""

NODE_BYTES = 1 << 30

VIEW_PATH = f"{NODE_PATHS}view"
"""Where nodes send what people look at. It has a bound, unlike results: it can be asked for again."""

LOGIN_PATH = "/v1/login"
"""Where browsers sign in. It needs no token, so its bodies are read before the caller is known."""

LOGIN_BYTES = 16 << 10  # a token has at most 512 characters


class ClientGone(Exception):
    """The client has disconnected; no one receives the response."""


class BodyLimit:
    """ASGI middleware: refuses bodies above a size with 413. Bodies from nodes have a larger limit: a refused result
    would be produced again, and refused again. Views have one that fits a page of messages. Those of sign-ins, which
    need no token, have a small one."""

    def __init__(self, app: ASGIApp, *, limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit_bytes = self._limit_of(scope["path"])
        content_length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if content_length.isdigit() and int(content_length) > limit_bytes:
            await problem(_too_large(limit_bytes))(scope, receive, send)
            return
        received_bytes = 0

        async def counted() -> Message:
            nonlocal received_bytes
            message = await receive()
            if message["type"] == "http.request":
                received_bytes += len(message.get("body", b""))
                if received_bytes > limit_bytes:
                    raise _too_large(limit_bytes)
            return message

        await self._app(scope, counted, send)

    def _limit_of(self, path: str) -> int:
        if path == VIEW_PATH:
            return MOST_VIEW_BYTES
        if path.startswith(NODE_PATHS):
            return max(self._limit_bytes, NODE_BYTES)
        return min(self._limit_bytes, LOGIN_BYTES) if path == LOGIN_PATH else self._limit_bytes


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit_bytes} bytes", limit_bytes=limit_bytes)


async def while_connected(request: Request, work: Coroutine[object, object, T], closing: asyncio.Event) -> T | None:
    """The result of `work`, or None if the service closes first. Raises `ClientGone` if the client disconnects first.
    In both cases `work` has been cancelled and has ended. The request's body must have been read before."""
    task = asyncio.create_task(work)
    disconnect = asyncio.create_task(disconnected(request.receive))
    closed = asyncio.create_task(closing.wait())
    try:
        await asyncio.wait((task, disconnect, closed), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if disconnect.done():
            raise ClientGone
        return None
    finally:
        await end_all(task, disconnect, closed)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def end_all(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
