"""Errors that a call can raise: the service's errors, rebuilt, and three of the client.

    RollyardError
    ├── …                    the service's error (problem+json), by its code: NotFound, QueueFull, IdConflict…
    ├── ServiceUnreachable   no response: refused, dropped, timed out
    ├── UnexpectedReply      a response that is not Rollyard's: a proxy's page, another service on that port
    └── DrawEnded            the draw has no more batches

A code that is unknown to this client (of a newer service) becomes a plain `RollyardError` with that code.
Every error has `detail` (what is wrong) and `remedy` (what to do).
"""

from __future__ import annotations

from collections.abc import Mapping

from rollyard.core import CODES, Blame, Json, RollyardError

_ENVELOPE = ("type", "title", "status", "code", "detail", "remedy", "instance")


class ServiceUnreachable(RollyardError):
    """The service did not respond. It is unknown what it did; calls with an id can be sent again."""

    retryable = True
    status = 503
    remedy = "Start the service with `rollyard serve`, or give its URL with --url or ROLLYARD_URL."


class UnexpectedReply(RollyardError):
    """A response that this client cannot interpret as Rollyard's."""

    status = 502
    remedy = "Check that this is the URL of a Rollyard service, and that service and client have the same version."


class DrawEnded(RollyardError):
    """A batch was requested, but the draw has ended and has no groups left. `reason` is the cause; `figures` are its
    totals."""

    blame = Blame.CLIENT
    status = 409
    remedy = "Create another draw, or read an earlier batch by its number."

    @property
    def reason(self) -> str:
        """exhausted, nothing_kept, budget, closed, unusable, internal_error."""
        return str(self.data.get("reason") or "")

    @property
    def figures(self) -> Mapping[str, Json]:
        figures = self.data.get("figures")
        return figures if isinstance(figures, Mapping) else {}


def error_of(status: int, body: object, where: str) -> RollyardError:
    """The error in a problem+json body. `where` is who answered which call, for bodies without an error."""
    if not isinstance(body, dict) or not isinstance(body.get("code"), str):
        return UnexpectedReply(f"{where} with {status}, not as Rollyard does", http_status=status)
    data: dict[str, Json] = {key: value for key, value in body.items() if key not in _ENVELOPE}
    error_class = CODES.get(body["code"])
    detail, remedy = body.get("detail") or body.get("title") or "", body.get("remedy") or ""
    error = (error_class or RollyardError)(str(detail), remedy=str(remedy))  # the service's remedy is more specific
    error.data.update(data)
    # An unknown code is set on this instance only.
    for name, value in (("code", None if error_class else body["code"]), ("status", status)):
        if value:
            setattr(error, name, value)
    return error
