"""A budget of seconds that only counts while something works for us.

Time in a queue, in READY, or while a policy is paused is nobody's fault and costs nothing: the owner wraps
just the working awaits in `counting()`, and whoever pauses work wraps the pause in `held()`. On a `WorkClock`, time in
which this process stood still costs nothing either.

Invariants. `used_s` never shrinks. Inside `counting()` the body is cancelled, and `DeadlineExpired` raised,
when the budget is used up; a cancel from elsewhere passes through untouched. An `alarm` counts alike and calls
somebody instead. Whatever counts in parallel, wall time counts once. With no budget (None) it is a stopwatch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType

from rollyard.core.workclock import WorkClock


class DeadlineExpired(Exception):
    """The budget is used up. The owner turns it into the failure that it means there."""


class Deadline:
    """See the module. One per stage of a rollout."""

    def __init__(self, budget_s: float | None = None, now: Callable[[], float] | WorkClock = time.monotonic) -> None:
        self.budget_s = budget_s
        self._now = now
        self._clock = now if isinstance(now, WorkClock) else None
        self._used_s = 0.0
        self._since: float | None = None
        self._holds = 0
        self._armed: set[asyncio.Timeout | Alarm] = set()

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

    def alike(self, budget_s: float | None) -> Deadline:
        """Another budget, by the same clock."""
        return Deadline(budget_s, self._now)

    def rearm(self) -> None:
        """The clock stood still since the timers were set."""
        self._restart()

    def counting(self) -> _Counting:
        """`async with`: the time of the block counts; it ends with `DeadlineExpired` when the budget does."""
        return _Counting(self)

    def alarm(self, act: Callable[[], None]) -> Alarm:
        """Counts from its `start` to its `stop`, and calls `act` once when the budget is used up meanwhile."""
        return Alarm(self, act)

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

    def _enter(self, timeout: asyncio.Timeout | Alarm) -> None:
        self._armed.add(timeout)
        self._restart()

    def _leave(self, timeout: asyncio.Timeout | Alarm) -> None:
        self._armed.discard(timeout)
        self._restart()

    def _restart(self) -> None:
        """Adds up, and arms every block's timer anew: something has begun, ended, or been held."""
        now = self._now()
        if self._since is not None:
            self._used_s += now - self._since
        is_running = bool(self._armed) and self._holds == 0
        self._since = now if is_running else None
        if self._clock is not None:
            (self._clock.enter if is_running else self._clock.leave)(self)
        if not self._armed or self.budget_s is None:
            return
        when: float | None = None
        if is_running:
            when = asyncio.get_running_loop().time() + max(0.0, self.budget_s - self._used_s)
        for timeout in self._armed:
            if not timeout.expired():
                timeout.reschedule(when)


class _Counting:
    """One block of work. A class, not a generator: it is entered several times a turn."""

    __slots__ = ("_deadline", "_timeout")

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._timeout = asyncio.Timeout(None)

    async def __aenter__(self) -> None:
        if self._deadline.is_expired:
            raise DeadlineExpired(f"{self._deadline.budget_s} s are used up")
        await self._timeout.__aenter__()
        self._deadline._enter(self._timeout)  # pyright: ignore[reportPrivateUsage]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deadline._leave(self._timeout)  # pyright: ignore[reportPrivateUsage]
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as expired:  # its own; one from inside the block is not raised here
            raise DeadlineExpired(f"{self._deadline.budget_s} s are used up") from expired


class Alarm:
    """See `Deadline.alarm`. For work that is to be ended in its own way, not by a cancel."""

    __slots__ = ("_act", "_deadline", "_timer", "is_expired")

    def __init__(self, deadline: Deadline, act: Callable[[], None]) -> None:
        self._deadline = deadline
        self._act = act
        self._timer: asyncio.TimerHandle | None = None
        self.is_expired = False

    def start(self) -> None:
        self._deadline._enter(self)  # pyright: ignore[reportPrivateUsage]

    def stop(self) -> None:
        """Again if need be."""
        self._deadline._leave(self)  # pyright: ignore[reportPrivateUsage]
        self.reschedule(None)

    # what a Deadline asks of what it has armed

    def expired(self) -> bool:
        return self.is_expired

    def reschedule(self, when: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if when is None else asyncio.get_running_loop().call_at(when, self._fire)

    def _fire(self) -> None:
        self.is_expired = True
        self._act()


class ResettableTimeout:
    """A bound that is set anew far more often than it is reached: a connection's phases, say.

    Setting it later, or off, costs no timer: the one that is armed looks, when it rings, how long there is still to
    wait."""

    __slots__ = ("_act", "_due", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
        self._loop = loop
        self._act = act
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, bound_s: float | None) -> None:
        """From now on so long; None: for ever."""
        if bound_s is None:
            self._due = None
            return
        self._due = due = self._loop.time() + bound_s
        if self._timer is not None and self._timer.when() > due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._ring)

    def end(self) -> None:
        """For good: nothing of it stays in the loop."""
        self._due = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        if self._due is None:
            return
        if self._loop.time() < self._due:
            self._timer = self._loop.call_at(self._due, self._ring)
            return
        self._due = None
        self._act()
