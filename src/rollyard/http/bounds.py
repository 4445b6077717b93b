"""The limits on the clients of one listener."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class ListenerBounds:
    """Limits on sizes and times of one listener. A pipelined request is never queued: see `_connection.py`."""

    connections: int
    connections_per_address: float = inf  # of one IPv4 address, or of one /64 network of IPv6
    turned_away: int = 0  # connections above the limit that get a 503, at a time; any more are aborted
    header_bytes: int = 32 << 10  # of one request, including its first line; above: 431
    headers: int = 128  # of one request; above: 431
    header_s: float = 10.0  # from a request's first byte to the end of its headers; above: 408
    idle_s: float = 75.0  # after which a connection without a request is closed
    body_bytes: float = inf  # of one request, however it is framed; above: 413
    body_s: float = 60.0  # for the body to arrive, without time in which the app does not read; above: 408
    body_bytes_per_s: float = inf  # adds one second to body_s for each so many received bytes: large bodies are slow
    unread_s: float | None = None  # after which a client that reads nothing of its response is aborted; None: never
