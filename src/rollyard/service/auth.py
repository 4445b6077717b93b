"""The gate: bearer tokens always, and no browsers.

The gateway's paths have keys of their own, one per session, and know none of these tokens (`session_gateway.py`, `keys.py`). What
a caller may reach behind the gate is decided in `access.py`.

Invariant: a Host that is not ours (DNS rebinding) and any Origin (a browser's page) are refused before the token is
looked at.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Protocol

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rollyard.core import RollyardError
from rollyard.core.access import Access
from rollyard.core.failure import Forbidden, ForeignHost
from rollyard.service.access import OPERATOR, Caller
from rollyard.service.bounds import NODE_PATHS
from rollyard.service.problems import problem
from rollyard.service.rate_limits import RateLimits
from rollyard.service.tokens import Tokens

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/docs", "/openapi.json"})
"""Answered without a token: they tell what every reader of our documentation knows."""


class KeyedApp(Protocol):
    """A way in with keys of its own, beside the tokens; see `session_gateway.py`."""

    def has(self, path: str) -> bool: ...

    def refusal(self, scope: Scope, error: RollyardError) -> Response: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class Gate:
    """ASGI: lets a call in if its Host is ours, it comes from no browser, and its token is known. Calls that have a
    door of their own are handed to that instead of having their token looked at."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: Tokens,
        hosts: Sequence[str] = (),
        door: KeyedApp | None = None,
        open_paths: frozenset[str] = OPEN_PATHS,
        url_paths: frozenset[str] = frozenset(),
    ) -> None:
        """`url_paths` take a token in the URL too: `http://anyone:TOKEN@host`, which clients send as Basic."""
        self._app = app
        self._open_paths = open_paths
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
                is_open = scope["path"] in self._open_paths
                scope["rollyard.caller"] = OPERATOR if is_open else self._caller(scope["path"], headers)
        except RollyardError as error:
            refusal = problem(error) if door is None else door.refusal(scope, error)
            await refusal(scope, receive, send)
            return
        await (door or self._app)(scope, receive, send)

    def _caller(self, path: str, headers: dict[bytes, str]) -> Caller:
        given = headers.get(b"authorization")
        caller = self._tokens.caller(_from_url(given) if path in self._url_paths else given)
        if caller.access is Access.NODE and not path.startswith(NODE_PATHS):
            raise Forbidden(f"a node's token is for {NODE_PATHS} alone")
        self._rates.check(caller)
        return caller

    def _check_origin(self, scope: Scope, headers: dict[bytes, str]) -> None:
        host = headers.get(b"host", "").lower()
        if not (host in self._hosts or split_host(host)[0] in self._hosts or _is_here(host, scope)):
            raise ForeignHost(f"the Host header says {host[:100]!r}, which is not this service")
        if b"origin" in headers:
            raise ForeignHost("a call with an Origin header comes from a browser's page")


def _from_url(authorization: str | None) -> str | None:
    """The password of a Basic header as a bearer's token; any other header as it is."""
    scheme, _, encoded = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return authorization
    try:
        _, _, password = base64.b64decode(encoded.strip(), validate=True).decode("latin-1").partition(":")
    except ValueError:
        return None
    return f"Bearer {password}"


def split_host(host: str, default: int = 80) -> tuple[str, int]:
    """ "[::1]:80" → ("::1", 80); without a port it is the scheme's own."""
    match = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::(\d{1,5}))?", host)
    if match is None:
        return "", 0
    return match[1] or match[2], int(match[3] or default)


def _is_here(host: str, scope: Scope) -> bool:
    """A literal address is ours if the connection came to it; a loopback name if it came to loopback. Either
    needs the right port. A page on another site can make its own name point here, but not one of these."""
    name, port = split_host(host, 443 if scope.get("scheme") == "https" else 80)
    server: tuple[str, int | None] | None = scope.get("server")
    if server is None or port != server[1]:
        return False
    here = server[0].removeprefix("::ffff:")
    is_loopback = here == "::1" or here.startswith("127.")
    return name == here or (is_loopback and name in ("localhost", "127.0.0.1", "::1"))
