"""The app: routes, errors, and the order in which a call passes the gate.

From outside in: Counted (metrics), CatchAll (nothing escapes), Gate (Host, Origin, token), BodyLimit, then the routes.
The gateway's calls leave the row at the gate, through their own door.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from rollyard import __version__
from rollyard.service import openapi, problems, prorl
from rollyard.service.app_state import AppState
from rollyard.service.auth import OPEN_PATHS, Gate
from rollyard.service.bounds import BodyLimit, ClientGone
from rollyard.service.prometheus import CallCounter
from rollyard.service.routes import (
    draws,
    engines,
    evals,
    events,
    fleet,
    groups,
    health,
    policies,
    rollouts,
    runs,
    sessions,
    status,
    tokens,
)
from rollyard.service.session_gateway import SessionGateway

PARTS = (runs, rollouts, groups, draws, evals, sessions, engines, policies, tokens, fleet, status, events, health)
"""The wings of the API, in the order of its description."""

DESCRIPTION = "Rollouts for reinforcement learning of LLM agents, as a service."


def create_app(house: AppState) -> FastAPI:
    app = FastAPI(
        title="Rollyard",
        version=__version__,
        description=DESCRIPTION,
        openapi_url=None,  # we serve our own: see openapi.py
        redirect_slashes=False,
    )
    app.state.house = house
    for part in PARTS:
        app.router.routes += part.router.routes  # `include_router` would build each of them anew: 30 ms for every app
    if house.settings.prorl:
        prorl.mount(app, house)
    problems.install(app)
    app.add_exception_handler(ClientGone, _nobody_listens)
    app.openapi = lambda: openapi.describe(app)  # type: ignore[method-assign]
    app.add_middleware(BodyLimit, limit_bytes=house.settings.max_body_bytes)
    door = SessionGateway(house.keys, house.sessions, limit_bytes=house.settings.max_body_bytes)
    app.add_middleware(
        Gate,
        tokens=house.tokens,
        hosts=house.settings.allowed_hosts,
        door=door,
        open_paths=OPEN_PATHS | prorl.open_paths(house.settings),
        url_paths=prorl.PATHS,
    )
    app.add_middleware(problems.CatchAll)
    app.add_middleware(CallCounter, metrics=house.yard.metrics)
    return app


async def _nobody_listens(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # goes nowhere; the number is what nginx logs for it
