"""The requests that a retry may ask for again, by their bodies.

Which one a request is a retry of: one with the same body whose reply nobody has received whole, the oldest first; else,
if the SDK says that it is a retry, the last with that body. Requests that are alike and run at once are told apart by
that alone, so each that lost its connection finds one that did, and no two the same.

Bounded: what is forgotten can no longer be asked for; what it sampled is still recorded when the rollout ends.
"""

from __future__ import annotations

from collections import OrderedDict

from rollyard.gateway.exchange import Exchange

MOST_BODIES = 256
MOST_ALIKE = 64
"""Of one body: those that were not received yet, and the last."""


class RetryCache:
    """See the module."""

    def __init__(self) -> None:
        self._by_body: OrderedDict[bytes, list[Exchange]] = OrderedDict()

    def earlier(self, key: bytes, *, is_retry: bool) -> Exchange | None:
        alike = self._by_body.get(key, [])
        lost = next((exchange for exchange in alike if exchange.is_forsaken and exchange.has_something), None)
        return lost or (alike[-1] if is_retry and alike else None)

    def add(self, exchange: Exchange, instead_of: Exchange | None = None) -> None:
        """`instead_of`: the one that it goes on from."""
        alike = [
            other
            for other in self._by_body.get(exchange.key, ())
            if not other.is_delivered and other.has_something and other is not instead_of
        ]
        self._by_body[exchange.key] = [*alike[1 - MOST_ALIKE :], exchange]
        self._by_body.move_to_end(exchange.key)
        while len(self._by_body) > MOST_BODIES:
            self._by_body.popitem(last=False)
