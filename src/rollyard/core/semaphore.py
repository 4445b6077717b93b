"""A semaphore whose bound changes while it is in use, and whose waiters are served by rank.

Invariants. `taken` exceeds `bound` only after the bound fell or after `take`, until enough holders release; no holder
is evicted. Waiters are served by rank, the lowest first, and in order of arrival within a rank. No one waits while a
slot is free. A waiter that is cancelled leaves no entry, and a slot just granted to it goes to the next one.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count

Rank = tuple[int, int]
"""(−priority, order of admission). By order of submission, RUN and EVAL would undo the queue's fairness."""


class PrioritySemaphore:
    """`bound` None: unlimited. `on_free` is called whenever a slot may have become free and no waiter takes it."""

    def __init__(self, bound: int | None, on_free: Callable[[], None]) -> None:
        self.bound = bound
        self.taken = 0
        self._on_free = on_free
        self._waiters: list[tuple[Rank, int, asyncio.Future[None]]] = []
        self._tie = count()

    @property
    def free(self) -> int | None:
        """None: unlimited."""
        return None if self.bound is None else max(0, self.bound - self.taken)

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def last_rank(self, priority: int) -> Rank:
        """Returns the rank of a waiter that comes after all that wait now with this priority or a higher one."""
        return (-priority, max((rank[1] for rank, _, _ in self._waiters if rank[0] == -priority), default=0))

    def set_bound(self, bound: int | None) -> None:
        self.bound = bound
        self._grant()

    def try_acquire(self) -> bool:
        if self.free == 0:
            return False
        self.taken += 1
        return True

    def take(self) -> None:
        """Takes a slot, beyond the bound if necessary."""
        self.taken += 1

    async def acquire(self, rank: Rank = (0, 0)) -> None:
        """Waits for a slot. The caller bounds the wait by cancelling it."""
        if self.try_acquire():
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (rank, next(self._tie), granted)
        heapq.heappush(self._waiters, waiter)
        try:
            await granted
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                heapq.heapify(self._waiters)
            elif not granted.cancelled():
                self.release()
            raise

    def release(self) -> None:
        self.taken -= 1
        self._grant()

    def _grant(self) -> None:
        while self._waiters and self.free != 0:
            granted = heapq.heappop(self._waiters)[2]
            if not granted.done():  # a waiter that is being cancelled
                self.taken += 1
                granted.set_result(None)
        if self.free != 0:
            self._on_free()
