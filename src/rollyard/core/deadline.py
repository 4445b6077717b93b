"""A budget of seconds that only counts while something works for us.

Time in a queue, in READY, or while a policy is paused is nobody's fault and costs nothing: the owner wraps
just the working awaits in `counting()`, and whoever pauses work wraps the pause in `held()`.

Invariants. `used_s` never shrinks. Inside `counting()` the body is cancelled, and `DeadlineExpired` raised,
when the budget is used up; a cancel from elsewhere passes through untouched. Parallel `counting()` blocks
count wall time once. With no budget (None) it is a stopwatch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager


class DeadlineExpired(Exception):
    """The budget is used up. The owner turns it into the failure that it means there."""


class Deadline:
    """See the module. One per stage of a rollout."""

    def __init__(self, budget_s: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self.budget_s = budget_s
        self._now = now
        self._used_s = 0.0
        self._since: float | None = None
        self._counting = 0
        self._holds = 0
        self._armed: set[asyncio.Timeout] = set()

    @property
    def used_s(self) -> float:
        return self._used_s + (self._now() - self._since if self._since is not None else 0.0)

    @property
    def remaining_s(self) -> float | None:
        return None if self.budget_s is None else max(0.0, self.budget_s - self.used_s)

    @property
    def is_expired(self) -> bool:
        return self.remaining_s == 0.0

    @property
    def is_running(self) -> bool:
        """Somebody works for us right now, and nobody holds the clock."""
        return self._since is not None

    @asynccontextmanager
    async def counting(self) -> AsyncGenerator[None, None]:
        """The time of this block counts; it ends with `DeadlineExpired` when the budget does."""
        if self.is_expired:
            raise DeadlineExpired(f"{self.budget_s} s are used up")
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                self._armed.add(timeout)
                self._counting += 1
                self._restart()
                try:
                    yield
                finally:
                    self._counting -= 1
                    self._armed.discard(timeout)
                    self._restart()
        except TimeoutError as error:
            if timeout.expired():
                raise DeadlineExpired(f"{self.budget_s} s are used up") from error
            raise

    @contextmanager
    def held(self) -> Generator[None, None, None]:
        """The clock stands still in this block, for every `counting()` of this deadline."""
        self._holds += 1
        self._restart()
        try:
            yield
        finally:
            self._holds -= 1
            self._restart()

    def _restart(self) -> None:
        now = self._now()
        if self._since is not None:
            self._used_s += now - self._since
        is_running = self._counting > 0 and self._holds == 0
        self._since = now if is_running else None
        remaining = self.remaining_s if is_running else None
        when = None if remaining is None else asyncio.get_running_loop().time() + remaining
        for timeout in self._armed:
            if not timeout.expired():
                timeout.reschedule(when)
