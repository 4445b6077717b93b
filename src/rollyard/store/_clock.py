"""The clock of retention: it counts for how long the store has been open, over all its openings.

It does not use the wall clock: a machine whose date jumps a week ahead, or was wrong at boot, deletes nothing early.
While no service has the store open, the clock stops, so records are kept longer than `retain_s`, never shorter.

Two readings are at most one sweep apart (a minute). One step counts for an hour at most: the rest is due to a stopped
process, a suspended machine or a broken clock, and is logged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

MOST_STEP_S = 3600.0

log = logging.getLogger("rollyard.store")


class StoreClock:
    """Counts seconds, starting at `counted_s`. `read` is a clock in seconds that does not go back."""

    def __init__(self, counted_s: float = 0.0, read: Callable[[], float] = time.monotonic) -> None:
        self._counted_s = counted_s
        self._read = read
        self._last = read()

    def now(self) -> float:
        """Returns the counted seconds; never less than before."""
        reading = self._read()
        step_s = reading - self._last
        if step_s > MOST_STEP_S:
            log.warning("time passed that retention does not count", extra={"step_s": step_s, "counted_s": MOST_STEP_S})
        self._counted_s += min(max(0.0, step_s), MOST_STEP_S)
        self._last = reading
        return self._counted_s
