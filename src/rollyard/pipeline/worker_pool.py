"""A stage's worker slots: bounded, resizable while in use. Waiters are served by rank."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from rollyard.core.semaphore import PrioritySemaphore, Rank


class WorkerPool:
    """The slots of one stage. `on_free` is called whenever a slot may have become free."""

    def __init__(self, name: str, size: int, on_free: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.size = size
        self._slots = PrioritySemaphore(size, on_free)

    @property
    def active(self) -> int:
        return self._slots.taken

    @property
    def free(self) -> int:
        return max(0, self.size - self.active)

    @property
    def waiting(self) -> int:
        return self._slots.waiting

    def last_rank(self, priority: int) -> Rank:
        """Returns the rank of a waiter that comes after all that wait now with this priority or a higher one."""
        return self._slots.last_rank(priority)

    def resize(self, size: int) -> None:
        """Changes the number of slots. With zero the stage stops: what is in it continues, nothing new enters."""
        if size < 0:
            raise ValueError(f"a pool has at least 0 slots, not {size}")
        self.size = size
        self._slots.set_bound(size)

    def try_acquire(self) -> bool:
        return self._slots.try_acquire()

    async def acquire(self, rank: Rank = (0, 0)) -> None:
        await self._slots.acquire(rank)

    def release(self) -> None:
        self._slots.release()

    @asynccontextmanager
    async def slot(self, rank: Rank = (0, 0)) -> AsyncGenerator[None, None]:
        await self.acquire(rank)
        try:
            yield
        finally:
            self.release()
