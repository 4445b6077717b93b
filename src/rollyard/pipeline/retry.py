"""Decides whether a failed attempt is retried, and after how long. The table contains the whole policy."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rollyard.core import Failure


@dataclass(frozen=True, slots=True)
class Backoff:
    """first · factor^n seconds, at most `most_s`, ± 25 % so that many rollouts do not return at once."""

    first_s: float = 1.0
    factor: float = 2.0
    most_s: float = 60.0

    def delay_s(self, tries: int) -> float:
        """Returns the wait after the `tries`-th try failed."""
        plain = min(self.most_s, self.first_s * self.factor ** (tries - 1))
        return plain * random.uniform(0.75, 1.25)


BACKOFFS: dict[str, Backoff] = {
    "engine_unavailable": Backoff(first_s=2.0),
    "engine_timeout": Backoff(first_s=0.5),  # the router has tried other engines already
    "engine_broken": Backoff(first_s=0.5),
    "sandbox_start_failed": Backoff(first_s=1.0),  # the host is overloaded
    "sandbox_lost": Backoff(first_s=0.2),
    "sandbox_stuck": Backoff(first_s=1.0),
    "stalled": Backoff(first_s=1.0),
}


def delay_s(failure: Failure, attempt: int, excused: int, max_attempts: int) -> float | None:
    """Returns the seconds until the next attempt, or None if this was the last one."""
    tries = attempt - excused
    if not failure.retryable or tries >= max_attempts:
        return None
    plain = BACKOFFS.get(failure.code, Backoff()).delay_s(tries)
    retry_after_s = failure.data.get("retry_after_s")  # from a breaker, which refuses an earlier try
    return max(plain, retry_after_s * random.uniform(1.0, 1.25)) if isinstance(retry_after_s, (int, float)) else plain
