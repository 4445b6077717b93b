"""/v1/policies: changing weights under rollouts that are in flight. Trainers may call it: it is their weights.

Who paused is known by its token. A pause or a renewal of another's is refused; a resume is not: it must always be
possible to name a version and go on."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core.policy import PauseMode
from rollyard.service.auth import caller_of
from rollyard.service.house import house_of
from rollyard.service.models import read_body
from rollyard.service.openapi import json_body
from rollyard.service.policy_models import PauseBody, RenewBody, ResumeBody, policy_object
from rollyard.service.records import reply

router = APIRouter(prefix="/v1", tags=["policies"])


@router.get("/policies")
async def list_policies(request: Request) -> Response:
    """Every policy with its version, its state, and its engines."""
    return reply({"policies": [policy_object(status) for status in house_of(request).router.policies.all()]})


@router.get("/policies/{name}")
async def get_policy(request: Request, name: str) -> Response:
    """One policy."""
    return reply(policy_object(house_of(request).router.policies.status(name)))


@router.post("/policies/{name}/pause", openapi_extra=json_body(PauseBody))
async def pause_policy(request: Request, name: str) -> Response:
    """Pauses its engines, so that their weights can be written. Answers when they are paused, or after `wait_s`."""
    house = house_of(request)
    body = await read_body(request, PauseBody)
    status = await house.router.policies.pause(
        name,
        holder=caller_of(request).name,
        mode=PauseMode(body.mode),
        lease_s=body.lease_s,
        engines=body.engines,
        wait_s=house.wait_s(house.settings.max_wait_s if body.wait_s is None else body.wait_s),
    )
    return reply(policy_object(status))


@router.post("/policies/{name}/resume", openapi_extra=json_body(ResumeBody))
async def resume_policy(request: Request, name: str) -> Response:
    """Its engines have weights of this version: they get it, clear their caches, and go on."""
    body = await read_body(request, ResumeBody)
    status = await house_of(request).router.policies.resume(name, body.version, engines=body.engines)
    return reply(policy_object(status))


@router.post("/policies/{name}/renew", openapi_extra=json_body(RenewBody))
async def renew_policy(request: Request, name: str) -> Response:
    """The pause goes on for so long from now. Also takes up one whose lease ran out."""
    body = await read_body(request, RenewBody)
    holder = caller_of(request).name
    return reply(
        policy_object(await house_of(request).router.policies.renew(name, holder=holder, lease_s=body.lease_s))
    )
