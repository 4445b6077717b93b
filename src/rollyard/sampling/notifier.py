"""Wakes all tasks that wait for a change. Changes are not stored: take `next()` first, then read the state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class Notifier:
    """Call `changed = notifier.next()`, read the state, then `await changed`: a `ring` in between is not missed."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def next(self) -> asyncio.Future[None]:
        if self._next is None or self._next.done():
            self._next = asyncio.get_running_loop().create_future()
        return asyncio.shield(self._next)

    async def until(self, look: Callable[[], Awaitable[T]], is_so: Callable[[T], bool], within_s: float) -> T:
        """Returns what `look` returns once `is_so` holds for it, or its result when `within_s` is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while True:
                    changed = self.next()
                    state = await look()
                    if is_so(state):
                        return state
                    await changed
        return await look()

    def ring(self) -> None:
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
