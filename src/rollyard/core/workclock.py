"""A clock that stops while this process does not run: stopped by a signal, frozen, or starved of CPU.

A timer fires every `TICK_S`. If it fires more than `MOST_LATE_S` late, nothing in this process could run meanwhile: the
delay is subtracted from the clock, and every deadline that counts sets its timers again. The first read of the clock
after a standstill detects it too, because an iteration of the event loop handles replies before timers.

Invariant. The clock goes back by no more than the standstill that it subtracts, and so never behind an earlier reading.
A suspended machine needs no handling: the monotonic clock of Linux stops by itself.
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
"""A loop that is late by less is busy, and its work counts."""


class StandstillCounts(Protocol):
    """An object whose timers must be set again after a standstill."""

    def rearm(self) -> None: ...


class WorkClock:
    """A monotonic clock without standstills. Until it is started, it is the plain monotonic clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.stopped_s = 0.0
        self._now = now
        self._due: float | None = None  # when the timer should fire
        self._timer: asyncio.TimerHandle | None = None
        self._counting: set[StandstillCounts] = set()

    def __call__(self) -> float:
        now = self._now()
        if self._due is not None and now - self._due > MOST_LATE_S:
            self._notice(now)
        return now - self.stopped_s

    def start(self) -> None:
        """Detects standstills of the running loop, until `stop`."""
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
        log.warning("this process did not run; the time does not count against deadlines", extra={"seconds": late_s})
        for one in tuple(self._counting):
            one.rearm()
