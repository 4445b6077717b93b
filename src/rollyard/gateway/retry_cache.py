"""The requests that can be retried, by their bodies.

A retry is matched with a request that has the same body and whose reply no client has received completely, the oldest
first; otherwise, if the SDK marks the request as a retry, with the last one of that body. Identical requests that run
concurrently are distinguished only by that, so each retry of a lost connection finds one of the lost requests, and no
two retries find the same one.

The cache is bounded: a request that was evicted cannot be retried; its tokens are still recorded when the rollout ends.
"""

from __future__ import annotations

from collections import OrderedDict

from rollyard.gateway.exchange import Exchange

MOST_BODIES = 256
MOST_ALIKE = 64
"""Per body: the requests that were not received yet, and the last one."""


class RetryCache:
    """Finds the exchange that a request is a retry of."""

    def __init__(self) -> None:
        self._by_body: OrderedDict[bytes, list[Exchange]] = OrderedDict()

    def earlier(self, key: bytes, *, is_retry: bool) -> Exchange | None:
        alike = self._by_body.get(key, [])
        lost = next((exchange for exchange in alike if exchange.has_no_reader and exchange.has_something), None)
        return lost or (alike[-1] if is_retry and alike else None)

    def add(self, exchange: Exchange, instead_of: Exchange | None = None) -> None:
        """Adds an exchange. `instead_of`: the exchange that it resumes."""
        alike = [
            other
            for other in self._by_body.get(exchange.key, ())
            if not other.is_delivered and other.has_something and other is not instead_of
        ]
        self._by_body[exchange.key] = [*alike[1 - MOST_ALIKE :], exchange]
        self._by_body.move_to_end(exchange.key)
        while len(self._by_body) > MOST_BODIES:
            self._by_body.popitem(last=False)
