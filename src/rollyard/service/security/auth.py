"""The gate: every call needs a bearer token, or the cookie of a browser that is signed in to the dashboard.

The gateway's paths take session keys, one per session, and do not accept these tokens (`session_gateway.py`,
`keys.py`). `access.py` decides what a caller may do behind the gate.

Invariant: a foreign Host (DNS rebinding) and calls of another origin's page are refused before the token is checked.
A cookie is accepted only together with the page's key (`logins.py`), and ignored beside a token.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rollyard.core import RollyardError
from rollyard.core.access import Access
from rollyard.core.failure import Forbidden, ForeignHost
from rollyard.service.problems import problem
from rollyard.service.security.access import OPERATOR, Caller
from rollyard.service.security.bounds import LOGIN_PATH, NODE_PATHS
from rollyard.service.security.logins import PAGE_HEADER, Logins, cookie_name, read_cookie
from rollyard.service.security.rate_limits import RateLimits
from rollyard.service.security.tokens import Tokens

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/docs", "/openapi.json"})
"""Served without a token: they return only public information."""


class KeyedApp(Protocol):
    """An app with keys of its own instead of tokens; see `session_gateway.py`."""

    def has(self, path: str) -> bool: ...

    def refusal(self, scope: Scope, error: RollyardError) -> Response: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class Gate:
    """ASGI middleware: admits a call if its Host is this service's, its Origin (if any) too, and its token or cookie is
    known. Calls to paths of `door` are passed to it without a check of their token."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: Tokens,
        logins: Logins | None = None,
        hosts: Sequence[str] = (),
        door: KeyedApp | None = None,
        open_paths: frozenset[str] = OPEN_PATHS,
        is_open: Callable[[str], bool] = lambda _: False,
        url_paths: frozenset[str] = frozenset(),
    ) -> None:
        """`is_open`: further paths without a token. `url_paths` also accept a token in the URL,
        `http://anyone:TOKEN@host`, which clients send as Basic auth."""
        self._app = app
        self._open_paths = open_paths
        self._is_open = is_open
        self._logins = logins
        self._url_paths = url_paths
        self._tokens = tokens
        self._door = door
        self._rates = RateLimits()
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        door = self._door if self._door is not None and self._door.has(scope["path"]) else None
        try:
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            self._check_origin(scope, headers)
            if door is None:
                scope["rollyard.rates"] = self._rates  # for sign-ins, whose caller is known only after the body is read
                scope["rollyard.caller"] = OPERATOR if self._needs_no_token(scope) else self._caller(scope, headers)
        except RollyardError as error:
            refusal = problem(error) if door is None else door.refusal(scope, error)
            await refusal(scope, receive, send)
            return
        await (door or self._app)(scope, receive, send)

    def _needs_no_token(self, scope: Scope) -> bool:
        path = scope["path"]
        return path in self._open_paths or self._is_open(path) or (path == LOGIN_PATH and scope["method"] == "POST")

    def _caller(self, scope: Scope, headers: dict[bytes, str]) -> Caller:
        path, authorization = scope["path"], headers.get(b"authorization")
        page_key = headers.get(PAGE_HEADER)
        if authorization is None and page_key is not None and self._logins is not None:
            secret = read_cookie(headers.get(b"cookie"), cookie_name(scope))
            caller, scope["rollyard.login"] = self._logins.find(secret, page_key)
        else:
            caller = self._tokens.caller(_from_url(authorization) if path in self._url_paths else authorization)
        if caller.access is Access.NODE and not path.startswith(NODE_PATHS):
            raise Forbidden(f"a node's token is valid only for {NODE_PATHS}")
        self._rates.check(caller)
        return caller

    def _check_origin(self, scope: Scope, headers: dict[bytes, str]) -> None:
        host = headers.get(b"host", "").lower()
        if not (host in self._hosts or split_host(host)[0] in self._hosts or _is_here(host, scope)):
            raise ForeignHost(f"the Host header is {host[:100]!r}, which is not this service")
        # A proxy in front of an http service may terminate TLS; an http page never belongs to an https service.
        own = [f"https://{host}"] if scope.get("scheme") == "https" else [f"http://{host}", f"https://{host}"]
        origin = headers.get(b"origin")
        if origin is not None and origin.lower() not in own:
            raise ForeignHost(f"a page of {origin[:100]!r} called, which is not this service's own")
        # Simple GET requests have no Origin. Links of other sites may open pages, which contain no data.
        is_foreign = headers.get(b"sec-fetch-site", "none") not in ("same-origin", "none")
        if is_foreign and not (scope["path"] in OPEN_PATHS or self._is_open(scope["path"])):
            raise ForeignHost("a page of another origin called")


def _from_url(authorization: str | None) -> str | None:
    """The password of a Basic header as a bearer token. Other headers are returned unchanged."""
    scheme, _, encoded = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return authorization
    try:
        _, _, password = base64.b64decode(encoded.strip(), validate=True).decode("latin-1").partition(":")
    except ValueError:
        return None
    return f"Bearer {password}"


def split_host(host: str, default: int = 80) -> tuple[str, int]:
    """ "[::1]:80" → ("::1", 80). Without a port, `default` is returned."""
    match = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::(\d{1,5}))?", host)
    if match is None:
        return "", 0
    return match[1] or match[2], int(match[3] or default)


def _is_here(host: str, scope: Scope) -> bool:
    """Whether the Host is this service's: the literal address that the connection came to, or a loopback name if it
    came to loopback, each with the right port. A page on another site can point its own name here, but not one of these
    addresses."""
    name, port = split_host(host, 443 if scope.get("scheme") == "https" else 80)
    server: tuple[str, int | None] | None = scope.get("server")
    if server is None or port != server[1]:
        return False
    here = server[0].removeprefix("::ffff:")
    is_loopback = here == "::1" or here.startswith("127.")
    return name == here or (is_loopback and name in ("localhost", "127.0.0.1", "::1"))
