"""A time budget that counts only while work is done.

Time in a queue, in READY or during a policy's pause does not count: the owner wraps only the working awaits in
`counting()`, and code that pauses the work wraps the pause in `held()`. With a `WorkClock`, time in which this process
was stopped does not count either.

Invariants. `used_s` never decreases. Inside `counting()` the body is cancelled and `DeadlineExpired` is raised when the
budget is used up; a cancellation from elsewhere passes through unchanged. An `alarm` counts in the same way and calls a
function instead. Wall time counts once, however many blocks count in parallel. Without a budget (None), a deadline is a
stopwatch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType

from rollyard.core.workclock import WorkClock


class DeadlineExpired(Exception):
    """The budget is used up. The owner translates this into the failure that applies."""


class Deadline:
    """A budget of `budget_s` seconds, measured by the clock `now`. Each stage of a rollout has one."""

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
        """Whether time counts now: at least one block counts, and no block holds the clock."""
        return self._since is not None

    def with_budget(self, budget_s: float | None) -> Deadline:
        """Returns a deadline with another budget and the same clock."""
        return Deadline(budget_s, self._now)

    def rearm(self) -> None:
        """Sets the timers again, after the clock was stopped."""
        self._restart()

    def counting(self) -> _Counting:
        """`async with`: the time of the block counts. Raises `DeadlineExpired` when the budget is used up."""
        return _Counting(self)

    def alarm(self, act: Callable[[], None]) -> Alarm:
        """Returns an alarm that counts from `start` to `stop`, and calls `act` once if the budget is used up."""
        return Alarm(self, act)

    @contextmanager
    def held(self) -> Generator[None, None, None]:
        """Stops the clock during this block, for every `counting()` of this deadline."""
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
        """Adds up the used time and sets every block's timer again, after a block or a hold started or ended."""
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
    """One block of work. A class and not a generator, for speed: it is entered several times per turn."""

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
        except TimeoutError as expired:  # of this timeout; one from inside the block is not raised here
            raise DeadlineExpired(f"{self._deadline.budget_s} s are used up") from expired


class Alarm:
    """Returned by `Deadline.alarm`. For work that ends in its own way instead of by cancellation."""

    __slots__ = ("_act", "_deadline", "_timer", "is_expired")

    def __init__(self, deadline: Deadline, act: Callable[[], None]) -> None:
        self._deadline = deadline
        self._act = act
        self._timer: asyncio.TimerHandle | None = None
        self.is_expired = False

    def start(self) -> None:
        self._deadline._enter(self)  # pyright: ignore[reportPrivateUsage]

    def stop(self) -> None:
        """Idempotent."""
        self._deadline._leave(self)  # pyright: ignore[reportPrivateUsage]
        self.reschedule(None)

    # the methods of asyncio.Timeout that a Deadline calls

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
    """A timeout that is reset far more often than it expires, such as that of a connection's phases.

    Extending or clearing it creates no timer: when the armed timer fires, it checks how much time is left."""

    __slots__ = ("_act", "_due", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
        self._loop = loop
        self._act = act
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, bound_s: float | None) -> None:
        """Expires in `bound_s` seconds from now; None: never."""
        if bound_s is None:
            self._due = None
            return
        self._due = due = self._loop.time() + bound_s
        if self._timer is not None and self._timer.when() > due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._on_timer)

    def end(self) -> None:
        """Clears it and leaves no timer in the loop."""
        self._due = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        if self._due is None:
            return
        if self._loop.time() < self._due:
            self._timer = self._loop.call_at(self._due, self._on_timer)
            return
        self._due = None
        self._act()
