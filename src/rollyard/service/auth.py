"""Who may call: bearer tokens always, three scopes, and no browsers.

`admin` may do everything; `trainer` everything but engines, pools, nodes and other people's runs; `node` only what a
node of the fleet says to its head. On loopback an admin token is made at first start and written, mode 0600, where the
client and the CLI look for it; with a fleet, a node's token too.

The gateway's paths have keys of their own, one per session, and know none of these tokens (`door.py`, `keys.py`).

Invariants. A token is compared by its digest, in constant time, against all tokens. A token file is complete or not
there, and is refused if others can read it. A Host that is not ours (DNS rebinding) and any Origin (a browser's
page) are refused before the token is looked at.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from pydantic import SecretStr
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rollyard.core import RollyardError, Run
from rollyard.core.failure import Forbidden, ForeignHost, Unauthorized
from rollyard.service.bounds import NODE_PATHS
from rollyard.service.problems import problem
from rollyard.service.settings import Settings, SettingsError

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/docs", "/openapi.json"})
"""Answered without a token: they tell what every reader of our documentation knows."""

_TOKEN = re.compile(r"[\x21-\x7e]{16,512}")


class Access(StrEnum):
    ADMIN = "admin"
    TRAINER = "trainer"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. `name` is a fingerprint of the token: it tells callers apart and opens nothing."""

    access: Access
    name: str

    @property
    def is_admin(self) -> bool:
        return self.access is Access.ADMIN


class Tokens:
    """The tokens in force, kept as digests."""

    def __init__(self, admin: Iterable[str], trainer: Iterable[str] = (), node: Iterable[str] = ()) -> None:
        self._known = [
            (digest, Caller(access, digest.hex()[:16]))
            for access, tokens in ((Access.NODE, node), (Access.TRAINER, trainer), (Access.ADMIN, admin))
            for digest in map(_digest, tokens)
        ]

    def caller(self, authorization: str | None) -> Caller:
        """Who sent this Authorization header; `Unauthorized` if nobody we know."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthorized("this call needs a bearer token")
        given = _digest(token.strip())
        found: Caller | None = None
        for digest, caller in self._known:  # no early end: the time tells nothing
            if hmac.compare_digest(digest, given):
                found = caller
        if found is None:
            raise Unauthorized("this token is not known here")
        return found


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def load_tokens(settings: Settings) -> Tokens:
    """The configured tokens; on loopback without an admin token, the one of the token file, made if need be."""
    admin = _given("admin_tokens", settings.admin_tokens)
    trainer = _given("trainer_tokens", settings.trainer_tokens)
    if not admin and settings.is_loopback:
        admin = [own_token(settings.token_path)]
    if not admin and not trainer:
        raise SettingsError(
            f"host {settings.host} can be reached by others: set admin_tokens or trainer_tokens first, "
            "or listen on 127.0.0.1"
        )
    node = _given("node_tokens", settings.node_tokens)
    if settings.fleet is not None and not node:
        node = [node_token(settings)]
    return Tokens(admin, trainer, node)


def node_token(settings: Settings) -> str:
    """The one that nodes are given which the service itself starts."""
    given = _given("node_tokens", settings.node_tokens)
    return given[0] if given else own_token(settings.node_token_path)


def own_token(path: Path) -> str:
    """The token of that file. Makes it, whole and mode 0600, if there is none."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, path)  # unlike rename, never replaces a token that another process has just made
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return _read(path)[0]


def _given(name: str, values: Sequence[SecretStr]) -> list[str]:
    tokens: list[str] = []
    for secret in values:
        value = secret.get_secret_value()
        tokens += _read(Path(value[1:]).expanduser()) if value.startswith("@") else [value]
    if not all(_TOKEN.fullmatch(token) for token in tokens):
        raise SettingsError(f"{name}: a token is 16 to 512 printable ASCII characters without spaces")
    return tokens


def _read(path: Path) -> list[str]:
    """One token per line; empty lines and # lines do not count."""
    try:
        with path.open() as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise SettingsError(f"the token file {path} can be read by others: chmod 600 {path}")
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the token file {path} cannot be read: {error}") from error
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not tokens or not all(_TOKEN.fullmatch(token) for token in tokens):
        raise SettingsError(f"the token file {path} holds no token; delete it and a new one is made")
    return tokens


def caller_of(request: Request) -> Caller:
    return request.scope["rollyard.caller"]


def require_admin(request: Request) -> None:
    if not caller_of(request).is_admin:
        raise Forbidden(f"{request.method} {request.url.path} is for admins")


def require_node(request: Request) -> None:
    if caller_of(request).access is Access.TRAINER:
        raise Forbidden(f"{request.method} {request.url.path} is for nodes")


def require_mine(caller: Caller, run: Run) -> None:
    """Runs are changed by the token that made them, and by admins. The default run belongs to everyone."""
    if not caller.is_admin and run.owner not in ("", caller.name):
        raise Forbidden(f"run {run.id!r} was made with another token")


class Door(Protocol):
    """A way in with keys of its own, beside the tokens; see `door.py`."""

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
        door: Door | None = None,
        open_paths: frozenset[str] = OPEN_PATHS,
        url_paths: frozenset[str] = frozenset(),
    ) -> None:
        """`url_paths` take a token in the URL too: `http://anyone:TOKEN@host`, which clients send as Basic."""
        self._app = app
        self._open_paths = open_paths
        self._url_paths = url_paths
        self._tokens = tokens
        self._door = door
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        door = self._door if self._door is not None and self._door.has(scope["path"]) else None
        try:
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            self._check_origin(scope, headers)
            if door is None and scope["path"] not in self._open_paths:
                given = headers.get(b"authorization")
                caller = self._tokens.caller(_from_url(given) if scope["path"] in self._url_paths else given)
                if caller.access is Access.NODE and not scope["path"].startswith(NODE_PATHS):
                    raise Forbidden(f"a node's token is for {NODE_PATHS} alone")
                scope["rollyard.caller"] = caller
        except RollyardError as error:
            refusal = problem(error) if door is None else door.refusal(scope, error)
            await refusal(scope, receive, send)
            return
        await (door or self._app)(scope, receive, send)

    def _check_origin(self, scope: Scope, headers: dict[bytes, str]) -> None:
        host = headers.get(b"host", "").lower()
        if not (host in self._hosts or split_host(host)[0] in self._hosts or _is_here(host, scope.get("server"))):
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


def split_host(host: str) -> tuple[str, int]:
    """ "[::1]:80" → ("::1", 80); without a port it is 80, HTTP's own."""
    match = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::(\d{1,5}))?", host)
    if match is None:
        return "", 0
    return match[1] or match[2], int(match[3] or 80)


def _is_here(host: str, server: tuple[str, int | None] | None) -> bool:
    """A literal address is ours if the connection came to it; a loopback name if it came to loopback. Either
    needs the right port. A page on another site can make its own name point here, but not one of these."""
    name, port = split_host(host)
    if server is None or port != server[1]:
        return False
    here = server[0].removeprefix("::ffff:")
    is_loopback = here == "::1" or here.startswith("127.")
    return name == here or (is_loopback and name in ("localhost", "127.0.0.1", "::1"))
