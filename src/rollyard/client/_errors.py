"""What a call to the service can raise: the service's own errors, rebuilt, and three that only a client can have.

    RollyardError
    ├── …                    what the service answered (problem+json), by its code: NotFound, QueueFull, IdConflict…
    ├── ServiceUnreachable   no answer at all: refused, dropped, timed out
    ├── UnexpectedReply      an answer that is not Rollyard's: a proxy's page, another service on that port
    └── DrawEnded            no batch will come any more

A code that this client does not know (a newer service) becomes a plain `RollyardError` with that code.
Every error has `detail` (what was wrong) and `remedy` (what to do).
"""

from __future__ import annotations

from collections.abc import Mapping

from rollyard.core import CODES, Blame, Json, RollyardError

_ENVELOPE = ("type", "title", "status", "code", "detail", "remedy", "instance")


class ServiceUnreachable(RollyardError):
    """The service gave no answer. Nothing is known of what it did; what carried an id can be sent again."""

    retryable = True
    status = 503
    remedy = "Start it with `rollyard serve`, or name it with --url or ROLLYARD_URL."


class UnexpectedReply(RollyardError):
    """Somebody answered, and it was not Rollyard's face as this client knows it."""

    status = 502
    remedy = "Check the URL, and that service and client are of the same version."


class DrawEnded(RollyardError):
    """A batch was asked for, and the draw has ended with nothing left. `reason` says why, `figures` what it gave."""

    blame = Blame.CLIENT
    status = 409
    remedy = "Make another draw, or read an earlier batch by its number."

    @property
    def reason(self) -> str:
        """exhausted, nothing_kept, budget, closed, unusable, internal_error."""
        return str(self.data.get("reason") or "")

    @property
    def figures(self) -> Mapping[str, Json]:
        figures = self.data.get("figures")
        return figures if isinstance(figures, Mapping) else {}


def error_of(status: int, body: object, where: str) -> RollyardError:
    """The error that a problem+json body tells of. `where` names the call, for bodies that tell nothing."""
    if not isinstance(body, dict) or not isinstance(body.get("code"), str):
        return UnexpectedReply(f"{where} answered {status} without saying why", http_status=status)
    data: dict[str, Json] = {key: value for key, value in body.items() if key not in _ENVELOPE}
    known = CODES.get(body["code"])
    error = (known or RollyardError)(str(body.get("detail") or body.get("title") or ""))
    error.data.update(data)
    remedy = body.get("remedy")
    # The service knows best what to do here; a code that is new to us lives on this one instance only.
    for name, value in (("remedy", remedy), ("code", None if known else body["code"]), ("status", status)):
        if value:
            setattr(error, name, value)
    return error
