"""Rate limits: the calls that a token may make per second, as one token bucket per token."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rollyard.core.failure import RateLimited
from rollyard.service.security.access import Caller

BURST_S = 2.0
"""Size of the bucket in seconds of the rate: the burst that an idle caller may send."""


@dataclass(slots=True)
class _Bucket:
    calls: float
    at: float


class RateLimits:
    """The buckets of all callers. Only tokens with a quota of calls have one."""

    def __init__(self) -> None:
        self._buckets: dict[str, _Bucket] = {}

    def check(self, caller: Caller, now: float | None = None) -> None:
        """Counts a call. Raises `RateLimited` if it exceeds the rate."""
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
