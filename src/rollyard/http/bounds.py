"""What the clients of one listener may take of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class ListenerBounds:
    """Sizes and times of one listener. A request that was pipelined behind another one is never queued: see
    `_connection.py`."""

    connections: int
    connections_per_address: float = inf  # of one IPv4 address, or of one /64 network of IPv6
    turned_away: int = 0  # connections beyond those that are told so (503), at a time; any more are cut
    header_bytes: int = 32 << 10  # of one request, its first line included; beyond: 431
    headers: int = 128  # of one request; beyond: 431
    header_s: float = 10.0  # from a request's first byte to the end of its headers; beyond: 408
    idle_s: float = 75.0  # a connection on which nothing has begun is closed
    body_bytes: float = inf  # of one request, however it is framed; beyond: 413
    body_s: float = 60.0  # for the body to come, not counting while the app does not read; beyond: 408
    body_bytes_per_s: float = inf  # a body gets one second more for each so many bytes that came: a large one is slow
    unread_s: float | None = None  # a client that reads nothing of its answer for so long is cut; None: never
