"""The seats of a policy: how many rollouts may have a session at its engines at once, and the queue for them.

A rollout takes its seat before RUN and keeps it until it leaves RUN. The bound is the sum of the engines' session caps
(`admission.py`); it changes while seats are taken. The pool then chooses the engine of the session.

Invariants. `taken` exceeds `bound` only after the bound fell, until enough holders leave; no holder is evicted. A seat
is released once, however often it is closed. Waiters are served by rank, the lowest first. A waiter that is cancelled
leaves no entry, and a seat just granted to it goes to the next one. No rollout waits while a seat is free.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count

Rank = tuple[int, int]
"""(−priority, order of submission)."""


class Seat:
    """One rollout's seat at a policy."""

    __slots__ = ("_is_open", "_seats")

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        self._is_open = True

    def close(self) -> None:
        """Releases the seat. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._seats.left()


class Seats:
    """The seats of one policy. `bound` None: unlimited."""

    def __init__(self) -> None:
        self.bound: int | None = None
        self.taken = 0
        self.held_back = 0  # rollouts that stay queued until there is a seat, instead of waiting here
        self.on_free: Callable[[], None] = lambda: None  # called when a seat is free for those
        self._waiters: list[tuple[Rank, int, asyncio.Future[Seat]]] = []
        self._tie = count()

    @property
    def free(self) -> int | None:
        """None: unlimited."""
        return None if self.bound is None else max(0, self.bound - self.taken)

    @property
    def waiting(self) -> int:
        return len(self._waiters) + self.held_back

    def set_bound(self, bound: int | None) -> None:
        self.bound = bound
        self._grant()

    def try_acquire(self) -> Seat | None:
        if self.bound is not None and (self._waiters or self.taken >= self.bound):
            return None
        self.taken += 1
        return Seat(self)

    def take(self) -> Seat:
        """A seat, beyond the bound if necessary: for a rollout that already runs."""
        self.taken += 1
        return Seat(self)

    async def acquire(self, rank: Rank = (0, 0)) -> Seat:
        """Waits for a seat. The caller bounds the wait by cancelling it."""
        if (seat := self.try_acquire()) is not None:
            return seat
        future: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()
        waiter = (rank, next(self._tie), future)
        heapq.heappush(self._waiters, waiter)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                future.result().close()
            elif waiter in self._waiters:  # a short list: the pipeline bounds how many rollouts get this far
                self._waiters.remove(waiter)
                heapq.heapify(self._waiters)
            raise

    def left(self) -> None:
        """Called by a seat that is closed."""
        self.taken -= 1
        self._grant()

    def _grant(self) -> None:
        while self._waiters and (self.bound is None or self.taken < self.bound):
            _, _, future = heapq.heappop(self._waiters)
            if not future.done():
                self.taken += 1
                future.set_result(Seat(self))
        if self.held_back and self.free != 0:
            self.on_free()
