"""/v1/engines: the pool of engines. Adding and removing is for admins, because an engine receives every prompt."""

from __future__ import annotations

from contextlib import suppress

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core import check_id
from rollyard.core.failure import NotFound
from rollyard.service.app_state import app_state_of
from rollyard.service.engine_address import check_reachable
from rollyard.service.openapi import json_body
from rollyard.service.schemas.engine import EngineBody
from rollyard.service.schemas.records import engine_object, reply, without_password
from rollyard.service.schemas.requests import read_body
from rollyard.service.security.access import caller_of, require_admin

router = APIRouter(prefix="/v1", tags=["engines"])


@router.post("/engines", status_code=201, openapi_extra=json_body(EngineBody))
async def add_engine(request: Request) -> Response:
    """Probes an engine and adds it permanently: it is stored and added again after a restart."""
    require_admin(request)
    app_state = app_state_of(request)
    spec = (await read_body(request, EngineBody)).to_spec()
    check_reachable(spec, app_state.settings)
    await app_state.audit(request, "add_engine", spec.id, url=without_password(spec.url), policy=spec.policy)
    return reply(engine_object(await app_state.engines.add(spec), for_operator=True), 201)


@router.get("/engines")
async def list_engines(request: Request) -> Response:
    """Every engine with its load and health."""
    is_operator = caller_of(request).sees_all_tenants
    listed = app_state_of(request).router.list()
    return reply({"engines": [engine_object(status, for_operator=is_operator) for status in listed]})


@router.delete("/engines/{engine_id}", status_code=204)
async def remove_engine(request: Request, engine_id: str) -> Response:
    """Removes an engine. Its sessions continue on others, from the tokens that they have."""
    require_admin(request)
    app_state = app_state_of(request)
    await app_state.audit(request, "remove_engine", engine_id)
    await app_state.engines.remove(check_id(engine_id, "engine"))
    return Response(status_code=204)


@router.delete("/engines", status_code=204)
async def clear_engines(request: Request) -> Response:
    """Removes all engines."""
    require_admin(request)
    app_state = app_state_of(request)
    await app_state.audit(request, "remove_engine", "*")
    for status in app_state.router.list():
        with suppress(NotFound):  # another call has removed it meanwhile
            await app_state.engines.remove(status.spec.id)
    return Response(status_code=204)
