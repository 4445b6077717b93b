"""/v1/login: signs a browser in to the dashboard and out of it; `security/logins.py` has the rules."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core.access import LoginRecord
from rollyard.core.failure import Forbidden, InvalidRequest
from rollyard.service.app_state import app_state_of
from rollyard.service.openapi import json_body
from rollyard.service.schemas.records import JsonObject, reply
from rollyard.service.schemas.requests import read_body
from rollyard.service.schemas.tokens import LoginBody
from rollyard.service.security.access import Caller, caller_of
from rollyard.service.security.logins import CODE_S, cookie_name, set_cookie

router = APIRouter(prefix="/v1", tags=["login"])


@router.post("/login", openapi_extra=json_body(LoginBody))
async def sign_in(request: Request) -> Response:
    """Signs a browser in, by the code of a link or by a token. Sets its cookie and returns the page's key."""
    app_state = app_state_of(request)
    body = await read_body(request, LoginBody)
    if (body.code is None) == (body.token is None):
        raise InvalidRequest("exactly one of code and token was expected")
    logins = app_state.logins
    caller = logins.from_code(body.code) if body.code is not None else logins.from_token(body.token or "")
    request.scope["rollyard.rates"].check(caller)
    login = logins.open(caller)
    await app_state.store.put_login(login.record)
    if login.ended:
        await app_state.store.delete_logins([one.digest for one in login.ended])
    answer = {**_caller_object(caller, login.record), "page_key": login.page_key}
    return reply(answer, headers={"set-cookie": _cookie(request, login.cookie, login.record.expires_at - time.time())})


@router.get("/login")
async def who(request: Request) -> Response:
    """Returns the caller's scope and the runs that it is bound to; of a browser, also when its sign-in expires."""
    return reply(_caller_object(caller_of(request), _login_of(request)))


@router.delete("/login", status_code=204)
async def sign_out(request: Request) -> Response:
    """Ends this browser's sign-in."""
    record = _login_of(request)
    if record is None:
        raise InvalidRequest("this call has a token: there is no sign-in to end")
    app_state = app_state_of(request)
    await app_state.store.delete_logins([record.digest])  # first: a restart must not bring an ended sign-in back
    app_state.logins.close(record)
    return Response(status_code=204, headers={"set-cookie": _cookie(request, "", 0)})


@router.post("/login/codes", status_code=201)
async def create_code(request: Request) -> Response:
    """Creates a code that signs in once, as the caller. Only for a token, on a service that listens on loopback."""
    app_state = app_state_of(request)
    if not app_state.settings.is_loopback:
        raise Forbidden("links that sign in exist only on loopback: open the page and sign in with a token")
    if _login_of(request) is not None:
        raise Forbidden("a browser's sign-in cannot create another one: this call needs a token")
    return reply({"code": app_state.logins.new_code(caller_of(request)), "expires_s": CODE_S}, 201)


def _login_of(request: Request) -> LoginRecord | None:
    return request.scope.get("rollyard.login")


def _cookie(request: Request, value: str, lifetime_s: float) -> str:
    """The header that sets the cookie. A page of https, also behind a proxy, gets a Secure one."""
    is_secure = request.url.scheme == "https" or request.headers.get("origin", "").lower().startswith("https://")
    return set_cookie(cookie_name(request.scope), value, lifetime_s=lifetime_s, is_secure=is_secure)


def _caller_object(caller: Caller, record: LoginRecord | None) -> JsonObject:
    return {
        "access": caller.access,
        "name": caller.name,
        "runs": caller.runs,
        "policies": caller.policies,
        "expires_at": record.expires_at if record is not None else None,
    }
