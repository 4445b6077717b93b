"""A clock that stands still while this process does: stopped by a signal, frozen, or starved of CPU.

A ticker asks to be woken every `TICK_S`. A wake-up that comes more than `MOST_LATE_S` late shows that nothing here
could run meanwhile, so the lateness is taken off the clock, and every deadline that counts is armed anew. Whoever reads
the clock first after a standstill notices it: in one round of an event loop replies are handled before timers.

Invariant. The clock never goes back further than the standstill that it takes off, and so never behind what was read
before it. A machine that was suspended needs no care: the monotonic clock of Linux stands still by itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger("rollyard.core")

TICK_S = 0.25

MOST_LATE_S = 1.0
"""A loop that is late by less is busy, and what it works for counts."""


class StandstillCounts(Protocol):
    """What has to be told of a standstill."""

    def rearm(self) -> None: ...


class WorkClock:
    """See the module. Until it is started it is the plain monotonic clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.stopped_s = 0.0
        self._now = now
        self._due: float | None = None  # when the ticker is to be woken
        self._timer: asyncio.TimerHandle | None = None
        self._counting: set[StandstillCounts] = set()

    def __call__(self) -> float:
        now = self._now()
        if self._due is not None and now - self._due > MOST_LATE_S:
            self._notice(now)
        return now - self.stopped_s

    def start(self) -> None:
        """On the running loop, until `stop`."""
        self._due = self._now() + TICK_S
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def stop(self) -> None:
        self._due = None
        if self._timer is not None:
            self._timer.cancel()

    def enter(self, one: StandstillCounts) -> None:
        self._counting.add(one)

    def leave(self, one: StandstillCounts) -> None:
        self._counting.discard(one)

    def _tick(self) -> None:
        self()
        self.start()

    def _notice(self, now: float) -> None:
        assert self._due is not None
        late_s, self._due = now - self._due, now + TICK_S
        self.stopped_s += late_s
        log.warning("this process stood still; the time does not count against deadlines", extra={"seconds": late_s})
        for one in tuple(self._counting):
            one.rearm()
