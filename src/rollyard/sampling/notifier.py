"""Wakes all who wait for news of one thing. No news is kept: look first at how it stands, with `heard` in hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class Notifier:
    """`heard = bell.next()`, look, then `await heard`: nothing that rang in between is missed."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def next(self) -> asyncio.Future[None]:
        if self._next is None or self._next.done():
            self._next = asyncio.get_running_loop().create_future()
        return asyncio.shield(self._next)

    async def until(self, look: Callable[[], Awaitable[T]], is_so: Callable[[T], bool], within_s: float) -> T:
        """What `look` finds as soon as that is so; as it stands when the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while True:
                    heard = self.next()
                    found = await look()
                    if is_so(found):
                        return found
                    await heard
        return await look()

    def ring(self) -> None:
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
