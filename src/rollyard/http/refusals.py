"""Requests and connections that are refused before an app is called: counted by reason, and logged at a limited rate.

Invariant: a client cannot fill the log. Each reason has at most one line per `LOG_EVERY_S`, with the count.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from rollyard.core import Json, RollyardError

log = logging.getLogger("rollyard.http")

LOG_EVERY_S = 60.0


class Reason(enum.StrEnum):
    """Why a request or a connection was refused: the label of the metric."""

    MALFORMED = "malformed"  # not HTTP, or ambiguous framing
    TUNNEL = "tunnel"  # CONNECT
    HEADERS_TOO_LARGE = "headers_too_large"
    TOO_MANY_HEADERS = "too_many_headers"
    HEADERS_TOO_SLOW = "headers_too_slow"
    BODY_TOO_LARGE = "body_too_large"
    BODY_TOO_SLOW = "body_too_slow"
    ANSWER_UNREAD = "answer_unread"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    TOO_MANY_FROM_ADDRESS = "too_many_connections_from_address"


class Refusals:
    """The refusals of one listener. `count` is called with each reason. A sandbox's own listener does not log."""

    def __init__(self, count: Callable[[str], None] | None = None, *, is_logged: bool = True) -> None:
        self._count = count
        self._is_logged = is_logged
        self._unlogged: Counter[Reason] = Counter()
        self._logged_at: dict[Reason, float] = {}

    def note(self, reason: Reason, client: str) -> None:
        if self._count is not None:
            self._count(reason.value)
        if not self._is_logged:
            return
        self._unlogged[reason] += 1
        now = time.monotonic()
        if now - self._logged_at.get(reason, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged_at[reason] = now
            times = self._unlogged.pop(reason)
            log.warning("requests refused", extra={"reason": reason.value, "times": times, "last_from": client})


def problem_body(error: RollyardError, status: int) -> bytes:
    """Encodes an error as application/problem+json, the format of every error of the service."""
    body: dict[str, Json] = {
        **error.data,
        "type": "about:blank",
        "title": error.code.replace("_", " ").capitalize(),
        "status": status,
        "code": error.code,
        "detail": error.detail,
        "remedy": error.remedy,
    }
    return msgspec.json.encode(body)
