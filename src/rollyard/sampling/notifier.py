"""Wakes the tasks that wait for a change of one thing.

Changes are not stored: take `next()` first, then read the state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class Notifier:
    """Call `changed = notifier.next(key)`, read the state, then `await changed`: a `ring` in between is not missed. The
    key names the thing; who waits for another one is not woken."""

    def __init__(self) -> None:
        self._next: WeakValueDictionary[str, asyncio.Future[None]] = WeakValueDictionary()  # while one waits

    def next(self, key: str = "") -> asyncio.Future[None]:
        future = self._next.get(key)
        if future is None:
            future = self._next[key] = asyncio.get_running_loop().create_future()
        return asyncio.shield(future)

    async def until(self, key: str, look: Callable[[], Awaitable[T]], is_so: Callable[[T], bool], within_s: float) -> T:
        """Returns what `look` returns once `is_so` holds for it, or its result when `within_s` is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while True:
                    changed = self.next(key)
                    state = await look()
                    if is_so(state):
                        return state
                    await changed
        return await look()

    def ring(self, key: str = "") -> None:
        future = self._next.pop(key, None)
        if future is not None and not future.done():
            future.set_result(None)

    def ring_all(self) -> None:
        """Wakes all tasks that wait, whatever their key."""
        for key in list(self._next):
            self.ring(key)
