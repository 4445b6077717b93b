"""/v1/tokens and /v1/audit: access tokens, and the log of administrative actions. For admins.

A token is returned once, in the response to its creation or rotation. Changes apply to the next call.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core import new_id
from rollyard.core.access import TokenRecord
from rollyard.service.app_state import app_state_of
from rollyard.service.openapi import json_body
from rollyard.service.schemas.records import reply
from rollyard.service.schemas.requests import read_body
from rollyard.service.schemas.tokens import QuotaBody, RotateBody, TokenBody, token_object
from rollyard.service.security.access import require_admin
from rollyard.service.security.tokens import new_token

router = APIRouter(prefix="/v1", tags=["tokens"])


@router.post("/tokens", status_code=201, openapi_extra=json_body(TokenBody))
async def create_token(request: Request) -> Response:
    """Creates a token, which is returned only here."""
    caller, app_state = require_admin(request), app_state_of(request)
    body = await read_body(request, TokenBody)
    now = time.time()
    record, token = new_token(
        TokenRecord(
            id=new_id("tok"),
            access=body.access,
            digest="",
            name=body.name,
            runs=tuple(body.runs),
            policies=tuple(body.policies),
            created_at=now,
            created_by=caller.name,
            expires_at=None if body.expires_s is None else now + body.expires_s,
            quota=body.quota.to_quota(),
        )
    )
    await app_state.audit(request, "create_token", record.id, access=record.access, name=record.name)
    await app_state.store.put_token(record)
    app_state.tokens.put(record)
    return reply({**token_object(record), "token": token}, 201)


@router.get("/tokens")
async def list_tokens(request: Request) -> Response:
    """Returns the created tokens, without their secrets. Tokens of the settings are not included."""
    require_admin(request)
    return reply({"tokens": [token_object(record) for record in app_state_of(request).tokens.created]})


@router.post("/tokens/{token_id}/rotate", openapi_extra=json_body(RotateBody))
async def rotate_token(request: Request, token_id: str) -> Response:
    """Replaces a token's secret; the old one is refused from now on, and browsers that signed in with it are signed
    out. Its runs and policies stay its own."""
    require_admin(request)
    app_state = app_state_of(request)
    body = await read_body(request, RotateBody)
    expires_at = None if body.expires_s is None else time.time() + body.expires_s
    async with app_state.tokens.changing:
        record, token = new_token(replace(app_state.tokens.get(token_id), expires_at=expires_at))
        await app_state.audit(request, "rotate_token", record.id)
        await app_state.store.put_token(record)
        app_state.tokens.put(record)
    return reply({**token_object(record), "token": token})


@router.put("/tokens/{token_id}/quota", openapi_extra=json_body(QuotaBody))
async def change_quota(request: Request, token_id: str) -> Response:
    """Replaces a token's quota. Work that is already queued, live or stored is not affected."""
    require_admin(request)
    app_state = app_state_of(request)
    body = await read_body(request, QuotaBody)
    async with app_state.tokens.changing:
        record = replace(app_state.tokens.get(token_id), quota=body.to_quota())
        await app_state.audit(request, "change_quota", record.id, **vars(body))
        await app_state.store.put_token(record)
        app_state.tokens.put(record)
    app_state.pipeline.quota_changed(record.id)
    return reply(token_object(record))


@router.delete("/tokens/{token_id}", status_code=204)
async def revoke_token(request: Request, token_id: str) -> Response:
    """Revokes a token. Its runs stay, for admins."""
    require_admin(request)
    app_state = app_state_of(request)
    async with app_state.tokens.changing:
        record = app_state.tokens.get(token_id)
        await app_state.audit(request, "revoke_token", record.id, name=record.name)
        await app_state.store.delete_token(record.id)
        app_state.tokens.remove(record.id)
    return Response(status_code=204)


class AuditQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    before: int | None = Field(default=None, ge=1, description="The `next` of the previous page.")
    limit: int = Field(default=100, ge=1, le=1000)


@router.get("/audit")
async def list_audit(request: Request, query: Annotated[AuditQuery, Query()]) -> Response:
    """Returns administrative actions, newest first."""
    require_admin(request)
    entries = await app_state_of(request).store.audit(before=query.before, limit=query.limit)
    return reply({"entries": entries, "next": entries[-1].seq if len(entries) == query.limit else None})
