"""Wakes all who wait for news of one thing. No news is kept: look first at how it stands, with `heard` in hand."""

from __future__ import annotations

import asyncio


class Bell:
    """`heard = bell.next()`, look, then `await heard`: nothing that rang in between is missed."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def next(self) -> asyncio.Future[None]:
        if self._next is None or self._next.done():
            self._next = asyncio.get_running_loop().create_future()
        return asyncio.shield(self._next)

    def ring(self) -> None:
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
