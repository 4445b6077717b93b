"""The seats of a policy: how many rollouts may have a session at its engines at once, and the queue for them.

A rollout takes its seat before RUN and keeps it until it leaves RUN. The bound is the sum of the engines' session caps
(`admission.py`); it changes while seats are taken. The pool then chooses the engine of the session.

A seat is released once, however often it is closed; the other invariants are those of `core/semaphore.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from rollyard.core.semaphore import PrioritySemaphore, Rank


class Seat:
    """One rollout's seat at a policy."""

    __slots__ = ("_is_open", "_semaphore")

    def __init__(self, semaphore: PrioritySemaphore) -> None:
        self._semaphore = semaphore
        self._is_open = True

    def close(self) -> None:
        """Releases the seat. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._semaphore.release()


class Seats:
    """The seats of one policy. `bound` None: unlimited."""

    def __init__(self) -> None:
        self.held_back = 0  # rollouts that stay queued until there is a seat, instead of waiting here
        self.on_free: Callable[[], None] = lambda: None  # called when a seat is free for those
        self._semaphore = PrioritySemaphore(None, self._freed)

    @property
    def bound(self) -> int | None:
        return self._semaphore.bound

    @property
    def taken(self) -> int:
        return self._semaphore.taken

    @property
    def free(self) -> int | None:
        """None: unlimited."""
        return self._semaphore.free

    @property
    def waiting(self) -> int:
        return self._semaphore.waiting + self.held_back

    def set_bound(self, bound: int | None) -> None:
        self._semaphore.set_bound(bound)

    def try_acquire(self) -> Seat | None:
        return Seat(self._semaphore) if self._semaphore.try_acquire() else None

    def take(self) -> Seat:
        """A seat, beyond the bound if necessary: for a rollout that already runs."""
        self._semaphore.take()
        return Seat(self._semaphore)

    async def acquire(self, rank: Rank = (0, 0)) -> Seat:
        """Waits for a seat. The caller bounds the wait by cancelling it."""
        await self._semaphore.acquire(rank)
        return Seat(self._semaphore)

    def _freed(self) -> None:
        if self.held_back:
            self.on_free()
