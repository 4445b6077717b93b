"""The ASGI application: routes, exception handlers and middleware.

Middleware from the outside in: CallCounter (metrics), CatchAll (no exception escapes), Gate (Host, Origin, token or
cookie), BodyLimit, then the routes. The gate passes calls to the gateway's paths to `SessionGateway` instead.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core.version import __version__
from rollyard.service import openapi, problems, prorl
from rollyard.service.app_state import AppState
from rollyard.service.prometheus import CallCounter
from rollyard.service.routes import (
    details,
    draws,
    engines,
    evals,
    events,
    fleet,
    groups,
    health,
    ids,
    login,
    overview,
    pages,
    policies,
    results,
    rollouts,
    runs,
    series,
    sessions,
    status,
    tokens,
)
from rollyard.service.security.auth import OPEN_PATHS, Gate
from rollyard.service.security.bounds import BodyLimit, ClientGone
from rollyard.service.session_gateway import SessionGateway

PARTS = (
    *(runs, rollouts, details, groups, draws, evals, ids, sessions, engines, policies, tokens, fleet, status, events),
    *(health, results, overview, series, login),
)
"""The modules of the API, in the order of its description."""

DESCRIPTION = "Rollouts for reinforcement learning of LLM agents, as a service."


def create_app(app_state: AppState) -> FastAPI:
    app = FastAPI(
        title="Rollyard",
        version=__version__,
        description=DESCRIPTION,
        openapi_url=None,  # served by routes/health.py: see openapi.py
        redirect_slashes=False,
    )
    app.state.app_state = app_state
    for part in PARTS:
        app.router.routes += part.router.routes  # `include_router` would build each route again: 30 ms for every app
    app.router.routes += pages.router.routes
    if app_state.settings.prorl:
        prorl.mount(app, app_state)
    problems.install(app)
    app.add_exception_handler(ClientGone, _client_gone)
    app.openapi = lambda: openapi.describe(app)  # type: ignore[method-assign]
    app.add_middleware(BodyLimit, limit_bytes=app_state.settings.max_body_bytes)
    door = SessionGateway(app_state.keys, app_state.sessions, limit_bytes=app_state.settings.max_body_bytes)
    app.add_middleware(
        Gate,
        tokens=app_state.tokens,
        logins=app_state.logins,
        hosts=app_state.settings.allowed_hosts,
        door=door,
        open_paths=OPEN_PATHS | prorl.open_paths(app_state.settings),
        is_open=pages.is_page,
        url_paths=prorl.PATHS,
    )
    app.add_middleware(problems.CatchAll)
    app.add_middleware(CallCounter, metrics=app_state.pipeline.metrics)
    return app


async def _client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # no one receives it; the number is what nginx logs for it
