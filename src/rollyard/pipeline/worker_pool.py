"""A stage's worker slots: bounded, resizable while in use. Waiters are served by rank.

Invariants. `active` exceeds `size` only after a shrink, until enough holders leave; no holder is interrupted. A slot
granted to a waiter that has just been cancelled goes to the next one. Lower rank goes first.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from itertools import count

Rank = tuple[int, int]
"""(−priority, order of submission)."""


class WorkerPool:
    """A bounded set of slots. `on_free` is called whenever a slot may have become free."""

    def __init__(self, name: str, size: int, on_free: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.active = 0
        self._size = size
        self._on_free = on_free
        self._waiters: list[tuple[Rank, int, asyncio.Future[None]]] = []
        self._tie = count()

    @property
    def size(self) -> int:
        return self._size

    @property
    def free(self) -> int:
        return max(0, self._size - self.active)

    @property
    def waiting(self) -> int:
        return sum(not future.done() for _, _, future in self._waiters)

    def resize(self, size: int) -> None:
        """Changes the number of slots. With zero the stage stops: what is in it continues, nothing new enters."""
        if size < 0:
            raise ValueError(f"a pool has at least 0 slots, not {size}")
        self._size = size
        self._grant()

    def try_acquire(self) -> bool:
        if self.free == 0:
            return False
        self.active += 1
        return True

    async def acquire(self, rank: Rank = (0, 0)) -> None:
        if not self._waiters and self.try_acquire():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (rank, next(self._tie), future))
        self._grant()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release()
            raise

    def release(self) -> None:
        self.active -= 1
        self._grant()

    @asynccontextmanager
    async def slot(self, rank: Rank = (0, 0)) -> AsyncGenerator[None, None]:
        await self.acquire(rank)
        try:
            yield
        finally:
            self.release()

    def _grant(self) -> None:
        while self.free and self._waiters:
            _, _, future = heapq.heappop(self._waiters)
            if not future.done():
                self.active += 1
                future.set_result(None)
        if self.free:
            self._on_free()
