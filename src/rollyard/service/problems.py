"""Errors as application/problem+json with a stable code.

The exceptions of `core.failure` define code, status and remedy; this module only serializes them. Validation errors of
request bodies become `invalid_request`, with the path of each field and what was expected there.

Invariant: an unexpected exception becomes `internal_error`; its text and traceback are logged and never sent to the
client.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from math import ceil

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollyard.core import RollyardError
from rollyard.core.failure import (
    AgentBroken,
    EnvironmentBroken,
    InternalError,
    NotFound,
    RequestError,
    StoreLost,
)
from rollyard.http import problem_body
from rollyard.service.schemas.body import invalid
from rollyard.store.base import StoreUnusable

log = logging.getLogger("rollyard.service")

NO_ROUTE = "Give the service's URL without a path, such as http://127.0.0.1:8127."

MEDIA_TYPE = "application/problem+json"

RETRY_AFTER_S = {429: 2, 503: 5}
"""429: a full queue of short rollouts has room again after a moment. 503: about the time of a restart (10,000 queued
rollouts: 3 s)."""

PLUGIN_LOG_EVERY_S = 10.0


def problem(error: RollyardError, *, status: int | None = None, headers: Mapping[str, str] | None = None) -> Response:
    """The response for an error. A failure of the policy, which has status 200 in a record, is a 422 here."""
    status = status or (error.status if error.status >= 400 else 422)
    extra = dict(headers or {})
    if status in RETRY_AFTER_S:
        retry_after_s = error.data.get("retry_after_s")
        wait_s = ceil(retry_after_s) if isinstance(retry_after_s, int | float) else RETRY_AFTER_S[status]
        extra.setdefault("retry-after", str(wait_s))
    if status == 401:
        extra.setdefault("www-authenticate", "Bearer")
    return Response(problem_body(error, status), status, extra, MEDIA_TYPE)


class PluginErrors:
    """Exceptions in the code of plugins. Logs their tracebacks, for the plugins' authors.

    Invariant: a client whose tasks raise them cannot fill the log: at most one traceback per `PLUGIN_LOG_EVERY_S`."""

    def __init__(self) -> None:
        self._logged_at = -math.inf
        self._unlogged = 0

    def log(self, error: RollyardError) -> None:
        if not isinstance(error, EnvironmentBroken | AgentBroken) or error.__cause__ is None:
            return  # without a cause: a package that cannot be loaded, which the start has logged
        now = time.monotonic()
        if now - self._logged_at < PLUGIN_LOG_EVERY_S:
            self._unlogged += 1
            return
        extra = {"code": error.code, "detail": error.detail, "not_logged_before": self._unlogged}
        self._logged_at, self._unlogged = now, 0
        log.warning("a plugin's code raised an exception", exc_info=error.__cause__, extra=extra)


def install(app: FastAPI) -> None:
    """Installs handlers for the exceptions that routes raise on purpose."""

    async def rollyard_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RollyardError)
        if error.status >= 500 and not isinstance(error, RequestError):
            log.warning("call failed", extra={"code": error.code, "detail": error.detail})
        request.app.state.plugin_errors.log(error)
        return problem(error)

    async def validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return problem(invalid(error.errors()))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return problem(NotFound(f"there is no {request.url.path}", remedy=NO_ROUTE))
        if error.status_code == 405:
            wrong = RequestError(f"{request.url.path} does not support {request.method}")
            return problem(wrong, status=405, headers=error.headers)
        return problem(RequestError(str(error.detail)), status=error.status_code, headers=error.headers)

    async def store(_: Request, error: Exception) -> Response:
        return problem(StoreLost(f"the store cannot be used: {error}"))

    app.state.plugin_errors = PluginErrors()
    app.add_exception_handler(RollyardError, rollyard_error)
    app.add_exception_handler(StoreUnusable, store)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)


class CatchAll:
    """ASGI middleware: logs unexpected exceptions and responds with `internal_error`, without internal details."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_started = False

        async def watched(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            log.debug("a client disconnected during its request", extra={"path": scope["path"]})
        except Exception as error:
            log.exception("a call failed unexpectedly", extra={"method": scope["method"], "path": scope["path"]})
            if is_started:
                raise  # part of the response is sent: only closing the connection signals the error
            wrapped = InternalError(f"{type(error).__name__} in {scope['method']} {scope['path']}; see the log")
            await problem(wrapped)(scope, receive, send)
