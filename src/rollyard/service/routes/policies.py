"""/v1/policies: changes weights while rollouts are in flight. For trainers, because the weights are theirs.

Only the owner of a policy and admins change its weights (`access.py`). A pause is held by a token and, among callers
that share the token, by a name (`holder`). While another holder has a pause, calls are refused until its lease expires
or the caller sets `take_over`: it must always be possible to set a version and continue."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core import Json
from rollyard.core.policy import PauseMode
from rollyard.engines.weights.state import PolicyStatus
from rollyard.service.app_state import AppState, app_state_of
from rollyard.service.openapi import json_body
from rollyard.service.schemas.policies import OwnerBody, PauseBody, RenewBody, ResumeBody, policy_object
from rollyard.service.schemas.records import reply
from rollyard.service.schemas.requests import read_body
from rollyard.service.security.access import caller_of, require_admin

router = APIRouter(prefix="/v1", tags=["policies"])


class VersionsQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    hours: float = Field(default=24.0, gt=0, le=24 * 366, allow_inf_nan=False)


@router.get("/policies")
async def list_policies(request: Request) -> Response:
    """Returns every policy with its version, state and engines."""
    app_state = app_state_of(request)
    return reply({"policies": [_object(app_state, status) for status in app_state.router.policies.all()]})


@router.get("/policies/{name}")
async def get_policy(request: Request, name: str) -> Response:
    """Returns one policy."""
    app_state = app_state_of(request)
    return reply(_object(app_state, app_state.router.policies.status(name)))


@router.get("/policies/{name}/versions")
async def get_versions(request: Request, name: str, query: Annotated[VersionsQuery, Query()]) -> Response:
    """Returns when the weight versions of the policy's engines changed, since the service started: `[at, version]`,
    oldest first."""
    app_state = app_state_of(request)
    app_state.router.policies.status(name)  # NotFound
    since = time.time() - 3600 * query.hours
    return reply({"engines": app_state.history.versions(name, since)})


@router.post("/policies/{name}/pause", openapi_extra=json_body(PauseBody))
async def pause_policy(request: Request, name: str) -> Response:
    """Pauses the policy's engines, so that their weights can be written. Returns when they are paused, or after
    `wait_s`."""
    app_state = app_state_of(request)
    body = await read_body(request, PauseBody)
    await app_state.own_policy(request, name)
    status = await app_state.router.policies.pause(
        name,
        holder=_holder(request, body.holder),
        mode=PauseMode(body.mode),
        lease_s=body.lease_s,
        engines=body.engines,
        wait_s=app_state.wait_s(app_state.settings.max_wait_s if body.wait_s is None else body.wait_s),
        after=body.after,
    )
    return reply(_object(app_state_of(request), status))


@router.post("/policies/{name}/resume", openapi_extra=json_body(ResumeBody))
async def resume_policy(request: Request, name: str) -> Response:
    """Resumes the policy's engines with weights of this version: sets the version, clears caches, and continues."""
    body = await read_body(request, ResumeBody)
    await app_state_of(request).own_policy(request, name)
    holder = None if body.take_over else _holder(request, body.holder)
    status = await app_state_of(request).router.policies.resume(
        name, body.version, holder=holder, engines=body.engines, after=body.after
    )
    return reply(_object(app_state_of(request), status))


@router.post("/policies/{name}/renew", openapi_extra=json_body(RenewBody))
async def renew_policy(request: Request, name: str) -> Response:
    """Extends the lease of a pause, from now. Also takes over a pause whose lease has expired."""
    body = await read_body(request, RenewBody)
    await app_state_of(request).own_policy(request, name)
    app_state, holder = app_state_of(request), _holder(request, body.holder)
    return reply(_object(app_state, await app_state.router.policies.renew(name, holder=holder, lease_s=body.lease_s)))


@router.put("/policies/{name}/owner", openapi_extra=json_body(OwnerBody))
async def set_owner(request: Request, name: str) -> Response:
    """Sets the token that may change the policy's weights, by its id; null: the next trainer that does. For admins."""
    require_admin(request)
    app_state = app_state_of(request)
    body = await read_body(request, OwnerBody)
    status = app_state.router.policies.status(name)
    await app_state.audit(request, "set_policy_owner", name, owner=body.owner)
    app_state.owners.pop(name, None)
    if body.owner is not None:
        app_state.owners[name] = body.owner
    await app_state.store.put_owner(name, body.owner)  # after: a trainer that pauses now must not become the owner
    return reply(_object(app_state, status))


def _holder(request: Request, holder: str | None) -> str:
    name = caller_of(request).name
    return name if holder is None else f"{name}/{holder}"


def _object(app_state: AppState, status: PolicyStatus) -> dict[str, Json]:
    return policy_object(status, app_state.owners.get(status.name))
