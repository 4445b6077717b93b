"""Whatever goes wrong, as application/problem+json with a stable code.

The error tree of `core.failure` says code, status and remedy; this file only writes them down. Validation errors of
the edges become `invalid_request` with the path of each field and what was expected there.

Invariant: an exception that nobody expected is `internal_error`; its text and traceback go to the log, never to the
client.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollyard.core import Json, RollyardError
from rollyard.core.failure import InternalError, InvalidRequest, NotFound, RequestError, StoreLost
from rollyard.http import problem_body
from rollyard.store.base import StoreUnusable

log = logging.getLogger("rollyard.service")

MEDIA_TYPE = "application/problem+json"

RETRY_AFTER_S = {429: 2, 503: 5}
"""429: a full queue of short rollouts has room again after a moment. 503: about a restart (10,000 queued: 3 s)."""

MOST_FIELDS = 20  # of a body with many mistakes, the first ones are told


def problem(error: RollyardError, *, status: int | None = None, headers: Mapping[str, str] | None = None) -> Response:
    """The reply for an error. What a record would call the policy's failure (status 200 there) is a 422 here."""
    status = status or (error.status if error.status >= 400 else 422)
    extra = dict(headers or {})
    if status in RETRY_AFTER_S:
        told = error.data.get("retry_after_s")
        wait_s = ceil(told) if isinstance(told, int | float) else RETRY_AFTER_S[status]
        extra.setdefault("retry-after", str(wait_s))
    if status == 401:
        extra.setdefault("www-authenticate", "Bearer")
    return Response(problem_body(error, status), status, extra, MEDIA_TYPE)


def invalid(errors: Iterable[Mapping[str, Any]], prefix: Sequence[str | int] = ()) -> InvalidRequest:
    """pydantic's errors as one of ours. `prefix` is where in the body the checked value was."""
    fields: list[dict[str, Json]] = [
        {"path": field_path((*prefix, *item["loc"])), "problem": _sentence(item)} for item in errors
    ]
    first = fields[0] if fields else {"path": "", "problem": "it is not valid"}
    more = f" (and {len(fields) - 1} more)" if len(fields) > 1 else ""
    where = f"{first['path']}: " if first["path"] else ""
    return InvalidRequest(f"{where}{first['problem']}{more}", fields=fields[:MOST_FIELDS])


def field_path(parts: Iterable[str | int]) -> str:
    """("rollouts", 3, "task") → rollouts[3].task"""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def _sentence(item: Mapping[str, Any]) -> str:
    match item["type"]:
        case "extra_forbidden":
            return "there is no such field"
        case "missing":
            return "this field is needed"
        case "recursion_loop" | "recursion_depth_exceeded":
            return "this is nested too deeply"
        case _:
            message = str(item["msg"]).removeprefix("Value error, ")
            return message[:1].lower() + message[1:]


def install(app: FastAPI) -> None:
    """The handlers for everything that a route may raise on purpose."""

    async def ours(_: Request, error: Exception) -> Response:
        assert isinstance(error, RollyardError)
        if error.status >= 500 and not isinstance(error, RequestError):
            log.warning("call failed", extra={"code": error.code, "detail": error.detail})
        return problem(error)

    async def validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return problem(invalid(error.errors()))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return problem(NotFound(f"there is no {request.url.path}"))
        if error.status_code == 405:
            wrong = RequestError(f"{request.url.path} does not know {request.method}")
            return problem(wrong, status=405, headers=error.headers)
        return problem(RequestError(str(error.detail)), status=error.status_code, headers=error.headers)

    async def store(_: Request, error: Exception) -> Response:
        return problem(StoreLost(f"the store cannot be used: {error}"))

    app.add_exception_handler(RollyardError, ours)
    app.add_exception_handler(StoreUnusable, store)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)


class CatchAll:
    """ASGI: what nobody expected is logged here and answered as `internal_error`, telling nothing of our insides."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_begun = False

        async def watched(message: Message) -> None:
            nonlocal is_begun
            is_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            log.debug("a client left in the midst of its request", extra={"path": scope["path"]})
        except Exception as error:
            log.exception("a call broke", extra={"method": scope["method"], "path": scope["path"]})
            if is_begun:
                raise  # half a reply is out: only closing the connection can tell the client
            wrapped = InternalError(f"{type(error).__name__} in {scope['method']} {scope['path']}; see the log")
            await problem(wrapped)(scope, receive, send)
