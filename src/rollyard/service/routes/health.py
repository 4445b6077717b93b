"""Endpoints for monitoring: /healthz (the process responds), /readyz (work is accepted), /metrics."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from rollyard.core.failure import Draining
from rollyard.service import openapi
from rollyard.service.app_state import app_state_of
from rollyard.service.schemas.records import reply
from rollyard.service.security.access import require_operator
from rollyard.service.unserved import unserved_policies

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> Response:
    """Returns 200 as long as the process responds."""
    return reply({"status": "ok"})


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """Returns 200 if the work of an earlier process is recovered and new work is accepted; otherwise 503."""
    app_state = app_state_of(request)
    if app_state.pipeline.is_draining:
        raise Draining("the service is shutting down")
    await app_state.store.list(limit=1)  # raises StoreLost (503) if the store is lost
    waiting = sum(runtime.waiting for runtime in app_state.resources.runtimes.values())
    unserved = len(unserved_policies(app_state.pipeline, {}))  # their names are in /v1/status, which needs a token
    return reply({"status": "ready", "waiting_for_room": waiting, "unserved_policies": unserved})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Returns metrics as Prometheus text, or as OpenMetrics if accepted. For admins, and for readers of all runs,
    because it contains the names of runs and engines."""
    require_operator(request)
    data, content_type = app_state_of(request).pipeline.metrics.render(request.headers.get("accept", ""))
    return Response(data, headers={"content-type": content_type})


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    return HTMLResponse(openapi.page(openapi.describe(request.app)))


@router.get("/openapi.json", include_in_schema=False)
async def schema(request: Request) -> Response:
    return reply(openapi.describe(request.app))
