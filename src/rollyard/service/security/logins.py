"""Sign-ins of the dashboard: a browser signs in with a one-time code or with a token.

A code is part of the link that `rollyard serve` and `rollyard open` print; only a service on loopback issues codes. A
sign-in acts as the token that it was made with. It ends at its own expiry, with the sign-out, and when that token is
revoked, rotated or expires: a token that leaked leaves no sign-in behind.

A sign-in has two secrets: the value of a cookie, and a key that the page keeps and sends in `PAGE_HEADER`. Browsers
send a cookie to every port of a host, so a program on another port may receive it. It does not get the key, which the
browser keeps for the page's origin only.

Invariants. A code is valid once and for `CODE_S`. Codes and sign-ins are kept as digests; the store has those of
sign-ins, so that a page stays signed in while the service restarts. A caller's new codes and sign-ins end only its own
older ones.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.types import Scope

from rollyard.core.access import Access, LoginRecord
from rollyard.core.failure import Forbidden, Unauthorized
from rollyard.service.security.access import Caller
from rollyard.service.security.tokens import KnownToken, Tokens

CODE_S = 900.0
MOST_CODES = 16  # of one caller; the oldest is dropped
MOST_LOGINS = 100  # of one caller; the oldest is ended
PAGE_HEADER = b"x-rollyard-page"

TOKEN_REMEDY = "Check that the whole token was entered, or ask an admin for one: rollyard access create reader."
REMEDY = "Open the page with `rollyard open` on the machine of the service, or sign in with a token."


@dataclass(frozen=True, slots=True)
class NewLogin:
    """A sign-in with its secrets, which are not kept. `ended`: earlier sign-ins that it replaces."""

    record: LoginRecord
    cookie: str
    page_key: str
    ended: tuple[LoginRecord, ...]


@dataclass(frozen=True, slots=True)
class _Code:
    owner: str
    token: str  # the digest of the owner's token
    expires: float  # monotonic


class Logins:
    """The open codes and sign-ins of a service."""

    def __init__(self, tokens: Tokens, *, lifetime_s: float, records: Iterable[LoginRecord] = ()) -> None:
        self._tokens = tokens
        self._lifetime_s = lifetime_s
        self._codes: dict[str, _Code] = {}  # by digest, the oldest first
        self._records = {record.digest: record for record in records}

    def new_code(self, caller: Caller) -> str:
        """Returns a code that signs in as the caller."""
        token = self._valid(caller.name)
        if token is None:
            raise Unauthorized("this token is no longer valid")
        _check(caller)
        now = time.monotonic()
        self._codes = {digest: code for digest, code in self._codes.items() if code.expires > now}
        own = [digest for digest, code in self._codes.items() if code.owner == caller.name]
        for digest in own[: max(0, len(own) + 1 - MOST_CODES)]:
            del self._codes[digest]
        secret = secrets.token_urlsafe(24)
        self._codes[_digest(secret)] = _Code(caller.name, token.digest.hex(), now + CODE_S)
        return secret

    def from_code(self, secret: str) -> Caller:
        """Returns the caller of a code, which is used up by this call."""
        code = self._codes.pop(_digest(secret), None)
        token = self._valid(code.owner, code.token) if code is not None and code.expires > time.monotonic() else None
        if token is None:
            raise Unauthorized("this link has been used or has expired", remedy=REMEDY)
        return token.caller

    def from_token(self, secret: str) -> Caller:
        try:
            caller = self._tokens.caller(f"Bearer {secret}")
        except Unauthorized as error:
            raise Unauthorized(error.detail, remedy=TOKEN_REMEDY) from None
        _check(caller)
        return caller

    def open(self, caller: Caller) -> NewLogin:
        """Signs in."""
        token = self._valid(caller.name)
        if token is None:
            raise Unauthorized("this token is no longer valid")
        now = time.time()
        expired = [one for one in self._records.values() if one.expires_at <= now]
        own = [one for one in self._records.values() if one.expires_at > now and one.owner == caller.name]
        own.sort(key=lambda one: one.created_at)
        ended = (*expired, *own[: max(0, len(own) + 1 - MOST_LOGINS)])
        for one in ended:
            del self._records[one.digest]
        cookie, page_key = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        record = LoginRecord(
            digest=_digest(cookie, page_key),
            owner=caller.name,
            token=token.digest.hex(),
            created_at=now,
            expires_at=min(now + self._lifetime_s, token.expires_at or float("inf")),
        )
        self._records[record.digest] = record
        return NewLogin(record, cookie, page_key, ended)

    def close(self, record: LoginRecord) -> None:
        """Signs out."""
        self._records.pop(record.digest, None)

    def is_open(self, record: LoginRecord) -> bool:
        """Whether that sign-in has neither expired nor been signed out."""
        return record.digest in self._records and record.expires_at > time.time()

    def find(self, cookie: str | None, page_key: str) -> tuple[Caller, LoginRecord]:
        """Returns the caller of a sign-in. Raises `Unauthorized` if it is unknown or has ended."""
        if cookie is None:
            raise Unauthorized("this page is not signed in", remedy=REMEDY)
        record = self._records.get(_digest(cookie, page_key))
        if record is None or record.expires_at <= time.time():
            raise Unauthorized("this sign-in has ended", remedy=REMEDY)
        token = self._valid(record.owner, record.token)
        if token is None:
            raise Unauthorized("the token of this sign-in is no longer valid", remedy="Sign in with another token.")
        return token.caller, record

    def _valid(self, owner: str, digest: str | None = None) -> KnownToken | None:
        """The owner's token, if it is valid and has not been rotated since it had that digest."""
        token = self._tokens.named(owner)
        return token if token is not None and digest in (None, token.digest.hex()) else None


def _check(caller: Caller) -> None:
    if caller.access is Access.NODE:
        raise Forbidden("a node's token cannot sign in to the dashboard")


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def cookie_name(scope: Scope) -> str:
    """The cookie's name, with the port: browsers send the cookies of one service to the others on the machine."""
    return f"rollyard_login_{(scope.get('server') or ('', 0))[1] or 0}"


def read_cookie(header: str | None, name: str) -> str | None:
    """The value of a cookie. Unlike `http.cookies`, ignores malformed cookies of other programs on the same host."""
    for part in (header or "").split(";"):
        key, _, value = part.strip().partition("=")
        if key == name:
            return value
    return None


def set_cookie(name: str, value: str, *, lifetime_s: float, is_secure: bool) -> str:
    secure = "; Secure" if is_secure else ""
    return f"{name}={value}; Path=/v1; Max-Age={math.ceil(lifetime_s)}; HttpOnly; SameSite=Strict{secure}"
