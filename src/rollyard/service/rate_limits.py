"""How many calls a token may make in a second: a bucket for each, filled at its rate."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rollyard.core.failure import RateLimited
from rollyard.service.access import Caller

BURST_S = 2.0
"""What a caller that was quiet may send at once, in seconds of its rate."""


@dataclass(slots=True)
class _Bucket:
    calls: float
    at: float


class RateLimits:
    """See the module. Only tokens with a quota of calls have a bucket."""

    def __init__(self) -> None:
        self._buckets: dict[str, _Bucket] = {}

    def check(self, caller: Caller, now: float | None = None) -> None:
        """Counts a call. `RateLimited` if it is one too many."""
        rate = caller.quota.requests_per_s
        if rate is None:
            return
        now = time.monotonic() if now is None else now
        most = max(1.0, rate * BURST_S)
        bucket = self._buckets.setdefault(caller.name, _Bucket(most, now))
        bucket.calls = min(most, bucket.calls + (now - bucket.at) * rate)
        bucket.at = now
        if bucket.calls < 1:
            wait_s = (1 - bucket.calls) / rate
            raise RateLimited(f"this token may make {rate:g} calls a second", retry_after_s=round(wait_s, 3))
        bucket.calls -= 1
