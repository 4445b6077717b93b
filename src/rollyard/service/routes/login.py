"""/v1/login: signs a browser in to the dashboard and out of it; `security/logins.py` has the rules."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core.failure import Forbidden, InvalidRequest
from rollyard.service.app_state import app_state_of
from rollyard.service.openapi import json_body
from rollyard.service.schemas.records import JsonObject, reply
from rollyard.service.schemas.requests import Body, Text, read_body
from rollyard.service.security.access import Caller, caller_of
from rollyard.service.security.logins import CODE_S, cookie_name, read_cookie, set_cookie

router = APIRouter(prefix="/v1", tags=["login"])


class LoginBody(Body):
    """Exactly one of the two."""

    code: Text | None = None
    token: Text | None = None


@router.post("/login", openapi_extra=json_body(LoginBody))
async def sign_in(request: Request) -> Response:
    """Signs a browser in, by the code of a link or by a token, and sets its cookie."""
    app_state = app_state_of(request)
    body = await read_body(request, LoginBody)
    if (body.code is None) == (body.token is None):
        raise InvalidRequest("exactly one of code and token was expected")
    logins = app_state.logins
    caller = logins.from_code(body.code) if body.code is not None else logins.from_token(body.token or "")
    record, secret, ended = logins.open(caller)
    await app_state.store.put_login(record)
    if ended:
        await app_state.store.delete_logins([one.digest for one in ended])
    lifetime_s = app_state.settings.login_s
    cookie = set_cookie(_cookie(request), secret, lifetime_s=lifetime_s, is_secure=request.url.scheme == "https")
    return reply(_caller_object(caller, record.expires_at), headers={"set-cookie": cookie})


@router.get("/login")
async def who(request: Request) -> Response:
    """Returns the caller's scope and the runs that it is bound to; of a browser, also when its session expires."""
    expires_at = request.scope.get("rollyard.login_expires_at")
    return reply(_caller_object(caller_of(request), expires_at))


@router.delete("/login", status_code=204)
async def sign_out(request: Request) -> Response:
    """Ends the session of this browser."""
    app_state = app_state_of(request)
    name = _cookie(request)
    record = app_state.logins.close(read_cookie(request.headers.get("cookie"), name))
    if record is not None:
        await app_state.store.delete_logins([record.digest])
    cookie = set_cookie(name, "", lifetime_s=0, is_secure=request.url.scheme == "https")
    return Response(status_code=204, headers={"set-cookie": cookie})


@router.post("/login/codes", status_code=201)
async def create_code(request: Request) -> Response:
    """Creates a code that signs in once, as the caller. Only on a service that listens on loopback."""
    app_state = app_state_of(request)
    if not app_state.settings.is_loopback:
        raise Forbidden("links that sign in exist only on loopback: open the page and sign in with a token")
    return reply({"code": app_state.logins.new_code(caller_of(request)), "expires_s": CODE_S}, 201)


def _cookie(request: Request) -> str:
    server = request.scope.get("server") or ("", 0)
    return cookie_name(server[1] or 0)


def _caller_object(caller: Caller, expires_at: float | None) -> JsonObject:
    return {
        "access": caller.access,
        "name": caller.name,
        "runs": caller.runs,
        "policies": caller.policies,
        "expires_at": expires_at,
    }
