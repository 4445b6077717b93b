"""A rollout's session with a resources server: POST requests with the cookies that identify the session.

Every reply may change the cookies, and the next call sends them unchanged, byte for byte (they are signed). They are
stored in a dict that the caller owns: INIT puts it into the rollout's info, so EVAL has the cookies that RUN left. The
cookies give full access to the session, so they are in no message and no log. Calls are serialized, so that each sends
the newest cookies: if a program calls two tools at once, the second waits for the first.

Redirects are not followed. Connections are not reused: the server may just have closed one, and a call that cannot be
sent twice would fail. A reply is read only up to its size limit. As in browsers, cookies of more than 4 KiB, or more
than 50 per reply, are ignored.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.cookies import Morsel

import aiohttp

from rollyard.core import Json
from rollyard.core.json import encode_container

CONNECT_S = 10.0

TRIES = 3
"""For calls that may be sent twice: seeding creates another session, and verifying changes nothing."""

PAUSE_S = 0.5
"""The pause before the second try; twice as long before the third."""

BUSY = (502, 503, 504)
"""What a proxy returns while the server behind it starts."""

EXCERPT_CHARS = 500
"""How much of a reply is in a failure's detail."""


class Unreachable(Exception):
    """There was no HTTP answer. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    @property
    def excerpt(self) -> str:
        """For error messages."""
        return f"status {self.status}: {self.text[:EXCERPT_CHARS]}"


class GymSession:
    """Calls a resources server with the session's cookies. Replies update `cookies` in place."""

    def __init__(self, http: aiohttp.ClientSession, url: str, cookies: dict[str, Json]) -> None:
        self._http = http
        self._url = url
        self._cookies = cookies
        self._turn = asyncio.Lock()

    async def post(self, path: str, body: bytes, *, most_bytes: int) -> Reply:
        """Sends a call once; reads `most_bytes` of the reply at most. The caller sets a timeout. Raises Unreachable."""
        async with self._turn:
            try:
                async with self._http.post(
                    f"{self._url}/{path}", data=body, headers=self._headers(), allow_redirects=False
                ) as reply:
                    for name, cookie in reply.cookies.items():
                        self._keep(name, cookie)
                    return Reply(reply.status, await _read(reply.content, most_bytes))
            except (aiohttp.ClientError, OSError) as error:
                raise Unreachable(f"{type(error).__name__}: {error}") from error

    async def ask(self, path: str, body: bytes, *, most_bytes: int, within_s: float) -> Reply:
        """Sends a call that may be repeated, until it is answered or its time is over. Raises Unreachable."""
        guard = asyncio.timeout(within_s)
        try:
            async with guard:
                for turn in range(1, TRIES):
                    try:
                        reply = await self.post(path, body, most_bytes=most_bytes)
                        if reply.status not in BUSY:
                            return reply
                    except Unreachable:
                        pass
                    await asyncio.sleep(PAUSE_S * turn)
                reply = await self.post(path, body, most_bytes=most_bytes)
        except TimeoutError:
            if not guard.expired():
                raise
            raise Unreachable(f"no answer within {within_s:g} s") from None
        if reply.status in BUSY:
            raise Unreachable(f"{reply.excerpt}, {TRIES} times")
        return reply

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self._cookies:
            headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in self._cookies.items())
        return headers

    def _keep(self, name: str, cookie: Morsel[str]) -> None:
        if _is_over(cookie):
            self._cookies.pop(name, None)
        else:
            self._cookies[name] = cookie.coded_value


def new_http() -> aiohttp.ClientSession:
    """The HTTP client of all sessions in a process. The pipeline's slots limit the number of concurrent calls."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
    )


def encoded(value: Json) -> bytes:
    """ASCII, because half a surrogate pair, which a model may write, has no UTF-8. Raises ValueError for NaN, and
    RecursionError."""
    return json.dumps(value, allow_nan=False, default=encode_container).encode()


async def _read(content: aiohttp.StreamReader, most_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < most_bytes and (chunk := await content.read(most_bytes - len(data))):
        data += chunk
    return bytes(data)


def _is_over(cookie: Morsel[str]) -> bool:
    """Whether the cookie has expired: the server deletes it."""
    if cookie["max-age"]:
        return str(cookie["max-age"]).startswith(("0", "-"))
    try:
        expires = parsedate_to_datetime(cookie["expires"]) if cookie["expires"] else None
    except ValueError:
        return False
    return expires is not None and expires.astimezone(UTC) <= datetime.now(UTC)
