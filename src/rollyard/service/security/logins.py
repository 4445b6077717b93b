"""Sign-ins of the dashboard: a browser gets a cookie for a one-time code or for a token.

A code is part of the link that `rollyard serve` and `rollyard open` print; only a service on loopback issues codes. A
cookie acts as the token that opened it: it ends when that token is revoked or expires, at its own expiry, and with the
sign-out.

Invariants. A code is valid once and for `CODE_S`. Codes and cookies are kept as digests; the store has those of
cookies, so that a page stays signed in while the service restarts. A cookie is accepted only together with the header
`PAGE_HEADER`, which a page of another origin cannot send.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie

from rollyard.core.access import Access, LoginRecord
from rollyard.core.failure import Forbidden, Unauthorized
from rollyard.service.security.access import Caller
from rollyard.service.security.tokens import Tokens

CODE_S = 900.0
MOST_CODES = 64  # the oldest is dropped: a program that opens the page in a loop uses no more memory
MOST_LOGINS = 1000  # of all callers; the oldest is ended
PAGE_HEADER = b"x-rollyard-page"


class Logins:
    """The open codes and sign-ins of a service."""

    def __init__(self, tokens: Tokens, *, lifetime_s: float, records: Iterable[LoginRecord] = ()) -> None:
        self._tokens = tokens
        self._lifetime_s = lifetime_s
        self._codes: dict[str, tuple[str, float]] = {}  # digest → caller's name, monotonic expiry
        self._records = {record.digest: record for record in records}

    def new_code(self, caller: Caller) -> str:
        """Returns a code that signs in as the caller."""
        _check(caller)
        while len(self._codes) >= MOST_CODES:
            del self._codes[next(iter(self._codes))]
        code = secrets.token_urlsafe(24)
        self._codes[_digest(code)] = (caller.name, time.monotonic() + CODE_S)
        return code

    def from_code(self, code: str) -> Caller:
        """Returns the caller of a code, which is used up by this call."""
        name, expires = self._codes.pop(_digest(code), ("", 0.0))
        caller = self._tokens.named(name) if expires > time.monotonic() else None
        if caller is None:
            raise Unauthorized("this link has been used or has expired: get a new one with `rollyard open`")
        return caller

    def from_token(self, token: str) -> Caller:
        caller = self._tokens.caller(f"Bearer {token}")
        _check(caller)
        return caller

    def open(self, caller: Caller) -> tuple[LoginRecord, str, list[LoginRecord]]:
        """Signs in. Returns the record and the cookie's value, and the records that end with it: expired ones, and the
        oldest if there are too many."""
        secret = secrets.token_urlsafe(32)
        now = time.time()
        record = LoginRecord(_digest(secret), caller.name, now, now + self._lifetime_s)
        ended = [one for one in self._records.values() if one.expires_at <= now]
        live = len(self._records) - len(ended)
        oldest = sorted((one for one in self._records.values() if one.expires_at > now), key=lambda one: one.created_at)
        ended += oldest[: max(0, live + 1 - MOST_LOGINS)]
        for one in ended:
            del self._records[one.digest]
        self._records[record.digest] = record
        return record, secret, ended

    def close(self, secret: str | None) -> LoginRecord | None:
        """Signs out. Returns the record that ended, if there was one."""
        return self._records.pop(_digest(secret or ""), None)

    def find(self, secret: str | None) -> tuple[Caller, LoginRecord]:
        """Returns the caller of a cookie's value. Raises `Unauthorized` if it is unknown or has ended."""
        if secret is None:
            raise Unauthorized("this page is not signed in: open it with `rollyard open`, or sign in with a token")
        record = self._records.get(_digest(secret))
        if record is None or record.expires_at <= time.time():
            raise Unauthorized("this session has ended: open the page with `rollyard open`, or sign in with a token")
        caller = self._tokens.named(record.owner)
        if caller is None:
            raise Unauthorized("the token of this session is no longer valid: sign in with another one")
        return caller, record


def _check(caller: Caller) -> None:
    if caller.access is Access.NODE:
        raise Forbidden("a node's token cannot sign in to the dashboard")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def cookie_name(port: int) -> str:
    """Browsers send cookies to all ports of a host: two services on one machine need two names."""
    return f"rollyard_login_{port}"


def read_cookie(header: str | None, name: str) -> str | None:
    cookies = SimpleCookie()
    try:
        cookies.load(header or "")
    except CookieError:
        return None
    return cookies[name].value if name in cookies else None


def set_cookie(name: str, value: str, *, lifetime_s: float, is_secure: bool) -> str:
    secure = "; Secure" if is_secure else ""
    return f"{name}={value}; Path=/; Max-Age={int(lifetime_s)}; HttpOnly; SameSite=Strict{secure}"
